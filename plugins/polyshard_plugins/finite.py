"""The listener ``finite``: tells which unit's output was the first that is infinite or not a number."""

from __future__ import annotations

import enum
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from polyshard import hookimpl
from polyshard.errors import ConfigError, NonFiniteError
from polyshard.interfaces import Listener, Observer, PluginContext, UnitSpec
from polyshard.nested import iter_tensors
from torch import nn

__all__ = ["Finite"]


class _Action(enum.Enum):
    """What a step with such an output leads to."""

    RAISE = "raise"
    """``NonFiniteError``, on this rank."""
    WARN = "warn"
    """A warning, and training goes on."""


class Finite(Listener):
    """``finite``: whether what units' modules return is finite, in every step.

    A step is an outermost forward of the model and what follows until the next. As the next one begins, a step in which
    a module returned anything infinite, or not a number, is an error or a warning, with the unit whose output was the
    first, the step, counted from 1, and the rank. Modules that hold units are looked at, and floating-point tensors of
    what they return, also in containers. A model that means to return infinities is none for this listener.

    On a CUDA device nothing waits: what a step found is told at the first begin of a later one by which the device has
    got through it. ``check`` waits, for behind the last step. Of a step that a CUDA graph replays it is told at the
    next one that is not replayed, with all that were.

    Nothing is exchanged. The rank that found it raises alone, and the others end as they do where a rank fails. Each
    output is read once more: an infinity norm a tensor.
    """

    api_version = 1

    def __init__(self, context: PluginContext, action: str = "raise") -> None:
        """``action``: ``"raise"`` or ``"warn"``; anything else raises ``ConfigError``."""
        try:
            self._action = _Action(action)
        except ValueError:
            raise ConfigError(
                f"{action!r} is no action, in action of listener {context.name!r}. Write 'raise' or 'warn'."
            ) from None
        self._device = context.device
        self._rank = _rank_of(context)
        self._step = 0
        self._specs: dict[str, UnitSpec] = {}
        self._watches: list[_Watch] = []
        #: Places among the watches, as they returned in this step.
        self._order: list[int] = []
        self._pending: list[_Reading] = []

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer | None:
        """None: units are watched by their modules' outputs."""
        self._specs.setdefault(unit.module_name, unit)
        return None

    @hookimpl
    def after_shard(self, model: nn.Module) -> None:
        """Look at what the modules return from now on."""
        # Units made one by one are cut again, under other names, by the call around them.
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
        """Tell what earlier steps found, and begin anew."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Asking an event would also end the capture.
            return
        self._end_step()
        self._step += 1
        self._tell(model, wait=False)

    def check(self, model: nn.Module) -> None:
        """Wait until the device has got through all steps, and tell what they found: for behind the last one.

        ``model``: the outermost sharded module. Raises ``NonFiniteError`` where the option ``action`` says so.
        """
        self._end_step()
        self._tell(model, wait=True)

    def _end_step(self) -> None:
        if not self._order:
            return
        flags = torch.stack([watch.flag for watch in self._watches])
        for watch in self._watches:
            watch.flag.zero_()
        self._pending.append(_Reading.start(self._step, list(dict.fromkeys(self._order)), flags))
        self._order.clear()

    def _tell(self, model: nn.Module, *, wait: bool) -> None:
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
            if self._action is _Action.RAISE:
                # Later steps computed with what this one left.
                self._pending.clear()
                raise NonFiniteError(message)
            warnings.warn(message, stacklevel=2)


class _Watch:
    """The forward hook of one module."""

    def __init__(self, module: nn.Module, place: int, order: list[int], device: torch.device) -> None:
        self.module = module
        self.flag = torch.zeros((), device=device)
        self._place = place
        self._order = order

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._order.append(self._place)
        with torch.no_grad():
            for tensor in iter_tensors(output):
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
        """Places of modules with such an output, in the order in which they returned."""
        flags = self.flags.tolist()
        return [place for place in self.order if flags[place] != 0]


def _rank_of(context: PluginContext) -> int:
    if context.rank is not None:
        return context.rank
    if context.process_group is not None:
        return int(context.process_group.rank())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
