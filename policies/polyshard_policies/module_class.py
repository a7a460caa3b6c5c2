"""Policies that choose modules by their class: never, always, module_class, transformer and transformers.

Other policies walk over a model by ``candidates`` and ``counted_parameters``, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from polyshard.errors import ConfigError, did_you_mean
from polyshard.interfaces import UNIT_OVERRIDES, PluginContext, PolicyContext, UnitPlan, WrapPolicy, resolve_classes
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from typing_extensions import override

#: Containers without a forward: their gather would never be issued, so their parameters belong to the module around.
UNCALLED: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

_ATTRIBUTE = "_no_split_modules"
_INSTEAD = "Name the classes of its blocks: policy={'name': 'transformer', 'layers': [...]}."


class Never(WrapPolicy):
    """``never``: the root is the only unit."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return {}


class Always(WrapPolicy):
    """``always``: every submodule with parameters of its own or below becomes a unit.

    ``ModuleList``, ``ModuleDict``, ``ParameterList`` and ``ParameterDict`` become none: nothing calls them, so they
    could not gather in time.
    """

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        counted = counted_parameters(root, context)
        return {
            module: {}
            for _, module in candidates(root, context)
            if not isinstance(module, UNCALLED) and not counted.keys().isdisjoint(module.parameters())
        }

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        own = any(True for _ in module.parameters(recurse=False))
        return "it has parameters of its own" if own else "there are parameters in it"


