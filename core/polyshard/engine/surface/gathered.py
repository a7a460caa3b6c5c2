"""Whole parameters in full precision, outside of compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from ...errors import ParameterChangedError, StateError
from .. import _torch_private
from ..parameters.originals import become
from ..planning.managed_parameter import ManagedParameter
from ..step.root import Root
from ..step.step import Phase
from ..step.unit import Unit
from ..transport.buffer import view_of


@contextmanager
def unsharded_parameters(root: Root, *, writeback: bool) -> Iterator[None]:
    """Inside, every original has its whole shape and master dtype; on leaving, own elements go back where asked.

    Modules that are called inside compute with the originals as they are, without collectives. A backward through that
    raises ``StateError``.

    Raises:
        StateError: inside a forward or backward, or when entered twice.
        ParameterChangedError: on leaving, what is to be kept has another shape, or was tied to another parameter.
    """
    root.leave_failed_backward()
    if root.phase is not Phase.IDLE:
        raise StateError(
            f"Cannot manually unshard parameters during forward/backward (rank {root.rank}, phase {root.phase.value}). "
            "Leave the forward or backward first."
        )
    if root.unsharded:
        raise StateError(
            f"Cannot manually unshard parameters when already unsharding parameters (rank {root.rank}). "
            "Use the context that is open."
        )
    root.take_up_changes(trains=False)
    root.unsharded = True
    flats: dict[Unit, torch.Tensor] = {}
    refusals = ExitStack()
    try:
        for unit in root.units:
            with root.meeting(f"gather of whole '{unit.spec.label}'", (unit.grid.shard,)):
                flats[unit] = _expose_whole(unit)
            for parameter in unit.parameters:
                if parameter.original.requires_grad:
                    hook = partial(_refuse_gradient, parameter, root.rank)
                    refusals.enter_context(parameter.original.register_hook(hook))  # type: ignore[no-untyped-call]
        yield
        if writeback:
            if root.registrations is not None and root.registered:
                root.registrations.refuse_ties()
            for unit, flat in flats.items():
                write_back(unit, flat)
    finally:
        refusals.close()
        for unit in flats:
            for parameter in unit.parameters:
                for module, key in parameter.sites:
                    # What was removed stays so, for the next forward to refuse: something else computes in its place.
                    if key in module._parameters:
                        module._parameters[key] = parameter.original
            unit.originals.expose()
        root.unsharded = False


@contextmanager
def whole_on_this_rank(root: Root, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, every original has its whole shape on this rank, without a word to others: for what reads a model that it
    is given, modules called included. Between steps alone. Changes are dropped on leaving.

    Args:
        root: Of the model; all of its parameters.
        values: Whole tensors by the parameters' first names, on any device; not copied.
    """
    root.unsharded = True
    try:
        for unit in root.units:
            for parameter in unit.parameters:
                become(parameter.original, values[parameter.names[0]])
        yield
    finally:
        for unit in root.units:
            unit.originals.expose()
        root.unsharded = False


def gather_whole(unit: Unit, own: torch.Tensor) -> torch.Tensor:
    """The whole flat tensor (``[padded_numel]``) of which each rank has ``own`` (``[shard_numel]``), on the device that
    computes. All ranks of the unit call it together.

    Where nothing is cut and ``own`` is there already, ``own`` itself.
    """
    shard = unit.grid.shard
    with torch.inference_mode(False), torch.no_grad():
        if shard is None:
            return own.to(unit.spec.device if unit.parks else own.device)
        whole = torch.empty(unit.layout.padded_numel, dtype=own.dtype, device=unit.spec.device)
        mine = own_part(unit, whole)
        mine.copy_(own)
        shard.all_gather(whole, mine).wait()
    return whole


def own_part(unit: Unit, whole: torch.Tensor) -> torch.Tensor:
    """This rank's elements (``[shard_numel]``) of ``whole`` (``[padded_numel]``), as a view."""
    return whole.narrow(0, unit.grid.shard_rank * unit.layout.shard_numel, unit.layout.shard_numel)


def write_back(unit: Unit, whole: torch.Tensor) -> None:
    """Keep this rank's part of what stands under the parameters' names, which were views of ``whole``, in the master.

    ``whole``: ``[padded_numel]``, in the master's dtype; gets what was assigned in the place of its views.

    Raises:
        ParameterChangedError: something of another shape was assigned.
    """
    with torch.no_grad():
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            module, key = parameter.sites[0]
            current = module._parameters.get(key)
            view = view_of(whole, slot.shape, slot.stride, slot.offset)
            if current is None or current.shape != view.shape:
                got = None if current is None else tuple(current.shape)
                raise ParameterChangedError(
                    f"Cannot writeback when the parameter shape changes\nExpects {slot.shape} but got {got} for "
                    f"'{parameter.names[0]}' on rank {unit.grid.world.rank}. Keep the whole shape."
                )
            if current.data_ptr() != view.data_ptr():
                view.copy_(current)
        if whole.data_ptr() != unit.master.data_ptr():
            unit.master.copy_(own_part(unit, whole))


def _expose_whole(unit: Unit) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        flat = gather_whole(unit, unit.master)
        if flat.data_ptr() == unit.master.data_ptr():
            # What is written without writeback must not reach the master.
            flat = flat.clone()
        for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
            become(parameter.original, view_of(flat, slot.shape, slot.stride, slot.offset))
    return flat


def _refuse_gradient(parameter: ManagedParameter, rank: int, _: torch.Tensor) -> None:
    # Modules that are no unit, and plain uses of a parameter, have no output that a stage watches.
    if _torch_private.will_accumulate(parameter.original):
        raise StateError(
            f"A backward inside unsharded() on rank {rank} reached '{parameter.names[0]}': its gradient would be whole "
            "and this rank's alone. Run forward and backward outside of unsharded(), or use "
            "torch.autograd.grad."
        )
