"""Optimizer state dicts: older functions, odds and ends, and what is refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from fsdp_parity.optim_models import (
    SHARED,
    STEPS_AFTER,
    STEPS_BEFORE,
    Reference,
    Settings,
    Sharded,
    assert_raises,
    assert_same_groups,
    assert_same_parameters,
    assert_same_state,
    groups_of,
    quiet,
    strategies,
)
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import named, run_subtests
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch import nn


@across(2)
def test_older_functions(ranks: Ranks) -> None:
    """The older functions: the same values, and a warning that names what has replaced each."""

    def case(use_orig_params: bool, strategy: ShardingStrategy, by_input: bool) -> None:
        settings = Settings(use_orig_params, strategy)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        model, optim = sharded.model, sharded.optim
        given: Any = list(groups_of(model, grouped=False)) if by_input else None
        note = "The `optim_input` argument is deprecated" if by_input else None
        full = warned(
            "full_optim_state_dict", "optim_state_dict", note, lambda: FSDP.full_optim_state_dict(model, optim, given)
        )
        assert bool(full) == (ranks.rank == 0)
        everywhere = FSDP.full_optim_state_dict(model, optim, given, rank0_only=False)
        assert_same_state(everywhere["state"], reference.state())
        assert_same_groups(everywhere["param_groups"], reference.groups())
        pieces = warned(
            "sharded_optim_state_dict", "optim_state_dict", None, lambda: FSDP.sharded_optim_state_dict(model, optim)
        )
        reference.train(STEPS_AFTER)

        def load_shard(model: Any, optim: Any, given: Any) -> Any:
            return FSDP.shard_full_optim_state_dict(everywhere, model, given, None if by_input else optim)

        def load_pieces(model: Any, optim: Any, given: Any) -> Any:
            return FSDP.flatten_sharded_optim_state_dict(pieces, model, optim)

        def load_scattered(model: Any, optim: Any, given: Any) -> Any:
            state = full if ranks.rank == 0 else None
            return FSDP.scatter_full_optim_state_dict(state, model, given, None if by_input else optim)

        for name, load in (
            ("shard_full_optim_state_dict", load_shard),
            ("flatten_sharded_optim_state_dict", load_pieces),
            ("scatter_full_optim_state_dict", load_scattered),
        ):
            fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
            again: Any = list(groups_of(fresh.model, grouped=False)) if by_input else None
            expected = note if name != "flatten_sharded_optim_state_dict" else None
            loaded = warned(
                name,
                "optim_state_dict_to_load",
                expected,
                lambda load=load, fresh=fresh, again=again: load(fresh.model, fresh.optim, again),
            )
            fresh.optim.load_state_dict(loaded)
            fresh.train(STEPS_AFTER)
            assert_same_parameters(fresh, reference)

    with quiet():
        run_subtests({"use_orig_params": [False, True], "strategy": strategies(ranks), "by_input": [False, True]}, case)


def warned(current: str, replacement: str, further: str | None, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, if it warns as it should, and points at its caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    found = [each for each in caught if each.category is FutureWarning]
    expected = (
        f"``FullyShardedDataParallel.{current}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{replacement}``. ``FullyShardedDataParallel.{current}`` may be removed after "
        "PyTorch 2.2."
    )
    texts = [str(each.message) for each in found]
    assert expected in texts, texts
    assert all(each.filename == __file__ for each in found), [each.filename for each in found]
    assert any(further in text for text in texts) if further else len(texts) == 1, texts
    return result


@across(2)
def test_state_without_groups_user_state_and_reordered_groups(ranks: Ranks) -> None:
    """State without groups, state of a user's own, groups in another order, and loading at once."""
    with quiet():
        settings = Settings(grouped=True)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        full = sharded.full_state()
        without = {"state": sharded.optim.state_dict()["state"]}
        with sharded.kind(StateDictType.FULL_STATE_DICT):
            converted = FSDP.optim_state_dict(sharded.model, sharded.optim, without)
            assert set(converted) == {"state"}
            assert_same_state(converted["state"], reference.state())
            assert set(FSDP.optim_state_dict_to_load(sharded.model, sharded.optim, converted)) == {"state"}
        own = {**without, "state": {**without["state"], "mine": {"seen": torch.arange(3)}}}
        for rank0_only in (False, True):
            config = FullOptimStateDictConfig(rank0_only=rank0_only)
            with sharded.kind(StateDictType.FULL_STATE_DICT, config), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                converted = FSDP.optim_state_dict(sharded.model, sharded.optim, own)
                loaded = FSDP.optim_state_dict_to_load(sharded.model, sharded.optim, converted)
            assert any(
                "Found a optim state, mine, that FSDP cannot process" in str(each.message) for each in caught
            ) == (ranks.rank == 0 or not rank0_only)
            assert loaded["state"]["mine"]["seen"].tolist() == [0, 1, 2]
        swapped = {"state": full["state"], "param_groups": full["param_groups"][::-1]}
        fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        with fresh.kind(StateDictType.FULL_STATE_DICT):
            FSDP.optim_state_dict_to_load(fresh.model, fresh.optim, swapped, load_directly=True)
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        # The other name of a shared weight does as well.
        renamed = copy.deepcopy(full)
        renamed["state"]["other.weight"] = renamed["state"].pop(SHARED)
        for group in renamed["param_groups"]:
            group["params"] = ["other.weight" if name == SHARED else name for name in group["params"]]
        fresh.load(renamed, StateDictType.FULL_STATE_DICT)
        assert_same_state(fresh.full_state()["state"], full["state"])


