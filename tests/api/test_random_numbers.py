"""``polyshard.random_states``: every rank draws what it would have drawn; other numbers of ranks are refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import polyshard
import pytest
import torch
from parity import Block, Net, draw, seeded, units_of
from polyshard.errors import ConfigError, StateError
from processes import RankPool
from torch import nn

CONFIG = polyshard.ShardConfig(timeout_s=20, policy=units_of(Block))


def drawn() -> tuple[list[float], float, list[float]]:
    return torch.rand(3).tolist(), random.random(), np.random.rand(2).tolist()


def draw_on(rank: int) -> tuple[Any, Any, int]:
    model = polyshard.shard(seeded(Net), CONFIG)
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    drawn()
    states = polyshard.random_states(model)
    expected = drawn()
    polyshard.restore_random_states(model, states)
    return expected, drawn(), len(states)


def restore_from_file(rank: int, folder: str) -> tuple[Any, Any]:
    """Through a checkpoint, and with what another run drew in between."""
    model = polyshard.shard(seeded(Net), CONFIG)
    torch.manual_seed(100 + rank)
    polyshard.checkpoint.save(folder, 1, model, extra={"random": polyshard.random_states(model)})
    expected = drawn()
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    found = polyshard.checkpoint.latest(folder)
    assert found is not None
    extra = polyshard.checkpoint.load(found, model)
    polyshard.restore_random_states(model, extra["random"])
    return expected, drawn()


@pytest.mark.slow
def test_every_rank_draws_on(tmp_path: Any) -> None:
    with RankPool(3) as pool:
        answers = pool.run(draw_on)
        for expected, found, count in answers:
            assert found == expected
            assert count == 3
        # Each has its own.
        assert len({str(expected) for expected, _, _ in answers}) == 3
        for expected, found in pool.run(restore_from_file, str(tmp_path)):
            assert found == expected


def alone() -> nn.Module:
    return polyshard.shard(seeded(Net), polyshard.ShardConfig(strategy="no_shard", collectives="fake"))


@pytest.mark.parametrize("count", [0, 2])
def test_states_of_another_number_of_ranks_are_refused_and_nothing_changes(count: int) -> None:
    model = alone()
    states = polyshard.random_states(model) * count
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=f"There are random states of {count} ranks, and rank 0 is one of 1"):
        polyshard.restore_random_states(model, states)
    assert torch.equal(torch.get_rng_state(), before)


def test_models_that_are_not_sharded_are_refused() -> None:
    with pytest.raises(StateError, match=r"random_states\(\) needs a sharded module"):
        polyshard.random_states(nn.Linear(2, 2))
    with pytest.raises(StateError, match=r"restore_random_states\(\) needs a sharded module"):
        polyshard.restore_random_states(nn.Linear(2, 2), [])


def test_inside_a_forward_it_is_refused_and_the_model_trains_on() -> None:
    model = alone()
    block = next(each for each in model.modules() if isinstance(each, Block))
    handle = block.register_forward_pre_hook(lambda module, args: polyshard.random_states(model) and None)
    with pytest.raises(StateError, match=r"random_states\(\) was called inside a forward"):
        model(draw(4, 3))
    handle.remove()
    model(draw(4, 3)).sum().backward()
