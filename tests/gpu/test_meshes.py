"""Sharding beside tensor and expert parallelism over NCCL; the CPU twins are in ``tests/meshes``.

A list of a few minutes for several ranks on one GPU::

    for ranks in 2 4; do POLYSHARD_RANKS_ON_ONE_GPU=$ranks python -m pytest -m gpu tests/gpu/test_meshes.py; done
"""

from __future__ import annotations

from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from meshed_models import Shape
from meshes import MAX_NORM, Ended, Plan, Polyshard, assert_as_expected, coordinate_of, meshed, train
from processes import KeptRanks, gpu_ranks

WORLD_SIZE = gpu_ranks(4)
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD_SIZE not in (2, 4), reason="2 or 4 ranks: see POLYSHARD_RANKS_ON_ONE_GPU"),
]

#: Two shards of two parts; or, of two ranks, one.
SIZES = (max(1, WORLD_SIZE // 2), 2)
TP: dict[str, Any] = {"sizes": SIZES, "names": ("dp", "tp"), "shard": ("dp",)}
EP: dict[str, Any] = {"sizes": SIZES, "names": ("edp", "ep"), "shard": ("edp", "ep"), "experts": ("edp",)}
ZERO_2 = ("strategy", "shard_grad_op")
OFFLOAD = ("offload", "cpu")
#: Kernels of a GPU add up in other orders, and AdamW makes much of small differences.
TOLERANCE = 1e-11


@pytest.mark.parametrize(
    "plan",
    [
        Plan(**TP, shape=Shape()),
        Plan(**TP, shape=Shape(sequence=True), settings=(ZERO_2,), optimizer="muon"),
        Plan(**TP, shape=Shape(sequence=True, tied=True), settings=(OFFLOAD,), microbatches=2),
        Plan(**EP, shape=Shape(experts=4, closed=(2,))),
        Plan(**EP, shape=Shape(experts=3, kept="dtensor"), settings=(ZERO_2,), optimizer="muon"),
        Plan(**EP, shape=Shape(experts=4, kept="modules"), settings=(OFFLOAD,), microbatches=2),
    ],
    ids=str,
)
def test_training_equals_the_whole_model(plan: Plan) -> None:
    assert_as_expected(run(train, plan, "cuda"), plan, TOLERANCE)


@pytest.mark.parametrize("mesh", [{**TP, "shape": Shape(sequence=True)}, {**EP, "shape": Shape(experts=4)}], ids=str)
def test_bf16_trains_as_fp32_within_rounding(mesh: dict[str, Any]) -> None:
    plan = Plan(**mesh, settings=(("precision", "bf16"),), optimizer="sgd", dtype=torch.float32)
    assert_as_expected(run(train, plan, "cuda"), plan, 1e-2)


def train_captured(rank: int, plan: Plan, device_type: str) -> tuple[Ended, list[str]]:
    """``train``, of which the steps behind the first are captured; how each of them ran."""
    with meshed(plan, rank, device_type) as (model, mesh):
        ended = Ended(coordinate=coordinate_of(mesh))
        data_rank = plan.data_rank(ended.coordinate)
        device = next(model.parameters()).device
        trainer = Polyshard(plan, model, mesh)

        def train_step(
            tokens: torch.Tensor, optimizer: torch.optim.Optimizer, limit: float = MAX_NORM
        ) -> tuple[torch.Tensor, torch.Tensor]:
            optimizer.zero_grad()
            loss = model(tokens)
            loss.backward()
            norm = polyshard.clip_grad_norm_(model, limit)
            optimizer.step()
            return loss.detach(), norm

        before = trainer.whole()
        first = torch.optim.SGD(model.parameters(), lr=1.0)
        values = [train_step(plan.batch(0, data_rank, 0).to(device), first, float("inf"))]
        after = trainer.whole()
        ended.gradients = {name: before[name] - after[name] for name in before}
        # Capturable AdamW counts steps in fp32, and its corrections differ at 1e-7 from those of the host.
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        step = polyshard.CapturedStep(
            model,
            sgd,
            lambda tokens: train_step(tokens, sgd),
            fallback="refuse" if device.type == "cuda" else "eager",
        )
        modes = []
        for turn in range(1, 1 + plan.steps):
            loss, norm = step(plan.batch(turn, data_rank, 0).to(device))
            values.append((loss.clone(), norm.clone()))
            modes.append(step.mode.value)
        ended.losses = [[loss.item()] for loss, _ in values]
        ended.norms = [norm.item() for _, norm in values]
        ended.parameters = trainer.whole()
        step.reset()
        trainer.close()
    return ended, modes


@pytest.mark.parametrize("shape", [Shape(), Shape(sequence=True)], ids=["tensor", "sequence"])
def test_captured_steps_beside_tensor_parallelism(shape: Shape) -> None:
    plan = Plan(**TP, shape=shape, optimizer="sgd", steps=10)
    ranks = run(train_captured, plan, "cuda")
    assert_as_expected([ended for ended, _ in ranks], plan, TOLERANCE)
    for _, modes in ranks:
        assert modes == ["warming_up"] * 3 + ["captured"] * 7
