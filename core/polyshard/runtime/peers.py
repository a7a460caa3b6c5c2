"""What ranks of one model tell each other when one of them fails, where no collective gets through any more."""

from __future__ import annotations

import hashlib
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .. import _torch_private
from ..errors import PluginContractError, RankMismatchError, words
from ..interfaces import Collectives
from ..planning.answers import plugin_name
from ..planning.values import checksum

#: Seconds that a rank whose wait failed gives the others to say where they stand.
GRACE_S = 1.5
#: Seconds for all that is said and heard at once: the store's host may be what failed.
_LIMIT_S = 3.0
#: Seconds between two looks at what others said: at first, and at most. Each is twice as long as the one before.
_LOOK_S, _LONGEST_LOOK_S = 0.05, 0.4
#: Words that are read of the ranks that spoke last, by as many ranks and by more: thousands say the same, all at once.
_MOST, _OF_THOUSANDS = 256, 16
#: Words that are read of ranks whose program raised, which is what the others wait for.
_MOST_RAISED = 8
_RAISED, _STANDS, _SILENT, _GOES_ON = "raised", "stands", "silent", "goes on"
#: Of the list of all ranks that spoke; the other one is of those that raised.
_SPOKE = "spoke"


class Peers:
    """The other ranks of one model, through the launcher's store. Nothing is said in a step that does not fail.

    Each rank has one key for its last word. Beside these there are two lists of who spoke, in order: of all ranks, and
    of those whose program raised. Of many ranks, those are read that spoke last.

    Whatever goes wrong here is not told: less is known then, and the error on its way stays what it is.
    """

    def __init__(self, store: Any, key: str, rank: int, world_size: int) -> None:
        """``store``: the launcher's; ``key``: of this model, the same on all of its ranks."""
        self._store = store
        self._key = key
        self._rank = rank
        self._world_size = world_size
        self._most = _MOST if world_size <= _MOST else _OF_THOUSANDS
        self.spoke = False
        """Whether the last that this rank said is that it failed, or is stuck."""

    def tell(self, error: BaseException, where: str) -> None:
        """Say that this rank's program raised ``error``; ``where``: its last communication."""
        trace = "".join(traceback.format_exception(error))
        said = {"kind": _RAISED, "where": where, "error": words(error), "trace": trace}
        self.spoke = True
        _within(_LIMIT_S, lambda: self._say(said))

    def tell_silence(self, where: str, silent_s: float, stack: str) -> None:
        """Say that this rank issued nothing for ``silent_s`` seconds behind the communication ``where``."""
        said = {"kind": _SILENT, "where": where, "silent_s": silent_s, "stack": stack}
        self.spoke = True
        _within(_LIMIT_S, lambda: self._say(said))

    def go_on(self) -> None:
        """Take back what was said: this rank caught the error, or came through, and begins another step."""
        self.spoke = False
        _within(_LIMIT_S, lambda: self._say({"kind": _GOES_ON}))

    def ask(self, where: str) -> Mapping[int, Mapping[str, Any]]:
        """Say where this rank stood when its wait failed; returns the last words of other ranks that failed."""
        self.spoke = True
        return self._exchange({"kind": _STANDS, "where": where})

    def hear_others(self) -> Mapping[int, Mapping[str, Any]]:
        """The last words of other ranks that failed or are stuck."""
        return self._exchange(None)

    def _exchange(self, said: Mapping[str, Any] | None) -> Mapping[int, Mapping[str, Any]]:
        heard: dict[int, Mapping[str, Any]] = {}

        def exchange() -> None:
            if said is not None:
                self._say(said)
            deadline = time.monotonic() + GRACE_S
            read = {_SPOKE: 0, _RAISED: 0}
            pause = _LOOK_S
            while True:
                self._hear(heard, read)
                if len(heard) >= min(self._world_size - 1, self._most) or time.monotonic() > deadline:
                    return
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_LOOK_S)

        _within(_LIMIT_S, exchange)
        # The thread may go on where the store does not answer.
        return dict(heard)

    def raised(self, heard: Mapping[int, Mapping[str, Any]]) -> str | None:
        """Of what was heard, the first error of a program, with its traceback; None for none."""
        for rank, said in sorted(heard.items()):
            if said.get("kind") == _RAISED:
                return (
                    f"Rank {rank} raised {said.get('error')} behind its communication {said.get('where')}, so it does "
                    f"not come any more. Its traceback:\n{said.get('trace')}"
                )
        return None

    def places(self, heard: Mapping[int, Mapping[str, Any]]) -> str:
        """Of what was heard, where each rank stood, and which gave no word."""
        silent = [rank for rank in range(self._world_size) if rank != self._rank and rank not in heard]
        lines = [
            f"  rank {rank} waited, too, for its communication {said.get('where')}"
            for rank, said in sorted(heard.items())
            if said.get("kind") == _STANDS
        ]
        lines += [
            f"  rank {rank} issued nothing for {said.get('silent_s', 0.0):.1f} s behind its communication "
            f"{said.get('where')}. It stands in:\n{said.get('stack')}"
            for rank, said in sorted(heard.items())
            if said.get("kind") == _SILENT
        ]
        if len(heard) >= self._most:
            lines.append(f"  of {self._world_size} ranks, these were read")
        elif silent:
            who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {silent[:16]} ({len(silent)} in all)"
            lines.append(f"  {who} gave no word: stuck elsewhere, or dead. Look there first")
        return "\n".join(lines)

    def _say(self, said: Mapping[str, Any]) -> None:
        # The word before the place in the list: who reads the place finds the last word, whichever it was made for.
        self._store.set(f"{self._key}/of/{self._rank}", json.dumps(said))
        for name in (_SPOKE, _RAISED) if said["kind"] == _RAISED else (_SPOKE,):
            number = self._store.add(f"{self._key}/{name}", 1)
            self._store.set(f"{self._key}/{name}/{number}", str(self._rank))

    def _hear(self, heard: dict[int, Mapping[str, Any]], read: dict[str, int]) -> None:
        """Bring ``heard`` up to date by what was said since ``read``, the place in each list up to which it was."""
        spoke: set[int] = set()
        for name, most in ((_RAISED, _MOST_RAISED), (_SPOKE, self._most)):
            count = self._store.add(f"{self._key}/{name}", 0)
            for number in range(max(read[name], count - most) + 1, count + 1):
                key = f"{self._key}/{name}/{number}"
                # Numbered first and written then: the next look comes back to it.
                if self._store.check([key]):
                    spoke.add(int(self._store.get(key)))
                else:
                    count = min(count, number - 1)
            read[name] = count
        spoke.discard(self._rank)
        for rank in sorted(spoke):
            said = json.loads(self._store.get(f"{self._key}/of/{rank}"))
            if said["kind"] == _GOES_ON:
                heard.pop(rank, None)
            else:
                heard[rank] = said


