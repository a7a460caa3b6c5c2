"""``PolyshardTrainer`` on two ranks beside Transformers' own ``Trainer`` on the whole batch, in one process."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from blockwise_states import BlockwiseMomentum
from polyshard.errors import ConfigError
from processes import KeptRanks
from torch import nn
from transformers_runs import (
    STEPS,
    VOCABULARY,
    arguments,
    counted_gathers,
    curve,
    launched,
    make_model,
    outcome,
    parameters,
    plain_trainer,
    quiet,
    samples,
    shard_config,
    sharded_trainer,
)

#: Two ranks import Transformers.
pytestmark = pytest.mark.slow

#: Of losses and norms in fp32 over six steps.
CLOSE = {"rel": 2e-5, "abs": 2e-5}

RANKS = KeptRanks()


# Training


def train_both(rank: int, folder: str, family: str, settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A sharded run; on rank 0, the plain one, too."""
    quiet()
    own = settings.pop("own_optimizer", False)

    def given(model: Any) -> dict[str, Any]:
        if not own:
            return {"model": model, **settings}
        # It has stepped before the trainer shards the model.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for each in model.parameters():
            each.grad = torch.full_like(each, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return {"model": model, **settings, "optimizers": (optimizer, None)}

    with launched(rank, 2):
        trainer = sharded_trainer(**given(make_model(family)), folder=folder, family=family)
        trainer.train()
        ours = outcome(trainer)
        trainer.save_model(f"{folder}/exported")
    if rank:
        return ours, {}
    ours["read"] = parameters(type(trainer.model).from_pretrained(f"{folder}/exported"))
    trainer = plain_trainer(**given(make_model(family)), folder=f"{folder}-plain", family=family)
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
        assert ours["metrics"] == plain["metrics"]
        assert ours["flos"] == plain["flos"]
        torch.testing.assert_close(ours["predicted"], plain["predicted"], rtol=10 * rel, atol=10 * abs)
        assert_equal(ours.get("read", ours["parameters"]), ours["parameters"])
        for name, whole in plain["parameters"].items():
            torch.testing.assert_close(ours["parameters"][name], whole, rtol=10 * rel, atol=10 * abs, msg=name)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("llama", {}, marks=pytest.mark.nightly),
        ("qwen", {"gradient_accumulation_steps": 2}),
        pytest.param("mixtral", {"activation_checkpointing": True}, marks=pytest.mark.nightly),
        ("gpt2", {"own_optimizer": True}),
        # T5 computes a mean that Trainer takes for a share of all ranks' tokens.
        ("t5", {"average_tokens_across_devices": False, "predict_with_generate": True, "generation_max_length": 7}),
        pytest.param("vit", {"max_grad_norm": 0.0}, marks=pytest.mark.nightly),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given),
)
def test_trains_as_the_plain_trainer_does(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    require_alike(RANKS.run(2, train_both, str(tmp_path), family, settings))


# Checkpoints


def stop_and_resume(rank: int, folder: str) -> dict[str, Any]:
    """Six steps with dropout, and the last two again from the checkpoint between; what both came to."""
    quiet()
    from transformers import GPT2LMHeadModel

    saving = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "save_total_limit": 2,
    }  # fmt: skip
    with launched(rank, 2):
        straight = sharded_trainer(make_model("gpt2", dropout=0.2), folder, "gpt2", **saving)
        straight.train()
        kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
        stopped = f"{folder}/checkpoint-4"
        again = sharded_trainer(make_model("gpt2", dropout=0.2), f"{folder}-again", "gpt2", **saving)
        again.train(resume_from_checkpoint=stopped)
        read = GPT2LMHeadModel.from_pretrained(f"{folder}/checkpoint-6")
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


def test_a_resumed_run_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    for found in RANKS.run(2, stop_and_resume, str(tmp_path / "run")):
        assert found["kept"] == ["checkpoint-4", "checkpoint-6"]
        assert len(found["straight"]) == 6
        assert found["again"] == found["straight"]
        assert_equal(found["parameters again"], found["parameters"])
        # The folder is a pretrained model's as well.
        assert_equal(found["read"], found["parameters"])
        assert "model.safetensors" in found["state"]
        assert "optimizer.pt" not in found["state"]
        # Worse with each step: the best is not the last.
        assert found["best"] != "checkpoint-6"
        assert_equal(found["parameters best"], found["read best"])


