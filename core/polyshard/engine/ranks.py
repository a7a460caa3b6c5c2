"""Which ranks share a unit's shards, and which hold the same shard."""

from __future__ import annotations

from dataclasses import dataclass

from ..interfaces import Collectives


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The ranks of a strategy: ``shard`` times ``replicate`` of them.

    ========================  ===============  ==================
    strategy                  shard            replicate
    ========================  ===============  ==================
    FULL_SHARD, SHARD_GRAD_OP all ranks        none
    HYBRID_SHARD (and ZeRO-2) ``shard_size``   the other ranks
    NO_SHARD                  none             all ranks
    ========================  ===============  ==================
    """

    world: Collectives
    """All ranks; what the plugin gave."""
    shard: Collectives | None
    """Ranks among which a unit is cut; None where each rank holds whole units."""
    replicate: Collectives | None
    """Ranks that hold the same shard; None where there is no other."""

    @property
    def shard_size(self) -> int:
        """Number of shards of a unit."""
        return self.shard.world_size if self.shard else 1

    @property
    def shard_rank(self) -> int:
        """Index of this rank's shard."""
        return self.shard.rank if self.shard else 0

    @property
    def replicate_size(self) -> int:
        """Number of ranks that hold the same shard."""
        return self.replicate.world_size if self.replicate else 1

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.shard is None and self.replicate is None
