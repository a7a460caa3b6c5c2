"""Calls of modules that would compute with pieces: what ``generate`` and the like do outside of any forward.

Between steps the outermost module's own parameters are 1-D pieces. A method beside ``forward`` that calls the modules
that hold them would fail inside of torch ("'weight' must be 2-D") or, with a bias alone, compute something else. Each
of these modules refuses to be called then. While a forward runs they have no hook, which every call would pay for.
Modules inside of other units are left out: there are many, and what calls them is nearly always the unit's forward.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from .. import _torch_private
from ..errors import ParameterChangedError, StateError, UnshardedUseError
from ..planning.plan import MODULE_STATE_ATTRIBUTE, ManagedParameter
from .bindings import Shown
from .module_state import ModuleState
from .step import Step
from .unit import Unit

#: Under which the hooks stand; torch's own keys are numbers.
_KEY = "polyshard"
#: What a method calls that computes gradients; ``manual_backward`` is Lightning's.
_DIFFERENTIATES = frozenset({"backward", "manual_backward"})


class IdleCallGuard:
    """Lets the modules that hold the outermost module state's parameters refuse calls between steps."""

    def __init__(self, step: Step, module_states: Sequence[ModuleState]) -> None:
        outermost = module_states[0]
        # These gather when they are called.
        gathering = {module_state.module for module_state in module_states}
        # Without shards, modules hold whole parameters at all times.
        sites = [
            (*site, parameter.original)
            for unit in outermost.units
            if unit.grid.shard is not None
            for parameter in unit.parameters
            for site in parameter.sites
        ]
        refusals: dict[nn.Module, _Refusal] = {}
        for module, key, original in sites:
            if module not in gathering:
                refusals.setdefault(module, _Refusal(step, outermost.module, key, original))
        self._hooks = [(_torch_private.forward_pre_hooks(module), refusal) for module, refusal in refusals.items()]
        self.enter()

    def enter(self) -> None:
        """No forward runs any more."""
        for hooks, refusal in self._hooks:
            hooks[_KEY] = refusal

    def leave(self) -> None:
        """A forward starts, or another root takes over."""
        for hooks, _ in self._hooks:
            hooks.pop(_KEY, None)


@dataclass(eq=False, slots=True)
class _Refusal:
    """The hook of one module."""

    step: Step
    owner: nn.Module
    key: str
    original: nn.Parameter

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # A checkpoint around the whole model computes with views inside of a backward.
        if self.step.unsharded or module._parameters.get(self.key) is not self.original:
            return
        name = next((name for name, each in self.owner.named_modules() if each is module), "")
        method = _method_of(self.owner)
        called = f"by {type(self.owner).__name__}.{method} " if method else ""
        raise UnshardedUseError(
            f"'{name}' ({type(module).__name__}) was called {called}outside of the model's forward, while its "
            f"{self.key} is sharded (rank {self.step.rank}). Let the method that calls it see whole parameters, once "
            f'the model is sharded: polyshard.register_forward_method(model, "{method or "generate"}").'
        )

    # A module that is copied or pickled by itself holds pieces as before, and may not drag the model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> tuple[type[partial[None]], tuple[Callable[..., None]]]:
        return partial, (_pass,)


def _method_of(owner: nn.Module) -> str:
    """The name of the outermost method of ``owner`` that is running; empty where none is.

    Nothing around one that computes gradients, and that one only if it calls no other: a loop over steps cannot be one
    forward, since its optimizer changes what stays gathered.
    """
    found = ""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        # torch's own are how a module is called.
        theirs = code.co_argcount and package not in ("torch", "polyshard")
        if theirs and frame.f_locals.get(code.co_varnames[0]) is owner and _is_method(owner, code):
            differentiates = bool(_DIFFERENTIATES.intersection(code.co_names))
            if not (differentiates and found):
                found = code.co_name
            if differentiates:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _is_method(owner: nn.Module, code: CodeType) -> bool:
    """Whether ``code`` runs under its name as a method of ``owner``, and not as a function that is given it."""
    method: Any = inspect.getattr_static(owner, code.co_name, None)
    # Decorators that keep a name, such as torch.no_grad(), say what they are around.
    while method is not None:
        if getattr(method, "__code__", None) is code:
            return True
        method = getattr(method, "__func__", None) or getattr(method, "__wrapped__", None)
    return False


def _pass(*_: Any) -> None:
    """Lets every call through."""


