"""What PyTorch's tests of ``use_orig_params=True`` assert."""

from __future__ import annotations

import pytest
import torch
from fsdp_parity import parameter_groups, use_orig_params, writeback
from fsdp_parity.ranks import Pools

strategies = pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard"])
offloads = pytest.mark.parametrize("offload_params", [False, True])


class TestMultipleParamGroups:
    """Parameter groups, each with hyperparameters of its own, and several optimizers."""

    def test_fsdp_compile(self, ranks: Pools) -> None:
        if ranks.device_type == "cpu":
            # Inductor needs a compiler for C++ there; what FSDP meets is dynamo and the tracing of autograd. The graphs
            # that "eager" runs are those that "aot_eager" traces.
            others = parameter_groups.compile_around, ["eager"], ["shard_grad_op", "no_shard"]
            assert ranks.run(2, *others) == [4, 4]
            assert ranks.run(2, parameter_groups.compile_around, ["aot_eager"], ["full_shard"]) == [2, 2]
        else:
            every = parameter_groups.compile_around, ["inductor"], ["full_shard", "shard_grad_op", "no_shard"]
            assert ranks.run(2, *every) == [6, 6]

    @strategies
    def test_diff_hyperparams(self, ranks: Pools, strategy: str) -> None:
        # On the CPU there is one way to move to the device.
        cases = 24 if ranks.device_type == "cpu" else 48
        assert ranks.run(2, parameter_groups.diff_hyperparams, strategy) == [cases, cases]

    @strategies
    def test_diff_hyperparams_cpu_offload(self, ranks: Pools, strategy: str) -> None:
        assert ranks.run(2, parameter_groups.diff_hyperparams_cpu_offload, strategy) == [2, 2]

    def test_diff_trainability(self, ranks: Pools) -> None:
        assert ranks.run(2, parameter_groups.diff_trainability) == [6, 6]

    def test_multiple_optimizers(self, ranks: Pools) -> None:
        assert ranks.run(2, parameter_groups.multiple_optimizers) == [2, 2]


class TestUnshardReshard:
    """Unsharding more than once between two steps."""

    @offloads
    def test_multiple_forward(self, ranks: Pools, offload_params: bool) -> None:
        assert ranks.run(2, use_orig_params.multiple_forward, offload_params) == [3, 3]

    @offloads
    def test_summon_between_two_forwards(self, ranks: Pools, offload_params: bool) -> None:
        assert ranks.run(2, use_orig_params.summon_between_two_forwards, offload_params) == [3, 3]


class TestParamAccess:
    """Looking at original parameters."""

    def test_access_params_after_forward(self, ranks: Pools) -> None:
        assert ranks.run(2, use_orig_params.access_params_after_forward) == [3, 3]


class TestWriteback:
    """Changing original parameters and gradients."""

    def test_param_writeback(self, ranks: Pools) -> None:
        assert ranks.run(2, writeback.param_writeback) == [4, 4]

    def test_grad_writeback(self, ranks: Pools) -> None:
        assert ranks.run(2, writeback.grad_writeback) == [8, 8]

    def test_writeback_shape_mismatch(self, ranks: Pools) -> None:
        ranks.run(2, writeback.writeback_shape_mismatch)

    def test_writeback_between_fwd_and_bwd_for_no_reshard_raises(self, ranks: Pools) -> None:
        assert ranks.run(2, writeback.writeback_between_forward_and_backward) == [2, 2]

    def test_no_reshard_and_mixed_precision(self, ranks: Pools) -> None:
        assert ranks.run(2, writeback.no_reshard_and_mixed_precision) == [2, 2]


class TestNames:
    """Fully-qualified names."""

    def test_named_parameters_in_forward(self, ranks: Pools) -> None:
        ranks.run(2, use_orig_params.named_parameters_in_forward)


class TestNoSync:
    """Gradients that are not reduced."""

    def test_no_sync_correctness(self, ranks: Pools) -> None:
        assert ranks.run(2, use_orig_params.no_sync_correctness) == [3, 3]

    def test_no_sync_mixed_precision(self, ranks: Pools) -> None:
        assert ranks.run(2, use_orig_params.no_sync_mixed_precision) == [3, 3]


class TestInit:
    """Wrapping."""

    def test_non_uniform_requires_grad(self, ranks: Pools) -> None:
        ranks.run(2, use_orig_params.non_uniform_requires_grad)


class TestMultiTensorApply:
    """Multi-tensor kernels, which ranks without any part of many parameters give empty shards."""

    def test_multi_tensor_apply_size0_tensors_cpu(self) -> None:
        use_orig_params.multi_tensor_apply(torch.device("cpu"))

    @pytest.mark.gpu
    def test_multi_tensor_apply_size0_tensors_cuda(self) -> None:
        use_orig_params.multi_tensor_apply(torch.device("cuda"))

    def test_step_over_empty_shards(self, ranks: Pools) -> None:
        ranks.run(2, use_orig_params.multi_tensor_step_over_empty_shards)
