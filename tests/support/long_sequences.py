"""Sequences that are cut over ranks: a causal transformer, its training on a mesh with a dimension ``cp``, and the same
training of whole sequences in one process.

Sequences end at different places, behind which nothing counts: ranks have different numbers of tokens, some none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import polyshard
import polyshard_fsdp
import polyshard_fsdp2
import torch
from meshes import full, mesh_of
from parity import seeded
from polyshard_fsdp.wrap import ModuleWrapPolicy
from processes import device_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

#: Torch's attention on CUDA takes parts of 64 tokens, or of multiples of these.
WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 11, 128
STEPS, MICROBATCHES = 2, 2
#: AdamW makes much of the rounding of gradients that are smaller.
EPSILON = 1e-3
#: Targets of tokens without a loss.
IGNORED = -100


class Attention(nn.Module):
    """Causal. ``cp``: where queries, keys and values are parts of sequences, and torch does not exchange them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        # A bias of keys would have no gradient but rounding.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.cp: DeviceMesh | None = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        if self.cp is None:
            made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            key, value = whole(key, self.cp), whole(value, self.cp)
            seen = positions[:, None] >= torch.arange(key.size(2), device=x.device)
            made = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.out(made.transpose(1, 2).flatten(-2))


def whole(part: torch.Tensor, cp: DeviceMesh) -> torch.Tensor:
    """Keys or values of whole sequences, ``[rows, heads, tokens, size]``. Each rank has a part of their gradient."""
    placed = DTensor.from_local(part, cp, [Shard(2)]).redistribute(placements=[Replicate()])
    return placed.to_local(grad_placements=[Partial()])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x), positions)
        return x + self.down(torch.tanh(self.up(self.between(x))))


class Net(nn.Module):
    """Answers the loss of tokens: summed over those that have a target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            x = block(x, positions)
        scores, wanted = self.head(x).flatten(0, 1), targets.flatten()
        return functional.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")


class Batch(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor

    @property
    def count(self) -> torch.Tensor:
        """Of tokens that have a target."""
        return (self.targets != IGNORED).sum()


def sequences(turn: int, dp_rank: int, part: int, device: torch.device) -> Batch:
    """Whole sequences of one microbatch of the ranks at ``dp_rank``."""
    generator = torch.Generator().manual_seed(1000 * turn + 10 * dp_rank + part)
    rows = torch.randint(0, VOCAB, (2 + dp_rank, LENGTH + 1), generator=generator)
    # The first ends in the last part, and those of dp_rank 1 in the first: a rank has no token.
    ends = torch.tensor([LENGTH - 3 if dp_rank == 0 else 4, 5, 2][: len(rows)])
    targets = rows[:, 1:].masked_fill(torch.arange(LENGTH) >= ends[:, None], IGNORED)
    return Batch(rows[:, :-1].contiguous().to(device), targets.to(device), torch.arange(LENGTH, device=device))


class Ended(NamedTuple):
    losses: list[float]
    """By turn: the mean over all tokens. On a rank of the mesh its part, of which the mean over ranks is the whole."""
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def expected(dp_ranks: int, dtype: torch.dtype = torch.float64) -> Ended:
    """The training on whole sequences."""
    model, losses, norms = seeded(Net).to(dtype), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON)
    for turn in range(STEPS):
        batches = [
            sequences(turn, dp_rank, part, torch.device("cpu"))
            for dp_rank in range(dp_ranks)
            for part in range(MICROBATCHES)
        ]
        loss = sum(model(*batch) for batch in batches) / sum(batch.count for batch in batches)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return Ended(losses, norms, {name: each.detach() for name, each in model.named_parameters()})


def shard_by(way: str, model: nn.Module, mesh: DeviceMesh, **settings: Any) -> nn.Module:
    """``model``, sharded over the dimensions ``dp`` and ``cp`` of ``mesh``."""
    settings["policy"] = {"name": "module_class", "classes": [Block]}
    over = mesh["dp", "cp"]
    flat = over._flatten("dp_cp")
    match way:
        case "names":
            polyshard.shard(model, polyshard.ShardConfig(mesh=mesh, shard=("dp", "cp"), **settings))
        case "flattened":
            polyshard.shard(model, polyshard.ShardConfig(mesh=flat, **settings))
        case "replicas":
            hybrid = polyshard.ShardConfig(mesh=mesh, strategy="hybrid_shard", replicate="dp", shard="cp", **settings)
            polyshard.shard(model, hybrid)
        case "copies along cp":
            hybrid = polyshard.ShardConfig(
                mesh=mesh, strategy="hybrid_shard_zero2", replicate="cp", shard="dp", **settings
            )
            polyshard.shard(model, hybrid)
        case "fully_shard" | "fully_shard with replicas":
            for module in (*model.blocks, model):
                polyshard_fsdp2.fully_shard(module, mesh=flat if way == "fully_shard" else over)
        case "fsdp":
            wraps = ModuleWrapPolicy({Block})
            wrapped = polyshard_fsdp.FullyShardedDataParallel(
                model, device_mesh=flat, auto_wrap_policy=wraps, use_orig_params=True
            )
            assert wrapped.check_is_root()
            return wrapped
    return model


@contextmanager
def parts_of(batch: Batch, mesh: DeviceMesh, by_torch: bool) -> Iterator[Batch]:
    """This rank's part of each sequence; torch cuts them in place, and exchanges keys and values in attention."""
    cp = mesh["cp"]
    if by_torch:
        with context_parallel(cp, buffers=list(batch), buffer_seq_dims=[1, 1, 0]):
            yield batch
        return
    yield Batch(*(each.chunk(cp.size(), -1)[cp.get_local_rank()] for each in batch))


