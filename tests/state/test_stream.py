"""Whole weights handed out unit by unit between steps, and written back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    draw,
    fake,
    on_ranks,
    one_by_one,
    seeded,
    sgd,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    units_of,
    whole,
)
from polyshard.errors import ConfigError, ConfigTypeError, RankMismatchError, StateError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
#: Each strategy, and each number of ranks.
SETTINGS: list[tuple[int, dict[str, Any]]] = [
    (3, {"strategy": "full_shard"}),
    (2, {"strategy": "shard_grad_op"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
    (4, {"strategy": "full_shard", "offload": "cpu"}),
    # What travels in a step is narrower than the weights.
    (2, {"strategy": "full_shard", "precision": "bf16"}),
    (3, {"strategy": "shard_grad_op", "precision": "int8"}),
    (2, {"strategy": "no_shard"}),
    (1, {"strategy": "no_shard"}),
]


class Odd(nn.Module):
    """Tied and empty parameters, a scalar, persistent and other buffers, and one parameter that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.alone = nn.Parameter(torch.randn(4), requires_grad=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("cache", torch.randn(5), persistent=False)


def expected(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """What is handed out of a plain model."""
    wanted = {name: each.detach().clone() for name, each in model.named_parameters()}
    wanted |= {name: each for name, each in model.state_dict().items() if name in dict(model.named_buffers())}
    return {name: each.to(dtype) if dtype and each.is_floating_point() else each for name, each in wanted.items()}


def collected(model: nn.Module, **settings: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for names, tensors in polyshard.stream(model, **settings):
        assert len(names) == len(tensors)
        assert not found.keys() & set(names)
        found.update(zip(names, tensors, strict=True))
    return found


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(("world_size", "settings"), SETTINGS)
def test_whole_weights_are_those_of_the_unsharded_model(world_size: int, settings: dict[str, Any]) -> None:
    plain = seeded(Odd)

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, torch.Tensor]]:
        with world.lock:
            mine = copy.deepcopy(plain)
        config = polyshard.ShardConfig(
            collectives={"name": "threaded", "world": world, "rank": rank}, **BLOCKS, **settings
        )
        model = polyshard.shard(mine, config, ignored_parameters=[mine.alone])
        for tensor in collected(model).values():
            # Writes to what is handed out reach no weights.
            tensor.zero_()
        return [
            collected(model),
            collected(model, dtype=torch.bfloat16, bucket_nbytes=1200),
            collected(model, dtype=torch.float32, bucket_nbytes=10),
        ]

    for kept, narrow, single in on_ranks(world_size, on_rank):
        assert_equal(kept, expected(plain))
        assert_equal(narrow, expected(plain, torch.bfloat16))
        assert_equal(single, expected(plain, torch.float32))


class Spy(FakeCollectives):
    """Says how many gathers were launched so far."""

    @property
    def gathers(self) -> list[int]:
        """Elements of each."""
        return [call.numel for call in self.calls if call.operation == "all_gather"]


def test_a_unit_and_a_bucket_are_one_launch() -> None:
    collectives = Spy(PluginContext("fake", torch.device("cpu")), 0, 4)
    model = polyshard.shard(seeded(lambda: Net(blocks=6)), polyshard.ShardConfig(collectives=collectives, **BLOCKS))
    # Each parameter is a gather: the outermost module has four, and each block three.
    parameters, sizes = 4 + 6 * 3, []
    collectives.calls.clear()
    collectives.batches.clear()
    for names, _ in polyshard.stream(model):
        # The next one is on its way.
        sizes.append(len(collectives.gathers))
        assert names
    assert sizes == [7, 10, 13, 16, 19, 22, 22]
    assert list(collectives.batches) == [4, 3, 3, 3, 3, 3, 3]
    assert len(collectives.gathers) == parameters
    assert {call.dtype for call in collectives.calls} == {torch.float64}

    collectives.calls.clear()
    collectives.batches.clear()
    # A block has 77 elements of 4 bytes: three are at most 1,000 bytes together. The outermost module's own has 32.
    parts = [len(names) for names, _ in polyshard.stream(model, dtype=torch.float32, bucket_nbytes=1000)]
    assert parts == [4 + 2 * 3, 3 * 3, 1 * 3]
    assert list(collectives.batches) == [4 + 2 * 3, 3 * 3, 3]
    assert len(collectives.gathers) == parameters
    assert {call.dtype for call in collectives.calls} == {torch.float32}

    collectives.calls.clear()
    wanted = [
        names for names, _ in polyshard.stream(model, names=lambda n: n[7:] if n.startswith("blocks.4") else None)
    ]
    assert wanted == [["4.up.weight", "4.down.weight", "4.up.bias"]]
    assert len(collectives.gathers) == 3


def test_the_narrower_dtype_travels() -> None:
    """Where weights are handed out in a wider one than they are kept in, too."""
    collectives = Spy(PluginContext("fake", torch.device("cpu")), 0, 2)
    model = polyshard.shard(
        seeded(Net).bfloat16(), polyshard.ShardConfig(collectives=collectives, **BLOCKS, check_ranks=False)
    )
    collectives.calls.clear()
    assert {each.dtype for each in collected(model, dtype=torch.float32).values()} == {torch.float32}
    assert {call.dtype for call in collectives.calls} == {torch.bfloat16}


def live_nbytes(least: int) -> int:
    """Bytes of all storages of at least ``least`` bytes that are alive."""
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and not each.is_meta and each.untyped_storage().nbytes() >= least:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("inside", [False, True])
def test_two_units_are_whole_at_a_time(inside: bool) -> None:
    """However the caller's own variables refer to the tensors of the unit before."""
    width, blocks = 64, 8
    whole_unit = 4 * 2 * width * width

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))

    collectives = fake()
    model = nn.Sequential(*(block() for _ in range(blocks)))
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=units_of(nn.Sequential)))
    before = live_nbytes(whole_unit)
    most = 0
    for _, tensors in polyshard.stream(model):
        most = max(most, live_nbytes(whole_unit))
        for tensor in tensors if inside else ():
            assert tensor.shape == (width, width)
    assert before == 0
    assert most == 2 * whole_unit


