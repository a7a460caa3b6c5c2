"""Accelerate on ranks that tests keep: its state is the process's, and has to be made and forgotten for each test."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from parity import Block, whole
from processes import KeptRanks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchrun import launched

T = TypeVar("T")

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}

#: Shared by all files of a process but that of the scripts, which end the group of their ranks.
_RANKS = KeptRanks()
atexit.register(_RANKS.close)


def on_ranks(world_size: int, target: Callable[..., T], *args: Any) -> list[T]:
    """``target(rank, *args)`` on each rank, as torchrun would have started it. Accelerate knows nothing afterwards."""
    return _RANKS.run(world_size, _launched, target, args)


def _launched(rank: int, target: Callable[..., T], args: tuple[Any, ...]) -> T:
    try:
        with launched(rank, dist.get_world_size()):
            return target(rank, *args)
    finally:
        forget()


def forget() -> None:
    """Let Accelerate be as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not PartialState._shared_state


def pairs(examples: int = 48, inputs: int = 3, outputs: int = 2) -> TensorDataset:
    """Made-up inputs and targets in float64, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    shapes = (examples, inputs), (examples, outputs)
    return TensorDataset(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))


def loader_of(
    data: TensorDataset, batch_size: int = 4, *, shuffle: bool = False
) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Batches of ``data``.

    Beginning to iterate draws from a generator of its own: from the default one it would change what a run that resumes
    in the middle of an epoch draws next.
    """
    return DataLoader(data, batch_size=batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(11))


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Whether whole gradients are those of ``reference``, to 1e-12; every rank calls it."""
    grads: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close({name: each.full_tensor() for name, each in grads.items()}, expected, **EXACT)


def same(model: nn.Module, reference: nn.Module, **tolerance: Any) -> None:
    """Whether whole parameters are those of ``reference``, to 1e-12 unless told otherwise; every rank calls it."""
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(whole(model), expected, **(tolerance or EXACT))


class Critic(nn.Module):
    """The other model of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(2, 9)
        self.score = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.score(self.block(x))


def pair_loss(net: nn.Module, critic: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """What ``net`` (step 0) or ``critic`` (step 1) is trained to lower."""
    if step == 0:
        return -critic(net(x)).mean()
    return critic(net(x).detach()).mean() - critic(y).square().mean()
