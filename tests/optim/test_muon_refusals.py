"""What Muon refuses, by name, before anything is sent or changed; the model is as good as before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polyshard
import pytest
import torch
from matrices import Cell, Zoo, exact, most_apart, reference_zoo, whole_parameters, zoo_step
from parity import Net, draw, local, on_ranks, seeded, sharded_copy, square_step, train, units_of
from polyshard.errors import (
    ConfigError,
    ConfigTypeError,
    PluginContractError,
    RankMismatchError,
    StateError,
    UnsupportedError,
)
from polyshard.interfaces import CollectivesCapabilities, PluginContext
from polyshard.optim import Muon, WholeTensorOptimizer, for_matrices
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Cell)}
Make = Callable[[nn.Module], torch.optim.Optimizer]


def all_of(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model.parameters())


def flat_ones(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(polyshard.flat_parameters(model))


def with_settings(**settings: Any) -> Make:
    return lambda model: Muon(for_matrices(model).matrices, **settings)


def with_a_bad_group(model: nn.Module) -> torch.optim.Optimizer:
    return Muon([{"params": for_matrices(model).matrices, "adjust_lr_fn": "match_rms"}])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (all_of, ["2D parameters", "size: (6,) of torch.float64", "for_matrices"]),
        (flat_ones, ["2D parameters", "for_matrices"]),
        (lambda _: Muon([nn.Parameter(torch.ones(2, 3, 4, 5))]), ["2D parameters", "size: (2, 3, 4, 5)"]),
        (lambda _: Muon([nn.Parameter(torch.zeros(2, 3).cfloat())]), ["(2, 3) of torch.complex64"]),
        (with_settings(lr=-1.0), ["lr of Muon should be a number >= 0 but is -1.0"]),
        (with_settings(lr="0.1"), ["lr of Muon", "'0.1'"]),
        (with_settings(dtype="bf16"), ["torch.dtype, not 'bf16'"]),
        (with_settings(lr=torch.ones(2)), ["1-element", "(2,)"]),
        (with_settings(momentum=float("nan")), ["momentum of Muon", "nan"]),
        (with_settings(weight_decay=-0.1), ["weight_decay of Muon"]),
        (with_settings(adjust_lr_fn="match_rms"), ["'match_rms'", "'match_rms_adamw'"]),
        (with_settings(ns_steps=100), ["fewer than 100 ns_steps", "100"]),
        (with_settings(ns_steps=2.5), ["fewer than 100 ns_steps", "2.5"]),
        (with_settings(ns_coefficients=(1.0, 2.0)), ["three ns_coefficients", "(1.0, 2.0)"]),
        (with_settings(dtype=torch.int8), ["floating-point", "torch.int8"]),
        (with_a_bad_group, ["'match_rms'"]),
    ],
)
def test_what_cannot_be_a_muon(make: Make, words: list[str]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Zoo), rank, world, **BLOCKS)
        with pytest.raises((ConfigError, ConfigTypeError)) as caught:
            make(model)
        return str(caught.value)

    messages = on_ranks(2, on_rank)
    assert len(set(messages)) == 1
    for word in words:
        assert word in messages[0]


def test_what_for_matrices_leaves_out_is_modules_of_the_model() -> None:
    model = seeded(Zoo)
    assert model.last.weight in set(for_matrices(model).matrices)
    split = for_matrices(model, leave_out=[model.last, model.cells[0]])
    left_out = {id(parameter) for parameter in split.others}
    assert {id(model.last.weight), id(model.cells[0].up.weight)} <= left_out
    assert left_out.isdisjoint(map(id, split.matrices))
    for stranger in (["last"], "last", model.last, [model.last.weight]):
        with pytest.raises(ConfigTypeError, match=r"list of modules, such as \[model\.head\]"):
            for_matrices(model, leave_out=stranger)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a Linear that is not inside the model"):
        for_matrices(model, leave_out=[nn.Linear(2, 2)])
    with pytest.raises(ConfigTypeError, match="takes a model, not a list"):
        for_matrices(list(model.parameters()))  # type: ignore[arg-type]


def test_a_closed_model() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Zoo), rank, world, **BLOCKS)
        muon = Muon(for_matrices(model).matrices)
        zoo_step(model, 0, rank)
        muon.step()
        polyshard.close(model)
        with pytest.raises(StateError) as caught:
            muon.step()
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert "Muon.step() came after polyshard.close" in message


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    model = seeded(Zoo)
    muon = Muon(for_matrices(model).matrices)
    with pytest.raises(ConfigError, match="2D parameters"):
        muon.add_param_group({"params": [model.norm.weight]})
    assert len(muon.param_groups) == 1
    zoo_step(model, 0, 0)
    muon.step()


def usable(model: nn.Module, rank: int, ranks: int) -> bool:
    """Whether ``model``, which never stepped, trains like one that nothing was refused of."""
    model.zero_grad()
    optimizer = exact(model)
    train(model, optimizer, zoo_step, rank, 3)
    return most_apart(whole_parameters(model), reference_zoo(ranks, exact, 3)) < 1e-12


def reversed_on(rank: int, model: nn.Module) -> torch.optim.Optimizer:
    matrices = for_matrices(model).matrices
    return Muon(matrices[::-1] if rank == 1 else matrices, dtype=torch.float64)


def fewer_on(rank: int, model: nn.Module) -> torch.optim.Optimizer:
    return Muon(for_matrices(model).matrices[rank:], dtype=torch.float64)


def other_groups_on(rank: int, model: nn.Module) -> torch.optim.Optimizer:
    matrices = for_matrices(model).matrices
    return Muon([{"params": matrices[: 3 + rank]}, {"params": matrices[3 + rank :]}], dtype=torch.float64)


def another_dtype_on(rank: int, model: nn.Module) -> torch.optim.Optimizer:
    return Muon(for_matrices(model).matrices, dtype=torch.float64 if rank else torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("make", [reversed_on, fewer_on, other_groups_on, another_dtype_on])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_ranks_that_differ_all_say_so(make: Callable[[int, nn.Module], torch.optim.Optimizer], strategy: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[str, bool]:
        model = sharded_copy(seeded(Zoo), rank, world, strategy=strategy, **BLOCKS)
        zoo_step(model, 0, rank)
        with pytest.raises(RankMismatchError) as caught:
            make(rank, model).step()
        return str(caught.value), usable(model, rank, 3)

    for message, is_usable in on_ranks(3, on_rank):
        assert "Muon was given other parameters, or in another order, on some ranks" in message
        assert is_usable


class NoExchange(FakeCollectives):
    """Collectives of before ``all_to_all``."""

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return replace(super().capabilities, exchanges=False)


def test_collectives_that_cannot_exchange() -> None:
    collectives = NoExchange(PluginContext("old", torch.device("cpu")), 1, 4)
    model = polyshard.shard(seeded(Zoo), polyshard.ShardConfig(collectives=collectives, **BLOCKS))
    muon = Muon(for_matrices(model).matrices)
    zoo_step(model, 0, 1)
    before = [local(parameter).detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"Muon brings .* all_to_all, which .*:NoExchange .* \(rank 1\)"):
        muon.step()
    assert all(torch.equal(local(parameter), was) for parameter, was in zip(model.parameters(), before, strict=True))
    assert not muon.state
    # Whole on every rank, they need none.
    other = polyshard.shard(
        seeded(Zoo),
        polyshard.ShardConfig(
            collectives=NoExchange(PluginContext("old", torch.device("cpu")), 1, 4), strategy="no_shard", **BLOCKS
        ),
    )
    zoo_step(other, 0, 1)
    Muon(for_matrices(other).matrices).step()


class Plain(WholeTensorOptimizer):
    """Steps along gradients; a base for what subclasses may get wrong."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        return wholes

    def update(
        self,
        group: Mapping[str, Any],
        shape: tuple[int, ...],
        parameters: Sequence[nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        for parameter, result in zip(parameters, results, strict=True):
            parameter.add_(result, alpha=-group["lr"])


class Summing(Plain):
    """Returns one number a tensor."""

    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        return wholes.flatten(1).sum(1)


def test_a_flat_parameter_given_to_an_optimizer_of_any_tensors() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        # Of which every parameter is used.
        model = sharded_copy(seeded(Net), rank, world)
        optimizer = Plain(polyshard.flat_parameters(model))
        square_step(model, 0, rank)
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        assert "Plain needs whole tensors, but was given the flat parameter of unit" in message
        assert f"(rank {rank})" in message


def test_a_transform_of_another_shape() -> None:
    layer = nn.Linear(3, 2)
    layer(draw(4, 3).float()).sum().backward()
    with pytest.raises(PluginContractError, match=r"Summing returned \(1,\) for tensors of \(1, 2, 3\)"):
        Summing(layer.parameters()).step()
