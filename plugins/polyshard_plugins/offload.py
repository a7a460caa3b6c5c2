"""The built-in offload managers: masters stay on the compute device, or live in host memory."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from polyshard.errors import ConfigError, DeviceError
from polyshard.interfaces import OffloadCapabilities, OffloadManager, PluginContext, UnitSpec
from torch.utils.weak import WeakTensorKeyDictionary

_CPU = torch.device("cpu")


class NoOffload(OffloadManager):
    """``none``: masters and gradients stay where the unit computes."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=False)

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard

    @torch.no_grad()
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        own_slice.copy_(master)

    @torch.no_grad()
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return grad if into is None else into.add_(grad)


@dataclass(slots=True)
class _Staging:
    """Host memory in compute dtype through which one unit's master crosses to the device."""

    buffer: torch.Tensor
    crossed: torch.Event
    """Recorded after the copy out of ``buffer``; until then the host must not write into it."""


@dataclass(frozen=True, slots=True)
class _OwedSum:
    """A gradient on its way to the host, to be added to ``into`` once it is there."""

    into: torch.Tensor
    arriving: torch.Tensor


class CpuOffload(OffloadManager):
    """``cpu``: masters, gradients and so the optimizer live in host memory.

    On a CUDA device copies are asynchronous, on the current stream; a master is cast to the compute dtype on the host
    first, so that a bf16 unit sends half the bytes of its fp32 master. On other devices every copy is done when the
    call returns.

    **Writing to masters.** Where master and compute dtype are equal, the copy to the device reads the master itself.
    ``sync_for_step`` waits for such copies, so an optimizer step after a backward is safe. After a forward without a
    backward, call ``torch.cuda.synchronize()`` before writing to parameters by hand.
    """

    api_version = 1

    def __init__(self, context: PluginContext, pin_memory: bool = True) -> None:
        """``pin_memory``: use page-locked host memory where the device is a CUDA device.

        Without it, masters may be swapped out, and copies hold up the host. Raises ``ConfigError`` for a value that is
        not a bool.
        """
        if not isinstance(pin_memory, bool):
            raise ConfigError(
                f"{pin_memory!r} is neither true nor false, in pin_memory of offload {context.name!r}. "
                "Write true or false, without quotes."
            )
        self._pin_memory = pin_memory
        # By master, and for as long as that lives: a unit has another name once its model is part of a larger one.
        self._staging: MutableMapping[torch.Tensor, _Staging] = WeakTensorKeyDictionary()
        self._master_read: MutableMapping[torch.Tensor, torch.Event] = WeakTensorKeyDictionary()
        self._arriving: list[torch.Event] = []
        self._owed: list[_OwedSum] = []

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=True)

    @torch.no_grad()
    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        """A copy of ``shard`` in host memory. Raises ``DeviceError`` where that memory cannot be page-locked."""
        return self._host_like(unit, shard).copy_(shard)

    @torch.no_grad()
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
    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Send ``grad`` to the host. The returned tensor is ``into``, or new memory that nothing else views."""
        if grad.device.type != "cuda":
            return into.add_(grad.to(_CPU)) if into is not None else self._host_like(unit, grad).copy_(grad)
        # New memory each time, because `.grad` of an earlier step may still be held somewhere. The allocator of pinned
        # memory keeps what was freed, so this does not page-lock anything from the second step on.
        arriving = self._host_like(unit, grad).copy_(grad, non_blocking=True)
        arrived = torch.Event(device=grad.device)
        _record(arrived, grad.device)
        self._arriving.append(arrived)
        if into is None:
            return arriving
        self._owed.append(_OwedSum(into, arriving))
        return into

    @torch.no_grad()
    def sync_for_step(self) -> None:
        """Wait for copies from masters and of gradients, then add those gradients that accumulate."""
        for event in (*self._master_read.values(), *self._arriving):
            event.synchronize()
        self._arriving.clear()
        # Only when all have arrived: `into` may itself be a tensor that was still arriving, on another stream.
        for owed in self._owed:
            owed.into.add_(owed.arriving)
        self._owed.clear()

    def _fetch_cast(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        staging = self._staging.get(master)
        if staging is None or staging.buffer.dtype != own_slice.dtype:
            # A dtype other than last time's comes from full precision in eval; the old buffer, if its copy still runs,
            # is kept by the allocator until then.
            staging = _Staging(self._host_like(unit, own_slice), torch.Event(device=own_slice.device))
            self._staging[master] = staging
        else:
            # The last copy out of it served the unit's previous gather, which has long been used: this rarely waits.
            staging.crossed.synchronize()
        staging.buffer.copy_(master)
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


def _record(event: torch.Event, device: torch.device) -> None:
    event.record(torch.cuda.current_stream(device))
