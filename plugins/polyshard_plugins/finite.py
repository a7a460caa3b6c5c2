"""The listener ``finite``: names the unit whose output was the first that is infinite or not a number."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from polyshard import hookimpl
from polyshard.errors import ConfigError, NonFiniteError
from polyshard.interfaces import Listener, Observer, PluginContext, UnitSpec
from polyshard.nested import iter_tensors
from torch import nn


class Finite(Listener):
    """``finite``: whether the outputs of units' modules are finite, in every step.

    A step is an outermost forward of the model and all that follows until the next. If a module's output has an
    infinity or a NaN, the begin of the next step raises or warns, with the unit whose output was the first, the step,
    counted from 1, and the rank. Floating-point tensors in outputs are looked at, also in containers. This listener is
    not for models that return infinities on purpose.

    On a CUDA device nothing waits: a step is reported at the first begin of a later one by which the device has
    finished it. ``check`` waits, for use behind the last step. Steps that a CUDA graph replays are reported together at
    the next one that is not replayed.

    Nothing is exchanged: the rank with such an output raises alone, and the others end as after any rank's failure.
    Each output is read once more: an infinity norm a tensor.
    """

    api_version = 1

    def __init__(self, context: PluginContext, action: str = "raise") -> None:
        """``action``: ``"raise"`` for ``NonFiniteError`` on this rank, or ``"warn"``; else ``ConfigError``."""
        if action not in ("raise", "warn"):
            raise ConfigError(
                f"{action!r} is no action, in action of listener {context.name!r}. Write 'raise' or 'warn'."
            )
        self._raises = action == "raise"
        self._device = context.device
        self._rank = rank_of(context)
        self._step = 0
        self._specs: dict[str, UnitSpec] = {}
        self._watches: list[_Watch] = []
        #: Indices of the watches, in the order in which their modules returned in this step.
        self._order: list[int] = []
        self._pending: list[_Reading] = []

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        """None: units are watched by their modules' outputs."""
        self._specs.setdefault(unit.module_name, unit)
        return None

    @hookimpl
    def after_shard(self, model: nn.Module) -> None:
        """Look at the outputs of the modules from now on."""
        # A later call of ``fully_shard`` on a module around them makes the same units again, under other names.
        seen = {id(watch.module) for watch in self._watches}
        for name in self._specs:
            module = model.get_submodule(name)
            if id(module) not in seen:
                watch = _Watch(module, len(self._watches), self._order, self._device)
                self._watches.append(watch)
                module.register_forward_hook(watch)
        self._specs.clear()

    @hookimpl
    def step_begin(self, model: nn.Module) -> None:
        """Report earlier steps, and begin anew."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Querying an event would end the capture, too.
            return
        self._end_step()
        self._step += 1
        self._report(model, wait=False)

    def check(self, model: nn.Module) -> None:
        """Wait until the device has finished all steps, and report them: for use behind the last one.

        ``model``: the outermost sharded module. Raises ``NonFiniteError`` where the option ``action`` says so.
        """
        self._end_step()
        self._report(model, wait=True)

    def _end_step(self) -> None:
        if not self._order:
            return
        flags = torch.stack([watch.flag for watch in self._watches])
        for watch in self._watches:
            watch.flag.zero_()
        self._pending.append(_Reading.start(self._step, list(dict.fromkeys(self._order)), flags))
        self._order.clear()

    def _report(self, model: nn.Module, *, wait: bool) -> None:
        while self._pending and self._pending[0].arrived(wait=wait):
            reading = self._pending.pop(0)
            bad = reading.bad()
            if not bad:
                continue
            names = {id(module): name for name, module in model.named_modules()}
            first = self._watches[bad[0]].module
            unit = names.get(id(first), type(first).__name__) or "(root)"
            more = f", and {len(bad) - 1} more after it" if len(bad) > 1 else ""
            message = (
                f"The output of unit '{unit}' was not finite in step {reading.step} (rank {self._rank}){more}. Look at "
                "that step's batch, at the learning rate, and at parameters, which may not be finite themselves."
            )
            if self._raises:
                # Later steps computed with this one's parameters.
                self._pending.clear()
                raise NonFiniteError(message)
            warnings.warn(message, stacklevel=2)


class _Watch:
    """The forward hook of one module."""

    def __init__(self, module: nn.Module, index: int, order: list[int], device: torch.device) -> None:
        self.module = module
        self.flag = torch.zeros((), device=device)
        self._index = index
        self._order = order

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._order.append(self._index)
        with torch.no_grad():
            for tensor in iter_tensors(output):
                if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
                    # This rank's part of a DTensor, which may be on its way.
                    part = tensor.to_local()
                    tensor = part.wait() if hasattr(part, "wait") else part
                # A subclass may communicate where it is reduced.
                if type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.numel():
                    self._look_at(tensor)

    def _look_at(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided:
            return
        if tensor.element_size() == 1:
            # Torch has no norm of fp8.
            tensor = tensor.to(torch.bfloat16)
        largest = torch.linalg.vector_norm(tensor.detach(), float("inf"))
        # Zero where it is finite, else not a number, which stays in the sum.
        self.flag.add_((largest - largest).to(self.flag.device, non_blocking=True))


@dataclass(frozen=True, slots=True)
class _Reading:
    """The flags of one step, on their way to the host."""

    step: int
    order: list[int]
    flags: torch.Tensor
    event: torch.cuda.Event | None

    @classmethod
    def start(cls, step: int, order: list[int], flags: torch.Tensor) -> _Reading:
        if not flags.is_cuda:
            return cls(step, order, flags, None)
        host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(flags.device))
        return cls(step, order, host, event)

    def arrived(self, *, wait: bool) -> bool:
        if self.event is None:
            return True
        if wait:
            self.event.synchronize()
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def bad(self) -> list[int]:
        """Indices of modules with such an output, in the order in which they returned."""
        flags = self.flags.tolist()
        return [index for index in self.order if flags[index] != 0]


def rank_of(context: PluginContext) -> int:
    """This process's rank: polyshard tells listeners theirs, a user who constructs one may not."""
    if context.rank is not None:
        return context.rank
    if context.process_group is not None:
        return int(context.process_group.rank())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
