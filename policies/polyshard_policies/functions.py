"""Policies that ask a function: ``lambda`` and ``custom`` the user's, ``size`` its own of the number of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from polyshard.errors import ConfigError, PluginContractError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy, resolve_callable, resolve_classes
from torch import nn
from typing_extensions import override

from .module_class import UNCALLED, all_ignored, candidates, counted_parameters


class RecursiveFunction(Protocol):
    """Asked twice for each module, with all arguments by keyword."""

    def __call__(self, *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        """With ``recurse=True``: whether to look at the children of ``module``. With ``recurse=False``: whether
        ``module`` becomes a unit.

        ``nonwrapped_numel``: elements of the parameters in ``module``, on the way up less those in units chosen inside
        it. If the answer to ``recurse=True`` is False, the module is not asked about again and becomes no unit.
        """


class RecursivePolicy(WrapPolicy):
    """Units by a ``RecursiveFunction``, from the leaves up."""

    api_version = 1

    def __init__(self, function: RecursiveFunction) -> None:
        self._function = function
        # Weak: a policy may be kept and serve several models.
        self._own: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        chosen = _Descent(self._function, root, context).chosen
        self._own.update(chosen)
        return {module: {} for module in root.modules() if module in chosen}

    def own_numel(self, module: nn.Module) -> int:
        """Elements of the parameters in ``module``, which ``plan`` chose, that are in no unit inside of it."""
        return self._own[module]

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        return f"{_name_of(self._function)} answered True for {self._own[module]:,} parameters of its own"


class _Descent:
    """One walk over one model. ``chosen``: elements of each chosen module's parameters that are in no unit inside."""

    def __init__(self, function: RecursiveFunction, root: nn.Module, context: PolicyContext) -> None:
        self.chosen: dict[nn.Module, int] = {}
        self._function = function
        self._counted = counted_parameters(root, context)
        self._ignored = all_ignored(context)
        self._seen: set[nn.Module] = {root}
        self._taken: set[nn.Parameter] = set()
        if function(module=root, recurse=True, nonwrapped_numel=sum(self._counted.values())):
            self._visit_children(root)

    def _visit_children(self, module: nn.Module) -> None:
        for child in module.children():
            if child not in self._ignored and child not in self._seen:
                self._seen.add(child)
                self._visit(child)

    def _visit(self, module: nn.Module) -> None:
        inside = [parameter for parameter in module.parameters() if parameter in self._counted]
        if not self._function(module=module, recurse=True, nonwrapped_numel=self._numel(inside)):
            return
        self._visit_children(module)
        own = self._numel(inside)
        if self._function(module=module, recurse=False, nonwrapped_numel=own):
            self.chosen[module] = own
            self._taken.update(inside)

    def _numel(self, parameters: list[nn.Parameter]) -> int:
        return sum(self._counted[parameter] for parameter in parameters if parameter not in self._taken)


