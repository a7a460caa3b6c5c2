"""A few training steps, and the comparison of FSDP's with those of DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import TrainingState, clean_tensor_name
from polyshard_fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from polyshard_fsdp.sharded_grad_scaler import ShardedGradScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_parity.models import CUDAInitMode, FSDPInitMode, ParityModel, expected_warnings, wrap_fsdp
from fsdp_parity.ranks import Ranks

LEARNING_RATE = 1e-2


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
    lr: float = LEARNING_RATE,
    fsdp_cpu_offload: CPUOffload | None = None,
    save_model: bool = False,
    mixed_precision: MixedPrecision | None = None,
    enable_sharded_grad_scaler: bool = False,
    use_pure_fp16: bool = False,
    sharded_grad_scaler_kwargs: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Train by SGD with momentum 0.9, and check where parameters are and in which dtype the loss comes.

    ``model`` is FSDP or has a ``module`` like it. Under ``autocast`` the device computes in float16. With
    ``save_model`` every step ends with a checkpoint: saved, zeroed, loaded. Returns the last loss, detached.
    """
    is_fsdp = isinstance(model, FSDP)
    module: ParityModel = model.module
    offloaded = is_fsdp and fsdp_cpu_offload is not None and fsdp_cpu_offload.offload_params
    loss_device = next(model.parameters()).device
    options = dict(sharded_grad_scaler_kwargs or {})
    scaler: Any
    if is_fsdp:
        scaler = ShardedGradScaler(device=ranks.device.type, enabled=enable_sharded_grad_scaler, **options)
    else:
        options.pop("process_group", None)
        scaler = torch.amp.GradScaler(ranks.device.type, enabled=enable_sharded_grad_scaler, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    low = use_pure_fp16 or (mixed_precision is not None and not is_fsdp)
    loss = torch.empty(0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with torch.autocast(ranks.device.type, torch.float16, enabled=autocast):
            model_input = module.get_input(ranks.device)
            if low:
                model_input = tuple(x.half() if x.is_floating_point() else x for x in model_input)
            output = model(*model_input)
            if offloaded and model.sharding_strategy not in NO_RESHARD_AFTER_FORWARD_STRATEGIES:
                assert_on_cpu(model, "after forward")
            if autocast and ranks.on_cpu:
                # On the CPU autocast leaves a sum in float16; on CUDA it takes float32.
                output = output.float()
            loss = module.get_loss(model_input, output).to(loss_device)
        loss = scaler.scale(loss)
        assert loss.dtype == _loss_dtype(is_fsdp, mixed_precision, use_pure_fp16)
        module.run_backward(loss)
        if offloaded:
            assert_on_cpu(model, "after backward")
        scaler.step(optimizer)
        scaler.update()
        if save_model:
            with expected_warnings():
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                zero_parameters(model)
                model.load_state_dict(saved)
    if is_fsdp:
        model._assert_state(TrainingState.IDLE)
    return loss.detach()


def _loss_dtype(is_fsdp: bool, mixed_precision: MixedPrecision | None, use_pure_fp16: bool) -> torch.dtype:
    if use_pure_fp16:
        return torch.float16
    if is_fsdp and mixed_precision is not None and mixed_precision.param_dtype is not None:
        return mixed_precision.param_dtype
    return torch.float32


@dataclass(frozen=True)
class Reference:
    """What the training without FSDP came to."""

    loss: torch.Tensor
    parameters: Mapping[str, torch.Tensor]


def train_reference(
    ranks: Ranks,
    model_class: type[ParityModel],
    *,
    ref_init_fn: Callable[[nn.Module], nn.Module] | None = None,
    num_iters: int = 2,
    mixed_precision: MixedPrecision | None = None,
    enable_sharded_grad_scaler: bool = False,
    use_pure_fp16: bool = False,
    init_kwargs: Mapping[str, Any] | None = None,
    sharded_grad_scaler_kwargs: Mapping[str, Any] | None = None,
) -> Reference:
    """Train the deterministic model under DDP, or under what ``ref_init_fn`` makes of it."""
    plain = model_class.init(
        ranks.group,
        FSDPInitMode.NO_FSDP,
        CUDAInitMode.CUDA_BEFORE,
        deterministic=True,
        device=ranks.device,
        **(init_kwargs or {}),
    )
    if use_pure_fp16:
        plain = plain.half()
    model = ddp(ranks, plain) if ref_init_fn is None else ref_init_fn(plain)
    loss = train_for_several_steps(
        ranks,
        model,
        num_iters,
        autocast=mixed_precision is not None,
        mixed_precision=mixed_precision,
        enable_sharded_grad_scaler=enable_sharded_grad_scaler,
        use_pure_fp16=use_pure_fp16,
        sharded_grad_scaler_kwargs=sharded_grad_scaler_kwargs,
    )
    return Reference(loss, {name: p.detach().clone() for name, p in plain.named_parameters()})


def fsdp_parity(
    ranks: Ranks,
    model_class: type[ParityModel],
    fsdp_init_mode: FSDPInitMode,
    cuda_init_mode: CUDAInitMode,
    *,
    ref_init_fn: Callable[[nn.Module], nn.Module] | None = None,
    num_iters: int = 2,
    save_model: bool = True,
    cpu_offload: CPUOffload | None = None,
    backward_prefetch: BackwardPrefetch | None = None,
    sharding_strategy: ShardingStrategy | None = None,
    mixed_precision: MixedPrecision | None = None,
    forward_prefetch: bool = False,
    use_orig_params: bool = False,
    enable_sharded_grad_scaler: bool = False,
    use_pure_fp16: bool = False,
    init_kwargs: Mapping[str, Any] | None = None,
    sharded_grad_scaler_kwargs: Mapping[str, Any] | None = None,
    reference: Reference | None = None,
) -> FSDP:
    """FSDP comes to DDP's loss and parameters. Returns the trained model.

    ``reference`` is what `train_reference` gave for the same model and settings; without it, it is trained here. A
    model that offloads its parameters and was moved to a GPU after wrapping is refused instead. Parameters are
    compared in full precision alone, as DDP's do not lose what low precision rounds away.
    """
    offload = cpu_offload is not None and cpu_offload.offload_params
    refused = offload and cuda_init_mode is CUDAInitMode.CUDA_AFTER and not ranks.on_cpu
    if reference is None and not refused:
        reference = train_reference(
            ranks,
            model_class,
            ref_init_fn=ref_init_fn,
            num_iters=num_iters,
            mixed_precision=mixed_precision,
            enable_sharded_grad_scaler=enable_sharded_grad_scaler,
            use_pure_fp16=use_pure_fp16,
            init_kwargs=init_kwargs,
            sharded_grad_scaler_kwargs=sharded_grad_scaler_kwargs,
        )
    settings = {
        "cpu_offload": cpu_offload,
        "backward_prefetch": backward_prefetch,
        "sharding_strategy": sharding_strategy,
        "mixed_precision": mixed_precision,
        "forward_prefetch": forward_prefetch,
        "use_orig_params": use_orig_params,
    }
    model = model_class.init(
        ranks.group,
        fsdp_init_mode,
        cuda_init_mode,
        settings,
        deterministic=True,
        device=ranks.device,
        **(init_kwargs or {}),
    )
    if not isinstance(model, FSDP):
        model = wrap_fsdp(model, ranks.group, **settings)
    if use_pure_fp16:
        model = model.half()
    if cuda_init_mode is CUDAInitMode.CUDA_AFTER:
        model = model.to(ranks.device)
    if offload and not refused:
        assert_on_cpu(model, "before training")
    words = "An FSDP-managed module with parameter CPU offloading enabled has parameters on cuda"
    with pytest.raises(RuntimeError, match=words) if refused else nullcontext():
        loss = train_for_several_steps(
            ranks,
            model,
            num_iters,
            autocast=False,
            fsdp_cpu_offload=cpu_offload,
            save_model=save_model,
            mixed_precision=mixed_precision,
            enable_sharded_grad_scaler=enable_sharded_grad_scaler,
            use_pure_fp16=use_pure_fp16,
            sharded_grad_scaler_kwargs=sharded_grad_scaler_kwargs,
        )
    if refused:
        return model
    assert reference is not None
    if offload:
        assert_on_cpu(model, "after training")
    torch.testing.assert_close(loss.to(ranks.device), reference.loss, check_dtype=False)
    if mixed_precision is None and not use_pure_fp16:
        assert_same_parameters(full_parameters(model), reference.parameters)
    return model


def assert_same_parameters(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Two models' parameters have the same names, wrappers aside, and the same values on the same device."""
    assert [clean_tensor_name(name) for name in got] == list(wanted)
    for mine, (name, theirs) in zip(got.values(), wanted.items(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=f"FSDP did not match DDP: {name}: {{}}".format)
