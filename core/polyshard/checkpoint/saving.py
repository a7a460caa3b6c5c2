"""A save: one directory, which is a checkpoint once its marker is there; the same in the background."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import nn

from ..errors import words
from ..state.contents import Optimizers
from ..state.exchange import coordinates, from_first, gather_to_first, notify_listeners, require_seen, speaks, together
from ..state.source import listed
from .contents import not_finite_anywhere, number_of
from .folder import Line
from .manifest import Marker
from .parts import Models, Stages, Taken
from .pending import History, Notes, PendingSave
from .storage import AnyPlace, Attempt, Place, place_of, storage_of
from .writing import Document, Ending, Writing, Written, plan_writing


def save(
    root: AnyPlace,
    step: int,
    model: nn.Module | Stages,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    frozen: bool = True,
) -> AnyPlace:
    """Write ``root/step-00000100`` for step 100; returns that directory.

    Every rank calls it, between steps. Each rank writes its own shards, so all must see the same file system. They
    write to a directory of this save alone, which gets its name only when it is complete and the file ``COMMITTED`` is
    in it; what saves left in ``root`` that did not live to their end is removed. Where something has the name, such as
    the same step of a run that went on from an earlier one, it stays, and this is ``step-00000100.2``. At a URL the
    directory has a name that no other save has, ``step-00000100.`` and twelve digits, from the beginning. On one rank
    of a pretended world (collectives that cannot communicate) the directory holds that rank's part. A save that goes on
    in the background is waited for.

    Args:
        root: Directory of all checkpoints of a run, or the ``URL`` of one; made where missing. For one job at a time.
        step: Not negative; the checkpoint's number.
        model: The outermost sharded module, or the ``Stages`` of a pipeline.
        optimizer: Over the model's parameters; saved with its state and its groups' settings. Several, in a sequence,
            hold different parameters. Of stages a sequence with one for each.
        extra: Values (data position, random states); rank 0's are kept. Buffers, too, are rank 0's. ``None``, ``bool``,
            ``int``, ``float``, ``str``, ``bytes``, ``complex``, lists, tuples, sets, dicts, paths, dates, tensors on
            any device (which come back on the host), numpy arrays and numbers; no other objects: there are no pickles
            in a checkpoint. Subclasses of dict and list come back as these.
        keep: How many checkpoints to leave of those that this one goes back to, itself included; older ones are
            removed. What ``root`` holds beside them, links, and what others put into them stay. None for all.
        frozen: Whether parameters that need no gradient are written. Without them whoever loads must have their values
            from elsewhere, and says so by ``load(..., frozen=False)``.

    Raises:
        StateError: inside a step, or ``model`` is not the outermost sharded module.
        ConfigError: the step is committed already, another job saves into ``root``, or the optimizer has state, or
            ``extra`` something, that cannot be saved (then a ConfigTypeError that names the way there); nothing was
            written.
        RankMismatchError: another rank failed, or ranks see different file systems.
        BackgroundSaveError: the save in the background failed, on any rank, which was not raised yet; on all ranks
            alike. This one was not begun.
        CollectiveError: another rank did not arrive within the configuration's ``timeout_s``.
        PolyshardError, OSError: writing failed; nothing is left of it.
        Exception: a listener's, on its rank, once the checkpoint is there.
    """
    with Models.meeting(model, "checkpoint.save()", "save of a checkpoint") as models:
        with ExitStack() as stack:
            task = _prepare(models, root, step, keep, stack, models.taking(optimizer, extra, step, frozen=frozen))
            progress = models.handles[0].reporting_progress(models.modules[0], f"Saving {task.named}")
            with progress, together(models.collectives, f"Writing {task.writing.directory}"):
                written = task.writing.write()
            everything = gather_to_first(models.collectives, written)
            with together(models.collectives, f"Committing {task.label}"):
                if task.commit is not None and everything is not None:
                    task.commit.run(everything)
        done = f"the save of {task.named}, which is committed"
        for sharded, module in zip(models.handles, models.modules, strict=True):
            notify_listeners(sharded.collectives, done, partial(sharded.notify_saved, module, task.named))
        return cast(AnyPlace, task.named)


def async_save(
    root: AnyPlace,
    step: int,
    model: nn.Module | Stages,
    optimizer: Optimizers | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    frozen: bool = True,
) -> PendingSave[AnyPlace]:
    """As ``save``, with the writing in the background: returns once the state is copied to host memory.

    What is saved is the state at the call, whatever is trained meanwhile. It is committed by a thread of rank 0, when
    all ranks' threads have written; these use none of the training's communicators. Each rank takes the host memory of
    what it writes until then. A save before this one that still goes on is waited for first: there is one at a time.
    Listeners hear of the checkpoint when ``result`` is asked, or at the next save or load.

    A program that ends waits for its threads, on each rank until the checkpoint is there. A failure is logged at once.
    ``result`` raises it on the ranks that ask, and otherwise the next ``save``, ``async_save`` or ``load``, or
    ``polyshard.close``. Where nobody asked, each rank writes it to its standard error at the end.

    Returns:
        The pending save, to be asked by ``done()`` and ``result(timeout)``.

    Raises what ``save`` does, but for what happens in the background.
    """
    with Models.meeting(model, "checkpoint.async_save()", "save of a checkpoint") as models, ExitStack() as stack:
        task = _prepare(models, root, step, keep, stack, models.taking(optimizer, extra, step, frozen=frozen))
        with together(models.collectives, f"Copying {task.label}"):
            task.writing.layout.copy()
        named = cast(AnyPlace, task.named)

        def notify() -> None:
            for sharded, module in zip(models.handles, models.modules, strict=True):
                sharded.notify_saved(module, named)

        first, rank = models.handles[0], models.collectives.rank
        ranks = models.collectives.world_size if speaks(models.collectives) else 1
        notes = Notes(task.writing.directory, rank, ranks, first.timeout_s)
        work = partial(task.in_background, notes, stack.pop_all())
        pending = first.attached(History).pending = PendingSave(named, rank, work, notify, notes)
        pending.start()
        return pending


@dataclass(frozen=True)
class _Commit:
    """What the rank that coordinates does once everything is written."""

    history: History
    attempt: Attempt[Any]
    line: Line
    marker: Marker
    """But for the files."""
    keep: int | None
    ending: Ending

    def run(self, everything: list[Written]) -> None:
        target = self.attempt.target
        described = self.ending.write(everything)
        marker = replace(self.marker, turn=self.line.next_turn(), **described)
        try:
            self.attempt.commit(marker.rendered())
        finally:
            if self.attempt.committed:
                line = self.history.line = self.line.after(marker)
        if self.keep is not None:
            try:
                self.history.line = line.prune(self.keep)
            except OSError as error:
                # The checkpoint is there: a run does not end for one too many.
                warnings.warn(f"Older checkpoints than {target} could not be removed: {error}", stacklevel=2)


@dataclass(frozen=True)
class _Task:
    label: str
    target: Place
    """Where the checkpoint will be."""
    named: Place
    """The same, as the caller names the folder."""
    identity: str
    writing: Writing
    commit: _Commit | None
    """On the rank that coordinates."""

    def in_background(self, notes: Notes, held: ExitStack, written: Callable[[], None]) -> None:
        """What the thread of one rank does.

        ``held``: gives the directory back. ``written``: to be called once this rank's part is there, and its note left.
        """
        with held:
            try:
                results = self.writing.write()
                self.writing.layout.release()
                notes.leave(results, None)
                written()
                if self.commit is not None:
                    self.commit.run(notes.collect())
            except BaseException as error:
                if self.commit is None:
                    over = notes.given_up(self.target)
                    if over is not None:
                        raise over from error
                    # Where even that cannot be written, the first rank sees that nothing arrives any more.
                    with suppress(OSError):
                        notes.leave(None, words(error))
                elif notes.ranks > 1 and not self.commit.attempt.committed:
                    self.commit.attempt.stays = True
                    notes.give_up(words(error))
                raise
        if self.commit is None:
            notes.await_end(self.target, self.identity)


def _prepare(
    models: Models, root: Place, step: int, keep: int | None, stack: ExitStack, taking: Callable[[], Taken]
) -> _Task:
    """Everything up to the writing. ``stack``, which is left behind the commit, gives the directory back."""
    collectives = models.collectives
    for each in models.handles:
        each.attached(History).finish_pending(each)
    history = models.handles[0].attached(History)
    what = f"the checkpoint of step {step} in {root}"
    attempt: Attempt[Any] | None = None
    document: Document | None = None
    called: dict[str, object] = {}
    with together(collectives, f"Preparing {what}", called):
        root = place_of(root, "root")
        # A program may go elsewhere while a thread writes.
        here = root.absolute()
        step = number_of(step, "step", 0)
        keep = None if keep is None else number_of(keep, "keep", 1)
        taken = taking()
        called.update(step=step, keep=keep, **taken.called)
        if coordinates(collectives):
            document = taken.document()
            history.claim(here)
            line = history.line_in(here)
            attempt = stack.enter_context(storage_of(here).attempt(here, line.name_of(step)))
    broken = not_finite_anywhere(collectives, models.handles, taken.broken)
    # A program may let warnings raise.
    with together(collectives, f"Preparing {what}"):
        if attempt is not None and broken:
            warnings.warn(
                f"{what[0].upper()}{what[1:]} holds values that are infinite or no number: {listed(broken)}. Whoever "
                "loads it goes on with them.",
                stacklevel=4,
            )
    # Names alone: one file system may be mounted at several places.
    mine = None if attempt is None else (attempt.path.name, attempt.target.name, attempt.identity)
    path, name, identity = from_first(collectives, mine)
    require_seen(collectives, here / path, storage_of(here).sees(here / path))
    writing = plan_writing(here / path, taken.state, document, collectives, history.plan)
    history.plan = writing.plan
    commit = None
    if attempt is not None and writing.ending is not None:
        complete = writing.ending.complete
        marker = Marker(step, collectives.world_size, complete, identity, line.newest, 0, {}, not broken, "")
        commit = _Commit(history, attempt, line, marker, keep, writing.ending)
    return _Task(what, here / name, root / name, identity, writing, commit)
