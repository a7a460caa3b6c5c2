"""Checks of ranks while they train: replicas whose parameters differ, and stragglers for which the others wait."""

from __future__ import annotations

import logging
import math
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from types import TracebackType

import torch
from torch import nn
from typing_extensions import override

from .errors import ConfigError, RankMismatchError, StateError
from .inspect import ShardedModel, ShardedUnit, Waits, idle_model, inner_tensors, is_dtensor, local_of
from .interfaces import Collectives, ReduceOp
from .state.exchange import Round, gathering, speaks

_LOGGER = logging.getLogger(__name__)


def check_replicas(model: nn.Module) -> None:
    """Compare, bit by bit, parameters that several ranks hold: ``no_shard``, and the replicas of ``hybrid_shard``.

    Beside tensor parallelism also what its ranks have alike: plain parameters, and DTensors that they replicate.
    Such parameters stay the same through training, unless something computes, transfers or keeps them wrongly, or a
    program changes them on some ranks alone. Every rank calls it, between steps, as often as a program likes. It reads
    this rank's parameters once, exchanges eight bytes for each among the ranks that hold the same, and waits for the
    device. A single bit is always found, and a difference of several but for a chance of less than one in 10^9. Buffers
    are not looked at, nor are parameters outside of units.

    A single rank has nothing to compare with, and nor has one whose backend only pretends to communicate.

    Raises:
        RankMismatchError: a parameter differs. Raised on all ranks, of every replica; names the first such parameter,
            in module order, and the ranks that differ from most.
        ConfigError: the strategy keeps each element on one rank alone.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
    """
    root = idle_model(model, "check_replicas()")
    if speaks(root.collectives):
        with root.meeting("comparison of replicas", (root.collectives,)):
            _compare(model, root)


#: Ranks that compare, and whether only those with the same shard hold the same: all ranks of the model do not.
_Among = tuple[Collectives, bool]
#: The units and slots that are compared.
_Compared = list[tuple[ShardedUnit, int]]


def _compare(model: nn.Module, root: ShardedModel) -> None:
    compared: dict[_Among, _Compared] = {}
    for unit in root.units:
        copied = set(unit.copied_slots)
        for slot in range(len(unit.tensors)):
            if slot in copied:
                compared.setdefault((root.collectives, True), []).append((unit, slot))
            elif unit.replicate is not None:
                compared.setdefault((unit.replicate, False), []).append((unit, slot))
    if not compared:
        raise ConfigError(
            f"check_replicas() found no parameter that a second rank holds (rank {root.rank}): the strategy keeps each "
            "element on one rank. Leave the call out, or shard with 'no_shard' or 'hybrid_shard'."
        )
    device = root.collectives.device
    sums = {among: _checksums(held, device) for among, held in compared.items()}
    differing = torch.zeros((), device=device)
    for (group, by_shard), mine in sums.items():
        shards = [unit.shard_rank for unit, _ in compared[group, by_shard]] if by_shard else []
        sent = torch.cat([mine, torch.tensor(shards, dtype=mine.dtype, device=device)])
        everyone = sent.new_empty(group.world_size * sent.numel())
        group.all_gather(everyone, sent).wait()
        found = everyone.view(group.world_size, -1) != sent
        if by_shard:
            found, other_shard = found.chunk(2, dim=1)
            found = found & ~other_shard
        differing = torch.maximum(differing, found.any().to(differing.dtype))
    # Groups whose shards are equal must know of the one that differs.
    root.collectives.all_reduce(differing, op=ReduceOp.MAX).wait()
    if differing.item():
        _raise(model, root, compared, sums)


#: Elements that are summed at once: what bounds the memory that a checksum takes.
_AT_ONCE = 1 << 20
#: Odd, so that no power of two is lost by multiplying with them in 64 bits.
_SPREAD, _STEP = 0x9E3779B97F4A7C15 - (1 << 64), 0x2545F4914F6CDD1D
#: By the bytes of an element. None of 64 bits: two changes of the highest would cancel, whatever multiplies them.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if is_dtensor(tensor) else tensor


