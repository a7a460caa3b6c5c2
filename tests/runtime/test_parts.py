"""Embedding and head apart from the root, by themselves: what becomes a part, and when it is gathered."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    adam,
    assert_observed,
    assert_same,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    threaded,
    train_reference,
    train_sharded,
    units_of,
)
from polyshard.errors import RankMismatchError, StateError, UnshardedUseError
from polyshard.interfaces import UnitEvent, UnitOperation
from polyshard.planning import thresholds
from polyshard_backends.threaded import ThreadedWorld
from reference_models import WIDTH, WORDS, Tailed, sharded_tailed, tailed_step, units_in
from torch import nn
from torch.nn import functional

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    # Embedding and head of these models, and not their norm.
    monkeypatch.setattr(thresholds, "SMALLEST_SPLIT", WIDTH * WORDS)


small = pytest.mark.usefixtures("_small")


def units_for(model: nn.Module, **settings: Any) -> list[str]:
    """The units that two ranks make of ``model``."""
    return on_ranks(2, lambda rank, world: units_in(sharded_tailed(world, rank, model, **settings)))[0]


BLOCKS = ["blocks.0", "blocks.1"]


@small
def test_an_embedding_in_front_and_a_head_behind_are_units_of_their_own() -> None:
    assert units_for(Tailed()) == ["(root)", "embedding", *BLOCKS, "head"]
    assert units_for(Tailed(), split_root=False) == ["(root)", *BLOCKS]
    assert units_for(Tailed(), strategy="shard_grad_op") == ["(root)", "embedding", *BLOCKS, "head"]
    # Nothing is gathered there, so nothing is waited for.
    assert units_for(Tailed(), strategy="no_shard") == ["(root)", *BLOCKS]
    assert units_for(Tailed(), strategy="hybrid_shard", shard_size=1) == ["(root)", *BLOCKS]


def test_a_part_is_at_least_four_mebibytes_in_sixteen_bits() -> None:
    def large(rows: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(rows, 1024), Block(1024, 2))

    assert units_for(large(2048)) == ["0", "1"]
    assert units_for(large(2047)) == ["(root)", "1"]


@small
def test_what_several_modules_use_stays_with_the_root() -> None:
    tied = Tailed()
    tied.head.weight = tied.embedding.weight
    assert units_for(tied) == ["(root)", *BLOCKS]

    borrowed = Tailed()
    borrowed.norm.register_parameter("borrowed", borrowed.head.weight)
    assert units_for(borrowed) == ["(root)", "embedding", *BLOCKS]


@small
def test_of_several_modules_on_one_side_none_is_a_part() -> None:
    heads = Tailed()
    heads.other_head = nn.Linear(WIDTH, WORDS)
    assert units_for(heads) == ["(root)", "embedding", *BLOCKS]

    # A side is where the module was registered.
    early = nn.Module()
    early.embedding, early.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    early.blocks = nn.Sequential(Block(WIDTH))
    assert units_for(early) == ["(root)", "blocks.0"]


@small
def test_parts_may_lie_deeper_and_hold_several_modules() -> None:
    model = nn.Module()
    model.body = nn.Module()
    model.body.words = nn.ModuleDict({"embedding": nn.Embedding(WORDS, WIDTH)})
    model.body.layers = nn.ModuleList([Block(WIDTH)])
    model.tail = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
    assert units_for(model) == ["body.words.embedding", "body.layers.0", "tail"]


@small
def test_one_unit_that_was_asked_for_stays_one() -> None:
    assert on_ranks(2, lambda rank, world: units_in(sharded_copy(seeded(Tailed), rank, world)))[0] == ["(root)"]


@small
def test_what_is_ignored_does_not_count() -> None:
    model = Tailed()

    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        with world.lock:
            mine = copy.deepcopy(model)
        config = threaded(world, rank, policy=units_of(Block))
        polyshard.shard(mine, config, ignored_parameters=[mine.head.weight], ignored_modules=[mine.embedding])
        return units_in(mine)

    assert on_ranks(2, on_rank)[0] == ["(root)", *BLOCKS]


def gathers_a_step(use: str, turns: int) -> list[list[str]]:
    """The units whose gathers compute waited for, by tailed_step, on one of two ranks."""

    def on_rank(rank: int, world: ThreadedWorld) -> list[list[str]]:
        mine = sharded_tailed(world, rank, seeded(lambda: Tailed(use)))
        waited: list[list[str]] = []
        for unit in root_of(mine).units:
            unit.observers = (Waits(waited, unit.name),)
        for turn in range(turns):
            waited.append([])
            tailed_step(mine, turn, rank)
            # The backward ends by waiting for a reduction of each.
            reductions = len(root_of(mine).units)
            assert sorted(waited[-1][-reductions:]) == sorted(units_in(mine))
            del waited[-1][-reductions:]
        return waited

    return on_ranks(2, on_rank)[0]


class Waits:
    """Notes when compute waits for a unit."""

    def __init__(self, waited: list[list[str]], name: str) -> None:
        self._waited, self._name = waited, name

    def __call__(self, event: UnitEvent) -> None:
        if event.operation is UnitOperation.WAIT and event.begins:
            self._waited[-1].append(self._name)


@small
def test_the_head_is_waited_for_when_it_computes_and_not_again_in_backward() -> None:
    first, second = gathers_a_step("called", 2)
    assert first == ["(root)", "embedding", *BLOCKS, "head", "head", *BLOCKS[::-1]]
    # Its backward follows its forward at once: known from the second step on. The embedding's backward reads no weight.
    assert second == ["(root)", "embedding", *BLOCKS, "head", *BLOCKS[::-1]]


@small
def test_an_embedding_is_not_kept_for_a_backward_that_reads_no_weight() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[tuple[str, ...]]:
        mine = sharded_tailed(world, rank, seeded(Tailed), strategy="shard_grad_op")
        kept = []
        for _ in range(2):
            loss = mine(torch.zeros(1, 2, dtype=torch.int64)).sum()
            kept.append(root_of(mine).gathered)
            loss.backward()
            kept.append(root_of(mine).gathered)
        return kept

    for kept in on_ranks(2, on_rank):
        assert kept == [("(root)", *BLOCKS, "head"), (), ("(root)", *BLOCKS, "head"), ()]


def attend(module: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ module.weight.t()) @ module.weight


class Attending(nn.Module):
    """An embedding whose weight is used twice inside its own unit: by a hook, or by a method beside its forward."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH, 2), Block(WIDTH, 2))
        self.embedding.attend = MethodType(attend, self.embedding)
        if use == "hook":
            self.embedding.register_forward_hook(self.by_hook)

    def by_hook(self, module: nn.Embedding, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + attend(module, output)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embedding(tokens))
        return self.embedding.attend(x) if self.use == "method" else x


