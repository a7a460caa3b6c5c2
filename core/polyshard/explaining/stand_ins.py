"""Constructs plugins where there are no ranks and perhaps no device: what needs these is stood in for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoints
from typing import Any, TypeVar

from .. import catalog
from ..config import PluginChoice
from ..errors import CollectiveError, PluginLoadError, PolyshardError, StateError
from ..interfaces import Collectives, Group, PluginContext
from ..setup.plugins import ChosenPlugins

_T_co = TypeVar("_T_co", covariant=True)

#: What a factory raises that misses ranks or a device. A wrong option is an error here, too.
_MISSES = (StateError, CollectiveError, PluginLoadError)


@dataclass(frozen=True)
class Tried(catalog.Constructed[_T_co]):
    """A plugin whose factory was called."""

    absent: str = ""
    """Why the instance is a stand-in's; empty where it is the plugin's own."""


@dataclass(frozen=True, slots=True)
class Workbench:
    """Where plugins are constructed to be explained."""

    world_size: int
    """Number of ranks that collectives are stood in for with."""
    entry_points: EntryPoints

    def construct(self, group: Group, choice: PluginChoice, context: PluginContext) -> Tried[Any]:
        """What ``choice`` names, constructed, or a stand-in where it needs ranks or a device.

        Raises what ``catalog.resolve`` and ``catalog.construct`` do for whatever else is wrong.
        """
        resolved: catalog.Resolved[Any] = catalog.resolve(group, choice, self.entry_points)
        inner: list[catalog.Constructed[Any]] = []
        choices: list[object] = []
        refused: list[PolyshardError] = []

        def make_inner(group: Group, choice: PluginChoice, context: PluginContext) -> catalog.Constructed[Any]:
            try:
                inner.append(self.construct(group, choice, context))
            except PolyshardError as error:
                refused.append(error)
                raise
            choices.append(choice)
            return inner[-1]

        try:
            made = catalog.construct(resolved, context, self.entry_points, make_inner)
        except _MISSES as error:
            # What an inner plugin misses is stood in for already: what it raises is wrong anywhere.
            if group not in _STAND_INS or error in refused:
                raise
            return Tried(resolved, self._stand_in(group, context), tuple(inner), tuple(choices), str(error))
        return Tried(resolved, made.instance, made.inner, made.choices)

    def ranks(self, context: PluginContext) -> Collectives:
        """One pretended rank of all of them."""
        collectives: Collectives = self._stand_in(Group.COLLECTIVES, context)
        return collectives

    def _stand_in(self, group: Group, context: PluginContext) -> Any:
        choice = dict(_STAND_INS[group])
        if group is Group.COLLECTIVES:
            choice["world_size"] = self.world_size
        resolved: catalog.Resolved[Any] = catalog.resolve(group, choice, self.entry_points)
        return catalog.construct(resolved, replace(context, process_group=None), self.entry_points).instance


#: Of the groups whose plugins may need what is not there. The other groups' only choose.
_STAND_INS: Mapping[Group, Mapping[str, Any]] = {
    Group.COLLECTIVES: {"name": "polyshard:fake", "rank": 0},
    Group.OFFLOAD: {"name": "polyshard:none"},
}


@dataclass(frozen=True, slots=True)
class StoodInPlugins(ChosenPlugins):
    """Plugins of which some are stand-ins, those among them that a policy names for a unit."""

    workbench: Workbench

    def override(self, group: Group, choice: PluginChoice) -> catalog.Constructed[Any]:
        return self.workbench.construct(group, choice, self.context)
