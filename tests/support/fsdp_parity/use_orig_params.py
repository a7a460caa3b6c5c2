"""Original parameters kept (``use_orig_params=True``): unshard and reshard, access, accumulation.

Parameter groups are in `parameter_groups`; parameters and gradients that the user writes or replaces in `writeback`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from polyshard_fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from polyshard_fsdp.wrap import always_wrap_policy
from torch import nn

from fsdp_parity.models import CUDAInitMode, FSDPInitMode, TransformerWithSharedParams, wrap_fsdp
from fsdp_parity.parameter_groups import STRATEGIES, HostStep, plain_transformer
from fsdp_parity.ranks import Ranks
from fsdp_parity.subtests import subtests
from fsdp_parity.training import assert_same_parameters, ddp, full_parameters

NUM_SIZE0_TENSORS = 1000


@dataclass
class _Trio:
    """FSDP without and with original parameters, and DDP, all of the same transformer, each with its optimizer."""

    models: tuple[Any, Any, Any]
    optimizers: list[torch.optim.Optimizer | HostStep]

    def run(self, model_input: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """All three outputs, which agree."""
        outputs = [model(*model_input) for model in self.models]
        for other in outputs[1:]:
            torch.testing.assert_close(other, outputs[0])
        return outputs

    def step(self, outputs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Backward from the sum of each model's outputs, and its optimizer's step."""
        losses = [torch.stack([output.sum() for output in of_one]).sum() for of_one in zip(*outputs, strict=True)]
        for other in losses[1:]:
            torch.testing.assert_close(other, losses[0])
        for model, loss in zip(self.models, losses, strict=True):
            model.module.run_backward(loss)
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def assert_same(self) -> None:
        """Inside ``summon_full_params`` names and values of both sharded models are the same, and DDP's."""
        flat, original, reference = self.models
        with FSDP.summon_full_params(flat), FSDP.summon_full_params(original):
            for (name, mine), (theirs_name, theirs) in zip(
                flat.named_parameters(), original.named_parameters(), strict=True
            ):
                assert name == theirs_name
                torch.testing.assert_close(mine, theirs)
            assert_same_parameters(dict(original.named_parameters()), dict(reference.module.named_parameters()))


def _trio(ranks: Ranks, strategy: str, offload_params: bool) -> _Trio:
    def wrapped(use_orig_params: bool) -> FSDP:
        settings = {
            "sharding_strategy": STRATEGIES[strategy],
            "cpu_offload": CPUOffload(offload_params=offload_params),
            "use_orig_params": use_orig_params,
        }
        model: FSDP = TransformerWithSharedParams.init(
            ranks.group,
            FSDPInitMode.RECURSIVE,
            CUDAInitMode.CUDA_BEFORE,
            settings,
            deterministic=True,
            device=ranks.device,
        )
        return model

    # Broadcasting buffers before the second forward would change what the first one saved.
    models = (wrapped(False), wrapped(True), ddp(ranks, plain_transformer(ranks), broadcast_buffers=False))
    optimizers: list[torch.optim.Optimizer | HostStep] = [_adam(model) for model in models]
    if offload_params:
        optimizers[2] = HostStep(models[2].module, _adam)
    return _Trio(models, optimizers)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), foreach=False, lr=1e-2)


@subtests(strategy=list(STRATEGIES))
def multiple_forward(ranks: Ranks, offload_params: bool, strategy: str) -> None:
    """Two forwards before one backward."""
    trio = _trio(ranks, strategy, offload_params)
    for _ in range(2):
        first = trio.models[0].get_input(ranks.device)
        second = tuple(tokens + torch.ones_like(tokens) for tokens in trio.models[0].get_input(ranks.device))
        trio.zero_grad()
        trio.step([trio.run(first), trio.run(second)])
    trio.assert_same()


@subtests(strategy=list(STRATEGIES))
def summon_between_two_forwards(ranks: Ranks, offload_params: bool, strategy: str) -> None:
    """A forward, a look at the whole parameters, another forward, and one backward."""
    trio = _trio(ranks, strategy, offload_params)
    for _ in range(2):
        trio.zero_grad()
        first = trio.run(trio.models[0].get_input(ranks.device))
        trio.assert_same()
        second = trio.run(trio.models[0].get_input(ranks.device))
        trio.step([first, second])
    trio.assert_same()


