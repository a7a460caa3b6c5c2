"""torchao's tensor subclasses that gather themselves, in models, and what their sharded training is compared with."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import polyshard
import polyshard.checkpoint
import torch
from parity import local, seed_all, units_of
from polyshard.state import StateOptions, get_model_state_dict, set_model_state_dict
from torch import nn

WIDTH, ROWS, COLUMNS = 96, 768, 256
FULL = StateOptions(form="full")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Adapted(nn.Module):
    """A frozen base and a trained addition of low rank."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(base, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, COLUMNS) / 16), nn.Parameter(torch.zeros(ROWS, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + x @ self.down.T @ self.up.T


def float8_net(device: str) -> nn.Module:
    """Linear layers whose weights are gathered in float8, and train in float32."""
    with warnings.catch_warnings(action="ignore"):
        float8 = importlib.import_module("torchao.float8")
    seed_all(0)
    model = nn.Sequential(nn.Linear(COLUMNS, WIDTH), Block(), Block(), nn.Linear(WIDTH, 16)).to(device)
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device == "cpu")
    found: nn.Module = float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "up" in name or "down" in name
    )
    return found


def nf4_net(device: str) -> nn.Module:
    """Frozen bases of ``NF4Tensor``."""
    with warnings.catch_warnings(action="ignore"):
        nf4 = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    seed_all(0)
    # Quantised on the host: on a device it is moved there by the cut.
    first, last = (Adapted(nf4.to_nf4(torch.randn(ROWS, COLUMNS) / 16)) for _ in range(2))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(ROWS, COLUMNS), nn.Tanh(), last)


NETS = {"float8": (float8_net, Block), "nf4": (nf4_net, Adapted)}


def steps(model: nn.Module, ranks: list[int], device: torch.device) -> list[list[float]]:
    """Losses of five steps on the batches of ``ranks``."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    found = []
    for step in range(5):
        batches = [
            torch.randn(16, COLUMNS, generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks
        ]
        losses = [model(batch.to(device)).square().mean() for batch in batches]
        torch.stack(losses).mean().backward()
        found.append([loss.item() for loss in losses])
        optimizer.step()
        optimizer.zero_grad()
    return found


def trains_and_is_saved(
    rank: int, kind: str, number: int, device: torch.device, folder: str
) -> tuple[list[float], list[float], list[str]]:
    """Losses of the sharded model and of the unsharded one, and what its state dict is made of."""
    warnings.simplefilter("ignore")
    make, unit = NETS[kind]
    alone = make(device.type).to(device)
    wanted = [losses[rank] for losses in steps(alone, list(range(number)), device)]
    config = polyshard.ShardConfig(policy=units_of(unit), device=device)
    model = polyshard.shard(make(device.type), config)
    kinds = {type(local(each.detach())).__name__ for each in model.parameters()}
    assert kinds == {"Tensor", "WeightWithDynamicFloat8CastTensor" if kind == "float8" else "NF4Tensor"}
    found = [losses[0] for losses in steps(model, [rank], device)]
    names = list(get_model_state_dict(model))
    state = get_model_state_dict(model, FULL)
    # On the host, and in the unsharded model's classes: that one loads it, and computes the same.
    alone.load_state_dict(state)
    x = torch.ones(2, COLUMNS, device=device)
    with torch.no_grad(), polyshard.unsharded(model):
        whole = model(x)
    torch.testing.assert_close(alone(x), whole, rtol=0.0, atol=0.0)
    polyshard.checkpoint.save(Path(folder), 1, model)
    other = polyshard.shard(make(device.type), config)
    polyshard.checkpoint.load(Path(folder, "step-00000001"), other)
    loaded = get_model_state_dict(other, FULL)
    for name, value in state.items():
        inner = [""] if type(value) is torch.Tensor else value.__tensor_flatten__()[0]
        for each in inner:
            one, two = (getattr(tensor, each) if each else tensor for tensor in (value, loaded[name]))
            assert (one.device.type, two.device.type) == ("cpu", "cpu")
            assert torch.equal(one, two), (name, each)
    set_model_state_dict(other, state)
    for each in (model, other):
        polyshard.close(each)
    return found, wanted, names
