"""Ranks compare what they are about to do before the first collective, and fail together."""

from __future__ import annotations

import enum
import hashlib
import json
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from .. import _torch_private
from ..config import ShardConfig
from ..errors import PolyshardError, RankMismatchError, plugin_name, words
from ..interfaces import Collectives, OffloadManager, PrecisionPlugin, WrapPolicy
from ..planning.groups import group_of
from ..runtime.peers import scope_of
from .differences import Reported, listed, message_of

#: Seconds of a rank's first wait for the others. Each wait is twice as long as the one before, up to the longest: few
#: requests to the store, and a program that can be interrupted.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 4.0, 64.0
#: Seconds that ranks which know of a failure give the others to arrive, so that one error lists all failures.
_GRACE_S = 1.0
#: Seconds for a rank's report of a difference, and that a store's host stays for others to read it.
_DETAILS_S = 10.0
#: How many ranks are listed, and how many different reports are read: of thousands, the others say the same.
_LISTED, _READ = 64, 8
#: The scope of what all ranks share.
EVERYONE = ""
#: Characters of a failure that other ranks read.
_LONGEST_FAILURE = 8192
#: Bytes of one value in the store, which refuses those of more than 8 MiB.
_CHUNK = 1 << 20


#: What one rank reports: rows of JSON values, which begin with a title, by scope, a text that says what ranks share who
#: must report the same. All ranks share ``EVERYONE``, which is first. A rank has a few scopes: what each of them costs
#: does not depend on the number of ranks.
Report = dict[str, list[Any]]
#: By the digest of a scope, the ranks that report different things there: lists of those that report the same.
_Kinds = dict[str, list[list[int]]]


class Agreement:
    """The ranks that shard one model together: each phase of it ends alike on all of them.

    The launcher's store serves where there is one, so that a rank whose backend could not be loaded reports too, or one
    whose backend only pretends to communicate; otherwise the backend itself does. A rank that pretends without a
    launcher, or in a pretended process group, stands alone.
    """

    def __init__(self, config: ShardConfig) -> None:
        #: The process group of all ranks that shard the model; None for the default one.
        _, self.process_group, _ = group_of(config)
        self._timeout = timedelta(seconds=config.timeout_s)
        self._checks = bool(config.check_ranks)
        self._begun = False
        """Whether ranks have compared anything."""
        #: The resolved backend; None until it is.
        self.collectives: Collectives | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no rank to compare with."""
        communicates = self.collectives is not None and self.collectives.capabilities.can_communicate
        return not communicates and _store_of(self.collectives, self.process_group) is None

    @contextmanager
    def phase(self) -> Iterator[Report]:
        """Leave the body when every rank has left it, with equal reports; raise on every rank otherwise.

        Yields an empty report, to be filled. The first rank that has waited for the timeout of the configuration ends
        the phase for all. With ``check_ranks=False`` ranks neither wait nor compare.

        Raises:
            Exception: that of the body, once the other ranks can know of it.
            RankMismatchError: another rank failed, reports something else, or did not arrive.
        """
        report: Report = {EVERYONE: []}
        error: Exception | None = None
        try:
            yield report
        except Exception as raised:
            error = raised
            _note_plugin(raised)
        if self._checks and not self.alone:
            self._compare(report, error)
        if error is not None:
            raise error

    def _compare(self, report: Report, error: Exception | None) -> None:
        store = _store_of(self.collectives, self.process_group)
        if store is None:
            assert self.collectives is not None
            _through_collectives(self.collectives, report, error)
            return
        group = self.process_group if isinstance(self.process_group, torch.distributed.ProcessGroup) else None
        ranks = torch.distributed.get_process_group_ranks(group)
        exchange = StoreAgreement(store, ranks, torch.distributed.get_rank(), self._timeout)
        try:
            begins, self._begun = not self._begun, True
            exchange.meet(report, error, begins=begins)
        except torch.distributed.DistNetworkError as lost:
            if error is None:
                raise exchange.without_store() from lost


def _store_of(collectives: Collectives | None, process_group: Any | None) -> Any | None:
    """The launcher's store, where the ranks that share the model are those of ``torch.distributed``."""
    if collectives is not None and collectives.process_group is None:
        if collectives.capabilities.can_communicate:
            # Ranks of the backend's own.
            return None
        if process_group is not None and not isinstance(process_group, torch.distributed.ProcessGroup):
            # An object that stands for a group of ranks that are not there.
            return None
    store = _torch_private.default_store()
    # Torch's pretended process groups have a store that holds nothing.
    return None if store is None or torch.distributed.get_backend() == "fake" else store


