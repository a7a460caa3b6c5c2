"""State dicts of ``fully_shard``: those of torch's, which each reads from the other, in memory and from disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import polyshard.checkpoint
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp2_models import FACES, OURS, Words, as_whole, batches, cpu_mesh, loss_of, make, same, shard_all, train, wholes
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only


def _trained(face: ModuleType, seed: int, *mesh: int) -> tuple[Words, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = shard_all(face, Words().double(), cpu_mesh(*mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, 2, optimizer)
    return model, optimizer


def _equal(ours: Any, theirs: Any) -> None:
    """Both are DTensors that lie alike, with equal pieces, or equal values of another kind."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            _equal(ours[key], theirs[key])
    elif isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            _equal(one, other)
    elif isinstance(ours, DTensor):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert (ours.placements, ours.device_mesh) == (theirs.placements, theirs.device_mesh)
        same(ours.to_local(), theirs.to_local())
    elif isinstance(ours, torch.Tensor):
        same(ours, theirs)
    else:
        assert ours == theirs


def _same_as_torchs(rank: int, mesh: tuple[int, ...]) -> None:
    (theirs, their_optimizer), (ours, optimizer) = (_trained(face, 0, *mesh) for face in FACES)
    _equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    # Of a module that is no unit, with a prefix, and into a dict that is there.
    _equal(dict(ours.blocks[0].up.state_dict()), dict(theirs.blocks[0].up.state_dict()))
    there = {"first": torch.zeros(1)}
    ours.norm.state_dict(destination=there, prefix="norm.")
    assert list(there) == ["first", "norm.weight", "norm.bias"]
    _equal(optimizer.state_dict(), their_optimizer.state_dict())
    for options in (
        None,
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True),
    ):
        asked = {"options": options} if options is not None else {}
        _equal(get_model_state_dict(ours, **asked), get_model_state_dict(theirs, **asked))
        _equal(
            get_optimizer_state_dict(ours, optimizer, **asked),
            get_optimizer_state_dict(theirs, their_optimizer, **asked),
        )


@pytest.mark.parametrize(("world_size", "mesh"), [(1, ()), (3, ()), (4, (2, 2))])
def test_what_is_saved_is_what_torch_saves(ranks: KeptRanks, world_size: int, mesh: tuple[int, ...]) -> None:
    ranks.run(world_size, _same_as_torchs, mesh)


def _copied(states: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.clone, states)


def _taken_over(rank: int, source: int, whole: bool) -> None:
    saved, saved_optimizer = _trained(FACES[source], 1)
    options = StateDictOptions(full_state_dict=whole)
    # They share memory with what goes on training.
    states = _copied(get_state_dict(saved, saved_optimizer, options=options))
    expected, told = wholes(saved), train(saved, 2, saved_optimizer)
    for face in FACES:
        model, _ = _trained(face, 2)
        # One that has no state yet.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parts = _copied(states)
        set_state_dict(model, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1], options=options)
        same(wholes(model), expected)
        same(train(model, 2, optimizer), told)
        same(wholes(model), wholes(saved))


@pytest.mark.parametrize(("source", "whole", "world_size"), [(0, False, 2), (1, True, 3)])
def test_what_one_saved_the_other_goes_on_with(ranks: KeptRanks, source: int, whole: bool, world_size: int) -> None:
    ranks.run(world_size, _taken_over, source, whole)


def one_rank_has_the_state(rank: int) -> None:
    source, source_optimizer = _trained(OURS, 1)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = _copied(get_state_dict(source, source_optimizer, options=whole))
    expected, told = wholes(source), train(source, 1, source_optimizer)
    model, _ = _trained(OURS, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, states[0] if rank == 0 else {}, options=options)
    same(wholes(model), expected)
    set_optimizer_state_dict(model, optimizer, states[1] if rank == 0 else {}, options=options)
    same(train(model, 1, optimizer), told)


def _through_files(rank: int, folder: str) -> None:
    models = [_trained(face, seed) for face, seed in zip(FACES, (1, 2), strict=True)]
    expected = [wholes(model) for model, _ in models]
    for number, (model, optimizer) in enumerate(models):
        parts = get_state_dict(model, optimizer)
        dcp.save({"model": parts[0], "optimizer": parts[1]}, checkpoint_id=f"{folder}/{number}")
    for number, (model, optimizer) in enumerate(models):
        parts = get_state_dict(model, optimizer)
        asked = {"model": parts[0], "optimizer": parts[1]}
        dcp.load(asked, checkpoint_id=f"{folder}/{1 - number}")
        set_state_dict(model, optimizer, model_state_dict=asked["model"], optim_state_dict=asked["optimizer"])
        same(wholes(model), expected[1 - number])
    told = [train(model, 1, optimizer) for model, optimizer in models]
    assert told[0] != told[1]
    polyshard.checkpoint.save(Path(folder, "ours"), 1, models[1][0], models[1][1])
    before = wholes(models[1][0])
    fresh = shard_all(OURS, make())
    polyshard.checkpoint.load(polyshard.checkpoint.latest(Path(folder, "ours")), fresh)
    same(wholes(fresh), before)


