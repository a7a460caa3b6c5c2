"""What every peer of ``peers.py`` trains: a language model in several sizes, its first weights and its batches."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of the model and of one rank's batch, and how long a run of it is unless told otherwise."""

    name: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    batch: int
    seq: int
    checkpointing: bool
    """Whether every block's activations are recomputed in backward."""
    steps: int
    """Timed steps in a round."""
    selective: bool = False
    """Whether blocks recompute all but products and attention, and the loss is compiled, as is usual for large ones."""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def parameter_count(self) -> int:
        """Parameters of the model: embedding, blocks, final norm and head."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn + 2 * self.dim
        return 2 * self.vocab * self.dim + self.layers * block + self.dim

    @property
    def flops_per_token(self) -> float:
        """Forward and backward of what a model needs, so without what is computed again.

        6 for each parameter that multiplies, and causal attention at half.
        """
        multiplying = self.parameter_count - self.vocab * self.dim
        return 6.0 * multiplying + 12 * self.layers * self.dim * self.seq / 2

    def describe(self) -> str:
        """One line for the help and for tables."""
        recomputed = ", full activation checkpointing" if self.checkpointing else ""
        recomputed += ", all but products and attention recomputed, compiled loss" if self.selective else ""
        return (
            f"{self.name}: {self.layers} blocks, d {self.dim}, {self.heads} heads ({self.kv_heads} for keys), ffn "
            f"{self.ffn}, vocabulary {self.vocab}, {self.batch}x{self.seq} tokens a GPU, "
            f"{self.parameter_count / 1e6:,.0f}M parameters{recomputed}"
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", 32, 3, 4, 2, 48, 128, 2, 16, True, 4),
        Workload("host", 256, 64, 4, 4, 512, 1024, 1, 64, False, 10),
        Workload("300m", 1024, 20, 16, 16, 2816, 32000, 8, 1024, False, 10),
        Workload("1b", 2048, 18, 16, 8, 8192, 32000, 4, 2048, False, 10),
        Workload("8b", 4096, 32, 32, 8, 14336, 32000, 2, 4096, True, 5),
        Workload("8b-selective", 4096, 32, 32, 8, 14336, 32000, 1, 8192, False, 5, True),
        Workload("tiny-selective", 32, 3, 4, 2, 48, 128, 2, 16, False, 4, True),
    )
}


_ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
#: Operations whose results selective checkpoints keep.
_KEPT = [
    torch.ops.aten.mm.default,
    *(getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default for name in _ATTENTION),
]


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
    contexts = create_selective_checkpoint_contexts(_KEPT)  # type: ignore[no-untyped-call]
    return contexts


class Block(nn.Module):
    """Attention and a gated feed-forward, both behind a norm and around a residual."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        dim, kv_dim = workload.dim, workload.kv_heads * workload.head_dim
        self.head_dim = workload.head_dim
        self.selective = workload.selective
        self.grouped = workload.heads != workload.kv_heads
        self.attention_norm = nn.RMSNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_dim, bias=False)
        self.value = nn.Linear(dim, kv_dim, bias=False)
        self.project = nn.Linear(dim, dim, bias=False)
        self.ffn_norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, workload.ffn, bias=False)
        self.up = nn.Linear(dim, workload.ffn, bias=False)
        self.down = nn.Linear(workload.ffn, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, dim]`` to the same."""
        if not self.selective:
            return self.compute(x)
        # Inside, so that a compiled block has it in its graph.
        output: torch.Tensor = checkpoint(
            self.compute, x, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
        )
        return output

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Without a checkpoint."""
        x = x + self.attend(self.attention_norm(x))
        normed = self.ffn_norm(x)
        fed: torch.Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + fed

    def attend(self, normed: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, dim]`` to the same: causal attention."""
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)
        projected: torch.Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return projected


class Tail(nn.Module):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(workload.dim)
        self.head = nn.Linear(workload.dim, workload.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, dim]`` to logits, ``[batch, seq, vocab]``."""
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class LanguageModel(nn.Module):
    """Tokens and next tokens to the loss. Without positions: the data are of a kind that needs none."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.checkpointing = workload.checkpointing
        self.loss = torch.compile(_loss) if workload.selective else _loss
        self.embedding = nn.Embedding(workload.vocab, workload.dim)
        self.blocks = nn.ModuleList(Block(workload) for _ in range(workload.layers))
        self.tail = Tail(workload)

    @property
    def units(self) -> list[nn.Module]:
        """Embedding, blocks and tail, in the order of their use."""
        return [self.embedding, *self.blocks, self.tail]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Both ``[batch, seq]``, int64, to a 0-dim fp32 loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing:
                # No dropout, so no random state to keep.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        logits: torch.Tensor = self.tail(x)
        loss: torch.Tensor = self.loss(logits, targets)
        return loss


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def initial_value(name: str, shape: torch.Size | tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The first value of parameter ``name``, fp32: ones for a norm, else normal with a deviation of 0.02.

    Follows from the name alone, so that peers which initialise in another order, or one unit at a time, start alike.
    """
    if len(shape) < 2:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.normal(0.0, 0.02, tuple(shape), generator=generator, device=device)


def meta_model(workload: Workload) -> LanguageModel:
    """The model without memory."""
    with torch.device("meta"):
        return LanguageModel(workload)


def whole_model(workload: Workload, device: torch.device, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """The model on ``device``, every parameter whole and with its first value."""
    model = meta_model(workload).to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, device))
    return model


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """A function that fills the parameters that a module of ``model`` holds directly; call it before wrapping."""
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                parameter.copy_(initial_value(names[module] + name, parameter.shape, parameter.device))

    return initialize


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of one rank, the same for every peer.

    A token is followed by the one that stands a fixed distance behind it in a part of the vocabulary, except where
    chance replaced it: a rule that every size of model can learn, and a loss that never reaches 0.
    """

    workload: Workload
    rank: int
    device: torch.device

    def batch(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and next tokens, ``[batch, seq]``, int64."""
        size, length = self.workload.batch, self.workload.seq + 1
        used = min(self.workload.vocab, 512)
        generator = torch.Generator(self.device).manual_seed(1_000_003 * (self.rank + 1) + index)
        start = torch.randint(0, used, (size, 1), generator=generator, device=self.device)
        ruled = (start + 7 * torch.arange(length, device=self.device)) % used
        chance = torch.randint(0, used, (size, length), generator=generator, device=self.device)
        replaced = torch.rand((size, length), generator=generator, device=self.device) < 0.1
        sequence = torch.where(replaced, chance, ruled)
        return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
