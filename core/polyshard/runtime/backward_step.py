"""An optimizer's step over units in host memory, each as its gradient arrives there, beside the rest of a backward.

[Note: one step in two places]
The step of a unit runs on a thread of its own, in torch's kernels, which let go of the interpreter; a ``DTensor`` keeps
it for as long as the kernel runs, and the backward would wait. It is a step of the user's optimizer: of a copy that
shares its state, and whose groups hold the unit's parameters alone. The end of the backward waits for all of them, so
that nothing goes on behind it. The optimizer's own ``step()`` then finds no gradient where they were, and updates what
is left: units on the device, parameters outside of units, and units whose gradient may still change: one that this rank
lacks a part of, which ``UsedParameters`` may take away, or that a hook sees first.

In a usual loop gradients and settings may change between a backward and ``step()``, and here they come too late. It is
seen by what a gradient is, its versions, and some of its elements: torch's functions that scale many ``DTensor`` move
no version. Where former values are kept, units get them back, and ``step()`` updates them; elsewhere it is an error.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn

from .. import _torch_private
from ..errors import StateError
from ..planning.parts import is_dtensor
from .reduce import Reducible

#: Optimizers that update each element by itself, so that what a rank holds of a tensor can be stepped over alone.
#: Classes derived from them may look at more.
_BY_ELEMENT = frozenset(
    {
        *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW),
        *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD),
    }
)
#: Elements of a gradient that are compared.
_COMPARED = 64
_parts: WeakSet[torch.optim.Optimizer] = WeakSet()


def steps_a_part(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``copy_to_step`` made ``optimizer``."""
    return optimizer in _parts


