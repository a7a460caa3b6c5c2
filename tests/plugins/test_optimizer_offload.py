"""``optimizer``: the device computes from copies of masters on the host, which follow whoever writes to these."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_all_close,
    assert_parity,
    draw,
    is_sharded,
    local,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    units_of,
    whole,
)
from polyshard import checkpoint
from polyshard.interfaces import OffloadManager, PluginContext, UnitSpec
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.offload import CpuOffload, NoOffload, OptimizerOffload
from polyshard_testing import plugin_context
from torch import nn

BLOCKS = {"policy": units_of(Block)}
OFFLOADED = {**BLOCKS, "offload": "optimizer"}
CONTEXT = plugin_context("optimizer")


def flat_adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over one parameter a unit, where the model is sharded."""
    return torch.optim.AdamW(polyshard.flat_parameters(model) if is_sharded(model) else model.parameters(), lr=1e-2)


@pytest.mark.parametrize(("before", "after"), [("none", "optimizer"), ("optimizer", "cpu"), ("cpu", "optimizer")])
def test_a_checkpoint_is_of_no_way_to_offload(before: str, after: str, tmp_path: Path) -> None:
    """Behind it the other model trains on as the first one would have."""

    def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, turns: Iterable[int]) -> None:
        for turn in turns:
            square_step(model, turn, rank)
            optimizer.step()
            optimizer.zero_grad()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        first, second = (sharded_copy(seeded(Net), rank, world, offload=each, **BLOCKS) for each in (before, after))
        optimizers = adam(first), flat_adam(second)
        train_on(first, optimizers[0], rank, range(2))
        # Its copies are of the first values.
        train_on(second, optimizers[1], rank, range(5, 6))
        path = checkpoint.save(tmp_path, 1, first, optimizers[0])
        checkpoint.load(path, second, optimizers[1])
        for model, optimizer in zip((first, second), optimizers, strict=True):
            train_on(model, optimizer, rank, range(2, 4))
        return whole(first), whole(second)

    for wanted, found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _by_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        local(parameter.detach()).numpy()[...] *= 0.5


def _by_copy(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter * 0.5)


@pytest.mark.parametrize("change", [_by_data, _by_numpy, _by_copy])
@pytest.mark.parametrize("train", [True, False], ids=["after a step", "after an evaluation"])
def test_kept_slices_follow_every_way_of_writing_to_masters(change: Callable[[nn.Module], None], train: bool) -> None:
    whole = seeded(Net)
    x = draw(4, 3)
    for parameter in whole.parameters():
        parameter.data.mul_(0.5)
    expected = whole(x)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(Net), rank, world, offload=OptimizerOffload(CONTEXT), **BLOCKS)
        if train:
            model(x).sum().backward()
        else:
            with torch.no_grad():
                model(x)
        change(model)
        return model(x).detach()

    assert_all_close(on_ranks(2, on_rank), expected)


def test_kept_slices_follow_an_optimizer_that_moves_no_version() -> None:
    def fused(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    assert_parity(seeded(Net), square_step, 2, optimizer=fused, settings=OFFLOADED, tolerance=1e-10)


def test_two_models_that_share_a_manager_keep_slices_apart() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        offload, gradients = OptimizerOffload(CONTEXT), []
        models = [sharded_copy(seeded(Net, seed), rank, world, offload=offload, **BLOCKS) for seed in (0, 1)]
        inputs = [draw(4, 3, requires_grad=True) for _ in models]
        losses = [model(x).square().mean() for model, x in zip(models, inputs, strict=True)]
        for loss, x in zip(losses, inputs, strict=True):
            # The first backward comes behind the second model's forward.
            loss.backward()
            assert x.grad is not None
            gradients.append(x.grad)
        return gradients

    wanted = []
    for seed in (0, 1):
        x = draw(4, 3, requires_grad=True)
        seeded(Net, seed)(x).square().mean().backward()
        assert x.grad is not None
        wanted.append(x.grad)
    for got in on_ranks(2, on_rank):
        for mine, expected in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


def test_kept_slices_are_of_the_dtype_that_computes() -> None:
    precision = {"name": "mixed", "param": "bf16", "full_precision_in_eval": True}

    def outputs(offload: Any) -> list[torch.Tensor]:
        def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
            whole = seeded(Net).float()
            model = sharded_copy(whole, rank, world, offload=offload(), precision=precision, **BLOCKS)
            x, seen = draw(4, 3).float(), []
            for training in (True, False, True):
                model.train(training)
                seen.append(model(x).detach().float())
                if training:
                    model(x).float().sum().backward()
            return torch.stack(seen)

        return on_ranks(2, on_rank)

    for got, wanted in zip(outputs(lambda: OptimizerOffload(CONTEXT)), outputs(lambda: "none"), strict=True):
        assert torch.equal(got, wanted)
        # What is evaluated is not what was trained with.
        assert not torch.equal(got[0], got[1])


def test_a_copy_of_a_part_that_trained_by_itself_is_the_larger_models() -> None:
    """There is one copy of each master, under whatever names its unit had."""

    def copies() -> int:
        """Storages of one rank's elements of ``nn.Linear(32, 64)``, in bf16: no gather buffer is so small."""
        nbytes = (32 * 64 + 64) // 2 * torch.bfloat16.itemsize
        found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype is torch.bfloat16]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
        return list(storages.values()).count(nbytes)

    config = polyshard.ShardConfig(
        collectives={"name": "fake", "world_size": 2}, offload=OptimizerOffload(CONTEXT), precision="bf16"
    )
    inner = nn.Linear(32, 64)
    polyshard.fully_shard(inner, config)
    inner(torch.ones(2, 32)).sum().backward()
    assert copies() == 1
    outer = nn.Sequential(inner, nn.Linear(64, 3))
    polyshard.fully_shard(outer, config)
    outer(torch.ones(2, 32)).sum().backward()
    assert copies() == 1


# Offload managers on the CPU: rules that the conformance suite, which both pass as well, does not have.

CPU = torch.device("cpu")


def context() -> PluginContext:
    return PluginContext(name="cpu", device=CPU)


def unit() -> UnitSpec:
    return UnitSpec("layers.0", nn.Linear, ("layers.0.weight",), 8, 4, torch.float32, CPU, is_root=False)


def managers() -> list[OffloadManager]:
    return [NoOffload(context()), CpuOffload(context())]


def test_a_stored_gradient_outlives_the_reduction_buffer_and_the_next_step() -> None:
    manager = CpuOffload(context())
    reduced = torch.ones(4)
    first = manager.store_grad(unit(), reduced, None)
    reduced.fill_(5.0)
    second = manager.store_grad(unit(), reduced, None)
    manager.sync_for_step()
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [5.0] * 4


def test_tensors_made_in_inference_mode_train_afterwards() -> None:
    manager = CpuOffload(context())
    with torch.inference_mode():
        master = manager.place(unit(), torch.ones(4))
        stored = manager.store_grad(unit(), torch.ones(4), None)
    weight = nn.Parameter(master)
    weight.grad = stored
    torch.optim.SGD([weight], lr=0.25).step()
    assert master.tolist() == [0.75] * 4


def test_masters_that_require_gradients_are_copied_without_a_graph() -> None:
    for manager in managers():
        own_slice = torch.empty(4, dtype=torch.bfloat16)
        manager.fetch(unit(), nn.Parameter(torch.ones(4)), own_slice)
        assert not own_slice.requires_grad
        assert own_slice.tolist() == [1.0] * 4
