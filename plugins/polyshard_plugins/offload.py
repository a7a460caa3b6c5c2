"""The built-in offload managers: masters stay on the device, live in host memory with or without a copy, or some do."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from polyshard.errors import ConfigError, DeviceError, did_you_mean
from polyshard.interfaces import Group, OffloadCapabilities, OffloadManager, PluginContext, UnitSpec, bytes_of
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from .precision import switch

_CPU = torch.device("cpu")
#: Tensors of a master's size that AdamW keeps.
_ADAMW_STATES = 2.0
#: Names that a message lists.
_LISTED = 8


class NoOffload(OffloadManager):
    """``none``: masters and gradients stay where the unit computes."""

    api_version = 1
    capabilities = OffloadCapabilities(offloads=False)

    def __init__(self, context: PluginContext) -> None:
        del context

    @override
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard

    @torch.no_grad()
    @override
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    @torch.no_grad()
    @override
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad if into is None else into.add_(grad)


@dataclass(slots=True)
class _Staging:
    """Host memory in compute dtype through which one unit's master crosses to the device."""

    buffer: torch.Tensor
    crossed: torch.Event
    """Recorded after the copy out of ``buffer``; until then the host must not write into it."""
    cast: Future[None] | None = None
    """That of the master into ``buffer``, for the first fetch of a forward; None where it was used."""

    @torch.no_grad()
    def fill(self, master: torch.Tensor) -> None:
        # The last copy out of it served the unit's previous gather, which has long been used: this rarely waits.
        self.crossed.synchronize()
        self.buffer.copy_(master)


