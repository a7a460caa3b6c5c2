"""Backends over ``torch.distributed``: finding the group, making further ones, sharing them, and plain exchanges."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from polyshard.errors import (
    CollectiveAbortedError,
    CollectiveError,
    CollectiveTimeoutError,
    DeviceError,
    StateError,
    WorldSizeError,
    warn_once,
)
from polyshard.interfaces import BufferRole, Collectives, PluginContext
from typing_extensions import override

from . import _torch_private
from .tensors import check_source, own_group


def resolve_group(context: PluginContext) -> dist.ProcessGroup:
    """The process group that ``context`` names: its group, its one-dimensional mesh's, or the default one.

    Raises:
        StateError: ``torch.distributed`` has no process group.
        WorldSizeError: this process is not in the group, or the mesh has several dimensions and is not the world.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise StateError(
            f"collectives {context.name!r} needs torch.distributed, which has no process group; launch with torchrun "
            'and call torch.distributed.init_process_group() first, or set collectives="fake" for one pretended rank'
        )
    group: Any = context.process_group
    if group is None and context.mesh is not None:
        if context.mesh.ndim == 1:
            group = context.mesh.get_group()
        elif context.mesh.size() != dist.get_world_size():
            raise WorldSizeError(
                f"collectives {context.name!r}: the mesh has {context.mesh.ndim} dimensions and {context.mesh.size()} "
                f"of {dist.get_world_size()} ranks; give the process group of the ranks that shard together"
            )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise WorldSizeError(
            f"collectives {context.name!r}: {group!r} is not a process group that this process is in; give a "
            f"torch.distributed.ProcessGroup that contains rank {dist.get_rank()}"
        )
    return group


def group_backend(group: dist.ProcessGroup, device_type: str) -> str:
    """Name of the transport that ``group`` uses for tensors of ``device_type``; empty for none."""
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    return next((backend for device, _, backend in pairs if device == device_type), "")


def new_group(ranks: Sequence[int], backend: str, timeout: Any, *, everywhere: bool) -> dist.ProcessGroup | None:
    """A new group of global ``ranks``, numbered in that order; None on other ranks.

    ``everywhere``: every rank of the job makes this call; otherwise the members alone do.
    """
    options: dict[str, Any] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise WorldSizeError(
                f"a group of the ranks {list(ranks)}, in this order, needs a newer torch than {torch.__version__}; "
                f"list the ranks in ascending order"
            )
        options["sort_ranks"] = False
    group = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=not everywhere, **options
    )
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank() not in ranks:
        return None
    if backend == "gloo":
        # Torch returns once this rank is connected (2.11 and 2.13). One that ended the group before others are would
        # break off their connecting.
        dist.barrier(group)
    return group


class SharedGroups:
    """Process groups that were made together, until their last user releases them.

    All models over the same ranks share them: connections, threads and communicators belong to a group, and making one
    is a meeting of its ranks, so that every rank must know alike whether there is one. Users are therefore counted
    where every rank calls alike: in ``partition``, at a first operation, and in ``close``. A finalizer would not do,
    since ranks collect objects at different times. Groups that nobody closed serve the next model over the same ranks,
    and end with the group that they were made of.

    So do ``kept`` ones, which their members alone made, closed or not: torch names them by their ranks, and a second
    one of a name finds the addresses of the first in the store (torch 2.11 and 2.13).
    """

    def __init__(
        self, table: dict[Hashable, SharedGroups], key: Hashable, groups: list[dist.ProcessGroup], *, kept: bool
    ) -> None:
        self.groups = groups
        self._kept = kept
        self._table = table
        self._key = key
        self.users = 0

    def release(self) -> None:
        """One user less; the last one ends the groups, on all ranks in the same order."""
        self.users -= 1
        if self.users > 0 or self._kept:
            return
        if self._table.get(self._key) is self:
            del self._table[self._key]
        # One by one: gloo's connections and threads end with the last reference to the group.
        while self.groups:
            group = self.groups.pop()
            if dist.is_initialized():
                # A destroyed world has destroyed its groups.
                with suppress(ValueError):
                    dist.destroy_process_group(group)

    @property
    def alive(self) -> bool:
        """Whether torch knows all groups: a program may destroy groups that it did not make."""
        try:
            return all(dist.get_process_group_ranks(group) for group in self.groups)
        except (KeyError, ValueError):
            return False


