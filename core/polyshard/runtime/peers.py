"""How ranks of one model learn of each other's failures: posts in the launcher's store, and a check of collectives.

``Peers`` serves where no collective gets through any more. ``Audit`` compares collectives before they are issued, in
the first step or in all.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from .. import _torch_private
from ..errors import PluginContractError, RankMismatchError, different_calls, plugin_name, words
from ..interfaces import Collectives
from ..nested import iter_tensors
from ..planning.parts import is_dtensor, local_of
from ..planning.values import checksum

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: Seconds that a rank whose wait failed gives the others to post.
GRACE_S = 1.5
#: Seconds for one exchange: the machine that holds the store may have failed.
_LIMIT_S = 3.0
#: Seconds between two reads of others' posts: at first, and at most. Each pause is twice the one before.
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.4
#: The latest posts that are read, by at most as many ranks and by more: thousands post the same, all at once.
_MOST, _OF_THOUSANDS = 256, 16
#: The latest posts that are read of ranks whose program raised, for which the others wait.
_MOST_RAISED = 8
#: Kinds of posts. ``_RAISED`` and ``_ALL`` also name the lists of ranks that posted.
_RAISED, _WAITED, _SILENT, _WITHDRAWN = "raised", "waited", "silent", "withdrawn"
_ALL = "all"
#: The last posts of other ranks, by rank.
Posts = Mapping[int, Mapping[str, Any]]


class Peers:
    """The other ranks of one model, through the launcher's store. A step that does not fail posts nothing.

    Each rank has one key for its last post. Beside these there are two lists of ranks in the order of their posts: of
    all ranks, and of those whose program raised. Of many ranks, only the latest are read.

    Nothing here raises: a failure leaves less known, and must not replace the error that is being handled.
    """

    def __init__(self, store: Any, key: str, rank: int, world_size: int) -> None:
        """``store``: the launcher's; ``key``: of this model, the same on all of its ranks."""
        self._store = store
        self._key = key
        self._rank = rank
        self._world_size = world_size
        self._most = _MOST if world_size <= _MOST else _OF_THOUSANDS
        #: Whether this rank's last post says that it failed or is stuck.
        self.posted = False

    def post_error(self, error: BaseException, where: str) -> str | None:
        """Post that this rank's program raised ``error``; ``where``: its last communication.

        Where another rank's program raised before, that is posted again, under its own name: a collective of the
        program's own fails as well, with an error that tells nobody why.

        Returns:
            The other rank's error, as ``raised_text``; None where this is the first.
        """
        trace = "".join(traceback.format_exception(error))
        mine = {"kind": _RAISED, "rank": self._rank, "where": where, "error": words(error), "trace": trace}
        self.posted = True
        posts: dict[int, Mapping[str, Any]] = {}

        def exchange() -> None:
            self._update(posts, {_RAISED: 0})
            self._write(next((post for _, post in sorted(posts.items()) if post["kind"] == _RAISED), mine))

        _within(_LIMIT_S, exchange)
        return self.raised_text(dict(posts))

    def post_silence(self, where: str, silent_s: float, stack: str) -> None:
        """Post that this rank issued nothing for ``silent_s`` seconds behind the communication ``where``."""
        self._post({"kind": _SILENT, "where": where, "silent_s": silent_s, "stack": stack})

    def withdraw(self) -> None:
        """Withdraw this rank's post: it caught the error, or its wait ended, and it begins another step."""
        self._post({"kind": _WITHDRAWN})

    def post_wait(self, where: str) -> Posts:
        """Post that this rank's wait for the communication ``where`` failed; returns posts of other ranks."""
        self.posted = True
        return self._exchange({"kind": _WAITED, "where": where})

    def read(self) -> Posts:
        """The posts of other ranks that failed or are stuck."""
        return self._exchange(None)

    def _post(self, post: Mapping[str, Any]) -> None:
        self.posted = post["kind"] != _WITHDRAWN
        _within(_LIMIT_S, lambda: self._write(post))

    def _exchange(self, post: Mapping[str, Any] | None) -> Posts:
        posts: dict[int, Mapping[str, Any]] = {}

        def exchange() -> None:
            if post is not None:
                self._write(post)
            deadline = time.monotonic() + GRACE_S
            counts = {_ALL: 0, _RAISED: 0}
            pause = _PAUSE_S
            while True:
                self._update(posts, counts)
                if len(posts) >= min(self._world_size - 1, self._most) or time.monotonic() > deadline:
                    return
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

        _within(_LIMIT_S, exchange)
        # The thread may go on where the store does not answer.
        return dict(posts)

    def raised_text(self, posts: Posts) -> str | None:
        """The first error of a program among ``posts``, with its traceback; None for no error."""
        for _, post in sorted(posts.items()):
            if post.get("kind") == _RAISED:
                return (
                    f"Rank {post.get('rank')} raised {post.get('error')} behind its communication {post.get('where')}, "
                    f"so it does not come any more. Its traceback:\n{post.get('trace')}"
                )
        return None

    def places_text(self, posts: Posts) -> str:
        """The place of each rank by ``posts``, and the ranks without a post."""
        silent = [rank for rank in range(self._world_size) if rank != self._rank and rank not in posts]
        lines = [
            f"  rank {rank} waited, too, for its communication {post.get('where')}"
            for rank, post in sorted(posts.items())
            if post.get("kind") == _WAITED
        ]
        lines += [
            f"  rank {rank} issued nothing for {post.get('silent_s', 0.0):.1f} s behind its communication "
            f"{post.get('where')}. It stands in:\n{post.get('stack')}"
            for rank, post in sorted(posts.items())
            if post.get("kind") == _SILENT
        ]
        if len(posts) >= self._most:
            lines.append(f"  of {self._world_size} ranks, these were read")
        elif silent:
            who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {silent[:16]} ({len(silent)} in all)"
            lines.append(f"  {who} gave no word: stuck elsewhere, dead, or done with fewer batches. Look there first")
        return "\n".join(lines)

    def _write(self, post: Mapping[str, Any]) -> None:
        # The post before the entry in the list: whoever reads the entry finds the last post.
        self._store.set(f"{self._key}/of/{self._rank}", json.dumps(post))
        for name in (_ALL, _RAISED) if post["kind"] == _RAISED else (_ALL,):
            number = self._store.add(f"{self._key}/{name}", 1)
            self._store.set(f"{self._key}/{name}/{number}", str(self._rank))

    def _update(self, posts: dict[int, Mapping[str, Any]], counts: dict[str, int]) -> None:
        """Add posts behind the first ``counts`` of each list in there to ``posts``, and update ``counts``."""
        ranks: set[int] = set()
        for name, most in ((_RAISED, _MOST_RAISED), (_ALL, self._most)):
            if name not in counts:
                continue
            count = self._store.add(f"{self._key}/{name}", 0)
            for number in range(max(counts[name], count - most) + 1, count + 1):
                key = f"{self._key}/{name}/{number}"
                # Numbered first and written then: the next update reads it.
                if self._store.check([key]):
                    ranks.add(int(self._store.get(key)))
                else:
                    count = min(count, number - 1)
            counts[name] = count
        ranks.discard(self._rank)
        for rank in sorted(ranks):
            post = json.loads(self._store.get(f"{self._key}/of/{rank}"))
            if post["kind"] == _WITHDRAWN:
                posts.pop(rank, None)
            else:
                posts[rank] = post