def test_ranks_that_get_nothing_hold_no_whole_unit() -> None:
    width, world_size = 64, 4

    def on_rank(rank: int, world: ThreadedWorld) -> int:
        plain = seeded(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3))))
        model = polyshard.shard(plain, threaded(world, rank, policy=units_of(nn.Linear)))
        gc.collect()
        most = 0
        for _ in polyshard.stream(model, ranks=[1]):
            # Of all ranks together. A look by another one would keep alive what it finds.
            most = max(most, live_nbytes(8 * width * width) if rank == 1 else 0)
        return most

    assert max(on_ranks(world_size, on_rank)) == 2 * 8 * width * width


def test_tensors_that_are_kept_stay_as_they_were() -> None:
    plain = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[Any], dict[str, torch.Tensor], list[Any]]:
        model = sharded_copy(plain, rank, world, **BLOCKS)
        lists, kept = [], {}
        for names, tensors in polyshard.stream(model):
            lists.append(tensors)
            kept.update({name: each for name, each in zip(names, tensors, strict=True) if "up" in name})
        # The model's own are not written through them.
        for tensor in kept.values():
            tensor.add_(1)
        return lists, kept, [each.untyped_storage().nbytes() - each.nbytes for each in kept.values()]

    for lists, kept, more in on_ranks(2, on_rank):
        assert not any(lists)
        assert not any(more)
        assert_equal(kept, {name: each.detach() + 1 for name, each in plain.named_parameters() if "up" in name})


@one_by_one(
    "ranks, receivers",
    [([1, 2], {1, 2}), ("hosts", {0}), ((3,), {3})],
    "settings",
    [SETTINGS[2][1], SETTINGS[3][1], {}, {"strategy": "no_shard"}],
)
def test_some_ranks_get_weights_and_others_only_take_part(
    settings: dict[str, Any], ranks: Any, receivers: set[int]
) -> None:
    plain = seeded(Odd)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[int, dict[str, torch.Tensor]]:
        model = sharded_copy(plain, rank, world, **BLOCKS, **settings)
        parts, found = 0, {}
        for names, tensors in polyshard.stream(model, ranks=ranks):
            parts += 1
            found.update(zip(names, tensors, strict=True))
        return parts, found

    for rank, (parts, got) in enumerate(on_ranks(4, on_rank)):
        # The outermost unit, its frozen parameter, its scalar, three blocks, buffers.
        assert parts == 7
        assert_equal(got, expected(plain) if rank in receivers else {})