# Of the process, as torch's groups are; an entry ends with its group.
_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, SharedGroups]] = WeakKeyDictionary()


def shared_groups(
    parent: dist.ProcessGroup, key: Hashable, make: Callable[[], list[dist.ProcessGroup]], *, kept: bool
) -> SharedGroups:
    """The groups of ranks of ``parent`` under ``key``, for one more user; made at the first call.

    ``kept``: whether they serve a later call when no user is left.

    Every rank of ``parent`` calls it, at the same point of the program.
    """
    table = _MADE.setdefault(parent, {})
    shared = table.get(key)
    if shared is None or not shared.alive:
        shared = table[key] = SharedGroups(table, key, make(), kept=kept)
    shared.users += 1
    return shared


#: The operation that did not end, of each group where one did not. Of the process, as torch's groups are.
_FAILED: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


class ProcessGroupCollectives(Collectives):
    """Base of the backends over ``torch.distributed``.

    Groups are made at the first operation or in ``partition``, where all ranks meet, as making a group requires. Models
    over the same ranks share them.
    """

    #: The transport that the group must use, and the device type that it is used for.
    transport: str
    device_type: str
    #: Whether reductions need a communicator of their own to overlap with gathers.
    separate_reductions: bool

    def __init__(self, context: PluginContext) -> None:
        if context.device.type != self.device_type:
            raise DeviceError(
                f"collectives {context.name!r} serves {self.device_type} tensors and the model computes on "
                f"{context.device}; move the model, or choose another backend"
            )
        self._enter(context, resolve_group(context))

    def _enter(self, context: PluginContext, given: dist.ProcessGroup) -> None:
        self._context = context
        self._given: dist.ProcessGroup | None = given
        self._rank = given.rank()
        self._world_size = given.size()
        if self._rank < 0:
            raise WorldSizeError(
                f"collectives {context.name!r}: rank {dist.get_rank()} is not in the process group that it was given; "
                f"give one that contains it"
            )
        self._shared: list[SharedGroups] = []
        self._gathers: dist.ProcessGroup | None = None
        self._reductions: dist.ProcessGroup | None = None
        # The newer name first: where torch has it, the older one warns.
        self._all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._closed = False
        # The operation of these groups that did not end.
        self._failure: str | None = None
        _USERS.add(self)

    @property
    @override
    def rank(self) -> int:
        return self._rank

    @property
    @override
    def world_size(self) -> int:
        return self._world_size

    @property
    @override
    def device(self) -> torch.device:
        return self._context.device

    @property
    @override
    def process_group(self) -> dist.ProcessGroup:
        given = self._given
        if given is None:
            raise self._was_closed()
        return given

    @override
    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        return numel * communication_dtype.itemsize

    def gather_group(self) -> dist.ProcessGroup:
        """The group that gathers use; made here at the first operation."""
        if self._gathers is None:
            self._make_groups()
        assert self._gathers is not None
        return self._gathers

    def reduction_group(self) -> dist.ProcessGroup:
        """The group that reductions use; made here at the first operation."""
        if self._reductions is None:
            self._make_groups()
        assert self._reductions is not None
        return self._reductions

    def _make_groups(self) -> None:
        if self._closed:
            raise self._was_closed()
        self._refuse_failed()
        # Both at once: the order of making must not depend on which of the two a rank needs first.
        if group_backend(self.process_group, self.device_type) == self.transport:
            self._gathers = self.process_group
        else:
            self._gathers = self._second_group()
        self._reductions = self._second_group() if self.separate_reductions else self._gathers
        self._leave_failed()
        self._refuse_failed()

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise CollectiveAbortedError(
                f"collectives {self._context.name!r} on rank {self._rank} are of no further use: {self._failure}, and "
                "ranks stand at different places of their order. Start the job again, or make new process groups on "
                "all ranks and shard the models anew over them"
            )

    def _second_group(self) -> dist.ProcessGroup:
        ranks = dist.get_process_group_ranks(self.process_group)
        everywhere = len(ranks) == dist.get_world_size()
        if not everywhere and self._gathers is not None:
            obstacle = ""
            if self._splits() and not self._can_split():
                obstacle = (
                    "the job is bound to devices, and its communicator cannot be split; shard over the whole job, call "
                    "init_process_group without device_id"
                )
            elif not self._named_alike():
                obstacle = "its ranks are in different numbers of groups; shard before further groups are made"
            if obstacle:
                warn_once(
                    f"collectives {self._context.name!r}: gathers and reductions of {len(ranks)} of "
                    f"{dist.get_world_size()} ranks share one communicator and wait for each other, since "
                    f"{obstacle}, or set communicators to 1",
                    rank=self._rank,
                )
                return self._gathers
        # Where the given group is of another transport, gathers need a new group, too.
        use = "gathers" if self._gathers is None else "reductions"
        shared = self._further_groups([range(len(ranks))], 1, use)
        self._shared.append(shared)
        return shared.groups[0]

    def _further_groups(self, rank_lists: Sequence[Sequence[int]], each: int, use: str) -> SharedGroups:
        """This rank's groups, ``each`` for its list, over ranks of the given group; shared by equal ``use``."""
        ranks = dist.get_process_group_ranks(self.process_group)
        everywhere = len(ranks) == dist.get_world_size()
        timeout = self._context.timeout

        def make() -> list[dist.ProcessGroup]:
            if not everywhere and not self._named_alike():
                raise StateError(
                    f"collectives {self._context.name!r} on rank {self._rank} cannot make further groups: the "
                    f"{len(ranks)} ranks that it was given are in different numbers of process groups, by which torch "
                    f"names new ones. Shard before further groups are made, or make these on all of the ranks"
                )
            if not everywhere and self._splits():
                return self._split(rank_lists, each)
            lists = [members for members in rank_lists if everywhere or self._rank in members]
            wanted = [[ranks[member] for member in members] for members in lists for _ in range(each)]
            groups = [new_group(members, self.transport, timeout, everywhere=everywhere) for members in wanted]
            return [group for group in groups if group is not None]

        key = use, tuple(map(tuple, rank_lists)), each, self.transport, timeout
        return shared_groups(self.process_group, key, make, kept=not everywhere)

    def _named_alike(self) -> bool:
        """Whether a group that these ranks alone make gets one name on all of them. All of them call it."""
        numbers: list[Any] = [None] * self._world_size
        dist.all_gather_object(numbers, _torch_private.groups_of_this_rank(), group=self.process_group)
        return len(set(numbers)) == 1

    def _splits(self) -> bool:
        """Whether torch makes groups by splitting a communicator, and ``new_group`` by splitting the job's."""
        job: Any = dist.group.WORLD
        return self.transport == "nccl" and job.bound_device_id is not None

    def _can_split(self) -> bool:
        """Whether the ranks of the given group can split its own communicator, which takes them alone."""
        given = self.process_group
        return group_backend(given, self.device_type) == self.transport and _torch_private.splits(given, self.device)

    def _split(self, rank_lists: Sequence[Sequence[int]], each: int) -> list[dist.ProcessGroup]:
        """This rank's groups, ``each`` for its list, by splits of the given group's communicator, which must exist."""
        where = f"collectives {self._context.name!r} on rank {self._rank}"
        if not self._can_split():
            raise StateError(
                f"{where} cannot make further groups of {self._world_size} of {dist.get_world_size()} ranks: the job "
                "is bound to devices, and the communicator of these ranks cannot be split. Shard over the whole job, "
                "or call init_process_group without device_id"
            )
        if any(list(members) != sorted(members) for members in rank_lists):
            raise WorldSizeError(
                f"{where} cannot split its group into {[list(members) for members in rank_lists]}: a split numbers "
                "ranks in ascending order. List them so, or call init_process_group without device_id"
            )
        members = [list(members) for members in rank_lists]
        made = [dist.split_group(self.process_group, members, timeout=self._context.timeout) for _ in range(each)]
        return [group for group in made if group is not None]

    def _root_of(self, src: int) -> int:
        check_source(src, self._rank, self._world_size)
        return dist.get_global_rank(self.process_group, src)

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        return [pickle.loads(each) for each in self._exchanged(pickle.dumps(obj))]

    def _exchanged(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes. Short ones travel with their length, so that most calls are one communication."""
        heads = self._rows(len(mine).to_bytes(8, "little") + mine[:_SHORT_NBYTES], 8 + _SHORT_NBYTES)
        lengths = [int.from_bytes(head[:8], "little") for head in heads]
        longest = max(lengths)
        rows = [head[8:] for head in heads] if longest <= _SHORT_NBYTES else self._rows(mine, longest)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def _rows(self, mine: bytes, nbytes: int) -> list[bytes]:
        """Every rank's bytes, each filled up to ``nbytes``, the same number on all."""
        sent = torch.frombuffer(bytearray(mine.ljust(nbytes, b"\0")), dtype=torch.uint8)
        everything = torch.empty(self._world_size * nbytes, dtype=torch.uint8, device=self.device)
        self.all_gather(everything, sent.to(self.device)).wait()
        found = everything.cpu().numpy().tobytes()
        return [found[start : start + nbytes] for start in range(0, len(found), nbytes)]

    def _translated(self, error: Exception, operation: str) -> CollectiveError:
        """``error`` from ``torch.distributed`` as one of polyshard's."""
        text, rank = str(error), self._rank
        if "timed out" in text.lower() or "timeout" in text.lower():
            return CollectiveTimeoutError(
                f"{operation} on rank {rank} did not end within {self._context.timeout.total_seconds():g} s: {text}; "
                "look for a rank that failed, or that issued something else"
            )
        if "connection" in text.lower():
            return CollectiveAbortedError(
                f"{operation} on rank {rank} lost its peer: {text}; look at the rank that ended first"
            )
        return CollectiveError(f"{operation} on rank {rank} failed: {text}")

    def failed(self, error: Exception, operation: str) -> CollectiveError:
        """``error`` of ``operation`` as one of polyshard's; an operation that did not end closes its groups to others.

        Ranks then stand at different places of their order: the next operation would meet an earlier one of another
        rank, for which gloo ends the process. That holds for all users of these groups.
        """
        translation = self._translated(error, operation)
        if isinstance(translation, CollectiveTimeoutError | CollectiveAbortedError):
            groups = [group for group in (self._gathers, self._reductions) if group is not None]
            for group in groups:
                _FAILED.setdefault(group, str(translation).partition(";")[0])
            for other in list(_USERS):
                if other._gathers in groups or other._reductions in groups:
                    other._leave_failed()
        return translation

    def _leave_failed(self) -> None:
        """Drop both groups where one of them failed; the next operation raises in ``_make_groups``."""
        for group in (self._gathers, self._reductions):
            if group is not None and group in _FAILED:
                self._failure = _FAILED[group]
                self._gathers = self._reductions = None
                return

    @override
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> ProcessGroupCollectives:
        own_group(rank_lists, self._rank, self._world_size)
        part = object.__new__(type(self))
        part._enter_part(self, self._further_groups(rank_lists, 2 if self.separate_reductions else 1, "part"))
        return part

    def _enter_part(self, whole: Any, shared: SharedGroups) -> None:
        self._enter(whole._context, shared.groups[0])
        self._gathers, self._reductions = shared.groups[0], shared.groups[-1]
        self._shared = [shared]
        self._leave_failed()

    def _was_closed(self) -> StateError:
        return StateError(f"collectives {self._context.name!r} on rank {self._rank} were closed; construct them anew")

    @override
    def close(self) -> None:
        self._closed = True
        # A group ends with its last reference. A closed model must not keep one alive that the user destroys: its
        # threads would outlive the interpreter, and abort the process at exit.
        self._given = self._gathers = self._reductions = None
        while self._shared:
            self._shared.pop().release()


#: Of an object that travels with its length: what the engine compares in a first step is shorter.
_SHORT_NBYTES = 504
#: All instances, to tell the users of a group that it failed.
_USERS: WeakSet[ProcessGroupCollectives] = WeakSet()