# Modules and parameters that come into a model after it was sharded.
#
# Nobody reduces the gradients of a parameter that came later: each rank would train its own, and a checkpoint keep rank
# 0's. Torch calls hooks where a module gets a parameter or another module, and only there, so that a step pays one look
# at a flag. What is written into a module's dicts directly calls none; what reads or writes a model's state therefore
# looks at all modules.
#
# What came is told apart at the next forward, since much of it is right: modules that were there and moved, modules
# without parameters, new values under an old name, what is taken out again before anything computes with it, and what is
# not trained. State has the names of when the model was sharded, so that moved modules are refused there where a name
# would be another parameter's.


#: Names in a message; there may be thousands.
_NAMED = 4


class RegistrationGuard:
    """Knows which parameters a model had when it was sharded, and finds others."""

    def __init__(
        self,
        step: Step,
        module_states: Sequence[ModuleState],
        ignored_modules: Collection[nn.Module],
        inner: Iterable[RegistrationGuard],
    ) -> None:
        """``ignored_modules``: the user's own, with all inside them. ``inner``: of models that this one takes over."""
        self._step = ref(step)
        self._rank = step.rank
        self._outermost = module_states[0].module
        self._stages = frozenset(module_states)
        self._units = [unit for module_state in module_states for unit in module_state.units]
        self._alone = step.collectives.world_size == 1
        # There autograd works on the originals, whatever their names.
        self._resident = all(unit.resident for unit in self._units)
        self._ignored = WeakSet(ignored_modules)
        # Names of the parameters that modules had; of those that no unit has, the user's own.
        self._had: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
        # What came, by name, when all modules were looked at last.
        self._came: dict[str, nn.Parameter] = {}
        self._changed = False
        for each in inner:
            self._ignored.update(each._ignored)
            self._had.update(each._had)
            self._changed |= each._changed or bool(each._came)
        _install()
        myself = ref(self)
        for _, module in self._modules():
            _watching[module] = myself
            if module not in self._had:
                self._had[module] = [key for key, parameter in module._parameters.items() if parameter is not None]
        if self._changed:
            self.note()

    @cached_property
    def _managed(self) -> dict[int, ManagedParameter]:
        # Made where somebody looks: sharding a model is then as fast as it can be.
        return {id(each.original): each for unit in self._units for each in unit.parameters}

    @cached_property
    def _sites(self) -> dict[tuple[nn.Module, str], ManagedParameter]:
        return {site: each for each in self._managed.values() for site in each.sites}

    def note(self) -> None:
        """Something was registered in one of the modules."""
        self._changed = True
        step = self._step()
        if step is not None:
            step.registered = True

    def refuse_ties(self) -> None:
        """Refuse sharded parameters that stand for others now. To be called before changed values are taken up.

        Raises:
            ParameterChangedError: naming both.
        """
        for (module, key), parameter in self._sites.items():
            held = module._parameters.get(key)
            if held is not None and held is not parameter.original and id(held) in self._managed:
                self._refuse_tie(parameter.names[0], self._managed[id(held)])

    def refuse_newcomers(self, *, trains: bool, anew: bool = False) -> None:
        """Refuse parameters that are trained and came later. ``anew``: look at all modules, whatever was noticed.

        ``trains``: whether gradients may follow; what came stays noted where not.

        Raises:
            ParameterChangedError: naming them.
        """
        trained = trains and any(parameter.requires_grad for parameter in self._came.values())
        # What is taken out of a module calls no hook.
        if self._changed or anew or trained:
            self._came = dict(self._newcomers())
            self._changed = False
        step = self._step()
        if step is not None:
            step.registered = bool(self._came)
        names = [name for name, parameter in self._came.items() if parameter.requires_grad] if trains else []
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            listed = ", ".join(f"'{name}'" for name in names[:_NAMED])
            raise ParameterChangedError(
                f"{listed}{more} came into the model after it was sharded (rank {self._rank}): gradients there would "
                "be each rank's own, and a checkpoint would keep rank 0's values. Add and replace modules before "
                "sharding; give new values to parameters that are there (load_state_dict); or freeze what came, with "
                "requires_grad_(False), and give all ranks the same values."
            )

    def refuse_moved(self) -> None:
        """Refuse parameters under names that others had when the model was sharded. Names in state are those of then.

        Raises:
            ParameterChangedError: naming one.
        """
        names = {name: parameter for parameter in self._managed.values() for name in parameter.names}
        for prefix, module in self._modules():
            for key in module._parameters:
                parameter = self._sites.get((module, key))
                name = f"{prefix}.{key}" if prefix else key
                if parameter is not None and names.get(name, parameter) is not parameter:
                    raise ParameterChangedError(
                        f"'{name}' is what '{parameter.names[0]}' was when the model was sharded (rank {self._rank}): "
                        "in a state dict or a checkpoint one would stand under the other's name. Move and remove "
                        "modules before sharding, or put them back before state is read or written."
                    )

    def _newcomers(self) -> Iterator[tuple[str, nn.Parameter]]:
        myself = ref(self)
        for prefix, module in self._modules():
            # What came without parameters may get some.
            _watching[module] = myself
            had = self._had.get(module, ())
            for key, parameter in module._parameters.items():
                if parameter is None or (module, key) in self._sites or key in had:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                managed = self._managed.get(id(parameter))
                if managed is not None and not self._resident:
                    self._refuse_tie(name, managed)
                if managed is None and not self._alone:
                    yield name, parameter

    def _refuse_tie(self, name: str, other: ManagedParameter) -> None:
        raise ParameterChangedError(
            f"'{name}' is '{other.names[0]}' now (rank {self._rank}), which is sharded under its own names alone: the "
            "two would go apart. Tie parameters before sharding."
        )

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules, once, by name."""
        seen = set(self._ignored)
        waiting = [("", self._outermost)]
        while waiting:
            prefix, module = waiting.pop()
            module_state = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
            # One that was sharded by itself looks after itself.
            if module in seen or (module_state is not None and module_state not in self._stages):
                continue
            seen.add(module)
            yield prefix, module
            for key, child in reversed(module._modules.items()):
                # An empty container is false.
                if child is not None:
                    waiting.append((f"{prefix}.{key}" if prefix else key, child))


# Weak on both sides: the latter leads to the former.
_watching: WeakKeyDictionary[nn.Module, ref[RegistrationGuard]] = WeakKeyDictionary()
_installing = threading.Lock()
_installed: list[RemovableHandle] = []


def _install() -> None:
    """Let torch tell of registrations, once in a process, and never by an import."""
    with _installing:
        if not _installed:
            _installed.append(register_module_parameter_registration_hook(_registered))
            _installed.append(register_module_module_registration_hook(_registered))


def forget_registrations() -> None:
    """Take the hooks off torch's registration of modules and parameters: nothing that comes later is noticed."""
    with _installing:
        for hook in _installed:
            hook.remove()
        _installed.clear()


