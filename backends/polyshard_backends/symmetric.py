"""NCCL, with what large gathers and reductions send on one host copied by the devices' copy engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError
from polyshard.interfaces import BufferRole, Collectives, PluginContext, Work

from . import _torch_private
from .nccl import MIB, NcclCollectives, StreamWork, check_mib
from .peer_memory import PeerMemory, Place, obstacle
from .shared_groups import SharedGroups
from .thresholds import SMALLEST_COPIED_MIB

#: What lies in symmetric memory.
_ROLES = (BufferRole.GATHER, BufferRole.REDUCE)


class SymmetricCollectives(NcclCollectives):
    """``nccl``, whose large gathers and reductions are copies out of the other ranks' memory.

    The engine's gather buffers and the inputs of its reductions are allocated in symmetric memory, which every rank of
    the host has mapped of every other. A gather waits until all ranks have written their slices, copies them by the
    copy engines, and waits until all have read: no multiprocessor moves bytes, so concurrent computation keeps all of
    them. A reduction that widens copies in the same way what NCCL's all-to-all would send; the sum is a kernel as
    there. Small operations, where two barriers cost more than that saves, reductions that do not widen, and all that is
    in other memory are NCCL's, in memory as ``nccl`` has it by default. So are exchanges: where a rank's block lies in
    another's memory follows from splits that only the other has. A captured step copies where the steps before it did.

    Where ranks are on several hosts, devices cannot access each other, torch has no symmetric memory (before 2.10) or
    would set up multicast, every gather is NCCL's, on all ranks alike, with a warning from the first one.

    torch numbers a process's meetings over such memory through all groups (``StoreExchange`` in its headers, 2.13). So
    the ranks of a group must have met equally often before: groups side by side do, a group of some ranks and one of
    all do not, and the larger one's ranks then wait for each other until the process group's timeout.

    Ranks must gather and release units in one order, as those do that run the same program: what is copied is what lies
    at the same place of another rank's memory. A rank that never arrives is found by the device, which fails after the
    context's timeout; the error is CUDA's.

    Args:
        context: as for ``nccl``.
        smallest_mib: MiB of a whole unit from which on its gathers and reductions are copies. In a captured step, where
            the host issues none of them, fewer are worth it: 8.
        reductions: whether reductions are; their inputs then stay in this memory, and serve nothing else.
        reserve_mib: MiB of a first segment that is divided among buffers; 0 for one segment a buffer. Give all
            that is gathered at once where the warning says that segments do not lie alike on all ranks.
        communicators: as for ``nccl``.

    Raises:
        StateError: ``torch.distributed`` is not initialised.
        DeviceError: the context's device is not CUDA.
        WorldSizeError: this process is not in the group.
        ConfigError: an option has a value that it cannot take.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        smallest_mib: int = SMALLEST_COPIED_MIB,
        reductions: bool = True,
        reserve_mib: int = 0,
        communicators: int = 2,
    ) -> None:
        if not isinstance(reductions, bool):
            raise ConfigError(f"collectives {context.name!r}: reductions is {reductions!r}; give true or false")
        check_mib(context, "smallest_mib", smallest_mib)
        check_mib(context, "reserve_mib", reserve_mib)
        super().__init__(context, communicators=communicators)
        self._smallest_nbytes = smallest_mib * MIB
        self._reserve_nbytes = reserve_mib * MIB
        self._roles = _ROLES if reductions else _ROLES[:1]

    def _enter(self, context: PluginContext, given: dist.ProcessGroup) -> None:
        super()._enter(context, given)
        self._smallest_nbytes = self._reserve_nbytes = 0
        self._roles = _ROLES
        self._memory: PeerMemory | None = None
        self._given_up = False

    def _enter_part(self, whole: Any, shared: SharedGroups) -> None:
        super()._enter_part(whole, shared)
        self._smallest_nbytes = whole._smallest_nbytes
        self._reserve_nbytes = whole._reserve_nbytes
        self._roles = whole._roles

    def allocation(self, role: BufferRole, nbytes: int) -> AbstractContextManager[Any]:
        if role in self._roles and nbytes >= self._smallest_nbytes and not self._given_up:
            if not torch.cuda.is_current_stream_capturing():
                memory = self._memory or self._open_memory()
                if memory is not None:
                    return memory.scope
            # New memory would have to meet the other ranks, and be zeroed, which a capture can do neither of.
            elif self._memory is not None and self._memory.scope.has_room(nbytes):
                return self._memory.scope
        return super().allocation(role, nbytes)

    def prepare_capture(self, stream: torch.cuda.Stream, like: torch.cuda.Stream) -> None:
        super().prepare_capture(stream, like)
        if self._memory is not None:
            self._memory.scope.share(stream, like)

    def _open_memory(self) -> PeerMemory | None:
        """Every rank's first allocation meets here."""
        problem = "there is one rank" if self._world_size == 1 else ""
        memory: PeerMemory | None = None
        if not problem:
            problem = obstacle(self.all_gather_object(Place.here(self._device_number())))
        if not problem:
            failure = ""
            try:
                memory = PeerMemory(
                    self.gather_group(),
                    torch.device("cuda", self._device_number()),
                    self.all_gather_object,
                    self._context.timeout,
                    self._reserve_nbytes,
                )
            except RuntimeError as error:
                failure = f"rank {self._rank}: {error}"
            # Before memory is mapped: a rank that waits for one that has none would wait for long.
            failures = [text for text in self.all_gather_object(failure) if text]
            problem = failures[0] if failures or memory is None else memory.meet()
        if problem or memory is None:
            self._give_up(problem)
            return None
        self._memory = memory
        return memory

    def _give_up(self, problem: str) -> None:
        self._given_up = True
        if self._world_size > 1:
            self._warn(f"gathers and reductions are NCCL's: {problem}")

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        memory = self._memory
        if memory is not None and out.nbytes >= self._smallest_nbytes and self._fits(out, shard):
            try:
                pull = memory.pull_of(out)
                if pull is not None:
                    if shard.data_ptr() != pull.own.data_ptr():
                        pull.own.copy_(shard.view(torch.uint8), non_blocking=True)
                    memory.run(pull)
                    return StreamWork(self._device_index)
            except RuntimeError as error:
                raise self._translated(error, "all_gather") from error
            if memory.problem and not self._given_up:
                self._give_up(memory.problem)
        return super().all_gather(out, shard)

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        if self._memory is None or all(out.nbytes < self._smallest_nbytes for out, _ in pairs):
            return super().all_gather_many(pairs)
        return Collectives.all_gather_many(self, pairs)

    def _exchange(self, channel: _torch_private.Channel, received: torch.Tensor, full: torch.Tensor) -> None:
        memory = self._memory if BufferRole.REDUCE in self._roles else None
        if memory is not None and full.nbytes >= self._smallest_nbytes and full.is_contiguous():
            parts = memory.parts_of(full)
            if parts is not None:
                memory.exchange(parts, received)
                return
            if memory.problem and not self._given_up:
                self._give_up(memory.problem)
        super()._exchange(channel, received, full)

    def _exchange_many(
        self, channel: _torch_private.Channel, received: list[torch.Tensor], fulls: list[torch.Tensor]
    ) -> None:
        if self._memory is None or all(full.nbytes < self._smallest_nbytes for full in fulls):
            super()._exchange_many(channel, received, fulls)
            return
        for out, full in zip(received, fulls, strict=True):
            self._exchange(channel, out, full)

    def _fits(self, out: torch.Tensor, shard: torch.Tensor) -> bool:
        """Whether NCCL would not refuse these, or has nothing to do."""
        return (
            0 < out.nbytes == shard.nbytes * self._world_size
            and out.dtype is shard.dtype
            and out.is_contiguous()
            and shard.is_contiguous()
        )

    def all_gather_object(self, obj: Any) -> list[Any]:
        # Objects are how ranks agree about this memory, and must not depend on it.
        memory, self._memory = self._memory, None
        try:
            return super().all_gather_object(obj)
        finally:
            self._memory = memory

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        super().close()
