"""Settings of ``torch.distributed.fsdp`` itself, which scripts and trainers pass: taken by value."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, TypeVar

from polyshard.errors import ConfigTypeError

T = TypeVar("T")

_THEIRS = "torch.distributed.fsdp."


class TorchNamed(Enum):
    """An enum whose members equal those of torch's enum of the same name."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        theirs = type(other)
        same = theirs.__module__.startswith(_THEIRS) and theirs.__name__ == type(self).__name__
        return same and getattr(other, "name", None) == self.name

    # By the member's name, as torch's.
    __hash__ = Enum.__hash__


def own(value: Any, kind: type[T], argument: str) -> T | None:
    """``value`` as a ``kind``: itself, what torch's class of the same name says, or None for None.

    Raises:
        ConfigTypeError: it is neither.
    """
    if value is None or isinstance(value, kind):
        return value
    names = [each.__name__ for each in type(value).__mro__ if each.__module__.startswith(_THEIRS)]
    for ours in (kind, *kind.__subclasses__()):
        if ours.__name__ not in names[:1]:
            continue
        if issubclass(ours, Enum) and isinstance(value, Enum) and value.name in ours.__members__:
            return ours[value.name]
        if dataclasses.is_dataclass(ours):
            fields = dataclasses.fields(ours)
            return ours(**{field.name: getattr(value, field.name) for field in fields})
    raise ConfigTypeError(
        f"`{argument}` should be a {kind.__name__} but got {value!r} of {type(value)}. Pass polyshard_fsdp's, or the "
        "one of torch.distributed.fsdp."
    )


def is_torchs(value: object, name: str) -> bool:
    """Whether the class of ``value`` is, or derives from, the class ``name`` of ``torch.distributed.fsdp``."""
    return any(each.__name__ == name and each.__module__.startswith(_THEIRS) for each in type(value).__mro__)