class Size(RecursivePolicy):
    """``size``: from the leaves up, a module becomes a unit when enough parameters in it are in no unit yet.

    A parameter counts by its elements. Ignored parameters do not count; a shared one counts where it comes first.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        min_num_params: int = 100_000_000,
        force_leaf: type | str | Iterable[type | str] = (nn.MultiheadAttention,),
        exclude: type | str | Iterable[type | str] = UNCALLED,
    ) -> None:
        """Options, all of which may be left out.

        ``min_num_params``: elements that make a unit; with 0, every module that can be reached becomes one.
        ``force_leaf``: classes of modules that stay in one piece: neither they nor modules inside them become units.
        ``exclude``: classes of modules that do not become units themselves; modules inside them may. Classes are given
        as such or as ``"package.module:Name"``. Raises ``ConfigError`` for values that these cannot take.
        """
        where = f"policy {context.name!r}"
        if not isinstance(min_num_params, int) or isinstance(min_num_params, bool) or min_num_params < 0:
            raise ConfigError(f"min_num_params of {where} is {min_num_params!r}. Give a number of elements, 0 or more.")
        self._min_num_params = min_num_params
        self._force_leaf = resolve_classes(force_leaf, f"force_leaf of {where}")
        self._exclude = resolve_classes(exclude, f"exclude of {where}")
        super().__init__(self._decide)

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        return f"{self.own_numel(module):,} parameters of its own, min_num_params is {self._min_num_params:,}"

    def _decide(self, *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        kept_out = self._force_leaf if recurse else self._exclude
        return nonwrapped_numel >= self._min_num_params and not isinstance(module, kept_out)


class Lambda(WrapPolicy):
    """``lambda``: every submodule for which a function answers True becomes a unit."""

    api_version = 1

    def __init__(self, context: PluginContext, fn: Callable[..., bool] | str) -> None:
        """``fn``: a function or ``"package.module:name"``, called with one module, or with the keywords of
        ``RecursiveFunction`` where it takes them.

        Raises ``ConfigError`` for a value that cannot be called or imported.
        """
        self._fn = resolve_callable(fn, f"fn of policy {context.name!r}")
        self._recursive = RecursivePolicy(self._fn) if _takes_recurse(self._fn) else None

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``PluginContractError`` where a function of one module answers neither True nor False."""
        if self._recursive is not None:
            return self._recursive.plan(root, context)
        chosen: UnitPlan = {module: {} for name, module in candidates(root, context) if self._answer(name, module)}
        _warn_of_nothing(chosen, root, "lambda", self._fn, context)
        return chosen

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        if self._recursive is not None:
            return self._recursive.reason(module, name)
        return f"{_name_of(self._fn)} answered True"

    def _answer(self, name: str, module: nn.Module) -> bool:
        answer = self._fn(module)
        if isinstance(answer, bool):
            return answer
        raise PluginContractError(
            f"the function of a lambda policy returned {answer!r} for module {name!r} ({type(module).__name__}). "
            "Return True for a unit of its own, or False."
        )


class Custom(WrapPolicy):
    """``custom``: the same, but the function may answer with a unit's own settings."""

    api_version = 1

    def __init__(self, context: PluginContext, fn: Callable[[nn.Module], bool | Mapping[str, Any]] | str) -> None:
        """``fn``: a function of one module, or ``"package.module:name"``; it returns True, False, or a dict of settings
        (``polyshard.interfaces.UNIT_OVERRIDES``), which makes a unit even when it is empty.

        Raises ``ConfigError`` for a value that cannot be called or imported.
        """
        self._fn = resolve_callable(fn, f"fn of policy {context.name!r}")
        # Weak: a policy may be kept and serve several models.
        self._chosen: WeakKeyDictionary[nn.Module, Mapping[str, Any]] = WeakKeyDictionary()

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``PluginContractError`` where the function returns anything else."""
        chosen: dict[nn.Module, Mapping[str, Any]] = {}
        for name, module in candidates(root, context):
            answer = self._fn(module)
            if isinstance(answer, Mapping):
                chosen[module] = answer
            elif not isinstance(answer, bool):
                raise PluginContractError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer!r} for module {name!r} ({type(module).__name__}). Return a bool, or a dict of settings "
                    "for that unit."
                )
            elif answer:
                chosen[module] = {}
        self._chosen.update(chosen)
        _warn_of_nothing(chosen, root, "custom", self._fn, context)
        return chosen

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self._chosen[module].items())
        return f"{_name_of(self._fn)} chose it" + (f" with {settings}" if settings else "")


#: Functions that chose nothing, and whose warning was given.
_warned: WeakSet[Callable[..., Any]] = WeakSet()


def _warn_of_nothing(
    chosen: UnitPlan, root: nn.Module, policy: str, fn: Callable[..., Any], context: PolicyContext
) -> None:
    """Warn once of a function that chose no module: a model in one unit is rarely its purpose.

    Once a function, since a program may shard many modules with the same one.
    """
    # Some callables can be neither hashed nor referenced weakly: those are warned of each time.
    with suppress(TypeError):
        if fn in _warned:
            return
    if not chosen and any(root.children()):
        warned = context.warn(
            f"the function of a {policy} policy chose no module inside this {type(root).__name__}, so that the whole "
            "model is one unit. Correct it, or take the policy 'never' if that is meant."
        )
        if warned:
            with suppress(TypeError):
                _warned.add(fn)


def _takes_recurse(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def _name_of(function: Callable[..., Any]) -> str:
    """``"package.module:name"`` of a function, or of the one that a ``functools.partial`` calls; of an object, its
    class."""
    found: Any = getattr(function, "func", function)
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}:{named.__qualname__}"
