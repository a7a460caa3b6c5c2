"""From a name to the factory of a plugin. The only module that imports stevedore."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, Literal, overload

from stevedore import DriverManager

from ..config import PluginChoice, PluginSpec, did_you_mean
from ..errors import (
    PluginConflictError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    PluginRefusedError,
)
from ..interfaces import (
    Collectives,
    Group,
    Layout,
    OffloadManager,
    PluginContext,
    PrecisionCaster,
    WrapPolicy,
)
from .contracts import CONTRACTS, check_api_version, check_stated_version, faults_of, instance_faults, qualified
from .offers import Offer, normalised, offers_of
from .permission import Permission
from .resolved import Resolved, refuse_faults


class _LiveDriverManager(DriverManager[Any]):
    """stevedore's driver manager over entry points that were just read, instead of over its cache."""

    def __init__(self, namespace: str, name: str, entry_points: list[EntryPoint]) -> None:
        self._live = entry_points
        super().__init__(namespace, name, invoke_on_load=False)

    def list_entry_points(self) -> list[EntryPoint]:
        return self._live


@overload
def resolve(
    group: Literal[Group.COLLECTIVES], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[Collectives]: ...
@overload
def resolve(
    group: Literal[Group.PRECISION], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[PrecisionCaster]: ...
@overload
def resolve(
    group: Literal[Group.OFFLOAD], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[OffloadManager]: ...
@overload
def resolve(
    group: Literal[Group.POLICIES], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[WrapPolicy]: ...
@overload
def resolve(
    group: Literal[Group.LAYOUTS], choice: PluginChoice, entry_points: EntryPoints | None = None
) -> Resolved[Layout]: ...
@overload
def resolve(group: Group, choice: PluginChoice, entry_points: EntryPoints | None = None) -> Resolved[object]: ...
def resolve(group: Group, choice: PluginChoice, entry_points: EntryPoints | None = None) -> Resolved[Any]:
    """Find the plugin that ``choice`` names, import it, and compare it with its contract.

    An object that fulfils the group's contract resolves to itself. Nothing is constructed and no rank is spoken to.
    ``entry_points``: what ``scan`` returned, for several calls in a row; None reads the installed metadata anew.

    Raises ``ConfigError`` for a choice that names nothing, ``PluginNotFoundError``, ``PluginConflictError`` where
    several distributions but polyshard offer the name, ``PluginRefusedError`` before anything is imported where the
    environment does not allow it, ``PluginLoadError`` with the cause of a failed import, ``PluginVersionError``, and
    ``PluginContractError`` for an object that is no plugin of the group, and for a class that lacks methods or whose
    methods cannot be called as the contract calls them.
    """
    spec = PluginSpec.parse(choice)
    if not isinstance(spec, PluginSpec):
        return given(group, spec)
    named = offers_of(group, entry_points, spec.name)
    offer = _chosen(group, spec, named or offers_of(group, entry_points))
    where = f"plugin {spec.name!r} of {group.value} ({offer.value}, from {offer.origin})"
    refusal = Permission.read().refusal(offer)
    if refusal:
        raise PluginRefusedError(f"{where} was not imported: {refusal}")
    try:
        factory = _LiveDriverManager(group.value, spec.name, [offer.entry_point]).driver
    except KeyboardInterrupt:
        raise
    # A module that calls sys.exit() must not end the training run without a word.
    except BaseException as error:
        raise PluginLoadError(
            f"{where} cannot be imported: {type(error).__name__}: {error}. Repair or reinstall "
            f"{offer.distribution}, or name another plugin."
        ) from error
    if not callable(factory):
        raise PluginContractError(
            f"{where} is an instance of {qualified(type(factory))}, which cannot be called. Point the entry point at "
            "a class or function that takes a PluginContext."
        )
    check_stated_version(group, factory, where)
    refuse_faults(where, faults_of(group, factory))
    return Resolved(
        group=group,
        name=spec.name,
        value=offer.value,
        distribution=offer.distribution,
        version=offer.version,
        factory=factory,
        options=dict(spec.options),
    )


def given(group: Group, plugin: object) -> Resolved[Any]:
    contract = CONTRACTS[group]
    cls = type(plugin)
    if not isinstance(plugin, contract):
        hint = ""
        if isinstance(plugin, type) and issubclass(plugin, contract):
            hint = f" {plugin.__name__} is the class: pass an instance."
        raise PluginContractError(
            f"an instance of {qualified(cls)} is no plugin of {group.value}.{hint} Give a name, a table with a name, "
            f"or an instance of polyshard.interfaces.{contract.__name__}."
        )
    name = cls.__name__
    # Nobody installed it: it is as old as the call that gives it. What says a version all the same is held to it.
    if hasattr(plugin, "api_version"):
        check_api_version(group, plugin, f"the {qualified(cls)} object given for {group.value}")
    refuse_faults(f"the {qualified(cls)} object given for {group.value}", instance_faults(group, plugin))

    def give(context: PluginContext) -> object:
        return plugin

    return Resolved(group=group, name=name, value=qualified(cls), distribution="", version="", factory=give)


def _chosen(group: Group, spec: PluginSpec, offers: list[Offer]) -> Offer:
    named = [offer for offer in offers if offer.name == spec.name]
    if spec.distribution is not None:
        wanted = normalised(spec.distribution)
        named = [offer for offer in named if normalised(offer.distribution) == wanted]
    else:
        # Otherwise installing a package that offers "none" would end everybody's run with the default configuration.
        named = [offer for offer in named if offer.built_in] or named
    if not named:
        raise PluginNotFoundError(_not_found(group, spec, offers))
    if len(named) > 1:
        origins = "; ".join(f"{offer.origin} ({offer.value})" for offer in named)
        distributions = dict.fromkeys(offer.distribution for offer in named)
        if len(distributions) == 1:
            cure = f"Ask the author of {next(iter(distributions))} to keep one of them."
        else:
            cure = "Choose one: " + " or ".join(f'"{each}:{spec.name}"' for each in distributions) + "."
        raise PluginConflictError(
            f"plugin {spec.name!r} of {group.value} is offered {len(named)} times: {origins}. {cure}"
        )
    return named[0]


def _not_found(group: Group, spec: PluginSpec, offers: list[Offer]) -> str:
    lines = [f"no installed plugin of {group.value} is named {spec.label!r}."]
    if spec.distribution is None:
        lines[0] += did_you_mean(spec.name, (offer.name for offer in offers))
    else:
        lines[0] += did_you_mean(spec.label, (offer.label for offer in offers))
    if not offers:
        lines.append("No plugin of this group is installed. Is polyshard itself installed, or only on the path?")
        return "\n".join(lines)
    lines.append("Installed:")
    lines += [f"  {offer.name}  (from {offer.origin})" for offer in offers]
    # Nothing is imported to tell which of them can be used: a misspelt name must not run what nobody named.
    lines.append(
        "Name one of them, or install the package that offers it. `polyshard plugins list` tells their states."
    )
    return "\n".join(lines)