def peers_of(collectives: Collectives) -> Peers | None:
    """The peers of a model over ``collectives``, all of whose ranks call this as often; None without a store."""
    if collectives.world_size < 2 or not collectives.capabilities.can_communicate:
        return None
    group = collectives.process_group
    store = _torch_private.default_store()
    if store is None or not isinstance(group, torch.distributed.ProcessGroup):
        return None
    ranks = torch.distributed.get_process_group_ranks(group)
    scope = f"polyshard/peers/{scope_of(ranks)}"
    try:
        # Each rank counts its own models: the n-th of one is the n-th of all.
        number = store.add(f"{scope}/models/{collectives.rank}", 1)
    except Exception:
        return None
    return Peers(store, f"{scope}/{number}", collectives.rank, collectives.world_size)


def scope_of(ranks: Iterable[int]) -> str:
    """A short name of ``ranks``, the same on all of them, for keys in a store: a list of thousands is too long."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _within(limit_s: float, action: Callable[[], None]) -> None:
    """Run ``action`` for at most ``limit_s``: the store may never answer."""

    def quietly() -> None:
        with suppress(Exception):
            action()

    thread = threading.Thread(target=quietly, name="polyshard peers", daemon=True)
    thread.start()
    thread.join(limit_s)


def refuse_different_batches(
    group: Collectives, rank: int, module: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise on every rank of ``group`` if tensors in the arguments of ``module`` differ between them.

    ``rank``: this one's among all of the model. Waits for the device.

    Raises RankMismatchError: naming the first argument that differs, and the ranks.
    """
    named = [(f"{index}", value) for index, value in enumerate(args)]
    named += [(f"'{name}'", value) for name, value in sorted(kwargs.items())]
    mine = [
        (f"argument {name}" if place == 0 else f"tensor {place} of argument {name}", _described(tensor))
        for name, value in named
        for place, tensor in enumerate(iter_tensors(value))
    ]
    everyone: list[tuple[int, list[tuple[str, Any]]]] = group.all_gather_object((rank, mine))
    ranks = [each for each, _ in everyone]
    for theirs in zip_longest(*(found for _, found in everyone), fillvalue=("", None)):
        sides: dict[Any, list[int]] = {}
        for each, tensor in zip(ranks, theirs, strict=True):
            sides.setdefault(tensor, []).append(each)
        if len(sides) > 1:
            what = next(name for name, _ in theirs if name)
            raise RankMismatchError(
                f"Ranks {ranks} must see the same batch, but {what} of '{module}' differs: "
                f"{' and '.join(map(str, sides.values()))} have different ones (rank {rank}). They hold parts of one "
                "model, and each computes its part of one result. Draw batches by the rank along the dimensions that "
                "shard and replicate (mesh['dp'].get_local_rank()), and not by that of the process. Where ranks have "
                "parts of one sequence (context parallelism), shard over their dimension too: shard=('dp', 'cp')."
            )


