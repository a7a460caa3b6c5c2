"""What a state dict is to be made of, and where one comes from."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeVar

from ..errors import ConfigError

E = TypeVar("E", bound=enum.Enum)


class StateForm(enum.Enum):
    """What stands for a tensor of a sharded model in a state dict."""

    SHARDED = "sharded"
    """A ``CheckpointTensor`` over this rank's memory, of the whole tensor's shape: nothing is copied or sent."""
    DTENSOR = "dtensor"
    """A ``DTensor`` over this rank's memory where the layout allows it (see ``polyshard.as_dtensor``), a
    ``CheckpointTensor`` elsewhere."""
    FULL = "full"
    """A whole tensor in host memory, on every rank."""
    FULL_ON_RANK_0 = "full_on_rank_0"
    """A whole tensor in host memory on rank 0; other ranks get an empty state dict."""


class StateOrigin(enum.Enum):
    """Which ranks have the state dict that a model is given."""

    EVERY_RANK = "every_rank"
    """Each rank has one, with all of what it needs."""
    RANK_0 = "rank_0"
    """Rank 0 has whole tensors, and sends them one by one; what other ranks give is not looked at."""


@dataclass(frozen=True)
class StateOptions:
    """Settings of the functions of ``polyshard.state``; the same on every rank. Enums may be given as their text.

    Raises:
        ConfigError: a text that stands for nothing.
    """

    form: StateForm | str = StateForm.SHARDED
    """What ``get_...`` returns."""
    origin: StateOrigin | str = StateOrigin.EVERY_RANK
    """Where ``set_...`` takes values from."""
    strict: bool = True
    """Whether ``set_...`` refuses names of a model that are missing or unexpected. Optimizers are always matched."""
    frozen: bool = True
    """Whether parameters that need no gradient are in the model's state dict. Without them, as adapters are saved,
    ``set_...`` takes a state dict with or without them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", _member(StateForm, "form", self.form))
        object.__setattr__(self, "origin", _member(StateOrigin, "origin", self.origin))


def _member(kind: type[E], setting: str, value: E | str) -> E:
    try:
        return kind(value)
    except ValueError as error:
        known = ", ".join(repr(each.value) for each in kind)
        raise ConfigError(f"StateOptions: {setting} is {value!r}; give one of {known}.") from error
