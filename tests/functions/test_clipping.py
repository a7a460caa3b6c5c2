"""Torch's ``clip_grad_norm_`` and ``get_total_norm``, and polyshard's: the norm of the whole, on every rank.

Clipping of all parameters, by norms of every order, is drawn (``runtime/test_random_programs.py``).
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import polyshard
import pytest
import torch
from parity import WAYS, Block, Net, averaged, backward, local, on_ranks, seeded, sharded_copy, units_of
from polyshard.errors import ConfigError
from polyshard_backends.threaded import ThreadedWorld
from processes import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

# By name, as trainers do, long before anything is sharded.
from torch.nn.utils import clip_grad_norm_, get_total_norm

BLOCKS = {"policy": units_of(Block)}


def norm_of(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).norm()


def pieces(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's rows of each gradient."""
    return {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def whole_norm(norm: torch.Tensor) -> torch.Tensor:
    """What torch says of gradients that are ``DTensor`` is one, too."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@pytest.mark.parametrize(
    "chosen", [["last.bias"], ["first.bias", "last.weight"], ["blocks.1.up.bias", "blocks.0.down.weight", "last.bias"]]
)
@pytest.mark.parametrize("world_size", [2, 5])
def test_of_some_parameters_it_is_their_norm_also_where_a_rank_holds_none_of_them(
    chosen: list[str], world_size: int
) -> None:
    parameters = dict(averaged(world_size).named_parameters())
    norm = norm_of(parameters[name].grad for name in chosen)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, bool, bool]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        backward(model, rank)
        before = pieces(model)
        mine = dict(model.named_parameters())
        given = [mine[name] for name in chosen]
        got = clip_grad_norm_(given[0] if len(given) == 1 else given, norm.item() / 2)
        after = pieces(model)
        others = all(torch.equal(after[name], before[name]) for name in mine if name not in chosen)
        return whole_norm(got), others, all(local(parameter).numel() for parameter in given)

    ranks = on_ranks(world_size, on_rank)
    for got, others, _ in ranks:
        torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)
        assert others
    if world_size == 5:
        assert not all(holds for _, _, holds in ranks)


@pytest.mark.parametrize(("world_size", "settings"), [*WAYS, (2, {"offload": "cpu"})])
def test_values_and_given_norms_are_clipped_element_by_element(world_size: int, settings: dict[str, Any]) -> None:
    norm = norm_of(p.grad for p in averaged(world_size).parameters())

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[dict[str, torch.Tensor], ...]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        backward(model, rank)
        before = pieces(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
        scaled = pieces(model)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        return before, scaled, pieces(model)

    for before, scaled, clamped in on_ranks(world_size, on_rank):
        for name, gradient in before.items():
            expected = gradient * (0.5 / (norm + 1e-6)).clamp(max=1.0)
            torch.testing.assert_close(scaled[name], expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(clamped[name], expected.clamp(-0.01, 0.01), rtol=1e-12, atol=0)


def test_the_norm_of_gradients_and_of_parameters() -> None:
    wanted = averaged(3)
    gradients, values = norm_of(p.grad for p in wanted.parameters()), norm_of(p.detach() for p in wanted.parameters())

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        backward(model, rank)
        there = [p.grad for p in model.parameters() if p.grad is not None]
        norms = [get_total_norm(there), get_total_norm(each.detach() for each in there)]
        norms.append(get_total_norm(model.parameters()))
        with polyshard.unsharded(model):
            norms.append(get_total_norm(model.parameters()))
        norms.append(clip_grad_norm_(model.parameters(), math.inf))
        return list(map(whole_norm, norms))

    for got in on_ranks(3, on_rank):
        torch.testing.assert_close(got, [gradients, gradients, values, values, gradients], rtol=1e-12, atol=0)


def test_an_order_that_does_not_combine_is_refused_and_nothing_is_sent() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world)
        backward(model, rank)
        with pytest.raises(ConfigError, match=rf"norm_type=0.0 \(rank {rank}\)"):
            polyshard.clip_grad_norm_(model, 1.0, 0.0)
        polyshard.clip_grad_norm_(model, 1.0)

    on_ranks(2, on_rank)


def test_whatever_is_not_sharded_is_left_to_torch() -> None:
    polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    model = averaged(1)
    norm = norm_of(p.grad for p in model.parameters())
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 1.0), norm, rtol=1e-12, atol=0)
    assert get_total_norm([]) == 0
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((parameter for parameter in ()), 1.0)


def _clip(rank: int) -> float:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(**BLOCKS))
    backward(model, rank)
    return whole_norm(clip_grad_norm_(model.parameters(), 1.0)).item()


def _clip_nothing(rank: int, bad_rank: int) -> float:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(**BLOCKS))
    backward(model, rank)
    if rank == bad_rank:
        next(local(p.grad) for p in model.parameters() if p.grad is not None)[0] = math.nan
    return polyshard.clip_grad_norm_(model, math.inf, math.inf).item()


def _clip_compiled(rank: int) -> float:
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message="Dynamo")
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(**BLOCKS))
    backward(model, rank)

    def clip() -> torch.Tensor:
        return clip_grad_norm_(list(model.parameters()), 1.0) * 2

    return whole_norm(torch.compile(clip, backend="eager")()).item() / 2


@pytest.mark.slow
def test_on_processes_and_inside_a_compiled_function() -> None:
    norm = norm_of(p.grad for p in averaged(2).parameters()).item()
    with RankPool(2) as ranks:
        assert ranks.run(_clip) == pytest.approx([norm, norm], rel=1e-12)
        for bad_rank in range(2):
            # The largest of two values, one of them not a number, depends on the backend and on their order.
            assert all(map(math.isnan, ranks.run(_clip_nothing, bad_rank)))
        assert ranks.run(_clip_compiled, timeout=120.0) == pytest.approx([norm, norm], rel=1e-12)


def test_a_model_that_was_dropped_is_forgotten() -> None:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    parameter = weakref.ref(model.get_parameter("last.bias"))
    del model
    gc.collect()
    assert parameter() is None
