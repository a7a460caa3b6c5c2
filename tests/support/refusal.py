"""What every test of bad input asks: the right error, nothing sent, and a model that is as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import polyshard
import pytest
import torch
from polyshard import ShardConfig
from polyshard.interfaces import CollectivesCapabilities, PluginContext
from polyshard_backends.fake import FakeCollectives
from torch import nn


class Silent(FakeCollectives):
    """Rank 2 of 4. Any communication is a failure of the test."""

    def __init__(self, **capabilities: Any) -> None:
        super().__init__(PluginContext("silent", torch.device("cpu")), 2, 4)
        self._changed: CollectivesCapabilities = replace(super().capabilities, **capabilities)

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return self._changed

    def _speak(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a collective was issued")

    all_gather = reduce_scatter = all_reduce = broadcast = all_to_all = all_gather_object = barrier = partition = _speak


class Tower(nn.Module):
    """``inner.head`` is where a case puts what cannot be sharded."""

    def __init__(self, head: nn.Module | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = nn.Linear(3, 4)
            self.inner = nn.Module()
            self.inner.head = nn.Linear(4, 4) if head is None else head
            self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.inner.head(x) if isinstance(self.inner.head, nn.Linear | Holder) else x)


class Holder(nn.Module):
    """Computes with one parameter of any kind."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.odd = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.odd.to(x.dtype).sum() if self.odd.layout is torch.strided else x


class Subclass(torch.Tensor):
    """A tensor with a life of its own."""


def description(model: nn.Module) -> dict[str, Any]:
    """All that sharding could have changed."""
    return {
        "modules": {name: (type(m), sorted(m.__dict__), len(m._forward_hooks)) for name, m in model.named_modules()},
        "pre-hooks": {name: len(m._forward_pre_hooks) for name, m in model.named_modules()},
        "objects": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "kinds": {
            name: (type(p), p.dtype, p.device, p.requires_grad, id(p.grad)) for name, p in model.named_parameters()
        },
        "buffers": {name: (id(b), b.dtype, b.device) for name, b in model.named_buffers()},
    }


def step(model: nn.Module) -> list[torch.Tensor]:
    """The parameters after one step of plain torch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(1)
    loss = model(torch.ones(5, 3)).square().mean()
    loss.backward()
    if trained:
        torch.optim.SGD(trained, lr=0.1).step()
    return [loss.detach(), *(p.detach().to_dense() for p in model.parameters())]


def refused(
    model: nn.Module,
    config: Callable[[], ShardConfig],
    error: type[Exception],
    *words: str,
    twin: nn.Module | None = None,
    call: Callable[..., Any] = polyshard.shard,
    **arguments: Any,
) -> str:
    """Check that sharding raises exactly ``error``, with all ``words``, and leaves ``model`` as it was.

    ``twin``: the same model, never touched; the two must then train alike.
    """
    before = description(model)
    with pytest.raises(error) as caught:
        call(model, config(), **arguments)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert description(model) == before
    if twin is not None:
        for got, wanted in zip(step(model), step(twin), strict=True):
            assert torch.equal(got, wanted)
    return str(caught.value)


def silent(**settings: Any) -> Callable[[], ShardConfig]:
    return lambda: ShardConfig(collectives=Silent(), **settings)
