"""The Trainer's strategy on two processes, beside plain torch on one: steps, precision, both kinds of optimization."""

from __future__ import annotations

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import MixedPrecision
from lightning_ranks import (
    BATCH,
    CONFIG,
    STEPS,
    Adversaries,
    Net,
    Pairs,
    Regression,
    built,
    loader,
    mean_losses,
    on_ranks,
    reference,
    trainer,
)
from parity import local
from polyshard import ShardConfig
from polyshard_lightning import PolyshardStrategy
from torch import nn
from torch.utils.data import DataLoader

#: All of them import Lightning, for seconds.
pytestmark = pytest.mark.slow

Trained = tuple[list[float], dict[str, torch.Tensor]]


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(module):
        return {name: p.detach().clone() for name, p in module.net.named_parameters()}


def assert_equal(ranks: list[Trained], expected: Trained, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    losses, parameters = expected
    assert len(losses) == STEPS
    assert mean_losses([each for each, _ in ranks]) == pytest.approx(losses, rel=rtol)
    for _, found in ranks:
        torch.testing.assert_close(found, parameters, rtol=rtol, atol=atol, check_dtype=False)


def fit(
    rank: int, folder: str, dtype: torch.dtype, config: ShardConfig, settings: dict[str, Any], compiles: bool
) -> Trained:
    with warnings.catch_warnings():
        # Dynamo looks at them in what it traces.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        module = Regression()
        given = torch.compile(module, backend="eager") if compiles else module
        trainer(folder, PolyshardStrategy(config), max_epochs=1, **settings).fit(given, loader(STEPS, dtype))
    return module.losses, whole(module)


# Steps.


LOW = {"dtype": torch.float32, "autocast": torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "settings", "as_plain", "compiles"),
    [
        (CONFIG, {}, {}, False),
        (CONFIG, {}, {}, True),
        (ShardConfig(), {}, {}, False),
        (ShardConfig(strategy="no_shard"), {}, {}, False),
        (CONFIG, {"accumulate_grad_batches": 4}, {"accumulates": 4}, False),
        (CONFIG, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}, {"clip_norm": 0.1}, False),
        (CONFIG, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, {"clip_value": 0.1}, False),
        (CONFIG, {"precision": "bf16-mixed"}, LOW, False),
        (ShardConfig(), {"precision": "bf16-mixed"}, LOW, False),
    ],
)
def test_steps_equal_those_of_the_unsharded_model(
    tmp_path: Path, config: ShardConfig, settings: dict[str, Any], as_plain: dict[str, Any], compiles: bool
) -> None:
    dtype = as_plain.get("dtype", torch.float64)
    ranks = on_ranks(fit, str(tmp_path), dtype, config, settings, compiles)
    # What bf16 rounds.
    within = {"rtol": 3e-2, "atol": 1e-2} if as_plain is LOW else {}
    assert_equal(ranks, reference(STEPS, **as_plain), **within)
    assert {each.dtype for _, parameters in ranks for each in parameters.values()} == {dtype}


# Precision.


def true_half(rank: int, folder: str) -> list[str]:
    module = Regression()
    trainer(folder, max_epochs=1, precision="bf16-true").fit(module, loader(2))
    return sorted({str(parameter.dtype) for parameter in module.parameters()})


def test_true_half_precision_keeps_parameters_in_bf16(tmp_path: Path) -> None:
    assert on_ranks(true_half, str(tmp_path)) == [["torch.bfloat16"]] * 2


