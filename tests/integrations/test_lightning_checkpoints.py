"""Checkpoints of Lightning's Trainer: runs that resume, files that plain Lightning reads, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import polyshard
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_ranks import (
    BATCH,
    CONFIG,
    Adversaries,
    Pairs,
    Regression,
    built,
    lightnings_warnings,
    loader,
    on_ranks,
    trainer,
)
from parity import Block
from polyshard import ShardConfig, checkpoint
from polyshard.errors import ConfigError, UnsupportedError
from polyshard_lightning import PolyshardStrategy
from torch import nn
from torch.utils.data import DataLoader

#: Ranks that save and load, many times over.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with lightnings_warnings():
        yield


#: Single files are tried with Fabric and with what plain Lightning goes on from, too.
FORMS = [pytest.param("full", marks=pytest.mark.nightly), "sharded"]
OTHER = ShardConfig(strategy="shard_grad_op")


def strategy(form: str, config: ShardConfig = CONFIG) -> PolyshardStrategy:
    return PolyshardStrategy(config, state_dict_type=form)


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(module):
        return {name: each.clone() for name, each in module.state_dict().items()}


def plain_trainer(folder: Path, **settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SingleDeviceStrategy("cpu"),
        precision="64-true",
        default_root_dir=folder,
        **{"enable_checkpointing": False, **quiet, **settings},
    )


# Runs that resume.


def resume(rank: int, folder: str, form: str) -> tuple[list[float], list[list[float]], list[str]]:
    """Four epochs at once, and two and two, sharded alike and otherwise.

    With dropout, whose masks follow from the random state.
    """
    saves = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True)
    torch.manual_seed(rank)
    straight = Regression(dropout=0.5)
    fits = trainer(folder, strategy(form), max_epochs=4, callbacks=[saves], enable_checkpointing=True)
    fits.fit(straight, loader(5))
    kinds = sorted(f"{each.name}{'/' if each.is_dir() else ''}" for each in Path(folder).iterdir())
    resumed = []
    for config in (CONFIG, OTHER):
        torch.manual_seed(99)
        again = Regression(dropout=0.5)
        continues = trainer(folder, strategy(form, config), max_epochs=4)
        continues.fit(again, loader(5), ckpt_path=f"{folder}/epoch=1.ckpt")
        resumed.append(again.losses)
    return straight.losses, resumed, kinds


@pytest.mark.parametrize("form", FORMS)
def test_a_run_that_resumes_is_the_run_that_did_not_stop(tmp_path: Path, form: str) -> None:
    for straight, (alike, otherwise), kinds in on_ranks(resume, str(tmp_path), form):
        assert len(straight) == 20
        assert alike == straight[10:]
        assert otherwise == pytest.approx(straight[10:], rel=1e-10)
        end = "/" if form == "sharded" else ""
        names = ("epoch=0", "epoch=1", "epoch=2", "epoch=3", "last")
        assert kinds == sorted(f"{name}.ckpt{end}" for name in names)


def resume_two(rank: int, folder: str, form: str) -> tuple[list[float], list[float]]:
    straight, stopped, resumed = Adversaries(), Adversaries(), Adversaries()
    trainer(folder, strategy(form), max_epochs=2).fit(straight, loader(3))
    stops = trainer(folder, strategy(form), max_epochs=1)
    stops.fit(stopped, loader(3))
    stops.save_checkpoint(f"{folder}/two.ckpt")
    trainer(folder, strategy(form), max_epochs=2).fit(resumed, loader(3), ckpt_path=f"{folder}/two.ckpt")
    return straight.losses, stopped.losses + resumed.losses


@pytest.mark.parametrize("form", FORMS)
def test_several_optimizers_resume(tmp_path: Path, form: str) -> None:
    for straight, resumed in on_ranks(resume_two, str(tmp_path), form):
        assert len(straight) == 12
        assert resumed == straight


# Files and folders that others read.


class Flat(Regression):
    """One optimizer parameter a unit."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(polyshard.flat_parameters(self), lr=1e-2)