class CpuOffload(OffloadManager):
    """``cpu``: masters, gradients and so the optimizer live in host memory.

    On a CUDA device copies are asynchronous, on the current stream; a master is cast to the compute dtype on the host
    first, so that a bf16 unit sends half the bytes of its fp32 master. A thread casts those that the forwards before
    fetched, in that order, from the beginning of a forward on: a cast takes longer than the host needs to launch a
    block. On other devices every copy is done when the call returns.

    **Writing to masters.** Where master and compute dtype are equal, the copy to the device reads the master itself.
    ``sync_for_step`` waits for such copies, so an optimizer step after a backward is safe. After a forward without a
    backward, call ``torch.cuda.synchronize()`` before writing to parameters by hand.
    """

    api_version = 1
    capabilities = OffloadCapabilities(offloads=True, awaits_gradients=True)

    def __init__(self, context: PluginContext, pin_memory: bool = True) -> None:
        """``pin_memory``: use page-locked host memory where the device is a CUDA device.

        Without it, masters may be swapped out, and copies hold up the host. Raises ``ConfigError`` for a value that is
        not a bool.
        """
        self._pin_memory = switch(pin_memory, f"pin_memory of offload {context.name!r}")
        # By master, and for as long as that lives: a unit has another name once its model is part of a larger one.
        self._staging: MutableMapping[torch.Tensor, _Staging] = WeakTensorKeyDictionary()
        self._master_read: MutableMapping[torch.Tensor, torch.Event] = WeakTensorKeyDictionary()
        self._thread: ThreadPoolExecutor | None = None
        #: Gradients on their way to the host, by identity, and what is recorded behind each.
        self._arriving: dict[int, tuple[torch.Tensor, torch.cuda.Event]] = {}
        #: Sums, and gradients on their way to the host that will be added to them.
        self._owed: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    @override
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        """A copy of ``shard`` in host memory. Raises ``DeviceError`` where that memory cannot be page-locked."""
        return self._host_like(unit, shard).copy_(shard)

    @torch.no_grad()
    @override
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        if own_slice.device.type != "cuda":
            own_slice.copy_(master)
        elif own_slice.dtype == master.dtype:
            own_slice.copy_(master, non_blocking=True)
            # One event a unit, recorded anew: inference fetches forever without a sync_for_step in between.
            read = self._master_read.get(master)
            if read is None:
                read = self._master_read[master] = torch.Event(device=own_slice.device)
            _record(read, own_slice.device)
        else:
            self._fetch_cast(unit, master, own_slice)

    @torch.no_grad()
    @override
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Send ``grad`` to the host. The returned tensor is ``into``, or new memory that nothing else views."""
        if grad.device.type != "cuda":
            return into.add_(grad.to(_CPU)) if into is not None else self._host_like(unit, grad).copy_(grad)
        # New memory each time, because `.grad` of an earlier step may still be held somewhere. The allocator of pinned
        # memory keeps what was freed, so this does not page-lock anything from the second step on.
        arriving = self._host_like(unit, grad).copy_(grad, non_blocking=True)
        # Who waits for a `torch.Event` spins. A thread that waits here leaves its core to the optimizer.
        arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        _record(arrived, grad.device)
        self._arriving[id(arriving)] = arriving, arrived
        if into is None:
            return arriving
        self._owed.append((into, arriving))
        return into

    @override
    def begin_forward(self) -> None:
        for master, staging in self._staging.items():
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="polyshard-cast")
            staging.cast = self._thread.submit(staging.fill, master)

    @override
    def await_grad(self, unit: UnitSpec, grad: torch.Tensor) -> None:
        arriving = self._arriving.get(id(grad))
        if arriving is not None:
            arriving[1].synchronize()

    @torch.no_grad()
    @override
    def sync_for_step(self) -> None:
        """Wait for copies from masters and of gradients, then add those gradients that accumulate."""
        for event in self._master_read.values():
            event.synchronize()
        for _, arrived in self._arriving.values():
            arrived.synchronize()
        self._arriving.clear()
        # Only when all have arrived: `into` may itself be a tensor that was still arriving, on another stream.
        for into, arriving in self._owed:
            into.add_(arriving)
        self._owed.clear()

    def _fetch_cast(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        staging = self._staging.get(master)
        if staging is None or staging.buffer.dtype != own_slice.dtype:
            # A dtype other than last time's comes from full precision in eval; the old buffer, if its copy still runs,
            # is kept by the allocator until then.
            staging = _Staging(self._host_like(unit, own_slice), torch.Event(device=own_slice.device))
            self._staging[master] = staging
        cast, staging.cast = staging.cast, None
        if cast is None:
            staging.fill(master)
        else:
            cast.result()
        own_slice.copy_(staging.buffer, non_blocking=True)
        _record(staging.crossed, own_slice.device)

    def _host_like(self, unit: UnitSpec, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory of ``tensor``'s shape and dtype, page-locked where ``unit`` computes on CUDA."""
        pin = self._pin_memory and unit.device.type == "cuda"
        # Memory first made during an inference forward must be writable in training, too.
        with torch.inference_mode(False):
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU, pin_memory=pin)
            except RuntimeError as error:
                if not pin:
                    raise
                raise DeviceError(
                    f"cannot page-lock {tensor.numel() * tensor.element_size()} bytes of host memory for unit "
                    f"{unit.label!r}: {error}. Raise the limit on locked memory, or set pin_memory = false."
                ) from error


class _Around(OffloadManager):
    """Asks another manager, which offloads."""

    def __init__(self, context: PluginContext, inner: Any) -> None:
        """Raises ``ConfigError`` for an ``inner`` that offloads nothing."""
        self._inner = context.construct(Group.OFFLOAD, inner)
        if not self._inner.capabilities.offloads:
            raise ConfigError(
                f"inner of offload {context.name!r} is {inner!r}, which offloads nothing. "
                "Name a manager that does: 'cpu'."
            )

    @property
    @override
    def capabilities(self) -> OffloadCapabilities:
        return self._inner.capabilities

    @override
    def units_to_offload(self, units: Sequence[UnitSpec]) -> Collection[UnitSpec]:
        return self._inner.units_to_offload(units)

    @override
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self._inner.place(unit, shard)

    @override
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        self._inner.fetch(unit, master, own_slice)

    @override
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return self._inner.store_grad(unit, grad, into)

    @override
    def await_grad(self, unit: UnitSpec, grad: torch.Tensor) -> None:
        self._inner.await_grad(unit, grad)

    @override
    def begin_forward(self) -> None:
        self._inner.begin_forward()

    @override
    def sync_for_step(self) -> None:
        self._inner.sync_for_step()


