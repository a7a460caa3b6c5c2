"""A few training steps, and the comparison of FSDP's with those of DDP."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from polyshard_fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import TrainingState, clean_tensor_name
from polyshard_fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_parity.models import (
    CUDAInitMode,
    FSDPInitMode,
    ParityModel,
    TransformerWithSharedParams,
    expected_warnings,
    wrap_fsdp,
)
from fsdp_parity.ranks import Ranks

LEARNING_RATE = 1e-2
STRATEGIES = {
    "no_shard": ShardingStrategy.NO_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "full_shard": ShardingStrategy.FULL_SHARD,
}


def ddp(ranks: Ranks, model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    """``model``, which is on the rank's device, averaged by torch's own DDP."""
    with warnings.catch_warnings():
        # torch 2.13 has another name for it, which earlier versions do not know.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return DistributedDataParallel(model, device_ids=None if ranks.on_cpu else [ranks.device], **kwargs)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of a model's whole parameters."""
    with FSDP.summon_full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def zero_parameters(model: nn.Module) -> None:
    """Writes zeros to all parameters through ``summon_full_params``."""
    with FSDP.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def assert_on_cpu(model: nn.Module, when: str) -> None:
    """All parameters are on the CPU."""
    elsewhere = {name: p.device for name, p in model.named_parameters() if p.device.type != "cpu"}
    assert not elsewhere, f"offloaded parameters are not on the CPU {when}: {elsewhere}"


def train_for_several_steps(
    ranks: Ranks,
    model: Any,
    num_steps: int,
    autocast: bool,
    mixed_precision: MixedPrecision | None = None,
    offloaded: bool = False,
    save_model: bool = False,
) -> torch.Tensor:
    """Train by SGD with momentum 0.9, and check where parameters are and in which dtype the loss comes.

    ``model`` is FSDP or has a ``module`` like it. Under ``autocast`` the device computes in float16. With
    ``save_model`` every step ends with a checkpoint: saved, zeroed, loaded. Returns the last loss, detached.
    """
    is_fsdp = isinstance(model, FSDP)
    module: ParityModel = model.module
    loss_device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    loss_dtype = (mixed_precision.param_dtype if is_fsdp and mixed_precision is not None else None) or torch.float32
    loss = torch.empty(0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast(ranks.device.type, torch.float16, enabled=autocast):
            model_input = module.get_input(ranks.device)
            if mixed_precision is not None and not is_fsdp:
                model_input = tuple(x.half() if x.is_floating_point() else x for x in model_input)
            output = model(*model_input)
            if offloaded and model.sharding_strategy not in NO_RESHARD_AFTER_FORWARD_STRATEGIES:
                assert_on_cpu(model, "after forward")
            if autocast and ranks.on_cpu:
                # On the CPU autocast leaves a sum in float16; on CUDA it takes float32.
                output = output.float()
            loss = module.get_loss(model_input, output).to(loss_device)
        assert loss.dtype == loss_dtype
        module.run_backward(loss)
        if offloaded:
            assert_on_cpu(model, "after backward")
        optimizer.step()
        if save_model:
            with expected_warnings():
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                zero_parameters(model)
                model.load_state_dict(saved)
    if is_fsdp:
        model._assert_state(TrainingState.IDLE)
    return loss.detach()


@dataclass(frozen=True)
class Reference:
    """What the training without FSDP came to."""

    loss: torch.Tensor
    parameters: Mapping[str, torch.Tensor]


def train_reference(
    ranks: Ranks,
    model_class: type[ParityModel],
    num_iters: int,
    mixed_precision: MixedPrecision | None,
    ref_init_fn: Callable[[nn.Module], nn.Module] | None,
) -> Reference:
    """Train the deterministic model under DDP, or under what ``ref_init_fn`` makes of it."""
    plain = model_class.init(
        ranks.group, FSDPInitMode.NO_FSDP, CUDAInitMode.CUDA_BEFORE, deterministic=True, device=ranks.device
    )
    model = ddp(ranks, plain) if ref_init_fn is None else ref_init_fn(plain)
    autocast = mixed_precision is not None
    loss = train_for_several_steps(ranks, model, num_iters, autocast, mixed_precision)
    return Reference(loss, {name: p.detach().clone() for name, p in plain.named_parameters()})


def fsdp_parity(
    ranks: Ranks,
    model_class: type[ParityModel],
    reference: Reference,
    cuda_init_mode: CUDAInitMode,
    num_iters: int,
    cpu_offload: CPUOffload,
    mixed_precision: MixedPrecision | None,
    init_kwargs: Mapping[str, Any],
    **settings: Any,
) -> FSDP:
    """FSDP comes to DDP's loss and parameters. Returns the trained model.

    A model that offloads its parameters and was moved to a GPU after wrapping is refused instead. Parameters are
    compared in full precision alone, as DDP's do not lose what low precision rounds away.
    """
    offload = cpu_offload.offload_params
    refused = offload and cuda_init_mode is CUDAInitMode.CUDA_AFTER and not ranks.on_cpu
    settings |= {"cpu_offload": cpu_offload, "mixed_precision": mixed_precision}
    model = model_class.init(
        ranks.group,
        FSDPInitMode.RECURSIVE,
        cuda_init_mode,
        settings,
        deterministic=True,
        device=ranks.device,
        **init_kwargs,
    )
    if not isinstance(model, FSDP):
        model = wrap_fsdp(model, ranks.group, **settings)
    if cuda_init_mode is CUDAInitMode.CUDA_AFTER:
        model = model.to(ranks.device)
    if offload and not refused:
        assert_on_cpu(model, "before training")
    words = "An FSDP-managed module with parameter CPU offloading enabled has parameters on cuda"
    with pytest.raises(RuntimeError, match=words) if refused else nullcontext():
        loss = train_for_several_steps(ranks, model, num_iters, False, mixed_precision, offload, save_model=True)
    if refused:
        return model
    if offload:
        assert_on_cpu(model, "after training")
    torch.testing.assert_close(loss.to(ranks.device), reference.loss, check_dtype=False)
    if mixed_precision is None:
        assert_same_parameters(full_parameters(model), reference.parameters)
    return model


def assert_same_parameters(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Two models' parameters have the same names, wrappers aside, and the same values on the same device."""
    assert [clean_tensor_name(name) for name in got] == list(wanted)
    for mine, (name, theirs) in zip(got.values(), wanted.items(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=f"FSDP did not match DDP: {name}: {{}}".format)


def plain_transformer(ranks: Ranks, mode: CUDAInitMode = CUDAInitMode.CUDA_BEFORE) -> TransformerWithSharedParams:
    model: TransformerWithSharedParams = TransformerWithSharedParams.init(
        ranks.group, FSDPInitMode.NO_FSDP, mode, deterministic=True, device=ranks.device
    )
    return model


class HostStep:
    """An optimizer that steps copies of a model's parameters on the CPU, whose arithmetic is not quite a GPU's.

    The model itself stays where it is: DDP no longer reduces gradients of parameters that were moved away and back.
    """

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        self._parameters = list(model.parameters())
        twin = copy.deepcopy(model).cpu()
        self._copies = list(twin.parameters())
        self._optimizer = make(twin)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def step(self) -> None:
        for parameter, on_cpu in zip(self._parameters, self._copies, strict=True):
            on_cpu.grad = None if parameter.grad is None else parameter.grad.cpu()
        self._optimizer.step()
        with torch.no_grad():
            for parameter, on_cpu in zip(self._parameters, self._copies, strict=True):
                parameter.copy_(on_cpu)
