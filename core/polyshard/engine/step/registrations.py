"""Modules and parameters that come into a model after it was sharded.

Nobody reduces the gradients of a parameter that came later: each rank would train its own, and a checkpoint keep rank
0's. Torch calls hooks where a module gets a parameter or another module, and only there, so that a step pays one look
at a flag. What is written into a module's dicts directly calls none; what reads or writes a model's state therefore
looks at all modules.

What came is told apart at the next forward, since much of it is right: modules that were there and moved, modules
without parameters, new values under an old name, what is taken out again before anything computes with it, and what is
not trained. State has the names of when the model was sharded, so that moved modules are refused there where a name
would be another parameter's.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ...errors import ParameterChangedError
from ..planning.managed_parameter import ManagedParameter
from ..planning.plan import STAGE_ATTRIBUTE
from .stage import Stage
from .step import Step

#: Names in a message; there may be thousands.
_NAMED = 4


class Registrations:
    """Knows which parameters a model had when it was sharded, and finds others."""

    def __init__(
        self,
        step: Step,
        stages: Sequence[Stage],
        ignored_modules: Collection[nn.Module],
        inner: Iterable[Registrations],
    ) -> None:
        """``ignored_modules``: the user's own, with all inside them. ``inner``: of models that this one takes over."""
        self._step = ref(step)
        self._rank = step.rank
        self._outermost = stages[0].module
        self._stages = frozenset(stages)
        self._units = [unit for stage in stages for unit in stage.units]
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
            stage = module.__dict__.get(STAGE_ATTRIBUTE)
            # One that was sharded by itself looks after itself.
            if module in seen or (stage is not None and stage not in self._stages):
                continue
            seen.add(module)
            yield prefix, module
            for key, child in reversed(module._modules.items()):
                # An empty container is false.
                if child is not None:
                    waiting.append((f"{prefix}.{key}" if prefix else key, child))


# Weak on both sides: the latter leads to the former.
_watching: WeakKeyDictionary[nn.Module, ref[Registrations]] = WeakKeyDictionary()
_installing = threading.Lock()
_installed: list[object] = []


def _install() -> None:
    """Let torch tell of registrations, once in a process, and never by an import."""
    with _installing:
        if not _installed:
            _installed.append(register_module_parameter_registration_hook(_registered))
            _installed.append(register_module_module_registration_hook(_registered))


def _registered(module: nn.Module, name: str, value: object) -> None:
    if torch.compiler.is_compiling():
        return
    found = _watching.get(module)
    registrations = None if found is None else found()
    if registrations is not None:
        registrations.note()
