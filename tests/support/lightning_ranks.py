"""Lightning on ranks that are processes: modules to train, where they run, and what the unsharded model does."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from parity import Block, seed_all, units_of
from polyshard import ShardConfig
from polyshard_lightning import PolyshardStrategy
from processes import KeptRanks
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrun import launched

T = TypeVar("T")

#: Shared by all files of a process: importing Lightning takes each rank seconds.
_RANKS = KeptRanks()
atexit.register(_RANKS.close)

BATCH = 4
#: Of most trainings.
STEPS = 8
CONFIG = ShardConfig(policy=units_of(Block), timeout_s=30.0)


def on_ranks(target: Callable[..., T], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[T]:
    """``target(rank, *args)`` on each rank, as torchrun would have started it."""
    return _RANKS.run(world_size, _launched, target, args, timeout=timeout)


def _launched(rank: int, target: Callable[..., T], args: tuple[Any, ...]) -> T:
    further = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    with launched(rank, dist.get_world_size(), **further), lightnings_warnings():
        return target(rank, *args)


@contextmanager
def lightnings_warnings() -> Iterator[None]:
    """Warnings of Lightning's that are no concern of polyshard's are let through."""
    with warnings.catch_warnings():
        # On workers of data loaders, intervals of logging, loops that are left out, folders that are there.
        warnings.simplefilter("ignore", PossibleUserWarning)
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
        # Runs that resume, and save nothing themselves.
        warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`")
        # Lightning's and torchdata's own use of torch.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.* is deprecated")
        yield


class Pairs(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs of shape [3] and targets of shape [2], by index."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randn(size, 2, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    """Blocks between two layers, with dropout where that is asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(5, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(self.dropout(self.blocks(self.first(x))))


def built(dropout: float = 0.0) -> Net:
    """The same at every call."""
    with torch.random.fork_rng(devices=[]):
        seed_all(0)
        return Net(dropout)


class Regression(lightning.LightningModule):
    """Optimizes automatically, with a schedule; keeps its losses."""

    def __init__(self, dropout: float = 0.0, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = built(dropout)
        self.losses: list[float] = []
        self.validated: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        # Not through forward: what is called here is what a user calls.
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.validated.append(loss.item())
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Adversaries(lightning.LightningModule):
    """Two models and two optimizers, which take turns in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critics = built(), nn.ModuleList([built()])
        self.losses: list[float] = []

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (self.generator, self.critics)]

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        one, other = self.optimizers()
        x, y = batch
        self.toggle_optimizer(one)
        loss = nn.functional.mse_loss(self.generator(x), y)
        self.manual_backward(loss)
        self.clip_gradients(one, 0.1, "norm")
        one.step()
        one.zero_grad()
        self.untoggle_optimizer(one)
        self.toggle_optimizer(other)
        towards = self.generator(x).detach()
        second = nn.functional.mse_loss(self.critics[0](x), towards)
        self.manual_backward(second)
        other.step()
        other.zero_grad()
        self.untoggle_optimizer(other)
        self.losses += [loss.item(), second.item()]


def loader(steps: int, dtype: torch.dtype = torch.float64, world_size: int = 2) -> DataLoader[Any]:
    """Batches for ``steps`` steps of all ranks together, in one order; this rank's part of them."""
    pairs = Pairs(steps * BATCH * world_size, dtype)
    # Lightning's own sampler shuffles what is trained with.
    return DataLoader(pairs, batch_size=BATCH, sampler=DistributedSampler(pairs, shuffle=False))


def trainer(folder: Path | str, strategy: PolyshardStrategy | None = None, **settings: Any) -> lightning.Trainer:
    """Quiet, on the CPUs of this host, one process each."""
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
        "precision": "64-true",
    }
    return lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy or PolyshardStrategy(CONFIG),
        default_root_dir=folder,
        **{**quiet, **settings},
    )


def reference(
    steps: int,
    *,
    dtype: torch.dtype = torch.float64,
    epochs: int = 1,
    world_size: int = 2,
    accumulates: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of each batch, and parameters, of plain torch on the batches of all ranks together."""
    model = built().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    pairs = Pairs(steps * BATCH * world_size, dtype)
    for _ in range(epochs):
        for index, (x, y) in enumerate(DataLoader(pairs, batch_size=BATCH * world_size)):
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False):
                loss = nn.functional.mse_loss(model(x), y)
            (loss / accumulates).backward()
            losses.append(loss.item())
            if (index + 1) % accumulates == 0:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                if clip_value is not None:
                    nn.utils.clip_grad_value_(model.parameters(), clip_value)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def mean_losses(ranks: list[list[float]]) -> list[float]:
    """Over ranks, of each batch."""
    return [sum(each) / len(each) for each in zip(*ranks, strict=True)]
