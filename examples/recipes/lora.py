"""Fine-tunes a Llama-like model with LoRA adapters of PEFT, sharded over all ranks: ``lora.md``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from polyshard import ShardConfig
from polyshard_transformers import PolyshardTrainer


def build_model(settings: dict[str, Any]) -> torch.nn.Module:
    """The frozen base with adapters, the same on every rank."""
    torch.manual_seed(0)
    name = settings["model"]["pretrained"]
    if name:
        base = transformers.AutoModelForCausalLM.from_pretrained(name)
    else:
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **settings["model"]["toy"]))
    made: torch.nn.Module = peft.get_peft_model(base, peft.LoraConfig(**settings["lora"]))
    return made


def read_samples(settings: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Sequences of ``data.context`` tokens; bytes for the toy."""
    text = "".join(Path(file).read_text(encoding="utf-8") for file in settings["data"]["files"])
    name = settings["model"]["pretrained"]
    tokens = transformers.AutoTokenizer.from_pretrained(name)(text)["input_ids"] if name else list(text.encode())
    context = settings["data"]["context"]
    rows = torch.tensor(tokens[: len(tokens) // context * context]).view(-1, context)
    return [{"input_ids": row, "labels": row} for row in rows]


def train(settings: dict[str, Any]) -> PolyshardTrainer:
    """Train, and write the adapters to ``training.output_dir``, as PEFT reads them."""
    trainer = PolyshardTrainer(
        model=build_model(settings),
        args=transformers.TrainingArguments(use_cpu=not torch.cuda.is_available(), **settings["training"]),
        train_dataset=read_samples(settings),
        shard=ShardConfig.from_mapping(settings["shard"]),
        save_frozen=False,
    )
    trainer.train()
    trainer.save_model()
    return trainer


if __name__ == "__main__":
    train(tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).end()
