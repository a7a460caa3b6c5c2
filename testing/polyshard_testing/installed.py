"""The suites of installed plugins, by their names alone, as ``polyshard plugins check`` runs them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pkgutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
from polyshard import registry
from polyshard.errors import ConfigError, WorldSizeError
from polyshard.interfaces import Collectives, Group, PluginContext, PolicyContext
from typing_extensions import override

from .collectives import CollectivesSuite
from .listener import ListenerSuite
from .offload import OffloadSuite
from .plugin import PluginSuite, plugin_context
from .policy import PolicySuite
from .precision import PrecisionSuite
from .ranks import Rank, run_threads

T = TypeVar("T")


@functools.cache
def _resolved(group: Group, label: str, options: str) -> registry.Resolved:
    # Reading what is installed takes longer than many a test, and each makes several plugins.
    return registry.resolve(group, {"name": label, **tomllib.loads(options).get("table", {})})


class InstalledPlugin(PluginSuite):
    """To be mixed into the suite of a group: constructs the plugin that its attributes name."""

    label: ClassVar[str]
    """Name of the plugin: ``"distribution:name"``."""
    options: ClassVar[str] = ""
    """A TOML document whose ``table`` has its options."""

    @property
    def resolved(self) -> registry.Resolved:
        return _resolved(self.group, self.label, self.options)

    @override
    def make(self) -> Any:
        context = plugin_context(device=self.device)
        if self.group is Group.PLUGINS:
            # Listeners alone know them, as of the models that their suite shards.
            context = dataclasses.replace(context, rank=0, world_size=2)
        return registry.construct(self.resolved, context).instance

    def try_making(self) -> None:
        """Raise the error that keeps the plugin from being made."""
        self.make()

    @override
    def factory(self) -> Callable[..., Any]:
        return self.resolved.factory


class InstalledCollectives(InstalledPlugin, CollectivesSuite):
    """Collectives between ranks that the plugin can serve: threads where its factory has ``make_world``, or processes.

    Options called ``rank`` and ``world_size`` get those of each rank, unless they were given: a backend that pretends a
    rank needs its number.
    """

    timeout_s = 20.0

    @override
    def try_making(self) -> None:
        """Raise the error that keeps the plugin from being made for any number of ranks; test with the others."""
        served, refusals = [], []
        for world_size in self.world_sizes:
            try:
                self.run_ranks(world_size, type)
            except WorldSizeError as error:
                refusals.append(error)
            else:
                served.append(world_size)
        if not served:
            raise refusals[0]
        type(self).world_sizes = tuple(served)

    @property
    def _in_threads(self) -> bool:
        return hasattr(self.factory(), "make_world")

    @override
    def make(self, rank: Rank) -> Collectives:  # type: ignore[override]
        return self._made(rank, plugin_context(device=rank.device))

    @override
    def make_impatient(self, rank: Rank, timeout: timedelta) -> Collectives:
        return self._made(rank, dataclasses.replace(plugin_context(device=rank.device), timeout=timeout))

    def _made(self, rank: Rank, context: PluginContext) -> Collectives:
        given = {"rank": rank.rank, "world_size": rank.world_size}
        if self._in_threads and isinstance(rank.collectives, Mapping):
            given["world"] = rank.collectives["world"]
        taken = inspect.signature(self.factory()).parameters
        options = {name: value for name, value in given.items() if name in taken} | dict(self.resolved.options)
        chosen = dataclasses.replace(self.resolved, options=options)
        made: Collectives = registry.construct(chosen, context).instance
        if made.world_size != rank.world_size:
            raise ConfigError(
                f"collectives {self.label!r} serve {made.world_size} ranks where {rank.world_size} processes have "
                "joined a group of torch.distributed; let them take that group, or an option world_size"
            )
        return made

    @override
    def start_ranks(self, world_size: int, fn: Callable[[Rank], T]) -> list[T]:
        if self._in_threads:
            return run_threads(world_size, fn, self.timeout_s, self.label, self.factory())
        return super().start_ranks(world_size, fn)

    @override
    def _in_kept_ranks(self, world_size: int, fn: Callable[[Rank], T]) -> list[T]:
        return self.start_ranks(world_size, fn) if self._in_threads else super()._in_kept_ranks(world_size, fn)


class InstalledPolicy(InstalledPlugin, PolicySuite):
    """A policy, of a model that it can serve."""

    model_factory: ClassVar[str] = ""
    """``"package.module:function"`` that builds the model; empty for the suite's own."""

    @override
    def try_making(self) -> None:
        """Raise the error that keeps the policy from being made, or from serving the model."""
        policy = self.make()
        try:
            policy.plan(self.model(), PolicyContext())
        except ConfigError as error:
            raise ConfigError(
                f"{error} (--model PKG:FACTORY names what builds the model that it is tested with)"
            ) from error

    @override
    def model(self) -> torch.nn.Module:
        if not self.model_factory:
            return super().model()
        built: torch.nn.Module = pkgutil.resolve_name(self.model_factory)()
        return built


OF_GROUP: Mapping[Group, type] = {
    Group.COLLECTIVES: CollectivesSuite,
    Group.PRECISION: PrecisionSuite,
    Group.OFFLOAD: OffloadSuite,
    Group.POLICIES: PolicySuite,
    Group.PLUGINS: ListenerSuite,
}


def suites_of(
    module: str, group: str, label: str, options: str, attributes: Mapping[str, Any], devices: Sequence[str]
) -> dict[str, type]:
    """The classes of tests of one plugin, as its author could have written them: one for each device.

    Args:
        module: name of the module that is to hold them.
        group: the plugin's entry-point group.
        label: its name: ``"distribution:name"``.
        options: an inline table of TOML, which has values that JSON has not.
        attributes: further ones of the classes.
        devices: ``"cpu"``, ``"cuda"``.
    """
    of_group = Group(group)
    bases: dict[Group, type] = {Group.COLLECTIVES: InstalledCollectives, Group.POLICIES: InstalledPolicy}
    found = {}
    for device in devices:
        ranks = {"ranks": "processes", "device_type": device} if of_group is Group.COLLECTIVES else {}
        own = {"group": of_group, "label": label, "options": f"table = {options}", "device": torch.device(device)}
        name = f"Test{device.title()}"
        base = bases.get(of_group, InstalledPlugin)
        found[name] = type(name, (base, OF_GROUP[of_group]), {"__module__": module, **own, **ranks, **attributes})
    return found