def copy_to_step(optimizer: torch.optim.Optimizer, state: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What steps as ``optimizer`` does, over ``groups`` and into ``state``. Its hooks do not hear of that, and nothing
    takes it for a step of the training."""
    # Not copy.copy, which asks the class for less than it needs to step.
    copied: Any = object.__new__(type(optimizer))
    copied.__dict__.update(vars(optimizer))
    # What a scheduler put around it counts calls.
    copied.__dict__.pop("step", None)
    copied.state, copied.param_groups = state, groups
    copied._optimizer_step_pre_hooks, copied._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    found: torch.optim.Optimizer = copied
    _parts.add(found)
    return found


class _Stepped(NamedTuple):
    """A unit's parameters that were updated in the backward, and their gradients then."""

    gradients: Sequence[tuple[nn.Parameter, torch.Tensor]]
    flat: torch.Tensor
    """The gradient of the unit, and so of all of them (``[shard_numel]``)."""
    looked: object
    """What ``looks`` was in front of the step; None before that."""

    @property
    def looks(self) -> object:
        """Equal as long as nothing is known to have changed the gradients."""
        versions = [gradient._version for _, gradient in self.gradients]
        some = self.flat[:: max(1, self.flat.numel() // _COMPARED)]
        # As bytes: what is no number is not equal to itself.
        return versions, self.flat._version, some.clone().view(torch.uint8).tolist()

    @property
    def changed(self) -> bool:
        """Whether parameters have other gradients now. They may have since before the step, where a backward failed."""
        replaced = any(parameter.grad is not gradient for parameter, gradient in self.gradients)
        return replaced or self.looks != self.looked


class _Former:
    """What a parameter and its state were before a step. Keeps its memory for the next one."""

    def __init__(self) -> None:
        # By name of the state; the parameter's own have none.
        self._values: dict[str, Any] = {}

    def keep(self, parameter: nn.Parameter, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        values = {"": parameter.detach(), **states.get(parameter, {})}
        for name in self._values.keys() - values.keys():
            del self._values[name]
        for name, value in values.items():
            before = self._values.get(name)
            if not isinstance(value, torch.Tensor):
                self._values[name] = value
                continue
            value = _own(value)
            if isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (value.shape, value.dtype):
                before.copy_(value)
            else:
                self._values[name] = value.clone()

    def put_back(self, parameter: nn.Parameter, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        _own(parameter.detach()).copy_(self._values[""])
        state = states.get(parameter, {})
        for name in state.keys() - self._values.keys():
            del state[name]
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                _own(value).copy_(self._values[name])
            else:
                state[name] = self._values[name]
        if not state:
            states.pop(parameter, None)


class BackwardStep:
    """Steps ``optimizer`` in the backwards of one root, until ``remove``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, keeps_former: bool, rank: int, reduces_once: Callable[[], bool]
    ) -> None:
        """Step it from now on.

        Args:
            optimizer: As it updates each parameter by itself.
            keeps_former: Whether a step that came too early is taken back.
            rank: In messages.
            reduces_once: Whether the backward that runs delivers whole gradients at once.
        """
        self._optimizer, self._rank, self._reduces_once = optimizer, rank, reduces_once
        self._former: dict[nn.Parameter, _Former] | None = {} if keeps_former else None
        self._name = type(optimizer).__name__
        self._part = copy_to_step(optimizer, optimizer.state, [])
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
            optimizer.register_state_dict_pre_hook(lambda _: self.before_use("state_dict() of the optimizer")),
        )

    def remove(self) -> None:
        """Let the optimizer step by itself again."""
        self.give_up()
        for hook in self._hooks:
            hook.remove()
        self.close()

    def close(self) -> None:
        """End the thread, with the step that it is in."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def before_gradient(self, unit: Reducible) -> None:
        """``unit`` gets a gradient. Raises StateError where it was stepped with another one, without former values."""
        if unit in self._stepped:
            self._come_late(
                f"'{unit.spec.label}' got a second gradient behind a step of {self._name} in the backward "
                f"({self._where()}): the first one is used. Let each step have one forward and one backward that "
                "reduces, the last one, and those before it inside of polyshard.no_sync()"
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
        self._stepped[unit] = _Stepped(held, gradient, None)
        self._running.append(self._thread.submit(self._step, unit, groups, arrives))

    @torch.no_grad()
    def _step(self, unit: Reducible, groups: list[dict[str, Any]], arrives: Callable[[], None]) -> None:
        arrives()
        stepped = self._stepped[unit]
        if self._former is not None:
            for parameter, _ in stepped.gradients:
                self._former.setdefault(parameter, _Former()).keep(parameter, self._optimizer.state)
        self._stepped[unit] = stepped._replace(looked=stepped.looks)
        before = [_settings_of(group) for group in groups]
        # Loading a state dict gives the optimizer another one.
        states = self._optimizer.state
        if type(self._optimizer) in _BY_ELEMENT and all(_is_made(states.get(each)) for each, _ in stepped.gradients):
            self._step_over_own(groups, states)
        else:
            self._part.param_groups, self._part.state = groups, states
            self._part.step()
        if [_settings_of(group) for group in groups] != before:
            raise StateError(
                f"{self._name} keeps numbers of its own in its parameter groups ({self._where()}), and would count "
                "units for steps. Step it without step_in_backward()."
            )

    def _step_over_own(self, groups: list[dict[str, Any]], states: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Step over what this rank holds of the parameters of ``groups``, and of their ``states``, in place."""
        found: dict[nn.Parameter, torch.Tensor] = {}
        for each in (each for group in groups for each in group["params"] if each.grad is not None):
            own = found[each] = _own(each.detach())
            own.grad = _own(each.grad)
        self._part.param_groups = [
            {**group, "params": [found[each] for each in group["params"] if each in found]} for group in groups
        ]
        self._part.state = defaultdict(
            dict,
            {
                own: {
                    name: _own(value) if isinstance(value, torch.Tensor) else value
                    for name, value in states[each].items()
                }
                for each, own in found.items()
            },
        )
        self._part.step()
        for each, own in found.items():
            states[each].update(
                (name, value) for name, value in self._part.state[own].items() if not isinstance(value, torch.Tensor)
            )

    def end(self) -> None:
        """Wait for the steps of a backward. Raises what one of them did."""
        running, self._running = self._running, []
        for each in running:
            each.result()

    def give_up(self) -> None:
        """Wait for the steps of a backward that failed, and take them back, or warn of them."""
        with suppress(Exception):
            self.end()
        if self._former is not None:
            self._take_back()
            return
        stepped = len(self._stepped)
        self._stepped.clear()
        if stepped:
            warnings.warn(
                f"{self._name} stepped over {stepped} units in a backward that failed ({self._where()}): their "
                "parameters are those of the next step, and all others are not. Load a checkpoint before you go on.",
                stacklevel=2,
            )

    def before_use(self, call: str) -> None:
        """Parameters and state are read now; ``call`` begins the message.

        Raises StateError between a backward that stepped and ``step()``, without former values.
        """
        if self._stepped:
            self._come_late(
                f"{call} came between a backward, in which {self._name} stepped over {self._units()}, and its step() "
                f"({self._where()}). Call step() behind each backward: it updates the rest. Microbatches before the "
                "last belong inside of polyshard.no_sync()"
            )

    def before_change(self, call: str) -> None:
        """Gradients are scaled now; ``call`` begins the message. Raises StateError as ``before_use``."""
        if self._stepped and self._former is None:
            self._come_late(
                f"{call} came behind a backward in which {self._name} stepped over {self._units()} ({self._where()}), "
                "and would scale gradients that are used"
            )

    def _units(self) -> str:
        return f"'{next(iter(self._stepped)).spec.label}' and {len(self._stepped) - 1} other units"

    def _come_late(self, why: str) -> None:
        """Take the steps back. Without former values: raises StateError, once; ``why`` begins the message."""
        self.end()
        if self._former is None:
            self._stepped.clear()
            raise StateError(f"{why}; or do without step_in_backward(), or give it keeps_former=True.")
        self._take_back()

    @torch.no_grad()
    def _take_back(self) -> None:
        assert self._former is not None
        for stepped in self._stepped.values():
            for parameter, _ in stepped.gradients if stepped.looked is not None else ():
                self._former[parameter].put_back(parameter, self._optimizer.state)
        self._stepped.clear()

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(each is not None for each in (*args[1:], kwargs.get("closure"))):
            raise StateError(
                f"{self._name} was given a closure, whose backward would step it inside of its step "
                f"({self._where()}). Call backward() before step()."
            )
        self.end()
        self._show()
        changed = [unit.spec.label for unit, each in self._stepped.items() if each.changed]
        if changed:
            self._come_late(
                f"The gradient of '{changed[0]}' was changed behind the backward in which {self._name} stepped with it "
                f"({self._where()}). Let nothing scale gradients, or set them to None, before step()"
            )
        elif self._stepped and self._settings_now() != self._settings:
            self._come_late(
                f"Settings of {self._name} were changed between a backward in which it stepped and its step() "
                f"({self._where()}). Set a learning rate before the backward or behind step()"
            )
        stepped, self._stepped = self._stepped, {}
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


def _is_made(state: Mapping[str, Any] | None) -> bool:
    """Whether no step makes more of ``state``, which is a ``DTensor`` where its parameter is one."""
    return state is not None and len(state) > 0 and all(value is not None for value in state.values())


def _settings_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    values = ((name, value) for name, value in group.items() if name != "params")
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values}


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of ``tensor``."""
    return _torch_private.local_tensor(tensor) if is_dtensor(tensor) else tensor
