"""Models and bodies for the tests of wrapping and of its policies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    size_based_auto_wrap_policy,
)
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .models import CUDAInitMode, wrap_fsdp
from .ranks import Ranks, told
from .subtests import named, subtests

NORMS = ("bn1", "bn2", "bn3", "sync_bn")


class BatchNormNet(nn.Module):
    """A linear layer and a batch norm of each kind; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)
        self.bn3 = nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


class LoraAttention(nn.Module):
    """Frozen projections of 4096 elements, and 512 trainable ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            self.register_module(f"{name}_proj", nn.Linear(32, 32, bias=False).requires_grad_(False))
        self.lora_A = nn.Linear(32, 8, bias=False)
        self.lora_B = nn.Linear(8, 32, bias=False)


class LoraMLP(nn.Module):
    """Frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 128, bias=False).requires_grad_(False)


class LoraDecoder(nn.Module):
    """Frozen but for the attention's adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = LoraAttention(), LoraMLP()
        self.norm = nn.LayerNorm(32).requires_grad_(False)


class LoraModel(nn.Module):
    """Four decoders of which only the attentions mix frozen and trainable parameters; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, 32).requires_grad_(False)
        self.layers = nn.ModuleList(LoraDecoder() for _ in range(4))


def lora_policies() -> dict[str, _Policy]:
    """Policies that all wrap attention, MLP and decoder each, by name."""
    classes = (LoraAttention, LoraMLP, LoraDecoder)

    def choose(module: nn.Module) -> bool:
        return isinstance(module, classes)

    def choose_with_settings(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, LoraAttention):
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, (LoraMLP, LoraDecoder))

    return {
        "classes": ModuleWrapPolicy(classes),
        "function": CustomPolicy(choose),
        "function_with_settings": CustomPolicy(choose_with_settings),
    }


def nested_sequential() -> nn.Sequential:
    """Two linear layers and a pair of them: 30 elements each."""
    pair = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), pair)


def init_modes(ranks: Ranks, *, offload: bool = False) -> list[CUDAInitMode]:
    """When to move the model: the same on the CPU; parameters that are offloaded may not move once they are wrapped."""
    if ranks.on_cpu or offload:
        return [CUDAInitMode.CUDA_BEFORE]
    return [CUDAInitMode.CUDA_AFTER, CUDAInitMode.CUDA_BEFORE]


def refuse_wrapped_children(ranks: Ranks, nested: bool) -> None:
    """A policy is refused where a module inside is FSDP; the first in module order is named."""
    name = r"lin1\.1" if nested else "lin1"
    for mode in init_modes(ranks):
        with named({"mode": mode}):
            model = _partly_wrapped(ranks, mode, nested)
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.to(ranks.device)
            before = list(model.named_modules())
            match = f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in"
            with pytest.raises(ValueError, match=match):
                wrap_fsdp(model, auto_wrap_policy=size_based_auto_wrap_policy)
            assert list(model.named_modules()) == before


def wrap_batchnorm_individually(ranks: Ranks, use_or_policy: bool) -> None:
    """A policy of batch norms wraps these, alone and together with one that wraps nothing."""
    policy: Callable[..., bool] = _batchnorm_policy()
    if use_or_policy:
        policy = partial(_or_policy, policies=[_never, policy])
    model = wrap_fsdp(BatchNormNet().to(ranks.device), auto_wrap_policy=policy)
    assert _wrapped_children(model.module) == {*NORMS}
    assert all(isinstance(getattr(model, name), FSDP) for name in NORMS), "not found through the wrapper"
    assert type(model.lin) is nn.Linear


def wrap_batchnorm_in_wrapped_container(ranks: Ranks) -> None:
    """Batch norms are wrapped in a container that is wrapped itself, and only where the policy says so."""
    both = partial(_or_policy, policies=[_wrap_container, _batchnorm_policy()])
    for policy, norms in ((both, {*NORMS}), (_wrap_container, set())):
        with named({"norms": norms}):
            root = nn.Module()
            root.bn_container = BatchNormNet().to(ranks.device)
            model = wrap_fsdp(root, auto_wrap_policy=policy)
            assert isinstance(root.bn_container, FSDP)
            assert model.bn_container is root.bn_container
            assert _wrapped_children(model.bn_container.module) == norms
            assert all(isinstance(getattr(model.bn_container, name), FSDP) == bool(norms) for name in NORMS)


@subtests(
    cpu_offload=[CPUOffload(False), CPUOffload(True)],
    backward_prefetch=[BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_PRE],
    forward_prefetch=[False, True],
)
def train_wrapped_by_policy(
    ranks: Ranks, cpu_offload: CPUOffload, backward_prefetch: BackwardPrefetch, forward_prefetch: bool
) -> None:
    """Everything is wrapped and has the root's settings; six steps of SGD are those of the plain model.

    Units have one element, so that on all ranks but one the shard is empty, and one unit has no parameters.
    """
    for mode in init_modes(ranks, offload=cpu_offload.offload_params):
        with named({"mode": mode}):
            torch.manual_seed(0)
            reference = _OneElementUnits().to(ranks.device)
            model: Any = copy.deepcopy(reference)
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.cpu()
            model = wrap_fsdp(
                model,
                auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=0),
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                forward_prefetch=forward_prefetch,
            )
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.to(ranks.device)
            inner = model.module
            for module in (inner.lin1, inner.lin2, inner.lin3, inner.lin4.module.nested_lin, inner.lin4, model):
                assert isinstance(module, FSDP)
                assert module.cpu_offload == cpu_offload
                assert module.backward_prefetch == backward_prefetch
                assert module.forward_prefetch == forward_prefetch
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            plain_optimizer = torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
            for _ in range(6):
                loss = _step(model, optimizer, ranks.device)
                torch.testing.assert_close(loss, _step(reference, plain_optimizer, ranks.device))
            with FSDP.summon_full_params(model):
                for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine.view_as(plain).to(plain.device), plain)


