"""Whole parameters outside of compute: ``summon_full_params``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from polyshard.errors import StepAssertionError, UnsupportedError
from polyshard.extension import ManagedParameter, UnitState, gather_whole, own_part, view_of, write_back
from polyshard.interfaces import ReduceOp
from torch import nn

from ._common_utils import FLAT_PARAM as FLAT_PARAM
from ._common_utils import _get_fsdp_states, warn
from ._state import FSDPInstance
from ._unit import FlatUnit
from .api import ShardingStrategy


@contextmanager
def _unshard_params(
    module: nn.Module,
    recurse: bool,
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> Iterator[None]:
    """Inside, the parameters of the FSDP instances in ``module`` are whole and in their original dtype.

    Raises:
        UnsupportedError: (a ``NotImplementedError``) a combination that is not served.
        StepAssertionError: (an ``AssertionError``) inside a forward, a backward, or another such context.
    """
    instances: list[FSDPInstance] = _get_fsdp_states(module)
    if not recurse:
        instances = [
            each for each in instances if each._module_state.module is module or each._module_state.inner is module
        ]
    for each in instances:
        _refuse_arguments(each, writeback, rank0_only, offload_to_cpu, with_grads)
    for each in instances:
        # From the outermost on: it takes those inside with it.
        each._become_root()
        _refuse_busy(each)
    holders = [each for each in instances if each._handle is not None]
    for each in holders:
        unit = _unit_of(each)
        unit.held.adopt_changes()
        if with_grads:
            _refuse_unreduced(unit)
    for each in instances:
        each._summoned = True
    opened: list[_Summoned] = []
    try:
        for each in holders:
            shows = not rank0_only or each.rank == 0
            opened.append(_Summoned(_unit_of(each), shows, offload_to_cpu, with_grads))
        yield
        if writeback:
            for summoned in opened:
                summoned.write_back()
    finally:
        for summoned in opened:
            summoned.close()
        for each in instances:
            each._summoned = False


class _Summoned:
    """One unit's whole parameters, from gathering them to letting go of them."""

    def __init__(self, unit: FlatUnit, shows: bool, offload_to_cpu: bool, with_grads: bool) -> None:
        self._unit = unit
        #: The parameters' own gradients, while they have whole ones or none; None where they keep theirs.
        self._shelved: list[torch.Tensor | None] | None = None
        self._whole_gradients: torch.Tensor | None = None
        if (
            not unit.permanent
            and unit.gathered.state is not UnitState.SHARDED
            and unit.gathered.buffer.dtype != unit.spec.master_dtype
        ):
            # Two whole copies at once would be the most memory that the model ever needs. Backward gathers it again.
            unit.gathered.release()
        whole = gather_whole(unit, unit.master)
        gradients = None if _keeps_gradients(unit) or not with_grads else _gather_gradients(unit)
        if not shows:
            return
        if offload_to_cpu:
            whole = whole.cpu()
        elif unit.handle._offload_params and whole.data_ptr() == unit.master.data_ptr():
            # What is offloaded is never written to but by writeback, where it is computed with in host memory as well.
            whole = whole.clone()
        unit.whole_for_user = whole
        if not _keeps_gradients(unit):
            # A gradient of the shard's shape on a whole parameter would be refused by autograd.
            self._shelved = [parameter.grad for parameter in unit.held.tensors]
            for parameter in unit.held.tensors:
                parameter.grad = None
        unit.handle._use_unsharded_views(as_params=True)
        if gradients is not None:
            self._whole_gradients, present = gradients
            for managed, slot, has in zip(unit.parameters, unit.layout.slots, present, strict=True):
                if has:
                    gradient = view_of(self._whole_gradients, slot.shape, slot.stride, slot.offset)
                    shown = gradient if managed.part is None else managed.part.as_leaf(gradient)
                    _shown(managed).grad = shown

    def write_back(self) -> None:
        """Keep this rank's part of what is there now."""
        unit, whole = self._unit, self._unit.whole_for_user
        if whole is None:
            return
        write_back(unit, whole)
        with torch.no_grad():
            self._write_gradients_back()

    def _write_gradients_back(self) -> None:
        unit, whole, shelved = self._unit, self._whole_gradients, self._shelved
        if whole is None or shelved is None:
            return
        for index, (managed, slot) in enumerate(zip(unit.parameters, unit.layout.slots, strict=True)):
            view, current = view_of(whole, slot.shape, slot.stride, slot.offset), _shown(managed).grad
            if current is None:
                shelved[index] = None
                continue
            if managed.part is not None:
                current = managed.part.own(current)
            if current.data_ptr() != view.data_ptr():
                view.copy_(current)
        own = dict(zip(unit.held.tensors, shelved, strict=True))
        mine = own_part(unit, whole)
        for each in unit.held.gradient_targets:
            gradient = own[each.parameter]
            if gradient is not None:
                gradient.copy_(view_of(mine, each.shape, each.stride, each.offset))

    def close(self) -> None:
        unit = self._unit
        if unit.whole_for_user is None:
            return
        if self._shelved is not None:
            for parameter in unit.held.tensors:
                parameter.grad = None
        unit.withdraw_whole()
        for parameter, gradient in zip(unit.held.tensors, self._shelved or (), strict=False):
            unit.gradients.show(parameter, gradient)
        unit.gathered.order_gathers_after_writes()


