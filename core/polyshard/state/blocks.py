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
from typing import Any

import torch

from ..errors import ConfigError
from ..inspect import Blocks, Role, ShardedParameter, StateTensor, role_of, state_name_of, taken_apart
from ..io.boxes import Box, Chunk
from .sharded import CheckpointTensor, Holding, KeptPiece, of_parameter, whole
from .source import Entry, Source, opening, problem_with

#: What ``label_of`` gives.
_LABEL = re.compile(r"\[[\d:,;]*\]$")


def entry_of(
    parameter: ShardedParameter, name: str, value: torch.Tensor, role: Role, elements: int
) -> tuple[str, CheckpointTensor]:
    """``value``, a number for every ``elements`` of ``parameter``, as a part of the whole's; and its name."""
    value = value.detach()
    label = label_of(parameter)
    found: CheckpointTensor | None
    if role is Role.TABLE:
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


class SavedBlocks:
    """One parameter's state in blocks on its way out of a source: ``targets`` by key, to be filled.

    ``tensors`` are what the optimizer will have, by the names that ``taken_apart`` gives; ``left``: names and keys of
    what is no such state.
    """

    def __init__(
        self,
        source: Source,
        holding: Holding,
        keys: Mapping[str, str],
        blocks: Blocks,
        present: Mapping[str, Any],
        rank: int,
    ) -> None:
        """Match ``source``, where ``keys`` are, with the parameter of ``holding``.

        ``present``: the optimizer's state now; tensors that fit are filled in place.

        Raises ConfigError: no state of this rank's piece can be made of it.
        """
        self._source, self._holding, self._blocks = source, holding, blocks
        self._present = taken_apart(present)
        self._where = f"(rank {rank})"
        self._forms: dict[str, dict[str, str]] = {}
        for name, key in keys.items():
            stem = _stem(name)
            self._forms.setdefault(stem, {})[name[len(stem) :]] = key
        self._label = label_of(holding.sharded[0]) if holding.sharded else ""
        self.targets: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.left: dict[str, str] = {}
        states: dict[str, list[str]] = {}
        for stem in self._forms:
            states.setdefault(state_name_of(stem), []).append(stem)
        # A DTensor has state on a rank without elements, too.
        empty = bool(holding.sharded) and not holding.here
        for state, stems in states.items():
            forms = [self._forms[stem] for stem in stems]
            if any(role_of(stem) is not None for stem in stems) or any(set(each) != {""} for each in forms):
                if empty:
                    self.tensors[state] = torch.zeros_like(holding.parameter)
                else:
                    self._add(state, stems)
            else:
                self.left[state] = self._forms[state][""]

    def _add(self, state: str, stems: list[str]) -> None:
        found = {stem: self._key(stem) for stem in stems}
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
            what = f"optimizer state '{stem}' of {self._holding.label}"
            wrong = problem_with(self._source, key, what, target, self._where)
            if wrong is not None:
                raise ConfigError(wrong)
            self.targets[key] = target

    def _not_there(self, state: str, stem: str) -> str:
        what = f"optimizer state '{state}' of {self._holding.label}"
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

    def _key(self, stem: str) -> str | None:
        forms = self._forms[stem]
        return forms.get("", forms.get(self._label))

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
        entry = self._entry(key)
        shape, dtype, role = entry.shape, entry.dtype, role_of(stem) or Role.ELEMENTS
        parameter = self._holding.parameter
        own = self._holding.sharded[0] if self._holding.sharded else None
        if role is Role.TABLE:
            return self._local(stem, shape, dtype)
        if own is None:
            return self._local(stem, shape, dtype)
        if key != self._forms[stem].get(""):
            numel = parameter.numel()
            self._require_blocks(stem, role, math.prod(shape), numel)
            if math.prod(shape) != numel:
                return self._local(stem, shape, dtype)
            return whole(_in_a_row(self._local(stem, tuple(parameter.shape), dtype)))
        if shape == own.shape and role is Role.ELEMENTS:
            return of_parameter(own, self._local(stem, tuple(parameter.shape), dtype))
        numel = math.prod(own.shape)
        self._require_blocks(stem, role, math.prod(shape), numel)
        elements = self._blocks.size if role is Role.SCALES else numel // math.prod(shape)
        local = self._local(stem, (-(-parameter.numel() // elements),), dtype)
        found = of_blocks(own, local, elements)
        if found is None:
            del self.tensors[stem]
        return found

    def _require_blocks(self, stem: str, role: Role, numbers: int, numel: int) -> None:
        size = self._blocks.size
        fits = numbers == -(-numel // size) if role is Role.SCALES else numbers and numel % numbers == 0
        if not fits:
            raise ConfigError(
                f"{opening(self._source)} has {numbers} numbers of '{stem}' for {numel} elements of "
                f"{self._holding.label}, and the optimizer has blocks of {size} {self._where}. Make the optimizer "
                "as it was when it was saved."
            )

    def _local(self, stem: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        present = self._present.get(stem)
        local = present.value if isinstance(present, StateTensor) else present
        if not isinstance(local, torch.Tensor) or tuple(local.shape) != shape or local.dtype != dtype:
            parameter = self._holding.parameter
            if shape == tuple(parameter.shape):
                local = torch.zeros_like(parameter, dtype=dtype)
            else:
                local = torch.zeros(shape, dtype=dtype, device=parameter.device)
        self.tensors[stem] = local.detach()
        return self.tensors[stem]
