"""Wrong meshes are one error on all ranks, before anything changed: the model can be sharded rightly behind it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import polyshard
import pytest
import torch
from meshed_models import Attention, Block, GroupedExperts, Net, Shape, plan_of
from meshes import Plan, Polyshard, config_of, coordinate_of, expected, meshed, run
from polyshard.errors import PolyshardError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

pytestmark = pytest.mark.slow

TP = Plan((2, 2), ("dp", "tp"), Shape(), ("dp",), steps=0)
EP = Plan((2, 2), ("edp", "ep"), Shape(experts=4), ("edp", "ep"), experts=("edp",), steps=0)
PARTS = dataclasses.replace(EP, shape=Shape(experts=4, kept="dtensor"))


class Wrong:
    """``polyshard.shard`` with settings that differ from the plan's: on all ranks, or on one."""

    def __init__(self, error: str, words: str, only_on: int | None = None, **settings: Any) -> None:
        self.error, self.words, self.only_on, self.settings = error, words.split(), only_on, settings

    def __repr__(self) -> str:
        policy = self.settings.get("policy", {}).get("fn")
        return str(policy.settings if isinstance(policy, Experts) else self.settings)

    def __call__(self, rank: int, model: Net, mesh: DeviceMesh, config: polyshard.ShardConfig) -> None:
        settings = self.settings if self.only_on in (None, rank) else {}
        polyshard.shard(model, dataclasses.replace(config, **settings))


class Experts:
    """A policy with such settings for experts. A function among them makes its value, on the rank."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, module: nn.Module) -> bool | Mapping[str, Any]:
        if isinstance(module, GroupedExperts):
            return {key: value() if callable(value) else value for key, value in self.settings.items()}
        return isinstance(module, Block)


def custom(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """The policy that asks ``fn``."""
    return {"name": "custom", "fn": fn}


def experts(error: str, words: str, only_on: int | None = None, **settings: Any) -> Wrong:
    """Other settings for experts."""
    return Wrong(error, words, only_on, policy=custom(Experts(**settings)))


def refused(rank: int, plan: Plan, wrongs: list[Wrong]) -> tuple[list[tuple[str, str]], float]:
    """What each raises, which must leave the model as it was; how far a step behind all is from the whole model's."""
    errors = []
    with meshed(plan, rank) as (model, mesh):
        before = {name: (each, _local(each).clone()) for name, each in model.named_parameters()}
        for wrong in wrongs:
            error = _raised(wrong, rank, model, mesh, config_of(plan, mesh))
            errors.append((type(error).__name__, str(error)))
            for name, parameter in model.named_parameters():
                assert parameter is before[name][0], f"{name} is another object behind {error}"
                assert torch.equal(_local(parameter), before[name][1]), f"{name} has changed behind {error}"
        return errors, _step_off(Polyshard(plan, model, mesh))


def _raised(wrong: Wrong, *args: Any) -> PolyshardError:
    try:
        wrong(*args)
    except PolyshardError as error:
        return error
    pytest.fail(f"not refused: {wrong}")


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


def assert_refused(plan: Plan, *wrongs: Wrong) -> None:
    """All ranks raise the error of each, with its words, and train rightly behind all."""
    ranks = run(plan.world_size, refused, plan, list(wrongs))
    for errors, _ in ranks:
        for wrong, (kind, text) in zip(wrongs, errors, strict=True):
            assert kind == wrong.error, (wrong, text)
            assert [word for word in wrong.words if word not in text] == [], text
    assert max(off for _, off in ranks) < 1e-12


def test_dimensions_that_the_mesh_has_not_or_has_twice() -> None:
    assert_refused(
        TP,
        Wrong("ConfigError", "'data' dp, tp", shard="data"),
        Wrong("ConfigError", "'cp' dp, tp", shard=("dp", "cp")),
        Wrong("ConfigError", "'pods' dp, tp", strategy="hybrid_shard", replicate="pods"),
        Wrong("ConfigError", "'dp' shard replicate", strategy="hybrid_shard", replicate="dp"),
        Wrong("ConfigError", "'dp'", shard=("dp", "dp")),
        Wrong("ConfigError", "dp, tp shard=", shard=None),
        Wrong("ConfigError", "'tp' hybrid", replicate="tp"),
        Wrong("ConfigError", "mesh= 'dp'", mesh=None),
        # Ranks that have other parts.
        Wrong("ParameterError", "'embed.weight' DTensor shard replicate", shard=("dp", "tp")),
    )


