"""Mixed precision, as PyTorch's FSDP tests of that name assert it, and with the numbers of an unsharded reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_parity import mixed_eval, mixed_submodules
from fsdp_parity import mixed_precision as bodies
from fsdp_parity.mixed_models import MP_ALL, MP_ONLY_PARAM_AND_BUFFER
from fsdp_parity.ranks import Pools
from polyshard_fsdp import MixedPrecision, ShardingStrategy


@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD])
def test_mixed_precision(ranks: Pools, world_size: int, strategy: ShardingStrategy) -> None:
    ranks.run(world_size, bodies.end_to_end_once, strategy)


def test_mixed_precision_e2e_full_shard(ranks: Pools) -> None:
    ranks.run(2, bodies.end_to_end)


@pytest.mark.parametrize(
    "mixed_precision",
    [
        MixedPrecision(reduce_dtype=torch.float16),
        MP_ONLY_PARAM_AND_BUFFER,
        MP_ALL,
        MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16),
    ],
    ids=["reduce", "params_and_buffers", "all", "params_and_reduce_differ"],
)
def test_embedding(ranks: Pools, mixed_precision: MixedPrecision) -> None:
    ranks.run(2, bodies.embedding_table, mixed_precision)


@pytest.mark.parametrize("world_size", [2, 1])
def test_grads_reduced_precision(ranks: Pools, world_size: int) -> None:
    """Gradients kept in fp16, over two ranks and on one."""
    ranks.run(world_size, bodies.gradients_in_low_precision)


@pytest.mark.parametrize("convert_sync_bn", [True, False])
def test_mp_batchnorm(ranks: Pools, convert_sync_bn: bool) -> None:
    """Norms apart, without mixed precision, with a warning."""
    ranks.run(2, bodies.norms_in_full_precision, convert_sync_bn)


@pytest.mark.parametrize(
    "body",
    [
        bodies.batch_norms_of_a_resnet,
        bodies.gradients_of_inputs,
        mixed_eval.inputs_of_a_root_without_parameters,
        mixed_eval.full_precision_losses_in_eval,
        mixed_eval.full_precision_buffers_in_eval,
        mixed_eval.full_precision_reduction_in_eval,
        mixed_submodules.half_in_one_submodule,
        mixed_submodules.half_in_one_submodule_that_casts_itself,
        mixed_submodules.half_in_one_submodule_without_casts,
        mixed_submodules.precisions_that_do_not_fit,
        mixed_submodules.different_precisions,
        mixed_submodules.inputs_from_outside,
        mixed_submodules.averaged_parameters_in_eval,
    ],
    ids=lambda body: body.__name__,
)
def test_precisions(ranks: Pools, body: Callable[..., Any]) -> None:
    ranks.run(2, body)


def test_mixed_precision_with_ignored_module(ranks: Pools) -> None:
    """Nothing is cast for it."""
    ranks.run(1, mixed_submodules.ignored_module)