@small
@one_by_one("strategy", ["full_shard", "shard_grad_op"], "use", ["hook", "prepended hook", "method"])
def test_an_embedding_is_gathered_for_backward_where_more_than_a_lookup_computes_with_it(
    use: str, strategy: str
) -> None:
    tokens = torch.arange(8).reshape(2, 4) % WORDS

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[str], list[torch.Tensor]]:
        mine = sharded_tailed(world, rank, seeded(lambda: Attending(use)), strategy=strategy)
        if use == "prepended hook":
            mine.embedding.register_forward_hook(mine.by_hook, prepend=True)
        if use == "method":
            polyshard.register_forward_method(mine.embedding, "attend")
        train(mine)
        with polyshard.unsharded(mine):
            return units_in(mine), [parameter.detach().clone() for parameter in mine.parameters()]

    whole = seeded(lambda: Attending(use))
    if use == "prepended hook":
        whole.embedding.register_forward_hook(whole.by_hook)
    train(whole)
    for names, parameters in on_ranks(2, on_rank):
        assert "embedding" in names
        torch.testing.assert_close(parameters, list(whole.parameters()), rtol=1e-10, atol=1e-10)


@small
def test_a_head_whose_weight_somebody_else_uses_comes_with_the_root_from_then_on() -> None:
    first, second, third = gathers_a_step("its weight", 3)
    assert first == ["(root)", "embedding", *BLOCKS, "head", *BLOCKS[::-1]]
    assert second == third == ["(root)", "head", "embedding", *BLOCKS, *BLOCKS[::-1]]


@small
def test_looking_at_a_head_brings_nothing() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_tailed(world, rank, seeded(Tailed).bfloat16(), precision={"name": "mixed", "param": "fp32"})
        seen: list[Any] = []

        def look(*_: Any) -> None:
            (weight,) = mine.head.parameters()
            seen.append((weight.shape, weight.stride(), weight.dtype, weight.device.type, weight.requires_grad))

        mine.blocks[0].register_forward_hook(look)
        mine(torch.zeros(1, 2, dtype=torch.int64))
        assert seen == [((WORDS, WIDTH), (WIDTH, 1), torch.bfloat16, "cpu", True)]
        assert root_of(mine).module_states[-1].is_split

    on_ranks(2, on_rank)


