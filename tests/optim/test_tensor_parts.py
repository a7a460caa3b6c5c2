"""Optimizers beside tensor and expert parallelism: what they do to whole tensors, in fp64 to 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from meshed_models import GroupedExperts, Net, Shape
from meshes import Ended, Plan, Polyshard, coordinate_of, make, meshed, run, together
from polyshard.optim import Muon, WholeTensorOptimizer, for_matrices
from torch import nn

TURNS = 10
ROWS = ("layout", "rows")
NC = ("check_ranks", False)
TP: dict[str, Any] = {"names": ("dp", "tp"), "shard": ("dp",)}
EP: dict[str, Any] = {"names": ("edp", "ep"), "shard": ("edp", "ep"), "experts": ("edp",)}
EP_TP: dict[str, Any] = {"names": ("edp", "ep", "tp"), "shard": ("edp", "ep"), "experts": ("edp",)}


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """For all hidden matrices, those of experts too; AdamW for the rest."""
    assert isinstance(model, Net)
    experts = [each for each in model.modules() if isinstance(each, GroupedExperts)]
    split = for_matrices(model, leave_out=[model.head], stacks=experts)
    return [
        Muon(split.matrices, lr=0.02, momentum=0.9, weight_decay=0.05, dtype=torch.float64),
        torch.optim.AdamW(split.others, lr=1e-2),
    ]


class WholeNorm(WholeTensorOptimizer):
    """Goes along gradients over their whole norm; which tensors it computed that of, and the last norms, stay."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.seen: list[tuple[int, ...]] = []

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        self.seen += [tuple(wholes.shape[1:])] * len(wholes)
        norms = wholes.flatten(1).norm(dim=1).clamp(min=1e-12)
        for norm, state in zip(norms, states, strict=True):
            state["norm"] = norm
        return wholes / norms.view(-1, *[1] * (wholes.ndim - 1))

    def update(
        self,
        group: Mapping[str, Any],
        shape: tuple[int, ...],
        parameters: Sequence[nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        for parameter, result in zip(parameters, results, strict=True):
            parameter.add_(result, alpha=-group["lr"])


def whole_norm(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [WholeNorm(model.parameters())]


Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


def stepped(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def whole(plan: Plan, make_optimizers: Make) -> dict[str, torch.Tensor]:
    """The parameters of the model that one process trained, on the samples of all ranks."""
    model = make(plan)
    optimizers = make_optimizers(model)
    for turn in range(TURNS):
        losses = [model(plan.batch(turn, rank, 0)) for rank in range(plan.data_size)]
        stepped(model, optimizers, torch.stack(losses).mean())
    return {name: each.detach() for name, each in model.named_parameters()}


def on_rank(rank: int, plan: Plan, make_optimizers: Make) -> Ended:
    with meshed(plan, rank) as (model, mesh):
        trainer, place = Polyshard(plan, model, mesh), coordinate_of(mesh)
        optimizers = make_optimizers(model)
        for turn in range(TURNS):
            stepped(model, optimizers, model(plan.batch(turn, plan.data_rank(place), 0)))
        ended = Ended(parameters=trainer.whole(), coordinate=place)
        trainer.close()
    return ended


def assert_as_whole(plan: Plan, make_optimizers: Make) -> None:
    ranks = run(plan.world_size, on_rank, plan, make_optimizers)
    found, wanted, start = (
        together([each.parameters for each in ranks], ranks, plan),
        whole(plan, make_optimizers),
        make(plan),
    )
    assert found.keys() == wanted.keys()
    moved = 0.0
    for name, value in start.named_parameters():
        moved = max(moved, (wanted[name] - value).abs().max().item())
        torch.testing.assert_close(
            found[name], wanted[name], rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert moved > 0.05


@pytest.mark.parametrize(
    "plan",
    [
        Plan((2, 2), **TP, shape=Shape(sequence=True)),
        Plan((2, 2), **TP, shape=Shape(tied=True), settings=(ROWS, NC)),
        # Parts of 3, 3, 3 and 1 hidden columns.
        Plan((1, 4), **TP, shape=Shape(), settings=(NC,)),
        Plan((4, 1), **TP, shape=Shape()),
        Plan((2, 1, 2), ("replica", "dp", "tp"), Shape(), ("dp",), ("replica",)),
    ],
    ids=str,
)
def test_muon_beside_tensor_parallelism(plan: Plan) -> None:
    assert_as_whole(plan, muon)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((2, 2), **EP, shape=Shape(experts=4), settings=(NC,)),
        Plan((2, 2), **EP, shape=Shape(experts=3, kept="dtensor"), settings=(ROWS, NC)),
        Plan((1, 2, 2), **EP_TP, shape=Shape(experts=3, kept="dtensor"), settings=(NC,)),
        # The last rank has none of three experts.
        Plan((1, 4), **EP, shape=Shape(experts=3, kept="dtensor"), settings=(NC,)),
        Plan((2, 2), **EP, shape=Shape(experts=3, kept="modules"), settings=(NC,)),
    ],
    ids=str,
)
def test_muon_of_experts(plan: Plan) -> None:
    assert_as_whole(plan, muon)


@pytest.mark.parametrize(
    "plan",
    [
        Plan((2, 2), **TP, shape=Shape(sequence=True), settings=(NC,)),
        Plan((1, 4), **TP, shape=Shape(), settings=(NC,)),
        Plan((2, 2), **EP, shape=Shape(experts=3, kept="dtensor"), settings=(NC,)),
    ],
    ids=str,
)
def test_an_optimizer_that_needs_the_whole_norm_of_each_tensor(plan: Plan) -> None:
    """Of norms, biases and all experts of a DTensor as well."""
    assert_as_whole(plan, whole_norm)
