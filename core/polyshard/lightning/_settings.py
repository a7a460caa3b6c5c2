"""What a user gives to a strategy, beside the devices that Lightning chooses."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..config import ShardConfig, did_you_mean
from ..errors import ConfigError
from ..setup.materialize import Initializer


class StateDictType(enum.Enum):
    """What a checkpoint is."""

    FULL = "full"
    """One file of whole tensors, written by rank 0, as Lightning writes it without shards."""
    SHARDED = "sharded"
    """A directory of ``polyshard.checkpoint``, of which each rank writes its part."""

    @classmethod
    def parse(cls, value: StateDictType | str) -> StateDictType:
        """``value``, which may be its string.

        Raises:
            ConfigError: it is neither.
        """
        try:
            return cls(value)
        except ValueError as error:
            names = [each.value for each in cls]
            hint = did_you_mean(value, names) if isinstance(value, str) else ""
            raise ConfigError(
                f"state_dict_type {value!r} does not exist.{hint} There are: {', '.join(names)}."
            ) from error


@dataclass(frozen=True)
class Settings:
    """Of either strategy."""

    config: ShardConfig
    """As the user gave it."""
    state_dict_type: StateDictType
    initializer: Initializer | None
