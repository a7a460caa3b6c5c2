"""Muon over shards does what Muon does on whole matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import OURS, Mlps, as_whole, parallel
from matrices import Cell, FormulaMuon, Zoo, distance, exact, most_apart, reference_zoo, together, train_zoo, zoo_step
from parity import Block, MakeOptimizer, chain, draw, fake, local, seeded, units_of
from polyshard.errors import CollectiveError
from polyshard.optim import Muon, for_matrices
from polyshard_backends.fake import FakeCall
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard

HYBRID = {"strategy": "hybrid_shard", "shard_size": 2}


@pytest.mark.parametrize(("ranks", "settings"), [(3, {}), pytest.param(4, HYBRID, marks=pytest.mark.slow)])
def test_steps_in_fp64_equal_the_formula(ranks: int, settings: dict[str, Any]) -> None:
    """In other strategies, programs are drawn (``runtime/test_random_programs.py``)."""
    trained = train_zoo(ranks, exact, **settings)
    moved = {name for name, value in seeded(Zoo).named_parameters() if not torch.equal(value, trained[name])}
    # torch's optimizers skip what has no gradient, decay included.
    assert trained.keys() - moved == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
    assert most_apart(trained, reference_zoo(ranks, exact)) < 1e-11


def test_matrices_that_are_cut_along_columns() -> None:
    def by_columns(module: nn.Module) -> Any:
        return isinstance(module, Cell) and {"placement": {"one.weight": 1, "up.weight": 1}}

    trained = train_zoo(2, exact, policy={"name": "custom", "fn": by_columns})
    assert most_apart(trained, reference_zoo(2, exact)) < 1e-11


def muon(kind: type[torch.optim.Optimizer]) -> MakeOptimizer:
    """``kind`` for matrices and AdamW for the others."""

    def made(matrices: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
        return kind(matrices, **options)

    return lambda model: together(model, made)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "settings"), [(3, {}), pytest.param(4, HYBRID, marks=pytest.mark.nightly)])
def test_steps_in_bf16_are_those_of_torchs_muon(ranks: int, settings: dict[str, Any]) -> None:
    """To within what rounding to bf16 makes.

    Newton-Schulz amplifies the rounding of what is small in a matrix by up to 3.4 a step, so that bounds from the
    arithmetic say nothing. The distance of torch's own from the formula in fp64 is what rounding makes in these steps.
    """
    # The rounding of a step is a smaller part of a longer way.
    turns = 20
    expected = reference_zoo(ranks, muon(torch.optim.Muon), turns)
    trained = train_zoo(ranks, muon(Muon), turns, **settings)
    rounding = distance(reference_zoo(ranks, muon(FormulaMuon), turns), expected)
    assert 0 < rounding < 0.05 * distance(dict(seeded(Zoo).named_parameters()), expected)
    assert distance(trained, expected) < 1.5 * rounding


@pytest.mark.slow
def test_dtype_says_what_travels_and_is_computed_with() -> None:
    expected = reference_zoo(2, exact)
    lost = [
        most_apart(train_zoo(2, lambda model, dtype=dtype: exact(model, dtype=dtype)), expected)
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    assert lost[0] < 1e-11
    assert 1e-9 < lost[1] < 1e-4
    assert 1e-4 < lost[2] < 0.2


RANKS = KeptRanks()

TIMEOUT_S = 30.0


def sharded(settings: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> nn.Module:
    config = polyshard.ShardConfig(collectives=dist.new_group(), policy=units_of(Cell), timeout_s=timeout_s, **settings)
    return polyshard.shard(seeded(Zoo), config)


def beside_the_formula(rank: int, mesh: tuple[int, ...], columns: bool) -> None:
    """``fully_shard``'s ways to cut, and the momentum as torch gathers and loads it."""
    place = {"shard_placement_fn": lambda each: Shard(1) if each.ndim > 1 else None} if columns else {}
    sharded, other = (parallel(OURS, *mesh, seed=seed, **place) for seed in (0, 1))
    torch.manual_seed(0)
    plain = Mlps().double()
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
    muon = Muon(for_matrices(sharded).matrices, dtype=torch.float64, **settings)
    formula = FormulaMuon(for_matrices(plain).matrices, **settings)
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = [(sharded, muon), (plain, formula)]
    for turn in range(3):
        for model, optimizer in pairs:
            model(draw(4, 12, turn=turn)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(as_whole(sharded.get_parameter(name)), parameter, rtol=0, atol=1e-11)
    again = Muon(for_matrices(other).matrices, dtype=torch.float64, **settings)
    set_optimizer_state_dict(other, again, get_optimizer_state_dict(sharded, muon))
    whole = StateDictOptions(full_state_dict=True)
    for model, optimizer in ((sharded, muon), (other, again)):
        state = get_optimizer_state_dict(model, optimizer, options=whole)["state"]
        for name, parameter in plain.named_parameters():
            if parameter in formula.state:
                mean = formula.state[parameter]["mean"]
                torch.testing.assert_close(state[name]["momentum_buffer"], mean, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh", "columns"),
    [(3, (3,), False), (4, (4,), True), (4, (0, 2, 2), True)],
    ids=["uneven rows", "columns", "columns of parts"],
)
def test_momentum_is_a_dtensor_for_torchs_state_dicts(ranks: int, mesh: tuple[int, ...], columns: bool) -> None:
    RANKS.run(ranks, beside_the_formula, mesh, columns)


class Failing(Muon):
    """Raises on rank 1, in the middle of its tensors."""

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("of rank 1")
        return super().transform(group, wholes, states)


def failing(rank: int, timeout_s: float) -> str:
    """The error of a step of which rank 1 gives up; its process lives on."""
    model = sharded({}, timeout_s)
    zoo_step(model, 0, rank)
    with pytest.raises((ArithmeticError, CollectiveError)) as caught:
        Failing(for_matrices(model).matrices).step()
    return type(caught.value).__name__


@pytest.mark.slow
def test_ranks_wait_for_one_that_raised_until_the_timeout() -> None:
    assert RANKS.run(2, failing, 3.0, timeout=20.0) == ["CollectiveTimeoutError", "ArithmeticError"]


# Who orthogonalises what, and what travels for it: balance, rounds, and bytes counted by collectives that record.


def wide() -> Any:
    """Matrices of several shapes, some of one row fewer than ranks, some of an odd size."""
    return chain(layers=nn.Sequential(*(Block(16, 40) for _ in range(6))), odd=nn.Linear(16, 63, bias=False))


def step_of(
    rank: int, world_size: int, dtype: torch.dtype, **settings: Any
) -> tuple[list[FakeCall], list[tuple[int, int]]]:
    """What one rank issued in the second optimizer step, and of each matrix the elements: of all, and of its piece."""
    collectives = fake(rank, world_size)
    model = polyshard.shard(
        seeded(wide).float(), polyshard.ShardConfig(collectives=collectives, policy=units_of(Block), **settings)
    )
    matrices = for_matrices(model).matrices
    muon = Muon(matrices, dtype=dtype)
    x = torch.randn(4, 16)
    for _ in range(2):
        model(x).square().mean().backward()
        collectives.calls.clear()
        muon.step()
        model.zero_grad()
    return list(collectives.calls), [(each.numel(), local(each).numel()) for each in matrices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(2, torch.bfloat16), (8, torch.float32), pytest.param(64, torch.bfloat16, marks=pytest.mark.nightly)],
    ids=str,
)
def test_an_element_of_a_matrix_travels_to_its_owner_and_back(world_size: int, dtype: torch.dtype) -> None:
    sent, pieces = 0, []
    for rank in range(world_size):
        calls, sizes = step_of(rank, world_size, dtype)
        assert {call.operation for call in calls} == {"all_to_all"}
        assert {call.dtype for call in calls} == {dtype}
        sent += sum(call.sent_nbytes for call in calls)
        pieces.append(sizes)
    numel = sum(whole for whole, _ in pieces[0])
    # At best every owner is who has most of it already.
    spared = sum(max(piece for _, piece in of_ranks) for of_ranks in zip(*pieces, strict=True))
    # Over all ranks: at most 4 bytes an element and step in bf16.
    assert 2 * dtype.itemsize * (numel - spared) <= sent <= 2 * dtype.itemsize * numel


def test_unsharded_matrices_are_orthogonalised_once_and_gathered() -> None:
    calls, _ = step_of(0, 4, torch.bfloat16, strategy="no_shard")
    assert {call.operation for call in calls} == {"all_gather"}
