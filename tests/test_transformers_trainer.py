"""``PolyshardTrainer`` on two ranks beside Transformers' own ``Trainer`` on the whole batch, in one process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import KeptRanks
from seeding import seed_all

# Transformers is imported by the ranks alone: that takes seconds.

STEPS = 20
VOCABULARY = 64
#: Of losses and norms in fp32 over 20 steps.
CLOSE = {"rel": 2e-5, "abs": 2e-5}


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    kept = KeptRanks()
    yield kept
    kept.close()


# What ranks run


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """The variables of torchrun, or with one rank those of none."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if world_size > 1:
        os.environ.update(zip(names, map(str, (rank, rank, world_size, world_size)), strict=True))
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def make_model(family: str) -> Any:
    """A small model of ``family``, the same on every rank."""
    import transformers as hf

    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    grouped = {**small, "intermediate_size": 48, "num_key_value_heads": 2}
    seed_all(3)
    match family:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped))
        case "qwen":
            return hf.Qwen2ForCausalLM(hf.Qwen2Config(**grouped))
        case "mixtral":
            return hf.MixtralForCausalLM(hf.MixtralConfig(**grouped, num_local_experts=8, num_experts_per_tok=1))
        case "gpt2":
            sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
            return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
        case "t5":
            sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
            return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0, decoder_start_token_id=0))
        case "vit":
            sizes = {key: value for key, value in small.items() if key != "vocab_size"}
            return hf.ViTForImageClassification(
                hf.ViTConfig(
                    **sizes, intermediate_size=48, image_size=16, patch_size=8, num_labels=5,
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                )
            )  # fmt: skip
    raise AssertionError(family)


def samples(family: str, count: int = 96, *, equal: bool = False) -> list[dict[str, Any]]:
    """What a model of ``family`` learns from. ``equal``: rows of equal length."""
    made = torch.Generator().manual_seed(5)
    if family == "vit":
        return [{"pixel_values": torch.randn(3, 16, 16, generator=made), "labels": n % 5} for n in range(count)]
    rows = torch.randint(2, VOCABULARY, (count, 12), generator=made)
    # Of different lengths: ranks do not have as many tokens.
    lengths = torch.randint(4, 12, (count,), generator=made)
    found = []
    for row, length in zip(rows, lengths.tolist(), strict=True):
        labels = row.clone()
        if not equal:
            labels[length:] = -100
        found.append({"input_ids": row, "labels": labels})
    return found


def arguments(folder: str, **settings: Any) -> Any:
    from transformers import Seq2SeqTrainingArguments

    given = {
        "output_dir": folder, "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4, "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "learning_rate": 5e-3, "weight_decay": 0.1, "warmup_steps": 3, "seed": 11,
        "log_level": "error", "dataloader_pin_memory": False,
    }  # fmt: skip
    return Seq2SeqTrainingArguments(**{**given, **settings})


def shard_config(**settings: Any) -> Any:
    from polyshard import ShardConfig
    from polyshard.interfaces import PluginContext
    from polyshard_policies.transformers import NoSplitModules

    return ShardConfig(policy=NoSplitModules(PluginContext("transformers", torch.device("cpu"))), **settings)


def sharded_trainer(model: Any, folder: str, family: str, *, shard: Any = None, **settings: Any) -> Any:
    from polyshard.transformers import PolyshardSeq2SeqTrainer, PolyshardTrainer

    extra = {key: settings.pop(key) for key in ("optimizers", "callbacks", "compute_metrics") if key in settings}
    made = PolyshardSeq2SeqTrainer if family == "t5" else PolyshardTrainer
    return made(
        model=model,
        args=arguments(folder, ddp_backend="gloo", **settings),
        train_dataset=samples(family, equal=family == "t5"),
        # The loss of an evaluation is the mean of its batches'.
        eval_dataset=samples(family, 16, equal=True),
        shard=shard or shard_config(),
        **extra,
    )


def plain_trainer(model: Any, folder: str, family: str, **settings: Any) -> Any:
    """On one rank, with the batches of two."""
    from transformers import Seq2SeqTrainer, Trainer

    made = Seq2SeqTrainer if family == "t5" else Trainer
    return made(
        model=model,
        args=arguments(folder, **{"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, **settings}),
        train_dataset=samples(family, equal=family == "t5"),
        # The loss of an evaluation is the mean of its batches'.
        eval_dataset=samples(family, 16, equal=True),
    )


def curve(trainer: Any) -> list[tuple[float, float, float]]:
    """Loss, norm of the gradient and learning rate of each step."""
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in entries]


def outcome(trainer: Any) -> dict[str, Any]:
    """What is compared of a run: its curve, its evaluation, its predictions, its whole parameters."""
    import polyshard
    from polyshard.transformers.refusals import is_sharded

    predicted = trainer.predict(samples("vit" if "pixel_values" in trainer.train_dataset[0] else "llama", 8))
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    model = trainer.model
    if is_sharded(model):
        with polyshard.unsharded(model):
            whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    else:
        whole = {name: each.detach().clone() for name, each in model.named_parameters()}
    return {
        "curve": curve(trainer),
        "evaluated": trainer.evaluate()["eval_loss"],
        "predicted": torch.as_tensor(logits),
        "parameters": whole,
        "flos": trainer.state.total_flos,
    }


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


def quiet() -> None:
    """Third parties' own warnings of a CPU, of processes that are not torchrun's, and of runs of a few steps."""
    for text in ("torch.distributed process group is initialized", ".*pin_memory.*"):
        warnings.filterwarnings("ignore", message=text)


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


# Training


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
