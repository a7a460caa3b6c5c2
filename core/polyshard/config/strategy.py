"""What each rank keeps."""

from __future__ import annotations

import enum

from ..errors import ConfigError
from .suggestions import did_you_mean, listed


class Strategy(enum.Enum):
    """What each rank keeps of parameters (P), gradients (G) and optimizer state (O)."""

    FULL_SHARD = "full_shard"
    """P, G and O are sharded over all ranks; parameters are released after forward and after backward (ZeRO-3)."""
    SHARD_GRAD_OP = "shard_grad_op"
    """G and O are sharded over all ranks; parameters stay gathered from forward until the end of backward (ZeRO-2)."""
    NO_SHARD = "no_shard"
    """Every rank keeps P, G and O whole; gradients are all-reduced."""
    HYBRID_SHARD = "hybrid_shard"
    """``FULL_SHARD`` inside groups of ``shard_size`` ranks, replicated between the groups (HSDP)."""
    HYBRID_SHARD_ZERO2 = "hybrid_shard_zero2"
    """``SHARD_GRAD_OP`` inside groups of ``shard_size`` ranks, replicated between the groups."""

    @property
    def hybrid(self) -> bool:
        """Whether shards are replicated between groups of ranks."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are released after forward where ``ShardConfig.reshard_after_forward`` is None."""
        return self in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)


def strategy_of(value: Strategy | str) -> Strategy:
    """``value``, or the strategy that it spells; raises ``ConfigError`` for anything else."""
    if isinstance(value, Strategy):
        return value
    names = [strategy.value for strategy in Strategy]
    if isinstance(value, str) and value.casefold() in names:
        return Strategy(value.casefold())
    suggestion = did_you_mean(value, names) if isinstance(value, str) else ""
    raise ConfigError(f"strategy {value!r} does not exist.{suggestion} There are: {listed(names)}.")