class _Verdict(enum.Enum):
    """How an agreement ended, for all ranks alike."""

    SAME = "same"
    """Every rank arrived and reported the same."""
    FAILED = "failed"
    """A rank raised."""
    DIFFERENT = "different"
    """Ranks reported different things."""
    ABSENT = "absent"
    """A rank did not arrive in time."""


class StoreAgreement:
    """One agreement of one rank with others, through a store that all of them reach.

    [Note: agreement through the store]
    Each rank counts its own agreements in the store, so that the n-th of one is compared with the n-th of the others.
    It leaves a row with the digests of what it reports, and is counted (``came``). The last one to come reads all rows
    and sets the verdict: SAME or DIFFERENT. A rank that failed or has waited too long sets another one, at once.
    ``verdict`` is set by an atomic compare-and-set: it never changes, whenever a rank reads it, so all ranks end alike
    and their counts stay equal.

    A rank that arrives where the others gave up waiting for it goes on to their next one, for which they call again.
    Not in the middle of a call, whose other parts they have given up with it, nor with an error, which ends its call.

    That takes five requests a rank and a few hundred bytes, whatever the number of ranks; the last one reads some
    hundred bytes more of each. The reports themselves are sent only where their digests differ, by one rank of each
    kind and of few kinds; the rank that set that verdict reads them and leaves the message that all ranks raise.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        """``ranks``: who agrees, this ``rank`` among them; ``timeout``: how long to wait for the others."""
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._timeout_s = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout_s
        self._prefix = f"polyshard/agree/{scope_of(ranks)}"
        self._turn = self._arrived = 0
        self._kinds: _Kinds = {}
        """Who differs, where this rank found it."""
        self._set_it = False
        """Whether this rank set the verdict."""

    def meet(self, report: Report, error: Exception | None = None, *, begins: bool = True) -> None:
        """Leave this rank's ``report``, or what went wrong on it; return once all ranks have come and report the same.

        At once where this rank leaves an error. ``begins``: whether it is the first of a call.

        Raises:
            RankMismatchError: another rank failed, reports something else, or did not arrive.
            torch.distributed.DistNetworkError: the store is gone.
        """
        self._turn = self._store.add(f"{self._prefix}/turns/{self._rank}", 1)
        if error is None:
            if begins:
                self._pass_given_up()
            self._store.set(f"{self._prefix}/row/{self._rank}", _json(_digests(report)))
        else:
            # What explains a verdict is there before the verdict.
            number = self._store.add(self._key("failures"), 1)
            if number <= _LISTED:
                text = words(error)[:_LONGEST_FAILURE]
                self._store.set(self._key(f"failure/{number}"), json.dumps([self._rank, text]))
            self._set_verdict(_Verdict.FAILED)
        self._arrived = self._store.add(self._key("came"), 1)
        if self._arrived == len(self._ranks):
            self._judge()
            self._store.set(self._key("all"), "")
            # All ranks are here, and so are done with the agreement before.
            for name in ("came", "verdict", "all") if self._turn > 1 else ():
                self._store.delete_key(f"{self._prefix}/{self._turn - 1}/{name}")
        verdict, setter, asked = self._verdict()
        if verdict is _Verdict.SAME:
            return
        try:
            if error is None:
                raise RankMismatchError(self._reason(verdict, setter, asked, report))
        finally:
            # The store may have ended meanwhile: the message was read before.
            with suppress(Exception):
                self._store.add(self._key("read"), 1)
            self._await_readers(verdict)

    def without_store(self) -> RankMismatchError:
        return RankMismatchError(
            f"The store of the ranks ended while rank {self._rank} waited for others to shard their model (it came as "
            f"number {self._arrived} of {len(self._ranks)}): the process that hosts it is gone, rank 0's unless the "
            "launcher has it. Look for the first error in its log."
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._turn}/{name}"

    def _pass_given_up(self) -> None:
        """Go on to the first agreement in which the others have not given up waiting for this rank."""
        missed = self._turn
        while self._store.check([self._key("verdict")]) and self._verdict()[0] is _Verdict.ABSENT:
            self._turn = self._store.add(f"{self._prefix}/turns/{self._rank}", 1)
        if self._turn > missed:
            warnings.warn(
                f"Rank {self._rank} comes to shard its model after others gave up waiting for it. It waits up to "
                f"{self._timeout_s:g} s for them to call again.",
                stacklevel=2,
            )

    def _judge(self) -> None:
        """Compare what all ranks left: the last one of them does."""
        if self._store.check([self._key("verdict")]):
            # One of them failed, and left no row.
            return
        rows = self._store.multi_get([f"{self._prefix}/row/{rank}" for rank in self._ranks])
        self._kinds = _kinds_of(dict(zip(self._ranks, map(json.loads, rows), strict=True)))
        self._set_verdict(_Verdict.DIFFERENT if self._kinds else _Verdict.SAME, _asked(self._kinds))

    def _set_verdict(self, verdict: _Verdict, asked: Sequence[int] = ()) -> None:
        mine = json.dumps([verdict.value, self._rank, asked])
        found: bytes = self._store.compare_set(self._key("verdict"), "", mine)
        self._set_it = self._set_it or found.decode() == mine

    def _verdict(self) -> tuple[_Verdict, int, list[int]]:
        """The verdict, who set it, and whose reports it asks for."""
        pause = _FIRST_WAIT_S
        while not self._wait(self._key("verdict"), min(pause, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self._set_verdict(_Verdict.ABSENT)
                break
            pause = min(2 * pause, _LONGEST_WAIT_S)
        verdict, setter, asked = json.loads(self._store.get(self._key("verdict")))
        return _Verdict(verdict), setter, asked

    def _reason(self, verdict: _Verdict, setter: int, asked: Sequence[int], report: Report) -> str:
        """What to raise on this rank, which did not fail itself."""
        if verdict is _Verdict.FAILED:
            self._wait(self._key("all"), _GRACE_S)
            return _failure_text(*self._failures())
        if self._rank in asked:
            self._publish(report)
        if self._set_it:
            absent = verdict is _Verdict.ABSENT
            message = self._absence() if absent else _difference(self._kinds, {r: self._published(r) for r in asked})
            self._store.set(self._key("message"), message)
        if self._wait(self._key("message"), _DETAILS_S):
            message_read: bytes = self._store.get(self._key("message"))
            return message_read.decode()
        return (
            f"Ranks do not agree on what to shard: {verdict.value}, as rank {setter} found, which ended before it "
            f"could say more (rank {self._rank}). Look for the first error in its log."
        )

    def _absence(self) -> str:
        absent = []
        for rank in self._ranks:
            if self._store.add(f"{self._prefix}/turns/{rank}", 0) < self._turn:
                absent.append(rank)
            if len(absent) == _LISTED:
                break
        number = max(len(absent), len(self._ranks) - self._store.add(self._key("came"), 0))
        return (
            f"Ranks {listed(absent, number)} did not come to shard their model within {self._timeout_s:g} s, "
            f"rank {self._rank} waited. See the logs of those ranks, and let every rank shard the same model; all may "
            "call it again. One that shards by itself, with collectives that only pretend, needs check_ranks=False."
        )

    def _failures(self) -> tuple[list[tuple[int, str]], int]:
        """The first ranks that failed with the words of their errors, and how many more did."""
        number = self._store.add(self._key("failures"), 0)
        keys = [self._key(f"failure/{each}") for each in range(1, min(number, _LISTED) + 1)]
        # Each is counted before it is written.
        found = [json.loads(self._store.get(key)) for key in keys if self._wait(key, _GRACE_S)]
        return found, number - len(found)

    def _publish(self, report: Report) -> None:
        content = zlib.compress(_json(report))
        chunks = [content[start : start + _CHUNK] for start in range(0, len(content), _CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.set(self._key(f"report/{self._rank}/{number}"), chunk)
        self._store.set(self._key(f"report/{self._rank}"), str(len(chunks)))

    def _published(self, rank: int) -> Report | None:
        name = self._key(f"report/{rank}")
        if not self._wait(name, _DETAILS_S):
            return None
        content = b"".join(self._store.get(f"{name}/{number}") for number in range(int(self._store.get(name))))
        found: Report = json.loads(zlib.decompress(content))
        return found

    def _wait(self, key: str, seconds: float) -> bool:
        """Whether ``key`` is there within so long."""
        try:
            self._store.wait([key], timedelta(seconds=max(0.01, seconds)))
        except torch.distributed.DistNetworkError:
            raise
        except Exception:
            return False
        return True

    def _await_readers(self, verdict: _Verdict) -> None:
        """Let the others read what went wrong before the process that hosts the store may end."""
        if not _torch_private.may_host(self._store):
            return
        deadline = time.monotonic() + _DETAILS_S
        with suppress(Exception):
            while time.monotonic() < deadline:
                expected = self._store.add(self._key("came"), 0) if verdict is _Verdict.ABSENT else len(self._ranks)
                if self._store.add(self._key("read"), 0) >= expected:
                    return
                time.sleep(0.02)


#: The classes of plugins whose methods a call runs; a listener's name is noted where its hooks are called.
_PLUGINS = (Collectives, OffloadManager, PrecisionPlugin, WrapPolicy)


def _note_plugin(error: Exception) -> None:
    """Note the plugin in whose method ``error`` was raised: other ranks see no traceback, and users know no files."""
    if isinstance(error, PolyshardError):
        return
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        plugin = frame.f_locals.get("self")
        if isinstance(plugin, _PLUGINS):
            error.add_note(f"Raised in {frame.f_code.co_name}() of the plugin {plugin_name(plugin)}.")
            return


def _through_collectives(collectives: Collectives, report: Report, error: Exception | None) -> None:
    """Compare by the collectives themselves; an ``error`` of this rank is sent, and not raised.

    Raises RankMismatchError: another rank failed, or reports something else.
    """
    failure = None if error is None else words(error)[:_LONGEST_FAILURE]
    everyone = list(collectives.all_gather_object((failure, _digests(report))))
    if error is not None:
        return
    failures = [(rank, text) for rank, (text, _) in enumerate(everyone) if text is not None]
    if failures:
        raise RankMismatchError(_failure_text(failures))
    kinds = _kinds_of({rank: digests for rank, (_, digests) in enumerate(everyone)})
    if kinds:
        # All ranks know that digests differ.
        asked = _asked(kinds)
        spoken = collectives.all_gather_object(_json(report) if collectives.rank in asked else b"")
        raise RankMismatchError(_difference(kinds, {rank: json.loads(spoken[rank]) for rank in asked}))


def _failure_text(failures: Sequence[tuple[int, str]], more: int = 0) -> str:
    lines = [f"  rank {rank}: {text}" for rank, text in sorted(failures)]
    lines += [f"  and {more} ranks more"] if more else []
    return "Sharding failed on other ranks, so it was given up here too:\n" + "\n".join(lines)


def _digests(report: Report) -> dict[str, str]:
    """Of each scope: short, whatever ranks it names."""
    return {_mark(scope): _digest(rows) for scope, rows in report.items()}


def _kinds_of(digests: Mapping[int, Mapping[str, str]]) -> _Kinds:
    """The scopes in which ranks report different things, each with its ranks by what they report."""
    kinds: dict[str, dict[str, list[int]]] = {}
    for rank, its in digests.items():
        for mark, found in its.items():
            kinds.setdefault(mark, {}).setdefault(found, []).append(rank)
    differing = sorted(mark for mark, by_digest in kinds.items() if len(by_digest) > 1)
    # Where the model is another one, so are its values.
    chosen = differing[:1] if EVERYONE in differing else differing[:_READ]
    return {mark: list(kinds[mark].values()) for mark in chosen}


def _asked(kinds: _Kinds) -> list[int]:
    """One rank of each kind, of few kinds."""
    return sorted({ranks[0] for alike in kinds.values() for ranks in alike[: _READ + 1]})


def _difference(kinds: _Kinds, reports: Mapping[int, Report | None]) -> str:
    """The message of all ranks; ``reports``: of those that were asked."""
    texts = []
    for mark, alike in kinds.items():
        read = alike[: _READ + 1]
        scope = next((scope for each in reports.values() for scope in each or () if _mark(scope) == mark), EVERYONE)
        found = [Reported(ranks, (reports[ranks[0]] or {}).get(scope)) for ranks in read]
        texts.append(message_of(found, sum(map(len, alike[len(read) :])), scope))
    return "\n".join(texts)


def _mark(scope: str) -> str:
    return _digest([scope])[:16] if scope else EVERYONE


def _digest(report: Sequence[Any]) -> str:
    """Of JSON values: equal where they are."""
    return hashlib.sha256(_json(report)).hexdigest()[:32]


def _json(report: Any) -> bytes:
    return json.dumps(report, separators=(",", ":")).encode()
