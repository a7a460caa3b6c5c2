"""Tensor subclasses with torch's extension protocol, models of them, and what these compute without sharding."""

from __future__ import annotations

import math
from typing import Any

import torch
from parity import seed_all
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

IN, OUT = 6, 7


class Pair(torch.Tensor):
    """A matrix as two of its shape and of other dtypes: ``high / 16 + low``. All that is done to it is done to both.

    What computes gets ``Pair`` again, which ``Layer`` knows to decode.
    """

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Pair:
        make: Any = torch.Tensor._make_wrapper_subclass
        pair: Pair = make(cls, high.shape, strides=high.stride(), dtype=torch.float64, device=high.device)
        pair.high, pair.low = high, low
        return pair

    @classmethod
    def of(cls, weight: torch.Tensor) -> Pair:
        high = (weight * 16).round().clamp(-128, 127).to(torch.int8)
        return cls(high, (weight - high / 16).to(torch.float16))

    def decoded(self) -> torch.Tensor:
        return self.high.double() / 16 + self.low.double()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Each keeps its own dtype.
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "dtype"}

        def on(name: str) -> Any:
            args_of, kwargs_of = tree_map_only(Pair, lambda pair: getattr(pair, name), (args, kwargs))
            return func(*args_of, **kwargs_of)

        high, low = on("high"), on("low")
        if isinstance(high, (tuple, list)):
            return [cls(*both) for both in zip(high, low, strict=True)]
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return cls(high, low) if isinstance(high, torch.Tensor) else high

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1
        assert isinstance(module, Layer)
        assert isinstance(mp_policy, MixedPrecisionPolicy)
        assert outer_stride == (outer_size[1], 1)
        rows = math.ceil(outer_size[0] / mesh.size())
        padded = [each.new_zeros(rows, each.size(1)) for each in (self.high, self.low)]
        for place, each in zip(padded, (self.high, self.low), strict=True):
            place[: each.size(0)].copy_(each)
        return tuple(padded), ("rows", rows)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        high, low = outputs
        assert metadata == ("rows", -(-OUT // (high.size(0) // metadata[1])))
        assert (high.dtype, low.dtype) == (torch.int8, torch.float16)
        if out is not None:
            assert isinstance(out, Pair)
            assert out.high.data_ptr() == high.data_ptr()
            return None
        return Pair(high, low), (high, low)


class Rounded(torch.Tensor):
    """A trained matrix of fp64 that travels in fp32, in the form of one argument."""

    whole: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor) -> Rounded:
        make: Any = torch.Tensor._make_wrapper_subclass
        rounded: Rounded = make(cls, whole.shape, strides=whole.stride(), dtype=whole.dtype, device=whole.device)
        rounded.whole = whole
        return rounded

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> Rounded:
        return Rounded(inner["whole"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Rounded, lambda rounded: rounded.whole, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        rows = -(-OUT // mesh.size())
        padded = self.whole.new_zeros(rows, self.whole.size(1), dtype=torch.float32)
        padded[: self.whole.size(0)].copy_(self.whole)
        return (padded,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(outputs[0][: out.size(0)])
            return None
        whole = outputs[0].to(param_dtype)
        return whole, (outputs[0], whole)


class Layer(nn.Module):
    """A frozen ``Pair`` beside a plain trained vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Pair.of(torch.randn(OUT, IN, dtype=torch.float64)), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(OUT, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return nn.functional.linear(x, weight.decoded().to(x.dtype), self.bias)


class Net(nn.Module):
    """Trained matrices around a frozen one, the last of them ``Rounded``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(IN, IN).double()
        self.layer = Layer()
        self.down = nn.Linear(OUT, OUT).double()
        self.down.weight = nn.Parameter(Rounded(self.down.weight.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.layer(torch.relu(self.up(x)))))


class Reference(nn.Module):
    """The same without sharding: what it trains it rounds as it would travel."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        weight: Any = net.layer.weight
        self.up, self.bias, self.decoded = net.up, net.layer.bias, weight.decoded()
        rounded: Any = net.down.weight
        self.weight, self.last = nn.Parameter(rounded.whole.clone()), net.down.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(nn.functional.linear(torch.relu(self.up(x)), self.decoded, self.bias))
        weight = self.weight + (self.weight.float().double() - self.weight).detach()
        return nn.functional.linear(hidden, weight, self.last)


def seeded(seed: int = 0) -> Net:
    """The same at every call."""
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        return Net()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over what is trained."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Losses of ``steps``, the same batches on every rank."""
    found = []
    for step in range(steps):
        x = torch.randn(2, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found
