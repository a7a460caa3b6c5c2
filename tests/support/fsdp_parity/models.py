"""The models that PyTorch's FSDP tests train, for any device."""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity import seed_all
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import _runtime_utils
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer, functional

#: Cycles that `torch.cuda._sleep` spins for one millisecond on a GPU of 2 GHz; a slower one sleeps longer.
_CYCLES_PER_MS = 2_000_000
_VOCABULARY = 23
_WIDTH = 16


class CUDAInitMode(Enum):
    """When a model moves to the device."""

    CUDA_BEFORE = 1
    """Before it is wrapped."""
    CUDA_AFTER = 2
    """Once it is wrapped."""
    CUDA_NEVER = 3
    """Not at all."""


class FSDPInitMode(Enum):
    """Whether a model comes wrapped."""

    NO_FSDP = 1
    """Plain."""
    RECURSIVE = 2
    """With its submodules wrapped."""


@contextmanager
def expected_warnings() -> Iterator[None]:
    """Lets the warnings pass that these models give by design: one rank, `NO_SHARD`, wrapping on the CPU."""
    with warnings.catch_warnings():
        for message in (
            "FSDP is switching to use `NO_SHARD`",
            "The `NO_SHARD` sharding strategy is deprecated",
            "The passed-in `module` is on CPU",
            "Both mixed precision and an auto_wrap_policy were specified",
            "enable_nested_tensor is True",
            "When using ``NO_SHARD`` for ``ShardingStrategy``",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


def wrap_fsdp(module: nn.Module, *args: Any, **kwargs: Any) -> FSDP:
    """``FSDP(module, ...)`` without the expected warnings."""
    with expected_warnings():
        return FSDP(module, *args, **kwargs)


def group_of_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank alone. Every rank of the default group calls it."""
    groups = [dist.new_group([rank]) for rank in range(group.size())]
    own = groups[group.rank()]
    assert isinstance(own, dist.ProcessGroup)
    return own


def sleep(device: torch.device, milliseconds: int) -> None:
    """Hold up the device's current stream, or on the CPU the caller."""
    if device.type == "cuda":
        torch.cuda._sleep(milliseconds * _CYCLES_PER_MS)  # type: ignore[no-untyped-call]
    else:
        time.sleep(milliseconds / 1000)


class _Done:
    """A collective that is over."""

    def get_future(self) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        return future

    def wait(self) -> None:
        """Nothing is under way."""


class DummyProcessGroup:
    """Has a rank and a size, and nobody behind it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> _Done:
        return _Done()


class DummyDDP(nn.Module):
    """Looks like DDP and averages nothing, for a model that reduces its own gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class ParityModel(nn.Module, ABC):
    """A model that makes its own input and loss, the same for the sharded one and for its reference."""

    rank: int
    world_size: int

    @abstractmethod
    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The arguments of ``forward`` on this rank, after seeding the generators with ``1 + rank``."""

    @abstractmethod
    def get_loss(self, model_input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """A loss summed over the elements, 0-D."""

    def run_backward(self, loss: torch.Tensor) -> None:
        """Backward from the loss, and whatever the model does to its gradients itself."""
        loss.backward()  # type: ignore[no-untyped-call]

    @classmethod
    def init(
        cls,
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        cuda_init_mode: CUDAInitMode,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        *,
        device: torch.device,
        **options: Any,
    ) -> Any:
        """A model, wrapped or not; ``deterministic`` makes its values the same at every call."""
        wrapped = fsdp_init_mode is FSDPInitMode.RECURSIVE
        at_first = device if cuda_init_mode is CUDAInitMode.CUDA_BEFORE else None
        model = cls.make(group, fsdp_kwargs or {} if wrapped else None, at_first, deterministic, **options)
        return model.to(device) if wrapped and cuda_init_mode is CUDAInitMode.CUDA_AFTER else model

    @classmethod
    def make(
        cls,
        group: Any,
        fsdp_kwargs: Mapping[str, Any] | None,
        device: torch.device | None,
        deterministic: bool,
        **options: Any,
    ) -> Any:
        """The model on ``device``, wrapped unless ``fsdp_kwargs`` is None."""


class TransformerWithSharedParams(ParityModel):
    """A small transformer whose output projection is the embedding's weight."""

    def __init__(
        self, group: Any, device: torch.device | None, deterministic: bool = False, add_bn: bool = True
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        self.batch = 2
        if deterministic:
            seed_all(0)
        self.embed_tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        with expected_warnings():
            self.transformer = nn.Transformer(
                d_model=_WIDTH, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=8, dropout=0.1
            )
        self.output_proj = nn.Linear(_WIDTH, _VOCABULARY)
        self.output_proj.weight = self.embed_tokens.weight
        self.vocab_bias: torch.Tensor
        self.long_buffer: torch.Tensor
        self.register_buffer("vocab_bias", torch.ones(_WIDTH))
        self.register_buffer("long_buffer", torch.zeros(_WIDTH, dtype=torch.int64))
        self.bn = nn.BatchNorm1d(self.batch) if add_bn else nn.Identity()
        if device is not None:
            self.to(device)
        if deterministic:
            self.eval()

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        seed_all(1 + self.rank)
        # One short of the vocabulary, so that a test may add one to every token.
        source = torch.randint(0, _VOCABULARY - 1, (6, self.batch))
        target = torch.randint(0, _VOCABULARY - 1, (4, self.batch))
        return source.to(device), target.to(device)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        embedded = self.embed_tokens(source)
        embedded = embedded + self.vocab_bias + self.long_buffer.to(embedded.dtype)
        decoded = self.transformer(embedded, self.bn(self.embed_tokens(target)))
        projected: torch.Tensor = self.output_proj(decoded)
        return projected

    def get_loss(self, model_input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        target = model_input[1]
        return functional.cross_entropy(output.view(-1, output.size(-1)), target.view(-1), reduction="sum")

    @classmethod
    def make(
        cls,
        group: Any,
        fsdp_kwargs: Mapping[str, Any] | None,
        device: torch.device | None,
        deterministic: bool,
        **options: Any,
    ) -> Any:
        """The transformer; wrapped, its encoder and decoder layers and the root are FSDP, or what the
        ``auto_wrap_policy`` in ``fsdp_kwargs`` says. ``group`` may be a pair of (shard, replicate) groups.
        """
        both = group if isinstance(group, tuple) else (group,)
        model = cls(both[0], device, deterministic, **options)
        if fsdp_kwargs is None:
            return model
        policy = ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer})
        return wrap_fsdp(model, group, **{"auto_wrap_policy": policy, **fsdp_kwargs})


def _linear(inputs: int, outputs: int, device: torch.device | None) -> nn.Module:
    """Drawn on the CPU and then moved, so that every device starts from the same numbers."""
    return nn.Linear(inputs, outputs).to(device)


class NestedWrappedModule(ParityModel):
    """Linear layers, some of them FSDP, one of those inside another; the whole is none."""

    def __init__(
        self,
        group: Any,
        wrapped: bool,
        device: torch.device | None,
        deterministic: bool = False,
        fsdp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()

        def maybe_wrap(module: nn.Module) -> nn.Module:
            return wrap_fsdp(module, group, **(fsdp_kwargs or {})) if wrapped else module

        if deterministic:
            seed_all(0)
        self.module = nn.Sequential(
            _linear(8, 4, device),
            maybe_wrap(nn.Sequential(maybe_wrap(_linear(4, 16, device)), _linear(16, 16, device))),
            maybe_wrap(_linear(16, 4, device)),
            _linear(4, 8, device),
        )

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        seed_all(1 + self.rank)
        # Drawn on the CPU, so that every device sees the same numbers.
        return (torch.rand(4, 8).to(device),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(x)
        return output

    def get_loss(self, model_input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    @classmethod
    def make(
        cls,
        group: Any,
        fsdp_kwargs: Mapping[str, Any] | None,
        device: torch.device | None,
        deterministic: bool,
        **options: Any,
    ) -> Any:
        """Wrapped as the class says, without a root FSDP."""
        return cls(group, fsdp_kwargs is not None, device, deterministic, fsdp_kwargs)


class NestedWrappedModuleWithDelay(ParityModel):
    """The nested layers with the device held up after the loss, or before each reduce-scatter."""

    def __init__(
        self, module: NestedWrappedModule, device: torch.device, after_loss_ms: int, before_reduction_ms: int
    ) -> None:
        super().__init__()
        self.module = module
        self.rank = module.rank
        self.world_size = module.world_size
        self.device = device
        self.after_loss_ms = after_loss_ms
        self.before_reduction_ms = before_reduction_ms
        self.delayed_reductions = 0
        """Reduce-scatters that were held up so far."""

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return self.module.get_input(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(x)
        return output

    def get_loss(self, model_input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        loss = self.module.get_loss(model_input, output)
        if self.after_loss_ms:
            sleep(self.device, self.after_loss_ms)
        return loss

    def run_backward(self, loss: torch.Tensor) -> None:
        original: Callable[..., Any] = dist.reduce_scatter_tensor

        def late(*args: Any, **kwargs: Any) -> Any:
            self.delayed_reductions += 1
            sleep(self.device, self.before_reduction_ms)
            with warnings.catch_warnings():
                # torch 2.13 has another name for it; a model written before that patches this one.
                warnings.filterwarnings("ignore", "`torch.distributed.reduce_scatter_tensor`", FutureWarning)
                return original(*args, **kwargs)

        if not self.before_reduction_ms:
            self.module.run_backward(loss)
            return
        with mock.patch("torch.distributed.reduce_scatter_tensor", late):
            self.module.run_backward(loss)

    @classmethod
    def init(
        cls,
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        cuda_init_mode: CUDAInitMode = CUDAInitMode.CUDA_AFTER,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        delay_after_loss_ms: int = 0,
        delay_before_reduction_ms: int = 0,
        *,
        device: torch.device,
    ) -> Any:
        """As `NestedWrappedModule.init`, with delays in milliseconds."""
        module = NestedWrappedModule.init(
            group, fsdp_init_mode, cuda_init_mode, fsdp_kwargs, deterministic, device=device
        )
        return cls(module, device, delay_after_loss_ms, delay_before_reduction_ms)


class MixtureOfExperts(ParityModel):
    """Layers that all ranks share, and one expert that belongs to this rank alone.

    Wrapped, the expert is FSDP over a group of one rank. Plain, the model averages the gradients of all but the expert
    itself, so its reference is `DummyDDP`.
    """

    def __init__(
        self,
        group: Any,
        wrapped: bool,
        device: torch.device | None,
        compute_device: torch.device,
        before_free_ms: int,
        deterministic: bool = False,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        expert_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.group = group
        self.rank = group.rank()
        self.world_size = group.size()
        self.wrapped = wrapped
        self.compute_device = compute_device
        self.before_free_ms = before_free_ms
        self.delayed_frees = 0
        """Reshards that were held up so far."""
        if deterministic:
            seed_all(42 + self.rank)
        expert: nn.Module = _linear(23, 12, device)
        for parameter in expert.parameters():
            parameter.of_expert = True  # type: ignore[attr-defined]
        if deterministic:
            seed_all(0)
        shared: nn.Module = _linear(12, 23, device)
        if wrapped:
            own = expert_group or group_of_own(group)
            expert = wrap_fsdp(expert, own, **(fsdp_kwargs or {}))
            shared = wrap_fsdp(shared, group, **(fsdp_kwargs or {}))
        self.module = nn.Sequential(_linear(8, 12, device), shared, expert, _linear(12, 8, device))

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        seed_all(1 + self.rank)
        return (torch.rand(4, 8).to(device),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        original: Callable[..., Any] = _runtime_utils._reshard

        def late(*args: Any, **kwargs: Any) -> Any:
            self.delayed_frees += 1
            sleep(self.compute_device, self.before_free_ms)
            return original(*args, **kwargs)

        output: torch.Tensor
        if not (self.before_free_ms and self.wrapped):
            output = self.module(x)
            return output
        with mock.patch("polyshard_fsdp._runtime_utils._reshard", late):
            output = self.module(x)
        return output

    def get_loss(self, model_input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if self.wrapped:
            return
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.grad is not None and not hasattr(parameter, "of_expert"):
                    parameter.grad.div_(self.world_size)
                    dist.all_reduce(parameter.grad, group=self.group)

    @classmethod
    def init(
        cls,
        group: Any,
        fsdp_init_mode: FSDPInitMode,
        cuda_init_mode: CUDAInitMode,
        fsdp_kwargs: Mapping[str, Any] | None = None,
        deterministic: bool = False,
        delay_before_free_ms: int = 0,
        expert_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device,
    ) -> Any:
        """Wrapped as the class says, without a root FSDP. ``expert_group`` spares the making of a group a model."""
        wrapped = fsdp_init_mode is FSDPInitMode.RECURSIVE
        before = cuda_init_mode is CUDAInitMode.CUDA_BEFORE
        model = cls(
            group,
            wrapped,
            device if before else None,
            device,
            delay_before_free_ms,
            deterministic,
            fsdp_kwargs,
            expert_group,
        )
        return model.to(device) if wrapped and cuda_init_mode is CUDAInitMode.CUDA_AFTER else model


class SaveForwardInputsModule(nn.Module):
    """A Linear(100, 100) that notes what it was given."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)
        self.forward_inputs = forward_inputs
        self.cast_forward_inputs = cast_forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        output: torch.Tensor = self.l(x.to(self.l.weight.dtype) if self.cast_forward_inputs else x)
        return output


class SaveForwardInputsModel(nn.Module):
    """Two such layers; it notes its own input too, each under the module that got it."""

    def __init__(self, forward_inputs: dict[nn.Module, torch.Tensor], cast_forward_inputs: bool) -> None:
        super().__init__()
        self.c1 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.c2 = SaveForwardInputsModule(forward_inputs, cast_forward_inputs)
        self.forward_inputs = forward_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forward_inputs[self] = x
        output: torch.Tensor = self.c2(self.c1(x))
        return output