def train(
    rank: int,
    way: str,
    sizes: tuple[int, ...],
    device_type: str = "cpu",
    dtype: torch.dtype = torch.float64,
    settings: tuple[tuple[str, Any], ...] = (),
) -> Ended:
    """Train as ``expected`` does, on one rank of a mesh of dp x cp, or dp x cp x tp. On CUDA torch cuts sequences."""
    device = torch.device("cpu") if device_type == "cpu" else device_of(rank)
    mesh = mesh_of(sizes, ("dp", "cp", "tp")[: len(sizes)], device_type)
    model, by_torch = seeded(Net).to(device, dtype), device_type == "cuda"
    for block in model.blocks:
        block.attention.cp = None if by_torch else mesh["cp"]
        if len(sizes) == 3:
            columns = {
                name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "up")
            }
            parallelize_module(
                block, mesh["tp"], columns | {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
            )
    model = shard_by(way, model, mesh, **dict(settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPSILON)
    losses, norms = [], []
    for turn in range(STEPS):
        batches = [sequences(turn, mesh["dp"].get_local_rank(), part, device) for part in range(MICROBATCHES)]
        counts, loss = [], torch.zeros((), device=device)
        for batch in batches:
            with parts_of(batch, mesh, by_torch) as own:
                counts.append(own.count)
        divisor = polyshard.token_divisor(model, torch.stack(counts).sum())
        for number, batch in enumerate(batches):
            with _waiting(model, number < MICROBATCHES - 1), parts_of(batch, mesh, by_torch) as own:
                part = model(*own) / divisor
                part.backward()
            loss = loss + part.detach()
        losses.append(loss.item())
        norms.append(polyshard.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    with polyshard.unsharded(model):
        found = {name: full(each.detach()) for name, each in model.named_parameters()}
    polyshard.close(model)
    return Ended(losses, norms, {name.replace("_fsdp_wrapped_module.", ""): each for name, each in found.items()})


def _waiting(model: nn.Module, waits: bool) -> AbstractContextManager[Any]:
    return polyshard.no_sync(model) if waits else nullcontext()


def assert_as_whole(ranks: list[Ended], dp_ranks: int, dtype: torch.dtype, tolerance: float) -> None:
    """Losses, norms and parameters of all ranks are those of whole sequences in one process."""
    wanted = expected(dp_ranks, dtype)
    means = [math.fsum(each) / len(ranks) for each in zip(*(ended.losses for ended in ranks), strict=True)]
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(means, wanted.losses, **close)
    for ended in ranks:
        torch.testing.assert_close(ended.norms, wanted.norms, **close)
        torch.testing.assert_close(ended.parameters, wanted.parameters, **close)