#: Losses fall with each epoch: the best model is the first that is evaluated.
_FIRST_IS_BEST = {"metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}
_WITHOUT_EVALUATIONS = {"max_steps": 8}
_BY_EPOCH = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch"}
_BY_STEPS = {"max_steps": 10, "eval_strategy": "steps", "eval_steps": 4}


def preempt_and_resume(rank: int, folder: str, told: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Eight steps, or three epochs of six; and again, where rank 1 alone is signalled, and from there to the end."""
    quiet()
    from polyshard_transformers import PreemptionCallback
    from transformers import TrainerCallback

    class Signalled(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if (rank, state.global_step) == (1, told):
                os.kill(os.getpid(), signal.SIGTERM)

    class Follows(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.saved: list[int] = []

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.saved.append(state.global_step)

    def run(to: str, callbacks: list[Any], resumes: bool) -> dict[str, Any]:
        follows = Follows()
        trainer = sharded_trainer(
            make_model("gpt2", dropout=0.2), f"{folder}-{to}", "gpt2", samples=24, callbacks=[follows, *callbacks],
            **settings,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resumes)
        best = trainer.state.best_model_checkpoint
        return {
            "curve": curve(trainer),
            "evaluations": [
                (entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry
            ],
            "parameters": parameters(trainer.model),
            "best": best and Path(best).name,
            "saved": follows.saved,
        }

    class Fails(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ArithmeticError("a callback's own")

    before = signal.getsignal(signal.SIGTERM)
    with launched(rank, 2):
        preemption = PreemptionCallback()
        found = {
            "straight": run("straight", [], False),
            "stopped": run("stopped", [Signalled(), preemption], False),
            "preempted": (preemption.preempted, preemption.exit_code),
            "left": sorted(path.name for path in Path(f"{folder}-stopped").glob("checkpoint-*")),
            "again": run("stopped", [preemption], True),
            "preempted again": preemption.preempted,
        }
        with pytest.raises(ArithmeticError):
            run("fails", [preemption, Fails()], False)
    return {**found, "handler put back": signal.getsignal(signal.SIGTERM) == before}


@pytest.mark.parametrize(
    ("told", "settings", "ends", "evaluated"),
    [
        (3, _WITHOUT_EVALUATIONS, 4, []),
        # Inside of an epoch, behind which there would be an evaluation and a checkpoint.
        pytest.param(
            8,
            {**_BY_EPOCH, "save_strategy": "epoch", "load_best_model_at_end": True},
            9,
            [6],
            marks=pytest.mark.nightly,
        ),
        # Behind the last step of an epoch: the evaluation comes first.
        pytest.param(11, {**_BY_EPOCH, "save_strategy": "epoch"}, 12, [6, 12], marks=pytest.mark.nightly),
        # It alone would decide on the checkpoint.
        pytest.param(11, {**_BY_EPOCH, "save_strategy": "best"}, 13, [6, 12], marks=pytest.mark.nightly),
        (7, {**_BY_STEPS, "save_strategy": "best", "load_best_model_at_end": True}, 8, [4, 8]),
    ],
    ids=["steps", "epoch", "end of epoch", "best of epochs", "best"],
)
def test_a_signal_of_one_rank_ends_all_with_a_checkpoint_to_go_on_from_and_evaluates_what_was_due(
    tmp_path: Path, told: int, settings: dict[str, Any], ends: int, evaluated: list[int]
) -> None:
    settings = {**_FIRST_IS_BEST, **settings}
    for found in RANKS.run(2, preempt_and_resume, str(tmp_path / "run"), told, settings):
        straight, stopped, again = found["straight"], found["stopped"], found["again"]
        assert found["preempted"] == (True, 75)
        assert not found["preempted again"]
        assert found["handler put back"]
        assert stopped["saved"].count(ends) == 1
        assert stopped["saved"][-1] == ends
        # The best one is kept beside it, as ever.
        assert f"checkpoint-{ends}" in found["left"]
        assert [step for step, _ in stopped["evaluations"]] == evaluated
        assert stopped["best"] == straight["best"]
        for key in ("curve", "evaluations", "best"):
            assert again[key] == straight[key], key
        assert_equal(again["parameters"], straight["parameters"])


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


# The trainer's accelerator


def keep_by_accelerator(rank: int, folder: str) -> dict[str, Any]:
    """Five steps, of which ``trainer.accelerator`` saves the third; and what the plain one's saves."""
    quiet()
    from polyshard import checkpoint
    from safetensors.torch import load_file
    from transformers import TrainerCallback

    class Saves(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                made[-1].accelerator.save_state(state_of(made[-1]))

    def state_of(trainer: Any) -> str:
        return f"{trainer.args.output_dir}/state"

    made: list[Any] = []
    settings = {"max_steps": 5, "callbacks": [Saves()]}
    with launched(rank, 2):
        made.append(sharded_trainer(make_model("llama"), f"{folder}/ours", "llama", **settings))
        trainer, ours = made[-1], nn.BatchNorm1d(1)
        ours.running_mean.fill_(3.0)
        trainer.accelerator.register_for_checkpointing(ours)
        trainer.train()
        ours.reset_running_stats()
        trainer.accelerator.load_state(state_of(trainer))
        written = checkpoint.read(checkpoint.latest(Path(f"{state_of(trainer)}/polyshard_0")))
        trainer.accelerator.save_model(trainer.model, f"{folder}/weights")
        found = {
            "loaded": parameters(trainer.model),
            "user's": ours.running_mean.item(),
            "written": written["model"],
            "momenta": {name: each["exp_avg"] for name, each in written["optimizer"]["state"].items()},
            "asked for": trainer.accelerator.get_state_dict(trainer.model),
            "read": load_file(f"{folder}/weights/model.safetensors"),
        }
        # The optimizer's state came back, too.
        trainer.accelerator.save_state(f"{folder}/again")
        again = checkpoint.read(checkpoint.latest(Path(f"{folder}/again/polyshard_0")))
        found["came back"] = {name: each["exp_avg"] for name, each in again["optimizer"]["state"].items()}
        # Another one beside it, which the trainer does not close.
        critic, optimizer = trainer.accelerator.prepare(*made_critic())
        with trainer.accelerator.no_sync(critic):
            trainer.accelerator.backward(critic(torch.full((2, 4), rank + 1.0)).sum())
        trainer.accelerator.backward(critic(torch.full((2, 4), rank + 1.0)).sum())
        found["norm"] = float(trainer.accelerator.clip_grad_norm_(critic.parameters(), 1.0))
        optimizer.step()
        trainer.train()
        found["critic"] = parameters(critic)
    if not rank:
        made.append(plain_trainer(make_model("llama"), f"{folder}/plain", "llama", **settings))
        made[-1].train()
        plain = made[-1]
        names = {each: name for name, each in plain.model.named_parameters()}
        order = [names[each] for group in plain.optimizer.param_groups for each in group["params"]]
        state = torch.load(f"{state_of(plain)}/optimizer.bin", weights_only=True)["state"]
        found["plain"] = load_file(f"{state_of(plain)}/model.safetensors")
        found["plain momenta"] = {name: state[index]["exp_avg"] for index, name in enumerate(order)}
        critic, optimizer = made_critic()
        # The mean of what ranks have, twice.
        (2 * critic(torch.full((2, 4), 1.5)).sum()).backward()
        found["plain norm"] = float(nn.utils.clip_grad_norm_(critic.parameters(), 1.0))
        optimizer.step()
        found["plain critic"] = parameters(critic)
    return found


def made_critic() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(4)
    critic = nn.Linear(4, 2)
    return critic, torch.optim.SGD(critic.parameters(), lr=0.1)


def test_the_accelerator_of_a_trainer_saves_what_the_plain_ones_does(tmp_path: Path) -> None:
    results = RANKS.run(2, keep_by_accelerator, str(tmp_path))
    plain, momenta = results[0]["plain"], results[0]["plain momenta"]
    for rank, found in enumerate(results):
        for name, value in plain.items():
            torch.testing.assert_close(found["written"][name], value, rtol=2e-4, atol=2e-4, msg=name)
        for name, value in momenta.items():
            torch.testing.assert_close(found["momenta"][name], value, rtol=2e-4, atol=2e-6, msg=name)
        assert_equal(found["loaded"], found["written"])
        assert_equal(found["came back"], found["momenta"])
        assert_equal(found["read"], found["written"])
        assert found["user's"] == 3
        assert_equal(found["asked for"], found["written"] if rank == 0 else {})
        assert found["norm"] == pytest.approx(results[0]["plain norm"])
        torch.testing.assert_close(found["critic"], results[0]["plain critic"])


# Precision


def train_mixed(rank: int, folder: str, dtype: str) -> dict[str, Any]:
    quiet()
    settings = {dtype: True, "max_steps": 6}
    with launched(rank, 2):
        trainer = sharded_trainer(make_model("llama"), folder, "llama", **settings)
        trainer.train()
        found = {"ours": curve(trainer), "dtypes": {each.dtype for each in trainer.model.parameters()}}
        found["scaled"] = trainer.accelerator.scaler is not None
    if not rank:
        plain = plain_trainer(make_model("llama"), folder, "llama", max_steps=6)
        plain.train()
        found["plain"] = curve(plain)
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_trains_in_the_dtype_of_the_arguments(tmp_path: Path, dtype: str) -> None:
    results = RANKS.run(2, train_mixed, str(tmp_path), dtype)
    for found in results:
        assert found["dtypes"] == {torch.float32}
        assert found["scaled"] is (dtype == "fp16")
        for mine, plain in zip(found["ours"], results[0]["plain"], strict=True):
            assert mine == pytest.approx(plain, rel=0.02)
        assert [loss for loss, _, _ in found["ours"]] != [loss for loss, _, _ in results[0]["plain"]]


# Adapters


def train_adapters(rank: int, folder: str) -> dict[str, Any]:
    quiet()
    import peft
    import polyshard
    from polyshard import checkpoint
    from polyshard.checkpoint import latest
    from transformers import AutoModelForCausalLM

    base = f"{folder}/base"
    if rank == 0:
        make_model("llama").save_pretrained(base)
    torch.distributed.barrier()

    def adapted() -> Any:
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(1)
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)

    saving = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "activation_checkpointing": True}
    with launched(rank, 2):
        trainer = sharded_trainer(adapted(), f"{folder}/run", "llama", **saving, save_frozen=False)
        trainer.train()
        again = sharded_trainer(adapted(), f"{folder}/again", "llama", **saving, save_frozen=False)
        again.train(resume_from_checkpoint=f"{folder}/run/checkpoint-4")
        whole = sharded_trainer(adapted(), f"{folder}/again", "llama", **saving)
        with pytest.raises(ConfigError, match=r"has no .*base_layer.* need no gradient.*frozen=False"):
            whole.train(resume_from_checkpoint=f"{folder}/run/checkpoint-4")
        read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{folder}/run/checkpoint-8")
        found = {
            "ours": curve(trainer),
            "again": curve(again),
            "parameters": parameters(trainer.model),
            "read": parameters(read),
            "units": polyshard.report(trainer.model).units,
            "written": sorted(checkpoint.read(latest(Path(f"{folder}/run/checkpoint-8/polyshard")))["model"]),
            "files": sorted(path.name for path in Path(f"{folder}/run/checkpoint-8").iterdir()),
        }
    if not rank:
        plain = plain_trainer(adapted(), f"{folder}/plain", "llama", max_steps=8)
        plain.train()
        found["plain"] = curve(plain)
    return found


def test_adapters_train_and_come_back_bit_equal(tmp_path: Path) -> None:
    results = RANKS.run(2, train_adapters, str(tmp_path))
    for found in results:
        for mine, plain in zip(found["ours"], results[0]["plain"], strict=True):
            assert mine == pytest.approx(plain, **CLOSE)
        assert found["again"] == found["ours"]
        assert_equal(found["read"], found["parameters"])
        assert "adapter_model.safetensors" in found["files"]
        assert len(found["written"]) == 12
        assert all("lora_" in name for name in found["written"])
        assert "model.safetensors" not in found["files"]
        # Of each block one that is frozen and one that is trained, and the frozen root.
        assert found["units"] == 7


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "trained whole": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("LoraConfig", {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
}


def save_adapters(rank: int, folder: str, kind: str) -> dict[str, Any]:
    quiet()
    import peft
    from safetensors.torch import load_file

    config, settings = ADAPTERS[kind]
    saving = {"max_steps": 3, "warmup_steps": 0, "save_strategy": "steps", "save_steps": 3, "dataloader_num_workers": 0}

    def adapted() -> Any:
        model = make_model("llama")
        return peft.get_peft_model(model, getattr(peft, config)(task_type="CAUSAL_LM", **settings))

    def written(where: str) -> dict[str, torch.Tensor]:
        return load_file(f"{folder}/{where}/checkpoint-3/adapter_model.safetensors")

    with launched(rank, 2):
        trainer = sharded_trainer(adapted(), f"{folder}/ours", "llama", **saving)
        trainer.train()
        found = {"ours": curve(trainer), "written": written("ours")}
    if not rank:
        plain = plain_trainer(adapted(), f"{folder}/plain", "llama", **saving)
        plain.train()
        found |= {"plain": curve(plain), "expected": written("plain")}
    return found


@pytest.mark.parametrize("kind", ["tokens", "prompt", pytest.param("trained whole", marks=pytest.mark.nightly)])
def test_adapters_of_every_kind_are_written_as_the_plain_trainer_does(tmp_path: Path, kind: str) -> None:
    results = RANKS.run(2, save_adapters, str(tmp_path), kind)
    plain, expected = results[0]["plain"], results[0]["expected"]
    for found in results:
        for mine, theirs in zip(found["ours"], plain, strict=True):
            assert mine == pytest.approx(theirs, **CLOSE)
        torch.testing.assert_close(found["written"], expected, rtol=1e-3, atol=1e-4)


def fail_to_write(rank: int, folder: str) -> str:
    quiet()
    import peft

    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    saving = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    with launched(rank, 2):
        trainer = sharded_trainer(peft.get_peft_model(make_model("llama"), settings), folder, "llama", **saving)
        if not rank:
            # As a full disk: one rank alone writes what PEFT reads.
            Path(f"{folder}/checkpoint-1/adapter_model.safetensors").mkdir(parents=True)
        with pytest.raises(Exception, match=r"adapter_model|Is a directory") as caught:
            trainer.train()
        return str(caught.value)


def test_a_rank_that_cannot_write_adapters_ends_all(tmp_path: Path) -> None:
    _, told = RANKS.run(2, fail_to_write, str(tmp_path))
    assert re.match(r"Writing PeftModelForCausalLM to .*checkpoint-1 failed on other ranks.*rank 1", told)


def load_adapters(rank: int, folder: str) -> float:
    """By how much outputs differ from those of a plain model with the same adapters."""
    quiet()
    import peft
    import polyshard

    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model, plain = (peft.get_peft_model(make_model("llama"), settings) for _ in range(2))
    made = torch.Generator().manual_seed(5)
    whole = peft.get_peft_model_state_dict(plain)
    weights = {name: torch.randn(value.shape, generator=made) for name, value in whole.items()}
    peft.set_peft_model_state_dict(plain, weights)
    polyshard.shard(model, shard_config())
    peft.set_peft_model_state_dict(model, weights)
    tokens = torch.arange(8).view(1, 8)
    return (model(tokens).logits - plain(tokens).logits).abs().max().item()


def test_adapters_are_loaded_into_a_sharded_model_as_into_a_plain_one(tmp_path: Path) -> None:
    assert RANKS.run(2, load_adapters, str(tmp_path)) == [0.0, 0.0]


# Trainers and models with ways of their own


class SavesItself(nn.Module):
    """As models of Sentence Transformers: it writes itself, and describes itself by a forward, for which it moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("scale", torch.tensor(0.5))
        self.moves = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.words(input_ids)) * self.scale)
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found

    def save_pretrained(self, path: str) -> None:
        torch.save(self.state_dict(), f"{path}/own.pt")
        if self.moves:
            self.double()
        with torch.no_grad():
            example = self(torch.arange(3)[None])["logits"]
        torch.save(example, f"{path}/example.pt")


class SavesByTheModel:
    """Before a ``Trainer``, as Sentence Transformers': it lets the model write itself, and evaluates by rank 0."""

    #: Forwards for which rank 0 has batches.
    evaluator = 3

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = output_dir or self.args.output_dir  # type: ignore[attr-defined]
        os.makedirs(folder, exist_ok=True)
        self.model.save_pretrained(folder)  # type: ignore[attr-defined]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            for _ in range(self.evaluator if self.is_world_process_zero() else 0):  # type: ignore[attr-defined]
                logits = self.model(torch.arange(5)[None])["logits"]  # type: ignore[attr-defined]
                output.metrics["eval_own"] = float(logits.square().mean())
        return output


def train_what_saves_itself(rank: int, folder: str) -> dict[str, Any]:
    quiet()
    import transformers
    from polyshard import ShardConfig
    from polyshard_transformers import PolyshardMixin

    behind = type("Behind", (SavesByTheModel, transformers.Trainer), {})
    saving = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    given: dict[str, Any] = {
        "train_dataset": samples("llama", equal=True),
        "eval_dataset": samples("llama", 8, equal=True),
    }

    def made(name: str) -> Any:
        args = arguments(f"{folder}/{name}", ddp_backend="gloo", **saving)
        sharded = type("Sharded", (PolyshardMixin, behind), {})
        return sharded(model=SavesItself(), args=args, shard=ShardConfig(), **given)

    def own(trainer: Any) -> list[float]:
        return [entry["eval_own"] for entry in trainer.state.log_history if "eval_own" in entry]

    def files(name: str) -> dict[str, Any]:
        where = Path(f"{folder}/{name}/checkpoint-2")
        return {each: torch.load(where / each) for each in ("own.pt", "example.pt")}

    with launched(rank, 2):
        trainer, again = made("ours"), made("again")
        trainer.train()
        again.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-2")
        found = {
            "curve": curve(trainer),
            "again": curve(again),
            "files": files("ours"),
            "own": own(trainer),
            "names": {path.name for path in Path(f"{folder}/ours/checkpoint-2").iterdir()},
            "scale": trainer.model.scale.dtype,
        }
    if not rank:
        model = SavesItself()
        # For good: the plain trainer has but this one.
        model.moves = False
        plain = behind(
            model=model, args=arguments(f"{folder}/plain", **{**saving, "per_device_train_batch_size": 4}), **given
        )
        plain.train()
        found["plain"] = curve(plain)
        found["plain files"] = files("plain")
        found["plain own"] = own(plain)
        found["plain names"] = {path.name for path in Path(f"{folder}/plain/checkpoint-2").iterdir()}
    return found


def test_a_trainer_that_saves_and_evaluates_in_its_own_way_is_given_a_whole_model(tmp_path: Path) -> None:
    results = RANKS.run(2, train_what_saves_itself, str(tmp_path))
    first = results[0]
    for found in results:
        assert len(found["curve"]) == 4
        for mine, plain in zip(found["curve"], first["plain"], strict=True):
            assert mine == pytest.approx(plain, **CLOSE)
        assert found["again"] == found["curve"]
        assert_equal(found["files"]["own.pt"], first["files"]["own.pt"])
        assert found["scale"] is torch.float32
    for name, value in first["plain files"]["own.pt"].items():
        torch.testing.assert_close(first["files"]["own.pt"][name], value, rtol=2e-4, atol=2e-5, msg=name)
    torch.testing.assert_close(
        first["files"]["example.pt"].float(), first["plain files"]["example.pt"], rtol=2e-4, atol=2e-4
    )
    assert len(first["own"]) == 2
    assert first["own"] == pytest.approx(first["plain own"], rel=1e-4)
    without = {"optimizer.pt", "rng_state.pth"}
    assert first["names"] == first["plain names"] - without | {"polyshard", "rng_state_0.pth", "rng_state_1.pth"}


# Generation


def generate(rank: int, family: str) -> dict[str, Any]:
    quiet()
    import polyshard
    from polyshard_transformers import register_generate

    plain = make_model(family).eval()
    prompt = torch.arange(3, 3 + 4 * (rank + 1)).view(2, -1) if family != "vit" else None
    settings = {"max_new_tokens": 4 + 5 * rank, "do_sample": False, "min_new_tokens": 4 + 5 * rank}
    wanted = plain.generate(prompt, **settings)
    listener, gathers = counted_gathers()
    model = polyshard.shard(make_model(family).eval(), shard_config(listeners=[listener]))
    register_generate(model)
    got = model.generate(prompt, **settings)
    counted = len(gathers)
    # A step afterwards releases and gathers as ever.
    model(input_ids=prompt, labels=prompt).loss.backward()
    return {"got": got, "wanted": wanted, "gathers": counted, "units": polyshard.report(model).units}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generate_gathers_each_unit_once_whatever_the_lengths(family: str) -> None:
    for found in RANKS.run(2, generate, family):
        assert torch.equal(found["got"], found["wanted"])
        assert found["gathers"] == found["units"]


# Models without values


def begin_from_meta(rank: int, folder: str) -> dict[str, Any]:
    """T5, which chooses first values of a layer by the module around it, on meta; and rank 0's values for all."""
    quiet()
    plain = make_model("t5")

    def without_values() -> Any:
        with torch.device("meta"):
            return type(plain)(plain.config)

    with launched(rank, 2):
        made = sharded_trainer(without_values(), folder, "t5")
        torch.manual_seed(rank)
        made.evaluate()
        one_has_them = make_model("t5") if rank == 0 else without_values()
        sent = sharded_trainer(one_has_them, folder, "t5", shard=shard_config(sync_module_states=True))
        sent.evaluate()
        return {"plain": parameters(plain), "made": parameters(made.model), "sent": parameters(sent.model)}


def test_models_on_meta_begin_as_their_class_says(tmp_path: Path) -> None:
    first, second = RANKS.run(2, begin_from_meta, str(tmp_path))
    assert_equal(first["made"], second["made"])
    for name, value in first["plain"].items():
        assert first["made"][name].std().item() == pytest.approx(value.std().item(), rel=0.2, abs=1e-6), name
        assert torch.equal(second["sent"][name], value), name


# Wrong uses


def misuse(rank: int, folder: str) -> dict[str, str]:
    """What each wrong use is told, by name; at the end a model that was refused trains."""
    quiet()
    import polyshard
    import polyshard_fsdp2
    import transformers
    from accelerate.parallelism_config import ParallelismConfig
    from polyshard_transformers import PolyshardMixin, PreemptionCallback
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    told: dict[str, str] = {}

    def told_by(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except polyshard.errors.PolyshardError as error:
            told[name] = f"{type(error).__name__}: {error}"
        else:
            told[name] = "nothing"

    def train(model: Any, **settings: Any) -> Any:
        resume = settings.pop("resume", None)
        settings.setdefault("shard", shard_config())
        trainer = sharded_trainer(model, f"{folder}/run", "llama", **{"max_steps": 2, **settings})
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    def extended_trainer(model: Any) -> Any:
        """One whose optimizer has weights beside the model's, as of a loss."""
        trainer = sharded_trainer(model, f"{folder}/run", "llama", max_steps=2)
        optimizer = trainer.create_optimizer()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4))]})
        return trainer

    def train_blockwise(strategy: str, **settings: Any) -> None:
        model = make_model("llama")
        optimizer = BlockwiseMomentum(model.parameters())
        try:
            train(model, optimizers=(optimizer, None), save_strategy=strategy, **settings)
        except polyshard.errors.PolyshardError:
            # Before a step, with nothing changed.
            assert not optimizer.state
            raise
        assert optimizer.state

    with launched(rank, 2):
        other = [nn.Parameter(torch.ones(3, 4))]
        stolen = torch.optim.AdamW([*make_model("llama").parameters(), *other])
        told_by("optimizer", lambda: train(make_model("llama"), optimizers=(stolen, None)))
        told_by("fsdp2", lambda: train(fully_shard(make_model("llama"))))
        told_by("drop-in", lambda: train(polyshard_fsdp2.fully_shard(make_model("llama")), shard=None))
        told_by("device", lambda: train(make_model("llama"), shard=shard_config(device="meta")))
        told_by("ddp", lambda: train(nn.parallel.DistributedDataParallel(make_model("llama"))))
        told_by("arguments", lambda: train(make_model("llama"), fsdp=True))
        told_by("parallelism", lambda: train(make_model("llama"), parallelism_config=ParallelismConfig(tp_size=2)))
        divided = make_model("llama")
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(divided.model.layers[0].mlp, mesh, {"up_proj": ColwiseParallel()})
        told_by("tensor parallel", lambda: train(divided))
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        told_by("environment", lambda: train(make_model("llama")))
        del os.environ["ACCELERATE_USE_FSDP"]
        told_by("precision", lambda: train(make_model("llama"), bf16=True, shard=shard_config(precision="fp32")))
        told_by("no precision", lambda: train(make_model("llama"), shard=shard_config(precision="fp16")))
        told_by("sharded", lambda: train(polyshard.shard(make_model("llama"), shard_config())))
        bf16 = shard_config(precision="bf16")
        told_by("sharded bf16", lambda: train(polyshard.shard(make_model("llama"), bf16), shard=None))
        told_by("optim", lambda: train(make_model("llama"), optim="adafactor"))
        told_by("weights beside", lambda: extended_trainer(make_model("llama")).train())
        told_by("unsaveable", lambda: train_blockwise("steps"))
        told_by("not saved", lambda: train_blockwise("no"))
        told_by("saved without", lambda: train_blockwise("steps", save_only_model=True))
        told_by("unsaveable at an end", lambda: train_blockwise("no", callbacks=[PreemptionCallback()]))
        odd = make_model("llama")
        odd.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
        told_by("unwritable", lambda: train(odd, save_strategy="steps"))
        told_by("trainer", lambda: type("Odd", (PolyshardMixin,), {})(model=make_model("llama")))
        transformers.__version__, present = "5.22.2", transformers.__version__
        told_by("version", lambda: train(make_model("llama")))
        transformers.__version__ = present
        told_by("own signals", lambda: train(make_model("llama"), enable_jit_checkpoint=True))
        told_by("compile", lambda: train(make_model("llama"), torch_compile=True))
        dropping = make_model("llama")
        dropping.config.layerdrop = 0.1
        told_by("layerdrop", lambda: train(dropping))
        group = torch.distributed.new_group([rank], use_local_synchronization=True)
        told_by("group", lambda: train(make_model("llama"), shard=shard_config(collectives=group)))
        train(make_model("qwen"), save_strategy="steps", save_steps=2)
        model = make_model("llama")
        told_by("another model", lambda: train(model, resume=f"{folder}/run/checkpoint-2"))
        told_by("no state", lambda: train(make_model("llama"), resume=f"{folder}/plain/checkpoint-2"))
        train(make_model("qwen")).accelerator.save_state(f"{folder}/state")
        early = sharded_trainer(model, f"{folder}/run", "llama", shard=None)
        told_by("nothing prepared", lambda: early.accelerator.load_state(f"{folder}/state"))
        # Sharded by then, and as it was.
        told["afterwards"] = str(len(curve(train(model, shard=None))))
    return told


