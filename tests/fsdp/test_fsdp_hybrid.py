"""What PyTorch's FSDP tests ask of the hybrid strategies, with numbers at world size 4."""

from __future__ import annotations

from fsdp_parity import hybrid
from fsdp_parity.ranks import Pools


def test_parity_with_ddp(ranks: Pools) -> None:
    ranks.run(4, hybrid.parity_with_ddp)


def test_accumulation(ranks: Pools) -> None:
    ranks.run(4, hybrid.accumulation)


def test_mixed_precision(ranks: Pools) -> None:
    ranks.run(4, hybrid.mixed_precision)


def test_other_groups_are_refused(ranks: Pools) -> None:
    ranks.run(4, hybrid.other_groups_are_refused)


def test_sync_module_states(ranks: Pools) -> None:
    ranks.run(4, hybrid.states_come_from_the_first_rank)


def test_hybrid_strategies_beside_others(ranks: Pools) -> None:
    ranks.run(4, hybrid.a_mixture)
    ranks.run(4, hybrid.a_mixture_over_fewer_ranks_is_refused)