def _described(tensor: torch.Tensor) -> Any:
    """What of ``tensor`` is the same on ranks that see one batch."""
    kind = str(tensor.dtype), tuple(tensor.shape)
    if is_dtensor(tensor):
        placed = cast("DTensor", tensor)
        spec = (*kind, str(placed.placements), tuple(placed.device_mesh.shape), placed.device_mesh.mesh_dim_names)
        if not all(each.is_replicate() for each in placed.placements):
            # Each rank has a part of its own.
            return spec
        return (*spec, int(checksum(local_of(placed))))
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return kind
    return (*kind, int(checksum(tensor)))


class Audit:
    """Ranks announce each collective before it is issued: in the first step with what travels, later where that is
    cheap.

    Ranks that disagree would otherwise hang, or mix up bytes. Later steps mostly repeat the first, so that the first
    alone pays for the exchange where announcements are dear, unless ``check_ranks="always"``.
    """

    def __init__(self, collectives: Collectives, check_ranks: bool | Literal["always"]) -> None:
        can = collectives.capabilities
        #: Whether ranks compare the names of what they issue, in every step.
        self.announces = bool(check_ranks) and can.announces
        self._can, self._always = bool(check_ranks) and can.can_communicate, check_ranks == "always"
        self.begin()

    def begin(self) -> None:
        """Compare what travels until the next backward has ended, as in the first step."""
        #: Whether ranks compare what travels, too.
        self.compares = self._can
        #: Whether a whole forward was compared. Its backward still is, if there is one; the next forward is not.
        self.done = False
        #: The units whose gather is compared once it has arrived.
        self.due: set[str] = set()
        self._gathered: set[str] = set()

    def end(self) -> None:
        """Compare no more, unless always: what follows repeats what was compared."""
        self.compares = self.compares and self._always

    def expect(self, units: Set[str]) -> None:
        """Gathers of ``units`` were issued: of each, the first one of the forward is compared.

        Not those that are waited for in it: what a backward issued is waited for where a rank's graph reaches the unit,
        in that backward or in the next forward.
        """
        if not self.done:
            self.due |= units - self._gathered
            self._gathered |= units

    def compare_gathered(
        self, group: Collectives, unit: str, buffer: torch.Tensor, own: torch.Tensor, sent: torch.Tensor | None
    ) -> None:
        """Raise on every rank of ``group`` if a gather did not leave the same bytes on all.

        ``buffer``: the whole unit, compute ordered after its gather; ``own``: this rank's slice of it; ``sent``: the
        values that the slice must have, None where they are not known. Waits for the device, in the first forward only.

        Raises PluginContractError: naming the collectives, the unit, and the ranks that hold something else.
        """
        if not group.capabilities.can_communicate:
            return
        slices = () if sent is None else (own, sent.to(own.dtype))
        # The device is waited for once.
        whole, *parts = torch.stack([checksum(each) for each in (buffer, *slices)]).tolist()
        if group.capabilities.announces:
            group.announce(f"comparison of the gather of {unit}")
        everyone: list[Any] = group.all_gather_object([f"gather of unit '{unit}'", whole, len(set(parts)) < 2])
        if any(each[0] != everyone[0][0] for each in everyone):
            raise different_calls(group.rank, [each[0] for each in everyone])
        name = f"all_gather of {plugin_name(group)}"
        lost = [rank for rank, each in enumerate(everyone) if not each[2]]
        if lost:
            raise PluginContractError(
                f"{name} changed the own slices of ranks {lost} in unit '{unit}' (rank {group.rank}). What is gathered "
                "in place must stay as it is."
            )
        sums = [each[1] for each in everyone]
        if len(set(sums)) > 1:
            raise PluginContractError(
                f"{name} did not leave the same bytes of unit '{unit}' on all ranks (rank {group.rank} of "
                f"{group.world_size}; checksums by rank: {sums[:16]}). Fill 'out' with every rank's shard, in the "
                "order of ranks."
            )
