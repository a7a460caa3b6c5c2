"""Directories that others wrote by ``torch.distributed.checkpoint``, read into a model and its optimizer."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .._torch_private import StorageInfo
from ..errors import CheckpointDamagedError, ConfigError, StateError
from ..inspect import savable_model
from ..interfaces import Collectives
from ..io.boxes import Box, Chunk, box_within
from ..io.files import REMEDY as OF_LATEST
from ..io.files import OpenedFile, damaged, opened
from ..state.contents import Joint, Optimizers, known_names
from ..state.exchange import notify_listeners, require_same, together
from ..state.restore import Restore
from ..state.sharded import MODEL, OPTIMIZER, names_by_group
from ..state.source import Entry, Source, chunks_of, listed, opening, require_name, same_values
from .dcp_metadata import DcpMetadata, read_metadata
from .loading import REMEDY, require_file_seen
from .manifest import DESCRIBED
from .reading import readable
from .storage import place_of


def load_dcp(
    directory: Path, model: nn.Module, optimizer: Optimizers | None = None, *, keys: DcpKeys | None = None
) -> None:
    """Read a directory that somebody wrote by ``torch.distributed.checkpoint.save``: from FSDP2, DDP or one process.

    The state dict that was saved has the forms of ``torch.distributed.checkpoint.state_dict.get_state_dict``, its
    optimizer flattened or not. Each rank reads what it holds; the number of ranks does not matter. Parameters and
    buffers change in place; an optimizer that never stepped is given its state. Of the optimizer's class such a
    directory says nothing; settings that are on or off are compared. Every rank calls it, between steps.

    Pickles in the directory execute nothing: an unpickler that knows DCP's classes alone reads the metadata, and
    ``torch.load(weights_only=True)`` values. What names another class is refused. Files are plain ones of the directory
    itself. Such a directory has no digests: who can write there can put other values there.

    Args:
        directory: Where the file ``.metadata`` is.
        model: The outermost sharded module.
        optimizer: As in ``load``; None leaves the saved one alone.
        keys: Where in the saved state dict both are; ``DcpKeys()``, ``"model"`` and ``"optimizer"``, where None.

    Raises:
        StateError: the directory is none of DCP, or names what is not read; inside a step; ``model`` is not the
            outermost sharded module.
        CheckpointDamagedError: it contradicts itself, by its metadata and the sizes of files, and nothing was changed;
            or a tensor cannot be read, or is another one, and the model may hold parts of what was read.
        ConfigError: it holds another model or optimizer, or neither under these keys; nothing was changed.
        RankMismatchError: another rank failed, or was given another directory.
        OSError: reading failed; the model may hold parts of what was read.
    """
    sharded = savable_model(model, "checkpoint.load_dcp()")
    with sharded.meeting("load of a checkpoint", (sharded.collectives,)):
        collectives = sharded.collectives
        called: dict[str, object] = {}
        require_file_seen(collectives, directory, DESCRIBED)
        with _jointly("Opening", directory, collectives, called):
            place = place_of(directory, "directory")
            if not isinstance(place, Path):
                raise ConfigError(f"directory is {place!r}: load_dcp reads local paths alone. Copy it to one.")
            directory = place
            joint = None if optimizer is None else Joint(optimizer)
            called.update(optimizer=str(joint and joint.signature), keys=keys)
            groups = None if joint is None else names_by_group(sharded, joint.groups)
            metadata = read_metadata(directory)
            source = ForeignSource(directory, metadata, keys or DcpKeys(), groups, known_names(sharded))
        require_same(collectives, directory, metadata.identity, REMEDY)
        with _jointly("Matching", directory, collectives):
            restore = Restore(source, sharded, joint)
            source.require_there(restore.targets)
        with _jointly("Reading", directory, collectives):
            source.read(restore.targets)
            restore.commit()
        notify_listeners(collectives, f"the load of {directory}", partial(sharded.notify_loaded, model, directory))


@contextmanager
def _jointly(doing: str, directory: Path, collectives: Collectives, called: Any = None) -> Iterator[None]:
    """Ranks fail together, with errors that do not name ``latest``, which knows nothing of the directory."""
    with together(collectives, f"{doing} the directory {directory}", called):
        try:
            with readable(directory, collectives.rank):
                yield
        except CheckpointDamagedError as error:
            raise CheckpointDamagedError(str(error).replace(OF_LATEST, "Save it again, or load another.")) from error


_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
#: Of a list of names that is put together, not read. No key of a checkpoint begins so.
_MADE = "\0"
#: In what torch says of a class that ``weights_only`` does not read.
_UNKNOWN = re.compile(r"GLOBAL (\S+)")


@dataclass(frozen=True)
class DcpKeys:
    """Where in a saved state dict the model and the optimizer are.

    Each is the key of a top-level entry, a tuple of keys that lead there (``("app", "model")``), or ``()`` where the
    names are at the top themselves.
    """

    model: str | tuple[str, ...] = "model"
    optimizer: str | tuple[str, ...] = "optimizer"

    def path(self, what: str) -> tuple[str, ...]:
        """The keys that lead to ``what``, ``model`` or ``optimizer``."""
        given: str | tuple[str, ...] = self.model if what == MODEL else self.optimizer
        return (given,) if isinstance(given, str) else tuple(given)


class ForeignSource(Source):
    """A state dict of the forms that ``torch.distributed.checkpoint.state_dict`` gives, flattened or not."""

    remedy = "the ranks that wrote it did not all write. Save it again."

    def __init__(
        self,
        directory: Path,
        metadata: DcpMetadata,
        keys: DcpKeys,
        groups: Sequence[Sequence[str]] | None,
        names: Mapping[str, str],
    ) -> None:
        """``groups``: the parameters' names in each group of the optimizer, which a flattened state dict does not know.

        ``names``: what ``known_names`` gave of the model.

        Raises ConfigError: there is no model or optimizer where ``keys`` says, or the optimizer's state is by numbers.
        """
        self.label = f"the directory {directory}"
        self._directory, self._metadata, self._keys, self._groups = directory, metadata, keys, groups or ()
        self._known = names
        self._aliases: dict[str, tuple[str, ...]] = {}
        self._made: dict[str, list[str]] = {}
        self._paths = {key: (MODEL, path[0]) for key, path in self._below(MODEL) if len(path) == 1}
        if not self._paths:
            raise self._nothing("model", keys.model)
        if groups is not None:
            if not (found := self._optimizer_paths()):
                raise self._nothing("optimizer", keys.optimizer)
            self._paths.update(found)
        self.know(names)

    @override
    def read(self, targets: dict[str, Any]) -> None:
        wanted = {key: target for key, target in targets.items() if key not in self._made}
        # Settings of a flattened state dict are there once a parameter, and one group's must agree.
        beside = {
            other: torch.empty_like(targets[key]) if isinstance(targets[key], torch.Tensor) else None
            for key in wanted
            for other in self._aliases.get(key, ())
        }
        both: dict[str, Any] = {**beside, **wanted}
        both.update({key: self._load(key, None) for key in both if self.entry(key) is None})
        for key, box, parts in self._needed(both):
            found, told = self._load(key, box.offsets), f"{self._metadata.tensors[key].dtype} of {box.sizes}"
            plain = type(found) is torch.Tensor and found.layout is torch.strided and found.device.type == "cpu"
            what = f"{found.dtype} of {tuple(found.shape)}" if plain else f"{type(found).__name__} of another kind"
            if what != told:
                raise self._damaged(key, self._metadata.places[key, box.offsets], f"it is {what}, and must be {told}")
            with torch.no_grad():
                for each in parts:
                    each.view.copy_(box_within(found, box, each.box))
        targets.update({key: self._made.get(key, both.get(key)) for key in targets})
        for key in wanted:
            for other in self._aliases.get(key, ()):
                if not same_values(both[key], both[other]):
                    raise ConfigError(
                        f"{opening(self)} has {both[key]} as '{key}' but {both[other]} as '{other}', and the optimizer "
                        "has both parameters in one group. Make its groups as they were when it was saved."
                    )

    @override
    def entry(self, key: str) -> Entry | None:
        return self._metadata.tensors.get(key)

    def require_there(self, targets: Mapping[str, Any]) -> None:
        """Raise CheckpointDamagedError where a file that ``targets`` need is gone, or ends too early."""
        for key, box, _ in self._needed(targets):
            with self._opened(key, box.offsets):
                pass

    def _needed(self, targets: Mapping[str, Any]) -> Iterator[tuple[str, Box, list[Chunk]]]:
        """Each box that has elements of ``targets``: its key, itself, and these elements."""
        for key in filter(self._metadata.tensors.__contains__, targets):
            chunks = list(chunks_of(targets[key]))
            for box in self._metadata.tensors[key].boxes:
                common = [(have, have.box.overlap(box)) for have in chunks]
                parts = [Chunk(part, box_within(have.view, have.box, part)) for have, part in common if part]
                if parts:
                    yield key, box, parts

    def _load(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        with self._opened(key, offsets) as (file, place):
            content = io.BytesIO(bytes(place.length))
            file.read([content.getbuffer()], place.offset)
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:
            if (unknown := _UNKNOWN.search(str(error))) is None:
                raise self._damaged(key, place, f"{type(error).__name__}: {str(error)[:80]}") from error
            raise StateError(
                f"{opening(self)} has an object of {unknown[1]} in '{key:.200}', which weights_only does not read. "
                "Load without the optimizer, save numbers, texts, lists, tuples, dicts and tensors in its place, or "
                "allow a class that you trust by torch.serialization.add_safe_globals."
            ) from error

    @contextmanager
    def _opened(self, key: str, offsets: tuple[int, ...] | None) -> Iterator[tuple[OpenedFile, StorageInfo]]:
        place = self._metadata.places[key, offsets]
        with opened(self._directory, place.relative_path) as file:
            if place.offset + place.length > file.size:
                raise self._damaged(key, place, f"the file has {file.size:,} bytes")
            yield file, place

    def _damaged(self, key: str, at: StorageInfo, why: str) -> CheckpointDamagedError:
        return damaged(self._directory, f"'{at.relative_path}' has no '{key:.200}' at byte {at.offset:,}: {why}")

    def _below(self, what: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
        start = self._keys.path(what)
        for key, path in self._metadata.paths.items():
            if path[: len(start)] == start and len(path) > len(start):
                yield key, path[len(start) :]

    def _optimizer_paths(self) -> dict[str, tuple[Any, ...]]:
        found: dict[str, tuple[Any, ...]] = {}
        settings: dict[str, dict[str, str]] = {}
        for key, path in self._below(OPTIMIZER):
            if path[0] == _STATE and len(path) == 3:
                require_name(path[1])
                found[key] = (OPTIMIZER, *path)
            elif path[0] == _GROUPS and len(path) == 3 and path[1] in range(len(self._metadata.paths)):
                found[key] = (OPTIMIZER, *path)
            elif len(path) == 1 and str(path[0]).startswith(f"{_STATE}."):
                name, _, state = path[0].removeprefix(f"{_STATE}.").rpartition(".")
                found[key] = (OPTIMIZER, _STATE, name, state)
            elif len(path) == 1 and str(path[0]).startswith(f"{_GROUPS}."):
                name, _, setting = path[0].removeprefix(f"{_GROUPS}.").rpartition(".")
                settings.setdefault(self.named(name), {})[setting] = key
        if settings:
            found.update(self._grouped(settings))
        return found

    def _grouped(self, settings: dict[str, dict[str, str]]) -> dict[str, tuple[Any, ...]]:
        """The paths of groups, made of what a flattened state dict has for each parameter."""
        found: dict[str, tuple[Any, ...]] = {}
        left = set(settings).difference(*self._groups)
        for index, names in enumerate(self._groups):
            members = [name for name in names if name in settings]
            for setting, key in settings[members[0]].items() if members else ():
                found[key] = (OPTIMIZER, _GROUPS, index, setting)
                self._aliases[key] = tuple(settings[name][setting] for name in members[1:] if setting in settings[name])
            made = f"{_MADE}{index}"
            found[made] = (OPTIMIZER, _GROUPS, index, _PARAMS)
            # What no group of the optimizer has makes the first one differ, by name.
            self._made[made] = [*members, *(sorted(left) if index == 0 else ())]
        return found

    def _nothing(self, what: str, given: str | tuple[str, ...]) -> ConfigError:
        top = listed(sorted({str(path[0]) for path in self._metadata.paths.values()})) or "nothing by name"
        return ConfigError(
            f"{opening(self)} has no {what} at {given!r}; at the top it has {top}. Say where: DcpKeys({what}=...)."
        )
