"""Frozen and ignored parameters anywhere in the model, against the unsharded model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import polyshard
import polyshard.checkpoint
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_parity,
    draw,
    is_sharded,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    units_of,
)
from polyshard.errors import ParameterChangedError, ParameterError
from polyshard.interfaces import PluginContext
from polyshard.planning.device_mesh import mesh_over
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_fsdp2 import fully_shard
from torch import nn
from torch.distributed.tensor import DTensor

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")


def test_what_is_frozen_while_it_is_whole_by_hand_stays_frozen() -> None:
    """As FSDP2's users make it whole; drawn programs freeze inside of ``unsharded``."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        block: Any = model.get_submodule("blocks.1")
        if turn == 1:
            if is_sharded(model):
                block.unshard()
            block.requires_grad_(False)
            if is_sharded(model):
                block.reshard()
        return square_step(model, turn, rank)

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        context, given = PluginContext("threaded", torch.device("cpu")), dict(cast("Any", config.collectives))
        mesh = mesh_over(ThreadedCollectives(context, given["world"], given["rank"]), "cpu")
        for module in (model.get_submodule("blocks.1"), model):
            fully_shard(module, mesh=mesh)
        return model

    assert_parity(seeded(Net), step, 2, wrap=wrap)


def test_a_wholly_frozen_model_computes_and_passes_gradients_to_its_input() -> None:
    model = seeded(Net).requires_grad_(False)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Block))
        mine(draw(4, 3))
        assert root_of(mine).gathered == ()
        values = square_step(mine, 0, rank)
        assert root_of(mine).gathered == ()
        return values

    for rank, values in enumerate(on_ranks(2, on_rank)):
        torch.testing.assert_close(values, square_step(copy.deepcopy(model), 0, rank), rtol=1e-12, atol=1e-12)


def test_ignored_modules_and_parameters_stay_whole_and_are_left_to_the_user() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        polyshard.shard(
            mine,
            threaded(world, rank, policy=units_of(Block)),
            ignored_modules=[mine.blocks[1]],
            ignored_parameters=[mine.last.bias],
        )
        assert mine.blocks[1].up.weight.shape == (7, 5)
        assert mine.last.bias.shape == (2,)
        assert [type(each) for each in (mine.last.bias, mine.last.weight)] == [nn.Parameter, DTensor]
        values = square_step(mine, 0, rank)
        assert mine.last.bias.grad is not None
        return [*values, mine.last.bias.grad, mine.blocks[1].up.weight.grad]

    for rank, values in enumerate(on_ranks(2, on_rank)):
        plain = copy.deepcopy(model)
        expected = square_step(plain, 0, rank)
        torch.testing.assert_close(
            values, [*expected, plain.last.bias.grad, plain.blocks[1].up.weight.grad], rtol=1e-12, atol=1e-12
        )


def test_what_is_ignored_and_trained_is_told_once_by_name() -> None:
    def on_rank(prepare: Callable[[Any], None]) -> Callable[[int, ThreadedWorld], None]:
        def shards(rank: int, world: ThreadedWorld) -> None:
            model: Any = seeded(Net)
            prepare(model)
            polyshard.shard(
                model, threaded(world, rank), ignored_modules=[model.blocks[0]], ignored_parameters=[model.last.bias]
            )

        return shards

    def hook(model: Any) -> None:
        for parameter in (*model.blocks[0].parameters(), model.last.bias):
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)

    def freeze(model: Any) -> None:
        model.blocks[0].requires_grad_(False)
        model.last.bias.requires_grad_(False)

    with pytest.warns(UserWarning, match="Nothing averages") as told:
        on_ranks(3, on_rank(lambda model: None))
    (only,) = told
    assert "'blocks.0.up.weight', 'blocks.0.up.bias', 'blocks.0.down.weight' and 1 more over" in str(only.message)
    with warnings.catch_warnings(action="error"):
        on_ranks(3, on_rank(hook))
        on_ranks(3, on_rank(freeze))


