"""The models that PyTorch's FSDP tests train, for any device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from parity import seed_all
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer, functional

_VOCABULARY = 23
_WIDTH = 16


class CUDAInitMode(Enum):
    """When a model moves to the device."""

    CUDA_BEFORE = 1
    """Before it is wrapped."""
    CUDA_AFTER = 2
    """Once it is wrapped."""


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


class TransformerWithSharedParams(nn.Module):
    """A small transformer whose output projection is the embedding's weight. It makes its own input and loss."""

    def __init__(self, group: Any, device: torch.device | None, deterministic: bool) -> None:
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
        self.bn = nn.BatchNorm1d(self.batch)
        if device is not None:
            self.to(device)
        if deterministic:
            self.eval()

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The arguments of ``forward`` on this rank, after seeding the generators with ``1 + rank``."""
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
        """Summed over the elements, 0-D."""
        target = model_input[1]
        return functional.cross_entropy(output.view(-1, output.size(-1)), target.view(-1), reduction="sum")

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
    ) -> Any:
        """The transformer; ``deterministic`` makes its values the same at every call.

        Wrapped, its encoder and decoder layers and the root are FSDP, or what the ``auto_wrap_policy`` in
        ``fsdp_kwargs`` says. ``group`` may be a pair of (shard, replicate) groups.
        """
        both = group if isinstance(group, tuple) else (group,)
        model = cls(both[0], device if cuda_init_mode is CUDAInitMode.CUDA_BEFORE else None, deterministic)
        if fsdp_init_mode is FSDPInitMode.NO_FSDP:
            return model
        policy = ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer})
        wrapped = wrap_fsdp(model, group, **{"auto_wrap_policy": policy, **(fsdp_kwargs or {})})
        return wrapped.to(device) if cuda_init_mode is CUDAInitMode.CUDA_AFTER else wrapped


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
