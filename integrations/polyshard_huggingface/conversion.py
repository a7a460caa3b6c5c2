"""From the tensors of a checkpoint's files to those of a model: which is made of what, and what does not fit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.io.boxes import Box, Chunk, box_within

from .files import Saved, SavedTensor, Transfer, castable
from .tensors import ModelTensor

#: Tensors by name of the one side, and of the other, put together of them by slices, ``cat``, ``stack`` and the like.
Conversion = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]
aten = torch.ops.aten
#: A part of a name that stands for the number of a layer, an expert and the like.
_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")


def unchanged(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The conversion where both sides have the same names."""
    return tensors


def converted(
    convert: Conversion, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], what: str
) -> dict[str, StandIn]:
    """What ``convert`` makes of tensors of these shapes and dtypes.

    Raises:
        ConfigError: it asks for a tensor that is not there, or returns something else than tensors.
        UnsupportedError: it computes.
    """
    begun = {name: StandIn.of(name, shape, dtype) for name, (shape, dtype) in tensors.items()}
    try:
        made = convert(dict(begun))
    except KeyError as error:
        raise ConfigError(f"The conversion asks for {error}, which {what} lacks.") from error
    wrong = [name for name, each in made.items() if not isinstance(each, StandIn)]
    if wrong:
        raise ConfigError(
            f"The conversion returns something else than tensors of {what} for {', '.join(map(repr, wrong))}."
        )
    return {name: each for name, each in made.items() if isinstance(each, StandIn)}


@dataclass(frozen=True, slots=True)
class Match:
    """A checkpoint and a model that fit."""

    recipes: dict[str, tuple[Part, ...]]
    """For each tensor of the model, by its first name, the parts of files that it is made of."""
    ties: list[tuple[ModelTensor, str, tuple[Part, ...], str, tuple[Part, ...]]]
    """Tied tensors that the files have under two names: these must be equal."""
    kept: list[ModelTensor]
    """Tensors that the files lack, and that were allowed to keep the values they have."""


@dataclass(slots=True)
class _Misfits:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)
    """Names by the difference."""

    def refuse(self, saved: Saved, model: str, rank: int) -> None:
        rows = {
            "missing from the files": self.missing,
            "in the files and not in the model": self.unexpected,
            **self.differing,
        }
        found = [f"  {len(names)} {what}: {listed(names)}" for what, names in rows.items() if names]
        if found:
            raise ConfigError(
                f"{saved.path} is not a checkpoint of this {model} (rank {rank}); nothing was changed:\n"
                + "\n".join(found)
                + "\nGive the checkpoint of this model, or tell load() what may be missing (missing=), what to leave "
                "out (unexpected=), or how the files' tensors become the model's (convert=)."
            )


def match(
    saved: Saved,
    held: Sequence[ModelTensor],
    convert: Conversion,
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    ignored: Callable[[str], bool],
    model: str,
    rank: int,
) -> Match:
    """Find for each tensor in ``held`` the parts of the files' tensors that make it.

    ``missing``, ``unexpected``: patterns of names that the files, or the model, may lack. ``ignored``: the same for the
    names that the model's own class leaves out. ``model``, ``rank``: for errors.

    Raises ConfigError: the two do not fit; all tensors that do not are named.
    """
    made = converted(convert, {each.name: (each.shape, each.dtype) for each in saved.tensors.values()}, str(saved.path))
    misfits = _Misfits()
    found = Match({}, [], [])
    used: set[str] = set()
    for each in held:
        present = [name for name in each.names if name in made]
        if not present:
            if _any_matches(each.names, missing):
                found.kept.append(each)
            else:
                misfits.missing.append(each.names[0])
            continue
        for name in present:
            parts = made[name].parts
            used.update(part.source for part in parts)
            if tuple(made[name].shape) != each.shape:
                what = f"of shape {tuple(made[name].shape)} in the files and {each.shape} in the model"
                misfits.differing.setdefault(what, []).append(name)
            elif not castable(made[name].dtype, each.dtype):
                what = f"of {made[name].dtype} in the files and {each.dtype} in the model, which cannot be cast"
                misfits.differing.setdefault(what, []).append(name)
            elif covered(parts) != each.numel:
                raise UnsupportedError(f"The conversion leaves elements of '{name}' out (rank {rank}).")
        found.recipes[each.names[0]] = made[present[0]].parts
        for other in present[1:]:
            if {*made[other].parts} != {*made[present[0]].parts}:
                found.ties.append((each, present[0], made[present[0]].parts, other, made[other].parts))
    became = {part.source: name for name, each in made.items() for part in each.parts}
    for name, tensor in saved.tensors.items():
        called = became.get(name, name)
        # Nothing shows what a tensor without elements became.
        if name in used or not tensor.numel or _any_matches((name, called), unexpected):
            continue
        if not ignored(name) and not ignored(called):
            misfits.unexpected.append(name)
    misfits.refuse(saved, model, rank)
    return found


