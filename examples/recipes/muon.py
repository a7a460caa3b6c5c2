"""Trains a small Llama by Muon, with AdamW for what is no hidden matrix, sharded over all ranks: ``muon.md``."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import polyshard
import polyshard.checkpoint
import torch
import torch.distributed as dist
import transformers
from polyshard.optim import Muon, for_matrices


def build_model(settings: dict[str, Any]) -> transformers.LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **settings["model"]))


def read_batches(settings: dict[str, Any]) -> torch.Tensor:
    """Of all ranks: int64 ``[steps, batch, context]``, the files' bytes, as often as needed."""
    data, training = settings["data"], settings["training"]
    text = b"".join(Path(file).read_bytes() for file in data["files"])
    shape = training["steps"], training["batch"], data["context"]
    needed = shape[0] * shape[1] * shape[2]
    return torch.tensor(list((text * (needed // len(text) + 1))[:needed])).view(shape)


def train(settings: dict[str, Any]) -> list[float]:
    """Train, and save a checkpoint; returns the loss of each step, the mean over ranks."""
    config = polyshard.ShardConfig.from_mapping(settings["shard"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = polyshard.shard(build_model(settings).to(device), config)
    split = for_matrices(model, leave_out=[model.lm_head])
    optimizers = [Muon(split.matrices, **settings["muon"]), torch.optim.AdamW(split.others, **settings["adamw"])]
    losses = []
    for step, batch in enumerate(read_batches(settings)):
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        polyshard.clip_grad_norm_(model, settings["training"]["clip"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {losses[-1]:.3f}", flush=True)
    polyshard.checkpoint.save(Path(settings["training"]["folder"]), len(losses), model, optimizers)
    polyshard.close(model)
    return losses


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    train(tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    dist.destroy_process_group()
