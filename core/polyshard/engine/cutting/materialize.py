"""Values for meta parameters and buffers: whole, one stage at a time, and then only this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from ...errors import ParameterError
from ..planning.draft import Draft
from ..planning.layout import round_up
from ..planning.plan import PlannedStage
from ..planning.ranks import RankGrid
from ..planning.values import send_from_first
from ..transport.buffer import view_of
from .build import is_meta, place_buffers

#: Initialises the parameters and buffers that a module holds directly.
Initializer = Callable[[nn.Module], None]


def refuse_uninitializable(
    stages: Iterable[PlannedStage], modules: Mapping[nn.Module, str], initializer: Initializer | None, rank: int
) -> None:
    """Raise if a module that holds meta parameters or buffers could not be initialised. ``modules``: with their names.

    Raises:
        ParameterError: naming the tensors and their modules.
    """
    if initializer is not None:
        return
    held = [
        (parameter.names[0], module)
        for stage in stages
        for group in stage.groups
        for parameter in group
        if parameter.original.is_meta
        for module, _ in parameter.sites
    ]
    held += [
        (f"{name}.{key}" if name else key, module)
        for module, name in modules.items()
        for key, buffer in module._buffers.items()
        if is_meta(buffer)
    ]
    missing = sorted(
        {
            f"{name} ({type(module).__name__})"
            for name, module in held
            if not callable(getattr(module, "reset_parameters", None))
        }
    )
    if missing:
        raise ParameterError(
            "Parameters or buffers are on the meta device and their modules have no reset_parameters(): "
            f"{', '.join(missing)} (rank {rank}). Give the modules a reset_parameters() method, or pass initializer=."
        )


def remember(drafts: Sequence[Draft], device: torch.device) -> Callable[[], None]:
    """What puts back all that ``materialize`` changes: buffers, and the generators of random numbers.

    Ranks that drew differently would initialise pieces of different models the next time.
    """
    hollow = {
        module: None
        for draft in drafts
        for module in draft.modules
        if any(is_meta(buffer) for buffer in module._buffers.values())
    }
    for draft in drafts:
        for group in draft.stage.groups:
            for parameter in group:
                if parameter.original.is_meta:
                    hollow.update(dict.fromkeys(module for module, _ in parameter.sites))
    if not hollow:
        return lambda: None
    held = {module: dict(module._buffers) for module in hollow}
    # An initialiser writes to the buffers that have values already, too.
    values = [
        (buffer, buffer.clone())
        for buffers in held.values()
        for buffer in buffers.values()
        if buffer is not None and not buffer.is_meta
    ]
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        for module, buffers in held.items():
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    return put_back


def materialize(
    drafts: Sequence[Draft],
    grid: RankGrid,
    device: torch.device,
    initializer: Initializer | None,
    whole_shapes: Mapping[nn.Parameter, tuple[int, ...]],
    *,
    from_first: bool = False,
) -> dict[str, list[torch.Tensor]]:
    """The masters of every stage that holds meta parameters, by stage name; meta buffers are filled in place.

    ``from_first``: all ranks take rank 0's values of parameters and buffers, stage by stage, also of those that are not
    on the meta device, which are overwritten in place.

    Memory on ``device`` peaks at the masters and one whole stage: all stages are initialised in the same memory, so
    that none of it is left behind as holes between the masters.
    """
    hollow = [draft for draft in drafts if draft.has_meta_parameters]
    nbytes = max((sum(_nbytes(draft)) for draft in hollow), default=0) if grid.shard is not None else 0
    masters: dict[str, list[torch.Tensor]] = {}
    with torch.inference_mode(False), torch.no_grad():
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for draft in drafts:
            if draft.has_meta_parameters:
                flats = _flats(draft, scratch if grid.shard is not None else None, device)
                _fill(draft, flats, device, initializer, whole_shapes)
                if from_first:
                    send_from_first(_wholes(draft, flats), grid.world, device)
                masters[draft.stage.name] = [
                    flat
                    if grid.shard is None
                    else flat.narrow(0, grid.shard_rank * layout.shard_numel, layout.shard_numel).clone()
                    for layout, flat in zip((unit.layout for unit in draft.units), flats, strict=True)
                ]
            else:
                for module in draft.modules:
                    if any(is_meta(buffer) for buffer in module._buffers.values()):
                        place_buffers(module, device, None)
                        _initialize(module, set(), initializer, whole_shapes)
                if from_first:
                    originals = [parameter.original for group in draft.stage.groups for parameter in group]
                    send_from_first(originals, grid.world, device)
            if from_first:
                buffers = [buffer for module in draft.modules for buffer in module._buffers.values()]
                send_from_first([buffer for buffer in buffers if buffer is not None], grid.world, device)
    return masters


def _wholes(draft: Draft, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        view_of(flat, slot.shape, slot.stride, slot.offset)
        for unit, flat in zip(draft.units, flats, strict=True)
        for slot in unit.layout.slots
    ]


def _nbytes(draft: Draft) -> list[int]:
    return [round_up(unit.layout.padded_numel * unit.spec.master_dtype.itemsize, 256) for unit in draft.units]


def _flats(draft: Draft, scratch: torch.Tensor | None, device: torch.device) -> list[torch.Tensor]:
    flats, offset = [], 0
    for unit, nbytes in zip(draft.units, _nbytes(draft), strict=True):
        layout, spec = unit.layout, unit.spec
        if scratch is None:
            flat = torch.empty(layout.padded_numel, dtype=spec.master_dtype, device=device)
        else:
            used = layout.padded_numel * spec.master_dtype.itemsize
            flat = scratch[offset : offset + used].view(spec.master_dtype)
            offset += nbytes
        for start, numel in layout.gaps():
            flat.narrow(0, start, numel).zero_()
        flats.append(flat)
    return flats


def _fill(
    draft: Draft,
    flats: Sequence[torch.Tensor],
    device: torch.device,
    initializer: Initializer | None,
    whole_shapes: Mapping[nn.Parameter, tuple[int, ...]],
) -> None:
    fresh = {module: None for module in draft.modules if any(is_meta(buffer) for buffer in module._buffers.values())}
    held: list[tuple[nn.Module, str, nn.Parameter]] = []
    wholes: list[tuple[nn.Module, str, nn.Parameter]] = []
    for group, unit, flat in zip(draft.stage.groups, draft.units, flats, strict=True):
        for parameter, slot in zip(group, unit.layout.slots, strict=True):
            original = parameter.original
            whole = nn.Parameter(
                view_of(flat, slot.shape, slot.stride, slot.offset), requires_grad=original.requires_grad
            )
            if original.is_meta:
                fresh.update(dict.fromkeys(module for module, _ in parameter.sites))
            else:
                whole.copy_(original)
            wholes.append((*parameter.sites[0], whole))
            for module, key in parameter.sites:
                held.append((module, key, original))
                module._parameters[key] = whole
    mine = {(module, key) for module, key, _ in held}
    try:
        for module in fresh:
            place_buffers(module, device, None)
            _initialize(module, mine, initializer, whole_shapes)
        for module, key, whole in wholes:
            # An initialiser may assign a new parameter instead of filling the one that is there.
            current = module._parameters[key]
            if current is not whole and current is not None and not current.is_meta:
                whole.copy_(current)
    finally:
        for module, key, original in held:
            module._parameters[key] = original


def _initialize(
    module: nn.Module,
    mine: set[tuple[nn.Module, str]],
    initializer: Initializer | None,
    whole_shapes: Mapping[nn.Parameter, tuple[int, ...]],
) -> None:
    # A parameter of the module that belongs to another stage is sharded already, or not there yet: initialising must
    # see its shape and not touch its values.
    others = {
        key: parameter
        for key, parameter in module._parameters.items()
        if parameter is not None and (module, key) not in mine
    }
    for key, parameter in others.items():
        shape = whole_shapes.get(parameter, tuple(parameter.shape))
        stand_in = torch.empty(shape, dtype=parameter.dtype, device="meta")
        module._parameters[key] = nn.Parameter(stand_in, requires_grad=False)
    try:
        if initializer is not None:
            initializer(module)
        else:
            cast("Callable[[], None]", module.reset_parameters)()
    finally:
        module._parameters.update(others)
