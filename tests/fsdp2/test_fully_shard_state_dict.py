"""State dicts of ``fully_shard``: those of torch's, which each reads from the other, in memory and from disk."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp2_models import (
    PACKAGES,
    Mlps,
    Words,
    alike,
    as_whole,
    batches,
    beside_torch,
    copied,
    cpu_mesh,
    inputs,
    loss_of,
    make,
    parallel,
    same,
    seen,
    shard_all,
    square_of,
    train,
    wholes,
)
from processes import KeptRanks
from torch import multiprocessing, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

WHOLE = StateDictOptions(full_state_dict=True)
#: Ranks, and a mesh of them as ``parallel`` takes it.
MESHES = {"shard": (2, (2,)), "replicate": (4, (2, 2)), "tensor": (4, (0, 2, 2)), "replicate, tensor": (4, (1, 2, 2))}
SOME = [
    "shard",
    *(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in ("replicate", "tensor")),
    "replicate, tensor",
]


def hidden_of(mesh: tuple[int, ...]) -> int:
    """Rows that ranks divide unevenly, but for tensor parallelism."""
    return 16 if len(mesh) > 2 else 15


def _trained(
    package: ModuleType, seed: int, mesh: tuple[int, ...], steps: int = 2
) -> tuple[Any, torch.optim.Optimizer]:
    model = parallel(package, *mesh, seed=seed, hidden=hidden_of(mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _goes_on(model, optimizer, steps)
    return model, optimizer


def _goes_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    told = []
    for x in inputs(model, steps):
        loss = square_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def _saved(package: ModuleType, mesh: tuple[int, ...]) -> Any:
    model, optimizer = _trained(package, 0, mesh)
    there = {"first": torch.zeros(1)}
    # Of a module that is no unit, with a prefix, and into a dict that is there.
    model.head.state_dict(destination=there, prefix="head.")
    found = [model.state_dict(), model.blocks[0].up.state_dict(), there, optimizer.state_dict()]
    for options in (
        StateDictOptions(),
        WHOLE,
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True),
    ):
        found.append(get_model_state_dict(model, options=options))
        found.append(get_optimizer_state_dict(model, optimizer, options=options))
    return found


@pytest.mark.parametrize("mesh", SOME)
def test_what_is_saved_is_what_torch_saves(ranks: KeptRanks, mesh: str) -> None:
    world_size, shape = MESHES[mesh]
    ranks.run(world_size, beside_torch, _saved, shape)


def _taken_over(rank: int, source: int, mesh: tuple[int, ...], options: StateDictOptions) -> None:
    saved, saved_optimizer = _trained(PACKAGES[source], 1, mesh)
    # They share memory with what goes on training.
    states = copied(get_state_dict(saved, saved_optimizer, options=options))
    expected, told = wholes(saved), _goes_on(saved, saved_optimizer)
    for package in PACKAGES:
        model, _ = _trained(package, 2, mesh)
        # One that has no state yet.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parts = copied(states)
        if options.broadcast_from_rank0 and rank:
            parts = ({}, {})
        set_model_state_dict(model, parts[0], options=options)
        set_optimizer_state_dict(model, optimizer, parts[1], options=options)
        same(wholes(model), expected)
        same(_goes_on(model, optimizer), told)
        same(wholes(model), wholes(saved))


@pytest.mark.parametrize(
    ("source", "mesh", "options"),
    [
        (1, "shard", {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True}),
        (0, "shard", {}),
        *(pytest.param(source, "tensor", {}, marks=pytest.mark.nightly) for source in (0, 1)),
        *(
            pytest.param(source, "replicate, tensor", {"full_state_dict": True}, marks=pytest.mark.nightly)
            for source in (0, 1)
        ),
    ],
)
def test_what_one_saved_the_other_goes_on_with(
    ranks: KeptRanks, source: int, mesh: str, options: dict[str, bool]
) -> None:
    world_size, shape = MESHES[mesh]
    ranks.run(world_size, _taken_over, source, shape, StateDictOptions(**options))


def _through_files(rank: int, folder: str, mesh: tuple[int, ...]) -> None:
    models = [_trained(package, seed, mesh) for package, seed in zip(PACKAGES, (1, 2), strict=True)]
    expected = [wholes(model) for model, _ in models]
    for number, (model, optimizer) in enumerate(models):
        parts = get_state_dict(model, optimizer)
        dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=f"{folder}/{number}")
    told = [_goes_on(*each) for each in models]
    for number, (model, optimizer) in enumerate(models):
        parts = get_state_dict(model, optimizer)
        asked = {"model": parts[0], "optimizer": parts[1]}
        dcp.load(asked, checkpoint_id=f"{folder}/{1 - number}")
        set_state_dict(model, optimizer, model_state_dict=asked["model"], optim_state_dict=asked["optimizer"])
        same(wholes(model), expected[1 - number])
    same([_goes_on(*each) for each in models], told[::-1])


@pytest.mark.parametrize("mesh", ["shard", pytest.param("replicate, tensor", marks=pytest.mark.nightly)])
def test_through_torch_distributed_checkpoint(ranks: KeptRanks, tmp_path: Path, mesh: str) -> None:
    world_size, shape = MESHES[mesh]
    ranks.run(world_size, _through_files, str(tmp_path), shape)
    # And by a program without ranks, of a model without shards.
    states = []
    for number in range(2):
        whole: dict[str, Any] = {"model": Mlps(hidden_of(shape)).double().state_dict()}
        # Torch warns that one process loads, which is what no_dist asks for.
        with warnings.catch_warnings(action="ignore"):
            dcp.load(whole, checkpoint_id=str(tmp_path / str(number)), no_dist=True)
        states.append(whole["model"])
    assert not torch.equal(states[0]["head.weight"], states[1]["head.weight"])


def share_memory_with_parameters(package: ModuleType) -> Any:
    model = shard_all(package, make())
    # Kept from before the step, as torchtitan does.
    kept, also = get_model_state_dict(model), model.state_dict()
    before = wholes(model)
    told = train(model, 1)
    for state in (kept, also):
        same({name: as_whole(value) for name, value in state.items()}, wholes(model))
    with torch.no_grad():
        for name, whole in before.items():
            if name != "scale":
                kept[name].copy_(distribute_tensor(whole, cpu_mesh(), [Shard(0)]))
    return told, wholes(model), model(next(batches(1)))


def loading_dtensors(package: ModuleType) -> Any:
    """Copied into parameters that stay, or in their place; then trained."""
    torch.manual_seed(5)
    whole = dict(Words().double().state_dict())
    found = []
    for assign in (False, True):
        model = shard_all(package, make())
        before = list(model.parameters())
        state = {
            name: distribute_tensor(value, cpu_mesh(), [Shard(0)]) if name != "scale" else value
            for name, value in whole.items()
        }
        # Torch's parameters take up the memory of what is assigned.
        model.load_state_dict(copied(state), assign=assign)
        found += [wholes(model), [now is then for now, then in zip(model.parameters(), before, strict=True)]]
        found += [train(model, 1), seen(model)]
        answer = model.load_state_dict({"norm.weight": state["norm.weight"]}, strict=False)
        found += [answer.unexpected_keys, answer.missing_keys, loss_of(model, next(batches(1))).item()]
    return found


def what_does_not_fit_is_refused(package: ModuleType) -> Any:
    model = shard_all(package, make())
    good = copied(model.state_dict())
    small = distribute_tensor(torch.ones(3, 12).double(), cpu_mesh(), [Shard(0)])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**good, "head.weight": small}, "size mismatch"),
        ({}, "Missing key"),
        ({**good, "more": torch.ones(1)}, "Unexpected key"),
    ]
    for state, words in wrong:
        with pytest.raises(RuntimeError, match=words):
            model.load_state_dict(state)
    # A whole tensor for a DTensor, as torch's own tests have it.
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        model.load_state_dict({**good, "head.weight": torch.ones(17, 12).double()})
    return train(model, 1), seen(model)


def in_the_middle_of_a_step(package: ModuleType) -> Any:
    """Saved after ``unshard()``, and between forward and backward of a model whose parameters are kept."""
    model = shard_all(package, make(), reshard_after_forward=False)
    model.blocks[0].unshard()
    found = [model.state_dict()]
    loss = loss_of(model, next(batches(1)))
    found += [copied(model.state_dict())]
    assert all(isinstance(value, DTensor) for name, value in found[1].items() if name != "scale")
    loss.backward()
    return [*copied(found), seen(model)]


def _again(package: ModuleType, value: Any) -> list[Any]:
    """``value`` behind each of the ways in which programs write it."""
    file = io.BytesIO()
    torch.save(value, file)
    read = []
    for weights_only in (True, False):
        file.seek(0)
        read.append(torch.load(file, weights_only=weights_only))
    read += [pickle.loads(pickle.dumps(value)), copy.deepcopy(value)]
    locals_ = [each.to_local() for each in tree_leaves(read) if isinstance(each, DTensor)]
    # Of FSDP2 a rank with fewer rows writes as many as the first.
    assert package is PACKAGES[0] or all(each.untyped_storage().nbytes() == each.nbytes for each in locals_)
    return read


def files_of_each_rank(package: ModuleType) -> Any:
    """As trainers save them that write a file a rank: by ``torch.save``, and no checkpoint of torch's."""
    model = shard_all(package, make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = [_again(package, model.state_dict())]
    train(model, 1, optimizer)
    saved = _again(package, dict(model.state_dict())), _again(package, optimizer.state_dict())
    found += [*saved, train(model, 1, optimizer)]
    for states in zip(*saved, strict=True):
        for into, state in zip((model, optimizer), states, strict=True):
            into.load_state_dict(state)
        found.append(train(model, 1, optimizer))
    last = list(model.parameters())[-1]
    assert package is PACKAGES[0] or last.to_local().untyped_storage().nbytes() == last.to_local().nbytes
    return found, _again(package, list(model.parameters())), _again(package, last.detach().to_local()), seen(model)


def handed_to_another_process(package: ModuleType) -> Any:
    """A queue between processes moves what it is given into memory that both share, where optimizers write then."""
    model = shard_all(package, make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    queue, found = multiprocessing.get_context("fork").SimpleQueue(), []
    for words in batches(2):
        loss = loss_of(model, words)
        for parameter in optimizer.param_groups[0]["params"]:
            queue.put(parameter.detach().to_local())
            queue.get()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item(), wholes(model)]
    if package is not PACKAGES[0]:
        with polyshard.unsharded(model):
            alike(copied(dict(model.named_parameters())), {key: found[-1][key] for key, _ in model.named_parameters()})
    return found, train(model, 1)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[ModuleType], object], int] = {
    share_memory_with_parameters: 2,
    loading_dtensors: 2,
    what_does_not_fit_is_refused: 2,
    in_the_middle_of_a_step: 2,
    files_of_each_rank: 2,
    handed_to_another_process: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BODIES[body], beside_torch, body)
