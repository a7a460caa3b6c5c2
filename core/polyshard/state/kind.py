"""What decides which state an optimizer has, and what it does with it: its class, and some of its settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from .optimizers import Joint
from .source import Source, opening

#: How a step is carried out, not what it computes: left as the optimizer was made.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
_NOT_COMPARED = IMPLEMENTATION | {"params", "param_names"}


#: The class of an optimizer, or of each of several.
Kind = Mapping[str, str] | Sequence[Mapping[str, str]]


def described(joint: Joint) -> Kind:
    """The class of each optimizer, for a checkpoint."""
    kinds = [_described(each) for each in joint.members]
    return kinds if len(kinds) > 1 else kinds[0]


def _described(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {"module": type(optimizer).__module__, "class": type(optimizer).__qualname__}


def require_same_kinds(
    saved: Kind | None, groups: Sequence[Mapping[str, Any]], joint: Joint, source: Source, rank: int
) -> None:
    """Refuse a source whose state other kinds of optimizers made.

    Args:
        saved: What ``described`` gave at the save; None where that is not told.
        groups: The saved settings of each group.
        joint: To be loaded, with as many groups.
        source: For errors.
        rank: For errors.

    Raises:
        ConfigError: as ``require_same_kind``, or they are not as many.
    """
    kinds = [saved] if saved is None or isinstance(saved, Mapping) else list(saved)
    if saved is not None and len(kinds) != len(joint.members):
        names = ", ".join(kind["class"] for kind in kinds if kind is not None)
        raise ConfigError(
            f"{opening(source)} was saved by {len(kinds)} optimizers ({names}), and is loaded into "
            f"{len(joint.members)} (rank {rank}). Give those that saved it, in the same order."
        )
    for (optimizer, own), kind in zip(joint.parts(), kinds * (len(joint.members) // len(kinds)), strict=True):
        require_same_kind(kind, groups[own], optimizer, source, rank)


def require_same_kind(
    saved: Mapping[str, str] | None,
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    source: Source,
    rank: int,
) -> None:
    """Refuse a source whose state another kind of optimizer made.

    Numbers such as the learning rate may differ: the checkpoint's are taken. What is on or off, None or something, may
    not, nor whether there is a momentum: it decides which state there is, or what it means.

    Args:
        saved: What ``described`` gave at the save; None where that is not told.
        groups: The saved settings of each group.
        optimizer: To be loaded, with as many groups.
        source: For errors.
        rank: For errors.

    Raises:
        ConfigError: naming the classes, or the setting.
    """
    mine = _described(optimizer)
    if saved is not None and saved["class"] != mine["class"]:
        raise ConfigError(
            f"{opening(source)} was saved by {saved['module']}.{saved['class']}, whose state means nothing to "
            f"{mine['module']}.{mine['class']} (rank {rank}). Load it with the optimizer that saved it, or without one."
        )
    for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        different = list(_differences(settings, group))
        if saved != mine:
            # Of a class of the same name, or of one that is not told, the names of the settings are the best witness.
            different += [
                f"'{name}' is missing in the checkpoint" for name in sorted(optimizer.defaults.keys() - settings.keys())
            ]
            different += [
                f"'{name}' is missing in the optimizer"
                for name, value in sorted(settings.items())
                if name not in group and name not in _NOT_COMPARED and (value is None or isinstance(value, bool))
            ]
        if different:
            raise ConfigError(
                f"Group {index} of the optimizer does not fit the state in {source.described} (rank {rank}): "
                f"{'; '.join(different)}. Make the optimizer, here {mine['class']}, as it was when it was saved, or "
                "load without it."
            )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted((saved.keys() & current.keys()) - _NOT_COMPARED):
        if _choice(name, saved[name]) != _choice(name, current[name]):
            yield f"'{name}' was {saved[name]!r} and is {current[name]!r}"


def _choice(name: str, value: Any) -> object:
    """What of a setting may not change."""
    if value is None or isinstance(value, bool):
        return value
    return bool(value != 0) if name == "momentum" else "a value"
