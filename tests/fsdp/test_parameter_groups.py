"""Original parameters kept, in groups of different hyperparameters: parity with DDP."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from fsdp_parity.models import CUDAInitMode, wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks, across
from fsdp_parity.subtests import run_subtests, subtests
from fsdp_parity.training import (
    STRATEGIES,
    HostStep,
    assert_on_cpu,
    assert_same_parameters,
    ddp,
    full_parameters,
    plain_transformer,
)
from polyshard_fsdp import BackwardPrefetch, CPUOffload
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._flat_param import _FSDP_SKIP_WRITEBACK_CHECK
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer

FROZEN = "bias"


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights, biases and all others, each with hyperparameters of their own."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [], "weight_decay": 0.01, "lr": 1e-3},
        {"params": []},
    ]
    for name, parameter in model.named_parameters():
        groups[0 if "weight" in name else 1 if "bias" in name else 2]["params"].append(parameter)
    return groups


def _optimizer(model: nn.Module, kind: type[torch.optim.Optimizer], multi_tensor: bool) -> torch.optim.Optimizer:
    make: Callable[..., torch.optim.Optimizer] = kind
    return make(param_groups(model), lr=5e-3, foreach=multi_tensor)


def _settings(**settings: Any) -> dict[str, Any]:
    layers = {TransformerEncoderLayer, TransformerDecoderLayer}
    return {"auto_wrap_policy": ModuleWrapPolicy(layers), "use_orig_params": True, **settings}


def _freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if FROZEN in name:
            parameter.requires_grad_(False)


def _train(
    ranks: Ranks, model: Any, optimizer: torch.optim.Optimizer | HostStep, set_to_none: bool, num_iters: int
) -> list[torch.Tensor]:
    """The loss of each iteration. Gradients are zeroed before forward, and in every other iteration after it."""
    losses = []
    for turn in range(num_iters):
        if turn % 2 == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        model_input = model.module.get_input(ranks.device)
        loss = model.module.get_loss(model_input, model(*model_input)).to(ranks.device)
        losses.append(loss.detach())
        if turn % 2 == 1:
            optimizer.zero_grad(set_to_none=set_to_none)
        model.module.run_backward(loss)
        optimizer.step()
    return losses


@dataclass(frozen=True)
class _DdpTraining:
    losses: list[torch.Tensor]
    parameters: Mapping[str, torch.Tensor]


def _train_ddp(
    ranks: Ranks,
    optim_class: type[torch.optim.Optimizer],
    multi_tensor: bool,
    set_to_none: bool,
    num_iters: int,
    step_on_cpu: bool,
    frozen: bool = False,
) -> _DdpTraining:
    plain = plain_transformer(ranks)
    model = ddp(ranks, plain, find_unused_parameters=frozen)
    optimizer: torch.optim.Optimizer | HostStep = _optimizer(model, optim_class, multi_tensor)
    if step_on_cpu:
        optimizer = HostStep(plain, lambda twin: _optimizer(twin, optim_class, multi_tensor))
    if frozen:
        _freeze(model)
    losses = _train(ranks, model, optimizer, set_to_none, num_iters)
    return _DdpTraining(losses, {name: p.detach().clone() for name, p in plain.named_parameters()})


def _assert_ddp_parity(
    ranks: Ranks, model: FSDP, optimizer: torch.optim.Optimizer, set_to_none: bool, reference: _DdpTraining
) -> None:
    losses = _train(ranks, model, optimizer, set_to_none, len(reference.losses))
    torch.testing.assert_close(losses, reference.losses)
    assert_same_parameters(full_parameters(model), reference.parameters)


def _wrapped_transformer_and_optimizer(
    ranks: Ranks,
    cuda_init_mode: CUDAInitMode,
    init_optim_before_wrap: bool,
    optim_class: type[torch.optim.Optimizer],
    multi_tensor: bool,
    **settings: Any,
) -> tuple[FSDP, torch.optim.Optimizer]:
    """An optimizer made before wrapping trains the sharded model as well as one made after it."""
    plain = plain_transformer(ranks, cuda_init_mode)
    optimizer = _optimizer(plain, optim_class, multi_tensor) if init_optim_before_wrap else None
    model = wrap_fsdp(plain, ranks.group, **_settings(**settings))
    optimizer = optimizer or _optimizer(model, optim_class, multi_tensor)
    if cuda_init_mode is CUDAInitMode.CUDA_AFTER and not model.cpu_offload.offload_params:
        model = model.to(ranks.device)
    return model, optimizer


def _writeback_check(skip: bool) -> AbstractContextManager[Any]:
    return mock.patch.dict(os.environ, {_FSDP_SKIP_WRITEBACK_CHECK: "1"}) if skip else nullcontext()


@pytest.mark.parametrize(
    "strategy",
    ["full_shard", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("shard_grad_op", "no_shard"))],
)
@across(2)
def test_diff_hyperparams(ranks: Ranks, strategy: str) -> None:
    """Parity with DDP for parameter groups of different hyperparameters."""

    @functools.cache
    def reference(multi_tensor: bool, set_to_none: bool) -> _DdpTraining:
        # Two of each way to zero gradients; there are many cases.
        return _train_ddp(ranks, torch.optim.AdamW, multi_tensor, set_to_none, num_iters=4, step_on_cpu=False)

    def case(multi_tensor: bool, set_to_none: bool, **settings: Any) -> None:
        # Of these three every pair is met, each with all of the rest.
        with _writeback_check(multi_tensor != set_to_none):
            model, optimizer = _wrapped_transformer_and_optimizer(
                ranks,
                multi_tensor=multi_tensor,
                cpu_offload=CPUOffload(offload_params=False),
                sharding_strategy=STRATEGIES[strategy],
                **settings,
            )
            _assert_ddp_parity(ranks, model, optimizer, set_to_none, reference(multi_tensor, set_to_none))

    modes = [CUDAInitMode.CUDA_BEFORE]
    run_subtests(
        {
            "cuda_init_mode": modes if ranks.on_cpu else [*modes, CUDAInitMode.CUDA_AFTER],
            "init_optim_before_wrap": [False, True],
            "optim_class": [torch.optim.AdamW],
            "multi_tensor": [False, True],
            "set_to_none": [False, True],
            "backward_prefetch": [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
        },
        case,
    )


@pytest.mark.parametrize(
    "strategy", ["full_shard", "no_shard", pytest.param("shard_grad_op", marks=pytest.mark.nightly)]
)
@across(2)
def test_diff_hyperparams_cpu_offload(ranks: Ranks, strategy: str) -> None:
    """The same with parameters on the CPU, where the optimizer's step is, too."""
    reference = _train_ddp(
        ranks, torch.optim.Adam, multi_tensor=False, set_to_none=False, num_iters=4, step_on_cpu=True
    )

    def case(skip_writeback_check: bool) -> None:
        with _writeback_check(skip_writeback_check):
            model, optimizer = _wrapped_transformer_and_optimizer(
                ranks,
                CUDAInitMode.CUDA_BEFORE,
                init_optim_before_wrap=False,
                optim_class=torch.optim.Adam,
                multi_tensor=False,
                backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
                cpu_offload=CPUOffload(offload_params=True),
                sharding_strategy=STRATEGIES[strategy],
            )
            assert_on_cpu(model, "before training")
            _assert_ddp_parity(ranks, model, optimizer, False, reference)
            assert_on_cpu(model, "after training")

    run_subtests({"skip_writeback_check": [False, True]}, case)