class _TwoLinears(nn.Module):
    """Each layer a unit, over two ranks, in float32, with parameters aligned to 16 bytes.

    ``lin1``: 25 elements, padded to 26, 13 a rank. ``lin2``: 35, one of alignment, 7; 43, padded to 44, 22 a rank:
    22 of the weight on rank 0; 13 of the weight and the bias on rank 1.
    """

    SHARDS: Mapping[str, tuple[slice, slice]] = {
        "lin1.weight": (slice(0, 13), slice(13, 25)),
        "lin2.weight": (slice(0, 22), slice(22, 35)),
        "lin2.bias": (slice(0, 0), slice(0, 7)),
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.lin1 = nn.Linear(5, 5, bias=False)
        self.lin2 = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lin2(torch.relu(self.lin1(x)))
        return output


@subtests(strategy=["no_shard", "full_shard", "shard_grad_op"])
def access_params_after_forward(ranks: Ranks, strategy: str) -> None:
    """Between forward and backward a parameter is this rank's shard, or whole where nothing was resharded."""
    plain = _TwoLinears().to(ranks.device)
    reference = ddp(ranks, plain)
    model = wrap_fsdp(
        _TwoLinears().to(ranks.device),
        sharding_strategy=STRATEGIES[strategy],
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=True,
    )
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]

    def assert_shards(between_forward_and_backward: bool) -> None:
        whole = STRATEGIES[strategy] is ShardingStrategy.NO_SHARD or (
            between_forward_and_backward and STRATEGIES[strategy] in NO_RESHARD_AFTER_FORWARD_STRATEGIES
        )
        for (name, mine), (plain_name, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert clean_tensor_name(name) == plain_name
            expected = theirs if whole else theirs.flatten()[_TwoLinears.SHARDS[plain_name][ranks.rank]]
            torch.testing.assert_close(mine, expected)

    torch.manual_seed(1 + ranks.rank)
    for _ in range(2):
        x = torch.randn((2, 5)).to(ranks.device)
        outputs = [reference(x), model(x)]
        torch.testing.assert_close(outputs[0], outputs[1])
        assert_shards(True)
        for output in outputs:
            output.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_shards(False)


def named_parameters_in_forward(ranks: Ranks) -> None:
    """Inside forward names and shapes are those of the model before wrapping."""
    seen: list[tuple[str, torch.Size, torch.Tensor]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend((clean_tensor_name(name), p.shape, p.detach().clone()) for name, p in self.named_parameters())
            output: torch.Tensor = self.lin(x)
            return output

    torch.manual_seed(0)
    plain = Model().to(ranks.device)
    values = {name: p.detach().clone() for name, p in plain.named_parameters()}
    wrap_fsdp(plain, use_orig_params=True)(torch.randn((2, 5)).to(ranks.device))
    assert [name for name, _, _ in seen] == ["lin.weight", "lin.bias"]
    assert [shape for _, shape, _ in seen] == [(5, 5), (5,)]
    for name, _, value in seen:
        torch.testing.assert_close(value, values[name])


@subtests(strategy=["full_shard", "shard_grad_op", "no_shard"])
def no_sync_correctness(ranks: Ranks, strategy: str) -> None:
    """Gradients of a backward inside ``no_sync()`` are this rank's own, whole; the next backward adds to them."""
    torch.manual_seed(0)
    plain = nn.Linear(7, 1, bias=False).to(ranks.device)
    flat, original = (
        wrap_fsdp(copy.deepcopy(plain), sharding_strategy=STRATEGIES[strategy], use_orig_params=use_orig_params)
        for use_orig_params in (False, True)
    )
    optimizers = [torch.optim.AdamW(model.parameters(), foreach=True) for model in (flat, original)]
    torch.manual_seed(1 + ranks.rank)
    x = torch.randn((2, 7)).to(ranks.device)
    upstream = torch.randn((2, 1)).to(ranks.device)
    own = upstream.t() @ x
    average = own.clone()
    dist.all_reduce(average)
    average /= ranks.world_size

    def backward(inside_no_sync: bool) -> None:
        outputs = []
        for model in (flat, original):
            with model.no_sync() if inside_no_sync else nullcontext():
                outputs.append(model(x))
                outputs[-1].backward(upstream)
        torch.testing.assert_close(outputs, [plain(x)] * 2)

    def assert_gradients(whole: torch.Tensor, unsharded: bool) -> None:
        """Both models hold ``whole``, or their part of it; the flat one may have padding behind it."""
        ((mine,), (flat_parameter,)) = ([*model.parameters()] for model in (original, flat))
        sharded = STRATEGIES[strategy] is not ShardingStrategy.NO_SHARD
        part = slice(4 * ranks.rank, 4 * ranks.rank + 4) if sharded else slice(None)
        weight = plain.weight.detach().flatten()[part]
        torch.testing.assert_close(mine.detach().flatten(), weight)
        torch.testing.assert_close(flat_parameter.detach()[: weight.numel()], weight)
        assert mine.grad is not None
        assert flat_parameter.grad is not None
        expected = whole if unsharded or not sharded else whole.flatten()[part]
        torch.testing.assert_close(mine.grad, expected)
        torch.testing.assert_close(flat_parameter.grad.flatten()[: expected.numel()], expected.flatten())

    backward(inside_no_sync=False)
    assert_gradients(average, unsharded=False)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    backward(inside_no_sync=True)
    assert_gradients(own, unsharded=True)
    backward(inside_no_sync=False)
    assert_gradients(2 * average, unsharded=False)


@subtests(strategy=["full_shard", "shard_grad_op", "no_shard"])
def no_sync_mixed_precision(ranks: Ranks, strategy: str) -> None:
    """Gradients accumulate in the compute dtype inside ``no_sync()``, and come out in the parameters' dtype."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 3).to(ranks.device)
    model = wrap_fsdp(
        copy.deepcopy(plain),
        sharding_strategy=STRATEGIES[strategy],
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        use_orig_params=True,
    )
    torch.manual_seed(1 + ranks.rank)
    x = torch.randn((2, 3)).to(ranks.device)

    def backward(dtype: torch.dtype) -> None:
        model(x).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {dtype}

    with model.no_sync():
        backward(torch.float16)
        backward(torch.float16)
        assert all(parameter.grad is not None for parameter in model.parameters())
    backward(torch.float32)
    assert any(p.grad is not None for p in model.parameters())
    # Three backwards of the same loss, averaged over the ranks.
    for _ in range(3):
        plain(x).sum().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.sub_(parameter.grad, alpha=1 / ranks.world_size)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for mine, theirs in zip(full_parameters(model).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=2e-3, atol=1e-2)


def non_uniform_requires_grad(ranks: Ranks) -> None:
    """Weights that train and biases that do not, in one unit."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(ranks.device)
    for layer in model:
        layer.bias.requires_grad_(False)
    wrapped = wrap_fsdp(model, use_orig_params=True)
    for layer in (wrapped[0], wrapped[1]):
        assert layer.weight.requires_grad
        assert not layer.bias.requires_grad
    wrapped(torch.randn((2, 3)).to(ranks.device)).sum().backward()
    for layer in (wrapped[0], wrapped[1]):
        assert layer.bias.grad is None
        assert (layer.weight.grad is not None) == (layer.weight.numel() > 0)


def multi_tensor_apply(device: torch.device) -> None:
    """A multi-tensor kernel over tensors that are all empty: what a rank without any part of its parameters runs."""
    tensors = [torch.empty(0, device=device) for _ in range(NUM_SIZE0_TENSORS)]
    torch._foreach_mul_(tensors, 0.1)
    assert {tensor.shape for tensor in tensors} == {(0,)}


def multi_tensor_step_over_empty_shards(ranks: Ranks) -> None:
    """The optimizer's multi-tensor step where as many shards are empty on each of two ranks."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(2 * NUM_SIZE0_TENSORS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat(list(self.scales)) * x

    model = wrap_fsdp(Model().to(ranks.device), use_orig_params=True)
    assert sum(parameter.numel() == 0 for parameter in model.parameters()) == NUM_SIZE0_TENSORS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    model(torch.full((2 * NUM_SIZE0_TENSORS,), 0.25, device=ranks.device)).sum().backward()
    optimizer.step()
    values = torch.cat([value.flatten() for value in full_parameters(model).values()])
    torch.testing.assert_close(values, torch.full_like(values, 1 - 0.5 * 0.25))