REFUSED = {
    "optimizer": r"ConfigError: Parameter 0 of group 0 of AdamW, .* not among the parameters of LlamaForCausalLM",
    "drop-in": "AlreadyShardedError: .* is wrapped already, by polyshard's drop-in polyshard_fsdp2",
    "device": r"ConfigError: ShardConfig\(device='meta'\) is not the device that Trainer chose, 'cpu'",
    "fsdp2": r"AlreadyShardedError: '\(root\)' of FSDPLlamaForCausalLM is wrapped already, by torch's fully_shard",
    "ddp": r"AlreadyShardedError: '\(root\)' .* is wrapped already, by DistributedDataParallel",
    "arguments": "ConfigError: TrainingArguments.fsdp is set, and PolyshardTrainer shards the model itself",
    "parallelism": "ConfigError: TrainingArguments.parallelism_config is set, and PolyshardTrainer shards the model",
    "tensor parallel": r"AlreadyShardedError: 'model.layers.0.mlp.up_proj.weight' .* is a DTensor .* and tp_plan=",
    "environment": r"ConfigError: The environment asks Accelerate for FSDP \(ACCELERATE_USE_FSDP=true\)",
    "precision": "ConfigError: The ShardConfig's precision='fp32' computes in fp32, but .* have bf16=True",
    "no precision": "ConfigError: The ShardConfig's precision='fp16' computes in fp16, but .* neither bf16 nor fp16",
    "sharded": "AlreadyShardedError: This LlamaForCausalLM is sharded already, and shard= was given",
    "sharded bf16": "ConfigError: This LlamaForCausalLM was sharded to compute in bf16, but .* mixed precision 'no'",
    "trainer": "UnsupportedError: Odd has no _build_accelerator_args, .* of its own to override",
    "version": "UnsupportedError: transformers 5.22.2 saves a model on one rank alone, .* needs 5.23 or newer",
    "weights beside": r"ConfigError: Parameter 0 of group 2 of AdamW, \(3, 4\) on cpu, is not among",
    "optim": "UnsupportedError: TrainingArguments.optim='adafactor' computes with whole parameters",
    "unsaveable": r"ConfigError: Checkpoints of this run would fail\. The optimizer's state 'scales' of .* has "
    r"shape .*save_only_model=True\), none with save_strategy='no'",
    "not saved": "nothing",
    "saved without": "nothing",
    "unsaveable at an end": "ConfigError: Checkpoints of this run would fail. The optimizer's state 'scales'",
    "unwritable": r"UnsupportedError: Checkpoints of this run would fail\. Safetensors files cannot hold .*'phases'",
    "own signals": "ConfigError: .*enable_jit_checkpoint saves on each rank behind its own signal",
    "compile": "ConfigError: TrainingArguments.torch_compile is set",
    "layerdrop": r"UnsupportedError: LlamaConfig\.layerdrop=0\.1 lets each rank drop other layers",
    "group": "ConfigError: The ShardConfig's collectives is of 1 ranks, but Trainer divides its data between 2",
    "another model": r"ConfigError: The checkpoint .*polyshard/step-00000002 has .*bias.*, which the model lacks",
    "nothing prepared": r"ConfigError: .*/state holds 1 sharded models \(Qwen2ForCausalLM\), but none is prepared",
    "no state": "ConfigError: .*plain/checkpoint-2 has no state of PolyshardTrainer to resume from",
    "afterwards": "2",
}


def test_wrong_uses_are_refused_by_name(tmp_path: Path) -> None:
    for told in RANKS.run(2, misuse, str(tmp_path)):
        assert told.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert re.match(words, told[name]), f"{name}: {told[name]}"
