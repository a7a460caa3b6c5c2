"""The functions of ``torch.distributed.checkpoint.state_dict``, which know torch's wrappers alone."""

from __future__ import annotations

import copy
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_parity.models import expected_warnings, wrap_fsdp
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import run_subtests, subtests
from polyshard.errors import UnsupportedError
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy, StateDictType
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
        with expected_warnings():
            got = functions.get_model_state_dict(model, options=options)
            again, no_state = functions.get_state_dict(model, [], options=options)
        # As torch's has it: rank 0 alone takes the whole to the host.
        here = not (options.full_state_dict and options.cpu_offload) or ranks.rank == 0
        _assert_values(got, wanted if here else {})
        _assert_values(again, wanted if here else {})
        assert not no_state.get("state")
    other = {name: value + 1 for name, value in wanted.items()}
    with expected_warnings():
        functions.set_model_state_dict(model, {name: value.clone() for name, value in other.items()})
        _assert_values(functions.get_model_state_dict(model), other)


@across(2)
def test_pieces_are_refused_by_name(ranks: Ranks) -> None:
    """What would be wrong is refused, and nothing has changed."""
    axes = {"strategy": STRATEGIES, "form": FORMS}
    run_subtests(axes, _refusals, ranks)
    run_subtests(axes, _whole_values, ranks)


def _refusals(ranks: Ranks, strategy: str, form: str) -> None:
    model = _sharded(ranks, form, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(model, optimizer, ranks.device)
    before = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    calls: dict[str, Callable[[], Any]] = {
        "get_optimizer_state_dict": lambda: functions.get_optimizer_state_dict(model, optimizer),
        "get_state_dict": lambda: functions.get_state_dict(model, [optimizer]),
        "set_optimizer_state_dict": lambda: functions.set_optimizer_state_dict(
            model, optimizer, {"state": {}, "param_groups": []}
        ),
        "set_state_dict": lambda: functions.set_state_dict(
            model, optimizer, model_state_dict=_plain(ranks).state_dict(), optim_state_dict={"state": {}}
        ),
    }
    for name, call in calls.items():
        words = rf"state_dict\.{name} does not know polyshard_fsdp .* on rank {ranks.rank}\).*optim_state_dict\("
        with pytest.raises(UnsupportedError, match=words):
            call()
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            torch.testing.assert_close(value, before[parameter][key])
    _step(model, optimizer, ranks.device)


def _whole_values(ranks: Ranks, strategy: str, form: str) -> None:
    model, wanted = _sharded(ranks, form, strategy), _plain(ranks).state_dict()
    for option in ("full_state_dict", "broadcast_from_rank0"):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=option == "broadcast_from_rank0")
        with pytest.raises(UnsupportedError, match=r"set_model_state_dict with full_state_dict=True does not know"):
            functions.set_model_state_dict(model, {name: value + 1 for name, value in wanted.items()}, options=options)
    with expected_warnings():
        _assert_values(functions.get_model_state_dict(model), wanted)


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


@across(2)
@subtests(form=("original", "flat"))
def test_what_the_refusal_advises_works(ranks: Ranks, form: str) -> None:
    """What the refusal says to do: saved by ``torch.distributed.checkpoint``, loaded into another model, trained on."""
    runs = []
    folder = [tempfile.mkdtemp() if ranks.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    for resumed in (False, True):
        model: Any = _sharded(ranks, form, "FULL_SHARD")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if not resumed:
            _step(model, optimizer, ranks.device)
        if resumed:
            # Gives the optimizer the state that is loaded into.
            _step(model, optimizer, ranks.device)
        with warnings.catch_warnings():
            # The state dict type is deprecated, and so are torch's classes of tensors.
            warnings.simplefilter("ignore", FutureWarning)
            FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
            saved = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
            if not resumed:
                dcp.save(saved, checkpoint_id=Path(folder[0]))
            else:
                dcp.load(saved, checkpoint_id=Path(folder[0]))
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved["optimizer"]))
        for _ in range(2):
            _step(model, optimizer, ranks.device)
        with FSDP.summon_full_params(model):
            runs.append({name: p.detach().clone() for name, p in model.named_parameters()})
    _assert_values(runs[1], runs[0])
    dist.barrier()
    if ranks.rank == 0:
        shutil.rmtree(folder[0])
