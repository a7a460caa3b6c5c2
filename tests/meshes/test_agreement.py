"""Values on a mesh: compared and sent among the ranks that have the same ones, and initialised as the whole model's."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import polyshard
import polyshard.checkpoint
import polyshard.state
import polyshard_huggingface
import pytest
import torch
from meshed_models import Block, Net, Shape, parallelize
from meshes import Plan, config_of, coordinate_of, full, make, mesh_of, meshed, run
from polyshard import _torch_private
from polyshard.errors import RankMismatchError, UnsupportedError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

pytestmark = pytest.mark.slow

#: Parts of 5 and of 4 rows or columns, of 9.
TP = Plan((2, 2), ("dp", "tp"), Shape(hidden=9), ("dp",))
EP = Plan((2, 2), ("edp", "ep"), Shape(experts=4), ("edp", "ep"), experts=("edp",))
#: Cut over tp, held by all, and of this rank's experts.
UP, NORM, EXPERTS = "blocks.0.feed.up.weight", "blocks.1.before.weight", "blocks.0.feed.experts.up"


def local(parameter: torch.Tensor) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def shard_changed(rank: int, plan: Plan, changed: Mapping[int, str], has_store: bool) -> str:
    """What a rank raises where some have another element of a parameter; empty where nothing is raised."""
    with meshed(plan, rank) as (model, mesh):
        if rank in changed:
            local(model.get_parameter(changed[rank])).view(-1)[-1] += 1
        before = {name: local(each).clone() for name, each in model.named_parameters()}
        # Without a store, ranks compare by their collectives.
        store = _torch_private.default_store() if has_store else None
        try:
            with mock.patch.object(_torch_private, "default_store", return_value=store):
                polyshard.shard(model, config_of(plan, mesh))
        except RankMismatchError as error:
            assert all(torch.equal(local(each), before[name]) for name, each in model.named_parameters())
            return str(error)
        polyshard.close(model)
        return ""


@pytest.mark.parametrize(
    ("plan", "changed", "has_store", "words"),
    [
        # Nobody has the same part as the rank beside it: with a store all trainings on meshes show it.
        (TP, {}, False, []),
        (TP, {3: UP}, True, ["Rank 3 holds other values than rank 1", UP, "tp 1 of 2"]),
        (TP, {1: NORM}, False, ["Rank 1 holds other values than rank 0", NORM]),
        (EP, {2: EXPERTS}, True, ["Rank 2 holds other values than rank 0", EXPERTS, "ranks [0, 2]"]),
        (EP, {2: EXPERTS}, False, ["Rank 2 holds other values than rank 0", EXPERTS, "ranks [0, 2]"]),
        (EP, {1: NORM}, True, ["Rank 1 holds other values than rank 0", NORM]),
        # Both parts are told of, and ranks that differ as a whole are not told of by part.
        (TP, {2: UP, 3: UP}, True, ["Rank 2 holds other values than rank 0", "Rank 3 holds other values than rank 1"]),
    ],
)
def test_other_values_are_refused_among_ranks_that_ought_to_have_the_same(
    plan: Plan, changed: dict[int, str], has_store: bool, words: list[str]
) -> None:
    (text,) = set(run(4, shard_changed, plan, changed, has_store))
    assert bool(text) == bool(changed)
    for word in words:
        assert word in text


def shard_sent(rank: int, plan: Plan) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Where this rank is, and the local parameters and buffers that it has after it took those of others."""
    with meshed(plan, rank) as (model, mesh):
        model.register_buffer("seen", torch.full((3,), float(rank)))
        for block in model.blocks:
            experts = block.feed.experts if plan.shape.experts else block.feed
            experts.register_buffer("load", torch.full((2,), float(rank)))
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).fill_(rank)
        polyshard.shard(model, dataclasses.replace(config_of(plan, mesh), sync_module_states=True))
        with polyshard.unsharded(model):
            values = {name: local(each).clone() for name, each in model.named_parameters()}
            values |= {name: each.clone() for name, each in model.named_buffers()}
        polyshard.close(model)
        return coordinate_of(mesh), values


def test_values_are_sent_among_ranks_that_ought_to_have_the_same() -> None:
    for coordinate, values in run(4, shard_sent, dataclasses.replace(TP, settings=(("strategy", "no_shard"),))):
        for name, value in values.items():
            # Copies over tp are of the first rank, too.
            cut = ".weight" in name and "norm" not in name and "be" not in name.split(".")[-2][:2]
            expected = coordinate["tp"] if cut and not name.endswith(("before.weight", "between.weight")) else 0
            if name.endswith((".query.bias", ".key.bias", ".value.bias", ".up.bias")):
                expected = coordinate["tp"]
            assert value.eq(expected).all(), name
    for coordinate, values in run(4, shard_sent, EP):
        for name, value in values.items():
            assert value.eq(coordinate["ep"] if ".experts." in name else 0).all(), name