def _within(limit_s: float, action: Callable[[], None]) -> None:
    """Carry ``action`` out, for at most so long: what it asks may never answer."""

    def quietly() -> None:
        try:
            action()
        except Exception:
            return

    thread = threading.Thread(target=quietly, name="polyshard peers", daemon=True)
    thread.start()
    thread.join(limit_s)


def scope_of(ranks: Iterable[int]) -> str:
    """A short name of ``ranks``, the same on all of them, for keys in a store: of thousands, the list is too long."""
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def peers_of(collectives: Collectives) -> Peers | None:
    """Of a model over ``collectives``, all of whose ranks call this as often; None where there is no store."""
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


# The check that all ranks issue the same collectives: in the first step, or in all.


_REMEDY = (
    "Let every rank run the same modules in the same order, with the same settings. What some ranks skip, as a tower "
    "without an image or an expert without a token, must be no unit by itself: leave its class out of the policy "
    "(leave_out of 'transformers', force_leaf of 'size' and 'budget'), so that it is gathered with the module around "
    "it, and set split_root=False where that is the whole model. Or let all ranks run it, with inputs that do not "
    "count."
)


class Audit:
    """Compares each collective with the other ranks', before it is issued.

    Ranks that disagree would otherwise hang, or mix up bytes. Later steps mostly repeat the first, in which alone the
    exchange is paid for unless ``check_ranks="always"`` says otherwise.
    """

    def __init__(self) -> None:
        #: Whether a whole forward was compared. Its backward still is, if there is one; the next forward is not.
        self.done = False
        #: The units of which a gather was compared.
        self.gathered: set[str] = set()

    def agree(self, world: Collectives, unit: str, operation: str, numel: int, dtype: torch.dtype) -> None:
        """Raise on every rank of ``world`` if any is about to do something else.

        ``numel``, ``dtype``: what travels, of all ranks together.

        Raises:
            RankMismatchError: saying what each rank is about to do.
        """
        if not world.capabilities.can_communicate:
            return
        mine = f"{operation} of unit '{unit}', {numel} elements of {dtype}"
        everyone = world.all_gather_object(mine)
        if any(other != mine for other in everyone):
            listed = "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(everyone))
            raise RankMismatchError(f"Ranks are about to issue different collectives:\n{listed}\n{_REMEDY}")

    def compare_gathered(
        self, group: Collectives, unit: str, buffer: torch.Tensor, own: torch.Tensor, sent: torch.Tensor | None
    ) -> None:
        """Raise on every rank of ``group`` if a gather did not leave the same bytes on all.

        ``buffer``: the whole unit, compute ordered after its gather; ``own``: this rank's slice of it; ``sent``: what
        was to be in there, None where that is not known. Waits for the device, in the first forward only.

        Raises:
            PluginContractError: naming the collectives, the unit, and the ranks that hold something else.
        """
        if not group.capabilities.can_communicate:
            return
        kept = sent is None or bool(checksum(own) == checksum(sent.to(own.dtype)))
        everyone: list[Any] = group.all_gather_object([f"gather of unit '{unit}'", int(checksum(buffer)), kept])
        if any(each[0] != everyone[0][0] for each in everyone):
            listed = "\n".join(f"  rank {rank}: {each[0]}" for rank, each in enumerate(everyone))
            raise RankMismatchError(f"Ranks wait for different collectives:\n{listed}\n{_REMEDY}")
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
