"""Checkpoints of a model and its Muon: written under one sharding, resumed under another, to the bit."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any, cast

import polyshard
import pytest
import torch
from checkpoints import tensors_in
from matrices import Both, Cell, Zoo, exact, most_apart, whole_parameters
from parity import draw, on_ranks, seeded, sharded_copy, threaded, units_of
from polyshard import checkpoint
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.optim import Muon, WholeTensorOptimizer, for_matrices
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict

Values = dict[str, torch.Tensor]
#: Ranks, and what they are sharded with.
SHARDINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "full-2": (2, {}),
    "full-3": (3, {}),
    "hybrid-4": (4, {"strategy": "hybrid_shard", "shard_size": 2}),
    "grad-op-4": (4, {"strategy": "shard_grad_op"}),
    "whole-2": (2, {"strategy": "no_shard"}),
    "replicas-3": (3, {"strategy": "hybrid_shard_zero2", "shard_size": 1}),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer | Both, turns: range) -> None:
    # The same batch on every rank: the mean of two or four equal gradients is that gradient, to the bit.
    for turn in turns:
        model(draw(4, 3, turn=turn), turn).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizers(model: nn.Module) -> Both:
    return cast("Both", exact(model))


def trained(sharding: str, folder: Path, saves: int | None = None, resumes: bool = False, turns: int = 4) -> Values:
    """Whole parameters after ``turns``; saved after some, or loaded and gone on with."""
    ranks, settings = SHARDINGS[sharding]
    start = seeded(Zoo, seed=7 if resumes else 0)

    def on_rank(rank: int, world: ThreadedWorld) -> Values:
        model = sharded_copy(start, rank, world, policy=units_of(Cell), **settings)
        both = optimizers(model)
        began = 0
        if resumes:
            began = checkpoint.load(checkpoint.latest(folder), model, both.optimizers)["turn"]
        for turn in range(began, turns):
            train(model, both, range(turn, turn + 1))
            if saves == turn + 1:
                checkpoint.save(folder, saves, model, both.optimizers, extra={"turn": saves})
        return whole_parameters(model)

    first, *others = on_ranks(ranks, on_rank)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    return first


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "loads"), [*itertools.pairwise([*SHARDINGS, "full-2"])])
def test_resuming_elsewhere_gives_the_run_that_never_stopped(saves: str, loads: str, tmp_path: Path) -> None:
    went_on = trained(saves, tmp_path, saves=2)
    resumed = trained(loads, tmp_path, resumes=True)
    # The mean of three equal gradients is not always that gradient, to the bit.
    same_means = SHARDINGS[saves][0] == SHARDINGS[loads][0] or 3 not in (SHARDINGS[saves][0], SHARDINGS[loads][0])
    assert most_apart(resumed, went_on) <= (0.0 if same_means else 1e-12)


@pytest.mark.slow
def test_several_optimizers_are_told_apart(tmp_path: Path) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        model = sharded_copy(seeded(Zoo), rank, world, policy=units_of(Cell))
        muon, adamw = optimizers(model).optimizers
        train(model, Both(muon, adamw), range(1))
        directory = checkpoint.save(tmp_path, 1, model, [muon, adamw])
        found = []
        for others in ([adamw, muon], [muon], muon, [muon, adamw, torch.optim.SGD(model.parameters())], [], [muon, 1]):
            with pytest.raises(ConfigError) as caught:
                checkpoint.load(directory, model, others)  # type: ignore[arg-type]
            found.append(str(caught.value))
        checkpoint.load(directory, model, (muon, adamw))
        train(model, Both(muon, adamw), range(1, 2))
        return found

    for swapped, one, alone, twice, none, other in on_ranks(2, on_rank):
        assert "Group 0 of the optimizer" in swapped
        assert "has 2 parameter groups, the optimizer 1" in one
        assert "has 2 parameter groups, the optimizer 1" in alone
        assert "which the optimizer has already" in twice
        assert "an empty sequence" in none
        assert "int" in other


@pytest.mark.slow
def test_momentum_is_saved_whole_under_ordinary_names(tmp_path: Path) -> None:
    start = seeded(Zoo)
    plain = copy.deepcopy(start)
    muon = Muon(for_matrices(plain).matrices, dtype=torch.float64)
    plain(draw(4, 3)).square().mean().backward()
    muon.step()

    def on_rank(rank: int, world: ThreadedWorld) -> Path:
        model = sharded_copy(start, rank, world, policy=units_of(Cell))
        sharded = Muon(for_matrices(model).matrices, dtype=torch.float64)
        model(draw(4, 3)).square().mean().backward()
        sharded.step()
        return checkpoint.save(tmp_path, 1, model, sharded)

    directory = on_ranks(2, on_rank)[0]
    found = tensors_in(directory)["optimizer.state.cells.0.up.weight.momentum_buffer"]
    expected = muon.state[plain.cells[0].up.weight]["momentum_buffer"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


class Counting(WholeTensorOptimizer):
    """Keeps at the owner how often it saw a tensor, and steps the less the more."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def transform(self, group: Any, wholes: torch.Tensor, states: Any) -> torch.Tensor:
        for whole, state in zip(wholes, states, strict=True):
            state["seen"] = state.get("seen", torch.zeros(())) + 1
            whole.div_(state["seen"])
        return wholes

    def update(self, group: Any, shape: tuple[int, ...], parameters: Any, results: Any) -> None:
        for parameter, result in zip(parameters, results, strict=True):
            parameter.add_(result, alpha=-group["lr"])