def _checksums(compared: _Compared, device: torch.device) -> torch.Tensor:
    """One for each parameter, int64: of this rank's piece."""
    with torch.no_grad():
        # As many on each rank, whether or not it holds a piece.
        parts = [list(inner_tensors(_local(unit.tensors[slot]))) for unit, slot in compared]
        found = [torch.stack([_checksum(part).to(device) for part in each]).sum() for each in parts]
    return torch.stack(found)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.reshape(-1).view(_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    weights = torch.arange(min(bits.numel(), _AT_ONCE), dtype=torch.int64, device=bits.device)
    weights = weights.mul_(_SPREAD).bitwise_or_(1)
    for part in torch.split(bits, _AT_ONCE) if bits.numel() else ():
        total = total * _STEP + (weights[: part.numel()] * part).sum()
    return total


def _raise(
    model: nn.Module,
    root: ShardedModel,
    compared: dict[_Among, _Compared],
    sums: dict[_Among, torch.Tensor],
) -> None:
    # By the unit's and the parameter's place, and the shard or the first rank that holds it: for each, one value is
    # right.
    mine: dict[tuple[int, int, int], int] = {}
    places = {unit: index for index, unit in enumerate(root.units)}
    for (group, by_shard), held_here in compared.items():
        first = 0 if by_shard else min(group.all_gather_object(root.collectives.rank))
        for (unit, slot), value in zip(held_here, sums[group, by_shard].tolist(), strict=True):
            mine[places[unit], slot, unit.shard_rank if by_shard else first] = value
    held: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, theirs in enumerate(root.collectives.all_gather_object(mine)):
        for place, value in theirs.items():
            held[place][value].append(rank)
    wrong = sorted(place for place, by_value in held.items() if len(by_value) > 1)
    index, slot, _ = wrong[0]
    unit = root.units[index]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensor = unit.tensors[slot]
    sides = sorted(held[wrong[0]].values(), key=lambda ranks: (-len(ranks), ranks))
    parameters = len({place[:2] for place in wrong})
    more = f" {parameters - 1} more differ." if parameters > 1 else ""
    if len(sides[0]) > len(sides[1]):
        others = sorted(rank for side in sides[1:] for rank in side)
        which = f"on ranks {others} it is not what it is on ranks {sides[0]}"
    else:
        which = "no value of it is on most: " + ", ".join(str(side) for side in sides) + " agree among themselves"
    raise RankMismatchError(
        f"Parameter '{names.get(id(tensor), unit.parameters[slot].name)}' of unit '{unit.name}' differs between "
        f"ranks that hold the same of it: {which} (rank {root.rank}).{more} Load the last checkpoint, and look at what "
        "changes parameters on some ranks alone, or at those ranks' devices."
    )


#: Steps of each ``every`` that are measured, at most.
_MEASURED = 10
#: Of a step's time, by which a straggler is behind the median at least: less is not worth a machine.
_WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was slower than most."""

    rank: int
    """Among those that share the model."""
    host: str
    """The name of its machine."""
    own_s: float
    """Seconds of a step that it did not spend waiting for other ranks, on average."""
    median_s: float
    """The same of the median rank."""
    times: int
    """Judgements in a row, this one counted, that found it slow: 1 may have been chance."""

    @override
    def __str__(self) -> str:
        row = f", {self.times} times in a row" if self.times > 1 else ""
        return (
            f"rank {self.rank} on {self.host!r} takes {self.own_s:.3g} s of a step for itself, {self.median_s:.3g} s "
            f"is the median{row}"
        )


class Stragglers:
    """Finds ranks that the others wait for::

        with polyshard.Stragglers(model) as stragglers:
            for batch in batches:
                train(batch)
                for slow in stragglers.step():
                    print(slow)

    Of each ``every`` steps, the first ten at most are measured, or the first half. What each rank measured is exchanged
    at the last of them, and read at the call after that, which thereby waits for nothing; with ``every=1`` each call
    waits for the device.

    A rank's own time is a step's without what compute spent waiting for gathers, reductions, and the comparison of what
    ranks issue. Waits in the program's own collectives count as its own.
    """

    def __init__(self, model: nn.Module, *, every: int = 100, factor: float = 1.5) -> None:
        """Raises ``ConfigError`` for ``every`` below 1 and for a ``factor`` that is not above 1.

        Args:
            model: The outermost sharded module.
            every: At every how many steps ranks are judged.
            factor: A straggler's own time is at least so many times the median's, and behind it by a twentieth of a
                step at least.
        """
        if every < 1:
            raise ConfigError(f"every must be a number of steps, 1 or more, not {every!r}.")
        if not factor > 1:
            raise ConfigError(f"factor must be above 1, not {factor!r}.")
        self._model = model
        self._every = every
        self._factor = factor
        self._measured = max(1, min(_MEASURED, every // 2))
        self._root: ShardedModel | None = None
        self._hosts: Sequence[str] = ()
        # Calls since the one that ended the last window; None before the first, which ends the steps that warm up.
        self._calls: int | None = None
        self._waits: Waits | None = None
        self._round: Round | None = None
        self._times: dict[int, int] = {}
        self._warned = False

    def __enter__(self) -> Stragglers:
        """Every rank enters it, between steps: they exchange the names of their machines.

        Raises:
            StateError: entered twice, inside of a step, or the model is not the outermost sharded module.
        """
        if self._root is not None:
            raise StateError("A Stragglers was entered twice. Enter it once, around the loop of training.")
        root = idle_model(self._model, "Stragglers")
        if speaks(root.collectives):
            with root.meeting("exchange of the names of machines", (root.collectives,)):
                self._hosts = root.collectives.all_gather_object(socket.gethostname())
        self._root = root
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._root = None
        if self._waits is not None:
            self._waits.stop()
        self._calls = self._waits = None
        pending, self._round = self._round, None
        if pending is not None and kind is None:
            # Communicators may be closed next. After an exception another rank may never reach the exchange, which
            # then keeps its memory by itself.
            pending.read()

    def step(self) -> tuple[Straggler, ...]:
        """Every rank calls it behind each step; all get the same answer. Also logged as a warning by rank 0.

        Returns:
            The stragglers, where this call judges: the slowest first. Empty for none and between judgements.

        Raises:
            StateError: outside of the ``with``.
            RankMismatchError: another rank does something else, where the collectives compare that.
            CollectiveError: another rank did not come.
        """
        root = self._root
        if root is None:
            raise StateError("step() was called outside of 'with polyshard.Stragglers(model)'.")
        if not speaks(root.collectives):
            return ()
        found: tuple[Straggler, ...] = ()
        if self._round is not None:
            pending, self._round = self._round, None
            found = self._judge(pending.read(), root)
        if self._calls is None:
            self._begin(root)
            return found
        self._calls += 1
        if self._calls == self._measured and self._waits is not None:
            self._waits.stop()
        if self._calls == self._every:
            with root.meeting("exchange of step times", (root.collectives,)):
                self._round = gathering(root.collectives, self._measurement())
            self._begin(root)
        return found

    def _begin(self, root: ShardedModel) -> None:
        self._calls = 0
        self._waits = root.measure_waits()

    def _measurement(self) -> tuple[float, float]:
        """Own and whole seconds of a step; not a number where they are not known."""
        waits = self._waits
        assert waits is not None
        if waits.forwards < self._measured:
            # Steps that a CUDA graph replays: its waits are inside of it.
            return math.nan, math.nan
        own_s, wall_s = waits.read()
        return own_s / self._measured, wall_s / self._measured

    def _judge(self, times: Sequence[float], root: ShardedModel) -> tuple[Straggler, ...]:
        own, whole = times[::2], times[1::2]
        known = [seconds for seconds in own if not math.isnan(seconds)]
        if not known:
            if not self._warned and root.rank == 0:
                _LOGGER.warning("Stragglers saw no step: those that a CUDA graph replays cannot be measured.")
            self._warned = True
            return ()
        median = median_low(known)
        worth = _WORTH * median_low([seconds for seconds in whole if not math.isnan(seconds)])
        slow = {r: s for r, s in enumerate(own) if s >= self._factor * median and s - median >= worth}
        self._times = {rank: self._times.get(rank, 0) + 1 for rank in slow}
        found = tuple(
            Straggler(rank, self._hosts[rank], slow[rank], median, self._times[rank])
            for rank in sorted(slow, key=lambda rank: -slow[rank])
        )
        if found and root.rank == 0:
            _LOGGER.warning("Other ranks wait: %s", "; ".join(map(str, found)))
        return found
