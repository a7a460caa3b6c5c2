"""Whole parameters outside of compute: ``summon_full_params``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from polyshard.engine import _torch_private
from polyshard.engine.buffer import view_of
from polyshard.errors import ParameterChangedError, StepAssertionError, UnsupportedError
from torch import nn

from ._flat_param import HandleShardingStrategy
from ._traversal_utils import _get_fsdp_states

if TYPE_CHECKING:
    from ._state import FSDPInstance
    from ._unit import FlatUnit


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

    Args:
        module: An FSDP instance, or a module with some inside.
        recurse: Take those inside too, and not the outermost alone.
        writeback: Keep what was changed inside.
        rank0_only: On other ranks parameters stay sharded.
        offload_to_cpu: The whole parameters are in host memory.
        with_grads: Gradients are whole too; ``use_orig_params=True`` only.

    Raises:
        UnsupportedError: (a ``NotImplementedError``) a combination that is not served.
        StepAssertionError: (an ``AssertionError``) inside a forward, a backward, or another such context.
    """
    instances: list[FSDPInstance] = _get_fsdp_states(module)
    if not recurse:
        instances = [each for each in instances if each._stage.module is module or each._stage.inner is module]
    for each in instances:
        _refuse_arguments(each, writeback, rank0_only, offload_to_cpu, with_grads)
    for each in instances:
        _refuse_busy(each)
    holders = [each for each in instances if each._handle is not None]
    for each in holders:
        unit = _unit_of(each)
        unit.take_up_changes()
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
        self._shows = shows
        self._gradients: list[torch.Tensor | None] | None = None
        self._whole_gradients: torch.Tensor | None = None
        whole = gather_whole(unit, unit.master)
        gradient = _gather_gradients(unit) if with_grads else None
        if not shows:
            return
        if offload_to_cpu:
            whole = whole.cpu()
            gradient = gradient.cpu() if gradient is not None else None
        unit.whole_for_user = whole
        # A gradient of the shard's shape on a whole parameter would be refused by autograd.
        self._gradients = [parameter.grad for parameter in unit.originals.tensors]
        for parameter in unit.originals.tensors:
            parameter.grad = None
        unit.handle._use_unsharded_views(as_params=True)
        if gradient is not None:
            self._whole_gradients = gradient
            for managed, slot, had in zip(unit.parameters, unit.layout.slots, self._gradients, strict=True):
                if had is not None or managed.original.requires_grad:
                    managed.original.grad = view_of(gradient, slot.shape, slot.stride, slot.offset)

    def write_back(self) -> None:
        """Keep this rank's part of what is there now."""
        unit, whole = self._unit, self._unit.whole_for_user
        if whole is None:
            return
        start = unit.grid.shard_rank * unit.layout.shard_numel
        with torch.no_grad():
            for managed, slot in zip(unit.parameters, unit.layout.slots, strict=True):
                module, key = managed.sites[0]
                current = module._parameters.get(key)
                view = view_of(whole, slot.shape, slot.stride, slot.offset)
                if current is None or current.shape != view.shape:
                    got = None if current is None else tuple(current.shape)
                    raise ParameterChangedError(
                        f"Cannot writeback when the parameter shape changes\nExpects {slot.shape} but got {got} for "
                        f"'{managed.names[0]}' on rank {unit.grid.world.rank}. Keep the whole shape."
                    )
                if current.data_ptr() != view.data_ptr():
                    view.copy_(current)
            if whole.data_ptr() != unit.master.data_ptr():
                unit.master.copy_(whole[start : start + unit.layout.shard_numel])
            if self._whole_gradients is not None and self._gradients is not None:
                for recipient in unit.originals.recipients:
                    had = next(
                        each
                        for parameter, each in zip(unit.originals.tensors, self._gradients, strict=True)
                        if parameter is recipient.parameter
                    )
                    if had is not None:
                        begin = start + recipient.offset
                        had.view(-1).copy_(self._whole_gradients[begin : begin + recipient.numel])

    def close(self) -> None:
        """Let go of the whole parameters."""
        unit = self._unit
        if unit.whole_for_user is None:
            return
        for parameter in unit.originals.tensors:
            parameter.grad = None
        unit.withdraw_whole()
        for parameter, gradient in zip(unit.originals.tensors, self._gradients or (), strict=True):
            parameter.grad = gradient


def gather_whole(unit: FlatUnit, own: torch.Tensor) -> torch.Tensor:
    """The whole flat tensor of which each rank has ``own`` (``[shard_numel]``), on the compute device.

    Where nothing is cut and the master is there already, the master itself.
    """
    shard = unit.grid.shard
    with torch.inference_mode(False), torch.no_grad():
        device = unit.spec.device if unit.parks or shard is not None else own.device
        if shard is None:
            return own.to(device)
        whole = torch.empty(unit.layout.padded_numel, dtype=own.dtype, device=device)
        mine = whole.narrow(0, unit.grid.shard_rank * unit.layout.shard_numel, unit.layout.shard_numel)
        mine.copy_(own)
        shard.all_gather(whole, mine).wait()
    return whole


def _gather_gradients(unit: FlatUnit) -> torch.Tensor:
    own = torch.zeros(unit.layout.shard_numel, dtype=unit.dtypes.grad, device=unit.master.device)
    for recipient in unit.originals.recipients:
        gradient = recipient.parameter.grad
        if gradient is not None:
            view_of(own, recipient.shape, recipient.stride, recipient.offset).copy_(gradient)
    return gather_whole(unit, own)


def _unit_of(instance: FSDPInstance) -> FlatUnit:
    assert instance._handle is not None
    assert instance._handle.unit is not None
    return instance._handle.unit


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
    if offload_to_cpu and handle is not None and handle.sharding_strategy is HandleShardingStrategy.NO_SHARD:
        raise UnsupportedError(
            f"offload_to_cpu=True and NO_SHARD is not supported yet (rank {instance.rank}). Copy the parameters, which "
            "are whole already."
        )
    if writeback and rank0_only:
        raise UnsupportedError(
            f"writeback=True and rank0_only=True is not supported yet (rank {instance.rank}). Pass writeback=False."
        )
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu=True and rank0_only=False may result in theunsharded parameters being redundantly copied "
            "to CPU memory for GPUs sharing the same CPU memory, which risks CPU OOM. We recommend using "
            "offload_to_cpu=True with rank0_only=True.",
            stacklevel=5,
        )


def _refuse_busy(instance: FSDPInstance) -> None:
    root = instance._root
    if root is not None and root.backward_failed and not _torch_private.in_backward():
        root.abandon()
    where = f"(rank {instance.rank}, '{instance._stage.name or '(root)'}')"
    if instance._stage.busy:
        raise StepAssertionError(f"Cannot manually unshard parameters during forward/backward {where}. Leave it first.")
    if instance._summoned:
        raise StepAssertionError(
            f"Cannot manually unshard parameters when already unsharding parameters {where}. Use the context that is "
            "open."
        )
