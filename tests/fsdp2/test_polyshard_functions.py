"""Functions of ``polyshard`` on models of ``fully_shard``: plain parameters for optimizers, whole ones, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import polyshard.checkpoint
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    OURS,
    WIDTH,
    Words,
    alike,
    as_whole,
    batches,
    copied,
    cpu_mesh,
    loss_of,
    make,
    parallel,
    same,
    shard_all,
    train,
    wholes,
)
from polyshard.optim import AveragedWeights
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def flat_parameters_of_models_that_change(rank: int) -> None:
    """On the meta device, with a gradient already, of an inner module, loaded and written to afterwards."""
    with torch.device("meta"):
        hollow = parallel(OURS, dist.get_world_size())
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        polyshard.flat_parameters(hollow)
    model = shard_all(OURS, make())
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(RuntimeError, match="has a gradient already"):
        polyshard.flat_parameters(model)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="flat_parameters"):
        polyshard.flat_parameters(model.blocks[0])
    held = polyshard.flat_parameters(model)
    with torch.no_grad():
        model.head.weight.fill_(2.0)
    assert any((each.to_local() == 2.0).any() for each in held)  # type: ignore[attr-defined]
    model.load_state_dict(shard_all(OURS, make()).state_dict())
    same(copied(wholes(model)), dict(make().state_dict()))
    before = train(shard_all(OURS, make()), 1)
    same(loss_of(model, next(batches(1))).item(), before[0])


def what_was_set_before_parameters_had_memory(rank: int) -> None:
    """A factor stays."""
    whole = dict(make().state_dict())
    with torch.device("meta"):
        model = shard_all(OURS, Words().double())
    model.set_gradient_divide_factor(0.5)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            like = whole[name]
            value.copy_(
                distribute_tensor(like, value.device_mesh, value.placements) if isinstance(value, DTensor) else like
            )
    other: Any = shard_all(OURS, make())
    words = next(batches(1))
    for each in (model, other):
        loss_of(each, words).backward()
    own = set(map(id, model.blocks.parameters())) | set(map(id, model.embedding.parameters()))
    expected = []
    for placed, theirs in zip(model.parameters(), other.parameters(), strict=True):
        # Of two ranks a mean is half of the sum, and this sum was divided by a half.
        factor = 1.0 if id(placed) in own else 4.0
        expected.append(factor * theirs.grad.full_tensor())
        same(placed.grad.to_local(), factor * theirs.grad.to_local())
    norm = torch.stack([each.norm() for each in expected]).norm()
    same(as_whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)), norm)
    other.zero_grad()
    polyshard.flat_parameters(other)
    with pytest.raises(RuntimeError, match="flat_parameters"):
        other.float()


def weights_are_handed_out(rank: int) -> None:
    """Before the first step and between steps, of models that are tied, and cut by rows or by other dimensions."""

    def tied() -> Words:
        model = OURS.fully_shard(make(tied=True), mesh=cpu_mesh(), reshard_after_forward=False)
        assert isinstance(model, Words)
        return model

    def by_columns() -> Words:
        return shard_all(
            OURS,
            make(),
            shard_placement_fn=lambda parameter: Shard(1 if parameter.shape[-1] == WIDTH and parameter.ndim > 1 else 0),
        )

    for made in (tied, by_columns):
        model, other = made(), made()
        for steps in (0, 2):
            same(train(model, steps), train(other, steps), rtol=0, atol=0)
            found: dict[str, torch.Tensor] = {}
            for names, tensors in polyshard.stream(model):
                found.update(zip(names, tensors, strict=True))
            wanted = {name: each for name, each in wholes(other).items() if not (made is tied and "head" in name)}
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], each) for name, each in wanted.items())
            for names, tensors in polyshard.stream(model, ranks=[1]):
                assert len(names) == len(tensors)
                assert bool(names) == (rank == 1)
                assert all(map(torch.equal, tensors, map(wanted.get, names)))
        polyshard.load_stream(model, [(name, each + 1) for name, each in found.items()])
        same(wholes(model), {name: each + 1 for name, each in wholes(other).items()}, rtol=0, atol=0)


def averages_refuse_steps(rank: int) -> None:
    model = shard_all(OURS, make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = AveragedWeights(model, decay=0.5)
    loss_of(model, next(batches(1))).backward()
    with averages.applied(), pytest.raises(RuntimeError, match="was to update"):
        optimizer.step()
    optimizer.step()


def whole_parameters_reports_and_placements(rank: int) -> None:
    model = shard_all(OURS, make())
    with polyshard.unsharded(model, writeback=True):
        alike(dict(model.state_dict()), dict(make().state_dict()))
        with torch.no_grad():
            model.head.weight.fill_(2.0)
    same(as_whole(model.state_dict()["head.weight"]), torch.full((17, WIDTH), 2.0, dtype=torch.float64))
    inside = model.blocks[0]
    wanted = {name: each.clone() for name, each in make().blocks[0].state_dict().items()}
    with polyshard.unsharded(inside):
        alike(dict(inside.state_dict()), wanted)
        assert isinstance(model.head.weight, DTensor)
    alike(polyshard.state.get_model_state_dict(inside, polyshard.state.StateOptions(form="full")), wanted)
    assert isinstance(next(inside.parameters()), DTensor)
    assert polyshard.report(model).world_size == dist.get_world_size()
    assert model.state_dict()["head.weight"].placements == (Shard(0),)
    hybrid = shard_all(OURS, make(), cpu_mesh(1, 2))
    assert hybrid.state_dict()["head.weight"].placements == (Replicate(), Shard(0))
    polyshard.close(model)


def _checkpointed(rank: int, folder: str) -> None:
    model = shard_all(OURS, make())
    optimizer = torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-2)
    train_any(model, optimizer)
    polyshard.checkpoint.save(Path(folder, "ours"), 1, model, optimizer)
    before, told = wholes(model), train_any(model, optimizer)
    fresh = shard_all(OURS, make())
    again = torch.optim.AdamW(polyshard.flat_parameters(fresh), lr=1e-2)
    polyshard.checkpoint.load(polyshard.checkpoint.latest(Path(folder, "ours")), fresh, again)
    same(wholes(fresh), before)
    same(train_any(fresh, again), told)


def train_any(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    told = []
    for words in batches(2):
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


def test_checkpoints_of_polyshard(ranks: KeptRanks, tmp_path: Path) -> None:
    ranks.run(2, _checkpointed, str(tmp_path))


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    flat_parameters_of_models_that_change: 2,
    whole_parameters_reports_and_placements: 2,
    what_was_set_before_parameters_had_memory: 2,
    averages_refuse_steps: 2,
    weights_are_handed_out: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
