"""A transformer and a mixture of experts for tests beside tensor and expert parallelism, and the same models whole.

``Net(shape)`` is the whole model, which stands on no mesh. ``Net(shape)`` followed by ``parallelize`` is what one rank
of a mesh trains: the same values, cut. Nothing here knows of polyshard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Of a model, and how its parts are cut."""

    experts: int = 0
    """Experts of each block; 0 for a plain transformer."""
    kept: Literal["grouped", "dtensor", "modules"] = "grouped"
    """What a rank holds of them: plain 3-D tensors of its own, its part of a ``DTensor``, or a module for each."""
    closed: tuple[int, ...] = ()
    """Experts that no token goes to."""
    sequence: bool = False
    """Sequence parallel: norms and residuals see a part of the tokens."""
    tied: bool = False
    """Whether the head has the embedding's weight."""
    recomputed: bool = False
    """Whether blocks are computed again in backward, dispatch to experts included."""
    blocks: int = 2
    width: int = 8
    hidden: int = 10
    """Not divided by 4 evenly: tensor parallel parts differ in size."""
    heads: int = 4
    vocab: int = 12
    length: int = 8


class Attention(nn.Module):
    """Of as many heads as its projections have columns for. No bias that has no gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = (query @ key.transpose(-1, -2) / self.size**0.5).softmax(-1)
        return self.out((scores @ value).transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Expert(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class ExpertModules(nn.Module):
    """One module an expert. One without tokens is not called."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.each = nn.ModuleList(Expert(shape.width, shape.hidden) for _ in range(shape.experts))

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        parts = zip(self.each, x.split(list(counts)), strict=True)
        return torch.cat([x[:0], *(expert(part) for expert, part in parts if part.numel())])


class GroupedExperts(nn.Module):
    """3-D weights, ``[experts, ...]``: a matrix an expert. They may be parts of DTensors over ``ep``, and ``tp``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.width) / shape.width**0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.width, shape.hidden) / shape.hidden**0.5)
        self.tp: DeviceMesh | None = None

    def forward(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if self.tp is not None:
            # Each rank computes with some columns, and has a part of the gradient of what all begin with.
            x = DTensor.from_local(x, self.tp, [Replicate()]).to_local(grad_placements=[Partial()])
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        parts = [torch.tanh(part @ up[index].t()) @ down[index].t() for index, part in enumerate(x.split(list(counts)))]
        # An empty sum of weights: without experts, or tokens, they have a gradient all the same. It is no expanded
        # scalar: torch 2.11 communicates to make one of an uneven DTensor dense.
        out = torch.cat([x[:0], *parts]) + (0 * up).sum() + (0 * down).sum()
        if self.tp is not None:
            out = DTensor.from_local(out, self.tp, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        return out


class _Exchange(torch.autograd.Function):
    """``all_to_all_single`` of rows, and back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = (sent, received, group)
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return _Exchange.apply(gradient, *ctx.back), None, None, None


class Moe(nn.Module):
    """Each token goes to two experts, which may be on other ranks of ``ep``. Forward sets ``balance``, another loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = (ExpertModules if shape.kept == "modules" else GroupedExperts)(shape)
        self.closed = list(shape.closed)
        #: Experts of each rank, and their group, where there are others.
        self.shares = [shape.experts]
        self.group: dist.ProcessGroup | None = None
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        logits = self.router(rows)
        if self.closed:
            logits = logits.index_fill(-1, torch.tensor(self.closed, device=x.device), -torch.inf)
        weights, chosen = logits.softmax(-1).topk(2)
        counts = torch.bincount(chosen.flatten(), minlength=logits.size(-1))
        self.balance = (counts / counts.sum() * logits.softmax(-1).mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        sent = rows.repeat_interleave(2, 0)[order]
        out = (self.experts(sent, counts.tolist()) if self.group is None else self._elsewhere(sent, counts))[back]
        return (out.unflatten(0, (-1, 2)) * weights.unsqueeze(-1)).sum(1).view_as(x)

    def _elsewhere(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What the experts of all ranks make of ``x``, which lies in their order: ``counts`` rows for each."""
        group = self.group
        assert group is not None
        everyone = counts.new_empty(len(self.shares), counts.numel())
        dist.all_gather(list(everyone.unbind()), counts, group=group)
        first = sum(self.shares[: dist.get_rank(group)])
        here = everyone[:, first : first + self.shares[dist.get_rank(group)]]
        sent, received = [int(each.sum()) for each in counts.split(self.shares)], here.sum(1).tolist()
        arrived = _Exchange.apply(x, received, sent, group)
        # By rank, then expert; wanted by expert.
        expert = torch.arange(here.size(1), device=x.device).repeat(len(self.shares)).repeat_interleave(here.flatten())
        order = expert.argsort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        made = self.experts(arrived[order], here.sum(0).tolist())[back]
        return _Exchange.apply(made, sent, received, group)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.between = nn.LayerNorm(shape.width)
        self.feed = Moe(shape) if shape.experts else Mlp(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.between(x))