@small
def test_a_part_casts_neither_what_it_takes_nor_what_it_returns() -> None:
    class Typed(Tailed):
        dtypes: tuple[torch.dtype, ...] = ()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            y = self.head(x)
            self.dtypes = (x.dtype, y.dtype)
            return y

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.dtype, ...]:
        precision = {"name": "mixed", "param": "bf16", "output": "fp64"}
        mine = sharded_tailed(world, rank, seeded(Typed), precision=precision)
        output = mine(torch.zeros(1, 2, dtype=torch.int64))
        return (*mine.dtypes, output.dtype)

    assert on_ranks(2, on_rank)[0] == (torch.bfloat16, torch.bfloat16, torch.float64)


@small
@pytest.mark.parametrize("use", ["called", "its weight", "both ways"])
def test_in_eval_mode_the_root_decides_in_which_dtype_a_part_computes(use: str) -> None:
    model = seeded(lambda: Tailed(use))
    tokens = torch.arange(6).view(2, 3)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, list[torch.Tensor]]:
        precision = {"name": "mixed", "param": "fp32", "full_precision_in_eval": True}
        mine = sharded_tailed(world, rank, model, precision=precision).eval()
        # A part's own mode counts for nothing: the inputs that it gets are the root's.
        mine.head.train()
        with torch.no_grad():
            exact = mine(tokens)
        mine.train()
        mine.head.eval()
        return exact, tailed_step(mine, 0, rank)

    expected = train_reference(model, tailed_step, 2, turns=1).observed[0]
    with torch.no_grad():
        exact = model(tokens)
    for rank, (evaluated, trained) in enumerate(on_ranks(2, on_rank)):
        torch.testing.assert_close(evaluated, exact, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(trained, expected[rank], rtol=1e-4, atol=1e-6, check_dtype=False)


@small
def test_using_a_part_outside_of_its_host_s_forward_is_refused_by_name() -> None:
    model = seeded(Tailed)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_tailed(world, rank, model)
        handle = mine.blocks[0].register_forward_pre_hook(lambda *_: mine.head.weight.sum() and None)
        with pytest.raises(UnshardedUseError, match=rf"'head\.weight' was used .* of '\(root\)' \(rank {rank}\)"):
            mine.blocks[0](torch.zeros(2, WIDTH, dtype=torch.float64))
        handle.remove()
        assert root_of(mine).gathered == ()
        return tailed_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, tailed_step, 2, turns=1))


@small
def test_what_parameters_gives_of_a_head_is_the_dtensor_that_plain_tensors_cannot_compute_with() -> None:
    class Iterates(Tailed):
        iterates = True

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            if self.iterates:
                return functional.linear(self.norm(self.embedding(tokens)), next(self.head.parameters()))
            return super().forward(tokens)

    model = seeded(Iterates)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_tailed(world, rank, model)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            tailed_step(mine, 0, rank)
        mine.iterates = False
        return tailed_step(mine, 0, rank)

    observed = on_ranks(2, on_rank)
    model.iterates = False
    assert_observed(observed, train_reference(model, tailed_step, 2, turns=1))


@small
def test_a_module_that_some_ranks_run_is_refused_and_may_stay_with_the_root() -> None:
    class Extra(Tailed):
        extra = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x) if self.extra else x

    def on_some(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        model.extra = rank == 1
        return tailed_step(model, turn, rank)

    model = seeded(Extra)
    with pytest.raises(RankMismatchError, match=r"all_gather of head(.|\n)*same calls in the same order"):
        train_sharded(model, on_some, 2, settings={"policy": units_of(Block)})
    whole = {"policy": units_of(Block), "split_root": False}
    assert_same(train_sharded(model, on_some, 2, settings=whole), train_reference(model, on_some, 2))


@small
def test_a_root_without_parameters_is_not_copied_either() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_tailed(world, rank, seeded(lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(WIDTH))))
        assert units_in(mine) == ["0", "1"]
        with pytest.raises(StateError, match=rf"deep-copied \(unit '\(root\)', rank {rank}\)"):
            copy.deepcopy(mine)

    on_ranks(2, on_rank)


@small
def test_a_budget_keeps_no_embedding_since_that_would_save_no_gather() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[str, ...]:
        mine = sharded_tailed(world, rank, seeded(Tailed), reshard_after_forward="auto", memory_budget="1 GiB")
        optimizer = adam(mine)
        for turn in range(3):
            tailed_step(mine, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        assert not root_of(mine).budget_pending
        return polyshard.report(mine).kept

    assert on_ranks(2, on_rank)[0] == ("(root)", *BLOCKS, "head")
