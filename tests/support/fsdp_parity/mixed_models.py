"""Models and references for the tests of mixed precision."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision, ShardingStrategy
from polyshard_fsdp._common_utils import clean_tensor_name
from torch import nn
from torch.utils._pytree import tree_map

from .models import wrap_fsdp
from .ranks import Ranks

#: The dtype in which `Buffered` is given its buffer.
BUFFER_DTYPE = torch.float64

MP_ALL = MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16, reduce_dtype=torch.float16)
MP_ONLY_REDUCE = MixedPrecision(reduce_dtype=torch.float16)
MP_ONLY_PARAM_AND_BUFFER = MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16)
MP_NONE = MixedPrecision()
MP_ALL_DIFFERENT = MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def is_sharded(unit: FSDP) -> bool:
    """Whether the unit's parameters are cut over several ranks."""
    return unit.world_size > 1 and unit.sharding_strategy is not ShardingStrategy.NO_SHARD


class Buffered(nn.Module):
    """A Linear(10, 10) without bias, and a buffer."""

    def __init__(self, param_dtype: torch.dtype, buffer_name: str) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False).to(param_dtype)
        # A name of its own in each module: one shared by all would hide that prefixes are mixed up.
        self.buffer_name = buffer_name
        self.register_buffer(buffer_name, torch.randn((1, 2), dtype=BUFFER_DTYPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lin(x)
        return output


def nested_model(linears: Iterable[Buffered], device: torch.device, **fsdp_kwargs: Any) -> nn.Module:
    """Two linear layers; the first is a unit of its own, the second belongs to the root."""
    model = nn.Sequential(*(linear.to(device) for linear in linears))
    model[0] = wrap_fsdp(model[0], **fsdp_kwargs)
    return wrap_fsdp(model, **fsdp_kwargs)


class IgnoredModule(nn.Module):
    """A Linear(100, 100) that FSDP is told to leave alone; ``casts`` makes it convert for itself."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)
        self.casts = casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.l(x.to(self.l.weight.dtype)).to(x.dtype) if self.casts else self.l(x)
        return output


class ModelWithIgnoredModule(nn.Module):
    """Three Linear(100, 100), the one in the middle ignored."""

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.ignored = IgnoredModule(casts)
        self.l2 = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.l2(self.ignored(self.l1(x)))
        return output


class ExpectsDtype(nn.Module):
    """A Linear(5, 5) that insists on the dtype of its input: fp32 if ``full``, else fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.a: nn.Module = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, full: bool) -> torch.Tensor:
        if full:
            assert x.dtype == torch.float32, f"Expected fp32, got {x.dtype}"
        else:
            assert x.dtype == torch.float16, f"Expected fp16, got {x.dtype}"
        output: torch.Tensor = self.a(x)
        return output


class TakesTwo(nn.Module):
    """A Linear(100, 100) on the first of two inputs; both are noted."""

    def __init__(self, seen: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)
        self.seen = seen

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.update(l2_x=x, l2_y=y)
        output: torch.Tensor = self.l(x)
        return output


class MakesAnInput(nn.Module):
    """Two layers, of which the second gets a tensor made in the forward as well."""

    def __init__(self, seen: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.l2: nn.Module = TakesTwo(seen)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["x"] = x
        y = torch.ones(2, 100, device=x.device, dtype=torch.float32)
        output: torch.Tensor = self.l2(self.l1(x), y)
        return output


@contextmanager
def full_precision_in_eval(on: bool) -> Iterator[None]:
    """What is constructed inside computes in full precision in eval mode, or does not."""
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1" if on else "0"}):
        yield


class ReductionLog:
    """Counts the reduce-scatters that were checked."""

    def __init__(self) -> None:
        self.calls = 0


@contextmanager
def checked_reduce_scatter(
    mixed_precision: MixedPrecision, full_dtype: torch.dtype, *, low: bool = True
) -> Iterator[ReductionLog]:
    """Inside, every tensor given to ``torch.distributed.reduce_scatter_tensor`` must have the dtype of the reduction.

    That is the reduction's own dtype, else the parameters', else ``full_dtype``; ``low=False``: ``full_dtype``.
    """
    expected = (mixed_precision.reduce_dtype or mixed_precision.param_dtype or full_dtype) if low else full_dtype
    # torch 2.13 warns on the older name, and warnings are errors here.
    original = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    log = ReductionLog()

    def checked(*args: Any, **kwargs: Any) -> Any:
        log.calls += 1
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, torch.Tensor):
                assert tensor.dtype == expected, f"Expected to reduce in {expected} but got tensors in {tensor.dtype}"
        return original(*args, **kwargs)

    with mock.patch.object(dist, "reduce_scatter_tensor", checked):
        yield log


class CastReference:
    """An unsharded model that makes the casts of a mixed precision itself, one by one.

    Each call computes with copies of the parameters in the low precision; the gradients of those copies, converted to
    the dtype of the reduction and averaged over the ranks in float64, are what FSDP has to give.

    Modules of the classes ``kept`` compute in their own dtype, on a converted input, and give back the dtype they got.
    """

    def __init__(
        self, module: nn.Module, mixed_precision: MixedPrecision, kept: tuple[type[nn.Module], ...] = ()
    ) -> None:
        self.module = copy.deepcopy(module)
        self.mixed_precision = mixed_precision
        self._copies: dict[str, torch.Tensor] = {}
        self._kept: set[str] = set()
        self._low = True
        for name, child in self.module.named_modules():
            if kept and isinstance(child, kept):
                tensors = (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False))
                self._kept.update(f"{name}.{key}" for key, _ in tensors)
                _compute_in_own_dtype(child)

    def __call__(self, *args: Any, low: bool = True) -> Any:
        """The output; ``low=False`` computes in full precision."""
        precision = self.mixed_precision if low else MixedPrecision()
        self._low = low
        self._copies = {
            name: self._cast(name, parameter.detach(), precision.param_dtype).requires_grad_(parameter.requires_grad)
            for name, parameter in self.module.named_parameters()
        }
        buffers = {
            name: self._cast(name, buffer, precision.buffer_dtype) for name, buffer in self.module.named_buffers()
        }
        if precision.param_dtype is not None:
            args = tree_map(
                lambda x: x.to(precision.param_dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
                args,
            )
        output = torch.func.functional_call(self.module, {**self._copies, **buffers}, args)
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(buffers[name])
        return output

    def _cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if dtype is None or name in self._kept or not tensor.is_floating_point():
            return tensor.clone()
        return tensor.to(dtype, copy=True)

    def gradients(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        """The mean over the ranks of what the last backward gave, by name, in float64."""
        precision = self.mixed_precision if self._low else MixedPrecision()
        found = {}
        for name, tensor in self._copies.items():
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            if name not in self._kept:
                gradient = gradient.to(precision.reduce_dtype or precision.param_dtype or gradient.dtype)
            found[name] = gradient.double().contiguous()
            dist.all_reduce(found[name])
            found[name] /= ranks.world_size
        return found

    def give(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Make these the gradients of the master parameters, for an optimizer."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients[name].to(parameter.dtype)

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take over these values."""
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(parameters[name])


def _compute_in_own_dtype(module: nn.Module) -> None:
    given: list[torch.dtype] = []

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        given.append(args[0].dtype)
        return (args[0].float(), *args[1:])

    def after(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(given.pop())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, whole, by the names they have in the unwrapped model."""
    with FSDP.summon_full_params(model, writeback=False):
        return {clean_tensor_name(name): value.detach().clone() for name, value in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of every parameter, whole, as seen through a step of SGD with the learning rate 1, which is taken.

    So it is the gradient that an optimizer meets, whatever the parameters look like to it.
    """
    before = whole_parameters(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = whole_parameters(model)
    return {name: before[name].double() - after[name].double() for name in before}


def joined(local: torch.Tensor | None, like: torch.Tensor, ranks: Ranks, *, cut: bool) -> torch.Tensor:
    """The whole of what each rank has a part of, flat and on the CPU; ``like`` says how many elements that is.

    ``cut``: ranks hold consecutive parts (some perhaps none); otherwise each holds all of it.
    """
    own = torch.empty(0, dtype=like.dtype) if local is None else local.detach().flatten().cpu()
    parts: list[Any] = [own]
    if cut:
        parts = [None] * ranks.world_size
        dist.all_gather_object(parts, own)
    return torch.cat(parts)[: like.numel()]


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str, ulps: float = 16, scale: float = 0.0
) -> None:
    """Every element is within ``ulps`` rounding steps, of ``dtype``, of the largest expected value or of ``scale``."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} instead of {expected.shape}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    allowed = ulps * torch.finfo(dtype).eps * max(_largest(expected), scale)
    worst = _largest(actual - expected)
    # Written so that a NaN fails.
    assert worst <= allowed, f"{what}: off by {worst:.3e}, allowed {allowed:.3e} ({ulps:g} ulps of {dtype})"


def assert_all_near(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    what: str,
    ulps: float = 16,
) -> None:
    """The same names, and each value near.

    A value that is all rounding (the gradient of an attention's key bias, say) is judged by a hundredth of the largest
    of all values.
    """
    assert list(actual) == list(expected), f"{what}: names {list(actual)} instead of {list(expected)}"
    scale = 0.01 * max(map(_largest, expected.values()), default=0.0)
    for name, value in expected.items():
        assert_near(actual[name], value, dtype, f"{what}, {name}", ulps, scale)


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
