"""An optimizer's step over units in host memory, each as its gradient arrives there, beside the rest of a backward.

[Note: one step in two places]
The step of a unit runs on a thread of its own, in torch's kernels, which let go of the interpreter. It is a step of
the user's optimizer: of a copy that shares its state, and whose groups hold the unit's parameters alone. The end of the
backward waits for all of them, so that nothing goes on behind it. The optimizer's own ``step()`` then finds no gradient
where they were, and updates what is left: units on the device, parameters outside of units, and units whose gradient
may still change: one that this rank lacks a part of, which ``UsedParameters`` may take away, or that a hook sees first.

What would be right between a backward and ``step()`` in a usual loop, and too late here, is refused: the former values
are gone. Torch's functions scale gradients without moving a version, so ``step()`` looks at some elements of each.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from ..errors import StateError
from .reduce import Reducible

#: Elements of a gradient that are compared.
_COMPARED = 64
_parts: WeakSet[torch.optim.Optimizer] = WeakSet()


def steps_a_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is the copy by which another one steps over a unit."""
    return optimizer in _parts


class _Stepped(NamedTuple):
    """A unit's parameters that were updated in the backward, and their gradients then."""

    gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]
    flat: torch.Tensor
    """The gradient of the unit, and so of all of them (``[shard_numel]``)."""
    sample: torch.Tensor
    """Some of its elements, as bytes."""

    @property
    def changed(self) -> bool:
        """Whether gradients are others now."""
        if any(parameter.grad is not gradient for parameter, gradient in self.gradients):
            return True
        return not torch.equal(_sample(self.flat), self.sample)


class BackwardStep:
    """Steps ``optimizer`` in the backwards of one root, until ``remove``."""

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int, reduces_once: Callable[[], bool]) -> None:
        """``rank``: in messages; ``reduces_once``: whether the backward that runs delivers whole gradients at once."""
        self._optimizer, self._rank, self._reduces_once = optimizer, rank, reduces_once
        self._name = type(optimizer).__name__
        # Torch's copies have state and groups, others may need more. What a scheduler put around ``step`` counts calls.
        self._part = copy.copy(optimizer)
        self._part.__dict__ = {**optimizer.__dict__, **self._part.__dict__}
        self._part.__dict__.pop("step", None)
        _parts.add(self._part)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="polyshard-step")
        self._running: list[Future[None]] = []
        self._stepped: dict[Reducible, _Stepped] = {}
        # Gradients that the optimizer's own step is not to find.
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []
        # Of its groups, when the first unit of a backward was stepped.
        self._settings: Sequence[Mapping[str, Any]] = ()
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._behind),
            optimizer.register_state_dict_pre_hook(lambda _: self.refuse_unsettled("state_dict() of the optimizer")),
        )

    def remove(self) -> None:
        """Let the optimizer step by itself again."""
        self.give_up()
        for hook in self._hooks:
            hook.remove()
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def refuse_second(self, unit: Reducible) -> None:
        """Raise StateError where ``unit``, which gets a gradient, was stepped with another one already."""
        if unit in self._stepped:
            raise StateError(
                f"'{unit.spec.label}' got a second gradient behind a step of {self._name} in the backward "
                f"({self._where()}): the first one is used. Let each step have one forward and one backward that "
                "reduces, the last one, and those before it inside of polyshard.no_sync(); or do without "
                "step_in_backward()."
            )

    def take(
        self,
        unit: Reducible,
        parameters: Sequence[nn.Parameter],
        gradient: torch.Tensor,
        arrives: Callable[[], None],
    ) -> None:
        """Step over ``parameters`` of ``unit``, whose gradients are views of ``gradient``, once ``arrives`` returns."""
        if not self._reduces_once():
            return
        own = set(parameters)
        groups = [
            {**group, "params": [each for each in group["params"] if each in own]}
            for group in self._optimizer.param_groups
        ]
        found = [each for group in groups for each in group["params"]]
        held = [(each, each.grad) for each in found if each.grad is not None]
        if not held:
            return
        if not self._stepped:
            self._settings = self._settings_now()
        self._stepped[unit] = _Stepped(held, gradient, torch.empty(0))
        self._running.append(self._thread.submit(self._step, unit, groups, arrives))

    def _step(self, unit: Reducible, groups: list[dict[str, Any]], arrives: Callable[[], None]) -> None:
        arrives()
        stepped = self._stepped[unit]
        self._stepped[unit] = stepped._replace(sample=_sample(stepped.flat))
        before = [_settings_of(group) for group in groups]
        self._part.param_groups = groups
        # Loading a state dict gives the optimizer another one.
        self._part.state = self._optimizer.state
        self._part.step()
        if [_settings_of(group) for group in groups] != before:
            raise StateError(
                f"{self._name} keeps numbers of its own in its parameter groups ({self._where()}), and would count "
                "units for steps. Step it without step_in_backward()."
            )

    def end(self) -> None:
        """Wait for the steps of a backward. Raises what one of them did."""
        running, self._running = self._running, []
        for each in running:
            each.result()

    def give_up(self) -> None:
        """Wait for the steps of a backward that failed, and warn of them."""
        with suppress(Exception):
            self.end()
        stepped = len(self._stepped)
        self._stepped.clear()
        if stepped:
            warnings.warn(
                f"{self._name} stepped over {stepped} units in a backward that failed ({self._where()}): their "
                "parameters are those of the next step, and all others are not. Load a checkpoint before you go on.",
                stacklevel=2,
            )

    def refuse_unsettled(self, call: str) -> None:
        """Raise StateError between a backward that stepped and ``step()``; ``call`` begins the message."""
        if self._stepped:
            first = next(iter(self._stepped)).spec.label
            raise StateError(
                f"{call} came between a backward, in which {self._name} stepped over '{first}' and "
                f"{len(self._stepped) - 1} other units, and its step() ({self._where()}). Call step() behind each "
                "backward: it updates the rest. Microbatches before the last belong inside of polyshard.no_sync(); "
                "gradients that are clipped or unscaled need step() alone, without step_in_backward()."
            )

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise StateError(
                f"{self._name} was given a closure, whose backward would step it inside of its step "
                f"({self._where()}). Call backward() before step()."
            )
        self.end()
        self._show()
        if not self._stepped:
            return
        stepped, self._stepped = self._stepped, {}
        changed = next((unit.spec.label for unit, each in stepped.items() if each.changed), None)
        if changed is not None:
            raise StateError(
                f"The gradient of '{changed}' was changed behind the backward in which {self._name} stepped with it "
                f"({self._where()}). What clips or scales gradients, or sets them to None before step(), needs "
                "step() alone: do without step_in_backward()."
            )
        if self._settings_now() != self._settings:
            raise StateError(
                f"Settings of {self._name} were changed between a backward in which it stepped and its step() "
                f"({self._where()}). Set a learning rate before the backward or behind step()."
            )
        self._hidden += [pair for each in stepped.values() for pair in each.gradients]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _behind(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._show()

    def _show(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _settings_now(self) -> Sequence[Mapping[str, Any]]:
        return [_settings_of(group) for group in self._optimizer.param_groups]

    def _where(self) -> str:
        return f"rank {self._rank}"


def _settings_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    values = ((name, value) for name, value in group.items() if name != "params")
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values}


def _sample(flat: torch.Tensor) -> torch.Tensor:
    return flat[:: max(1, flat.numel() // _COMPARED)].clone().view(torch.uint8)