def test_shards_of_experts_over_ranks_that_have_others() -> None:
    assert_refused(
        PARTS,
        experts("ParameterError", "'blocks.0.feed.experts.up' DTensor", mesh=("edp", "ep")),
        experts("ParameterError", "'blocks.0.feed.experts.up' DTensor", mesh="ep"),
        # Across both: the rank beside this one has the other half of its experts.
        experts("ParameterError", "'blocks.0.feed.experts.up' DTensor", mesh=crossed),
    )


@functools.cache
def crossed() -> DeviceMesh:
    """Ranks 0 and 3, and 1 and 2."""
    return DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("across", "along"))["across"]


def test_settings_of_experts_that_mean_nothing() -> None:
    where = " blocks.0.feed.experts"
    assert_refused(
        EP,
        experts("ConfigError", "'experts' edp, ep" + where, mesh="experts"),
        experts("ConfigError", "'edp'" + where, mesh=("edp", "edp")),
        experts("ConfigError", "mesh 2" + where, mesh=2),
        experts("ConfigError", "gradient_divisor 'mean' data group sum" + where, mesh="edp", gradient_divisor="mean"),
        experts("ConfigError", "gradient_divisor 0" + where, mesh="edp", gradient_divisor=0),
        experts("ConfigError", "gradient_divisor -1" + where, mesh="edp", gradient_divisor=-1.0),
        experts("ConfigError", "gradient_divisor True" + where, mesh="edp", gradient_divisor=True),
        experts("ConfigError", "gradient_divisor nan" + where, mesh="edp", gradient_divisor=float("nan")),
    )


def _attention(module: nn.Module) -> bool:
    return isinstance(module, Attention)


def test_ranks_whose_plans_differ() -> None:
    """The last rank's: in which modules are units, over which ranks they are, how they are divided and cut."""
    assert_refused(
        EP,
        Wrong("RankMismatchError", "(root) 3", only_on=3, policy=custom(_attention)),
        experts("RankMismatchError", "blocks.0.feed.experts 3", only_on=3, mesh=("edp", "ep")),
        experts("RankMismatchError", "blocks.0.feed.experts 3", only_on=3, mesh="edp", gradient_divisor="sum"),
        Wrong("RankMismatchError", "shard 3", only_on=3, shard="edp"),
    )


def tied_across(rank: int) -> tuple[str, str]:
    """What a parameter of an expert raises that is one of a dense unit, too."""
    with meshed(EP, rank) as (model, mesh):
        model.blocks[0].feed.experts.shared = model.blocks[0].attention.query.weight
        with pytest.raises(PolyshardError) as caught:
            polyshard.shard(model, config_of(EP, mesh))
    return type(caught.value).__name__, str(caught.value)


def test_a_parameter_of_two_meshes() -> None:
    for kind, text in run(4, tied_across):
        assert kind == "ParameterError"
        assert "blocks.0.feed.experts.shared" in text
        assert "blocks.0.attention.query.weight" in text


def parallelized_late(rank: int) -> float:
    """How far a step behind what torch's ``parallelize_module`` refused is from the whole model's."""
    plan = Plan((2, 2), ("dp", "cp"), Shape(), ("dp", "cp"), steps=0)
    with meshed(plan, rank) as (model, mesh):
        trainer = Polyshard(plan, model, mesh)
        with pytest.raises(ValueError, match="Cannot distribute a DTensor"):
            parallelize_module(model, mesh["cp"], plan_of(model))
        return _step_off(trainer)


def test_parallelize_module_behind_shard() -> None:
    assert max(run(4, parallelized_late)) < 1e-12
