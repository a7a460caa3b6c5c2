"""The model whose state dicts are compared, sharded and unsharded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy, StateDictType
from torch import nn

from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Ranks

FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


class Block(nn.Module):
    """Two layers of which the second is taken twice, and a norm with buffers. 5 rows: no even cut for 2 or 3 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.again = nn.Linear(5, 4, bias=False)
        self.once_more = self.again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.again(self.norm(self.first(x)))
        return hidden


class Model(nn.Module):
    """A projection, a block, and a head that shares the projection's weight; one row, and one that saves no buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(1))
        self.projection = nn.Linear(4, 4)
        self.block = Block()
        self.idle = nn.ReLU()
        self.head = nn.Linear(4, 4)
        self.head.weight = self.projection.weight
        self.register_buffer("offset", torch.rand(3))
        self.register_buffer("forgotten", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.idle(self.block(self.projection(x)))) * self.scale
        return output


def plain_model(ranks: Ranks, seed: int) -> Model:
    """The model unsharded, the same on every rank."""
    return Model(seed).to(ranks.device)


def wrapped_model(ranks: Ranks, seed: int, wrapping: str, **settings: Any) -> nn.Module:
    """The same values, sharded."""
    model = plain_model(ranks, seed)
    if wrapping != "root":
        model.block = wrap_fsdp(model.block, ranks.group, **settings)
    return model if wrapping == "inside" else wrap_fsdp(model, ranks.group, **settings)


@contextmanager
def kind(model: nn.Module, *settings: Any) -> Iterator[None]:
    """``FSDP.state_dict_type``, without the warnings that it is going away and that ``NO_SHARD`` ignores it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"FSDP.state_dict_type\(\) and FSDP.set_state_dict_type", FutureWarning)
        warnings.filterwarnings("ignore", "When using ``NO_SHARD``")
        with FSDP.state_dict_type(model, *settings):
            yield


def step(model: nn.Module, ranks: Ranks) -> None:
    """One step of SGD on an input that all ranks share, so that the mean over ranks is each rank's own gradient."""
    torch.manual_seed(7)
    x = torch.rand(6, 4).to(ranks.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(got: Mapping[str, Any], wanted: Mapping[str, torch.Tensor], **tolerance: float) -> None:
    """The same names in the same order, and the same values, dtypes and devices."""
    assert list(got) == list(wanted)
    for name, theirs in wanted.items():
        torch.testing.assert_close(
            got[name], theirs, msg=lambda text, name=name: f"{name}: {text}", **(tolerance or {"rtol": 0, "atol": 0})
        )
