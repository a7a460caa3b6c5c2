"""States of optimizers in blocks: what this rank's codes and scales are of the whole parameter's, and back.

[Note: forms of a state in blocks]
A piece that is made of whole blocks of its parameter has a range of the whole parameter's scales. Codes and scales are
then saved as parts of the whole's, which any other number of ranks takes over, and so does one process. Other pieces
count blocks from a place inside of the whole's: their scales are saved by themselves, under a name that says which
elements they are of (``exp_avg:scale[1024:2048]``), and only a rank with the same piece takes them.

Ranks may have pieces of one parameter in different forms: those of few elements are in full precision. No rank knows
that of another. A checkpoint writes such tensors piece by piece, too, since rank 0 sees what all have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..inspect import Blocks, Role, ShardedParameter, role_of, state_name_of, taken_apart
from ..io.boxes import Box, Chunk
from .sharded import CheckpointTensor, Holding, KeptPiece, of_parameter, whole
from .source import Entry, Source, fits, opening, problem_with

#: What ``label_of`` gives.
_LABEL = re.compile(r"\[[\d:,;]*\]$")


def entry_of(parameter: ShardedParameter, name: str, value: torch.Tensor) -> tuple[str, CheckpointTensor]:
    """``value``, which ``taken_apart`` told as ``name``, as a part of the whole parameter's; and its name."""
    value, label = value.detach(), label_of(parameter)
    elements = parameter.tensor.numel() // max(1, value.numel())
    found: CheckpointTensor | None
    if role_of(name) is Role.TABLE:
        found = whole(value)
    elif elements == 1:
        found = of_parameter(parameter, value)
    else:
        found = of_blocks(parameter, value, elements)
        if found is None:
            name, found = f"{name}{label}", whole(_in_a_row(value))
    numel = 0 if parameter.box is None else parameter.box.numel
    found.kept = KeptPiece(label, numel, math.prod(parameter.shape), _in_a_row(value))
    return name, found


