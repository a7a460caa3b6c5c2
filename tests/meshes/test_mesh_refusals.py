"""Wrong meshes are one error on all ranks, before anything changed: the model can be sharded rightly behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import polyshard
import pytest
import torch
from meshed_models import Attention, GroupedExperts, Net, Shape, plan_of
from meshes import Plan, Polyshard, config_of, coordinate_of, expected, meshed, run
from polyshard.errors import ConfigError, ParameterError, PolyshardError, RankMismatchError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

pytestmark = pytest.mark.slow

TP = Plan((2, 2), ("dp", "tp"), Shape(), ("dp",), steps=0)
EP = Plan((2, 2), ("edp", "ep"), Shape(experts=4), ("edp", "ep"), experts=("edp",), steps=0)

Wrong = Callable[[int, Net, DeviceMesh, polyshard.ShardConfig], Any]


class Refused(NamedTuple):
    """What a rank saw."""

    kind: str
    text: str
    loss_off: float
    """Of the step behind the error, from that of the whole model."""


def refused(rank: int, plan: Plan, wrong: Wrong) -> Refused:
    """What ``wrong`` raises; the model must be as it was, and train."""
    with meshed(plan, rank) as (model, mesh):
        before = {name: (each, _local(each).clone()) for name, each in model.named_parameters()}
        with pytest.raises(PolyshardError) as caught:
            wrong(rank, model, mesh, config_of(plan, mesh))
        for name, parameter in model.named_parameters():
            assert parameter is before[name][0], f"{name} is another object"
            assert torch.equal(_local(parameter), before[name][1]), f"{name} has changed"
        return Refused(type(caught.value).__name__, str(caught.value), _step_off(Polyshard(plan, model, mesh)))


def _step_off(trainer: Polyshard) -> float:
    """Of a first step, from that of the whole model: the loss, and the norm of gradients."""
    plan, wanted = trainer.plan, expected(trainer.plan)
    data_rank = plan.data_rank(coordinate_of(trainer.mesh))
    loss = trainer.model(plan.batch(0, data_rank, 0))
    loss.backward()
    off = max(abs(loss.item() - wanted.losses[0][data_rank]), abs(trainer.clip(1.0) - wanted.norms[0]))
    trainer.close()
    return off


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def assert_refused(plan: Plan, wrong: Wrong, error: type[PolyshardError], *words: str) -> None:
    """All ranks raise ``error`` with ``words``, and train rightly behind it."""
    for seen in run(plan.world_size, refused, plan, wrong):
        assert seen.kind == error.__name__, seen
        assert all(word in seen.text for word in words), seen.text
        assert seen.loss_off < 1e-12


class Sharded:
    """``polyshard.shard`` with settings that differ from the plan's."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, rank: int, model: Net, mesh: DeviceMesh, config: polyshard.ShardConfig) -> None:
        polyshard.shard(model, dataclasses.replace(config, **self.settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shard": "data"}, ("data", "dp", "tp")),
        ({"shard": ("dp", "cp")}, ("cp", "dp", "tp")),
        ({"strategy": "hybrid_shard", "replicate": "pods"}, ("pods", "dp", "tp")),
        ({"strategy": "hybrid_shard", "replicate": "dp"}, ("dp",)),
        ({"shard": ("dp", "dp")}, ("dp",)),
        ({"shard": None}, ("dp", "tp", "shard=")),
        ({"replicate": "tp"}, ("replicate", "hybrid")),
    ],
    ids=str,
)
def test_dimensions_that_the_mesh_has_not_or_has_twice(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_refused(TP, Sharded(**settings), ConfigError, *words)


def test_a_mesh_is_needed_for_names_of_dimensions() -> None:
    with pytest.raises(ConfigError, match="mesh"):
        polyshard.ShardConfig(shard="dp")


def test_shards_over_a_dimension_that_parameters_are_cut_over() -> None:
    assert_refused(TP, Sharded(shard=("dp", "tp")), ParameterError, "tp", "embed.weight")


class Experts:
    """A policy of ``EP`` with other settings for experts."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, module: nn.Module) -> bool | Mapping[str, Any]:
        return self.settings if isinstance(module, GroupedExperts) else False


def custom(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    return {"name": "custom", "fn": fn}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mesh": "experts"}, ("experts", "edp", "ep", "blocks.0.feed.experts")),
        ({"mesh": ("edp", "edp")}, ("edp", "blocks.0.feed.experts")),
        ({"mesh": 2}, ("mesh", "blocks.0.feed.experts")),
        ({"mesh": "edp", "gradient_divisor": "mean"}, ("gradient_divisor", "mean", "data", "group", "sum")),
        ({"mesh": "edp", "gradient_divisor": 0}, ("gradient_divisor", "0")),
        ({"mesh": "edp", "gradient_divisor": -1.0}, ("gradient_divisor", "-1")),
        ({"mesh": "edp", "gradient_divisor": True}, ("gradient_divisor", "True")),
    ],
    ids=str,
)
def test_settings_of_experts_that_mean_nothing(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    seen = run(4, refused, EP, Sharded(policy=custom(Experts(**settings))))
    for each in seen:
        assert each.kind in ("ConfigError", "PluginContractError"), each
        assert all(word in each.text for word in words), each.text
        assert each.loss_off < 1e-12


def _attention(module: nn.Module) -> bool:
    return isinstance(module, Attention)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": custom(_attention)},
        {"policy": custom(Experts(mesh=("edp", "ep")))},
        {"policy": custom(Experts(mesh="edp", gradient_divisor="sum"))},
        {"shard": "edp"},
        {"layout": "rows"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_ranks_whose_plans_differ(settings: dict[str, Any]) -> None:
    """The last rank's: in which modules are units, over which ranks they are, how they are divided and cut."""
    right = custom(Experts(mesh="edp"))
    assert_refused(EP, Differing(right, settings), RankMismatchError)


class Differing:
    """The last rank shards by other settings."""

    def __init__(self, right: dict[str, Any], settings: dict[str, Any]) -> None:
        self.right, self.settings = right, settings

    def __call__(self, rank: int, model: Net, mesh: DeviceMesh, config: polyshard.ShardConfig) -> None:
        settings = {"policy": self.right, **(self.settings if rank == 3 else {})}
        polyshard.shard(model, dataclasses.replace(config, **settings))


def parallelized_late(rank: int) -> Refused:
    """``parallelize_module`` of a sharded model; the loss of a step behind it, from that of the whole model."""
    plan = dataclasses.replace(EP, shape=Shape(), sizes=(2, 2), names=("dp", "cp"), shard=("dp", "cp"), experts=())
    with meshed(plan, rank) as (model, mesh):
        trainer = Polyshard(plan, model, mesh)
        with pytest.raises(PolyshardError) as caught:
            parallelize_module(model, mesh["cp"], plan_of(model))
        return Refused(type(caught.value).__name__, str(caught.value), _step_off(trainer))


def test_parallelize_module_behind_shard() -> None:
    for seen in run(4, parallelized_late):
        assert "parallelize_module" in seen.text
        assert "shard" in seen.text
        assert seen.loss_off < 1e-12
