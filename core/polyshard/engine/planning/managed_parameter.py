"""A parameter of the user's model, under its names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(eq=False, slots=True)
class ManagedParameter:
    """A parameter of the user's model, and every place that refers to it.

    One object for whoever knows the parameter: ``names`` change where its model becomes part of a larger one.
    """

    original: nn.Parameter
    """The user's own object, which outside compute views the master shard."""
    names: tuple[str, ...]
    """Every fully-qualified name; more than one for a shared parameter."""
    sites: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute) that holds it."""


def names_behind(prefix: str, parameter: ManagedParameter) -> tuple[str, ...]:
    """Its names where the module that they are relative to is called ``prefix``; empty for the outermost."""
    return tuple(f"{prefix}.{name}" if prefix else name for name in parameter.names)