def of_blocks(parameter: ShardedParameter, local: torch.Tensor, elements: int) -> CheckpointTensor | None:
    """``local``, a number for every ``elements`` here, as a part of the whole's; None where blocks are cut."""
    numel = math.prod(parameter.shape)
    found = _range_of(parameter)
    if found is None or found[0] % elements or (found[1] % elements and found[1] != numel):
        return None
    box = Box((found[0] // elements,), (-(-(found[1] - found[0]) // elements),))
    chunk = Chunk(box, local.detach().view(box.sizes))
    size = (-(-numel // elements),)
    return CheckpointTensor(size, local.dtype, local.device, [chunk], parameter.part is not None)


def label_of(parameter: ShardedParameter) -> str:
    """The elements of the whole parameter that this rank holds: the same for the same ones alone."""
    found, box = _range_of(parameter), parameter.box
    if found is not None:
        return f"[{found[0]}:{found[1]}]"
    ranges = zip(box.offsets, box.sizes, strict=True) if box is not None else ()
    return f"[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def _range_of(parameter: ShardedParameter) -> tuple[int, int] | None:
    """First and one past the last element of this rank in the row-major whole parameter; None where it is no range."""
    box = parameter.box
    if box is None or box.sizes[1:] != parameter.shape[1:] or not parameter.tensor.is_contiguous():
        return None
    start = box.offsets[0] * math.prod(parameter.shape[1:]) if box.offsets else 0
    return start, start + box.numel


def _in_a_row(value: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return value.as_strided((value.numel(),), (1,))


def is_in_blocks(keys: Mapping[str, Any]) -> bool:
    """Whether a parameter's state, with the names ``keys``, has something in blocks, or saved by pieces."""
    return any(role_of(_stem(key)) is not None or is_of_piece(key) for key in keys)


def is_of_piece(key: str) -> bool:
    """Whether what is saved as ``key`` is of one piece of a parameter."""
    return _stem(key) != key


def _stem(key: str) -> str:
    return _LABEL.sub("", key)


@dataclass(eq=False, slots=True)
class Coming:
    """A parameter's state on its way out of a source."""

    parameter: nn.Parameter
    """What the optimizer holds."""
    holding: Holding
    group: Mapping[str, Any]
    """The parameter's, in the optimizer."""
    present: Mapping[str, Any]
    """The optimizer's state now; tensors that fit are filled in place."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the optimizer will have, by the names that ``taken_apart`` gives."""
    like: Mapping[str, Any] | None = None
    """State of the classes that ``state`` was taken from; None where nothing was taken apart."""


class SavedBlocks:
    """One parameter's state in blocks on its way out of a source: ``targets`` by key, to be filled.

    ``left``: names and keys of what is no such state.
    """

    def __init__(self, source: Source, coming: Coming, keys: Mapping[str, str], blocks: Blocks, rank: int) -> None:
        """Match ``source``, where ``keys`` are, with the parameter of ``coming``, whose ``state`` it fills.

        Raises ConfigError: no state of this rank's piece can be made of it.
        """
        self._source, self._coming, self._blocks = source, coming, blocks
        self._own, self._local_parameter = coming.holding.stands_for[0], coming.holding.parameter
        self._present = taken_apart(coming.present)
        self._where = f"(rank {rank})"
        self._label = label_of(self._own)
        #: Keys by what it is of: this label, or nothing for the whole.
        self._forms: dict[str, dict[str, str]] = {}
        for name, key in keys.items():
            stem = _stem(name)
            self._forms.setdefault(stem, {})[name[len(stem) :]] = key
        self.targets: dict[str, torch.Tensor] = {}
        self.left: dict[str, str] = {}
        states: dict[str, list[str]] = {}
        for stem in self._forms:
            states.setdefault(state_name_of(stem), []).append(stem)
        for state, stems in states.items():
            if all(role_of(stem) is None and self._forms[stem].keys() == {""} for stem in stems):
                self.left[state] = self._forms[state][""]
            elif coming.holding.here:
                self._add(state, stems)
            else:
                # A DTensor has state on a rank without elements, too.
                coming.state[state] = torch.zeros_like(self._local_parameter)

    def _add(self, state: str, stems: list[str]) -> None:
        found = {stem: self._forms[stem].get("", self._forms[stem].get(self._label)) for stem in stems}
        own = found.get(state)
        if own is not None and self._entry(own).dtype.is_floating_point:
            # This rank's piece is in full precision, whatever others' are.
            stems = [state]
        elif f"{state}:codes" in found:
            stems = [stem for stem in stems if stem != state]
        for stem in stems:
            key = found[stem]
            target = None if key is None else self._target(stem, key)
            if key is None or target is None:
                raise ConfigError(self._not_there(state, stem))
            what = f"optimizer state '{stem}' of '{self._own.name}'"
            wrong = problem_with(self._source, key, what, target, self._where)
            if wrong is not None:
                raise ConfigError(wrong)
            self.targets[key] = target

    def _not_there(self, state: str, stem: str) -> str:
        what = f"optimizer state '{state}' of '{self._own.name}'"
        if "" in self._forms[stem]:
            return (
                f"{opening(self._source)} has {what} in blocks of {self._blocks.size} elements, and this rank's piece, "
                f"{self._label}, is not made of whole ones {self._where}. Load it at a number of ranks that gives each "
                "whole blocks, as the one that saved it, or load without the optimizer."
            )
        saved = ", ".join(sorted(self._forms[stem])[:4])
        return (
            f"{opening(self._source)} has {what} for the pieces {saved}, and not for this rank's, {self._label} "
            f"{self._where}: ranks cut it inside of blocks of {self._blocks.size} elements, had pieces too small for "
            "blocks, or tensor parallelism cut its columns. Load it at the number of ranks, and with the strategy, "
            "that saved it."
        )

    def _entry(self, key: str) -> Entry:
        entry = self._source.entry(key)
        if entry is None:
            raise ConfigError(
                f"'{key}' is no tensor in {self._source.label} {self._where}. Load it into the model and the "
                "optimizer that it was saved from."
            )
        return entry

    def _target(self, stem: str, key: str) -> torch.Tensor | None:
        """What ``key`` is to be read into; None where the piece is not made of whole blocks."""
        entry, own, parameter = self._entry(key), self._own, self._local_parameter
        shape, dtype, role = entry.shape, entry.dtype, role_of(stem) or Role.ELEMENTS
        if role is Role.TABLE:
            return self._local(stem, shape, dtype)
        is_whole = key == self._forms[stem].get("")
        if is_whole and shape == own.shape and role is Role.ELEMENTS:
            return of_parameter(own, self._local(stem, tuple(parameter.shape), dtype))
        numbers, numel = math.prod(shape), math.prod(own.shape) if is_whole else parameter.numel()
        size = self._blocks.size
        if not (numbers == -(-numel // size) if role is Role.SCALES else numbers and numel % numbers == 0):
            raise ConfigError(
                f"{opening(self._source)} has {numbers} numbers of '{stem}' for {numel} elements of '{own.name}', and "
                f"the optimizer has blocks of {size} {self._where}. Make the optimizer as it was when it was saved."
            )
        if not is_whole:
            if numbers != numel:
                return self._local(stem, shape, dtype)
            return whole(_in_a_row(self._local(stem, tuple(parameter.shape), dtype)))
        elements = size if role is Role.SCALES else numel // numbers
        return of_blocks(own, self._local(stem, (-(-parameter.numel() // elements),), dtype), elements)

    def _local(self, stem: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What the optimizer will have as ``stem``: what is there, where it fits."""
        local, parameter = self._present.get(stem), self._local_parameter
        if not fits(local, shape, dtype):
            like = shape == tuple(parameter.shape)
            make = partial(torch.zeros_like, parameter) if like else partial(torch.zeros, shape)
            local = make(dtype=dtype, device=parameter.device)
        self._coming.state[stem] = local.detach()
        return self._coming.state[stem]  # type: ignore[no-any-return]
