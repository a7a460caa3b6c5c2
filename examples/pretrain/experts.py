"""Experts of one block, shared by the ranks of an expert-parallel group; and the loss that keeps them evenly busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig


class Experts(nn.Module):
    """In the place of Transformers' ``MixtralExperts``, with its parameters and its arguments.

    Rank ``r`` of ``group`` has the experts from ``bounds[r]`` up to ``bounds[r + 1]``, of which there may be none.
    Tokens travel to the ranks of their experts and back. No token is dropped, however many choose one expert.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        number, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(number, hidden, inner))
        self.bounds = [0, number]
        self.group: dist.ProcessGroup | None = None
        """None where this rank has all experts."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """``[tokens, hidden]`` of as many; experts of each token and their weights, ``[tokens, k]``."""
        chosen = top_k_index.flatten()
        by_expert = chosen.argsort(stable=True)
        back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=by_expert.device))
        counts = torch.bincount(chosen, minlength=self.bounds[-1])
        rows = hidden_states.repeat_interleave(top_k_index.shape[1], 0)[by_expert]
        made = self._on_their_ranks(rows, self._counts_of_ranks(counts))[back]
        # A fixed order of sums: adding rows up where they belong would have another one in each run on a GPU.
        weighted = made.view(*top_k_index.shape, -1) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    def _counts_of_ranks(self, counts: torch.Tensor) -> list[list[int]]:
        """How many rows each rank of the group has for each expert; on the host, which gives messages their sizes."""
        if self.group is None:
            return [counts.tolist()]
        together = counts.new_empty(self.group.size(), len(counts))
        dist.all_gather(list(together.unbind()), counts, group=self.group)
        listed: list[list[int]] = together.tolist()
        return listed

    def _on_their_ranks(self, rows: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        """What experts make of ``rows``, which lie in the order of experts. ``counts``: by rank, then expert."""
        if self.group is None:
            return self._compute(rows, counts)
        rank = self.group.rank()
        first, last = self.bounds[rank : rank + 2]
        sent = [sum(counts[rank][a:b]) for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        here = [row[first:last] for row in counts]
        received = [sum(row) for row in here]
        made = self._compute(exchange(rows, sent, received, self.group), here)
        return exchange(made, received, sent, self.group)

    def _compute(self, rows: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
        """What this rank's experts make of ``rows``, in their order: by the rank that sent them, then by expert."""
        gate_up, down = (
            each.to_local() if isinstance(each, DTensor) else each for each in (self.gate_up_proj, self.down_proj)
        )
        pieces = torch.split(rows, [count for row in counts for count in row])
        answers = list(pieces)
        for expert in range(len(gate_up)):
            # Also of no rows: its gradient is then zero, and not missing.
            together = torch.cat(pieces[expert :: len(gate_up)])
            gate, up = nn.functional.linear(together, gate_up[expert]).chunk(2, dim=-1)
            made = nn.functional.linear(nn.functional.silu(gate) * up, down[expert])
            answers[expert :: len(gate_up)] = torch.split(made, [row[expert] for row in counts])
        return torch.cat([rows[:0], *answers])


def exchange(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send the next ``sent[r]`` of ``rows`` to each rank ``r``, and receive ``received[r]``; gradients go back."""
    arrived: torch.Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(gradient, *ctx.back), None, None, None


def balance_loss(router_logits: Sequence[torch.Tensor], chosen: int) -> torch.Tensor:
    """The load-balancing loss of the Switch Transformer, as Mixtral has it, over all blocks and the batch of all ranks.

    For ``n`` experts ``n * sum(f * P)``: ``f`` is the share of tokens that an expert gets, ``P`` its mean probability.
    ``f`` is that of all ranks together, so that the mean of what ranks return is the loss of the whole batch, and
    experts may be busy unevenly on one rank if others make up for it. ``chosen``: experts of each token.
    """
    probabilities = torch.cat(list(router_logits)).float().softmax(-1)
    number = probabilities.shape[1]
    counts = torch.bincount(probabilities.topk(chosen).indices.flatten(), minlength=number).float()
    dist.all_reduce(counts)
    shares = counts * (chosen / counts.sum())
    return number * (shares * probabilities.mean(0)).sum()
