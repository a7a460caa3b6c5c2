"""What autograd does around modules that ``fully_shard`` made: outputs of all kinds, hooks, gradients of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from fsdp2_models import NEWER, both, cpu_mesh, make, shard_all, wholes
from processes import KeptRanks
from torch import nn


@dataclass
class _Answer:
    first: torch.Tensor
    rest: dict[str, Any]


class _Answers(nn.Module):
    """Returns tensors inside of other things, and some that are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> _Answer:
        return _Answer(self.one(x), {"list": [self.two(x), "text", None], "tuple": (self.three(x), 3)})


class _Asks(nn.Module):
    def __init__(self, uses: str) -> None:
        super().__init__()
        self.inner, self.also, self.uses = _Answers(), nn.Linear(4, 4), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = self.inner(x)
        found: torch.Tensor = answer.first
        if self.uses == "all":
            found = found + answer.rest["list"][0] + answer.rest["tuple"][0]
        if self.uses != "not the last":
            found = self.also(found)
        else:
            self.also(found)
        return found


def _outputs(rank: int, uses: str) -> None:
    def run(face: ModuleType) -> Any:
        torch.manual_seed(0)
        model = _Asks(uses).double()
        for module in (model.inner, model.also, model):
            face.fully_shard(module, mesh=cpu_mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = []
        for step in range(2):
            x = torch.full((2, 4), 1.0 + step + rank, dtype=torch.float64, requires_grad=True)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert x.grad is not None
            told += [loss.item(), x.grad.sum().item()]
        return told, wholes(model)

    both(run)


@NEWER
@pytest.mark.parametrize("uses", ["all", "the first", "not the last"])
def test_outputs_in_containers_used_or_not(ranks: KeptRanks, uses: str) -> None:
    ranks.run(2, _outputs, uses)


def _hooked(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        model = shard_all(face, make())
        told: list[float] = []
        optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

        def step(parameter: Any) -> None:
            gradient = parameter.grad
            told.append((gradient.to_local() if hasattr(gradient, "to_local") else gradient).sum().item())
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            if parameter.numel():
                parameter.register_post_accumulate_grad_hook(step)
        for words in torch.arange(20).view(2, 2, 5) % 17:
            model(words + 0 * rank).square().mean().backward()
        # The order of hooks is each engine's.
        return sorted(told), wholes(model)

    both(run)


def test_hooks_that_step_optimizers(ranks: KeptRanks) -> None:
    ranks.run(2, _hooked)


def _several(rank: int) -> None:
    """Forwards before one backward, and a backward twice."""

    def run(face: ModuleType) -> Any:
        model = shard_all(face, make())
        words = torch.arange(10).view(2, 5)
        loss = model(words).square().mean() + model(words + 5).square().mean()
        loss.backward()
        again = model(words).square().mean()
        again.backward(retain_graph=True)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return [loss.item(), again.item()], wholes(model)

    both(run)


def test_several_forwards_before_a_backward(ranks: KeptRanks) -> None:
    ranks.run(2, _several)