def _registered(module: nn.Module, name: str, value: object) -> None:
    if torch.compiler.is_compiling():
        return
    found = _watching.get(module)
    registrations = None if found is None else found()
    if registrations is not None:
        registrations.note()


# Modules inside of units refuse to be copied or pickled by themselves: the copy would hold pieces under the names of
# whole parameters, and compute with these where their shapes allow it.
#
# The module states' own modules refuse by their module state.


#: Attribute under which a module holds what refuses; a copy finds it among a module's attributes.
_ATTRIBUTE = "_polyshard_pieces"


def refuse_copies(units: Iterable[Unit]) -> None:
    """Let the modules that hold pieces of ``units`` refuse copies, where they are not whole."""
    for unit in units:
        if unit.grid.shard is None:
            continue
        for parameter in unit.parameters:
            for module, _ in parameter.sites:
                if MODULE_STATE_ATTRIBUTE not in module.__dict__:
                    module.__dict__.setdefault(_ATTRIBUTE, _Uncopied(unit, parameter))


class _Uncopied:
    """Stands in a module that holds a piece, and is copied with it."""

    def __init__(self, unit: Unit, parameter: ManagedParameter) -> None:
        self._unit = unit
        self._parameter = parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self._refuse("deep-copied")

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        self._refuse("pickled")
        return type(None), ()

    def _refuse(self, done: str) -> None:
        unit = self._unit
        unsharded = unit.step is not None and unit.step.unsharded
        if unsharded or (unit.prepared and unit.bindings.shown is Shown.VIEWS):
            # Whole, and the copy refuses nothing.
            return
        name, rank = self._parameter.names[0], unit.grid.world.rank
        raise StateError(
            f"A module that holds a piece of '{name}' cannot be {done} (rank {rank}): the copy would take the "
            "piece for the whole. Copy it before sharding, or inside of 'with polyshard.unsharded(model)'."
        )
