"""Ranks compare what they are about to do before the first collective, and fail together."""

from __future__ import annotations

import enum
import hashlib
import json
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

from .. import _torch_private
from ..config import ShardConfig
from ..errors import PolyshardError, RankMismatchError, words
from ..interfaces import Collectives, OffloadManager, PrecisionCaster, WrapPolicy
from ..planning.answers import plugin_name
from ..planning.groups import group_of
from ..runtime.peers import scope_of
from .differences import Reported, message_of

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
            exchange.arrive(report, error, begins=not self._begun)
            self._begun = True
            exchange.end()
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
    """A rank reported something else than the first that arrived."""
    ABSENT = "absent"
    """A rank did not arrive in time."""


class StoreAgreement:
    """One agreement of one rank with others, through a store that all of them reach.

    [Note: agreement through the store]
    Each rank counts its own agreements in the store, so that the n-th of one is compared with the n-th of the others.
    The first rank to arrive leaves the digest of its report (``first``, set by an atomic compare-and-set), each further
    one compares its own with that, and all are counted (``came``). The last one sets the verdict SAME. A rank that
    failed, reports another digest or has waited too long sets another one, at once. ``verdict`` is set by
    compare-and-set, too: it never changes, whenever a rank reads it, so all ranks end alike and their counts stay
    equal.

    A rank that arrives where the others gave up waiting for it goes on to their next one, for which they call again.
    Not in the middle of a call, whose other parts they have given up with it, nor with an error, which ends its call.

    Ranks that share more than all do, such as a part of a tensor, have a scope: for each of its own a rank compares one
    digest more, with a ``first`` of that scope.

    That takes six requests a rank, two more for a scope, and a few hundred bytes, whatever the number of ranks. The
    reports themselves are sent only where their digests differ, by one rank of each kind and of few kinds; the rank
    that set that verdict reads them and leaves the message that all ranks raise.
    """

    def __init__(self, store: Any, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        """``ranks``: who agrees, this ``rank`` among them; ``timeout``: how long to wait for the others."""
        self._store = store
        self._ranks = ranks
        self._rank = rank
        self._timeout_s = timeout.total_seconds()
        self._prefix = f"polyshard/agree/{scope_of(ranks)}"
        self._turn = 0
        self._report: Report = {}
        self._failed = False
        self._deadline = 0.0
        self._arrived = 0
        self._set_it = False
        """Whether this rank set the verdict."""
        self._leads: list[str] = []
        """The scopes in which this rank was the first that arrived with a report."""
        self._is_listed = False
        """Whether the others can read that this rank differs from the first one of a scope."""

    def arrive(self, report: Report, error: Exception | None = None, *, begins: bool = True) -> None:
        """Leave this rank's ``report``, or what went wrong on it, without waiting for others.

        ``begins``: whether it is the first of a call.

        Raises torch.distributed.DistNetworkError: the store is gone.
        """
        self._report, self._failed = report, error is not None
        self._leads, self._is_listed = [], False
        self._deadline = time.monotonic() + self._timeout_s
        self._turn = self._store.add(f"{self._prefix}/turns/{self._rank}", 1)
        if error is None:
            if begins:
                self._pass_given_up()
            self._compare()
        else:
            # What explains a verdict is there before the verdict.
            number = self._store.add(self._key("failures"), 1)
            if number <= _LISTED:
                text = words(error)[:_LONGEST_FAILURE]
                self._store.set(self._key(f"failure/{number}"), json.dumps([self._rank, text]))
            self._set_verdict(_Verdict.FAILED)
        self._arrived = self._store.add(self._key("came"), 1)
        if self._arrived == len(self._ranks):
            self._set_verdict(_Verdict.SAME)
            self._store.set(self._key("all"), "")
            # All ranks are here, and so are done with the agreement before.
            for name in ("first", "came", "verdict", "all") if self._turn > 1 else ():
                self._store.delete_key(f"{self._prefix}/{self._turn - 1}/{name}")

    def end(self) -> None:
        """Return once all ranks have arrived and report the same, or at once where this rank left an error.

        Raises:
            RankMismatchError: another rank failed, reports something else, or did not arrive.
            torch.distributed.DistNetworkError: the store is gone.
        """
        verdict = self._verdict()
        if verdict is _Verdict.SAME:
            # All ranks have compared. Who comes last to all of them does not know the scopes.
            for mark in (_mark(scope) for scope in self._leads if scope):
                self._store.delete_key(self._key(f"first{mark}"))
                self._store.delete_key(self._key(f"came{mark}"))
            return
        try:
            if not self._failed:
                raise RankMismatchError(self._reason(verdict))
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
        while self._store.check([self._key("verdict")]) and self._get("verdict").startswith(_Verdict.ABSENT.value):
            self._turn = self._store.add(f"{self._prefix}/turns/{self._rank}", 1)
        if self._turn > missed:
            warnings.warn(
                f"Rank {self._rank} comes to shard its model after others gave up waiting for it. It waits up to "
                f"{self._timeout_s:g} s for them to call again.",
                stacklevel=2,
            )

    def _compare(self) -> None:
        for scope, rows in self._report.items():
            mine, mark = digest(rows), _mark(scope)
            found: bytes = self._store.compare_set(self._key(f"first{mark}"), "", f"{mine} {self._rank}")
            first, rank = found.decode().split()
            if scope:
                self._store.add(self._key(f"came{mark}"), 1)
            if first == mine:
                self._leads += [scope] if int(rank) == self._rank else []
                continue
            self._store.add(self._key(f"unlike{mark}"), 1)
            number = self._store.add(self._key("others"), 1)
            if number <= _LISTED:
                self._is_listed = True
                self._store.set(self._key(f"other/{number}"), json.dumps([self._rank, scope, mine, int(rank)]))
            self._set_verdict(_Verdict.DIFFERENT)
            # Where the model is another one, so are its values.
            return

    def _set_verdict(self, verdict: _Verdict) -> None:
        mine = f"{verdict.value} {self._rank}"
        found: bytes = self._store.compare_set(self._key("verdict"), "", mine)
        self._set_it = self._set_it or found.decode() == mine

    def _verdict(self) -> _Verdict:
        pause = _FIRST_WAIT_S
        while not self._wait(self._key("verdict"), min(pause, self._deadline - time.monotonic())):
            if time.monotonic() >= self._deadline:
                self._set_verdict(_Verdict.ABSENT)
                break
            pause = min(2 * pause, _LONGEST_WAIT_S)
        return _Verdict(self._get("verdict").split()[0])

    def _reason(self, verdict: _Verdict) -> str:
        """What to raise on this rank, which did not fail itself."""
        if verdict is _Verdict.ABSENT:
            if self._set_it:
                self._store.set(self._key("message"), self._absence())
        else:
            self._wait(self._key("all"), _GRACE_S)
            if failures := self._listed("failures", "failure"):
                lines = [f"  rank {rank}: {text}" for rank, text in sorted(failures)]
                more = self._store.add(self._key("failures"), 0) - len(failures)
                lines += [f"  and {more} ranks more"] if more else []
                return "Sharding failed on other ranks, so it was given up here too:\n" + "\n".join(lines)
            self._report_difference()
        if self._wait(self._key("message"), _DETAILS_S):
            return self._get("message")
        setter = self._get("verdict").split()[1]
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
            f"Ranks {Reported.listed(absent, number)} did not come to shard their model within {self._timeout_s:g} s, "
            f"rank {self._rank} waited. See the logs of those ranks, and let every rank shard the same model; all may "
            "call it again. One that shards by itself, with collectives that only pretend, needs check_ranks=False."
        )

    def _report_difference(self) -> None:
        """Leave this rank's report where it stands for others, and the message where this rank set the verdict."""
        leads = any(self._store.add(self._key(f"unlike{_mark(scope)}"), 0) for scope in self._leads)
        if not (self._set_it or leads or self._is_listed):
            return
        kinds: dict[tuple[str, int, str], list[int]] = {}
        for rank, scope, other, first in self._listed("others", "other"):
            kinds.setdefault((scope, first, other), []).append(rank)
        read = dict(list(kinds.items())[:_READ])
        mine = {scope for (scope, first, _), ranks in read.items() if self._rank in (first, ranks[0])}
        for scope in mine:
            self._publish(scope)
        if not self._set_it:
            return
        texts = []
        for scope, first in sorted({(scope, first) for scope, first, _ in read}):
            known = {rank for (other, _, _), ranks in kinds.items() if other == scope for rank in ranks}
            of_scope = {key: ranks for key, ranks in read.items() if key[0] == scope}
            number = self._store.add(self._key(f"unlike{_mark(scope)}"), 0)
            came = self._store.add(self._key("came" + (_mark(scope) if scope else "")), 0)
            like_first = [first]
            if not scope and came == len(self._ranks) and number == len(known):
                like_first = [rank for rank in self._ranks if rank not in known]
            found = [Reported(like_first, came - number, self._published(first, scope))]
            found += [
                Reported(sorted(ranks), len(ranks), self._published(ranks[0], scope)) for ranks in of_scope.values()
            ]
            texts.append(message_of(found, number - sum(map(len, of_scope.values())), scope))
            if not scope:
                break
        self._store.set(self._key("message"), "\n".join(texts))

    def _listed(self, counter: str, name: str) -> list[Any]:
        """The first entries of a list, in order: ``counter`` counts them."""
        number = min(self._store.add(self._key(counter), 0), _LISTED)
        keys = [f"{name}/{each}" for each in range(1, number + 1)]
        # Each is counted before it is written.
        return [json.loads(self._get(key)) for key in keys if self._wait(self._key(key), _GRACE_S)]

    def _publish(self, scope: str) -> None:
        content = zlib.compress(_json(self._report[scope]))
        chunks = [content[start : start + _CHUNK] for start in range(0, len(content), _CHUNK)]
        name = f"report{_mark(scope)}/{self._rank}"
        for number, chunk in enumerate(chunks):
            self._store.set(self._key(f"{name}/{number}"), chunk)
        self._store.set(self._key(name), str(len(chunks)))

    def _published(self, rank: int, scope: str) -> list[Any] | None:
        name = f"report{_mark(scope)}/{rank}"
        if not self._wait(self._key(name), _DETAILS_S):
            return None
        chunks = range(int(self._get(name)))
        content = b"".join(self._store.get(self._key(f"{name}/{number}")) for number in chunks)
        found: list[Any] = json.loads(zlib.decompress(content))
        return found

    def _get(self, name: str) -> str:
        found: bytes = self._store.get(self._key(name))
        return found.decode()

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
_PLUGINS = (Collectives, OffloadManager, PrecisionCaster, WrapPolicy)


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
    rank = collectives.rank
    failure = None if error is None else words(error)[:_LONGEST_FAILURE]
    mine = {scope: digest(rows) for scope, rows in report.items()}
    everyone = list(collectives.all_gather_object((failure, mine)))
    if error is not None:
        return
    failures = [f"  rank {other}: {text}" for other, (text, _) in enumerate(everyone) if text is not None]
    if failures:
        raise RankMismatchError("Sharding failed on other ranks, so it was given up here too:\n" + "\n".join(failures))
    kinds: dict[str, dict[str, list[int]]] = {}
    for other, (_, digests) in enumerate(everyone):
        for scope, found in digests.items():
            kinds.setdefault(scope, {}).setdefault(found, []).append(other)
    differing = sorted(scope for scope, of_scope in kinds.items() if len(of_scope) > 1)
    if not differing:
        return
    # All ranks know that digests differ. One of each kind sends its report. Where the model is another one, so are its
    # values.
    texts, differing = [], differing[:1] if differing[0] == EVERYONE else differing[:_READ]
    read = {scope: list(kinds[scope].values())[: _READ + 1] for scope in differing}
    spoken = {scope: list(report[scope]) for scope in differing if rank in (ranks[0] for ranks in read[scope])}
    reports = [json.loads(each) for each in collectives.all_gather_object(_json(spoken))]
    for scope in differing:
        reported = [Reported(ranks, len(ranks), reports[ranks[0]][scope]) for ranks in read[scope]]
        unread = sum(map(len, kinds[scope].values())) - sum(map(len, read[scope]))
        texts.append(message_of(reported, unread, scope))
    raise RankMismatchError("\n".join(texts))


def _mark(scope: str) -> str:
    """What keys of the store that belong to ``scope`` end in: short, whatever ranks it names."""
    return f"/{digest([scope])[:16]}" if scope else ""


def digest(report: Sequence[Any]) -> str:
    """Of JSON values: equal where they are."""
    return hashlib.sha256(_json(report)).hexdigest()[:32]


def _json(report: Any) -> bytes:
    return json.dumps(report, separators=(",", ":")).encode()