class OptimizerOffload(_Around):
    """``optimizer``: another manager offloads masters and gradients; the device keeps what it computes from.

    That is a copy of each offloaded unit's own slice, in the compute dtype. The first gather of a forward makes it
    anew, all others of that forward and its backward read it: an optimizer may step behind them. ``begin_forward`` of
    the contract says why it serves no further forward.
    """

    api_version = 1

    def __init__(self, context: PluginContext, inner: Any = "cpu") -> None:
        """``inner``: the manager that offloads them: a name, or a table of a name and options."""
        super().__init__(context, inner)
        self._kept = KeptSlices()

    @property
    @override
    def capabilities(self) -> OffloadCapabilities:
        return replace(self._inner.capabilities, keeps_values=True)

    @torch.no_grad()
    @override
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        if not self._kept.serve(master, own_slice):
            self._inner.fetch(unit, master, own_slice)
            self._kept.keep(master, own_slice)

    @override
    def begin_forward(self) -> None:
        self._kept.expire()
        self._inner.begin_forward()


class PartialOffload(_Around):
    """``partial``: offloads some units with another manager; the engine serves the others as if there were none."""

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        units: str | Iterable[str] = (),
        device_bytes: int | str | None = None,
        state_factor: float | None = None,
        inner: Any = "cpu",
    ) -> None:
        """Options. One of ``units`` and ``device_bytes`` says which units are offloaded.

        ``units``: shell patterns of the names of modules whose units are offloaded; see ``ByPattern``.
        ``device_bytes``: bytes of each rank's device for the units that stay, as an int or text such as ``"4 GiB"``:
        masters, gradients and the optimizer's state. The rest is offloaded; see ``ByBudget``. Counted anew in each call
        of ``shard`` and ``fully_shard``.
        ``state_factor``: bytes of the optimizer's state for each byte of master, for ``device_bytes``: 2 (AdamW) where
        it is left out.
        ``inner``: the manager that offloads them: a name, or a table of a name and options.

        Raises ``ConfigError`` for values that these cannot take.
        """
        self._rule = _rule(units, device_bytes, state_factor, f"offload {context.name!r}")
        super().__init__(context, inner)

    @override
    def units_to_offload(self, units: Sequence[UnitSpec]) -> Collection[UnitSpec]:
        return super().units_to_offload(self._rule.offloaded(units))


@dataclass(frozen=True, slots=True)
class ByPattern:
    """Units whose module's name matches one of ``patterns``, in the way of file names in a shell.

    ``*`` stands for any characters, dots too, ``?`` for one, ``[0-9]`` for one of a set; letter case counts. The
    outermost module's name is ``(root)``.
    """

    patterns: tuple[str, ...]
    where: str
    """The setting, in messages."""

    def offloaded(self, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
        """Those of ``units`` that leave the device. Raises ``ConfigError`` where a pattern matches no unit."""
        names = {unit: unit.module_name or "(root)" for unit in units}
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names.values()):
                raise ConfigError(self._unmatched(pattern, list(dict.fromkeys(names.values()))))
        return tuple(unit for unit, name in names.items() if any(fnmatchcase(name, each) for each in self.patterns))

    def _unmatched(self, pattern: str, names: list[str]) -> str:
        hint = did_you_mean(pattern, names)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return (
            f"{self.where} has the pattern {pattern!r}, which matches no unit.{hint} Patterns are those of file names, "
            "and match whole names of units' modules, seen from the module that is sharded. There are: "
            f"{', '.join(names[:_LISTED])}{more}."
        )