@across(2)
@subtests(multi_tensor=[False, True], strategy=["full_shard", "shard_grad_op", "no_shard"])
def test_diff_trainability(ranks: Ranks, multi_tensor: bool, strategy: str) -> None:
    """All biases frozen after wrapping: part of each unit trains, and the rest stays as it was."""
    reference = _train_ddp(
        ranks, torch.optim.Adam, multi_tensor, set_to_none=False, num_iters=4, step_on_cpu=False, frozen=True
    )
    model, optimizer = _wrapped_transformer_and_optimizer(
        ranks,
        CUDAInitMode.CUDA_BEFORE,
        init_optim_before_wrap=False,
        optim_class=torch.optim.Adam,
        multi_tensor=multi_tensor,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=None,
        sharding_strategy=STRATEGIES[strategy],
    )
    before = full_parameters(model)
    _freeze(model)
    _assert_ddp_parity(ranks, model, optimizer, False, reference)
    for name, value in full_parameters(model).items():
        assert (FROZEN in name) == torch.equal(value, before[name]), name


def compile_around(ranks: Ranks, backend: str, strategy: str, skip_fsdp_guards: bool) -> None:
    """A compiled FSDP model has the losses of an eager one, and of DDP, whether dynamo guards its modules or not."""
    with warnings.catch_warnings():
        # What the compiler imports warns about the rest of torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    settings = _settings(
        sharding_strategy=STRATEGIES[strategy],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(False),
    )
    base = plain_transformer(ranks)
    eager = wrap_fsdp(copy.deepcopy(base), ranks.group, **settings)
    wrapped = wrap_fsdp(copy.deepcopy(base), ranks.group, **settings)
    models: list[Any] = [eager, torch.compile(wrapped, backend=backend), ddp(ranks, base)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in models]
    with warnings.catch_warnings(), torch._dynamo.config.patch(skip_fsdp_guards=skip_fsdp_guards):
        # The compiler looks at .grad of the tensors that a frame takes in, and does not silence this in every version.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # Inductor advises to use TensorFloat32, which would be other numbers than the eager model's.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        warnings.simplefilter("ignore", DeprecationWarning)
        for turn in range(2):
            model_input = eager.get_input(ranks.device)
            losses = []
            for each, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = each(*model_input).sum()
                losses.append(loss.detach())
                loss.backward()
                optimizer.step()
            for other in losses[1:]:
                torch.testing.assert_close(other, losses[0], msg=f"turn {turn}: {{}}".format)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_fsdp_compile(ranks: Pools) -> None:
    # Inductor needs a compiler for C++ on the CPU; what FSDP meets is dynamo.
    backend = "eager" if ranks.device_type == "cpu" else "inductor"
    ranks.run(2, compile_around, backend, "full_shard", True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "skip_fsdp_guards"), [("full_shard", False), ("shard_grad_op", True), ("no_shard", False)]
)
def test_fsdp_compile_otherwise(ranks: Pools, strategy: str, skip_fsdp_guards: bool) -> None:
    backend = "aot_eager" if ranks.device_type == "cpu" else "inductor"
    ranks.run(2, compile_around, backend, strategy, skip_fsdp_guards)