def test_torchs_state_dicts_are_refused_a_state_that_replicas_share() -> None:
    """Each would give the momentum of some matrices for that of all, and one that has none would step by itself."""

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(lambda: nn.Linear(3, 4, bias=False)), rank, world, strategy="no_shard")
        muon = Muon(model.parameters(), dtype=torch.float64)
        for turn in range(2):
            model(draw(4, 3, turn=turn)).square().mean().backward()
            muon.step()
            muon.zero_grad()
            for call in (get_optimizer_state_dict, get_state_dict):
                with pytest.raises(UnsupportedError, match=r"Muon for the same on all replicas.*polyshard\.checkpoint"):
                    call(model, muon)
        # Nothing is left of torch's own step of lr 0.
        assert muon.param_groups[0]["lr"] == 1e-3
        assert next(model.parameters()).grad is None
        assert bool(muon.state_dict()["state"]) == (rank == 0)

    on_ranks(2, on_rank)


@pytest.mark.slow
def test_what_owners_keep_is_refused(tmp_path: Path) -> None:
    start = seeded(Zoo)

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(start, rank, world, policy=units_of(Cell))
        counting = Counting(for_matrices(model).matrices)
        assert not counting.keeps_at_owners
        train(model, counting, range(2))
        with pytest.raises(UnsupportedError) as caught:
            checkpoint.save(tmp_path, 1, model, counting)
        # As the error says.
        checkpoint.save(tmp_path, 1, model)
        train(model, counting, range(2, 3))
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        assert "Counting keeps something of whole tensors on the ranks that own them" in message
        assert "Save the model alone" in message
        assert f"rank {rank}" in message


def test_what_one_rank_keeps_is_state_like_any_other(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, Counting]:
        model = seeded(Zoo, seed)
        polyshard.shard(model, threaded(ThreadedWorld(1), 0, strategy="no_shard"))
        return model, Counting(for_matrices(model).matrices)

    model, counting = made(0)
    train(model, counting, range(2))
    assert not counting.keeps_at_owners
    directory = checkpoint.save(tmp_path, 1, model, counting)
    train(model, counting, range(2, 4))
    other, again = made(1)
    checkpoint.load(directory, other, again)
    train(other, again, range(2, 4))
    assert most_apart(whole_parameters(model), whole_parameters(other)) == 0
