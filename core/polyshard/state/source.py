"""Sources of values for a model and an optimizer: the contract, and state dicts in memory."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..errors import ConfigError, ConfigTypeError, RankMismatchError
from ..inspect import NOT_BY_ELEMENT, StateTensor, local_of, taken_apart
from ..interfaces import Collectives
from ..io.boxes import Box, Chunk, box_within
from .exchange import coordinates, from_first, speaks
from .sharded import MODEL, OPTIMIZER, CheckpointTensor, whole

_MOST_NAMES = 8

#: By parameter and name of the state, the source's key.
SavedState = Mapping[str, Mapping[str, str]]
_Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a source, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[Box]
    """Those of its elements that are there."""


class Source(ABC):
    """Values by key, with shapes and dtypes known before any is read. A key stands for a path through containers."""

    #: For the middle of an error's sentence.
    label: str
    #: Whether all elements of everything are there; not so where one rank of a pretended world saved.
    complete: bool = True
    #: Whether values of a model are converted to its dtypes, instead of refused where they are of others.
    converts: bool = False
    _paths: dict[str, _Path]
    #: Why elements that a target needs may be missing, and what to do.
    remedy: str = "one rank of a pretended world saved it. Load it on the same rank of the same world size."

    @abstractmethod
    def read(self, targets: dict[str, Any]) -> None:
        """Fill tensors in place and replace other values, by key."""

    @abstractmethod
    def entry(self, key: str) -> Entry | None:
        """The tensor under ``key``; None where there is nothing, or something else."""

    def paths(self, *prefix: str) -> dict[str, _Path]:
        """Each key under ``prefix`` and the path of its value."""
        return {key: path for key, path in self._paths.items() if path[: len(prefix)] == prefix}

    def blank(self, key: str) -> torch.Tensor | None:
        """What ``read`` is given for ``key`` where the value is wanted as it is: a tensor to be filled, or None."""
        entry = self.entry(key)
        return None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)


def problem_with(source: Source, key: str, what: str, target: Any, where: str) -> str | None:
    """Why not all of ``target`` can be read from ``source`` under ``key``; None where it can."""
    entry = source.entry(key)
    if entry is None:
        return f"{what} is no tensor in {source.label} {where}. Load it into the model that it was saved from."
    if entry.shape != tuple(target.shape):
        return (
            f"{what} has shape {entry.shape} in {source.label} but {tuple(target.shape)} in the model "
            f"{where}. Load it into the model that it was saved from."
        )
    if entry.dtype != target.dtype and not source.converts:
        return (
            f"{what} is {entry.dtype} in {source.label} but {target.dtype} in the model {where}. "
            f"Convert the model before sharding, by to({entry.dtype}); after loading, it cannot be."
        )
    if sum(box.numel for box in entry.boxes) == math.prod(entry.shape):
        return None
    for box in (chunk.box for chunk in chunks_of(target)):
        held = _held(box, entry.boxes)
        if held != box.numel:
            return (
                f"{opening(source)} holds {held} of the {box.numel} elements of "
                f"{what} from {list(box.offsets)} on {where}: {source.remedy}"
            )
    return None


def fits(present: Any, shape: Iterable[int], dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    return isinstance(present, torch.Tensor) and tuple(present.shape) == tuple(shape) and present.dtype == dtype


def require_dtype(present: Any, dtype: torch.dtype, what: str, source: Source, where: str) -> None:
    """Raise ConfigError where the optimizer has a state, ``present``, in another dtype than ``source``."""
    if isinstance(present, torch.Tensor) and present.dtype != dtype:
        raise ConfigError(
            f"{what} is {dtype} in {source.label} but {present.dtype} in the optimizer {where}. Load it "
            "into an optimizer of the dtypes that it was saved from."
        )


def same_values(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def resembles(value: Any, like: Any) -> bool:
    """Whether ``value`` can be where an optimizer has ``like``: a number for one, and as many for a tuple of them."""
    if isinstance(like, torch.Tensor) and like.numel() != 1:
        return isinstance(value, torch.Tensor)
    if _is_number(like):
        return _is_number(value)
    if isinstance(like, str):
        return isinstance(value, str)
    if isinstance(like, tuple):
        return isinstance(value, tuple | list) and len(value) == len(like) and all(map(resembles, value, like))
    # A list may have grown.
    return not isinstance(like, list) or isinstance(value, tuple | list)


def _is_number(value: Any) -> bool:
    """Whether it is one number, and not NaN."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, Real) and value == value


