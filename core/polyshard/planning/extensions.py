"""Parameters that say themselves how they are gathered: tensor subclasses with torch's extension protocol.

``fsdp_pre_all_gather`` answers the tensors that are gathered, of any dtypes, and ``fsdp_post_all_gather`` makes the
parameter that computes out of what arrived. The engine moves bytes and knows nothing of what they mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ParameterError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
#: Arguments of ``fsdp_pre_all_gather``: the mesh; or mesh, whole size and stride, module and precision policy.
_ARITIES = (1, 5)
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class ExtensionArguments:
    """What every call of ``fsdp_pre_all_gather`` is given, besides what differs between parameters."""

    mesh: DeviceMesh
    """Of one dimension: the ranks that share the parameter."""
    policy: object
    """The user's ``MixedPrecisionPolicy``, or one that says the same as the precision of ``polyshard.shard``."""


def gathers_itself(tensor: torch.Tensor) -> bool:
    return type(tensor) not in _PLAIN and hasattr(tensor, _PRE) and hasattr(tensor, _POST)


def protocol_fault(tensor: torch.Tensor) -> str:
    """What keeps ``tensor``, of a class of its own, from being gathered, as text; empty for nothing."""
    has = [hasattr(tensor, _PRE), hasattr(tensor, _POST)]
    if not any(has):
        return f"not a plain tensor, and has no {_PRE} and {_POST} that would tell how it is gathered"
    if not all(has):
        there, missing = (_PRE, _POST) if has[0] else (_POST, _PRE)
        return f"not a plain tensor, and has {there} without {missing}"
    number = arity(tensor)
    if number not in _ARITIES:
        return (
            f"not a plain tensor, and its {_PRE} takes {number} arguments, instead of (mesh) or (mesh, outer_size, "
            "outer_stride, module, mp_policy)"
        )
    return ""


def arity(tensor: torch.Tensor) -> int:
    """How many arguments ``fsdp_pre_all_gather`` of ``tensor`` takes."""
    call: Any = getattr(tensor, _PRE)
    return len(inspect.signature(call).parameters)


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that ``tensor`` is made of, itself where its class does not say."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in _PLAIN or flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from inner_tensors(inner)