class Overflowing(Regression):
    """Has a loss without bounds on rank 1 at the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[torch.Tensor]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append([local(each).detach().clone() for each in self.parameters()])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        return loss * (torch.inf if self.global_rank == 1 and index == 1 else 1)


def overflow(rank: int, folder: str) -> tuple[list[bool], float]:
    module = Overflowing()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scaled = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(folder, max_epochs=1, precision=None, plugins=scaled).fit(module, loader(4, torch.float32))
    changed = [any(map(_differ, *pair)) for pair in itertools.pairwise(module.seen)]
    return changed, scaler.get_scale()


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.equal(one, other)


def test_ranks_scale_alike_and_skip_a_step_that_overflowed_on_one(tmp_path: Path) -> None:
    # The second batch changed nothing, on either rank.
    assert on_ranks(overflow, str(tmp_path)) == [([True, False, True], 4.0)] * 2


# Manual optimization.


def fit_adversaries(rank: int, folder: str, config: ShardConfig) -> list[float]:
    module = Adversaries()
    trainer(folder, PolyshardStrategy(config), max_epochs=1).fit(module, loader(STEPS))
    return module.losses


def adversaries() -> list[float]:
    generator, critic = built().double(), built().double()
    one, other = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (generator, critic))
    losses = []
    for x, y in DataLoader(Pairs(STEPS * BATCH * 2), batch_size=2 * BATCH):
        loss = nn.functional.mse_loss(generator(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(generator.parameters(), 0.1)
        one.step()
        one.zero_grad()
        second = nn.functional.mse_loss(critic(x), generator(x).detach())
        second.backward()
        other.step()
        other.zero_grad()
        losses += [loss.item(), second.item()]
    return losses


@pytest.mark.parametrize("config", [ShardConfig(), CONFIG])
def test_two_optimizers_in_turns_equal_the_unsharded_models(tmp_path: Path, config: ShardConfig) -> None:
    assert mean_losses(on_ranks(fit_adversaries, str(tmp_path), config)) == pytest.approx(adversaries(), rel=1e-10)


# Loops.


def loops(rank: int, folder: str) -> dict[str, Any]:
    module = Regression()
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    runs = trainer(folder, max_epochs=9, callbacks=[stopping])
    runs.fit(module, loader(3), DataLoader(Pairs(8), batch_size=2))
    epochs = runs.current_epoch
    # As Lightning does it on GPUs.
    with torch.inference_mode():
        (validated,) = runs.validate(module, DataLoader(Pairs(8), batch_size=2), verbose=False)
    (tested,) = runs.test(module, DataLoader(Pairs(8), batch_size=2), verbose=False)
    predicted = runs.predict(module, DataLoader(Pairs(8), batch_size=2))
    again = Regression()
    runs.fit_loop.max_epochs = 10
    runs.fit(module, loader(3), DataLoader(Pairs(8), batch_size=2))
    trainer(folder, max_epochs=1).fit(again, loader(3))
    return {
        "epochs": epochs,
        "validated": validated["val_loss"],
        "tested": tested["test_loss"],
        "predicted": [each.tolist() for each in predicted],
        "again": again.losses,
        "steps": len(module.losses),
    }


def test_a_trainer_is_used_again_and_ranks_know_the_same(tmp_path: Path) -> None:
    one, other = on_ranks(loops, str(tmp_path))
    for name in ("epochs", "validated", "tested"):
        assert one[name] == other[name]
    assert one["epochs"] == 2
    assert one["validated"] == pytest.approx(one["tested"], rel=1e-12)
    # Each rank predicted its half of eight, in batches of two.
    assert [len(each) for each in one["predicted"]] == [2, 2]
    assert one["predicted"] != other["predicted"]
    assert mean_losses([one["again"], other["again"]]) == pytest.approx(reference(3)[0], rel=1e-10)


class Failing(Regression):
    """Raises at one batch, once."""

    fails = True

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        if self.fails and index == 1:
            raise ZeroDivisionError("of the user's")
        return loss


def fail(rank: int, folder: str) -> tuple[list[float], list[float]]:
    module = Failing()
    with pytest.raises(ZeroDivisionError):
        trainer(folder, max_epochs=1).fit(module, loader(STEPS))
    other = Regression()
    trainer(folder, max_epochs=1).fit(other, loader(STEPS))
    module.fails = False
    module.losses.clear()
    trainer(folder, max_epochs=1).fit(module, loader(3))
    return other.losses, module.losses


def test_after_an_exception_other_trainers_work_and_the_module_does(tmp_path: Path) -> None:
    ranks = on_ranks(fail, str(tmp_path))
    assert mean_losses([others for others, _ in ranks]) == pytest.approx(reference(STEPS)[0], rel=1e-10)
    for _, own in ranks:
        assert len(own) == 3
        assert all(map(math.isfinite, own))


class Late(Regression):
    """Makes its layers on the meta device, in the hook for that."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = Net()


def initialised(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.25)
    if isinstance(module, Net):
        module.calls.zero_()


def late(rank: int, folder: str) -> tuple[bool, float, list[float]]:
    module = Late()
    strategy = PolyshardStrategy(CONFIG, initializer=initialised)
    trainer(folder, strategy, max_epochs=1).fit(module, loader(2))
    held = sum(local(parameter).numel() for parameter in module.parameters())
    return any(parameter.is_meta for parameter in module.parameters()), held, module.losses


def test_layers_on_the_meta_device_are_made_where_they_are_sharded(tmp_path: Path) -> None:
    model = Net().double()
    for inner in model.modules():
        initialised(inner)
    x, y = next(iter(DataLoader(Pairs(16), batch_size=8)))
    ranks = on_ranks(late, str(tmp_path))
    assert not any(meta for meta, _, _ in ranks)
    assert sum(held for _, held, _ in ranks) == sum(parameter.numel() for parameter in model.parameters())
    first = sum(losses[0] for _, _, losses in ranks) / 2
    assert first == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-12)