def model_loss(model: nn.Module, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(draw(4, 3, rank=rank)).square().mean()
    return loss


REFUSED: dict[str, Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]] = {
    "A forward came while a polyshard.stream() of the model is open": lambda m, *_: m(torch.ones(2, 3).double()),
    "A backward came while": lambda _m, _o, loss: loss.backward(),
    "stream() came while a polyshard.stream()": lambda m, *_: polyshard.stream(m),
    "unsharded() came while": lambda m, *_: polyshard.unsharded(m).__enter__(),
    "get_model_state_dict() came while": lambda m, *_: polyshard.state.get_model_state_dict(m),
    "close() came while": lambda m, *_: polyshard.close(m),
    "was to update 'first.weight' inside of polyshard.stream()": lambda _m, optimizer, _l: optimizer.step(),
}


@pytest.mark.parametrize("words", REFUSED)
def test_whatever_changes_or_gathers_weights_is_refused_while_a_stream_is_open(words: str) -> None:
    trained = train_reference(seeded(Net), square_step, 2, turns=2).parameters

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        optimizer = sgd(model)
        stream = polyshard.stream(model)
        square_step(model, 0, rank)
        loss = model_loss(model, rank)
        next(stream)
        with pytest.raises(StateError) as caught:
            REFUSED[words](model, optimizer, loss)
        assert words in str(caught.value)
        assert f"rank {rank}" in str(caught.value)
        # It goes on, and ends.
        assert len(list(stream)) == 3
        optimizer.step()
        optimizer.zero_grad()
        again = polyshard.stream(model)
        next(again)
        again.close()
        square_step(model, 1, rank)
        optimizer.step()
        return whole(model)

    for got in on_ranks(2, on_rank):
        torch.testing.assert_close(got, trained, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": torch.int8}, ["dtype must be", "torch.int8"]),
        ({"bucket_nbytes": 0}, ["bucket_nbytes must be", "0"]),
        ({"names": "blocks.*"}, ["names must be a function", "blocks.*"]),
        ({"names": lambda name: 3}, ["names('first.weight') is 3"]),
        ({"names": lambda name: name[-4:]}, ["gives 'ight' to 'first.weight' and to"]),
        ({"ranks": "first"}, ["ranks must be", "'first'"]),
        ({"ranks": [2]}, ["numbers of the model's 2 ranks", "[2]"]),
        ({"ranks": []}, ["ranks must be", "[]"]),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_the_call(settings: dict[str, Any], words: list[str]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        with pytest.raises((ConfigError, ConfigTypeError)) as caught:
            polyshard.stream(model, **settings)
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        for word in (*words, f"(rank {rank})"):
            assert word in message


@pytest.mark.parametrize("call", ["load_stream", "set_model_state_dict", "get_state_dict", "save", "load", "load_dcp"])
@pytest.mark.parametrize(("where", "words"), [("blocks.1", "the inner one 'blocks.1'"), ("first", "is not sharded")])
def test_a_module_inside_of_the_model_is_refused_by_name(call: str, where: str, words: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        calls: dict[str, Callable[[nn.Module], Any]] = {
            "load_stream": lambda module: polyshard.load_stream(module, []),
            "get_state_dict": lambda module: polyshard.state.get_state_dict(module, sgd(module)),
            "set_model_state_dict": lambda module: polyshard.state.set_model_state_dict(module, {}),
            "save": lambda module: polyshard.checkpoint.save("never-made", 1, module),
            "load": lambda module: polyshard.checkpoint.load("never-made", module),
            "load_dcp": lambda module: polyshard.checkpoint.load_dcp(Path("never-made"), module),
        }
        with pytest.raises(StateError) as caught:
            calls[call](model.get_submodule(where))
        return str(caught.value)

    for message in on_ranks(2, on_rank):
        assert f"{call}() needs" in message
        assert words in message


@pytest.mark.parametrize(("world_size", "settings"), SETTINGS)
def test_whole_weights_are_written_back_in_place(world_size: int, settings: dict[str, Any]) -> None:
    other = seeded(Odd, seed=7)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Odd), rank, world, **BLOCKS, **settings)
        places = [each.data_ptr() for each in model.parameters()]
        # Of another dtype, in another order, and with tied ones under both names.
        pairs = [(name, each.float()) for name, each in reversed(other.state_dict().items())]
        assert polyshard.load_stream(model, iter(pairs)) == polyshard.state.Unmatched()
        assert [each.data_ptr() for each in model.parameters()] == places
        return collected(model)

    wanted = {name: each.float().to(each.dtype) for name, each in expected(other).items()}
    for got in on_ranks(world_size, on_rank):
        assert_equal(got, wanted)


def given(change: Callable[[dict[str, torch.Tensor]], Any]) -> list[tuple[str, torch.Tensor]]:
    """The pairs of a whole model of zeros, but for what ``change`` does to them."""
    state = {name: torch.zeros_like(each) for name, each in seeded(Odd).state_dict().items()}
    found = change(state)
    return [*state.items(), *(found if isinstance(found, list) else [])]


@pytest.mark.parametrize("form", [list, iter])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: [("lost", torch.zeros(2))], ["got 'lost', which the model lacks"]),
        (lambda state: [("mean", torch.zeros(5))], ["got 'mean' twice"]),
        (lambda state: state.update(scale=torch.zeros(1)), ["'scale' in shape (1,)", "the model has ()"]),
        (lambda state: state.pop("blocks.1.up.bias"), ["got no 'blocks.1.up.bias'"]),
        (lambda state: state.update(mean=3), ["a pair of str and int"]),
        (lambda state: state.update({"head.weight": torch.ones(11, 5)}), ["other values for 'head.weight'"]),
    ],
)
def test_pairs_that_do_not_fit_are_refused_by_name(
    form: Callable[[Any], Any], change: Callable[[dict[str, torch.Tensor]], Any], words: list[str]
) -> None:
    plain = seeded(Odd)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[str, dict[str, torch.Tensor]]:
        model = sharded_copy(plain, rank, world, **BLOCKS)
        with pytest.raises((ConfigError, ConfigTypeError)) as caught:
            polyshard.load_stream(model, form(given(change)))
        return str(caught.value), collected(model)

    for rank, (message, after) in enumerate(on_ranks(2, on_rank)):
        for word in (*words, f"(rank {rank})"):
            assert word in message
        if form is list:
            # Nothing was written.
            assert_equal(after, expected(plain))


