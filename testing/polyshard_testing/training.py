"""A few steps of a small model, sharded with a plugin and not sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from polyshard import GradScaler
from polyshard.api import close, shard, unsharded
from polyshard.config import PluginChoice, ShardConfig
from polyshard.interfaces import Collectives
from torch import nn
from typing_extensions import override

from .ranks import Rank, run_ranks

#: Ranks that share the model where the device is one that threads can share.
RANKS = 2
_STEPS = 3
_SAMPLES = 4

Values = Mapping[str, torch.Tensor]
#: Asked once a rank, by one rank after the other: settings of ``ShardConfig``, with plugins of that rank's own.
Settings = Callable[[], Mapping[str, Any]]


class Block(nn.Module):
    """A unit of its own in the suites' trainings."""

    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + torch.tanh(self.linear(self.norm(x))) * self.scale.to(x.dtype)
        return y


class Head(nn.Linear):
    """The last unit."""


class Model(nn.Module):
    """Tokens in, scores out. Blocks and head are units beside the root, which has the embedding."""

    def __init__(self, blocks: int = 2, width: int = 6, tokens: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = Head(width, 3)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def seeded(build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """The module that ``build`` makes, on ``device``, the same each time; other random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().to(device)


def tokens(samples: int = _SAMPLES * RANKS, among: int = 10) -> torch.Tensor:
    return (torch.arange(samples) * 7 + 3) % among


@dataclass(frozen=True)
class Training:
    """A few steps of SGD with momentum, each rank with an equal part of the batch."""

    build: Callable[[], nn.Module] = Model
    batch: Callable[[], torch.Tensor] = tokens
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    learning_rate: float = 0.5
    loss_scaling: bool = False
    """Whether a gradient scaler takes the steps."""
    eval_mode: bool = False
    """Whether the model is in eval mode while it is trained: then nothing is random."""

    def reference(self) -> Trained:
        """Of the model that is not sharded, on the whole batch."""
        return self.whole(seeded(self.build, self.device))

    def whole(self, model: nn.Module) -> Trained:
        """As ``reference``, of a ``model`` on the device, which is changed."""
        before = _values(model)
        self._steps(model, self.batch().to(self.device))
        return Trained(before, _values(model))

    def over(self, collectives: Collectives, model: nn.Module) -> Trained:
        """Of a ``model`` on the device that is sharded over ``collectives``, which stay open; one rank's part of it."""
        batch = self.batch().chunk(collectives.world_size)[collectives.rank]
        # What ranks say of themselves has rules of its own.
        return self._trained(model, batch, collectives, lambda: {"check_ranks": False}, nullcontext())

    def sharded(self, settings: Settings) -> Trained:
        """Of the model that is sharded over two ranks; as ``alone`` on a device that threads do not share."""
        if self.device.type != "cpu":
            return self.alone(settings)
        # Before there are ranks: threads share one generator of random numbers, so that numbers which a plugin draws on
        # one rank would change the model of another.
        models = [seeded(self.build, self.device) for _ in range(RANKS)]
        batches = self.batch().chunk(RANKS)

        def on_rank(rank: Rank) -> Trained:
            return self._trained(models[rank.rank], batches[rank.rank], rank.collectives, settings, rank.lock)

        return run_ranks(RANKS, on_rank)[0]

    def alone(self, settings: Settings) -> Trained:
        """Of the model in units that one rank keeps whole.

        Pretended ranks would gather values that no model holds, and train what no reference does.
        """
        model = seeded(self.build, self.device)
        return self._trained(model, self.batch(), _ALONE, lambda: {"strategy": "no_shard", **settings()}, nullcontext())

    def reference_scores(self) -> torch.Tensor:
        """The output of the unsharded model for the batch, in eval mode."""
        return self._scores(seeded(self.build, self.device))

    def scores(self, settings: Settings) -> torch.Tensor:
        """The output of the model in eval mode, in units that one rank keeps whole."""
        model = seeded(self.build, self.device)
        shard(model, self._config(_ALONE, lambda: {"strategy": "no_shard", **settings()}))
        scores = self._scores(model)
        close(model)
        return scores

    def _trained(
        self,
        model: nn.Module,
        batch: torch.Tensor,
        collectives: PluginChoice,
        settings: Settings,
        lock: AbstractContextManager[Any],
    ) -> Trained:
        before = _values(model)
        with lock:
            config = self._config(collectives, settings)
        shard(model, config)
        self._steps(model, batch.to(self.device))
        with unsharded(model):
            after = _values(model)
        close(model)
        return Trained(before, after)

    def _config(self, collectives: PluginChoice, settings: Settings) -> ShardConfig:
        chosen: dict[str, Any] = {"policy": _UNITS, **settings()}
        return ShardConfig(collectives=collectives, device=self.device, **chosen)

    def _steps(self, model: nn.Module, batch: torch.Tensor) -> None:
        model.train(not self.eval_mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)
        # Powers of two, so that scaling rounds nothing that does not underflow.
        scaler = GradScaler(self.device.type, init_scale=2.0**8, enabled=self.loss_scaling)
        for _ in range(_STEPS):
            scores = model(batch)
            loss = scores.to(torch.promote_types(scores.dtype, torch.float32)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    def _scores(self, model: nn.Module) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            scores: torch.Tensor = model(self.batch().to(self.device))
        return scores.clone()


def check_training(model: nn.Module, collectives: Collectives) -> None:
    """A copy of ``model``, in fp64, trains over the ranks as another one does by itself with all of their batches.

    Not tested of one rank, which shards nothing, of stand-ins, which gather what no model holds, and of jobs that
    train with others, whose gradients are no part of this one's.
    """
    capabilities, device = collectives.capabilities, collectives.device
    between_ranks = collectives.world_size > 1 and capabilities.can_communicate and collectives.replicas is None
    if between_ranks and torch.float64 in capabilities.dtypes and device.type in capabilities.devices:
        training = Training(batch=partial(tokens, _SAMPLES * collectives.world_size), device=device)
        whole, sharded = (copy.deepcopy(model).to(device) for _ in range(2))
        training.over(collectives, sharded).check(training.whole(whole), 1e-12)


_ALONE = {"name": "polyshard:fake"}
_UNITS = {"name": "polyshard:module_class", "classes": [Block, Head]}


def _values(model: nn.Module) -> Values:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@dataclass(frozen=True)
class Trained:
    """Parameters around a training, whole."""

    before: Values
    after: Values

    def check(self, reference: Trained, tolerance: float) -> None:
        """Compare what the steps changed: ``tolerance`` is a share of the largest change."""
        largest = max((reference.after[name] - reference.before[name]).abs().max().item() for name in reference.after)
        assert self.after.keys() == reference.after.keys()
        for name, expected in reference.after.items():
            difference = (self.after[name].double() - expected.double()).abs().max().item()
            assert difference <= tolerance * largest, (
                f"{name} is {difference:.3g} off after {_STEPS} steps, {difference / largest:.2g} of the largest change"
            )
