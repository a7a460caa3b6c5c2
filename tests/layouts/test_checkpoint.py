"""A checkpoint saved under one layout, strategy and number of ranks holds the same under any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import polyshard
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import Block, on_ranks, threaded, train, units_of
from polyshard import checkpoint
from polyshard_backends.threaded import ThreadedWorld
from reference_models import LAYOUTS, Frozen, Halves, mixed, mixed_step
from torch import nn

EVERY = {**LAYOUTS, "halves": Halves()}


class Run(NamedTuple):
    """How a model is sharded, and what its optimizer holds."""

    layout: str
    strategy: str
    ranks: int
    flat: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        found = {"layout": EVERY[self.layout], "strategy": self.strategy, "policy": units_of(Block, Frozen)}
        if self.strategy.startswith("hybrid"):
            found["shard_size"] = 2 if self.ranks == 4 else self.ranks
        return found


RUNS = st.builds(
    Run,
    layout=st.sampled_from(list(EVERY)),
    strategy=st.sampled_from(["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]),
    ranks=st.sampled_from([2, 3, 4]),
    flat=st.booleans(),
)
#: Every layout into every other.
PAIRS = [
    (Run(one, ["full_shard", "hybrid_shard"][row % 2], 2 + row % 3), Run(other, "full_shard", 2 + (row + column) % 3))
    for row, one in enumerate(EVERY)
    for column, other in enumerate(EVERY)
]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
}

Held = dict[str, torch.Tensor]


def made(rank: int, world: ThreadedWorld, run: Run, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    with world.lock:
        mine = mixed()
    polyshard.shard(mine, threaded(world, rank, **run.settings))
    parameters = polyshard.flat_parameters(mine) if run.flat else mine.parameters()
    return mine, OPTIMIZERS[kind](parameters)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """This rank's elements of all parameters and of the optimizer's state, by name, as a checkpoint would name them."""
    state = checkpoint.optimizer_state(model, optimizer)["state"]
    told = {f"{name}/": value for name, value in checkpoint.model_state(model).items()}
    told |= {f"{name}/{key}": value for name, states in state.items() for key, value in states.items()}
    return told


def whole(original: torch.Tensor, parts: list[Any]) -> torch.Tensor:
    """The whole tensor from what all ranks tell of it, each element told at least once, alike wherever told twice."""
    found = torch.full_like(original, torch.nan, memory_format=torch.preserve_format)
    for part in parts:
        for chunk in part.chunks:
            place = found[tuple(slice(o, o + n) for o, n in zip(chunk.box.offsets, chunk.box.sizes, strict=True))]
            assert bool((place.isnan() | (place == chunk.view)).all())
            place.copy_(chunk.view)
    assert not found.isnan().any()
    return found


def wholes(ranks: list[Held]) -> Held:
    originals = dict(mixed().named_parameters())
    found: Held = {}
    for key in {key for rank in ranks for key in rank}:
        name, _, _ = key.partition("/")
        parts = [rank[key] for rank in ranks if key in rank]
        if hasattr(parts[0], "chunks"):
            found[key] = whole(originals[name].detach(), parts)
        else:
            found[key] = torch.as_tensor(parts[0]).clone()
            assert all(torch.equal(torch.as_tensor(part), found[key]) for part in parts)
    return found


def carried(folder: Path, one: Run, other: Run, kind: str) -> None:
    def save(rank: int, world: ThreadedWorld) -> Held:
        mine, optimizer = made(rank, world, one, kind)
        train(mine, optimizer, mixed_step, rank, 2)
        checkpoint.save(folder, 2, mine, optimizer)
        return held(mine, optimizer)

    def load(rank: int, world: ThreadedWorld) -> Held:
        mine, optimizer = made(rank, world, other, kind)
        checkpoint.load(folder / "step-00000002", mine, optimizer)
        return held(mine, optimizer)

    saved, loaded = wholes(on_ranks(one.ranks, save)), wholes(on_ranks(other.ranks, load))
    moments = 2 if kind == "adamw" else 1
    assert sum(key.partition("/")[2] not in ("", "step") for key in saved) >= moments * 12
    untrained = dict(mixed().named_parameters())
    assert not torch.equal(saved["first.weight/"], untrained["first.weight"].detach())
    # Without elements there is nobody to tell of state.
    assert {key for key in saved if "empty" not in key} == {key for key in loaded if "empty" not in key}
    for key, value in loaded.items():
        assert torch.equal(value, saved.get(key, value)), key


@pytest.mark.parametrize(
    ("one", "other"),
    # Of all pairs, each layout is quick once on either side.
    [
        pytest.param(*pair, marks=() if index % (len(EVERY) + 1) == 1 else pytest.mark.nightly)
        for index, pair in enumerate(PAIRS)
    ],
)
def test_every_layout_into_every_other(one: Run, other: Run, tmp_path: Path) -> None:
    carried(tmp_path, one, other, "adamw")


@pytest.mark.slow
@given(one=RUNS, other=RUNS, kind=st.sampled_from(list(OPTIMIZERS)))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_else_changes(one: Run, other: Run, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    carried(tmp_path_factory.mktemp("run"), one, other, kind)
