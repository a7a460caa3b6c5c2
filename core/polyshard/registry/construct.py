"""Constructs plugins, and what these construct of other plugins by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoints
from typing import Any, Generic, TypeVar

from ..config import PluginChoice, PluginSpec
from ..errors import StateError
from ..interfaces import Group, PluginContext
from .resolve import resolve
from .resolved import Resolved

_T_co = TypeVar("_T_co", covariant=True)


@dataclass(frozen=True)
class Constructed(Generic[_T_co]):
    """A plugin that was constructed, and the plugins that its factory constructed by name."""

    resolved: Resolved[_T_co]
    instance: _T_co
    inner: tuple[Constructed[Any], ...] = ()
    """In the order in which the factory asked for them, each with inner ones of its own."""
    choices: tuple[object, ...] = ()
    """What it asked for each of them by: usually an option of its own."""

    def walk(self) -> Iterator[Constructed[Any]]:
        """This one, and all inside of it: an outer one before its inner ones."""
        yield self
        for each in self.inner:
            yield from each.walk()


#: Makes a plugin that a factory asks for.
InnerMaker = Callable[[Group, PluginChoice, PluginContext], Constructed[Any]]


def construct(
    resolved: Resolved[_T_co],
    context: PluginContext,
    entry_points: EntryPoints | None = None,
    make_inner: InnerMaker | None = None,
) -> Constructed[_T_co]:
    """Construct ``resolved``; its factory may construct others through ``context.construct``.

    ``entry_points``: what ``scan`` returned; None reads the installed metadata anew where the factory asks
    for a plugin. ``make_inner``: makes those that the factory asks for; by default they are resolved and constructed.

    Raises what ``Resolved.construct`` does, and what ``resolve`` does for the names that the factory asks for.
    """

    def usual(group: Group, choice: PluginChoice, asked_with: PluginContext) -> Constructed[Any]:
        return construct(resolve(group, choice, entry_points), asked_with, entry_points)

    inner = _Inner(resolved.described, make_inner or usual)
    try:
        instance = resolved.construct(replace(context, name=resolved.name, constructor=inner))
    finally:
        inner.ended = True
    return Constructed(resolved, instance, tuple(inner.made), tuple(inner.choices))


class _Inner:
    """Serves ``PluginContext.construct`` while one factory runs."""

    def __init__(self, owner: str, make: InnerMaker) -> None:
        self._owner = owner
        self._make = make
        self.made: list[Constructed[Any]] = []
        self.choices: list[object] = []
        self.ended = False

    def __call__(self, context: PluginContext, group: Group, choice: PluginChoice) -> Any:
        if self.ended:
            asked = PluginSpec.parse(choice)
            name = asked.label if isinstance(asked, PluginSpec) else type(asked).__name__
            raise StateError(
                f"{self._owner} asked for {name!r} of {group.value} after its construction, when ranks have compared "
                "their plugins already. Construct it in the factory."
            )
        made = self._make(group, choice, context)
        self.made.append(made)
        self.choices.append(choice)
        return made.instance