class Scaled(nn.Linear):
    """Of its parameters one is cut over tp, and one is not."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, bias=False)
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            nn.init.normal_(self.scale)

    def cut(self, mesh: DeviceMesh) -> None:
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh["tp"], [Shard(1)]))


def initialised(model: nn.Module, config: polyshard.ShardConfig, **settings: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    polyshard.shard(model, config, **settings)
    with polyshard.unsharded(model):
        values = {name: full(each.detach()) for name, each in model.named_parameters()}
    polyshard.close(model)
    return values


def on_meta(shape: Shape) -> Net:
    with torch.device("meta"):
        model = Net(shape)
        model.blocks[1].add_module("scaled", Scaled(9))
    return model


def initialised_on_mesh(rank: int, plan: Plan) -> bool:
    """Whether a model on the meta device begins as the whole one in this process does, bit for bit."""
    mesh = mesh_of(plan.sizes, plan.names, "cpu")
    model = parallelize(on_meta(plan.shape), mesh)
    model.blocks[1].scaled.cut(mesh)
    # One module has values already, which stay, and one of another a part.
    given = make(plan).blocks[0].attention.query.float()
    model.blocks[0].attention.query.weight = nn.Parameter(
        distribute_tensor(given.weight.detach(), mesh["tp"], [Shard(0)])
    )
    held = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError):
        polyshard.shard(model, config_of(plan, mesh), initializer=lambda module: 1 / 0)
    assert all(each is held[name] for name, each in model.named_parameters())
    got = initialised(model, config_of(plan, mesh))
    whole = on_meta(plan.shape)
    whole.blocks[0].attention.query.weight = nn.Parameter(given.weight.detach().clone())
    alone = polyshard.ShardConfig(
        collectives={"name": "fake", "world_size": 1},
        strategy="no_shard",
        policy=lambda module: isinstance(module, Block),
    )
    wanted = initialised(whole, alone)
    assert got.keys() == wanted.keys()
    assert len({value.sum().item() for value in got.values()}) > 10
    return all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "settings",
    [
        *(
            pytest.param(settings, marks=pytest.mark.nightly)
            for settings in ({"strategy": "shard_grad_op", "split_root": True}, {"strategy": "no_shard"})
        )
    ],
)
def test_a_meta_model_begins_as_the_whole_one(settings: dict[str, Any]) -> None:
    plan = dataclasses.replace(TP, settings=tuple(settings.items()))
    assert all(run(4, initialised_on_mesh, plan))


def saved(rank: int, plan: Plan, folder: str) -> list[str]:
    """What all that would put whole values together raises; this rank's own state goes back where it came from."""
    texts = []
    with meshed(plan, rank) as (model, mesh):
        polyshard.shard(model, config_of(plan, mesh))
        optimizer = torch.optim.AdamW(model.parameters())
        calls: list[Callable[[], object]] = [
            lambda: polyshard.checkpoint.save(Path(folder), 1, model, optimizer),
            lambda: polyshard.checkpoint.async_save(Path(folder), 1, model),
            lambda: polyshard.checkpoint.load(Path(folder), model),
            lambda: polyshard.checkpoint.load_dcp(Path(folder), model),
            lambda: polyshard.state.get_model_state_dict(model, polyshard.state.StateOptions(form="full")),
            lambda: polyshard.state.get_state_dict(model, optimizer),
            lambda: polyshard.state.set_model_state_dict(model, {}),
            lambda: polyshard_huggingface.save(model, folder),
            lambda: polyshard_huggingface.load(model, folder),
        ]
        for call in calls:
            with pytest.raises(UnsupportedError) as caught:
                call()
            texts.append(str(caught.value))
        state = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(state)
        assert all(torch.equal(local(value), local(state[name])) for name, value in model.state_dict().items())
        polyshard.close(model)
    return texts


def test_state_that_would_lack_what_other_ranks_have_is_refused(tmp_path: Path) -> None:
    for rank, texts in enumerate(run(4, saved, EP, str(tmp_path))):
        for text in texts:
            assert "'blocks.0.feed.experts.up' belongs to 2 of 4 ranks, and others have another one of its name" in text
            assert f"rank {rank}" in text
            assert "DTensor.from_local" in text
            assert "model.state_dict()" in text
    assert not list(tmp_path.iterdir())
