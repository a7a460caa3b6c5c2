"""Names in state dicts, checkpoints, streams and files are without what torch's wrappers add, as torch has them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface as huggingface
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import reseal
from parity import seeded
from polyshard import checkpoint
from polyshard import state as states
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.nn.parallel import DistributedDataParallel

FULL = states.StateOptions(form="full")
ADDED = {"one": "_checkpoint_wrapped_module.", "two": "_orig_mod._checkpoint_wrapped_module."}


class Part(nn.Sequential):
    """Parameters and buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Model(nn.Module):
    """Two parts, one that is ignored, a tied weight, and a module that is called as what DDP has."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.outside = Part(), Part(), nn.Linear(4, 4)
        self.module = nn.Linear(4, 4)
        self.module.weight = self.two[0].weight


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain(seed: int = 0) -> Model:
    made = seeded(Model, seed)
    assert isinstance(made, Model)
    return made


def wrapped(seed: int = 0) -> Model:
    model: Any = plain(seed)
    model.one = checkpoint_wrapper(model.one)
    model.two = torch.compile(checkpoint_wrapper(model.two), backend="eager")
    model.outside = DistributedDataParallel(model.outside)
    return model


def sharded(make: Callable[[int], Model], seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """After a step, so that there is state of the optimizer, and with buffers that are not those of the beginning."""
    model = make(seed)
    config = polyshard.ShardConfig(policy={"name": "module_class", "classes": [Part]}, strategy="no_shard")
    polyshard.shard(model, config, ignored_modules=[model.outside])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # Compiling a forward for that would take seconds.
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + seed)
    optimizer.step()
    optimizer.zero_grad()
    for buffer in model.buffers():
        buffer.fill_(7 + seed)
    return model, optimizer


def told(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    one, other = states.get_state_dict(model, optimizer, FULL)
    return copy.deepcopy({"model": one, "optimizer": other["state"]})


def require_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_state_dicts_have_torchs_names_buffers_and_inner_modules_too() -> None:
    model, optimizer = sharded(wrapped, 0)
    assert list(states.get_model_state_dict(model)) == list(plain().state_dict())
    assert set(states.get_model_state_dict(model)) == set(get_model_state_dict(model))
    assert list(states.get_model_state_dict(model, FULL)) == list(plain().state_dict())
    theirs = get_state_dict(model, optimizer)[1]
    ours = states.get_optimizer_state_dict(model, optimizer)
    assert ours["state"].keys() == theirs["state"].keys()
    assert ours["param_groups"][0]["params"] == theirs["param_groups"][0]["params"]
    for inner in (model.one, model.two):
        assert list(states.get_model_state_dict(inner)) == list(Part().state_dict())
    names = [name for names, _ in polyshard.stream(model) for name in names]
    assert {*names, "module.weight"} == set(plain().state_dict())
    plain().load_state_dict(states.get_model_state_dict(model, FULL))


def test_what_ddp_adds_is_known_where_it_is_still_there(tmp_path: Path) -> None:
    model, optimizer = sharded(wrapped, 0)
    directory = checkpoint.save(tmp_path, 1, model, optimizer)
    wanted = told(model, optimizer)
    reseal(directory, lambda manifest: rename(manifest, lambda name: name.replace("outside.", "outside.module.")))
    model, optimizer = sharded(wrapped, 1)
    checkpoint.load(directory, model, optimizer)
    require_equal(told(model, optimizer), wanted)


def as_formerly(name: str) -> str:
    """A name of the plain model in what knew of the wrappers but DDP."""
    first, _, rest = name.partition(".")
    return f"{first}.{ADDED.get(first, '')}{rest}"


def rename(manifest: dict[str, Any], change: Callable[[str], str]) -> None:
    manifest["model"] = {change(name): each for name, each in manifest["model"].items()}
    manifest["aliases"] = {change(name): change(first) for name, first in manifest["aliases"].items()}
    optimizer = manifest["optimizer"]
    optimizer["state"] = {change(name): each for name, each in optimizer["state"].items()}
    text = json.dumps(optimizer["groups"])
    for name in sorted(plain().state_dict(), key=len, reverse=True):
        text = text.replace(f'"{name}"', f'"{change(name)}"')
    optimizer["groups"] = json.loads(text)


#: Of a way to save: what loads it, now and once names are as they were when what wrappers add was left in.
Loads = Iterator[Callable[[nn.Module, torch.optim.Optimizer], object]]


def by_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Loads:
    directory = checkpoint.save(folder, 1, model, optimizer)
    for change in (str, as_formerly):
        reseal(directory, lambda manifest, change=change: rename(manifest, change))  # type: ignore[misc]
        plain().load_state_dict(checkpoint.read(directory)["model"])
        yield lambda other, its: checkpoint.load(directory, other, its)


def by_torch(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Loads:
    for flatten in (False, True):
        options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
        one, other = get_state_dict(model, optimizer, options=options)
        dcp.save({"model": one, "optimizer": other}, checkpoint_id=folder / str(flatten))
        yield lambda other, its, flatten=flatten: checkpoint.load_dcp(folder / str(flatten), other, its)  # type: ignore[misc]


def by_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Loads:
    wanted = told(model, optimizer)["model"]
    given = {as_formerly(name): value for name, value in wanted.items()}
    yield lambda other, its: states.set_model_state_dict(other, given)
    yield lambda other, its: polyshard.load_stream(other, given.items())


def by_hugging_face(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Loads:
    huggingface.save(model, folder)
    saved = load_file(folder / "model.safetensors")
    # A tied weight is there once.
    assert {*saved, "module.weight"} == set(plain().state_dict())
    for change in (str, as_formerly):
        save_file({change(name): value for name, value in saved.items()}, folder / "model.safetensors")
        yield lambda other, its: huggingface.load(other, folder)


@pytest.mark.parametrize("way", [by_checkpoint, by_torch, by_tensors, by_hugging_face])
@pytest.mark.parametrize(
    ("before", "now"), [(wrapped, plain), (plain, wrapped), (wrapped, wrapped)], ids=["off", "on", "kept"]
)
def test_what_is_saved_loads_with_and_without(
    before: Callable[[int], Model], now: Callable[[int], Model], way: Callable[..., Loads], tmp_path: Path
) -> None:
    model, optimizer = sharded(before, 0)
    wanted = told(model, optimizer)
    for load in way(model, optimizer, tmp_path):
        other, its = sharded(now, 1)
        load(other, its)
        found = told(other, its)
        require_equal(found["model"], wanted["model"])
        if way in (by_checkpoint, by_torch):
            require_equal(found["optimizer"], wanted["optimizer"])