class Overrides:
    """Settings for the modules that a key matches, each of which becomes a unit.

    A key is the name of a class, which stands for its subclasses, too, or a name in the model, in which ``*`` stands
    for anything between two dots: ``"blocks.*.experts"``.
    """

    def __init__(self, table: Mapping[str, Mapping[str, Any]] | None, policy: str) -> None:
        """Raises ``ConfigError`` for anything but tables of settings by key. ``policy``: its name, for messages."""
        self._where = f"overrides of policy {policy!r}"
        self._table = {} if table is None else table
        # Weak: a policy may be kept and serve several models.
        self._reasons: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        if not isinstance(self._table, Mapping):
            raise ConfigError(f"{self._where} takes tables of settings by class or name, not {table!r}.")
        for key, settings in self._table.items():
            if not isinstance(key, str) or not key or not isinstance(settings, Mapping):
                raise ConfigError(
                    f"{self._where} has the entry {key!r}: {settings!r}. Give the settings of a class or a name: "
                    '{ Experts = { mesh = "edp" } }.'
                )
            for setting in settings:
                if setting not in UNIT_OVERRIDES:
                    raise ConfigError(
                        f"{self._where} sets {setting!r} for {key!r}, which no unit has."
                        f"{did_you_mean(str(setting), UNIT_OVERRIDES)} A unit has: {', '.join(UNIT_OVERRIDES)}."
                    )

    def applied(self, plan: UnitPlan, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """``plan``, with the modules that match and their settings.

        Raises ``ConfigError`` where a key matches no module or one that cannot be a unit, and where two keys set the
        same for one module.
        """
        if not self._table:
            return plan
        found: dict[nn.Module, dict[str, Any]] = {}
        unused = set(self._table)
        for name, module in root.named_modules():
            keys = [key for key in self._table if module is not root and _matches(key, name, module)]
            unused.difference_update(keys)
            if keys:
                found[module] = self._settings(keys, name, module)
                self._reasons[module] = f"{' and '.join(map(repr, keys))} in overrides" + _with_settings(found[module])
        # One module alone has nothing to choose.
        if unused and any(root.children()):
            key = min(unused)
            below = [each for each in root.named_modules() if each[1] is not root]
            known = {name for name, _ in below} | {type(module).__name__ for _, module in below}
            raise ConfigError(
                f"{self._where} has {key!r}, which no module inside this {type(root).__name__} has as class or name."
                f"{did_you_mean(key, known) or ' Name some of its modules: polyshard explain lists them.'}"
            )
        ours = {module for _, module in candidates(root, context)} & found.keys()
        chosen = {module: {**plan.get(module, {}), **found.get(module, {})} for module in {*plan, *ours}}
        ordered = {module: chosen[module] for module in root.modules() if module in chosen}
        return ordered | chosen

    def reason(self, module: nn.Module) -> str:
        """The keys that match ``module``, and the settings; empty where none does."""
        return self._reasons.get(module, "")

    def _settings(self, keys: Iterable[str], name: str, module: nn.Module) -> dict[str, Any]:
        if isinstance(module, UNCALLED):
            raise ConfigError(
                f"{self._where} matches {name!r}, a {type(module).__name__}, which cannot be a unit: nothing calls it. "
                f"Name the module around it, or '{name}.*' for each of those in it."
            )
        settings: dict[str, Any] = {}
        for key in keys:
            for setting, value in self._table[key].items():
                if settings.setdefault(setting, value) != value:
                    raise ConfigError(
                        f"{self._where} sets {setting} of module {name!r} twice, as {settings[setting]!r} and "
                        f"{value!r}. Let one key match it."
                    )
        return settings


class ModuleClass(WrapPolicy):
    """``module_class``: every instance of the given classes, or of their subclasses, becomes a unit.

    If the model has no module of any of the classes, that is an error: it would silently be one unit. If it has modules
    of some of them, another class may have none, unless the model has a different class of the same name: two copies of
    a module's source.
    """

    api_version = 1
    _option = "classes"

    def __init__(
        self,
        context: PluginContext,
        classes: type | str | Iterable[type | str],
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """``classes``: one or several, each a class or ``"package.module:Name"``.
        ``overrides``: settings of the units of some modules (``Overrides``):
        ``{ Experts = { mesh = "edp", gradient_divisor = "group" } }``.

        Raises ``ConfigError`` for a value that is not a class or cannot be imported, for no class at all, and for
        settings that no unit has.
        """
        self._where = f"{self._option} of policy {context.name!r}"
        self._classes = resolve_classes(classes, self._where)
        if not self._classes:
            raise ConfigError(f"no class is given in {self._where}. Name at least one, or take the policy 'never'.")
        self._overrides = Overrides(overrides, context.name)

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where ``root`` has no module of the classes, with the nearest class that it has."""
        # The root is a unit in any case, and ignored modules count as present. One module alone has nothing to choose.
        present = dict.fromkeys(type(module) for module in root.modules())
        absent = [wanted for wanted in self._classes if not any(issubclass(each, wanted) for each in present)]
        named = {each.__name__ for each in present}
        wrong = [wanted for wanted in absent if len(absent) == len(self._classes) or wanted.__name__ in named]
        if wrong and any(root.children()):
            raise ConfigError(_absent(wrong[0], present, root, self._where))
        plan: UnitPlan = {module: {} for _, module in candidates(root, context) if isinstance(module, self._classes)}
        return self._overrides.applied(plan, root, context)

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        own, rule = type(module), ""
        if own in self._classes:
            rule = f"class {own.__name__} is in {self._option}"
        elif isinstance(module, self._classes):
            base = next(each for each in self._classes if isinstance(module, each))
            rule = f"class {own.__name__} derives from {base.__name__}, which is in {self._option}"
        return "; ".join(filter(None, (rule, self._overrides.reason(module))))


class Transformer(ModuleClass):
    """``transformer``: every transformer layer becomes a unit; the rest stays in the root."""

    api_version = 1
    _option = "layers"

    def __init__(
        self,
        context: PluginContext,
        layers: type | str | Iterable[type | str],
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """``layers``: the classes of the model's blocks, each a class or ``"package.module:Name"``.
        ``overrides``: settings of some units, as for ``module_class``.

        Raises ``ConfigError`` for a value that is not a class or cannot be imported, for no class at all, and for
        settings that no unit has.
        """
        super().__init__(context, layers, overrides)


class NoSplitModules(WrapPolicy):
    """``transformers``: every module whose class a Hugging Face model names in ``_no_split_modules`` becomes a unit.

    These are its blocks, which Transformers itself never divides between devices. Every module may name some: a model
    inside of an adapter's wrapper, or a vision tower in a language model, names its own. Transformers is not imported.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        leave_out: str | Iterable[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """``leave_out``: names of such classes that stay in the unit around them, because only some ranks run them in a
        step: the layers of a vision tower, where a rank's batch may have no image.
        ``overrides``: settings of some units, as for ``module_class``.

        Raises ``ConfigError`` for values that are no names, and for settings that no unit has.
        """
        names = (leave_out,) if isinstance(leave_out, str) else tuple(leave_out)
        self._where = f"policy {context.name!r}"
        if not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"leave_out of {self._where} takes names of classes, not {leave_out!r}.")
        self._left_out = frozenset(names)
        self._overrides = Overrides(overrides, context.name)
        # Weak: a policy may be kept and serve several models.
        self._named: WeakSet[nn.Module] = WeakSet()

    @override
    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        """Raises ``ConfigError`` where no module names any class, ``root`` has no module of those named, or
        ``leave_out`` has a class that is not named."""
        if not any(root.children()):
            return {}
        # An adapter's wrapper hands on the attribute of the model inside it, which is a module here as well.
        named = frozenset(name for module in root.modules() for name in getattr(module, _ATTRIBUTE, None) or ())
        listed = ", ".join(sorted(named))
        if not named:
            raise ConfigError(
                f"{self._where} asks a model for its {_ATTRIBUTE}, but no module in this {type(root).__name__} names "
                f"any. {_INSTEAD}"
            )
        present = named & {type(module).__name__ for module in root.modules()}
        if not present:
            raise ConfigError(
                f"{type(root).__name__} has no module of the classes in its {_ATTRIBUTE}, {listed}, which "
                f"{self._where} looks for. {_INSTEAD}"
            )
        for unknown in sorted(self._left_out - named):
            raise ConfigError(
                f"leave_out of {self._where} names {unknown!r}, which {type(root).__name__} has not in its "
                f"{_ATTRIBUTE}.{did_you_mean(unknown, named) or f' It has: {listed}.'}"
            )
        wanted = present - self._left_out
        plan: UnitPlan = {module: {} for _, module in candidates(root, context) if type(module).__name__ in wanted}
        self._named.update(plan)
        return self._overrides.applied(plan, root, context)

    @override
    def reason(self, module: nn.Module, name: str) -> str:
        rule = f"class {type(module).__name__} is in the model's {_ATTRIBUTE}" if module in self._named else ""
        return "; ".join(filter(None, (rule, self._overrides.reason(module))))


def candidates(root: nn.Module, context: PolicyContext) -> Iterator[tuple[str, nn.Module]]:
    """Fully-qualified name and module of all below ``root`` that may be chosen, in the order of ``root.modules()``.

    ``out_proj`` of ``nn.MultiheadAttention``, which computes with its parameters and never calls it, may not.
    """
    ignored = all_ignored(context)
    for name, module in root.named_modules():
        if module is not root and module not in ignored and not isinstance(module, NonDynamicallyQuantizableLinear):
            yield name, module


def all_ignored(context: PolicyContext) -> frozenset[nn.Module]:
    """The ignored modules and everything inside them."""
    return frozenset(inner for module in context.ignored_modules for inner in module.modules())


def counted_parameters(module: nn.Module, context: PolicyContext) -> dict[nn.Parameter, int]:
    """The parameters in ``module`` that are not ignored, each with its number of elements; shared ones once."""
    left_out = set(context.ignored_parameters)
    for ignored in context.ignored_modules:
        left_out.update(ignored.parameters())
    return {parameter: parameter.numel() for parameter in module.parameters() if parameter not in left_out}


def _absent(wanted: type, present: Iterable[type], root: nn.Module, where: str) -> str:
    own = {each.__name__: each for each in present if not each.__module__.startswith("torch.")}
    known = own or {each.__name__: each for each in present}
    near = get_close_matches(wanted.__name__, known, n=1)
    if near and near[0] == wanted.__name__:
        hint = f"Its {near[0]} is another class, {_reference(known[near[0]])}: name that."
    elif near:
        hint = f"Did you mean {_reference(known[near[0]])}? It has: {', '.join(sorted(known))}."
    else:
        hint = f"Name a class that it has: {', '.join(sorted(known))}."
    return f"{type(root).__name__} has no module of the class {_reference(wanted)}, in {where}. {hint}"


def _reference(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _matches(key: str, name: str, module: nn.Module) -> bool:
    keys, parts = key.split("."), name.split(".")
    named = len(keys) == len(parts) and all(map(fnmatchcase, parts, keys))
    return named or any(key == each.__name__ for each in type(module).__mro__)


def _with_settings(settings: Mapping[str, Any]) -> str:
    return f" with {', '.join(f'{key}={value!r}' for key, value in settings.items())}" if settings else ""