class NamedAdam(torch.optim.Adam):
    """Keys its state by the names under which the model shows its parameters."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> None:
        pairs = list(named_parameters)
        self.keys = [name for name, _ in pairs]
        super().__init__([parameter for _, parameter in pairs], lr=lr)

    def state_dict(self) -> dict[str, Any]:
        plain = super().state_dict()
        groups = [
            {**group, "params": [self.keys[position] for position in group["params"]]}
            for group in plain["param_groups"]
        ]
        state = {self.keys[position]: value for position, value in plain["state"].items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = {name: index for index, name in enumerate(self.keys)}
        groups = [
            {**group, "params": sorted(position[name] for name in group["params"])}
            for group in state_dict["param_groups"]
        ]
        state = {position[name]: value for name, value in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": groups})


@across(2)
def test_optimizer_keyed_by_names(ranks: Ranks) -> None:
    """An optimizer whose state dict has the model's own names for keys, prefixes included."""
    for use_orig_params in (False, True):
        with quiet(), named({"use_orig_params": use_orig_params}):
            settings = Settings(use_orig_params)
            reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
            reference.optim = torch.optim.Adam(groups_of(reference.model, grouped=False), lr=0.05)

            def optimize(model: Any) -> NamedAdam:
                return NamedAdam(((name, each) for name, each in model.named_parameters() if each.requires_grad), 0.05)

            sharded.optim = optimize(sharded.model)
            reference.train(STEPS_BEFORE)
            sharded.train(STEPS_BEFORE)
            full = sharded.full_state()
            assert_same_state(full["state"], reference.state())
            fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE)
            fresh.optim = optimize(fresh.model)
            with fresh.kind(StateDictType.FULL_STATE_DICT):
                FSDP.optim_state_dict_to_load(
                    fresh.model, fresh.optim, full, is_named_optimizer=True, load_directly=True
                )
            reference.train(STEPS_AFTER)
            fresh.train(STEPS_AFTER)
            assert_same_parameters(fresh, reference)


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
        for rank0_only in (False, True):
            config = FullOptimStateDictConfig(rank0_only=rank0_only)
            assert_raises(
                ValueError,
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict',
                lambda config=config: sharded.load({"param_groups": []}, full_kind, config),
            )
        for each in (sharded, flat):
            misshapen = copy.deepcopy(full)
            misshapen["state"][SHARED]["exp_avg"] = torch.zeros(7, 8)
            assert_raises(
                ValueError,
                "does not have same shape as its parameter: torch.Size([7, 8]) torch.Size([7, 7])",
                lambda each=each, state=misshapen: each.load(state, full_kind),
            )
            unknown = copy.deepcopy(full)
            unknown["param_groups"][0]["params"][0] = "nobody"
            assert_raises(
                KeyError, "Can't find nobody from [", lambda each=each, state=unknown: each.load(state, full_kind)
            )
        by_position = {"state": {0: {}}, "param_groups": []}
        assert_raises(KeyError, "rekey_optim_state_dict", lambda: sharded.load(by_position, full_kind))
        uneven = copy.deepcopy(full)
        uneven["state"]["first.bias"]["step"] += 1
        assert_raises(ValueError, "must have scalar state with the same value", lambda: flat.load(uneven, full_kind))
        model, optim = sharded.model, sharded.optim
        bad: list[tuple[Any, type[BaseException], str]] = [
            (5, TypeError, "Optimizer input should be an iterable of Tensors or dicts, but got 5"),
            ([], ValueError, "Optimizer input should not be empty"),
            ([next(model.parameters()), {}], TypeError, "Optimizer input should be an iterable of Tensors or dicts"),
            (
                [{"lr": 1}],
                AssertionError,
                'A parameter group should map "params" to a list of the parameters in the group',
            ),
        ]
        for given, kind, words in bad:
            assert_raises(kind, words, lambda given=given: FSDP.full_optim_state_dict(model, optim, given))
        stranger = torch.optim.Adam([nn.Parameter(torch.zeros(2, 3))])
        assert_raises(
            KeyError, "Can't find a parameter of shape (2, 3)", lambda: FSDP.optim_state_dict(model, stranger)
        )
        mixed = {"state": {0: {}, "first.bias": {}}, "param_groups": []}
        assert_raises(
            ValueError,
            "Invalid parameter keys",
            lambda: FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, model, optim=optim),
        )
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
        # State that is not of its parameter's shape, on one rank.
        given_state = copy.deepcopy(sharded.optim.state_dict())
        if ranks.rank == 1:
            next(iter(given_state["state"].values()))["exp_avg"] = torch.zeros(3, device=ranks.device)
        assert_raises(
            ValueError,
            "on rank 1. Only state of the parameter's own shape",
            lambda: FSDP.optim_state_dict(model, optim, given_state),
        )


@across(2)
def test_strides_and_recorded_names(ranks: Ranks) -> None:
    """State keeps its parameter's strides, and an optimizer that records names has those of the unwrapped model saved
    and its own loaded.
    """
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
                    assert value.stride() == parameter.stride()
            group = saved["param_groups"][0]
            assert group["params"] == group["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
            before = copy.deepcopy(optim.state_dict())
            loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
            assert loaded["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
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
