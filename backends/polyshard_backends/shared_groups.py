"""Process groups that are made once for equal ranks, and used by all models that shard over them.

Connections, threads and communicators belong to a group, and making one is a meeting of its ranks. So every rank must
come to the same answer to "is there one already?". Leases are therefore taken and given back where the program says so
alone, in ``partition``, at a first operation, and in ``close``, which every rank calls alike; never when an object is
collected, which happens on each rank when it pleases, at exit perhaps when nothing can be sent any more. What nobody
closed is kept for the next model over the same ranks, and ends with the group that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch.distributed as dist


class SharedGroups:
    """Groups that were made together, until the last of their leases is given back."""

    def __init__(self, table: dict[Hashable, SharedGroups], key: Hashable, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self._table = table
        self._key = key
        self._leases = 0

    def lease(self) -> SharedGroups:
        """One more user."""
        self._leases += 1
        return self

    def give_back(self) -> None:
        """One user less; the last one ends the groups, on all ranks in the same order."""
        self._leases -= 1
        if self._leases > 0:
            return
        self._forget()
        # Let go of one by one: gloo's connections and threads end with the group itself.
        while self.groups:
            group = self.groups.pop()
            if dist.is_initialized():
                # Where the world was destroyed, its groups were, too.
                with suppress(ValueError):
                    dist.destroy_process_group(group)

    @property
    def alive(self) -> bool:
        """Whether torch knows all of them: a program may destroy groups that it did not make."""
        try:
            return all(dist.get_process_group_ranks(group) for group in self.groups)
        except (KeyError, ValueError):
            return False

    def abort(self) -> None:
        """Give up what is in flight. Nobody is given these groups any more."""
        self._forget()
        for group in self.groups:
            group.abort()

    def _forget(self) -> None:
        if self._table.get(self._key) is self:
            del self._table[self._key]


# Of the process, as torch's groups are, and gone with them.
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, SharedGroups]] = WeakKeyDictionary()


def shared_groups(
    parent: dist.ProcessGroup, key: Hashable, make: Callable[[], list[dist.ProcessGroup]]
) -> SharedGroups:
    """A lease of the groups that were made of ranks of ``parent`` under ``key``; made now where there are none.

    Every rank of ``parent`` calls it, at the same point of the program.
    """
    table = _MADE.setdefault(parent, {})
    shared = table.get(key)
    if shared is None or not shared.alive:
        shared = table[key] = SharedGroups(table, key, make())
    return shared.lease()