@dataclass(frozen=True, slots=True)
class ByBudget:
    """All units but those that fit into ``nbytes`` of the device, taken in the order of the model.

    A unit that no longer fits is offloaded, and a smaller one behind it may stay. One that stays takes, on each rank,

        shard_numel * itemsize * (1 + 1 + state_factor)

    bytes for its master, its gradient and the optimizer's state, in the master's dtype; a frozen one its master alone.
    """

    nbytes: int
    state_factor: float

    def offloaded(self, units: Sequence[UnitSpec]) -> tuple[UnitSpec, ...]:
        """Those of ``units`` that leave the device, in their order."""
        left, offloaded = float(self.nbytes), []
        for unit in units:
            tensors = 2 + self.state_factor if unit.trained else 1
            nbytes = unit.shard_numel * unit.master_dtype.itemsize * tensors
            if nbytes <= left:
                left -= nbytes
            else:
                offloaded.append(unit)
        return tuple(offloaded)


class KeptSlices:
    """A copy of each unit's own slice, in the compute dtype, on the device that computes.

    All calls come on the stream that gathers, which orders a copy behind the one before it.
    """

    def __init__(self) -> None:
        # By master, and for as long as that lives: a unit has another name once its model is part of a larger one, and
        # where two models share a manager, units of theirs may be equal.
        self._copies: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        # Addresses of masters whose copies are current.
        self._current: set[int] = set()
        self._begun = False

    def expire(self) -> None:
        """A forward begins: every copy is old from now on; its memory waits for the next."""
        self._current.clear()
        self._begun = True

    def serve(self, master: torch.Tensor, own_slice: torch.Tensor) -> bool:
        """Write the copy of ``master`` into ``own_slice`` (``[shard_numel]``); False where there is no current one."""
        copy = self._copies.get(master)
        if copy is None or master.data_ptr() not in self._current or copy.dtype != own_slice.dtype:
            return False
        own_slice.copy_(copy)
        return True

    def keep(self, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        """Copy ``own_slice``, just written from ``master``; not before the first forward, when a fetch is a trial."""
        if not self._begun:
            return
        copy = self._copies.get(master)
        if copy is None or copy.dtype != own_slice.dtype:
            # One that was first made in an inference forward must serve training, too.
            with torch.inference_mode(False):
                copy = self._copies[master] = torch.empty_like(own_slice)
        copy.copy_(own_slice)
        self._current.add(master.data_ptr())


def _rule(
    units: str | Iterable[str], device_bytes: int | str | None, state_factor: float | None, where: str
) -> ByPattern | ByBudget:
    patterns = (units,) if isinstance(units, str) or not isinstance(units, Iterable) else tuple(units)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigError(f"units of {where} takes patterns of names, such as ['blocks.[0-9]'], not {units!r}.")
    if patterns and device_bytes is not None:
        raise ConfigError(
            f"{where} has both units and device_bytes, which may mean different units. Give the patterns of what is "
            "offloaded, or the bytes that stay."
        )
    if device_bytes is not None:
        return _budget(device_bytes, _ADAMW_STATES if state_factor is None else state_factor, where)
    if not patterns:
        raise ConfigError(
            f"{where} does not say what is offloaded. Give units = ['blocks.*'], patterns of the names of modules, or "
            "device_bytes = '4 GiB', what may stay on the device. To offload everything, choose 'cpu'."
        )
    if state_factor is not None:
        raise ConfigError(
            f"state_factor of {where} is {state_factor!r}, which changes nothing where units says what is offloaded. "
            "Leave it out."
        )
    return ByPattern(patterns, f"units of {where}")


def _budget(device_bytes: int | str, factor: float, where: str) -> ByBudget:
    nbytes = bytes_of(device_bytes)
    if nbytes is None or nbytes < 0:
        raise ConfigError(
            f"device_bytes of {where} must be bytes, 0 or more, a number or text such as '4 GiB', not {device_bytes!r}."
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise ConfigError(
            f"state_factor of {where} is {factor!r}. Give bytes of optimizer state for each byte of master, 0 or more: "
            "2 for AdamW, 1 for SGD with momentum, 0 for SGD."
        )
    return ByBudget(nbytes, float(factor))


def _record(event: torch.Event | torch.cuda.Event, device: torch.device) -> None:
    event.record(torch.cuda.current_stream(device))
