"""Optimizers of parameters that a flat parameter took the place of, which FSDP lets step without any effect."""

from __future__ import annotations

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp import FullyShardedDataParallel
from torch import nn

CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def _sharded(model: nn.Module, use_orig_params: bool = False) -> FullyShardedDataParallel:
    group = FakeCollectives(PluginContext("fake", CPU), 0, 2)
    return FullyShardedDataParallel(model, process_group=group, device_id=CPU, use_orig_params=use_orig_params)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """How far the parameters went."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    return sum((a - b).abs().sum().item() for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_that_was_made_before_is_refused_at_its_first_step() -> None:
    model = _model()
    early = torch.optim.AdamW(model.parameters())
    sharded = _sharded(model)
    words = r"AdamW holds '0.weight', .* \(rank 0, use_orig_params=False\): it would never be updated. Make .* behind"
    for _ in range(2):
        with pytest.raises(ConfigError, match=words):
            _step(sharded, early)
    assert _step(sharded, torch.optim.AdamW(sharded.parameters())) > 0


def test_an_optimizer_that_got_such_parameters_later_is_refused_too() -> None:
    plain, model = _model(), _model()
    early = list(model.parameters())
    sharded = _sharded(model)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    assert _step(sharded, optimizer) > 0
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert _step(plain, other) > 0
    optimizer.add_param_group({"params": early[2:]})
    with pytest.raises(ConfigError, match=r"'2\.weight'"):
        _step(sharded, optimizer)


def test_what_keeps_its_parameters_keeps_its_optimizer() -> None:
    model = _model()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    assert _step(_sharded(model, use_orig_params=True), early) > 0
    frozen = _model().requires_grad_(False)
    frozen.append(nn.Linear(2, 2))
    mixed = torch.optim.SGD(frozen.parameters(), lr=0.1)
    for index in (0, 2):
        frozen[index] = _sharded(frozen[index])
    assert _step(frozen, mixed) > 0