def _keeps_gradients(unit: FlatUnit) -> bool:
    """Whether the parameters are whole outside of the context too, and their gradients with them."""
    parts = any(each.part is not None for each in unit.parameters)
    return unit.ranks.owner is None and not unit.handle._offload_params and not parts


def _shown(parameter: ManagedParameter) -> torch.Tensor:
    """What modules hold while the parameter is whole."""
    if parameter.part is None:
        return parameter.original
    module, key = parameter.sites[0]
    shown = module._parameters[key]
    assert shown is not None
    return shown


def _gather_gradients(unit: FlatUnit) -> tuple[torch.Tensor, list[bool]]:
    """The whole flat gradient, and which parameters have one on any rank."""
    shard, device = unit.ranks.owner, unit.spec.device
    present = torch.tensor([float(parameter.grad is not None) for parameter in unit.held.tensors], device=device)
    if shard is not None:
        shard.all_reduce(present, op=ReduceOp.MAX).wait()
    own = unit.gradients.reduced_shard()
    if own is None:
        own = torch.zeros(unit.layout.shard_numel, dtype=unit.dtypes.grad, device=unit.master.device)
    whole = gather_whole(unit, own)
    if shard is None and whole.data_ptr() == own.data_ptr():
        whole = whole.clone()
    return whole, [bool(each) for each in present.tolist()]


def _unit_of(instance: FSDPInstance) -> FlatUnit:
    assert instance._flat_unit is not None
    return instance._flat_unit


def _refuse_arguments(
    instance: FSDPInstance, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> None:
    if with_grads and (offload_to_cpu or not instance._use_orig_params):
        raise UnsupportedError(
            f"with_grads={with_grads}, use_orig_params={instance._use_orig_params}, offload_to_cpu={offload_to_cpu} "
            f"is not supported yet (rank {instance.rank}). Construct with use_orig_params=True, and leave "
            "offload_to_cpu out."
        )
    handle = instance._handle
    if offload_to_cpu and handle is not None and handle.sharding_strategy is ShardingStrategy.NO_SHARD:
        raise UnsupportedError(
            f"offload_to_cpu=True and NO_SHARD is not supported yet (rank {instance.rank}). Copy the parameters, which "
            "are whole already."
        )
    if writeback and rank0_only:
        raise UnsupportedError(
            f"writeback=True and rank0_only=True is not supported yet (rank {instance.rank}). Pass writeback=False."
        )
    if offload_to_cpu and not rank0_only:
        warn(
            "offload_to_cpu=True and rank0_only=False may result in theunsharded parameters being redundantly copied "
            "to CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
        )


def _refuse_unreduced(unit: FlatUnit) -> None:
    if unit.gradients.shows_unreduced and not _keeps_gradients(unit):
        raise StepAssertionError(
            f"with_grads=True while the gradients of unit '{unit.name}' on rank {unit.ranks.world.rank} are those of a "
            "backward under no_sync(), whole and not reduced. Read them outside, or after a backward that synchronises."
        )


def _refuse_busy(instance: FSDPInstance) -> None:
    root = instance._root
    if root is not None:
        root.leave_failed_backward()
    where = f"(rank {instance.rank}, '{instance._module_state.name or '(root)'}')"
    if instance._module_state.busy:
        raise StepAssertionError(f"Cannot manually unshard parameters during forward/backward {where}. Leave it first.")
    if instance._summoned:
        raise StepAssertionError(
            f"Cannot manually unshard parameters when already unsharding parameters {where}. Use the context that is "
            "open."
        )
