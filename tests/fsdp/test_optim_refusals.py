"""Optimizer state dicts: what torch's functions cannot know, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp_parity.optim_models import SHARED, STEPS_BEFORE, Settings, Sharded, assert_raises, quiet
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import named
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp import FullyShardedDataParallel, StateDictType
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP


@across(2)
def test_refusals(ranks: Ranks) -> None:
    """Bad input, refused on every rank alike and before anything is sent."""
    full_kind = StateDictType.FULL_STATE_DICT
    with quiet():
        sharded = Sharded(ranks, Settings())
        sharded.train(1)
        full = sharded.full_state()
        flat = Sharded(ranks, Settings(use_orig_params=False))
        flat.train(1)
        assert_raises(
            ValueError,
            '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict',
            lambda: sharded.load({"param_groups": []}, full_kind),
        )
        for each in (sharded, flat):
            misshapen = copy.deepcopy(full)
            misshapen["state"][SHARED]["exp_avg"] = torch.zeros(7, 8)
            assert_raises(
                ValueError,
                "does not have same shape as its parameter: torch.Size([7, 8]) torch.Size([7, 7])",
                lambda each=each, state=misshapen: each.load(state, full_kind),
            )
        uneven = copy.deepcopy(full)
        uneven["state"]["first.bias"]["step"] += 1
        assert_raises(ValueError, "must have scalar state with the same value", lambda: flat.load(uneven, full_kind))
        # State on some ranks only: named for each rank that lacks it, and raised on all.
        given_state = flat.optim.state_dict()
        if ranks.rank == 1:
            del given_state["state"][0]
        words = "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer"
        assert_raises(RuntimeError, words, lambda: FSDP.optim_state_dict(flat.model, flat.optim, given_state))
        assert_raises(
            RuntimeError,
            "Rank 1 is missing states for the parameters: [('",
            lambda: FSDP.optim_state_dict(flat.model, flat.optim, given_state),
        )


@across(2)
def test_strides(ranks: Ranks) -> None:
    """Torch's function would load other elements of a parameter in channels-last, and is kept from it by name."""
    for use_orig_params in (False, True):
        with quiet(), named({"use_orig_params": use_orig_params}):
            torch.manual_seed(3)
            plain = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5))
            plain = plain.to(ranks.device)
            model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
            optim = torch.optim.Adam(model.named_parameters())
            expected = torch.optim.Adam(plain.named_parameters())
            inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(9)).to(ranks.device)
            for module, each in ((model, optim), (plain, expected)):
                for _ in range(STEPS_BEFORE):
                    each.zero_grad()
                    module(inputs).pow(3).mean().backward()
                    each.step()
            saved = FSDP.optim_state_dict(model, optim)
            for name, parameter in plain.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    value = saved["state"][name][key]
                    torch.testing.assert_close(value, expected.state[parameter][key].cpu(), rtol=1e-4, atol=1e-6)
            assert saved["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
            if use_orig_params and ranks.rank == 0:
                with pytest.raises(UnsupportedError, match=r"'0\.weight' \(rank 0\), which is .* loaded by polyshard"):
                    TorchFSDP.optim_state_dict_to_load(model, optim, copy.deepcopy(saved))
            before = copy.deepcopy(optim.state_dict())
            loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
            optim.load_state_dict(loaded)
            after = optim.state_dict()
            assert after["state"].keys() == before["state"].keys()
            for position, entries in before["state"].items():
                for key, value in entries.items():
                    torch.testing.assert_close(after["state"][position][key], value, rtol=0, atol=0)


CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _sharded(model: nn.Module, use_orig_params: bool = False) -> FullyShardedDataParallel:
    group = FakeCollectives(PluginContext("fake", CPU), 0, 2)
    return FullyShardedDataParallel(model, process_group=group, device_id=CPU, use_orig_params=use_orig_params)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """How far the parameters went."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    return sum((a - b).abs().sum().item() for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_was_made_before_is_refused_at_its_first_step() -> None:
    model = _model()
    early = torch.optim.AdamW(model.parameters())
    sharded = _sharded(model)
    words = r"AdamW holds '0.weight', .* \(rank 0, use_orig_params=False\): it would never be updated. Make .* behind"
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            _step(sharded, early)
    assert _step(sharded, torch.optim.AdamW(sharded.parameters())) > 0


def test_an_optimizer_that_got_such_parameters_later_is_refused_too() -> None:
    plain, model = _model(), _model()
    early = list(model.parameters())
    sharded = _sharded(model)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    assert _step(sharded, optimizer) > 0
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert _step(plain, other) > 0
    optimizer.add_param_group({"params": early[2:]})
    with pytest.raises(ConfigError, match=r"'2\.weight'"):
        _step(sharded, optimizer)


def test_what_keeps_its_parameters_keeps_its_optimizer() -> None:
    model = _model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    assert _step(_sharded(model, use_orig_params=True), early) > 0
    frozen = _model().requires_grad_(False)
    frozen.append(nn.Linear(2, 2))
    mixed = torch.optim.SGD(frozen.parameters(), lr=0.1)
    for index in (0, 2):
        frozen[index] = _sharded(frozen[index])
    assert _step(frozen, mixed) > 0
