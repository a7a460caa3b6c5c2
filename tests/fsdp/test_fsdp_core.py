"""What PyTorch's core FSDP tests assert: parity with DDP, hooks, and what autograd sees."""

from __future__ import annotations

import pytest
from fsdp_parity import core
from fsdp_parity.models import subtest_name
from fsdp_parity.ranks import Pools
from polyshard_fsdp import CPUOffload, ShardingStrategy

configs = pytest.mark.parametrize(
    ("cpu_offload", "strategy"),
    core.CONFIGS,
    ids=[subtest_name(core.CONFIG_NAMES, *config) for config in core.CONFIGS],
)
on_cpu = pytest.mark.parametrize("ranks", ["cpu"], indirect=True)


def cases(ranks: Pools, cpu_offload: CPUOffload) -> list[int]:
    """How many cases each of two ranks is to have run: one mode of moving to the device on the CPU, or all of them."""
    if ranks.device_type == "cpu":
        modes = 1
    else:
        modes = 3 if cpu_offload.offload_params else 2
    return [12 * modes] * 2


class TestParityWithDDP:
    """Losses and parameters after several updates are DDP's."""

    @configs
    def test_nested_wrapped_model(
        self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None
    ) -> None:
        assert ranks.run(2, core.nested_wrapped_model, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @pytest.mark.nightly
    @configs
    def test_nested_wrapped_model_single_iteration_mixed_precision(
        self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None
    ) -> None:
        body = core.nested_wrapped_model_single_iteration_mixed_precision
        assert ranks.run(2, body, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @configs
    def test_nested_always_wrap_model(
        self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None
    ) -> None:
        assert ranks.run(2, core.nested_always_wrap_model, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @configs
    def test_transformer(self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None) -> None:
        assert ranks.run(2, core.transformer, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @pytest.mark.nightly
    @configs
    def test_delayed_optim_step(self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None) -> None:
        assert ranks.run(2, core.delayed_optim_step, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @pytest.mark.nightly
    @configs
    def test_delayed_reduce_scatter(
        self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None
    ) -> None:
        assert ranks.run(2, core.delayed_reduce_scatter, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @configs
    def test_mixture_of_experts(self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None) -> None:
        assert ranks.run(2, core.mixture_of_experts, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @pytest.mark.nightly
    @configs
    def test_mixture_of_experts_with_delay_before_free(
        self, ranks: Pools, cpu_offload: CPUOffload, strategy: ShardingStrategy | None
    ) -> None:
        body = core.mixture_of_experts_with_delay_before_free
        assert ranks.run(2, body, cpu_offload, strategy) == cases(ranks, cpu_offload)

    @pytest.mark.nightly
    @on_cpu
    @pytest.mark.parametrize(
        ("model", "world_size"), [("nested", 3), ("always_wrap", 4), ("transformer", 1), ("transformer", 3)]
    )
    def test_other_world_sizes(self, ranks: Pools, model: str, world_size: int) -> None:
        assert ranks.run(world_size, core.parity_at_other_world_sizes, model) == [12] * world_size


class TestParamInit:
    """Parameters between wrapping and training."""

    @pytest.mark.parametrize("mixed_precision", [True, False])
    def test_param_change_after_init(self, ranks: Pools, mixed_precision: bool) -> None:
        ranks.run(2, core.param_change_after_init, mixed_precision)


class TestHooks:
    """Hooks that forward registers."""

    @pytest.mark.parametrize("cuda_first", [False, True])
    def test_pre_backward_hook_registration(self, ranks: Pools, cuda_first: bool) -> None:
        ranks.run(2, core.pre_backward_hook_registration, cuda_first)

    def test_pre_backward_hook_registration_after_state_dict(self, ranks: Pools) -> None:
        ranks.run(2, core.pre_backward_hook_registration_after_state_dict)

    @pytest.mark.parametrize("cuda_first", [False, True])
    @pytest.mark.parametrize("mixed_precision", [True, False])
    def test_register_functions_called(self, ranks: Pools, cuda_first: bool, mixed_precision: bool) -> None:
        ranks.run(2, core.register_functions_called, cuda_first, mixed_precision)


class TestNoGrad:
    """Forward without a graph."""

    @pytest.mark.parametrize("mixed_precision", [True, False])
    def test_transformer_no_grad(self, ranks: Pools, mixed_precision: bool) -> None:
        ranks.run(2, core.transformer_no_grad, mixed_precision)


class TestAutograd:
    """What autograd computes with."""

    def test_unshard_params_as_tensors(self, ranks: Pools) -> None:
        assert ranks.run(2, core.unshard_params_as_tensors) == [24, 24]
