"""The functions of ``torch.distributed.checkpoint.state_dict``, which know torch's wrappers alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.optim_models import quiet
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.checkpoint.state_dict import StateDictOptions

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
#: How the model is sharded: as a whole with blocks apart, or the blocks alone.
FORMS = ("original", "flat", "inside")


def _plain(ranks: Ranks) -> nn.Module:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    return nn.Sequential(nn.Linear(3, 5), block, nn.Linear(5, 2)).to(ranks.device)


def _sharded(ranks: Ranks, form: str, strategy: str) -> nn.Module:
    model = _plain(ranks)
    chosen = ShardingStrategy[strategy]
    if form == "inside":
        assert isinstance(model, nn.Sequential)
        model[1] = wrap_fsdp(model[1], sharding_strategy=chosen, use_orig_params=True)
        return model
    policy = ModuleWrapPolicy({nn.Sequential})
    return wrap_fsdp(model, auto_wrap_policy=policy, sharding_strategy=chosen, use_orig_params=form == "original")


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 12, device=device).view(4, 3)
    model(x).square().sum().backward()
    optimizer.step()


def _assert_values(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6, msg=f"{name}: {{}}".format)
        else:
            assert got[name] == value


@across(2)
@subtests(strategy=STRATEGIES, form=FORMS)
def test_models_are_whole(ranks: Ranks, strategy: str, form: str) -> None:
    """Values of the plain model, taken and given."""
    model, wanted = _sharded(ranks, form, strategy), _plain(ranks).state_dict()
    for options in (
        StateDictOptions(),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
    ):
        with quiet():
            got = functions.get_model_state_dict(model, options=options)
            again, no_state = functions.get_state_dict(model, [], options=options)
        assert got.keys() == again.keys()
        assert not no_state.get("state")
        if options.full_state_dict:
            # As torch's has it: rank 0 alone takes the whole to the host.
            here = not options.cpu_offload or ranks.rank == 0
            _assert_values(got, wanted if here else {})
            _assert_values(again, wanted if here else {})
    other = {name: value + 1 for name, value in wanted.items()}
    for first in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=first)
        given = {name: value.clone() for name, value in other.items()} if ranks.rank == 0 or not first else {}
        with quiet():
            functions.set_model_state_dict(model, given, options=options)
            _assert_values(functions.get_model_state_dict(model, options=options), other)
        other = {name: value + 1 for name, value in other.items()}


@across(2)
@subtests(strategy=STRATEGIES, form=FORMS, whole=[False, True])
def test_optimizers(ranks: Ranks, strategy: str, form: str, whole: bool) -> None:
    """What another optimizer's state was set to steps as the first, by whole values and by each rank's."""
    options = StateDictOptions(full_state_dict=whole)
    runs = []
    state: Any = None
    for _ in range(2):
        model: Any = _sharded(ranks, form, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with quiet():
            if state is None:
                _step(model, optimizer, ranks.device)
                state = functions.get_state_dict(model, optimizer, options=options)
            else:
                functions.set_state_dict(
                    model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options
                )
            state = copy.deepcopy(state)
        for _ in range(2):
            _step(model, optimizer, ranks.device)
        with FSDP.summon_full_params(model):
            runs.append({name: p.detach().clone() for name, p in model.named_parameters()})
    _assert_values(runs[1], runs[0])


@across(2)
def test_optimizers_of_other_parameters_are_served(ranks: Ranks) -> None:
    """An optimizer of the parameters outside of FSDP is served; returns how many there are."""
    model = _sharded(ranks, "inside", "FULL_SHARD")
    assert isinstance(model, nn.Sequential)
    head = model[2]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer, ranks.device)
    state = functions.get_optimizer_state_dict(model, optimizer)["state"]
    for name, parameter in head.named_parameters():
        _assert_values(state[f"2.{name}"], {"momentum_buffer": parameter.grad})
    return len(state)