def require_like(value: Any, name: str, present: Mapping[str, Any], what: str, source: Source, where: str) -> None:
    """Raise ConfigError where ``value``, which is no tensor of elements, can be no state ``name`` of ``what``.

    ``present``: the optimizer's state now; where it has none, what torch's optimizers have of this name.
    """
    like = present.get(name, 0.0 if name in NOT_BY_ELEMENT else None)
    if value is not None and not resembles(value, like):
        raise ConfigError(
            f"optimizer state '{name}' of {what} is {value!r} in {source.label}, which no optimizer has {where}. Load "
            "an older checkpoint, or load without its optimizer."
        )


def _held(box: Box, boxes: Iterable[Box]) -> int:
    """How many elements of ``box`` are in ``boxes``, which have each element once."""
    return sum(common.numel for common in map(box.overlap, boxes) if common is not None)


def opening(source: Source) -> str:
    """``label`` for the beginning of a sentence."""
    return f"{source.label[0].upper()}{source.label[1:]}"


def in_lines(problems: Sequence[str]) -> str:
    """The first of ``problems``, one a line."""
    more = len(problems) - _MOST_NAMES
    return "\n".join([*problems[:_MOST_NAMES], *([f"and {more} more"] if more > 0 else [])])


def listed(names: Sequence[str]) -> str:
    """The first of ``names``, quoted."""
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES])
    return f"{shown} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else shown


@dataclass(frozen=True, slots=True)
class _ValueSpec:
    path: _Path
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    """None: it is no tensor."""
    value: Any = None
    """The value itself, where it is no tensor or a scalar one."""

    @property
    def travels(self) -> bool:
        """Whether its elements are not in ``value``."""
        return self.dtype is not None and self.value is None


