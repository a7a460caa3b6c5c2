"""Optimizers beside tensor and expert parallelism do what they do to whole tensors, to 1e-12 in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import polyshard
import pytest
import torch
from meshed_models import GroupedExperts, Net, Shape
from meshes import POOLS, Ended, Plan, Polyshard, coordinate_of, make, meshed, run, together
from polyshard.errors import RankMismatchError, UnsupportedError
from polyshard.inspect import is_sharded
from polyshard.optim import AveragedWeights, Muon, WholeTensorOptimizer, for_matrices
from polyshard.optim.across import Across
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytestmark = pytest.mark.slow

Make = Callable[[nn.Module], list[torch.optim.Optimizer]]

TURNS = 3
TP: dict[str, Any] = {"names": ("dp", "tp"), "shard": ("dp",)}
EP: dict[str, Any] = {"names": ("edp", "ep"), "shard": ("edp", "ep"), "experts": ("edp",)}
EP_TP: dict[str, Any] = {**EP, "names": ("edp", "ep", "tp")}
BESIDE_BOTH = pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan((2, 2), **TP, shape=Shape(sequence=True)), marks=pytest.mark.nightly),
        Plan((1, 2, 2), **EP_TP, shape=Shape(experts=3, kept="dtensor")),
    ],
    ids=str,
)


@pytest.fixture(scope="module", autouse=True)
def close_pools() -> Iterator[None]:
    """Their processes leave."""
    yield
    POOLS.close()


class WholeNorm(WholeTensorOptimizer):
    """Goes along each gradient over the norm of all of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        #: The shapes of the tensors that this rank computed with.
        self.seen: list[tuple[int, ...]] = []

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        self.seen += [tuple(wholes.shape[1:])] * len(wholes)
        norms = wholes.flatten(1).norm(dim=1).clamp(min=1e-12)
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


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [each for each in model.modules() if isinstance(each, GroupedExperts)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """For all hidden matrices, those of experts too; AdamW for the rest."""
    assert isinstance(model, Net)
    split = for_matrices(model, leave_out=[model.head], stacks=experts_of(model))
    return [
        Muon(split.matrices, lr=0.02, momentum=0.9, weight_decay=0.05, dtype=torch.float64),
        torch.optim.AdamW(split.others, lr=1e-2),
    ]


def whole_norm(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [WholeNorm(model.parameters())]


def flat_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(polyshard.flat_parameters(model) if is_sharded(model) else model.parameters(), lr=2e-2)]


def stepped(optimizers: Sequence[torch.optim.Optimizer], loss: torch.Tensor) -> None:
    loss.backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def expected(plan: Plan, made: Make, decay: float | None) -> dict[str, torch.Tensor]:
    """The parameters of the model that one process trained on all samples, or the average of them."""
    model = make(plan)
    optimizers, average = made(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay or 0.0))
    for turn in range(TURNS):
        losses = [model(plan.batch(turn, rank, 0)) for rank in range(plan.data_size)]
        stepped(optimizers, torch.stack(losses).mean())
        average.update_parameters(model)
    shown = model if decay is None else average.module
    return {name: each.detach() for name, each in shown.named_parameters()}


def trained(rank: int, plan: Plan, made: Make, decay: float | None) -> Ended:
    """The same, of one rank."""
    with meshed(plan, rank) as (model, mesh):
        trainer, ended = Polyshard(plan, model, mesh), Ended(coordinate=coordinate_of(mesh))
        optimizers, average = made(model), None if decay is None else AveragedWeights(model, decay)
        for turn in range(TURNS):
            stepped(optimizers, model(plan.batch(turn, plan.data_rank(ended.coordinate), 0)))
            if average is not None:
                average.update()
        if average is None:
            ended.parameters = trainer.whole()
        else:
            with average.applied():
                ended.parameters = trainer.whole()
        trainer.close()
    return ended


def assert_as_whole(plan: Plan, made: Make, decay: float | None = None) -> None:
    ranks = run(plan.world_size, trained, plan, made, decay)
    found = together([each.parameters for each in ranks], ranks, plan)
    wanted, start = expected(plan, made, decay), dict(make(plan).named_parameters())
    assert max((wanted[name] - value).abs().max().item() for name, value in start.items()) > 0.02
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "plan",
    [
        # Parts of 3, 3, 3 and 1 hidden columns.
        Plan((1, 4), **TP, shape=Shape()),
        pytest.param(
            Plan((2, 1, 2), ("replica", "dp", "tp"), Shape(), ("dp",), ("replica",)), marks=pytest.mark.nightly
        ),
    ],
    ids=str,
)
def test_muon_of_matrices_that_tensor_parallelism_cuts(plan: Plan) -> None:
    assert_as_whole(plan, muon)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan((2, 2), **EP, shape=Shape(experts=3, kept="dtensor")), marks=pytest.mark.nightly),
        # The last rank has none of three experts.
        pytest.param(Plan((1, 4), **EP, shape=Shape(experts=3, kept="dtensor")), marks=pytest.mark.nightly),
        Plan((1, 2, 2), **EP_TP, shape=Shape(experts=3, kept="dtensor")),
        pytest.param(Plan((2, 2), **EP, shape=Shape(experts=4, kept="modules")), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_muon_of_experts(plan: Plan) -> None:
    assert_as_whole(plan, muon)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan((2, 2), **TP, shape=Shape(sequence=True)), marks=pytest.mark.nightly),
        Plan((2, 2), **EP, shape=Shape(experts=3, kept="dtensor")),
    ],
    ids=str,
)
def test_an_optimizer_that_needs_the_whole_norm_of_each_tensor(plan: Plan) -> None:
    """Of norms, biases, and all experts of a DTensor together."""
    assert_as_whole(plan, whole_norm)