class Every(Regression):
    """One a parameter."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def save(rank: int, folder: str, form: str, flat: bool) -> dict[str, torch.Tensor]:
    module = Flat() if flat else Every()
    fits = trainer(folder, strategy(form), max_epochs=1)
    fits.fit(module, loader(5))
    fits.save_checkpoint(f"{folder}/saved.ckpt")
    fits.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    return whole(module)


def batches(steps: int) -> DataLoader[Any]:
    return DataLoader(Pairs(steps * 2 * BATCH), batch_size=2 * BATCH)


@pytest.mark.parametrize("flat", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_plain_lightning_goes_on_from_a_full_checkpoint(tmp_path: Path, flat: bool) -> None:
    ranks = on_ranks(save, str(tmp_path), "full", flat)
    loaded = Every.load_from_checkpoint(tmp_path / "weights.ckpt", map_location="cpu")
    assert loaded.hparams["lr"] == 1e-2
    assert list(torch.load(tmp_path / "saved.ckpt")["state_dict"]) == list(Every().state_dict())
    for name, each in loaded.state_dict().items():
        assert torch.equal(each, ranks[0][name].to(each.dtype))
    resumed = Every()
    plain_trainer(tmp_path, max_epochs=2).fit(resumed, batches(5), ckpt_path=tmp_path / "saved.ckpt")
    straight = Every()
    plain_trainer(tmp_path, max_epochs=2).fit(straight, batches(5))
    # On one device Lightning loads into fp32, and makes that fp64 afterwards.
    assert resumed.losses == pytest.approx(straight.losses[5:], rel=1e-6)


def continue_plain(rank: int, folder: str, flat: bool) -> list[float]:
    module = Flat() if flat else Every()
    trainer(folder, max_epochs=2).fit(module, loader(5), ckpt_path=f"{folder}/plain.ckpt")
    return module.losses


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_of_plain_lightning_is_gone_on_from(tmp_path: Path, flat: bool) -> None:
    plain = plain_trainer(tmp_path, max_epochs=1)
    plain.fit(Every(), batches(5))
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    straight = Every()
    plain_trainer(tmp_path, max_epochs=2).fit(straight, batches(5))
    one, other = on_ranks(continue_plain, str(tmp_path), flat)
    found = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    assert found == pytest.approx(straight.losses[5:], rel=1e-10)


def test_a_sharded_checkpoint_is_read_without_ranks(tmp_path: Path) -> None:
    ranks = on_ranks(save, str(tmp_path), "sharded", False)
    plain = built().double()
    found = checkpoint.read(tmp_path / "saved.ckpt")["model"]
    plain.load_state_dict({name.removeprefix("net."): each for name, each in found.items()})
    for name, each in plain.named_parameters():
        assert torch.equal(each, ranks[0][f"net.{name}"])


# Loops over checkpoints.


def best(rank: int, folder: str, form: str) -> dict[str, Any]:
    saves = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last="link", filename="{epoch}")
    fits = trainer(folder, strategy(form), max_epochs=4, callbacks=[saves], enable_checkpointing=True)
    module = Regression()
    held_out = DataLoader(Pairs(8), batch_size=2)
    fits.fit(module, loader(2), held_out)
    (tested,) = fits.test(module, held_out, ckpt_path="best", verbose=False)
    (last,) = fits.validate(Regression(), held_out, ckpt_path=f"{folder}/last.ckpt", verbose=False)
    return {
        "files": sorted(each.name for each in Path(folder).iterdir()),
        "best": float(saves.best_model_score),
        "tested": tested["test_loss"],
        "last": last["val_loss"],
        "current": float(fits.callback_metrics["val_loss"]),
    }


@pytest.mark.parametrize("form", FORMS)
def test_the_best_checkpoint_is_tested_and_worse_ones_are_removed(tmp_path: Path, form: str) -> None:
    for found in on_ranks(best, str(tmp_path), form):
        assert found["files"] == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
        assert found["tested"] == pytest.approx(found["best"], rel=1e-12)
        assert found["last"] == pytest.approx(found["best"], rel=1e-12)


def both_forms(rank: int, folder: str) -> list[bool]:
    """The same path, in turns."""
    module = Regression()
    seen = []
    for form in ("sharded", "full", "sharded"):
        fits = trainer(folder, strategy(form), max_epochs=1)
        fits.fit(module, loader(1))
        fits.save_checkpoint(f"{folder}/same.ckpt")
        seen.append(Path(folder, "same.ckpt").is_dir())
        trainer(folder, strategy(form), max_epochs=2).fit(Regression(), loader(1), ckpt_path=f"{folder}/same.ckpt")
    return seen


def test_a_checkpoint_takes_the_place_of_one_of_the_other_form(tmp_path: Path) -> None:
    assert on_ranks(both_forms, str(tmp_path)) == [[True, False, True]] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["same.ckpt"]


# Wrong use.


class Wider(lightning.LightningModule):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), Block(), nn.Linear(5, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Editing(Regression):
    """Changes what is saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["more"] = torch.zeros(1)


def wrong(rank: int, folder: str, form: str) -> list[tuple[type[BaseException], str]]:
    module = Regression()
    fits = trainer(folder, strategy(form), max_epochs=1)
    fits.fit(module, loader(2))
    fits.save_checkpoint(f"{folder}/right.ckpt")
    Path(folder, "taken.ckpt").mkdir(exist_ok=True)
    found = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises((ConfigError, UnsupportedError)) as caught:
            call(*args, **kwargs)
        found.append((type(caught.value), str(caught.value)))

    another = Wider()
    loads = trainer(folder, strategy(form), max_epochs=2)
    refused(loads.fit, another, loader(2), ckpt_path=f"{folder}/right.ckpt")
    refused(loads.fit, another, loader(2), ckpt_path=f"{folder}/absent.ckpt")
    refused(loads.fit, another, loader(2), ckpt_path=f"{folder}/taken.ckpt")
    trainer(folder, strategy(form), max_epochs=2).fit(another, loader(2))
    if form == "full":
        refused(fits.save_checkpoint, f"{folder}/taken.ckpt")
    else:
        refused(fits.save_checkpoint, f"{folder}/more.ckpt", storage_options={})
        edits = trainer(folder, strategy(form), max_epochs=1)
        edits.fit(Editing(), loader(1))
        refused(edits.save_checkpoint, f"{folder}/edited.ckpt")
    # What was refused left everything as it was.
    trainer(folder, strategy(form), max_epochs=2).fit(Regression(), loader(2), ckpt_path=f"{folder}/right.ckpt")
    return found


WRONG = {
    "full": ["is not of a Wider", "absent.ckpt is not there", "a directory that is no complete", "Choose another path"],
    "sharded": [
        "has no 'net.0.weight'",
        "is not there",
        "no complete",
        "storage_options",
        "on_save_checkpoint changed",
    ],
}


@pytest.mark.parametrize("form", WRONG)
def test_wrong_files_and_folders_are_refused_by_name(tmp_path: Path, form: str) -> None:
    for found in on_ranks(wrong, str(tmp_path), form):
        for (kind, text), words in zip(found, WRONG[form], strict=True):
            assert kind is ConfigError or form == "sharded"
            assert words in text