def test_through_torch_distributed_checkpoint(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(2, _through_files, str(tmp_path))
    # And by a program without ranks, of a model without shards.
    plain = make()
    state: dict[str, Any] = {"model": plain.state_dict()}
    with warnings.catch_warnings(
        action="ignore"
    ):  # Torch warns that one process loads, which is what no_dist asks for.
        dcp.load(state, checkpoint_id=str(tmp_path / "1"), no_dist=True)
    assert not torch.equal(plain.head.weight, make().head.weight)


def a_piece_says_what_to_write_for_a_dtensor(rank: int) -> None:
    model = shard_all(OURS, make())
    parameter, whole = model.blocks[1].up.weight, make().blocks[1].up.weight
    name = "blocks.1.up.weight"
    said = {}
    for asked in ("full_tensor", "redistribute", "to_local", "placements", "device_mesh", "_local_tensor"):
        assert not hasattr(parameter, asked)
        assert not hasattr(nn.Parameter, asked)
        with pytest.raises(AttributeError, match=rf"'{asked}': '{name}' is no DTensor.*rank {rank}\)") as caught:
            getattr(parameter, asked)
        assert f"{tuple(parameter.shape)} of {tuple(whole.shape)}" in str(caught.value)
        said[asked] = str(caught.value)
    # What is to be written is right.
    assert f"model.state_dict()['{name}'].full_tensor()" in said["full_tensor"]
    same(model.state_dict()[name].full_tensor(), whole.detach())
    assert f"model.state_dict()['{name}'].placements" in said["placements"]
    assert model.state_dict()[name].placements == (Shard(0),)
    assert "Use the parameter itself" in said["to_local"]
    same(model.state_dict()[name].to_local(), parameter.detach())
    with polyshard.unsharded(model), pytest.raises(AttributeError, match="is whole here"):
        parameter.full_tensor()
    # Other parameters have what they had.
    for other in (nn.Parameter(torch.ones(2)), make().head.weight):
        with pytest.raises(AttributeError, match=r"^'Parameter' object has no attribute 'full_tensor'$"):
            other.full_tensor()
    same(nn.Parameter(distribute_tensor(torch.ones(4), cpu_mesh(), [Shard(0)])).full_tensor().detach(), torch.ones(4))
    train(model, 1)


def state_dicts_share_memory_with_parameters(rank: int) -> None:
    model = shard_all(OURS, make())
    # Kept from before the step, as torchtitan does.
    kept = get_model_state_dict(model)
    before = wholes(model)
    train(model, 1)
    same({name: as_whole(value) for name, value in kept.items()}, wholes(model))
    with torch.no_grad():
        for name, whole in before.items():
            if name != "scale":
                kept[name].copy_(distribute_tensor(whole, cpu_mesh(), [Shard(0)]))
    same(wholes(model), before)
    same(model(next(batches(1))), make()(next(batches(1))))


def loading_dtensors_and_whole_tensors(rank: int) -> None:
    torch.manual_seed(5)
    whole = dict(Words().double().state_dict())
    model = shard_all(OURS, make())
    before = list(model.parameters())
    mesh = cpu_mesh()
    state: dict[str, Any] = {
        name: distribute_tensor(value, mesh, [Shard(0)]) if name != "scale" else value for name, value in whole.items()
    }
    model.load_state_dict(state, assign=True)
    loss_of(model, next(batches(1))).backward()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    same(wholes(model), whole)
    model.load_state_dict(dict(make().state_dict()))
    same(wholes(model), dict(make().state_dict()))
    assert model.load_state_dict({"norm.weight": torch.ones(12)}, strict=False).unexpected_keys == []


def what_does_not_fit_is_refused(rank: int) -> None:
    model = shard_all(OURS, make())
    before = wholes(model)
    mesh = cpu_mesh()
    whole = dict(make().state_dict())
    wrong: list[tuple[Any, str]] = [
        (whole["head.weight"][:3], r"'head.weight' came in shape \(3, 12\)"),
        (distribute_tensor(whole["head.weight"], mesh, [Replicate()]), "Redistribute it"),
        (distribute_tensor(whole["head.weight"], mesh, [Shard(1)]), "Redistribute it"),
    ]
    for value, words in wrong:
        with pytest.raises(RuntimeError, match=words):
            model.load_state_dict({**whole, "head.weight": value})
    same(wholes(model), before)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    model.blocks[0].unshard()  # type: ignore[union-attr]
    same(wholes(model), before)
    train(model, 1)


def saving_between_forward_and_backward(rank: int) -> None:
    """Saved and loaded between forward and backward of a model whose parameters are kept."""
    model = shard_all(OURS, make(), reshard_after_forward=False)
    loss = loss_of(model, next(batches(1)))
    same(wholes(model), dict(make().state_dict()))
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    other = shard_all(OURS, make())
    loss_of(other, next(batches(1))).backward()
    same(gradients, [parameter.grad for parameter in other.parameters()])


def parameters_beside_the_model_stay_plain(rank: int) -> None:
    model = shard_all(OURS, make())
    others = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *others.parameters()], lr=1e-2)
    train(model, 1, optimizer)
    others(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    kept = optimizer.state[model.head.weight]["exp_avg"]
    state = optimizer.state_dict()["state"]
    assert isinstance(state[0]["exp_avg"], DTensor)
    assert not isinstance(state[0]["step"], DTensor)
    assert type(list(state.values())[-1]["exp_avg"]) is torch.Tensor
    assert type(kept) is torch.Tensor
    assert optimizer.state[model.head.weight]["exp_avg"] is kept
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    same(optimizer.state[model.head.weight]["exp_avg"], kept)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    one_rank_has_the_state: 2,
    a_piece_says_what_to_write_for_a_dtensor: 2,
    state_dicts_share_memory_with_parameters: 2,
    loading_dtensors_and_whole_tensors: 3,
    what_does_not_fit_is_refused: 2,
    saving_between_forward_and_backward: 2,
    parameters_beside_the_model_stay_plain: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
