"""What PyTorch's tests of ``use_orig_params=True`` assert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_parity import parameter_groups, use_orig_params, writeback
from fsdp_parity.ranks import Pools


class TestMultipleParamGroups:
    """Parameter groups, each with hyperparameters of its own, and several optimizers."""

    def test_fsdp_compile(self, ranks: Pools) -> None:
        # Inductor needs a compiler for C++ on the CPU; what FSDP meets is dynamo.
        backend = "eager" if ranks.device_type == "cpu" else "inductor"
        ranks.run(2, parameter_groups.compile_around, backend, "full_shard", True)

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("strategy", "skip_fsdp_guards"), [("full_shard", False), ("shard_grad_op", True), ("no_shard", False)]
    )
    def test_fsdp_compile_otherwise(self, ranks: Pools, strategy: str, skip_fsdp_guards: bool) -> None:
        backend = "aot_eager" if ranks.device_type == "cpu" else "inductor"
        ranks.run(2, parameter_groups.compile_around, backend, strategy, skip_fsdp_guards)

    @pytest.mark.parametrize(
        "strategy",
        ["full_shard", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("shard_grad_op", "no_shard"))],
    )
    def test_diff_hyperparams(self, ranks: Pools, strategy: str) -> None:
        ranks.run(2, parameter_groups.diff_hyperparams, strategy)

    @pytest.mark.parametrize(
        "strategy", ["full_shard", "no_shard", pytest.param("shard_grad_op", marks=pytest.mark.nightly)]
    )
    def test_diff_hyperparams_cpu_offload(self, ranks: Pools, strategy: str) -> None:
        ranks.run(2, parameter_groups.diff_hyperparams_cpu_offload, strategy)


@pytest.mark.parametrize(
    "body",
    [
        parameter_groups.diff_trainability,
        parameter_groups.multiple_optimizers,
        use_orig_params.access_params_after_forward,
        writeback.param_writeback,
        writeback.grad_writeback,
        writeback.writeback_shape_mismatch,
        writeback.writeback_between_forward_and_backward,
        writeback.no_reshard_and_mixed_precision,
        use_orig_params.named_parameters_in_forward,
        use_orig_params.no_sync_correctness,
        use_orig_params.no_sync_mixed_precision,
        use_orig_params.non_uniform_requires_grad,
    ],
    ids=lambda body: body.__name__,
)
def test_original_parameters(ranks: Pools, body: Callable[..., Any]) -> None:
    """Access to parameters, changes to them and to their gradients, names, ``no_sync``."""
    ranks.run(2, body)


@pytest.mark.parametrize(
    ("body", "offload_params"),
    [
        (use_orig_params.multiple_forward, True),
        (use_orig_params.summon_between_two_forwards, False),
        pytest.param(use_orig_params.multiple_forward, False, marks=pytest.mark.nightly),
        pytest.param(use_orig_params.summon_between_two_forwards, True, marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_unshard_more_than_once(ranks: Pools, body: Callable[..., Any], offload_params: bool) -> None:
    ranks.run(2, body, offload_params)


class TestMultiTensorApply:
    """Multi-tensor kernels, which ranks without any part of many parameters give empty shards."""

    def test_multi_tensor_apply_size0_tensors_cpu(self) -> None:
        use_orig_params.multi_tensor_apply(torch.device("cpu"))

    @pytest.mark.gpu
    def test_multi_tensor_apply_size0_tensors_cuda(self) -> None:
        use_orig_params.multi_tensor_apply(torch.device("cuda"))

    def test_step_over_empty_shards(self, ranks: Pools) -> None:
        ranks.run(2, use_orig_params.multi_tensor_step_over_empty_shards)