class Net(nn.Module):
    """Answers the loss of a batch of tokens; that of balance included."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.recomputed else block(x)
        scores = self.head(self.norm(x)).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, tokens.roll(1, -1).flatten())
        for block in self.blocks:
            if isinstance(block.feed, Moe):
                loss = loss + 0.1 * block.feed.balance
        return loss


def tokens_of(shape: Shape, turn: int, rank: int, rows: int = 2) -> torch.Tensor:
    """A batch that differs by turn and data rank, the number of rows too."""
    generator = torch.Generator().manual_seed(100 * turn + rank + 1)
    return torch.randint(0, shape.vocab, (rows + rank % 2, shape.length), generator=generator)


def parallelize(model: Net, mesh: DeviceMesh) -> Net:
    """Cut a whole model, alike on all ranks, over the dimensions ``tp`` and ``ep`` of ``mesh``, where it has them."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], plan_of(model))
        if model.shape.tied:
            # The plan has made two parameters of one.
            model.head.weight = model.embed.weight
    if "ep" in names:
        for block in model.blocks:
            _share_experts(block.feed, mesh, model.shape)
    return model


def plan_of(model: Net) -> dict[str, Any]:
    """Of ``parallelize_module``."""
    sequence = model.shape.sequence
    cut = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=cut),
        "head": ColwiseParallel(input_layouts=cut, output_layouts=Replicate()),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for index in range(len(model.blocks)):
        at = f"blocks.{index}."
        for name in ("query", "key", "value"):
            plan[f"{at}attention.{name}"] = ColwiseParallel()
        plan[f"{at}attention.out"] = RowwiseParallel(output_layouts=cut)
        if not model.shape.experts:
            # A local part does not tell how large an uneven whole is.
            plan[f"{at}feed.up"] = ColwiseParallel(use_local_output=False)
            plan[f"{at}feed.down"] = RowwiseParallel(output_layouts=cut)
        if sequence:
            plan[f"{at}before"] = plan[f"{at}between"] = SequenceParallel()
            for name in ("attention", "feed"):
                plan[f"{at}{name}"] = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(Replicate(),))
    return plan


def shares_of(experts: int, ranks: int) -> list[int]:
    """How many experts each rank has, as ``Shard(0)`` cuts them."""
    each = -(-experts // ranks)
    return [max(0, min(each, experts - rank * each)) for rank in range(ranks)]


def _share_experts(moe: Moe, mesh: DeviceMesh, shape: Shape) -> None:
    ep = mesh["ep"]
    moe.group = ep.get_group()
    moe.shares = shares_of(shape.experts, ep.size())
    first, here = sum(moe.shares[: ep.get_local_rank()]), moe.shares[ep.get_local_rank()]
    experts = moe.experts
    if isinstance(experts, ExpertModules):
        experts.each = experts.each[first : first + here]
        return
    for name, dimension in (("up", 1), ("down", 2)):
        whole = getattr(experts, name).detach()
        part: torch.Tensor = whole[first : first + here].clone()
        if shape.kept == "dtensor" and "tp" in (mesh.mesh_dim_names or ()):
            part = distribute_tensor(whole, mesh["ep", "tp"], [Shard(0), Shard(dimension)])
            experts.tp = mesh["tp"]
        elif shape.kept == "dtensor":
            part = distribute_tensor(whole, ep, [Shard(0)])
        setattr(experts, name, nn.Parameter(part))