@BESIDE_BOTH
def test_flat_parameters(plan: Plan) -> None:
    assert_as_whole(plan, flat_adamw)


@BESIDE_BOTH
def test_averages(plan: Plan) -> None:
    assert_as_whole(plan, muon, decay=0.5)


def named_groups(model: nn.Module) -> list[list[str]]:
    """The names of matrices and of others."""
    names = {each: name for name, each in model.named_parameters()}
    return [[names[each] for each in group] for group in for_matrices(model, stacks=experts_of(model))]


def groups_on_rank(rank: int, plan: Plan) -> list[list[list[str]]]:
    with meshed(plan, rank) as (model, mesh):
        before = named_groups(model)
        trainer = Polyshard(plan, model, mesh)
        behind = named_groups(model)
        trainer.close()
    return [before, behind]


@BESIDE_BOTH
def test_groups_are_those_of_the_whole_model(plan: Plan) -> None:
    wanted = named_groups(make(plan))
    assert all(map(len, wanted))
    for rank in run(plan.world_size, groups_on_rank, plan):
        assert rank == [wanted, wanted]


def seen(rank: int, plan: Plan) -> tuple[list[tuple[int, ...]], int]:
    """The matrices that this rank computed with in one step, and the elements that it sent over the mesh for it."""
    sent: list[int] = []

    def exchange(self: Across, out: Any, out_splits: Any, source: Any, in_splits: Sequence[int]) -> None:
        sent.extend(size for to, size in enumerate(in_splits) if to != self.rank)
        exchanged(self, out, out_splits, source, in_splits)

    exchanged = Across.exchange
    with meshed(plan, rank) as (model, mesh), mock.patch.object(Across, "exchange", exchange):
        trainer = Polyshard(plan, model, mesh)
        optimizer = WholeNorm([each for each in model.parameters() if each.ndim == 2])
        stepped([optimizer], model(plan.batch(0, plan.data_rank(coordinate_of(mesh)), 0)))
        trainer.close()
    return optimizer.seen, sum(sent)


def test_each_matrix_is_computed_with_on_one_rank_and_the_others_send_their_parts_of_it() -> None:
    plan = Plan((2, 2), **TP, shape=Shape())
    ranks = run(plan.world_size, seen, plan)
    assert all(shapes for shapes, _ in ranks)
    matrices = [tuple(each.shape) for each in make(plan).parameters() if each.ndim == 2]
    assert sorted(shape for shapes, _ in ranks for shape in shapes) == sorted(matrices)
    # One half of each matrix is at its owner already, the other half crosses over there and back.
    assert sum(sent for _, sent in ranks) == sum(rows * columns for rows, columns in matrices)


def given_others(rank: int, plan: Plan, other: int) -> tuple[str, bool]:
    """The error of parameters in another order on the rank ``other``, and whether a parameter has moved."""
    with meshed(plan, rank) as (model, mesh):
        trainer, parameters = Polyshard(plan, model, mesh), list(model.parameters())
        before = [each.detach().clone() for each in parameters]
        model(plan.batch(0, plan.data_rank(coordinate_of(mesh)), 0)).backward()
        with pytest.raises(RankMismatchError) as caught:
            WholeNorm(parameters[::-1] if rank == other else parameters).step()
        moved = not all(map(torch.equal, before, parameters))
        trainer.close()
    return str(caught.value), moved


def test_all_ranks_refuse_another_order_on_one() -> None:
    plan = Plan((2, 2), **TP, shape=Shape())
    for message, moved in run(plan.world_size, given_others, plan, 3):
        assert "WholeNorm was given other parameters, or in another order, on some ranks" in message
        assert "rank 3" in message
        assert not moved


def refused(rank: int, plan: Plan) -> list[str]:
    """The errors of a step with DTensors that are in no unit, and of one with experts that two dimensions cut."""
    messages = []
    with meshed(plan, rank) as (model, mesh):
        with pytest.raises(UnsupportedError) as caught:
            WholeNorm(model.parameters()).step()
        messages.append(str(caught.value))
        trainer = Polyshard(plan, model, mesh)
        with pytest.raises(UnsupportedError) as caught:
            WholeNorm(model.parameters()).step()
        messages.append(str(caught.value))
        trainer.close()
    return messages


def test_what_cannot_be_put_together_is_refused() -> None:
    plan = Plan((1, 2, 2), **EP_TP, shape=Shape(experts=4, kept="dtensor"))
    for without_units, two_dimensions in run(plan.world_size, refused, plan):
        assert "WholeNorm was given a DTensor of shape (12, 8) that is in no unit" in without_units
        assert "WholeNorm cannot put 'blocks.0.feed.experts." in two_dimensions
