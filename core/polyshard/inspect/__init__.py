"""The one door to a sharded model: its units, parameters, ranks and phase.

State, optimizers, checkpoints, tools and trainers see a sharded model through these handles, and never import the
runtime. A handle refers to the runtime's object and keeps no copy: what it says is true when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..api import outermost_root, root_around
from ..functions.block_states import (
    Blocks,
    Role,
    blocks_of,
    put_together,
    refuse_plain_kernels,
    role_of,
    state_name_of,
    taken_apart,
)
from ..functions.optimizers import NOT_BY_ELEMENT
from ..functions.whole import ToSome
from ..planning.extensions import Insides, inner_tensors
from ..planning.layout import Piece, Slot
from ..planning.names import saved_buffers, saved_name, saved_parameters, without_wrappers
from ..planning.parts import TensorPart, is_dtensor, local_of, placed_as, whole_tensors
from ..planning.plan import MODULE_STATE_ATTRIBUTE, refuse_sharded
from ..planning.plan import refuse_unshardable as refuse_unshardable_parameters
from ..planning.values import send_from_first
from ..runtime.backward_step import copy_to_step
from ..runtime.grouped import GroupedState
from ..runtime.live_roots import live_roots
from ..runtime.module_state import ModuleState
from ..runtime.root import root_of
from ..runtime.states import Phase
from ..runtime.streams import Waits
from ..setup.build import refuse_broken
from ..setup.request import Initializer, refuse_torch_sharded
from .model import RecordedModel, ShardedModel, WholeFlats
from .unit import ShardedParameter, ShardedUnit


@dataclass(frozen=True, slots=True)
class LocatedParameter:
    """Where a parameter of a sharded model lies."""

    model: ShardedModel
    unit: ShardedUnit
    position: int | None
    """Which of the unit's parameters; None of a flat parameter, which stands for all of them."""
    order: tuple[int, int]
    """Of the model and of the unit: the same on every rank, whatever the order in which parameters were given."""


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` itself was sharded; not what is inside it."""
    return MODULE_STATE_ATTRIBUTE in module.__dict__


def sharded_model(module: nn.Module) -> ShardedModel | None:
    """The model that ``module`` is a sharded module of, closed or not; None where polyshard did not shard ``module``.

    Modules that a drop-in sharded are not its own: they form a model at their first forward.
    """
    state = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
    if type(state) is ModuleState or isinstance(state, GroupedState):
        return ShardedModel(root_of(state))
    return None


def units_in(model: nn.Module) -> Iterator[ShardedUnit]:
    """The units of every sharded module in ``model``, in module order."""
    for state in dict.fromkeys(module.__dict__.get(MODULE_STATE_ATTRIBUTE) for module in model.modules()):
        yield from map(ShardedUnit, () if state is None else state.units)


def refuse_unshardable(model: nn.Module, rank: int) -> None:
    """Raise AlreadyShardedError or ParameterError where ``shard`` would refuse ``model``, without changing it."""
    refuse_torch_sharded(model)
    refuse_sharded(model, rank)
    refuse_unshardable_parameters(model, rank=rank)


def outermost_model(model: nn.Module, call: str) -> ShardedModel:
    """The sharded model whose outermost module is ``model``; ``call`` begins messages.

    Raises StateError: ``model`` is not the outermost sharded module, or was closed.
    """
    return ShardedModel(outermost_root(model, call))


def idle_model(model: nn.Module, call: str) -> ShardedModel:
    """``outermost_model`` between steps, with the user's changes to parameters taken over.

    Raises StateError: inside a step or ``unsharded()``; ParameterChangedError: as ``ShardedModel.adopt_changes``.
    """
    refuse_broken(model, call)
    found = outermost_model(model, call)
    found.refuse_inside_step(call)
    # All modules: nobody may take one rank's values for the model's.
    found.adopt_changes(trains=True, all_modules=True)
    return found


def savable_model(model: nn.Module, call: str) -> ShardedModel:
    """``idle_model``, for what saves or loads whole values.

    Raises UnsupportedError, too: as ``ShardedModel.refuse_cut_rows`` and ``refuse_unnamed``.
    """
    found = idle_model(model, call)
    found.refuse_cut_rows(call)
    found.refuse_unnamed(call)
    return found


def savable_part(module: nn.Module, call: str) -> tuple[ShardedModel, nn.Module]:
    """The model that ``module`` is or is inside of, as ``savable_model`` gives it, and the module without a wrapper.

    Raises StateError, ParameterChangedError, UnsupportedError: as ``savable_model``, and where no sharded model has it.
    """
    root, module = root_around(module, call)
    return savable_model(root.module_states[0].module, call), module


def models() -> list[ShardedModel]:
    """The sharded models of this process, in the order in which they were made."""
    return list(map(ShardedModel, live_roots.roots()))


def step_apart(optimizer: torch.optim.Optimizer) -> None:
    """Step by ``optimizer``, which ``copy_to_step`` made.

    Raises UnsupportedError: its kernels cannot step what the other one holds.
    """
    located = live_roots.find([parameter for group in optimizer.param_groups for parameter in group["params"]])
    refuse_plain_kernels(optimizer, [each for each in located if each is not None])
    optimizer.step()


def find(tensors: Sequence[torch.Tensor]) -> list[LocatedParameter | None]:
    """For each of ``tensors`` where it lies; None for what is no parameter of a sharded model."""
    found = live_roots.find(tensors)
    handles = {each.root: ShardedModel(each.root) for each in found if each is not None}
    return [
        each and LocatedParameter(handles[each.root], ShardedUnit(each.unit), each.slot, each.order) for each in found
    ]
