"""What polyshard_accelerate saves and loads: resuming, other numbers of ranks, whole models, folders refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs, ProjectConfiguration, set_seed
from accelerate_ranks import forget, loader_of, on_ranks, pairs
from blockwise_states import BlockwiseMomentum
from parity import Block, Net, Words, seeded, units_of, whole
from polyshard import ShardConfig
from polyshard.errors import ConfigError, PolyshardError, StateError
from polyshard_accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

#: Ranks that save and load, many times over.
pytestmark = pytest.mark.slow

BLOCKS = ShardConfig(policy=units_of(Block))
SAME: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}


# Resuming.


class Noisy(nn.Module):
    """Draws random numbers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.net(x), 0.3, training=self.training)


class Counter:
    """Something of the user's."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def run(folder: Path | None, resume: bool, precision: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Two epochs of 7 batches, two batches a step. Saves to ``folder`` in the middle of the first one, or goes on from
    there."""
    set_seed(3 + dist.get_rank())
    accelerator = Accelerator(
        shard=BLOCKS,
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=3)],
    )
    model = seeded(Noisy).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader_of(pairs(56), shuffle=True), scheduler
    )
    begin = 0
    if resume:
        accelerator.load_state(folder)
        begin = counter.seen
    losses = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        skipped = min(max(begin - 7 * epoch, 0), 7)
        if skipped == 7:
            continue
        for x, y in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x.float()), y.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            counter.seen += 1
            if counter.seen == 4 and folder is not None and not resume:
                accelerator.save_state(folder)
    values = whole(model)
    accelerator.free_memory()
    return losses, values, counter.seen


def resume(rank: int, folder: Path, precision: str) -> None:
    losses, values, _ = run(None, False, precision)
    forget()
    saved_losses, _, _ = run(folder, False, precision)
    assert saved_losses == losses
    forget()
    resumed_losses, resumed_values, seen = run(folder, True, precision)
    assert (len(losses), len(resumed_losses), seen) == (14, 10, 14)
    assert resumed_losses == losses[4:]
    torch.testing.assert_close(resumed_values, values, **SAME)


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.nightly), "fp16"])
def test_a_run_that_resumes_is_the_run_that_never_stopped(tmp_path: Path, precision: str) -> None:
    on_ranks(2, resume, tmp_path / "state", precision)


# Another number of ranks.


def prepared(*models: nn.Module, lr: float = 1e-2) -> tuple[Accelerator, list[Any], list[Any]]:
    """Models and their optimizers."""
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=lr) for each in models]
    together = accelerator.prepare(*models, *optimizers)
    return accelerator, list(together[: len(models)]), list(together[len(models) :])


def steps(accelerator: Accelerator | None, models: list[Any], optimizers: list[Any], first: int, last: int) -> None:
    """Full-batch steps: the same on any number of ranks."""
    x, y = pairs(8).tensors
    for turn in range(first, last):
        for model in models:
            loss = mse_loss(model(x + turn), y)
            loss.backward() if accelerator is None else accelerator.backward(loss)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save_after_two(rank: int, folder: Path) -> None:
    accelerator, models, optimizers = prepared(seeded(Net), seeded(Net, 1), lr=3e-2)
    accelerator.step = 5
    steps(accelerator, models, optimizers, 0, 2)
    accelerator.save_state(folder)
    accelerator.free_memory()


