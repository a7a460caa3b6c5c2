"""A few steps of a small model, sharded with a plugin and not sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..composable import close, shard, unsharded
from ..config import PluginChoice, ShardConfig
from .ranks import Rank, run_ranks

#: Ranks that share the model where the device is one that threads can share.
RANKS = 2
_STEPS = 3
_SAMPLES = 4

Values = Mapping[str, torch.Tensor]


class Block(nn.Module):
    """A unit of its own in the suites' trainings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(self.linear(self.norm(x))) * self.scale.to(x.dtype)
        return y


class Model(nn.Module):
    """Tokens in, scores out. Three blocks, whose parameters fill no whole number of kibibytes."""

    def __init__(self, width: int = 6, tokens: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def seeded(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """What ``build`` makes on ``device``, the same each time; other random numbers are as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().to(device)


def tokens(samples: int = _SAMPLES * RANKS, among: int = 10) -> torch.Tensor:
    """Token numbers for a batch."""
    return (torch.arange(samples) * 7 + 3) % among


@dataclass(frozen=True)
class Training:
    """Three steps of SGD with momentum, each rank with an equal part of the batch; then one evaluation."""

    build: Callable[[], nn.Module] = Model
    batch: Callable[[], torch.Tensor] = tokens
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    learning_rate: float = 0.5
    eval_mode: bool = False
    """Whether the model is in eval mode while it is trained: then nothing is random."""

    def plain(self) -> Trained:
        """Of the model that is not sharded, on the whole batch."""
        model = seeded(self.build, self.device)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        self._steps(model, self.batch().to(self.device))
        after = {name: value.detach().clone() for name, value in model.named_parameters()}
        return Trained(before, after, self._evaluated(model, self.batch().to(self.device)))

    def sharded(self, settings: Callable[[], Mapping[str, Any]]) -> Trained:
        """Of the model that is sharded with ``settings``, which are asked for once a rank, by one after the other.

        Over two ranks, or one on a device that threads do not share. The evaluation is that of rank 0's part.
        """
        if self.device.type != "cpu":
            return self._on_rank({"name": "polyshard:fake"}, 0, 1, settings, nullcontext())

        def on_rank(rank: Rank) -> Trained:
            return self._on_rank(rank.collectives, rank.rank, rank.world_size, settings, rank.lock)

        return run_ranks(RANKS, on_rank)[0]

    def _on_rank(
        self,
        collectives: PluginChoice,
        rank: int,
        ranks: int,
        settings: Callable[[], Mapping[str, Any]],
        lock: AbstractContextManager[Any],
    ) -> Trained:
        with lock:
            model = seeded(self.build, self.device)
            before = {name: value.detach().clone() for name, value in model.named_parameters()}
            chosen: dict[str, Any] = {"policy": _BLOCKS, **settings(), "collectives": collectives}
        shard(model, ShardConfig(device=self.device, **chosen))
        batch = self.batch().to(self.device).chunk(ranks)[rank]
        self._steps(model, batch)
        evaluated = self._evaluated(model, batch)
        with unsharded(model):
            after = {name: value.detach().clone() for name, value in model.named_parameters()}
        close(model)
        return Trained(before, after, evaluated)

    def _steps(self, model: nn.Module, batch: torch.Tensor) -> None:
        model.train(not self.eval_mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)
        for _ in range(_STEPS):
            model(batch).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def _evaluated(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            scores: torch.Tensor = model(batch)
        return scores.clone()


_BLOCKS = {"name": "polyshard:module_class", "classes": Block}


@dataclass(frozen=True)
class Trained:
    """What came of a training, whole and on rank 0."""

    before: Values
    after: Values
    evaluated: torch.Tensor
    """Scores of the part of the batch that is rank 0's, or more."""

    def check_parameters(self, reference: Trained, tolerance: float) -> None:
        """Compare what the steps changed: ``tolerance`` is a share of the largest change."""
        largest = max((reference.after[name] - reference.before[name]).abs().max().item() for name in reference.after)
        assert self.after.keys() == reference.after.keys()
        for name, expected in reference.after.items():
            difference = (self.after[name].double() - expected.double()).abs().max().item()
            assert difference <= tolerance * largest, (
                f"{name} is {difference:.3g} off after {_STEPS} steps, {difference / largest:.2g} of the largest change"
            )

    def check_evaluation(self, reference: Trained, tolerance: float) -> None:
        """Compare scores: ``tolerance`` is a share of the largest."""
        expected = reference.evaluated[: len(self.evaluated)].double()
        difference = (self.evaluated.double() - expected).abs().max().item()
        assert difference <= tolerance * expected.abs().max().item(), f"scores are {difference:.3g} off"
