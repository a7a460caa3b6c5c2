"""Names of a module that stand for something else for a while: for programs that cannot be edited."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from polyshard.errors import StateError


class StandIn:
    """Objects in the place of a package's names, until ``undo`` or the end of a ``with`` block."""

    def __init__(self, exchanged: list[tuple[ModuleType, str, Any, Any]]) -> None:
        self._exchanged = exchanged

    def undo(self) -> None:
        """Put the package's own objects back, once; modules that imported ours meanwhile keep them."""
        while self._exchanged:
            module, name, ours, theirs = self._exchanged.pop()
            # Somebody else's since.
            if vars(module).get(name) is ours:
                setattr(module, name, theirs)

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def stand_in(places: Mapping[ModuleType, Mapping[str, Any]], decisive: Collection[str], call: str) -> StandIn:
    """Let names of modules stand for other objects.

    Args:
        places: For each module, the objects for its names. Names that it does not have are left out.
        decisive: Names whose originals no module may hold already. Originals of others are as good as ours.
        call: Of the user, for messages.

    Raises:
        StateError: done already, or modules outside of the package hold what they imported before; names them.
    """
    exchanged = [
        (module, name, ours, vars(module)[name])
        for module, names in places.items()
        for name, ours in names.items()
        if name in vars(module)
    ]
    package = next(iter(places)).__name__.partition(".")[0]
    if any(ours is theirs for _, _, ours, theirs in exchanged):
        raise StateError(f"{call} was called twice. Undo what the first call returned before calling it again.")
    holders = _holders({id(theirs): name for _, name, _, theirs in exchanged if name in decisive}, package)
    if holders:
        listed = ", ".join(f"{module} ({', '.join(sorted(names))})" for module, names in sorted(holders.items()))
        raise StateError(
            f"{call} came too late: {listed} imported the originals before, and would go on using them. Call it before "
            "these modules are imported."
        )
    for module, name, ours, _ in exchanged:
        setattr(module, name, ours)
    return StandIn(exchanged)


def _holders(originals: Mapping[int, str], package: str) -> dict[str, set[str]]:
    """The modules outside of ``package`` and of polyshard that hold one of ``originals``, which are given by id."""
    found: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root == package or root.startswith("polyshard") or not isinstance(module, ModuleType):
            continue
        # Not getattr: modules that import lazily would do so.
        for value in list(vars(module).values()):
            if id(value) in originals:
                found.setdefault(name, set()).add(originals[id(value)])
    return found
