"""What ranks run for tests of ``polyshard_transformers``: small models, their data, and two trainers over them.

Transformers is imported when something is called: that takes seconds, which ranks spend once.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torchrun
from parity import seed_all

STEPS = 6
VOCABULARY = 64


def launched(rank: int, world_size: int) -> AbstractContextManager[None]:
    """The variables of torchrun, or with one rank those of none."""
    return torchrun.launched(rank, world_size) if world_size > 1 else nullcontext()


def make_model(family: str, dropout: float = 0.0) -> Any:
    """A small model of ``family``, the same on every rank; ``dropout`` is GPT-2's."""
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
            # In fp64: a token goes to another expert where rounding decides, which processors do differently.
            config = hf.MixtralConfig(
                **grouped, num_local_experts=8, num_experts_per_tok=1, experts_implementation="eager"
            )
            return hf.MixtralForCausalLM(config).double()
        case "gpt2":
            sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
            dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
            return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **dropped))
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
    from polyshard_policies.module_class import NoSplitModules

    return ShardConfig(policy=NoSplitModules(PluginContext("transformers", torch.device("cpu"))), **settings)


def sharded_trainer(model: Any, folder: str, family: str, **settings: Any) -> Any:
    """``settings``: of the arguments, and what the trainer itself takes; ``samples``: how many it learns from."""
    from polyshard_transformers import PolyshardSeq2SeqTrainer, PolyshardTrainer

    own = ("shard", "save_frozen", "optimizers", "callbacks", "compute_metrics")
    count = settings.pop("samples", 96)
    extra = {"shard": shard_config(), **{key: settings.pop(key) for key in own if key in settings}}
    made = PolyshardSeq2SeqTrainer if family == "t5" else PolyshardTrainer
    return made(
        model=model,
        args=arguments(folder, ddp_backend="gloo", **settings),
        train_dataset=samples(family, count, equal=family == "t5"),
        # The loss of an evaluation is the mean of its batches'.
        eval_dataset=samples(family, 16, equal=True),
        **extra,
    )


def plain_trainer(model: Any, folder: str, family: str, **settings: Any) -> Any:
    """On one rank, with the batches of two."""
    from transformers import Seq2SeqTrainer, Trainer

    extra = {key: settings.pop(key) for key in ("optimizers", "callbacks") if key in settings}
    made = Seq2SeqTrainer if family == "t5" else Trainer
    return made(
        model=model,
        args=arguments(folder, **{"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, **settings}),
        train_dataset=samples(family, equal=family == "t5"),
        # The loss of an evaluation is the mean of its batches'.
        eval_dataset=samples(family, 16, equal=True),
        **extra,
    )


def counted_gathers() -> tuple[Any, list[str]]:
    """A listener, and the names of units as they are gathered."""
    import polyshard
    from polyshard.interfaces import Listener, Observer, UnitEvent, UnitOperation, UnitSpec

    gathers: list[str] = []

    def count(event: UnitEvent) -> None:
        if event.begins and event.operation is UnitOperation.GATHER:
            gathers.append(event.unit.name)

    class Gathers(Listener):
        api_version = 1

        @polyshard.hookimpl
        def make_observer(self, unit: UnitSpec) -> Observer:
            return count

    return Gathers(), gathers


def curve(trainer: Any) -> list[tuple[float, float, float]]:
    """Loss, norm of the gradient and learning rate of each step."""
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in entries]


def outcome(trainer: Any) -> dict[str, Any]:
    """What is compared of a run: its curve, its evaluation, its predictions, its whole parameters."""
    predicted = trainer.predict(samples("vit" if "pixel_values" in trainer.train_dataset[0] else "llama", 8))
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    metrics = trainer.evaluate()
    return {
        "curve": curve(trainer),
        "evaluated": metrics["eval_loss"],
        "metrics": sorted(metrics),
        "predicted": torch.as_tensor(logits),
        "parameters": parameters(trainer.model),
        "flos": trainer.state.total_flos,
    }


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """All of them by name, whole."""
    import polyshard
    from polyshard_trainers.models import is_sharded

    with polyshard.unsharded(model) if is_sharded(model) else nullcontext():
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def quiet() -> None:
    """Third parties' warnings of each other: of what peft still calls by its old name."""
    for text in ("`is_gradient_checkpointing` is deprecated", "`gradient_checkpointing.* is deprecated"):
        warnings.filterwarnings("ignore", message=text)