def go_on(rank: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    accelerator, models, optimizers = prepared(seeded(Net, 2), seeded(Net, 3), lr=7.0)
    accelerator.load_state(folder)
    assert accelerator.step == 5
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {3e-2}
    steps(accelerator, models, optimizers, 2, 4)
    values = [whole(model) for model in models]
    accelerator.free_memory()
    return values


def test_a_checkpoint_of_two_ranks_goes_on_at_one_and_at_three(tmp_path: Path) -> None:
    on_ranks(2, save_after_two, tmp_path / "state")
    models = [seeded(Net), seeded(Net, 1)]
    steps(None, models, [torch.optim.AdamW(model.parameters(), lr=3e-2) for model in models], 0, 4)
    expected = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        alone = go_on(0, tmp_path / "state")
    forget()
    for found in (alone, *on_ranks(3, go_on, tmp_path / "state")):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# Folders.


def folders_are_saved_into_again_numbered_and_kept_to_a_limit(rank: int, folder: Path) -> None:
    accelerator, models, optimizers = prepared(seeded(Net))
    target = folder / "again"
    for turn in range(3):
        steps(accelerator, models, optimizers, turn, turn + 1)
        accelerator.save_state(target)
        assert len(list((target / "polyshard_0").glob("step-*"))) == 1
    newest = whole(models[0])
    steps(accelerator, models, optimizers, 3, 4)
    accelerator.load_state(target)
    torch.testing.assert_close(whole(models[0]), newest, **SAME)
    accelerator.free_memory()
    forget()

    # What a save that was killed behind the models leaves: the one before it stays.
    accelerator, models, optimizers = prepared(seeded(Net))
    accelerator.load_state(target)
    steps(accelerator, models, optimizers, 3, 4)
    handle = accelerator.register_save_state_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(target)
    handle.remove()
    accelerator.load_state(target)
    torch.testing.assert_close(whole(models[0]), newest, **SAME)
    accelerator.free_memory()
    forget()

    names = ProjectConfiguration(str(folder / "run"), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(shard=BLOCKS, cpu=True, project_config=names)
    model = accelerator.prepare(seeded(Net))
    for value in range(3):
        with polyshard.unsharded(model, writeback=True):
            nn.init.constant_(model.last.bias, value)
        accelerator.save_state()
    assert sorted(path.name for path in (folder / "run" / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    nn.init.zeros_(model.last.bias)
    accelerator.load_state()
    assert whole(model)["last.bias"].tolist() == [2.0, 2.0]
    accelerator.free_memory()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def hooks_of_the_user_see_every_model(rank: int, folder: Path) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    model, other = accelerator.prepare(seeded(Net), seeded(Net, 1))
    plain = accelerator.prepare_model(seeded(Net, 2), evaluation_mode=True)
    seen: list[object] = []
    accelerator.register_save_state_pre_hook(lambda *arguments: seen.append(arguments))
    accelerator.register_load_state_pre_hook(lambda *arguments: seen.append(arguments))
    accelerator.save_state(folder)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    nn.init.zeros_(plain.last.weight)
    accelerator.load_state(folder)
    (models, weights, place), (loaded, again) = seen
    assert models == [model, other, plain]
    assert [list(each) for each in weights] == [list(before)]
    assert loaded == [plain]
    assert Path(str(place)) == Path(str(again)) == folder
    torch.testing.assert_close(dict(plain.state_dict()), before, **SAME)
    accelerator.free_memory()


# Whole models.


class Tied(Words):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = self.embedding.weight


def whole_models_are_what_was_sharded(rank: int, folder: Path) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    reference = seeded(Tied)
    model = accelerator.prepare(seeded(Tied))
    state = accelerator.get_state_dict(model)
    if rank == 0:
        torch.testing.assert_close(state, dict(reference.state_dict()), **SAME)
        assert list(state) == list(reference.state_dict())
        assert state["embedding.weight"] is state["last.weight"]
    else:
        assert state == {}
    accelerator.save_model(model, folder, max_shard_size="1KB")
    # Every rank finds the files.
    stored = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole_again = seeded(Tied, 1)
    missing, unexpected = whole_again.load_state_dict(stored, strict=False)
    assert set(missing) <= {"embedding.weight", "last.weight"}
    assert not unexpected
    torch.testing.assert_close(dict(whole_again.state_dict()), dict(reference.state_dict()), **SAME)
    # It trains on.
    loss = model(torch.arange(10).view(2, 5)).square().mean()
    accelerator.backward(loss)
    torch.testing.assert_close(loss, reference(torch.arange(10).view(2, 5)).square().mean())
    accelerator.free_memory()


# Wrong folders.


class Wider(Net):
    """Another model under the same names."""

    def __init__(self) -> None:
        super().__init__(width=6)


def folders_of_something_else_are_refused_and_change_nothing(rank: int, folder: Path) -> None:
    accelerator, models, optimizers = prepared(seeded(Net))
    steps(accelerator, models, optimizers, 0, 1)
    accelerator.save_state(folder / "good")
    if rank == 0:
        shutil.copytree(folder / "good", folder / "unfinished")
        (folder / "unfinished" / "polyshard.json").unlink()
    accelerator.wait_for_everyone()
    with pytest.raises(StateError, match=r"unfinished has no polyshard\.json"):
        accelerator.load_state(folder / "unfinished")
    with pytest.raises(ValueError, match="folder does not exist"):
        accelerator.load_state(folder / "nothing")
    model = models[0]
    before = whole(model)
    handle = model.last.register_forward_hook(lambda *_: accelerator.save_state(folder / "inside"))
    with pytest.raises(StateError, match="inside a forward"):
        model(torch.ones(1, 3).double())
    handle.remove()
    torch.testing.assert_close(whole(model), before, **SAME)
    accelerator.load_state(folder / "good")
    torch.testing.assert_close(whole(model), before, **SAME)
    accelerator.free_memory()
    forget()

    wrong: list[tuple[list[nn.Module], bool, str]] = [
        ([seeded(Wider)], True, r"'first\.weight' has shape \(5, 3\) in the checkpoint .*polyshard_0.* but \(6, 3\)"),
        ([seeded(Words)], True, r"polyshard_0.*'embedding\.weight'"),
        ([seeded(Net), seeded(Net)], True, r"holds 1 sharded models \(Net\), but 2 are prepared \(Net, Net\)"),
        ([seeded(Net)], False, r"optimizers \[0\] over model 0 .* prepared are \[\] over model 0"),
    ]
    for others, optimized, words in wrong:
        accelerator = Accelerator(shard=ShardConfig(), cpu=True)
        for other in others:
            accelerator.prepare(other)
            if optimized:
                accelerator.prepare(torch.optim.AdamW(other.parameters()))
        values = [whole(other) for other in others]
        with pytest.raises(ConfigError, match=words):
            accelerator.load_state(folder / "good")
        for other, value in zip(others, values, strict=True):
            torch.testing.assert_close(whole(other), value, **SAME)
        accelerator.free_memory()
        forget()


# What cannot be saved.


def optimizers_that_cannot_be_saved_are_told_of_before_training(rank: int, folder: Path) -> None:
    numbered = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(shard=BLOCKS, cpu=True, project_config=numbered)
    model = seeded(Net)
    optimizer = BlockwiseMomentum(model.parameters())
    with pytest.raises(PolyshardError, match=r"'scales' of .*leave out automatic_checkpoint_naming"):
        accelerator.prepare(model, optimizer)
    assert not optimizer.state
    forget()
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    # Whether it will be saved nobody knows: one rank says so, and it trains.
    told = pytest.warns(UserWarning, match=r"save_state\(\) will refuse BlockwiseMomentum.*'scales'")
    with told if rank == 0 else nullcontext():
        model = seeded(Net)
        model, optimizer = accelerator.prepare(model, BlockwiseMomentum(model.parameters()))
    accelerator.backward(model(torch.ones(2, 3).double()).sum())
    optimizer.step()
    with pytest.raises(PolyshardError, match="'scales'"):
        accelerator.save_state(folder / "state")
    accelerator.save_model(model, folder / "model")
    accelerator.free_memory()
    told = pytest.warns(UserWarning, match=r"save_state\(\) will refuse SGD")
    models = [seeded(Net), seeded(Net, 1)]
    over_both = torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1)
    with told if rank == 0 else nullcontext():
        *models, over_both = accelerator.prepare(*models, over_both)
    steps(accelerator, models, [over_both], 0, 1)
    with pytest.raises(ConfigError, match="is not a parameter of the model"):
        accelerator.save_state(folder / "state")
    accelerator.free_memory()


@pytest.mark.parametrize(
    "body",
    [
        folders_are_saved_into_again_numbered_and_kept_to_a_limit,
        hooks_of_the_user_see_every_model,
        whole_models_are_what_was_sharded,
        folders_of_something_else_are_refused_and_change_nothing,
        optimizers_that_cannot_be_saved_are_told_of_before_training,
    ],
    ids=lambda body: body.__name__,
)
def test_on_ranks(body: Callable[[int, Path], None], tmp_path: Path) -> None:
    on_ranks(2, body, tmp_path)