class StateDictSource(Source):
    """State dicts of the forms that ``model_state`` and ``optimizer_state`` have, of any kind of tensors.

    Each rank gives its own. Or rank 0 gives whole tensors for all: other ranks then know names and shapes, and receive
    one tensor after the other.
    """

    converts = True
    remedy = (
        "its tensors are cut otherwise than the model's. Save it by torch.distributed.checkpoint and load that, or "
        "give whole tensors."
    )

    def __init__(
        self,
        model: Mapping[str, Any] | None,
        optimizer: Mapping[str, Any] | None,
        collectives: Collectives,
        *,
        from_rank_0: bool,
    ) -> None:
        """``from_rank_0``: every rank calls it, and errors of rank 0's state dicts are raised on every rank.

        Raises ConfigError: a state dict has another form, or rank 0's holds parts of tensors.
        """
        self._collectives = collectives
        self._from_rank_0 = from_rank_0
        self.label = "the state dict of rank 0" if from_rank_0 else "the state dict"
        self._gathered: list[str] = []
        if from_rank_0:
            self.remedy = "rank 0 must give whole tensors."
        given: dict[_Path, Any] = {}
        problem: ConfigError | None = None
        if not from_rank_0 or coordinates(collectives):
            try:
                given = dict(_flattened(model, optimizer))
                if from_rank_0:
                    _refuse_parts(given)
            except ConfigError as error:
                problem = error
        #: By key, those that this rank has.
        self._values = {".".join(map(str, path)): value for path, value in given.items()}
        #: By key, all.
        self._specs = {".".join(map(str, path)): _spec(path, value) for path, value in given.items()}
        if from_rank_0:
            problem, self._specs = from_first(collectives, (problem, self._specs))
        if problem is not None:
            raise problem
        self._paths = {key: spec.path for key, spec in self._specs.items()}

    def entry(self, key: str) -> Entry | None:
        spec, value = self._specs.get(key), cast(Any, self._values.get(key))
        if spec is None or spec.dtype is None:
            return None
        cut = in_chunks(value) and not _is_dtensor(value)
        boxes = [chunk.box for chunk in chunks_of(value)] if cut else [Box.whole(spec.shape)]
        return Entry(spec.shape, spec.dtype, boxes)

    def read(self, targets: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, target in targets.items():
                spec = self._specs[key]
                if self._from_rank_0 and spec.travels:
                    continue
                value = self._values.get(key, spec.value)
                if not isinstance(target, torch.Tensor):
                    targets[key] = copy.deepcopy(value)
                elif not _is_dtensor(value):
                    _copy(target, value)

    def agree(self, targets: Mapping[str, Any]) -> None:
        """Find the DTensors that must be gathered, because some rank needs other elements than it has.

        Every rank calls it, before ``read`` and ``read_from_others``.

        Raises RankMismatchError: ranks have DTensors under different names; on every rank.
        """
        names = sorted(key for key, value in self._values.items() if _is_dtensor(value))
        lacking = [key for key in names if key in targets and not _covers(self._values[key], targets[key])]
        everyone = [(names, lacking)]
        if speaks(self._collectives):
            everyone = list(self._collectives.all_gather_object((names, lacking)))
        different = sorted({key for keys, _ in everyone for key in set(keys) ^ set(everyone[0][0])})
        if different:
            raise RankMismatchError(
                f"{listed(different)} of the state dict are DTensors on some ranks and not on others (rank "
                f"{self._collectives.rank}). Give all ranks the same kinds of tensors."
            )
        self._gathered = sorted({key for _, keys in everyone for key in keys})

    def read_from_others(self, targets: Mapping[str, Any]) -> None:
        """Fill those of ``targets`` that take other ranks' elements. Every rank calls it."""
        with torch.no_grad():
            if self._from_rank_0:
                self._receive(targets)
                return
            for key, value in sorted(self._values.items()):
                if _is_dtensor(value):
                    whole_value = value.full_tensor() if key in self._gathered else value
                    if key in targets:
                        _copy(targets[key], whole_value)
                    del whole_value

    def _receive(self, targets: Mapping[str, Any]) -> None:
        for key, spec in self._specs.items():
            if not spec.travels:
                continue
            value = self._values.get(key)
            if value is None or speaks(self._collectives):
                carried: Any = torch.empty(spec.shape, dtype=spec.dtype, device=self._collectives.device)
                if value is not None:
                    carried.copy_(value)
                if carried.numel():
                    self._collectives.broadcast(carried, 0).wait()
                value = carried
            if key in targets:
                _copy(targets[key], value)
            # One at a time.
            value = carried = None


def _refuse_parts(given: Mapping[_Path, Any]) -> None:
    for path, value in given.items():
        if in_chunks(value):
            raise ConfigError(
                f"'{'.'.join(map(str, path[1:]))}' of the state dict of rank 0 is a {type(value).__name__}, of which "
                "rank 0 holds a part. Give whole tensors, as the form 'full_on_rank_0' has them, or let every rank "
                "give its own."
            )


def _flattened(model: Mapping[str, Any] | None, optimizer: Mapping[str, Any] | None) -> Iterator[tuple[_Path, Any]]:
    """The paths and values of both state dicts.

    Raises:
        ConfigTypeError: one is no mapping.
        ConfigError: an optimizer's is not by names.
    """
    for what, given in (("model", model), ("optimizer", optimizer)):
        if given is not None and not isinstance(given, Mapping):
            raise ConfigTypeError(f"The {what}'s state dict is a {type(given).__name__}; give a mapping of names.")
    for name, value in (model or {}).items():
        for inner, tensor in _inner(name, _replicated(value)):
            yield (MODEL, inner), tensor
    if optimizer is None:
        return
    if not {"state", "param_groups"} <= optimizer.keys():
        raise ConfigError(
            f"The optimizer's state dict has {sorted(map(str, optimizer))}, and must have 'state' and 'param_groups', "
            "as polyshard.state.get_optimizer_state_dict and torch's function of this name give them."
        )
    for name, states in optimizer["state"].items():
        require_name(name)
        for key, value in taken_apart({key: _replicated(each) for key, each in states.items()}).items():
            tensor = value.value if isinstance(value, StateTensor) else value
            local = local_of(tensor) if _is_dtensor(tensor) else tensor
            if _is_dtensor(tensor) and hasattr(local, "__tensor_flatten__"):
                raise ConfigError(
                    f"The optimizer's state '{key}' of '{name}' is a DTensor of {type(local).__name__}, "
                    "whose blocks are each rank's own. Give the state of whole parameters, from one process."
                )
            yield (OPTIMIZER, "state", name, key), tensor
    for index, group in enumerate(optimizer["param_groups"]):
        for name in group["params"]:
            require_name(name)
        for setting, value in group.items():
            yield (OPTIMIZER, "param_groups", index, setting), value


def _inner(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``value``, or the plain tensors that it is made of, each with its name.

    Raises ConfigError: a DTensor of a class of its own.
    """
    placed = _is_dtensor(value)
    local = local_of(value) if placed else value
    if not isinstance(local, torch.Tensor) or not hasattr(local, "__tensor_flatten__"):
        yield name, value
        return
    kind = type(local).__name__
    if placed:
        raise ConfigError(
            f"'{name}' of the state dict is a DTensor of {kind}, of which each rank has rows. Give it whole, or what "
            "polyshard.state.get_model_state_dict gives."
        )
    for attribute in local.__tensor_flatten__()[0]:
        inner = getattr(local, attribute)
        alone = inner.shape == local.shape and inner.dtype == local.dtype and len(local.__tensor_flatten__()[0]) == 1
        yield name if alone else f"{name}.{attribute}", inner


def require_name(name: object) -> None:
    """Refuse what ``optimizer.state_dict()`` has instead of names. Raises ConfigError: ``name`` is a number."""
    if not isinstance(name, str) or name.isdecimal():
        raise ConfigError(
            f"The optimizer's state is by numbers ({name!r}), as optimizer.state_dict() has it, which says nothing of "
            "names. Take it by get_optimizer_state_dict of torch.distributed.checkpoint.state_dict, or of "
            "polyshard.state."
        )


def _spec(path: _Path, value: Any) -> _ValueSpec:
    if not isinstance(value, torch.Tensor):
        return _ValueSpec(path, value=value)
    # Scalars go with the names: one message less for each number of steps.
    scalar = value.ndim == 0 and not in_chunks(value)
    return _ValueSpec(path, tuple(value.shape), value.dtype, value.detach().cpu() if scalar else None)


def _is_dtensor(value: Any) -> bool:
    return in_chunks(value) and not isinstance(value, CheckpointTensor) and hasattr(value, "full_tensor")


def in_chunks(value: Any) -> bool:
    """Whether ``value`` is a tensor that says which chunks of it are here: one of this package's, or a ``DTensor``."""
    return isinstance(value, torch.Tensor) and hasattr(value, "__create_chunk_list__")


def _replicated(value: Any) -> Any:
    """A DTensor that every rank holds whole, as a plain tensor."""
    if _is_dtensor(value) and all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    return value


def chunks_of(value: torch.Tensor) -> Iterable[Chunk]:
    """This rank's parts of ``value``."""
    if isinstance(value, CheckpointTensor):
        return value.chunks
    if not in_chunks(value):
        return whole(value).chunks
    parts: Any = value
    return [
        Chunk(
            Box(tuple(chunk.offsets), tuple(chunk.sizes)), parts.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        )
        for chunk in parts.__create_chunk_list__()
    ]


def _covers(value: torch.Tensor, target: torch.Tensor) -> bool:
    have = [each.box for each in chunks_of(value)]
    return all(_held(wanted.box, have) == wanted.box.numel for wanted in chunks_of(target))


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    """Fill what this rank holds of ``target`` from what it holds of ``value``, of the same shape."""
    have = list(chunks_of(value))
    for wanted in chunks_of(target):
        for each in have:
            common = wanted.box.overlap(each.box)
            if common is not None:
                box_within(wanted.view, wanted.box, common).copy_(box_within(each.view, each.box, common))
