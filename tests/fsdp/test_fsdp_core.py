"""What PyTorch's core FSDP tests assert: parity with DDP, hooks, and what autograd sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fsdp_parity import core
from fsdp_parity.ranks import Pools
from fsdp_parity.subtests import pairs

PARITY = (
    core.nested_wrapped_model,
    core.nested_wrapped_model_single_iteration_mixed_precision,
    core.nested_always_wrap_model,
    core.transformer,
    core.delayed_optim_step,
    core.delayed_reduce_scatter,
    core.mixture_of_experts,
    core.mixture_of_experts_with_delay_before_free,
)
#: Each body with each offload, and with each strategy, of which one is left to `make test-nightly`.
CASES = [tuple(case.values()) for case in pairs({"body": PARITY, **core.AXES})]


def _marks(body: Callable[..., Any], strategy: Any) -> Any:
    strategies = core.AXES["strategy"]
    return pytest.mark.nightly if strategy == strategies[PARITY.index(body) % len(strategies)] else ()


@pytest.mark.parametrize(
    ("body", "cpu_offload", "strategy"),
    [
        pytest.param(
            body,
            offload,
            strategy,
            id=f"{body.__name__}-{offload.offload_params}-{strategy}",
            marks=_marks(body, strategy),
        )
        for body, offload, strategy in CASES
    ],
)
def test_parity_with_ddp(ranks: Pools, body: Callable[..., Any], cpu_offload: Any, strategy: Any) -> None:
    """Losses and parameters after several updates are DDP's."""
    ranks.run(2, body, cpu_offload, strategy)


@pytest.mark.parametrize("ranks", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("model", "world_size"),
    [
        ("nested", 3),
        ("transformer", 1),
        pytest.param("always_wrap", 4, marks=pytest.mark.nightly),
        pytest.param("transformer", 3, marks=pytest.mark.nightly),
    ],
)
def test_other_world_sizes(ranks: Pools, model: str, world_size: int) -> None:
    ranks.run(world_size, core.parity_at_other_world_sizes, model)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(
    "body",
    [core.param_change_after_init, core.pre_backward_hook_registration, core.transformer_no_grad],
    ids=lambda body: body.__name__,
)
def test_parameters_hooks_and_no_grad(ranks: Pools, body: Callable[..., Any], on: bool) -> None:
    """``on``: mixed precision; for hooks, whether the model is on the device before it is wrapped."""
    ranks.run(2, body, on)


@pytest.mark.parametrize("cuda_first", [False, True])
@pytest.mark.parametrize("mixed_precision", [True, False])
def test_register_functions_called(ranks: Pools, cuda_first: bool, mixed_precision: bool) -> None:
    ranks.run(2, core.register_functions_called, cuda_first, mixed_precision)


@pytest.mark.parametrize(
    "body",
    [core.pre_backward_hook_registration_after_state_dict, core.unshard_params_as_tensors],
    ids=lambda body: body.__name__,
)
def test_autograd(ranks: Pools, body: Callable[..., Any]) -> None:
    """Hooks after a state dict, and the tensors that modules compute with."""
    ranks.run(2, body)
