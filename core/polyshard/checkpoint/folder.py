"""The checkpoints in one folder: which is the latest, and which of them one model goes back to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from ..errors import ConfigError, StateError, warn_once
from . import reading
from .encoding import MOST
from .manifest import Marker
from .storage import MARKER, AnyPlace, Place, place_of, storage_of

#: With the number of a step that was saved again, or with the digits that object stores add.
_DIRECTORY = re.compile(r"step-\d{8,}(?:\.\d+)?(?:\.[0-9a-f]{12})?")


@dataclass(frozen=True, slots=True)
class Entry:
    directory: Place
    marker: Marker

    def problem(self, *, verified: bool) -> str | None:
        """The problem with its files; None without one. ``verified``: whether their contents are looked at."""
        try:
            if verified:
                reading.verify(self.directory)
            else:
                self.marker.require_files(self.directory)
        except (StateError, OSError) as error:
            return _lasting(error, self.directory)
        return None


def _lasting(error: StateError | OSError, directory: Place) -> str:
    """The words of ``error``. Raises it where it may be over by the next time."""
    if isinstance(error, OSError) and storage_of(directory).errors_pass:
        raise error
    return str(error)


@dataclass(frozen=True, slots=True)
class Contents:
    entries: tuple[Entry, ...]
    """Committed checkpoints, in the order of their commits."""
    unreadable: tuple[str, ...] = ()
    """The problems of directories whose marker cannot be read."""

    @classmethod
    def of(cls, folder: Place) -> Contents:
        """What ``folder`` holds; nothing where it does not exist.

        Raises OSError: it cannot be listed; or a marker cannot be read now, on an object store.
        """
        entries, unreadable = [], []
        storage = storage_of(folder)
        for name in storage.names(folder):
            directory = folder / name
            if _DIRECTORY.fullmatch(name) and storage.exists(directory / MARKER):
                try:
                    entries.append(Entry(directory, Marker.found(directory)))
                except (StateError, OSError) as error:
                    unreadable.append(_lasting(error, directory))
        entries.sort(key=lambda entry: (entry.marker.turn, entry.marker.step, entry.directory.name))
        return cls(tuple(entries), tuple(unreadable))

    @property
    def identities(self) -> frozenset[str]:
        return frozenset(entry.marker.identity for entry in self.entries)

    def line(self, identity: str | None) -> Iterator[Entry]:
        """The entry ``identity`` and those that it goes back to, newest first."""
        by_identity = {entry.marker.identity: entry for entry in self.entries}
        while identity is not None and identity in by_identity:
            entry = by_identity.pop(identity)
            yield entry
            identity = entry.marker.parent


def latest(folder: AnyPlace, *, verify: bool = False) -> AnyPlace | None:
    """The checkpoint in ``folder`` that was committed last; None where there is none.

    One with files that are gone or of another size is passed over, with a warning that names it, for the one that it
    goes back to.

    Args:
        folder: The ``root`` of saves.
        verify: Whether to read what files hold, too, and to pass over checkpoints that ``polyshard.checkpoint.verify``
            refuses: takes as long as reading all of the newest.

    Raises:
        ConfigError: ``folder`` is no path.
        OSError: ``folder`` cannot be listed; or an object store did not answer, which says nothing of a checkpoint.
    """
    return cast(AnyPlace | None, _latest(place_of(folder, "folder"), verify=verify))


def _latest(folder: Place, *, verify: bool) -> Place | None:
    contents = Contents.of(folder)
    for text in contents.unreadable:
        # Whoever asks may be the only rank that does.
        warn_once(f"passed over: {text}", rank=0)
    if not contents.entries:
        return None
    line = list(contents.line(contents.entries[-1].marker.identity))
    for entry in (*line, *(each for each in reversed(contents.entries) if each not in line)):
        problem = entry.problem(verified=verify)
        if problem is None:
            return entry.directory
        warn_once(f"passed over: {problem}", rank=0)
    return None


@dataclass(frozen=True, slots=True)
class Line:
    """The checkpoints of one folder that one model saves and loads, each going on from the one before."""

    folder: Place
    """Absolute."""
    newest: str | None
    """Identity of the one that the model saved or loaded last; None where it did neither here."""
    known: frozenset[str]
    """Identities of all that was there when it did."""
    beside: str | None = None
    """Identity of the last one with finite parameters: between it and the newest one, others may have been removed."""

    @classmethod
    def begun(cls, folder: Place) -> Line:
        """A line that goes back to nothing in ``folder``."""
        return cls(folder.resolve(), None, Contents.of(folder).identities)

    @classmethod
    def from_loaded(cls, directory: Place, marker: Marker) -> Line:
        """The line that goes on from the checkpoint in ``directory``."""
        folder = directory.parent
        return cls(folder.resolve(), marker.identity, Contents.of(folder).identities | {marker.identity})

    def name_of(self, step: int) -> str:
        """The name of the directory for ``step``.

        A run that was resumed from an earlier step reaches steps that it had saved before: these stay, whatever they
        are, and the new ones get a number.

        Raises ConfigError: the step is committed already, or another job saves into the folder.
        """
        contents = self._require_alone()
        name = f"step-{step:08d}"
        taken = {entry.directory.name: entry for entry in contents.entries if entry.marker.step == step}
        own = [entry for entry in contents.line(self.newest) if entry.marker.step == step]
        if not own and self.newest is None:
            own = list(taken.values())
        if own:
            raise ConfigError(
                f"The checkpoint {own[0].directory} is committed already, and overwriting it in place could mix two "
                "steps. Save another step, or remove that directory."
            )
        number = 1
        while storage_of(self.folder).exists(self.folder / name):
            number += 1
            name = f"step-{step:08d}.{number}"
        return name

    def next_turn(self) -> int:
        """Higher than that of all checkpoints that are there.

        Raises ConfigError: another job saves into the folder, or a marker there leaves no number.
        """
        last = max(self._require_alone().entries, key=lambda entry: entry.marker.turn, default=None)
        turn = 1 + (0 if last is None else last.marker.turn)
        if last is not None and turn >= MOST:
            raise ConfigError(
                f"{last.directory} says that it is commit {turn - 1:,}, behind which there is no other. Save into "
                "another folder, or remove it."
            )
        return turn

    def after(self, marker: Marker) -> Line:
        return replace(self, newest=marker.identity, known=self.known | {marker.identity})

    def prune(self, keep: int) -> Line:
        """Remove all but the last ``keep`` of the line; others in the folder, and links, stay. Returns what is left.

        One with files that are gone or of another size does not count, and the newest whose parameters are finite
        stays: a run may have to go back to it.
        """
        contents = Contents.of(self.folder)
        line = list(contents.line(self.newest))
        line += [entry for entry in contents.entries if entry.marker.identity == self.beside and entry not in line]
        kept, finite = 0, None
        for entry in line:
            is_good = entry.problem(verified=False) is None
            is_last_finite = finite is None and is_good and entry.marker.finite
            if kept >= keep and not is_last_finite:
                storage_of(entry.directory).discard(entry.directory)
            kept += is_good
            if is_last_finite:
                finite = entry.marker.identity
        return replace(self, beside=finite)

    def _require_alone(self) -> Contents:
        contents = Contents.of(self.folder)
        strangers = [entry.directory for entry in contents.entries if entry.marker.identity not in self.known]
        if strangers:
            raise ConfigError(
                f"Another job has committed {strangers[-1]} since this one saved or loaded there last, and latest() "
                "can name one of the two only. Give each run a folder of its own, or load that checkpoint to go on "
                "from it."
            )
        return contents
