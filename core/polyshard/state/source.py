"""Sources of values for a model and an optimizer: the contract, and state dicts in memory."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from typing_extensions import override

from ..errors import ConfigError, ConfigTypeError
from ..inspect import ShardedParameter, is_dtensor, local_of, taken_apart, without_wrappers
from ..io.boxes import Box, Chunk, box_within
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
    _known: Mapping[str, str] = MappingProxyType({})
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

    def named(self, name: str) -> str:
        """What is ``name`` there, as state dicts have it now: it may have been saved with what wrappers add."""
        return as_known(name, self._known)

    def know(self, names: Mapping[str, str]) -> None:
        """Let paths have the names of a model. ``names``: what ``known_names`` gave of it."""
        self._known = names
        self._paths = {key: self._renamed(path) for key, path in self._paths.items()}

    def _renamed(self, path: _Path) -> _Path:
        if path[0] == MODEL:
            return MODEL, self.named(".".join(map(str, path[1:])))
        by_name = path[:2] == (OPTIMIZER, "state") and len(path) > 2
        return (*path[:2], self.named(path[2]), *path[3:]) if by_name else path

    def blank(self, key: str) -> torch.Tensor | None:
        """What ``read`` is given for ``key`` where the value is wanted as it is: a tensor to be filled, or None."""
        entry = self.entry(key)
        return None if entry is None else torch.empty(entry.shape, dtype=entry.dtype)


def as_known(name: str, known: Mapping[str, str]) -> str:
    """What is called ``name``, which may have what wrappers add, without that. ``known``: as of ``known_names``."""
    bare = without_wrappers(name)
    return known.get(name) or known.get(bare, bare)


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
        # Which have each element once.
        held = sum(common.numel for common in map(box.overlap, entry.boxes) if common is not None)
        if held != box.numel:
            return (
                f"{opening(source)} holds {held} of the {box.numel} elements of "
                f"{what} from {list(box.offsets)} on {where}: {source.remedy}"
            )
    return None


def fits(present: Any, shape: Iterable[int], dtype: torch.dtype) -> TypeGuard[torch.Tensor]:
    return isinstance(present, torch.Tensor) and tuple(present.shape) == tuple(shape) and present.dtype == dtype


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
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, Real) and value == value


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


class StateDictSource(Source):
    """State dicts of the forms that ``polyshard.state`` and torch give: whole tensors on each rank, or DTensors."""

    converts = True
    label = "the state dict"

    def __init__(
        self,
        model: Mapping[str, Any] | None,
        optimizer: Mapping[str, Any] | None,
        parameters: Iterable[ShardedParameter],
        names: Mapping[str, str],
    ) -> None:
        """``parameters``, ``names``: of the model, and what ``known_names`` gave of it.

        Raises ConfigError: a state dict has another form.
        """
        placed = {name: each.shown for each in parameters for name in each.names}
        given = dict(_flattened(model, optimizer))
        self._paths = {".".join(map(str, path)): path for path in given}
        self._values = {key: given[path] for key, path in self._paths.items()}
        self.know(names)
        self.gathered: dict[str, Any] = {}
        """Placements by key, of DTensors that are placed otherwise than the parameter: the same on every rank."""
        for key, value in sorted(self._values.items()):
            path = self._paths[key]
            parameter = placed.get(path[1] if path[0] == MODEL else path[2])
            if is_dtensor(value) and not _placed_alike(value, parameter):
                self.gathered[key] = value.placements

    @override
    def entry(self, key: str) -> Entry | None:
        value = self._values.get(key)
        if not isinstance(value, torch.Tensor):
            return None
        return Entry(tuple(value.shape), value.dtype, [Box.whole(value.shape)])

    @override
    def read(self, targets: dict[str, Any]) -> None:
        with torch.no_grad():
            for key, target in targets.items():
                value = self._values[key]
                if not isinstance(target, torch.Tensor):
                    targets[key] = copy.deepcopy(value)
                elif key not in self.gathered:
                    _copy(target, value)

    def read_gathered(self, targets: Mapping[str, Any]) -> None:
        """Fill those of ``targets`` that take other ranks' elements, one after the other. Every rank calls it."""
        with torch.no_grad():
            for key in self.gathered:
                whole_value = self._values[key].full_tensor()
                if key in targets:
                    _copy(targets[key], whole_value)
                del whole_value


def _placed_alike(one: Any, other: Any) -> bool:
    alike = is_dtensor(other) and one.shape == other.shape and one.device_mesh == other.device_mesh
    return alike and bool(one.placements == other.placements)


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
        for key, tensor in taken_apart({key: _replicated(each) for key, each in states.items()}).items():
            local = local_of(tensor) if is_dtensor(tensor) else tensor
            if is_dtensor(tensor) and hasattr(local, "__tensor_flatten__"):
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
    placed = is_dtensor(value)
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


def in_chunks(value: Any) -> bool:
    """Whether ``value`` is a tensor that says which chunks of it are here: one of this package's, or a ``DTensor``."""
    return isinstance(value, CheckpointTensor) or is_dtensor(value)


def _replicated(value: Any) -> Any:
    """A DTensor that every rank holds whole, as a plain tensor."""
    if is_dtensor(value) and all(placement.is_replicate() for placement in value.placements):
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


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    """Fill what this rank holds of ``target`` from what it holds of ``value``, of the same shape."""
    have = list(chunks_of(value))
    for wanted in chunks_of(target):
        for each in have:
            common = wanted.box.overlap(each.box)
            if common is not None:
                box_within(wanted.view, wanted.box, common).copy_(box_within(each.view, each.box, common))
