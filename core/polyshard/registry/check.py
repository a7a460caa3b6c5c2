"""Whether a plugin fits its group's contract: its version, its factory, and the signatures of its methods.

Nothing is called to find out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any

from ..errors import PluginContractError, PluginVersionError
from ..interfaces import (
    CURRENT_API,
    OLDEST_API,
    Collectives,
    Group,
    OffloadManager,
    PrecisionPlugin,
    WrapPolicy,
)

#: The class of each group's instances.
CONTRACTS: Mapping[Group, type] = {
    Group.COLLECTIVES: Collectives,
    Group.PRECISION: PrecisionPlugin,
    Group.OFFLOAD: OffloadManager,
    Group.POLICIES: WrapPolicy,
    Group.PLUGINS: object,
}

_VERSION = "api_version"

#: Methods with a default that have another name now: an override of the old one would never be called.
_RENAMED: Mapping[type, Mapping[str, str]] = {
    OffloadManager: {"units_to_park": "units_to_offload"},
    PrecisionPlugin: {"wire": "encoding"},
}


def check_api_version(group: Group, plugin: object, where: str, *, inherited: bool = True) -> None:
    """Raise ``PluginVersionError`` where ``plugin`` has no ``api_version`` that this polyshard serves.

    ``inherited``: whether a base class may state it. A factory states its own: a class in its body, a function as an
    attribute.
    """
    oldest, current = OLDEST_API[group], CURRENT_API[group]
    cls = plugin if isinstance(plugin, type) else type(plugin)
    own = _VERSION in vars(cls) or (cls is not plugin and _VERSION in getattr(plugin, "__dict__", {}))
    base = next((base for base in cls.__mro__[1:] if _VERSION in vars(base)), None)
    if not (own or inherited) and base is not None:
        raise PluginVersionError(
            f"{where} inherits {_VERSION} from {qualified(base)}; state its own. Add '{_VERSION} = {current}' to the "
            "class: what it was written for does not change with its base."
        )
    version = getattr(plugin, _VERSION, None)
    if not isinstance(version, int) or isinstance(version, bool):
        found = "has none" if version is None else f"has {version!r}"
        raise PluginVersionError(
            f"{where} must say which version of the contract it implements, in an integer attribute '{_VERSION}', but "
            f"{found}. Add '{_VERSION} = {current}' to the class, or set it on the function."
        )
    if not oldest <= version <= current:
        served = f"{oldest}" if oldest == current else f"{oldest} to {current}"
        cure = "Update polyshard" if version > current else "Update the plugin's package"
        raise PluginVersionError(
            f"{where} implements version {version} of the contract, but this polyshard serves {served}. {cure}."
        )


def refuse_faults(where: str, faults: Iterable[str]) -> None:
    """Raise ``PluginContractError`` that names all of ``faults``, where there are any."""
    found = list(faults)
    if found:
        raise PluginContractError(f"{where} does not fit its contract: {'; '.join(found)}.")


def faults_of(group: Group, factory: Any) -> Iterator[str]:
    """A sentence for each reason why the contract cannot call ``factory``, or the class that it is."""
    # Some callables written in C have no signature; the call itself will tell.
    with suppress(ValueError):
        signature = inspect.signature(factory)
        try:
            # With one argument by place and any by name.
            signature.bind_partial(None)
        except TypeError:
            yield f"it must take a PluginContext as its first argument, but has the signature {signature}"
    contract = CONTRACTS[group]
    # Hooks of listeners are pluggy's to check, where they are registered.
    if isinstance(factory, type) and contract is not object:
        if issubclass(factory, contract):
            yield from _method_faults(contract, factory)
        elif factory.__new__ is object.__new__:
            # With a __new__ of its own, calling it may give anything.
            yield f"it is no {contract.__name__}: derive it from polyshard.interfaces.{contract.__name__}"


def instance_faults(group: Group, plugin: object) -> Iterator[str]:
    """A sentence for each reason why the contract cannot call methods of ``plugin``, an instance."""
    contract = CONTRACTS[group]
    if contract is not object and isinstance(plugin, contract):
        yield from _method_faults(contract, type(plugin))


def qualified(cls: type) -> str:
    """``"module:Name"`` of a class, for messages."""
    return f"{cls.__module__}:{cls.__qualname__}"


#: By contract and class: looking at all signatures takes a millisecond, and ``fully_shard`` is called for every layer.
_known_faults: dict[tuple[type, type], tuple[str, ...]] = {}


def _method_faults(contract: type, cls: type) -> tuple[str, ...]:
    """A sentence for each member of ``cls``, a subclass of ``contract``, that the contract cannot use."""
    if (contract, cls) not in _known_faults:
        _known_faults[contract, cls] = tuple(_unusable_members(contract, cls))
    return _known_faults[contract, cls]


def _unusable_members(contract: type, cls: type) -> Iterator[str]:
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"it lacks {_shown(contract, name)}"
    for old, new in _RENAMED.get(contract, {}).items():
        if hasattr(cls, old):
            yield f"{old} is called {new} now: rename it"
    bases = [base for base in reversed(contract.__mro__) if base is not object]
    members = {name: each for base in bases for name, each in vars(base).items() if not name.startswith("_")}
    for name, wanted in members.items():
        found = inspect.getattr_static(cls, name)
        if found is wanted:
            continue
        if not isinstance(wanted, FunctionType):
            if isinstance(found, FunctionType) and not isinstance(wanted, (staticmethod, classmethod)):
                yield f"{name} is a method and must be a property or an attribute: put @property above it"
        elif isinstance(found, property):
            yield f"{name} is a property and must be a method: take @property away"
        elif not callable(found) and not hasattr(type(found), "__get__"):
            yield f"{name} is {found!r} and must be a method: {_shown(contract, name)}"
        else:
            yield from _call_faults(name, found, wanted)


def _shown(contract: type, name: str) -> str:
    wanted = inspect.getattr_static(contract, name)
    if not isinstance(wanted, FunctionType):
        return f"the property {name}"
    return f"{name}({', '.join(list(inspect.signature(wanted).parameters)[1:])})"


def _call_faults(name: str, found: Any, wanted: FunctionType) -> Iterator[str]:
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if not isinstance(function, FunctionType):
        # A callable that is no Python function tells at the call itself.
        return
    # A wrapper is called, and not what it wraps.
    taken = inspect.signature(function, follow_wrapped=False)
    bound = [] if isinstance(found, staticmethod) else ["self"]
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    optional = [each for each in parameters if each.default is not inspect.Parameter.empty]
    by_place_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    for left_out in ((), optional) if optional else ((),):
        given = [each for each in parameters if each not in left_out]
        by_place = [each.name for each in given if each.kind in by_place_kinds]
        by_name = [each.name for each in given if each.kind not in by_place_kinds]
        try:
            taken.bind(*bound, *by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            called, problem = ", ".join([*by_place, *(f"{each}=..." for each in by_name)]), str(error)
            places = [*bound, *by_place]
            for count in range(len(places), 0, -1):
                # The first argument for which there is no place.
                try:
                    taken.bind_partial(*places[:count])
                except TypeError:
                    problem = f"it does not take {places[count - 1]!r}"
            yield f"{name}{taken} is called as {name}({called}): {problem}"
            return