def auto_wrap_smoke(ranks: Ranks, cpu_offload: CPUOffload, use_device_id: bool) -> None:
    """A policy, offloading and a device id go together in a group of one rank; gradients are the plain model's."""
    for mode in init_modes(ranks, offload=cpu_offload.offload_params):
        with named({"mode": mode}):
            torch.manual_seed(0)
            reference = nested_sequential().to(ranks.device)
            moved = ranks.device if mode is CUDAInitMode.CUDA_BEFORE else "cpu"
            model: Any = wrap_fsdp(
                copy.deepcopy(reference).to(moved),
                cpu_offload=cpu_offload,
                auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=40),
                device_id=ranks.device if use_device_id else None,
            )
            assert [type(each) for each in model.module] == [nn.Linear, nn.Linear, FSDP]
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.to(ranks.device)
            x = torch.rand((1, 5)).to(ranks.device)
            loss = nn.functional.mse_loss(x, model(x))
            loss.backward()
            plain_loss = nn.functional.mse_loss(x, reference(x))
            plain_loss.backward()
            torch.testing.assert_close(loss, plain_loss)
            # One rank holds everything, the root's layers and then the pair: the order of the plain model.
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
            plain = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
            assert gradients.device.type == ("cpu" if cpu_offload.offload_params else ranks.device.type)
            torch.testing.assert_close(gradients.to(plain.device), plain)


def train_module_in_two_places(ranks: Ranks, as_function: bool) -> None:
    """A module that a policy chooses is wrapped once and is so in all its places: training is the plain model's."""
    torch.manual_seed(0)
    twice = nn.Linear(6, 6)
    reference = nn.Sequential(twice, nn.ReLU(), twice, nn.Sequential(twice, nn.Linear(6, 2))).to(ranks.device)
    policy = partial(size_based_auto_wrap_policy, min_num_params=40) if as_function else ModuleWrapPolicy({nn.Linear})
    model = wrap_fsdp(copy.deepcopy(reference), auto_wrap_policy=policy)
    assert isinstance(model[0], FSDP)
    assert model[0] is model[2]
    assert model[3][0] is model[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.rand(4, 6).to(ranks.device)
        losses = []
        for trained, its_optimizer in ((model, optimizer), (reference, plain_optimizer)):
            its_optimizer.zero_grad()
            loss = trained(x).square().sum()
            loss.backward()
            its_optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses)


def batchnorm_apart_under_mixed_precision(ranks: Ranks, as_function: bool) -> None:
    """Batch norm is a unit of its own that computes in float32, between layers in bfloat16; a warning says so."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(ranks.device)
    policy = partial(size_based_auto_wrap_policy, min_num_params=1000) if as_function else ModuleWrapPolicy(())
    low = MixedPrecision(param_dtype=torch.bfloat16)
    match = "Both mixed precision and an auto_wrap_policy were specified to FSDP.*\n.*BatchNorm1d.*\n.*instacnes"
    with told(ranks.rank, UserWarning, match):
        wrapped = FSDP(model, auto_wrap_policy=policy, mixed_precision=low)
    assert [type(module) for module in model] == [nn.Linear, FSDP, nn.Linear]
    assert model[1].mixed_precision == MixedPrecision()
    assert wrapped.mixed_precision == low
    seen: list[torch.dtype] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.extend((args[0].dtype, module.weight.dtype))

    for module in (model[0], model[1].module, model[2]):
        module.register_forward_pre_hook(look)
    x = torch.rand(4, 8, device=ranks.device, requires_grad=True)
    output = wrapped(x)
    output.sum().backward()
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    assert output.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert model[1].module.running_mean.dtype == torch.float32


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nested_lin = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.nested_lin(x)
        return output


class _OneElementUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(1, 1, bias=False)
        self.lin2 = nn.Linear(1, 1, bias=False)
        self.lin3 = nn.Linear(1, 1, bias=False)
        self.lin4 = _Nested()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lin4(self.lin3(self.lin2(self.lin1(x))))
        return output


def _never(*args: Any, **kwargs: Any) -> bool:
    return False


def _wrap_container(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
    return recurse or isinstance(module, BatchNormNet)


def _batchnorm_policy() -> Callable[..., bool]:
    return partial(_wrap_module_cls_individually, module_classes=[_BatchNorm])


def _wrapped_children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if isinstance(child, FSDP)}


def _partly_wrapped(ranks: Ranks, mode: CUDAInitMode, nested: bool) -> nn.Module:
    device = ranks.device if mode is CUDAInitMode.CUDA_BEFORE else "cpu"

    def linear() -> nn.Module:
        return nn.Linear(1, 1, bias=False).to(device)

    model = nn.Module()
    model.lin1 = nn.Sequential(linear(), wrap_fsdp(linear())) if nested else wrap_fsdp(linear())
    model.lin2 = wrap_fsdp(linear())
    model.lin3 = wrap_fsdp(linear())
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.ones(1, device=device)).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()
