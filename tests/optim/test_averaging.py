"""``polyshard.optim.AveragedWeights``: what ``torch.optim.swa_utils.AveragedModel`` is of the unsharded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import polyshard.checkpoint
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_all_close,
    draw,
    on_ranks,
    one_by_one,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    units_of,
    whole,
)
from polyshard.errors import ConfigError, StateError
from polyshard.optim import AveragedWeights
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")

BLOCKS = {"policy": units_of(Block)}
SETTINGS = [
    (2, {"strategy": "full_shard"}),
    (3, {"strategy": "shard_grad_op"}),
    (2, {"strategy": "no_shard"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
    (2, {"offload": "cpu"}),
    (2, {"strategy": "zero1"}),
    (4, {"strategy": "hfsdp", "shard_size": 2}),
]
EMA = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ema": (0.9, EMA),
    # The other function of torch for it weighs in fp32.
    "swa": (lambda updates: updates / (updates + 1), {"avg_fn": get_swa_avg_fn()}),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def reference(world_size: int, turns: int, kind: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """The unsharded model, trained with the mean gradient of all ranks, and torch's average of it."""
    model = seeded(Net)
    optimizer, averaged = sgd(model.parameters()), AveragedModel(model, **kind)
    for turn in range(turns):
        for rank in range(world_size):
            (model(draw(4, 3, turn=turn, rank=rank)).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return model, averaged.module


def train(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer, turns: range, *averages: Any) -> None:
    for turn in turns:
        square_step(model, turn, rank)
        optimizer.step()
        optimizer.zero_grad()
        for each in averages:
            each.update()


@pytest.mark.slow
@one_by_one("kind", KINDS, "world_size, settings", SETTINGS)
def test_the_average_is_torchs_of_the_unsharded_model(kind: str, world_size: int, settings: dict[str, Any]) -> None:
    decay, torchs = KINDS[kind]
    trained, averaged = reference(world_size, 4, torchs)
    inputs = draw(4, 3, turn=9)
    expected = averaged(inputs).detach()
    after, _ = reference(world_size, 6, torchs)

    def on_rank(rank: int, world: ThreadedWorld) -> list[Any]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        optimizer, average = sgd(model.parameters()), AveragedWeights(model, decay)
        train(model, rank, optimizer, range(4), average)
        assert average.updates == 4
        with average.applied(), torch.no_grad():
            seen = [model(inputs), whole(model)]
        seen.append(whole(model))
        train(model, rank, optimizer, range(4, 6), average)
        return [*seen, whole(model)]

    for output, inside, behind, later in on_ranks(world_size, on_rank):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(inside, named(averaged), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(behind, named(trained), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(later, named(after), rtol=1e-12, atol=1e-12)


def test_flat_parameters_and_those_outside_of_units_are_averaged_too() -> None:
    _, averaged = reference(1, 3, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)})

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            model = seeded(Net)
        last = list(model.last.parameters())
        polyshard.shard(model, threaded(world, rank, **BLOCKS), ignored_parameters=last)
        optimizer, average = sgd(polyshard.flat_parameters(model)), AveragedWeights(model, 0.5)
        # All ranks have the same inputs, for nobody reduces what is ignored.
        train(model, 0, optimizer, range(3), average)
        with average.applied():
            return whole(model)

    assert_all_close(on_ranks(2, on_rank), named(averaged))


def test_what_is_frozen_is_left_as_it_is_and_takes_no_memory() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(Net)
        model.blocks.requires_grad_(False)
        polyshard.shard(model, threaded(world, rank, **BLOCKS))
        before = whole(model)
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        average = AveragedWeights(model, 0.5)
        train(model, rank, optimizer, range(2), average)
        with average.applied():
            inside = whole(model)
        assert torch.equal(inside["blocks.0.up.weight"], before["blocks.0.up.weight"])
        assert not torch.equal(inside["first.weight"], before["first.weight"])
        model.blocks[0].requires_grad_(True)  # type: ignore[index]
        with pytest.raises(StateError, match=rf"Unit 'blocks.0' is trained.*rank {rank}"):
            average.update()
        model.blocks[0].requires_grad_(False)  # type: ignore[index]
        average.update()

    on_ranks(2, on_rank)


def test_weights_of_16_bits_are_averaged_in_fp32() -> None:
    # A step of 2 ** -8 at 1.0, of which a thousandth moves the average: nothing of it would be left in bf16.
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.fill_(1.0)
        polyshard.shard(model, threaded(world, rank))
        average = AveragedWeights(model, 0.999)
        average.update()
        with torch.no_grad():
            model.weight.fill_(1.0 + 2**-7)
        for _ in range(1000):
            average.update()
        with average.applied():
            inside = whole(model)["weight"]
        return [inside, whole(model)["weight"]]

    # 1.0049 is nearer to 1 + 2 ** -7 than to 1.0.
    assert 1 + 2**-7 * (1 - 0.999**1000) > 1 + 2**-8
    for inside, behind in on_ranks(2, on_rank):
        assert torch.equal(inside, torch.full((4, 4), 1.0 + 2**-7, dtype=torch.bfloat16))
        assert torch.equal(behind, inside)


@pytest.mark.slow
def test_an_average_is_saved_and_loaded_by_checkpoints_at_any_number_of_ranks(tmp_path: Path) -> None:
    trained, averaged = reference(2, 4, EMA)
    _, longer = reference(2, 5, EMA)

    def saves(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer, average = sgd(model.parameters()), AveragedWeights(model, 0.9)
        for turn in range(4):
            train(model, rank, optimizer, range(turn, turn + 1), average)
            polyshard.checkpoint.save(tmp_path / "run", turn, model, optimizer, keep=1)
            with average.applied():
                extra = {"updates": average.updates}
                polyshard.checkpoint.save(tmp_path / "average", turn, model, extra=extra, keep=1)

    on_ranks(2, saves)

    def resumes(rank: int, world: ThreadedWorld) -> list[Any]:
        model = sharded_copy(seeded(Net, seed=3), rank, world, **BLOCKS)
        optimizer, average = sgd(model.parameters()), AveragedWeights(model, 0.9)
        folders = {name: polyshard.checkpoint.latest(tmp_path / name) for name in ("run", "average")}
        assert folders["run"] is not None
        assert folders["average"] is not None
        polyshard.checkpoint.load(folders["run"], model, optimizer)
        with average.applied(writeback=True):
            extra = polyshard.checkpoint.load(folders["average"], model)
        average.updates = extra["updates"]
        seen = [average.updates, whole(model)]
        with average.applied():
            seen.append(whole(model))
        # Four ranks with the inputs of two.
        train(model, rank % 2, optimizer, range(4, 5), average)
        with average.applied():
            return [*seen, whole(model)]

    for updates, weights, inside, later in on_ranks(4, resumes):
        assert updates == 4
        torch.testing.assert_close(weights, named(trained), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(inside, named(averaged), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(later, named(longer), rtol=1e-12, atol=1e-12)


def test_nothing_trains_on_averages_and_an_error_inside_gives_the_weights_back() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer, average = sgd(model.parameters()), AveragedWeights(model, 0.9)
        train(model, rank, optimizer, range(2), average)
        weights = whole(model)
        square_step(model, 2, rank)
        messages = []

        def refused(call: Callable[[], object]) -> None:
            with average.applied(), pytest.raises(StateError) as caught:
                call()
            messages.append(str(caught.value))

        refused(optimizer.step)
        refused(average.update)
        refused(lambda: average.applied().__enter__())
        refused(lambda: AveragedWeights(model, 0.9))
        refused(lambda: model(draw(4, 3)).sum().backward())
        step = polyshard.CapturedStep(model, optimizer, lambda x: model(x).sum(), fallback="eager")
        refused(lambda: step(draw(4, 3)))
        with polyshard.unsharded(model), pytest.raises(StateError, match=r"inside polyshard\.unsharded"):
            average.applied().__enter__()
        with polyshard.unsharded(model), pytest.raises(StateError, match=r"update\(\) was called inside"):
            average.update()
        with pytest.raises(ZeroDivisionError), average.applied():
            _fails_behind_a_change(model.first.weight)
        torch.testing.assert_close(whole(model), weights, rtol=0, atol=0)
        # Gradients of inputs are no training.
        with average.applied():
            x = draw(4, 3, requires_grad=True)
            torch.autograd.grad(model(x).sum(), x)
        optimizer.zero_grad()
        train(model, rank, optimizer, range(2, 4), average)
        return messages

    for rank, messages in enumerate(on_ranks(2, on_rank)):
        stepped, updated, entered, made, backward, captured = messages
        assert "A CapturedStep was called inside of AveragedWeights.applied()" in captured
        assert f"SGD was to update 'first.weight' inside of AveragedWeights.applied() (rank {rank})" in stepped
        assert f"AveragedWeights.update() was called inside of AveragedWeights.applied() (rank {rank})" in updated
        assert "AveragedWeights.applied() was called inside of AveragedWeights.applied()" in entered
        assert "AveragedWeights() was called inside of" in made
        assert "would give the parameters gradients of their averages" in backward


def _fails_behind_a_change(parameter: torch.Tensor) -> None:
    parameter.data = torch.zeros_like(parameter)
    raise ZeroDivisionError


@pytest.mark.parametrize("decay", [1.5, -0.1, float("nan"), "0.9"])
def test_a_decay_that_is_no_part_is_refused(decay: Any) -> None:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    with pytest.raises(ConfigError, match=r"decay of AveragedWeights is .*0\.999"):
        AveragedWeights(model, decay)
    average = AveragedWeights(model, lambda _: decay)
    average.update()
    with pytest.raises(ConfigError, match="decay of AveragedWeights is"):
        average.update()
    assert average.updates == 1


def test_a_model_that_is_not_sharded_has_torchs_own() -> None:
    with pytest.raises(StateError, match="needs a sharded module"):
        AveragedWeights(seeded(Net), 0.9)


def test_torchs_averaged_model_of_a_sharded_one_is_refused_and_says_what_there_is() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with pytest.raises(StateError, match=rf"rank {rank}.*AveragedModel, use polyshard\.optim\.AveragedWeights"):
            AveragedModel(model)
        square_step(model, 0, rank)

    on_ranks(2, on_rank)


@pytest.mark.slow
def test_averages_go_on_from_a_state_dict_of_the_same_rank() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        first = AveragedWeights(model, 0.9)
        optimizer = sgd(model.parameters())
        train(model, rank, optimizer, range(2), first)
        second = AveragedWeights(model, 0.9)
        second.load_state_dict(first.state_dict())
        train(model, rank, optimizer, range(2, 4), first, second)
        assert first.updates == second.updates == 4
        with first.applied():
            expected = whole(model)
        with second.applied():
            assert_all_close([whole(model)], expected)
        with pytest.raises(ConfigError, match="averages of other shapes"):
            second.load_state_dict({"updates": 1, "averages": []})

    on_ranks(2, on_rank)
