"""Mixed precision, as PyTorch's FSDP tests of that name assert it, and with the numbers of an unsharded reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from fsdp_parity import mixed_eval, mixed_submodules
from fsdp_parity import mixed_precision as bodies
from fsdp_parity.mixed_models import MP_ALL, MP_ALL_DIFFERENT, MP_NONE, MP_ONLY_PARAM_AND_BUFFER, MP_ONLY_REDUCE
from fsdp_parity.models import subtest_name
from fsdp_parity.ranks import Pools
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

_OFFLOAD = CPUOffload(offload_params=True)
_NAMES = {
    str(_OFFLOAD): "offload_true",
    str(CPUOffload(offload_params=False)): "offload_false",
    str(MP_ALL): "mp_fp16",
    str(MP_ONLY_REDUCE): "mp_only_reduce",
    str(MP_ONLY_PARAM_AND_BUFFER): "mp_only_param_and_buf",
    str(MP_NONE): "mp_no_mp",
    str(MP_ALL_DIFFERENT): "mp_diff_buffer_reduce",
    str(torch.float32): "fp32",
    str(torch.float64): "fp64",
    "enable_sharded_grad_scaler": "enable_sharded_grad_scaler",
}
_CASES = list(
    itertools.product(
        (MP_ALL, MP_ONLY_REDUCE, MP_ONLY_PARAM_AND_BUFFER, MP_NONE, MP_ALL_DIFFERENT),
        (_OFFLOAD, CPUOffload(offload_params=False)),
        (torch.float32, torch.float64),
        ("enable_sharded_grad_scaler", None),
    )
)
_PREFETCHES: list[bodies.Prefetch] = list(
    itertools.product((False, True), (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST))
)


@pytest.mark.parametrize("world_size", [2, 1])
def test_mixed_precision_no_reshard_after_forward(ranks: Pools, world_size: int) -> None:
    """SHARD_GRAD_OP, over two ranks and on one."""
    arguments = (MP_ALL_DIFFERENT, _OFFLOAD, torch.float64, False, ShardingStrategy.SHARD_GRAD_OP, [(False, None)])
    ranks.run(world_size, bodies.end_to_end, *arguments)


@pytest.mark.parametrize("case", range(len(_CASES)), ids=[subtest_name(_NAMES, *case) for case in _CASES])
def test_mixed_precision_e2e_full_shard(ranks: Pools, case: int) -> None:
    """FULL_SHARD; with two ways to prefetch a case, so that every setting meets all six."""
    mixed_precision, cpu_offload, full_dtype, scaler = _CASES[case]
    prefetches = [_PREFETCHES[(case + offset) % len(_PREFETCHES)] for offset in (0, 3)]
    arguments = (mixed_precision, cpu_offload, full_dtype, scaler is not None, ShardingStrategy.FULL_SHARD, prefetches)
    ranks.run(2, bodies.end_to_end, *arguments)


def test_mixed_precision_e2e_full_shard_on_one_rank(ranks: Pools) -> None:
    """FULL_SHARD where there is nothing to cut."""
    arguments = (MP_ALL_DIFFERENT, _OFFLOAD, torch.float64, False, ShardingStrategy.FULL_SHARD, [(False, None)])
    ranks.run(1, bodies.end_to_end, *arguments)


def test_mp_embedding_reduce(ranks: Pools) -> None:
    """Reduction in fp16, all else in fp32."""
    ranks.run(2, bodies.embedding_table, MixedPrecision(reduce_dtype=torch.float16))


def test_mp_embedding_only_params_and_bufs(ranks: Pools) -> None:
    """The reduction follows the parameters' dtype."""
    ranks.run(2, bodies.embedding_table, MP_ONLY_PARAM_AND_BUFFER)


def test_mp_embedding_default(ranks: Pools) -> None:
    """All in fp16."""
    ranks.run(2, bodies.embedding_table, MP_ALL)


def test_mp_embedding_params_and_reduce_diff(ranks: Pools) -> None:
    """Reduction in fp32, all else in fp16."""
    mixed_precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16)
    ranks.run(2, bodies.embedding_table, mixed_precision)


def test_mixed_precision_resnet(ranks: Pools) -> None:
    """As many wrapped batch norms as there are batch norms."""
    ranks.run(2, bodies.batch_norms_of_a_resnet)


@pytest.mark.parametrize("world_size", [2, 1])
def test_grads_reduced_precision(ranks: Pools, world_size: int) -> None:
    """Gradients kept in fp16, over two ranks and on one."""
    ranks.run(world_size, bodies.gradients_in_low_precision)


@pytest.mark.parametrize("convert_sync_bn", [True, False])
def test_mp_batchnorm(ranks: Pools, convert_sync_bn: bool) -> None:
    """Norms apart, without mixed precision, with a warning."""
    ranks.run(2, bodies.norms_in_full_precision, convert_sync_bn)


def test_eval_root_cast_inputs(ranks: Pools) -> None:
    """What the root does to its inputs in eval."""
    ranks.run(2, mixed_eval.inputs_of_a_root_without_parameters)


def test_full_precision_in_eval(ranks: Pools) -> None:
    """Dtypes and values of losses."""
    ranks.run(2, mixed_eval.full_precision_losses_in_eval)


def test_full_precision_in_eval_buffers(ranks: Pools) -> None:
    """Dtypes and values of buffers."""
    ranks.run(2, mixed_eval.full_precision_buffers_in_eval)


def test_full_precision_in_eval_comm(ranks: Pools) -> None:
    """Dtypes and values of reductions."""
    ranks.run(2, mixed_eval.full_precision_reduction_in_eval)


def test_input_grads_with_param_mixed_precision(ranks: Pools) -> None:
    """Gradients of an input that was cast."""
    ranks.run(2, bodies.gradients_of_inputs)


def test_mixed_precision_with_ignored_module(ranks: Pools) -> None:
    """Nothing is cast for it."""
    ranks.run(1, mixed_submodules.ignored_module)


def test_float16_on_one_submodule(ranks: Pools) -> None:
    """fp16 in a child that casts."""
    ranks.run(2, mixed_submodules.half_in_one_submodule)


def test_float16_on_one_submodule_skip_inputs(ranks: Pools) -> None:
    """fp16 in a child that does not cast, around a layer that does."""
    ranks.run(2, mixed_submodules.half_in_one_submodule_that_casts_itself)


def test_float16_on_one_submodule_skip_inputs_error(ranks: Pools) -> None:
    """fp16 in a child where nothing casts."""
    ranks.run(2, mixed_submodules.half_in_one_submodule_without_casts)


def test_submodules_with_different_precisions_error(ranks: Pools) -> None:
    """The child's fp16 output meets the root's fp32 layer."""
    ranks.run(2, mixed_submodules.precisions_that_do_not_fit)


def test_submodules_with_different_precisions(ranks: Pools) -> None:
    """fp16 in the last child, fp32 in the root."""
    ranks.run(2, mixed_submodules.different_precisions)


def test_submodules_with_external_inputs(ranks: Pools) -> None:
    """A tensor made in the root's forward."""
    ranks.run(2, mixed_submodules.inputs_from_outside)


def test_train_ema_eval_flow(ranks: Pools) -> None:
    """Train, average, evaluate."""
    ranks.run(2, mixed_submodules.averaged_parameters_in_eval)
