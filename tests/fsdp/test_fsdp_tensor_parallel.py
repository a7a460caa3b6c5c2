"""FSDP over what tensor parallelism has cut, with numbers: four ranks, two of each."""

from __future__ import annotations

from fsdp_parity import tensor_parallel
from fsdp_parity.ranks import Pools


def test_parity_with_unsharded(ranks: Pools) -> None:
    ranks.run(4, tensor_parallel.parity_with_unsharded)


def test_state_dicts(ranks: Pools) -> None:
    ranks.run(4, tensor_parallel.state_dicts)


def test_sync_module_states(ranks: Pools) -> None:
    ranks.run(4, tensor_parallel.states_come_from_the_first_data_rank)


def test_refusals(ranks: Pools) -> None:
    ranks.run(4, tensor_parallel.refusals)