def test_names_that_do_not_match_are_told_where_that_is_allowed() -> None:
    plain = seeded(Odd)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[Any, dict[str, torch.Tensor]]:
        model = sharded_copy(plain, rank, world, **BLOCKS)
        pairs = given(lambda state: [("lost", state.pop("mean"))])
        return polyshard.load_stream(model, pairs, strict=False), collected(model)

    for unmatched, after in on_ranks(2, on_rank):
        assert unmatched == polyshard.state.Unmatched(missing=("mean",), unexpected=("lost",))
        wanted = {name: each if name == "mean" else torch.zeros_like(each) for name, each in expected(plain).items()}
        assert_equal(after, wanted)


def test_ranks_that_give_or_ask_for_something_else_or_fail_are_told() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        model = sharded_copy(seeded(Odd), rank, world, **BLOCKS)
        messages = []
        for call in (
            lambda: polyshard.stream(model, dtype=torch.bfloat16 if rank else None),
            lambda: polyshard.load_stream(model, given(lambda state: rank and state.pop("mean")), strict=False),
            lambda: polyshard.load_stream(model, given(lambda state: rank and state.update(scale=torch.zeros(1)))),
        ):
            with pytest.raises((RankMismatchError, ConfigError)) as caught:
                call()
            messages.append(str(caught.value))
        return messages

    (dtype, names, shape), (*_, own) = on_ranks(2, on_rank)
    assert "'dtype' is None on rank 0, and torch.bfloat16 on rank 1" in dtype
    assert "'names' is" in names
    assert "failed on other ranks" in shape
    assert "'scale' in shape (1,)" in shape
    assert "'scale' in shape (1,)" in own
