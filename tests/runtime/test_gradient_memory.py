"""How long the memory of reduced gradients lives: as long as a ``.grad`` that was not dropped, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, local, on_ranks, seeded, sharded_copy, square_step, train_reference, units_of, whole_of
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

SETTINGS: dict[str, dict[str, Any]] = {
    "merged": {},
    "alone": {"batch_nbytes": 0},
    "unsharded": {"strategy": "no_shard"},
    "cast": {"precision": {"name": "mixed", "param": "bfloat16", "reduce": "bfloat16"}},
    "offloaded": {"offload": "cpu"},
}


def storages(parameters: list[torch.Tensor]) -> list[weakref.ref[torch.UntypedStorage]]:
    """Weak references to the memory of every gradient."""
    return [weakref.ref(local(p.grad).untyped_storage()) for p in parameters if p.grad is not None]


@contextmanager
def without_cycle_collection() -> Iterator[None]:
    """What is freed inside is freed by its last reference, and not by luck."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def receivers(model: nn.Module, flat: bool) -> list[torch.Tensor]:
    return list(polyshard.flat_parameters(model)) if flat else list(model.parameters())


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("case", SETTINGS)
def test_zero_grad_frees_gradients_at_once(case: str, flat: bool) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block), **SETTINGS[case])
        parameters = receivers(model, flat)
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for turn in range(3):
            square_step(model, turn, rank)
            held = storages(parameters)
            assert held
            assert all(each() is not None for each in held)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            assert [each() for each in held] == [None] * len(held)

    with without_cycle_collection():
        on_ranks(2, on_rank)


def test_a_gradient_that_is_still_held_keeps_its_values() -> None:
    expected = train_reference(seeded(Net), square_step, 2, turns=1).gradients[0]["first.bias"]

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        square_step(model, 0, rank)
        held = dict(model.named_parameters())["first.bias"].grad
        model.zero_grad()
        for turn in range(1, 3):
            square_step(model, turn, rank)
            model.zero_grad()
        assert held is not None
        return held

    torch.testing.assert_close(whole_of(expected, on_ranks(2, on_rank)), expected, rtol=1e-12, atol=1e-12)