def _any_matches(names: Iterable[str], patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def listed(names: Sequence[str]) -> str:
    """All of ``names``, those that differ in one number together: ``'layers.{0-31}.weight'``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        groups.setdefault(tuple(_NUMBER.split(f".{name}.")), []).append(name)
    shown = []
    for pieces, members in groups.items():
        numbers = [_NUMBER.findall(f".{name}.") for name in members]
        columns = [sorted({int(number) for number in column}) for column in zip(*numbers, strict=True)]
        complete = len(members) == math.prod(map(len, columns))
        if len(members) == 1 or not complete:
            shown += [f"'{name}'" for name in members]
            continue
        text = pieces[0]
        for column, piece in zip(columns, pieces[1:], strict=True):
            text += _ranges(column) + piece
        shown.append(f"'{text.strip('.')}'")
    return ", ".join(shown)


def _ranges(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"


class StandIn(torch.Tensor):
    """A tensor on the meta device; each of its elements is known to be an element of a named tensor.

    Slicing, ``cat``, ``stack``, ``chunk``, ``transpose`` and their like lead to further stand-ins. What computes, or
    puts elements into rows of another length, raises ``UnsupportedError``.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> StandIn:
        return cls.made(tuple(shape), dtype, (whole(name, shape),) if math.prod(shape) else ())

    @classmethod
    def made(cls, shape: tuple[int, ...], dtype: torch.dtype, parts: Iterable[Part]) -> StandIn:
        """One of ``shape`` that is put together of ``parts``."""
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.parts = tuple(parts)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Follow ``func`` where it only moves elements."""
        follow = _FOLLOWED.get(func)
        if follow is None:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} does more than to put tensors together, so which elements of the "
                "files a rank needs is not known. Use slices, cat, stack, chunk, split, transpose and the like."
            )
        return follow(*args, **(kwargs or {}))


def _same(tensor: StandIn, **_: Any) -> StandIn:
    return StandIn.made(tuple(tensor.shape), tensor.dtype, tensor.parts)


def _cast(tensor: StandIn, dtype: torch.dtype | None = None, **_: Any) -> StandIn:
    if dtype not in (None, tensor.dtype):
        raise UnsupportedError(
            f"a conversion made {dtype} of a tensor of {tensor.dtype}. Leave dtypes alone: values are cast to the "
            "model's when they are read."
        )
    return _same(tensor)


def _slice(tensor: StandIn, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> StandIn:
    if step != 1:
        raise UnsupportedError(f"a slice takes every {step}th element. Use slices without a step.")
    low, high, _ = slice(start, end).indices(tensor.shape[dim])
    return _narrow(tensor, dim, low, max(high - low, 0))


def _narrow(tensor: StandIn, dim: int, start: int, length: int) -> StandIn:
    dim %= tensor.ndim
    shape = (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :])
    box = Box((*(0,) * dim, start, *(0,) * (tensor.ndim - dim - 1)), shape)
    inside = (part.within(box) for part in tensor.parts)
    return StandIn.made(shape, tensor.dtype, [part.moved(dim, -start) for part in inside if part is not None])


def _select(tensor: StandIn, dim: int, index: int) -> StandIn:
    dim %= tensor.ndim
    return _squeeze(_narrow(tensor, dim, index % tensor.shape[dim], 1), dim)


def _squeeze(tensor: StandIn, dim: int | Sequence[int] | None = None) -> StandIn:
    asked = range(tensor.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    for each in sorted({each % tensor.ndim for each in asked} if tensor.ndim else (), reverse=True):
        if tensor.shape[each] == 1:
            shape = tuple(tensor.shape[:each]) + tuple(tensor.shape[each + 1 :])
            tensor = StandIn.made(shape, tensor.dtype, [part.without(each) for part in tensor.parts])
    return tensor


def _unsqueeze(tensor: StandIn, dim: int) -> StandIn:
    dim %= tensor.ndim + 1
    shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
    return StandIn.made(shape, tensor.dtype, [part.widened(dim) for part in tensor.parts])


def _permute(tensor: StandIn, dims: Sequence[int]) -> StandIn:
    order = [dim % tensor.ndim for dim in dims]
    shape = tuple(tensor.shape[dim] for dim in order)
    return StandIn.made(shape, tensor.dtype, [part.permuted(order) for part in tensor.parts])


def _transpose(tensor: StandIn, first: int, second: int) -> StandIn:
    order = list(range(tensor.ndim))
    first, second = first % tensor.ndim, second % tensor.ndim
    order[first], order[second] = second, first
    return _permute(tensor, order)


def _cat(tensors: Sequence[StandIn], dim: int = 0) -> StandIn:
    first = tensors[0]
    for each in tensors:
        if not isinstance(each, StandIn):
            raise UnsupportedError("a conversion joins a tensor of its own with those of the files. Use theirs alone.")
        if each.dtype != first.dtype:
            raise UnsupportedError(f"a conversion joins tensors of {first.dtype} and {each.dtype}.")
    dim %= first.ndim
    parts: list[Part] = []
    extent = 0
    for each in tensors:
        if (*each.shape[:dim], *each.shape[dim + 1 :]) != (*first.shape[:dim], *first.shape[dim + 1 :]):
            raise UnsupportedError(
                f"a conversion joins tensors of shapes {tuple(first.shape)} and {tuple(each.shape)}."
            )
        parts += [part.moved(dim, extent) for part in each.parts]
        extent += each.shape[dim]
    return StandIn.made((*first.shape[:dim], extent, *first.shape[dim + 1 :]), first.dtype, parts)


def _split(tensor: StandIn, size: int, dim: int = 0) -> list[StandIn]:
    extent = tensor.shape[dim]
    return [_narrow(tensor, dim, start, min(size, extent - start)) for start in range(0, extent, max(size, 1))]


def _split_with_sizes(tensor: StandIn, sizes: Sequence[int], dim: int = 0) -> list[StandIn]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_narrow(tensor, dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _view(tensor: StandIn, size: Sequence[int], **_: Any) -> StandIn:
    known = math.prod(extent for extent in size if extent >= 0)
    shape = tuple(tensor.numel() // known if extent < 0 else extent for extent in size)
    if [extent for extent in shape if extent != 1] != [extent for extent in tensor.shape if extent != 1]:
        raise UnsupportedError(
            f"a conversion makes {shape} of a tensor of shape {tuple(tensor.shape)}: only dimensions of extent 1 may "
            "come and go."
        )
    tensor = _squeeze(tensor)
    for dim, extent in enumerate(shape):
        if extent == 1:
            tensor = _unsqueeze(tensor, dim)
    return tensor


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten._to_copy.default: _cast,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: lambda tensor: _permute(tensor, range(tensor.ndim)[::-1]),
    aten.cat.default: _cat,
    aten.stack.default: lambda tensors, dim=0: _cat([_unsqueeze(each, dim) for each in tensors], dim),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: lambda tensor, dim=0: [_select(tensor, dim, index) for index in range(tensor.shape[dim])],
    aten.view.default: _view,
}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor whose elements are those of a box of the tensor ``source``, its dimensions in another order."""

    offsets: tuple[int, ...]
    """First index of the box in each dimension."""
    sizes: tuple[int, ...]
    """Extent in each dimension."""
    source: str
    """Name of the other tensor."""
    origin: tuple[int, ...]
    """First index of the box in each dimension of ``source``."""
    dims: tuple[int | None, ...]
    """For each dimension the one of ``source``; None where that has none, and the extent is 1."""

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)

    @property
    def source_box(self) -> Box:
        """The same elements in ``source``: extent 1 in dimensions that ``dims`` does not name."""
        sizes = [1] * len(self.origin)
        for dim, size in zip(self.dims, self.sizes, strict=True):
            if dim is not None:
                sizes[dim] = size
        return Box(self.origin, tuple(sizes))

    def within(self, box: Box) -> Part | None:
        """The part of it in ``box``; None for nothing."""
        offsets, sizes, origin = list(self.offsets), list(self.sizes), list(self.origin)
        for index, dim in enumerate(self.dims):
            low = max(self.offsets[index], box.offsets[index])
            high = min(self.offsets[index] + self.sizes[index], box.offsets[index] + box.sizes[index])
            if low >= high:
                return None
            offsets[index], sizes[index] = low, high - low
            if dim is not None:
                origin[dim] += low - self.offsets[index]
        return replace(self, offsets=tuple(offsets), sizes=tuple(sizes), origin=tuple(origin))

    def moved(self, dim: int, by: int) -> Part:
        """The same elements, further along in ``dim``."""
        return replace(self, offsets=(*self.offsets[:dim], self.offsets[dim] + by, *self.offsets[dim + 1 :]))

    def permuted(self, order: Sequence[int]) -> Part:
        """After ``Tensor.permute(order)``."""
        return replace(
            self,
            offsets=tuple(self.offsets[dim] for dim in order),
            sizes=tuple(self.sizes[dim] for dim in order),
            dims=tuple(self.dims[dim] for dim in order),
        )

    def without(self, dim: int) -> Part:
        """After ``Tensor.squeeze(dim)``, the extent there being 1."""
        return replace(
            self,
            offsets=self.offsets[:dim] + self.offsets[dim + 1 :],
            sizes=self.sizes[:dim] + self.sizes[dim + 1 :],
            dims=self.dims[:dim] + self.dims[dim + 1 :],
        )

    def widened(self, dim: int) -> Part:
        """After ``Tensor.unsqueeze(dim)``."""
        return replace(
            self,
            offsets=(*self.offsets[:dim], 0, *self.offsets[dim:]),
            sizes=(*self.sizes[:dim], 1, *self.sizes[dim:]),
            dims=(*self.dims[:dim], None, *self.dims[dim:]),
        )

    def turned(self, name: str) -> Part:
        """The same seen from ``source``: its box, and where that lies in the tensor, which is called ``name``."""
        back: list[int | None] = [None] * len(self.origin)
        for index, dim in enumerate(self.dims):
            if dim is not None:
                back[dim] = index
        box = self.source_box
        return Part(box.offsets, box.sizes, name, self.offsets, tuple(back))

    def view_of(self, source: torch.Tensor) -> torch.Tensor:
        """Its elements in all of ``source``, of shape ``sizes``: the same memory."""
        kept = [dim for dim in self.dims if dim is not None]
        view = box_within(source, Box.whole(source.shape), self.source_box)
        return view.permute([*(dim for dim in range(source.ndim) if dim not in kept), *kept]).reshape(self.sizes)

    def as_source(self, view: torch.Tensor) -> torch.Tensor:
        """``view``, of shape ``sizes``, with the dimensions of ``source_box``: the same memory."""
        for index in reversed(range(len(self.dims))):
            if self.dims[index] is None:
                view = view.squeeze(index)
        kept = [dim for dim in self.dims if dim is not None]
        view = view.permute([kept.index(dim) for dim in sorted(kept)])
        for dim in range(len(self.origin)):
            if dim not in kept:
                view = view.unsqueeze(dim)
        return view


def whole(name: str, shape: Sequence[int]) -> Part:
    """All of a tensor that is all of ``name``."""
    offsets = (0,) * len(shape)
    return Part(offsets, tuple(shape), name, offsets, tuple(range(len(shape))))


def covered(parts: Sequence[Part]) -> int:
    """Number of elements of disjoint ``parts``."""
    return sum(part.box.numel for part in parts)


def transfers_of(
    chunks: Iterable[Chunk], parts: Sequence[Part], tensors: Mapping[str, SavedTensor]
) -> Iterator[Transfer]:
    """What moves for ``chunks`` of a tensor that is put together of ``parts`` of ``tensors``."""
    for chunk in chunks:
        for part in parts:
            inside = part.within(chunk.box)
            if inside is not None:
                view = inside.as_source(box_within(chunk.view, chunk.box, inside.box))
                yield Transfer(tensors[inside.source], inside.source_box, view)
