"""Trains on all processes but the last, which generates with weights that it is handed every few steps.

``torchrun --standalone --nproc-per-node 3 examples/rollout/train.py``: two trainers and a generator.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polyshard
import torch
import torch.distributed as dist
from channels import Broadcast, Channel, CudaHandles, SharedMemory
from model import Model, batch_of, loss_of, written
from polyshard.errors import ConfigError
from polyshard.state import StateOptions, get_model_state_dict

HERE = Path(__file__).parent
#: What is learnt.
TEXT = Path(__file__).read_bytes()
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Settings:
    """The tables ``[run]``, whose settings ``run.toml`` explains, and ``[shard]``."""

    way: str
    steps: int
    every: int
    batch: int
    context: int
    width: int
    layers: int
    lr: float
    seed: int
    dtype: str
    prompt: str
    sample: int
    verify: bool
    output: str
    shard: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.way not in ("memory", "broadcast") or self.dtype not in _DTYPES:
            raise ConfigError(f"way is {self.way!r} and dtype {self.dtype!r}: 'memory' or 'broadcast', fp32 or fp64.")


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The file ``path``, and ``overrides`` such as ``"steps=20"``."""
    tables = tomllib.loads(path.read_text())
    types = {field.name: field.type for field in dataclasses.fields(Settings)}
    for name, _, text in (override.partition("=") for override in overrides):
        if name not in types:
            raise ConfigError(f"--set {name}: there is no such setting. There are {', '.join(types)}.")
        tables["run"][name] = text if types[name] == "str" else tomllib.loads(f"value = {text}")["value"]
    return Settings(**tables["run"], shard=tables.get("shard", {}))


def built(settings: Settings) -> Model:
    """The same at every call."""
    torch.manual_seed(settings.seed)
    return Model(settings.width, settings.layers, settings.context).to(_DTYPES[settings.dtype])


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        found.update(name.encode() + tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(
    settings: Settings, trainers: dist.ProcessGroup, channel: Channel | None, device: torch.device
) -> list[dict[str, Any]]:
    """What came back of each hand-over, on rank 0. ``channel``: None on other ranks."""
    config = dataclasses.replace(polyshard.ShardConfig.from_mapping(settings.shard), collectives=trainers)
    model = polyshard.shard(built(settings).to(device), config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    rank, ranks = trainers.rank(), trainers.size()
    history: list[dict[str, Any]] = []
    for step in range(1, settings.steps + 1):
        rows = batch_of(TEXT, step, settings.batch, settings.context)[rank::ranks].to(device)
        loss = loss_of(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % settings.every:
            continue
        if channel is not None and history:
            # It generated while the trainers trained.
            finish(history[-1], channel)
        for names, tensors in polyshard.stream(model, ranks=[0]):
            if channel is not None:
                channel.send(names, tensors)
        sent = digest(get_model_state_dict(model, StateOptions(form="full_on_rank_0"))) if settings.verify else ""
        if channel is not None:
            channel.end()
            history.append({"step": step, "loss": loss.item(), "sent": sent})
    if channel is not None:
        if history:
            finish(history[-1], channel)
        channel.end(of_all=True)
    polyshard.close(model)
    return history


def finish(entry: dict[str, Any], channel: Channel) -> None:
    """Take what the generator made of a hand-over, and compare its weights where that is asked for."""
    entry |= channel.tell(None, channel.generator)
    print(f"step {entry['step']:4}  loss {entry['loss']:.4f}  {entry['text']!r}", flush=True)
    if entry["sent"] and entry["sent"] != entry["arrived"]:
        raise RuntimeError(f"The generator's weights are not those of step {entry['step']}.")


def generate(settings: Settings, channel: Channel, device: torch.device) -> None:
    """Be handed weights, write a text with them, and tell it, until the trainers stop."""
    model = built(settings).to(device).requires_grad_(False)
    weights = model.state_dict()
    while channel.receive(weights):
        text = written(model, settings.prompt.encode(), settings.sample)
        arrived = digest(weights) if settings.verify else ""
        channel.tell({"text": text, "arrived": arrived}, channel.generator)


def main(arguments: Sequence[str] | None = None) -> None:
    """One process of the job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "run.toml", help="a TOML file")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="NAME=VALUE")
    parsed = parser.parse_args(arguments)
    settings = load_settings(parsed.config, parsed.overrides)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generator, gpus = world_size - 1, torch.cuda.device_count()
    if world_size < 2 or settings.batch % generator:
        raise ConfigError(f"{generator} trainer(s) and a generator: start more, whose number divides {settings.batch}.")
    if gpus and gpus < (world_size if settings.way == "broadcast" else generator):
        raise ConfigError(f"{gpus} GPU(s): each trainer needs one, and with way='broadcast' so does the generator.")
    # Handles are opened on the device of rank 0, where nothing else is free.
    device = torch.device("cuda", rank if rank < gpus else 0) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    backend = "nccl" if gpus else "gloo"
    trainers = dist.new_group(list(range(generator)), backend=backend)
    words = dist.new_group([0, generator], backend="gloo")
    tensors = dist.new_group([0, generator], backend=backend)
    channel: Channel | None = None
    if rank in (0, generator):
        memory = CudaHandles if gpus else SharedMemory
        channel = memory(generator, words) if settings.way == "memory" else Broadcast(generator, words, tensors)
    if rank == generator:
        assert channel is not None
        generate(settings, channel, device)
    else:
        history = train(settings, trainers, channel, device)
        if rank == 0:
            output = Path(settings.output)
            output.mkdir(parents=True, exist_ok=True)
            (output / "history.json").write_text(json.dumps(history, indent=2) + "\n")
    # A model is full of cycles, and holds the group, whose threads would outlive the interpreter.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
