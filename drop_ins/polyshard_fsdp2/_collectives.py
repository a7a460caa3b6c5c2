"""Objects of a program that move a module's bytes in place of FSDP2, as ``Collectives`` of the engine.

Such an object gives memory for all parameters of a module, and moves it by one operation: rank by rank, what each rank
has of one parameter behind what it has of the one before. Here every parameter has memory of its own, so bytes are
copied into what the object gave, and out of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, ConfigTypeError
from polyshard.extension import ThenAllReduce, Unit, UnitRanks
from polyshard.interfaces import (
    COMPLETED,
    BufferRole,
    Collectives,
    CollectivesCapabilities,
    CollectivesDecorator,
    ReduceOp,
    Work,
)
from typing_extensions import override

from ._torch_private import premul_sum


class AllGather(Protocol):
    """What gathers: torch's class of this name, or anything that is called as its objects are."""

    def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of ``size``, for the current stream."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill ``output_tensor``, which it allocated, with every rank's ``input_tensor``, which is a part of that."""


class ReduceScatter(Protocol):
    """What reduces: torch's class of this name, or anything that is called as its objects are."""

    def allocate(self, size: tuple[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of ``size``, for the current stream."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with this rank's part of what ``op`` makes of every rank's ``input_tensor``."""


@dataclass(frozen=True, slots=True)
class Communication:
    """What moves the bytes of one ``fully_shard`` call, where that is not the engine's."""

    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    hook: Callable[[torch.Tensor], object] | None = None
    """Called with this rank's part of reduced gradients, over the replicas, too, on the stream that reduces."""
    stream: Any = None
    """The stream that ``hook`` is called on instead."""
    factor: float | None = None
    """By what sums of gradients are divided; None for the number of ranks."""
    sums: bool = False
    """Whether reductions are sums, divided by themselves."""

    def around(self, units: Sequence[Unit]) -> None:
        """Let ``units``, of one call, communicate so.

        Raises:
            ConfigError: an object cannot be called as it will be, ``stream`` has no use, or they lie on several meshes.
        """
        first = units[0].ranks
        self._check(first, f"'{units[0].spec.module_name or '(root)'}' (rank {first.world.rank})")
        owner = gather = reduction = first.owner
        if any(unit.ranks.owner is not owner for unit in units):
            raise ConfigError(
                "set_custom_all_gather, set_custom_reduce_scatter and set_all_reduce_hook are not supported with "
                f"multiple param groups: parameters of '{units[0].spec.module_name}' lie on several meshes (rank "
                f"{first.world.rank}). Call fully_shard on modules whose parameters lie on one."
            )
        # One for all units: they travel together, and with no others.
        if owner is not None and self.all_gather is not None:
            gather = _Gather(owner, self.all_gather)
        if owner is not None and self.reduces:
            reduction = _Reduction(owner, self, first.number // owner.world_size)
        made: dict[int, UnitRanks] = {}
        for unit in units:
            if id(unit.ranks) not in made:
                known = {each.name: getattr(unit.ranks, each.name) for each in fields(UnitRanks)}
                known |= {"gather": gather, "reduction": reduction, "packs": self.reduce_scatter is not None}
                made[id(unit.ranks)] = _CustomRanks(**known, by=self) if self.reduces else UnitRanks(**known)
            unit.use_ranks(made[id(unit.ranks)])
            among = unit.post_forward_ranks
            among = among.inner if isinstance(among, _Gather) else among
            if among is not None:
                unit.use_post_forward_ranks(among if self.all_gather is None else _Gather(among, self.all_gather))

    def _check(self, ranks: UnitRanks, where: str) -> None:
        for name, comm in (("all_gather", self.all_gather), ("reduce_scatter", self.reduce_scatter)):
            if comm is not None and not (callable(comm) and hasattr(comm, "allocate")):
                raise ConfigTypeError(
                    f"set_custom_{name} of {where} got {comm!r}, which has no allocate(), or cannot be called. Give an "
                    "object as torch's AllGather and ReduceScatter are."
                )
        if self.hook is not None and not callable(self.hook):
            raise ConfigTypeError(
                f"set_all_reduce_hook of {where} got {self.hook!r}. Give a function of a reduced gradient."
            )
        if self.stream is not None and ranks.replicate is not None:
            raise ConfigError(
                f"stream cannot be set when using native HSDP: {where} has replicas, and the hook follows their "
                "reduction on its stream. Leave it out."
            )

    @property
    def custom(self) -> bool:
        """Whether anything is not the engine's."""
        return self.all_gather is not None or self.reduces

    @property
    def reduces(self) -> bool:
        """Whether reductions are others than the engine's."""
        return self.reduce_scatter is not None or self.hook is not None

    def division(self, gradients: torch.Tensor, shards: int, replicas: int) -> _Division:
        """How the sum of ``gradients`` is divided: as in FSDP2, since its objects and hooks see what comes between."""
        ranks, factor = shards * replicas, self.factor
        narrow = gradients.dtype not in (torch.float32, torch.bfloat16)
        if not (narrow or self.sums):
            shown = float(factor or ranks)
            if factor is None or factor == shards:
                return _Division(dist.ReduceOp.AVG, 1.0, shards, shown, 1.0)
            if gradients.is_cuda:
                return _Division(premul_sum(1 / factor), 1.0, factor, shown, 1.0)
            return _Division(dist.ReduceOp.SUM, 1.0, 1.0, shown, 1.0)
        factor, before = float(factor or ranks), 1.0
        # A power of two near the square root, so that neither addends underflow nor the sum overflows.
        while narrow and factor % before == 0 and factor / before > before:
            before *= 2
        return _Division(dist.ReduceOp.SUM, before, before, before, factor / before)

    def call_hook(self, reduced: torch.Tensor) -> None:
        """Let the hook have ``reduced``, in the order of the current stream."""
        if self.hook is None:
            return
        if self.stream is None:
            self.hook(reduced)
            return
        device = torch.get_device_module(reduced.device)
        current = device.current_stream()
        self.stream.wait_stream(current)
        with device.stream(self.stream):
            self.hook(reduced)
        current.wait_stream(self.stream)


class _Division(NamedTuple):
    op: Any
    """The operation of an object's reduction."""
    before: float
    """What is sent is divided by this."""
    done: float
    """By what ``op`` and ``before`` divide the sum over shards."""
    shown: float
    """By what the sum over all ranks is divided where the hook sees it."""
    after: float
    """What the hook leaves is divided by this."""


@dataclass(frozen=True, slots=True)
class _CustomRanks(UnitRanks):
    """The ranks of units whose gradients a hook sees, or an object of the program reduces."""

    by: Communication = field(kw_only=True)

    @override
    def reduce(self, result: torch.Tensor, gradients: torch.Tensor) -> Work:
        return self._behind(
            UnitRanks.reduce(self, result, gradients), [gradients if self.reduction is None else result]
        )

    @override
    def reduce_many(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], results: torch.Tensor | None = None
    ) -> Work:
        return self._behind(UnitRanks.reduce_many(self, pairs, results), [result for result, _ in pairs])

    def _behind(self, work: Work, results: Sequence[torch.Tensor]) -> Work:
        if isinstance(work, ThenAllReduce):
            work.replicate = _Replicas(work.replicate, self._finish)
            return work
        # Not where the host waits for it, which differs between ranks: a hook may communicate.
        work.wait()
        if len(results) == 1:
            self._finish(results[0])
        else:
            whole = torch.cat(list(results))
            self._finish(whole)
            torch.split_with_sizes_copy(whole, [each.numel() for each in results], out=list(results))
        return COMPLETED

    def _finish(self, result: torch.Tensor) -> None:
        """Divide what was reduced, and call the hook."""
        shards = 1 if self.reduction is None else self.reduction.world_size
        replicas = 1 if self.replicate is None else self.replicate.world_size
        division = self.by.division(result, shards, replicas)
        # Replicas take means.
        done = shards if self.reduction is None or self.by.reduce_scatter is None else division.done
        if (factor := done * replicas / division.shown) != 1:
            result.mul_(factor)
        self.by.call_hook(result)
        if division.after != 1:
            result.div_(division.after)

    @property
    @override
    def among_near(self) -> UnitRanks:  # type: ignore[override]
        # What is added up over replicas later is neither divided nor shown before.
        known = {each.name: getattr(self, each.name) for each in fields(UnitRanks)}
        return UnitRanks(**(known | {"replicate": None}))


class _Around(CollectivesDecorator):
    api_version = 1

    @override
    def around(self, inner: Collectives) -> Collectives:
        part = copy.copy(self)
        part.inner = inner
        return part


class _Gather(_Around):
    def __init__(self, inner: Collectives, comm: AllGather) -> None:
        super().__init__(inner)
        self._comm = comm

    @property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        return replace(super().capabilities, fixed_addresses=False)

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self.all_gather_many([(out, shard)])

    @override
    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        if len({shard.dtype for _, shard in pairs}) > 1:
            pairs = [(out.view(torch.uint8), shard.view(torch.uint8)) for out, shard in pairs]
        shards, ranks = [shard for _, shard in pairs], self.world_size
        sizes = [shard.numel() for shard in shards]
        group = cast("Any", self.process_group)
        whole = self._comm.allocate((ranks * sum(sizes),), dtype=shards[0].dtype, device=self.device)
        rows = whole.view(ranks, -1)
        torch.cat(shards, out=rows[self.rank])
        # Its memory may serve the next operation, so it is read at once.
        _end(self._comm(output_tensor=whole, input_tensor=rows[self.rank], group=group, async_op=False))
        torch.split_with_sizes_copy(rows, sizes, dim=1, out=[out.view(ranks, -1) for out, _ in pairs])
        return COMPLETED


class _Reduction(_Around):
    """Reduces by an object of the program; by the engine's own where there is none, but not with other modules."""

    def __init__(self, inner: Collectives, by: Communication, replicas: int) -> None:
        super().__init__(inner)
        self._by, self._replicas = by, replicas

    @override
    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        return 0 if self._by.reduce_scatter else super().scratch_nbytes(role, numel, communication_dtype, out_dtype)

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        return self.reduce_scatter_many([(out, full, scratch)], op=op)

    @override
    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        comm = self._by.reduce_scatter
        if comm is None:
            return super().reduce_scatter_many(triples, op=op)
        outs, ranks, group = [out for out, _, _ in triples], self.world_size, cast("Any", self.process_group)
        sizes, dtype = [out.numel() for out in outs], outs[0].dtype
        # In the dtype of the sum, as in FSDP2.
        sent = comm.allocate((ranks * sum(sizes),), dtype=dtype, device=self.device)
        torch.cat([full.view(ranks, -1) for _, full, _ in triples], dim=1, out=sent.view(ranks, -1))
        division = self._by.division(sent, ranks, self._replicas)
        if division.before != 1:
            sent.div_(division.before)
        result = comm.allocate((sum(sizes),), dtype=dtype, device=self.device)
        _end(comm(output_tensor=result, input_tensor=sent, group=group, op=division.op))
        torch.split_with_sizes_copy(result, sizes, out=outs)
        return COMPLETED


class _Replicas(_Around):
    """Reduces over replicas, and then does the rest."""

    def __init__(self, inner: Collectives, rest: Callable[[torch.Tensor], None]) -> None:
        super().__init__(inner)
        self._rest = rest

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        self.inner.all_reduce(tensor, op=op).wait()
        self._rest(tensor)
        return COMPLETED


def _end(work: Any | None) -> None:
    if work is not None:
        work.wait()
