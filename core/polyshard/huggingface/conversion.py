"""From the tensors of a checkpoint's files to those of a model: which is made of what, and what does not fit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from ..errors import ConfigError, UnsupportedError
from .dtypes import castable
from .files import Saved
from .held import Held
from .parts import Part, covered
from .stand_in import StandIn

#: Tensors by name of the one side, and of the other, put together of them by slices, ``cat``, ``stack`` and the like.
Conversion = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


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
    ties: list[tuple[Held, str, tuple[Part, ...], str, tuple[Part, ...]]]
    """Tied tensors that the files have under two names: these must be equal."""
    kept: list[Held]
    """Tensors that the files lack, and that were allowed to keep the values they have."""


@dataclass(slots=True)
class _Misfits:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=dict)
    """Names by what is said of them."""

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
    held: Sequence[Held],
    convert: Conversion,
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    ignored: Callable[[str], bool],
    model: str,
    rank: int,
) -> Match:
    """Find for each tensor in ``held`` what it is made of.

    Args:
        saved: The files.
        held: The tensors of the model.
        convert: From the files' tensors to the model's.
        missing: Patterns of names that the files may lack.
        unexpected: Patterns of names that the files may have and the model lacks.
        ignored: The same for what the model's own class leaves out, by name in the files or in the model.
        model: The model's class, for errors.
        rank: This rank, for errors.

    Raises:
        ConfigError: the two do not fit; all tensors that do not are named.
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
        # Without elements nothing is made of it that could be told.
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
        groups.setdefault(tuple(re.split(r"(?<=\.)\d+(?=\.)", f".{name}.")), []).append(name)
    shown = []
    for pieces, members in groups.items():
        numbers = [re.findall(r"(?<=\.)\d+(?=\.)", f".{name}.") for name in members]
        columns = [sorted({int(number) for number in column}) for column in zip(*numbers, strict=True)]
        complete = len(members) == len(set(itertools.product(*columns))) if columns else len(members) == 1
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