def own_rows(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of ``whole`` that ``rank`` of ``ranks`` has, in memory of their own, of the class of ``whole``.

    Made by the operations that torch's FSDP2 uses: a class that serves the protocol has these.
    """
    with torch.inference_mode(False), torch.no_grad():
        chunks = torch.chunk(whole, ranks, dim=0)
        rows = chunks[rank].size(0) if rank < len(chunks) else 0
        padded = whole.new_zeros(chunks[0].size())
        if rows:
            padded.narrow(0, 0, rows).copy_(chunks[rank])
        return padded.narrow(0, 0, rows)


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """First and one past the last of so many ``rows`` that ``rank`` of ``ranks`` has: those of ``torch.chunk``."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


@dataclass(frozen=True, slots=True)
class InnerTensor:
    """A tensor that a parameter of a class of its own is made of."""

    name: str
    """The parameter's attribute; empty where the parameter has nothing else, and as many elements of the same dtype."""
    attribute: str
    shape: tuple[int, ...]
    """Of the whole parameter's."""
    rows: tuple[int, int]
    """The indices of dimension 0 that this rank has."""
    is_cut: bool
    """Whether ranks have rows of it; otherwise each has all of it."""


@dataclass(frozen=True, slots=True)
class Insides:
    """What a whole parameter that gathers itself is made of: for state dicts and checkpoints, whose tensors are plain.

    Ranks have rows of an inner tensor where they have rows of the parameter, in proportion.
    """

    kind: type
    shape: tuple[int, ...]
    inner: tuple[InnerTensor, ...]
    fault: str
    """Why its values cannot be told by plain tensors; empty where they can."""
    _context: Any
    _stride: tuple[int, ...]

    def whole(self, inner: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The whole parameter over ``inner``, whole tensors by attribute."""
        unflatten: Any = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        made: torch.Tensor = unflatten(dict(inner), self._context, torch.Size(self.shape), self._stride)
        return made

    def seen_on(self, whole: torch.Tensor) -> Insides:
        """The same of ``whole``, the parameter on another device, which its class may note."""
        flatten: Any = getattr(whole, "__tensor_flatten__", None)
        return self if flatten is None or self.fault else replace(self, _context=flatten()[1])

    @property
    def is_plain(self) -> bool:
        """Whether its values are those of one plain tensor of its shape and dtype, which has the parameter's name."""
        return not self.fault and not self.inner[0].name


def insides_of(whole: torch.Tensor, where: str, rank: int, ranks: int, *, trained: bool) -> Insides:
    """Cut ``whole`` as ``rank`` of ``ranks`` will have it, to see that its class can, and how its inner tensors lie.

    ``where``: its name, for messages.

    Raises ParameterError: the class cannot cut it there; or it is trained, and an optimizer could not change it.
    """
    kind, shape, whole = type(whole).__name__, tuple(whole.shape), whole.detach()
    start, stop = rows_of(shape[0], rank, ranks)
    try:
        rows = own_rows(whole, rank, ranks)
        found = f"answered rows of shape {tuple(rows.shape)}" if rows.shape != (stop - start, *shape[1:]) else ""
    except Exception as error:
        found = f"failed: {type(error).__name__}: {error}"
    if found:
        raise ParameterError(
            f"The parameter {where} is a {kind} of shape {shape}, which cannot be cut between {ranks} ranks: "
            f"torch.chunk, new_zeros, narrow or copy_ of its class {found}. Let each rank have as many rows, of whole "
            "blocks, shard over fewer ranks, or pass it in ignored_parameters."
        )
    insides = _insides(whole, rows, rank, ranks)
    if trained:
        refuse_untrainable(rows, where)
    return insides


def refuse_untrainable(rows: torch.Tensor, where: str) -> None:
    """Try on ``rows``, which may be lost, what an optimizer does to a parameter.

    Raises ParameterError: its class cannot.
    """
    if not rows.numel():
        return
    try:
        with torch.no_grad():
            rows.add_(torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device))
    except Exception as error:
        raise ParameterError(
            f"The parameter {where} is a {type(rows).__name__} that is trained, and whose class no optimizer can step: "
            f"add_() failed: {type(error).__name__}: {error}. Freeze it with requires_grad_(False)."
        ) from error


def _insides(whole: torch.Tensor, rows: torch.Tensor, rank: int, ranks: int) -> Insides:
    shape, stride = tuple(whole.shape), tuple(whole.stride())

    def refused(fault: str) -> Insides:
        return Insides(type(whole), shape, (), fault, None, stride)

    flatten: Any = getattr(whole, "__tensor_flatten__", None)
    if flatten is None or not hasattr(type(whole), "__tensor_unflatten__"):
        return refused("has no __tensor_flatten__ and __tensor_unflatten__ that would tell what it is made of")
    attributes, context = flatten()
    inner = []
    for attribute in attributes:
        entire, own = getattr(whole, attribute), getattr(rows, attribute)
        if type(entire) not in _PLAIN:
            return refused(f"is made of '{attribute}', a {type(entire).__name__} instead of a plain tensor")
        ends = _proportional(entire, shape[0], rank, ranks)
        is_cut = ends is not None and _same(entire[ends[0] : ends[1]], own)
        if not is_cut and not _same(entire, own):
            return refused(f"has in '{attribute}' of a rank's rows neither rows of the whole '{attribute}' nor all")
        alone = len(attributes) == 1 and tuple(entire.shape) == shape and entire.dtype == whole.dtype
        here = ends if ends is not None and is_cut else (0, entire.shape[0] if entire.ndim else 1)
        inner.append(InnerTensor("" if alone else attribute, attribute, tuple(entire.shape), here, is_cut))
    insides = Insides(type(whole), shape, tuple(inner), "", context, stride)
    try:
        made = insides.whole({each: getattr(whole, each) for each in attributes})
    except Exception as error:
        return refused(f"cannot be made of its inner tensors: {type(error).__name__}: {error}")
    if type(made) is not type(whole) or made.shape != whole.shape:
        return refused(f"made a {type(made).__name__} of shape {tuple(made.shape)} of its inner tensors")
    return insides


def _proportional(inner: torch.Tensor, rows: int, rank: int, ranks: int) -> tuple[int, int] | None:
    """The rows of ``inner`` that belong to those that ``rank`` has of ``rows``; None where ranks would cut one."""
    if not inner.ndim or not rows or inner.shape[0] * rows_of(rows, 0, ranks)[1] % rows:
        return None
    start, stop = rows_of(rows, rank, ranks)
    return inner.shape[0] * start // rows, inner.shape[0] * stop // rows


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(other) not in _PLAIN or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta or not one.numel():
        return True
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
