"""What programs read and call of FSDP2's private state: as ``_state.py`` lists it, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from fsdp2_models import batches, beside_torch, copied, cpu_mesh, loss_of, make, shard_all, train, wholes
from processes import KeptRanks
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor

#: Torch's own, which answers for modules of both.
_state_of: Callable[[Any], Any] = torch.distributed.fsdp.fully_shard.state  # type: ignore[attr-defined]


def _groups(state: Any) -> list[Any]:
    """By the name that all versions of torch have."""
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _set(model: Any, reduces: bool) -> None:
    model.set_is_last_backward(reduces)
    model.set_reshard_after_backward(reduces)
    model.set_requires_gradient_sync(reduces)


def _a_stage(package: ModuleType) -> Any:
    """As OLMo-core ends a schedule: by the groups alone. Parameters of the root are in a group, or there is none."""
    told = []
    for model in (
        shard_all(package, make()),
        package.fully_shard(torch.nn.Sequential(_sharded(package)), mesh=cpu_mesh()),
    ):
        for _ in range(2):
            _set(model, False)
            for words in batches(2):
                loss_of(model, words).backward()
            _set(model, True)
            for state in _state_of(model)._state_ctx.all_states:
                for group in _groups(state):
                    group.post_backward()
            told.append(copied([each.grad.full_tensor() for each in model.parameters()]))
            model.zero_grad()
        # The next ends by itself.
        told += [train(model, 1), wholes(model)]
    return told


def _sharded(package: ModuleType) -> Any:
    return shard_all(package, make())


def _single_modules(package: ModuleType) -> Any:
    """As Automodel ends a schedule, over all sharded modules. The one around them may not be sharded."""
    told: list[Any] = []
    for whole in (False, True):
        model: Any = make()
        modules = [*model.blocks, model.embedding, model.norm, model.head, *([model] if whole else [])]
        for module in modules:
            package.fully_shard(module, mesh=cpu_mesh(), mp_policy=package.MixedPrecisionPolicy(torch.float64))
        for words in batches(2):
            for module in modules:
                _set(module, False)
            loss_of(model, words).backward()
        ends = []
        for module in modules:
            _set(module, True)
            for state in _state_of(module)._state_ctx.all_states:
                for group in _groups(state):
                    group.post_backward()
            # FSDP2 of torch 2.15 ends a backward once.
            if torch.__version__ < (2, 15) or _state_of(module)._is_root:
                ends.append(_state_of(module)._root_post_backward_final_callback)
        for end in ends:
            end()
        told.append(copied([each.grad.full_tensor() for each in model.parameters()]))
        assert model.head._get_fsdp_state()._mp_policy.param_dtype is torch.float64
        assert [_get_module_fsdp_state(each) is None for each in (model.head, torch.nn.Linear(1, 1))] == [False, True]
    return told


def _reshards_by_hand(package: ModuleType) -> Any:
    """As verl sets it, of torch's own function's answers; and as it offloads a model."""
    model: Any = shard_all(package, make())
    shown: list[Any] = []
    for reshards in (False, True, False):
        for module in (*model.blocks, model.embedding, model):
            state = module._get_fsdp_state()
            state._auto_reshard_after_forward = False
            for group in _groups(state):
                group.post_forward_mesh_info = _get_post_forward_mesh_info(reshards, group.mesh_info)
        loss = loss_of(model, next(batches(1)))
        shown.append([isinstance(each, DTensor) for block in model.blocks for each in block.parameters()])
        loss.backward()
        model.zero_grad()
    for module in model.modules():
        for group in _groups(_get_module_fsdp_state(module)) if _get_module_fsdp_state(module) else ():
            group._training_state = None
    model.reshard()
    return shown, wholes(model)


def _which_are_sharded(package: ModuleType) -> Any:
    """As VeOmni asks, and PyTorch's tests."""
    model: Any = shard_all(package, make())
    model.note = torch.nn.Parameter(torch.ones(1))
    state = model._get_fsdp_state()
    state._lazy_init()
    states = state._state_ctx.all_states
    assert states == [each._get_fsdp_state() for each in (model, model.embedding, *model.blocks)]
    assert [each._is_root for each in states] == [True, False, False, False]
    found = {id(each.sharded_param) for its in states for group in _groups(its) for each in group.fsdp_params}
    return [name for name, each in model.named_parameters() if id(each) in found]


@pytest.mark.parametrize(
    "body", [_a_stage, _single_modules, _reshards_by_hand, _which_are_sharded], ids=lambda body: body.__name__
)
def test_beside_torch(ranks: KeptRanks, body: Callable[..., Any]) -> None:
    ranks.run(2, beside_torch, body)
