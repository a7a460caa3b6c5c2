"""Fine-tunes a Llama-like model with LoRA adapters of PEFT, sharded over all ranks: ``lora.md``, ``qlora.md``."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from polyshard import ShardConfig
from polyshard_transformers import PolyshardTrainer
from safetensors.torch import save_file


def build_model(settings: dict[str, Any]) -> torch.nn.Module:
    """The frozen base with adapters, the same on every rank."""
    torch.manual_seed(0)
    made: torch.nn.Module = peft.get_peft_model(load_base(settings), peft.LoraConfig(**settings["lora"]))
    return made


def load_base(settings: dict[str, Any]) -> Any:
    """Quantised while it is read, where the file has a table ``[quantisation]``; the toy has first values."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    options: dict[str, Any] = {}
    if "quantisation" in settings:
        options["quantization_config"] = transformers.BitsAndBytesConfig(**settings["quantisation"])
    if settings["model"]["pretrained"]:
        return load(settings["model"]["pretrained"], **options)
    toy = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **settings["model"]["toy"]))
    if not options:
        return toy
    with tempfile.TemporaryDirectory() as folder:
        # Each rank its own: among ranks that are joined, save_pretrained writes on the first alone.
        toy.config.save_pretrained(folder)
        save_file(toy.state_dict(), Path(folder, "model.safetensors"), metadata={"format": "pt"})
        return load(folder, **options)


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
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))).end()
