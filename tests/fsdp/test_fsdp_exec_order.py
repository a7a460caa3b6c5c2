"""What PyTorch's FSDP tests ask of the execution-order checks under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``."""

from __future__ import annotations

import pytest
from fsdp_parity import exec_order
from fsdp_parity.ranks import Pools
from polyshard_fsdp import ShardingStrategy

strategies = pytest.mark.parametrize("strategy", exec_order.STRATEGIES)


@strategies
def test_invalid_first_iter_order(ranks: Pools, strategy: ShardingStrategy) -> None:
    ranks.run(2, exec_order.ranks_differ_at_first, strategy)


@strategies
def test_number_of_parameters_differs(ranks: Pools, strategy: ShardingStrategy) -> None:
    ranks.run(2, exec_order.ranks_differ_in_number, strategy)


@strategies
@pytest.mark.parametrize("iterations", [1, 3])
def test_invalid_later_iter_order(ranks: Pools, strategy: ShardingStrategy, iterations: int) -> None:
    ranks.run(2, exec_order.order_changes_later, strategy, iterations)


def test_more_gathers_than_at_first(ranks: Pools) -> None:
    ranks.run(2, exec_order.more_than_at_first)


@strategies
def test_train_eval(ranks: Pools, strategy: ShardingStrategy) -> None:
    ranks.run(2, exec_order.eval_is_unchecked, strategy)


def test_checks_cost_two_gathers_a_unit_in_the_first_iteration_alone(ranks: Pools) -> None:
    # Two units run in a forward: the root and one of the two paths.
    assert ranks.run(2, exec_order.gathers) == [([2, 2, 2], [6, 2, 2])] * 2
