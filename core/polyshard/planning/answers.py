"""Plugins' answers about a unit, checked against their contracts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..errors import PluginContractError, plugin_name, told
from ..interfaces import (
    Collectives,
    CollectivesCapabilities,
    FormedWeights,
    GatherEncoding,
    LinearForm,
    OffloadCapabilities,
    OffloadManager,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)


def refuse_unable(plugin: PrecisionPlugin | OffloadManager | Collectives, rank: int) -> None:
    """Raise PluginContractError for a plugin whose ``capabilities`` are not what its contract asks for."""
    wanted = next(of for contract, of in _CAPABILITIES.items() if isinstance(plugin, contract))
    answer: Any = plugin.capabilities
    if not isinstance(answer, wanted):
        raise PluginContractError(
            f"capabilities of {plugin_name(plugin)} are {told(answer)} (rank {rank}). Answer a {wanted.__name__}."
        )
    for field in dataclasses.fields(wanted):
        value = getattr(answer, field.name)
        # Annotations are text here. Fields of bool are used in conditions, which a tensor or a string would pass.
        if field.type == "bool" and not isinstance(value, bool):
            raise PluginContractError(
                f"capabilities of {plugin_name(plugin)} have {field.name}={value!r} (rank {rank}). Answer True "
                "or False."
            )


_CAPABILITIES: dict[type, type[Any]] = {
    PrecisionPlugin: PrecisionCapabilities,
    OffloadManager: OffloadCapabilities,
    Collectives: CollectivesCapabilities,
}


def is_packed(dtype: torch.dtype) -> bool:
    """Whether numbers of ``dtype`` mean something with others beside them alone, or by their bits: all but complex and
    floating-point ones of two bytes and more. A cast would lose that."""
    return not dtype.is_complex and (not dtype.is_floating_point or dtype.itemsize == 1)


def dtypes_of(precision: PrecisionPlugin, unit: UnitSpec, rank: int, *, packed: bool = False) -> UnitDtypes:
    """The dtypes of ``unit`` by ``precision``; of packed parameters their own, which no precision plugin is asked for.

    ``packed``: whether they are of packed classes, whatever their dtype.

    Raises PluginContractError: no ``UnitDtypes``, a dtype that parameters cannot compute in or gradients be reduced in,
    or a reduction narrower than what travels.
    """
    own = unit.master_dtype
    if packed or is_packed(own):
        return UnitDtypes(own, own, own, own)
    answer = precision.dtypes(unit)
    where = _answered(precision, "dtypes", answer, f"unit '{unit.label}'", rank)
    if not isinstance(answer, UnitDtypes):
        raise PluginContractError(f"{where}, which is no UnitDtypes. Return one.")
    for field in dataclasses.fields(answer):
        dtype = getattr(answer, field.name)
        if field.name == "buffer" and dtype is None:
            continue
        computes = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
        # Buffers of complex modules are cast by themselves: only floating-point ones are.
        fits = computes and (field.name == "buffer" or dtype.is_complex == unit.master_dtype.is_complex)
        if not fits:
            kind = "complex" if unit.master_dtype.is_complex and field.name != "buffer" else "floating-point"
            raise PluginContractError(
                f"{where}: {field.name} is {dtype!r}, but the unit holds {unit.master_dtype}. Answer a {kind} dtype."
            )
    if answer.communication is not answer.reduce and answer.communication.itemsize >= answer.reduce.itemsize:
        raise PluginContractError(
            f"{where}: gradients that travel in {answer.communication} cannot be accumulated in {answer.reduce}. "
            "Answer a reduce dtype that holds what travels."
        )
    return answer


#: A ``GatherEncoding`` sends a multiple of these bytes.
_WIRE_ALIGNMENT = 16


def encoding_of(precision: PrecisionPlugin, unit: UnitSpec, rank: int) -> GatherEncoding | None:
    """The format in which ``unit`` travels in gathers; None for its compute dtype.

    Raises PluginContractError: something else than None and a ``GatherEncoding`` of a positive multiple of 16 bytes, or
    one of a precision plugin whose capabilities do not say that it encodes.
    """
    answer = precision.encoding(unit)
    if answer is None:
        return None
    where = _answered(precision, "encoding", answer, f"unit '{unit.label}'", rank)
    if not isinstance(answer, GatherEncoding):
        raise PluginContractError(f"{where}, which is no GatherEncoding. Return one, or None.")
    if not precision.capabilities.encodes:
        raise PluginContractError(
            f"{where}, but its capabilities do not say that it encodes. Set PrecisionCapabilities(encodes=True)."
        )
    if not _is_nbytes(answer.nbytes_per_rank) or answer.nbytes_per_rank % _WIRE_ALIGNMENT:
        raise PluginContractError(f"{where}. Answer a positive multiple of {_WIRE_ALIGNMENT} bytes.")
    return answer


def form_of(precision: PrecisionPlugin, weights: FormedWeights, rank: int) -> LinearForm:
    """How ``weights`` travel and compute. Raises PluginContractError: no ``LinearForm``, or lanes that are no sizes."""
    answer: Any = precision.form(weights)
    where = _answered(precision, "form", answer, f"unit '{weights.unit}'", rank)
    if not isinstance(answer, LinearForm):
        raise PluginContractError(f"{where}, which is no LinearForm. Return one.")
    lanes: Any = answer.lanes
    if not isinstance(lanes, Sequence) or not lanes or not all(map(_is_nbytes, lanes)):
        raise PluginContractError(f"{where}, whose lanes are {lanes!r}. Answer a sequence of numbers of bytes above 0.")
    return answer


def _is_nbytes(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def callable_or_none(precision: PrecisionPlugin, question: str, unit: UnitSpec, rank: int) -> Any:
    """The ``input_cast`` or ``output_cast`` of ``unit``. Raises PluginContractError: it cannot be called."""
    answer = getattr(precision, question)(unit)
    if answer is not None and not callable(answer):
        where = _answered(precision, question, answer, f"unit '{unit.label}'", rank)
        raise PluginContractError(f"{where}, which cannot be called. Return what casts, or None.")
    return answer


def offloaded_units(offload: OffloadManager, units: Sequence[UnitSpec], rank: int) -> frozenset[UnitSpec]:
    """The units that ``offload`` offloads, of all ``units`` that it serves.

    Raises PluginContractError: something else than a collection of some of them.
    """
    if not offload.capabilities.offloads:
        return frozenset()
    answer: object = offload.units_to_offload(units)
    if not isinstance(answer, Collection) or isinstance(answer, str):
        raise PluginContractError(
            f"units_to_offload of {plugin_name(offload)} returned {told(answer)} (rank {rank}), which is no collection "
            "of units. Return those of the given units that are offloaded."
        )
    known = frozenset(units)
    for each in answer:
        if not isinstance(each, UnitSpec) or each not in known:
            what = f"unit '{each.label}'" if isinstance(each, UnitSpec) else told(each)
            raise PluginContractError(
                f"units_to_offload of {plugin_name(offload)} returned {what} (rank {rank}), which is none of the units "
                "that it was given. Return the given objects."
            )
    return known & frozenset(answer)


def refuse_shared_memory(offloaded: Iterable[tuple[OffloadManager, UnitSpec, torch.Tensor]], rank: int) -> None:
    """Raise PluginContractError for masters of two units in one memory: a step of the optimizer would overwrite one."""
    ranges = sorted(
        (str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, unit.label, plugin_name(offload))
        for offload, unit, tensor in offloaded
        if tensor.numel()
    )
    for (device, _, end, first, _), (other, start, _, second, plugin) in pairwise(ranges):
        if device == other and start < end:
            raise PluginContractError(
                f"place of {plugin} returned the same memory for the units '{first}' and '{second}' (rank {rank}). "
                "Give each unit's master memory of its own."
            )


def refuse_gradient(
    offload: OffloadManager, unit: UnitSpec, stored: Any, like: torch.Tensor, device: torch.device | None, rank: int
) -> None:
    """Raise for a tensor from ``store_grad`` that ``.grad`` cannot view.

    ``like``: the reduced gradient; ``device``: of the master, None for any.

    Raises PluginContractError: it is no plain, dense, contiguous tensor of the gradient's shape and dtype, or is not
    beside the master.
    """
    fault = tensor_fault(stored, like.shape, like.dtype)
    if not fault and device is not None and stored.device != device:
        fault = f"a tensor on {stored.device}"
    if fault:
        raise PluginContractError(
            f"store_grad of {plugin_name(offload)} returned {fault} for unit '{unit.label}' (rank {rank}). '.grad' "
            f"views that tensor: return a contiguous {tuple(like.shape)} of {like.dtype} beside the master."
        )


def tensor_fault(tensor: Any, shape: torch.Size, dtype: torch.dtype) -> str:
    """The fault of ``tensor``, which should be contiguous and have memory, as text; empty for no fault."""
    if not isinstance(tensor, torch.Tensor):
        return told(tensor)
    if tensor.layout is not torch.strided:
        return f"a {tensor.layout} tensor"
    if tensor.shape != shape or tensor.dtype is not dtype:
        return f"a tensor {tuple(tensor.shape)} of {tensor.dtype}"
    if not tensor.is_contiguous():
        return f"a tensor with strides {tensor.stride()}, which is not contiguous,"
    if tensor.is_meta:
        return "a tensor on the meta device, which holds no values,"
    if tensor.is_inference():
        return "a tensor made in inference mode, which cannot be trained,"
    return ""


def yes_or_no(precision: PrecisionPlugin, question: str, answer: Any, about: str, rank: int) -> bool:
    """``answer`` of ``precision`` to a ``question``. Raises PluginContractError: it is neither True nor False."""
    if not isinstance(answer, bool):
        raise PluginContractError(f"{_answered(precision, question, answer, about, rank)}. Return True or False.")
    return answer


def _answered(precision: PrecisionPlugin, question: str, answer: object, about: str, rank: int) -> str:
    shown = repr(answer) if isinstance(answer, UnitDtypes | GatherEncoding) else told(answer)
    return f"{question} of {plugin_name(precision)} answered {shown} for {about} (rank {rank})"