class Packed(nn.Module):
    """A frozen weight of whose numbers each bit counts, a mask, and trained scales."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # All bits of a byte, NaN among them.
        numbers = torch.arange(16 * 21).remainder(256).to(torch.uint8).view(16, 21)
        packed = numbers.view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.mask = nn.Parameter(torch.arange(16) % 3 > 0, requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(0.1, 1.0, 16))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.detach().clone())
        assert (self.weight.is_contiguous(), self.mask.dtype) == (True, torch.bool)
        weight = self.weight.to(x.dtype).nan_to_num().clamp(-1, 1)
        return (x @ weight.T) * self.scale * self.mask


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The checkpoint of step 1 .* no number")
@one_by_one(
    "dtype",
    [torch.uint8, torch.int8, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2],
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "int8"},
        {"precision": "fp32", "offload": "cpu"},
        {"strategy": "no_shard", "precision": "bf16"},
    ],
)
def test_packed_parameters_are_gathered_bit_for_bit(
    dtype: torch.dtype, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole, another = (nn.Sequential(nn.Linear(3, 21), Packed(dtype)) for _ in range(2))
    bits = whole[1].weight.detach().view(torch.uint8)  # type: ignore[union-attr]
    another[1].weight.data.view(torch.uint8).zero_()  # type: ignore[union-attr]

    def run(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(whole, rank, world, policy=units_of(Packed), **settings)
        inner = model[1]
        assert inner.weight.dtype == dtype
        assert inner.weight.to_local().shape == (16 if "strategy" in settings else (6, 6, 4)[rank], 21)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).float().square().mean().backward()
            optimizer.step()
        assert all(torch.equal(each.view(torch.uint8), bits) for each in inner.seen)
        polyshard.checkpoint.save(tmp_path, 1, model)
        other: Any = sharded_copy(another, rank, world, policy=units_of(Packed))
        polyshard.checkpoint.load(polyshard.checkpoint.latest(tmp_path), other)
        other(torch.ones(2, 3))
        assert torch.equal(other[1].seen[0].view(torch.uint8), bits)

    on_ranks(3, run)
    read = polyshard.checkpoint.read(polyshard.checkpoint.latest(tmp_path))["model"]
    assert torch.equal(read["1.weight"].view(torch.uint8), bits)


def test_packed_parameters_cannot_be_trained_later() -> None:
    whole = Packed(torch.float8_e4m3fn)

    def run(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(whole, rank, world, precision="bf16")
        model(torch.ones(2, 21))
        model.weight.requires_grad_(True)
        with pytest.raises(ParameterError, match=r"are torch\.float8_e4m3fn, and are to be trained now"):
            model(torch.ones(2, 21))
        model.weight.requires_grad_(False)
        assert torch.equal(model(torch.ones(2, 21)), model(torch.ones(2, 21)))

    on_ranks(3, run)


def test_numbers_in_the_place_of_packed_ones_are_refused() -> None:
    whole = Packed(torch.uint8)

    def run(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(whole, rank, world)
        before = model(torch.ones(2, 21))
        words = r"'weight' holds torch\.uint8, and was replaced by a tensor of torch\.float32"
        with pytest.raises(ParameterChangedError, match=words), polyshard.unsharded(model, writeback=True):
            model.weight = nn.Parameter(torch.full((16, 21), 0.5))
        with polyshard.unsharded(model):
            model.weight = nn.Parameter(torch.full((16, 21), 0.5))
        assert not model.weight.requires_grad
        assert torch.equal(model(torch.ones(2, 21)), before)

    on_ranks(3, run)


def test_a_rank_has_its_part_of_the_bytes() -> None:
    def run(rank: int, world: ThreadedWorld) -> None:
        model = nn.Linear(256, 96, bias=False)
        model.weight = nn.Parameter(torch.zeros(96, 256, dtype=torch.uint8), requires_grad=False)
        assert polyshard.report(sharded_copy(model, rank, world, precision="bf16")).master_nbytes == 96 * 256 / 3

    on_ranks(3, run)
