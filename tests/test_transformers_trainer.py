"""``PolyshardTrainer`` on two ranks beside Transformers' own ``Trainer`` on the whole batch, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import KeptRanks
from transformers_runs import (
    STEPS,
    curve,
    launched,
    make_model,
    outcome,
    parameters,
    plain_trainer,
    quiet,
    sharded_trainer,
)

#: Of losses and norms in fp32 over 20 steps.
CLOSE = {"rel": 2e-5, "abs": 2e-5}


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    kept = KeptRanks()
    yield kept
    kept.close()


# Training


def train_both(rank: int, folder: str, family: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sharded run; on rank 0, the plain one, too."""
    quiet()
    with launched(rank, 2):
        trainer = sharded_trainer(make_model(family), folder, family, **settings)
        trainer.train()
        ours = outcome(trainer)
    if rank:
        return ours, {}
    trainer = plain_trainer(make_model(family), f"{folder}-plain", family, **settings)
    trainer.train()
    return ours, outcome(trainer)


def require_alike(
    results: list[tuple[dict[str, Any], dict[str, Any]]], rel: float = CLOSE["rel"], abs: float = CLOSE["abs"]
) -> None:
    """Every rank came to what the plain run came to."""
    plain = results[0][1]
    assert len(plain["curve"]) == STEPS
    for ours, _ in results:
        for step, (mine, theirs) in enumerate(zip(ours["curve"], plain["curve"], strict=True)):
            assert mine == pytest.approx(theirs, rel=rel, abs=abs), f"step {step}: {mine}, {theirs}"
        assert ours["evaluated"] == pytest.approx(plain["evaluated"], rel=rel)
        assert ours["flos"] == plain["flos"]
        torch.testing.assert_close(ours["predicted"], plain["predicted"], rtol=10 * rel, atol=10 * abs)
        for name, whole in plain["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], whole, rtol=10 * rel, atol=10 * abs, msg=name)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("qwen", {"gradient_accumulation_steps": 2}),
        ("mixtral", {"activation_checkpointing": True}),
        ("gpt2", {}),
        # T5 computes a mean that Trainer takes for a share of all ranks' tokens.
        ("t5", {"average_tokens_across_devices": False}),
        ("vit", {"max_grad_norm": 0.0}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_trains_as_the_plain_trainer_does(
    ranks: KeptRanks, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    require_alike(ranks.run(2, train_both, str(tmp_path), family, settings))


# Checkpoints


def stop_and_resume(rank: int, folder: str) -> dict[str, Any]:
    """Eight steps with dropout, and the last four again from the checkpoint between; what both came to."""
    quiet()
    from transformers import GPT2LMHeadModel

    saving = {
        "max_steps": 8, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "save_total_limit": 3,
    }  # fmt: skip
    with launched(rank, 2):
        straight = sharded_trainer(make_model("gpt2", dropout=0.2), folder, "gpt2", **saving)
        straight.train()
        kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        stopped = f"{folder}/checkpoint-4"
        again = sharded_trainer(make_model("gpt2", dropout=0.2), f"{folder}-again", "gpt2", **saving)
        again.train(resume_from_checkpoint=stopped)
        read = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-8")
        best = sharded_trainer(
            make_model("gpt2"), f"{folder}-best", "gpt2", **saving,
            load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
        )  # fmt: skip
        best.train()
        best_path = best.state.best_model_checkpoint
        return {
            "kept": kept,
            "straight": curve(straight),
            "again": curve(again),
            "parameters": parameters(straight.model),
            "parameters again": parameters(again.model),
            "read": parameters(read),
            "best": Path(best_path).name,
            "parameters best": parameters(best.model),
            "read best": parameters(GPT2LMHeadModel.from_pretrained(best_path)),
            "state": sorted(path.name for path in Path(stopped).iterdir()),
        }


def test_a_resumed_run_is_the_one_that_never_stopped(ranks: KeptRanks, tmp_path: Path) -> None:
    for found in ranks.run(2, stop_and_resume, str(tmp_path / "run")):
        assert found["kept"] == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
        assert len(found["straight"]) == 8
        assert found["again"] == found["straight"]
        assert_equal(found["parameters again"], found["parameters"])
        # The folder is a pretrained model's as well.
        assert_equal(found["read"], found["parameters"])
        assert "model.safetensors" in found["state"]
        assert "optimizer.pt" not in found["state"]
        # Worse with each step: the best is not the last.
        assert found["best"] != "checkpoint-8"
        assert_equal(found["parameters best"], found["read best"])


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
