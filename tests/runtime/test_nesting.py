"""Units inside units, shared modules and parameters, buffers: against the unsharded model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    adam,
    assert_all_close,
    assert_observed,
    assert_parity,
    draw,
    mean_square,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    stepping,
    threaded,
    train_reference,
    units_of,
    warns_for,
)
from polyshard import ShardConfig
from polyshard.errors import ConfigError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


@pytest.mark.parametrize("policy", [units_of(Block), "always", "never"])
def test_one_module_in_two_places(policy: Any) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = Block(3)
            self.left = nn.Sequential(nn.Linear(3, 3), shared)
            self.right = nn.Sequential(shared, nn.Linear(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) * self.right(x)

    assert_parity(seeded(Root), settings={"policy": policy}, optimizer=adam)


def test_buffers_are_each_rank_s_own_and_follow_batch_statistics() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.norm(x))

    model = seeded(Normed)
    assert_parity(model, settings={"policy": units_of(Block, nn.BatchNorm1d)})

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Block))
        square_step(mine, 0, rank)
        return dict(mine.named_buffers())

    for rank, buffers in enumerate(on_ranks(2, on_rank)):
        expected = copy.deepcopy(model)
        square_step(expected, 0, rank)
        torch.testing.assert_close(buffers, dict(expected.named_buffers()), rtol=1e-12, atol=1e-12)


class Generator(Net):
    """Has further methods that compute."""

    def generate(self, x: torch.Tensor, *, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = torch.tanh(self(x) @ self.last.weight[:, :3])
        return x

    def penalty(self) -> torch.Tensor:
        return self.first.weight.square().sum() + self.last.weight.abs().sum()


@one_by_one("strategy", STRATEGIES, "world_size", [3, 1])
def test_a_registered_method_sees_whole_parameters(world_size: int, strategy: str) -> None:
    model = seeded(Generator)
    with torch.no_grad():
        expected = model.generate(draw(4, 3), steps=3)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        mine = sharded_copy(model, rank, world, policy=units_of(Block), strategy=strategy)
        if world_size > 1:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                mine.generate(draw(4, 3), steps=3)
        polyshard.register_forward_method(mine, "generate")
        with torch.no_grad():
            generated = mine.generate(draw(4, 3), steps=3)
        assert root_of(mine).gathered == ()
        square_step(mine, 0, rank)
        return generated

    with warns_for(world_size, {"strategy": strategy}):
        assert_all_close(on_ranks(world_size, on_rank), expected)


def test_a_registered_method_trains_with_the_forward() -> None:
    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        polyshard.shard(model, config)
        polyshard.register_forward_method(model, "penalty")
        return model

    step = stepping(lambda model, x, turn, rank: model(x).square().mean() + 0.1 * model.penalty(), grad=False)

    assert_parity(seeded(Generator), step, settings={"policy": units_of(Block)}, wrap=wrap)


def test_registering_what_cannot_compute_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(Generator), rank, world, policy=units_of(Block))
        with pytest.raises(ConfigError, match="does not have a method penalties"):
            polyshard.register_forward_method(mine, "penalties")
        with pytest.raises(StateError, match="needs a sharded module"):
            polyshard.register_forward_method(mine.first, "forward")

    on_ranks(2, on_rank)


def test_a_composed_block_may_be_used_before_it_joins_a_root() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(model)
        config = threaded(world, rank)
        for block in mine.blocks:
            polyshard.fully_shard(block, config)
        mine.blocks[0](draw(4, 5)).sum().backward()
        mine.blocks[0].zero_grad()
        polyshard.fully_shard(mine, config)
        return square_step(mine, 0, rank)

    assert_observed(on_ranks(2, on_rank), train_reference(model, square_step, 2, turns=1))


# Copies of modules: of those inside of a unit with ``DTensor`` parameters, of whole ones plain, of sharded none.


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("copies", [copy.deepcopy, pickled, saved])
def test_a_module_inside_of_a_unit(copies: Callable[[nn.Module], Any], strategy: str) -> None:
    source = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(source, rank, world, policy=units_of(Block), strategy=strategy)
        for turn in range(2):
            for name in ("last", "blocks.1.up"):
                mine, copied = model.get_submodule(name), copies(model.get_submodule(name))
                for key, parameter in mine.named_parameters():
                    there: Any = copied.get_parameter(key)
                    assert isinstance(there, DTensor)
                    assert isinstance(there, nn.Parameter)
                    assert torch.equal(there.full_tensor(), parameter.full_tensor())
                    assert there.placements == parameter.placements
                    assert torch.equal(there.to_local(), parameter.to_local())
                    assert there.to_local().data_ptr() != parameter.to_local().data_ptr()
            with pytest.raises(StateError, match=rf"A sharded module cannot be .*rank {rank}"):
                copies(model.blocks)
            square_step(model, turn, rank)
            # Torch copies no DTensor with a gradient.
            model.zero_grad()

    on_ranks(2, on_rank)


def test_what_is_whole_is_copied_as_a_plain_module() -> None:
    x = draw(2, 3)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, policy=units_of(Block))
        with polyshard.unsharded(model):
            copies = [copy.deepcopy(model.first), pickled(model.first)]
        # A copy belongs to no sharded model.
        copies += [copy.deepcopy(each) for each in copies]
        return [each(x) for each in copies]

    expected = seeded(Net).first(x)
    for found in on_ranks(2, on_rank):
        for each in found:
            torch.testing.assert_close(each, expected)


def test_a_module_without_parameters_and_a_parameter_are_copied_as_before() -> None:
    model = polyshard.shard(
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), ShardConfig(collectives={"name": "fake", "world_size": 2})
    )
    assert copy.deepcopy(model[1]).p == 0.5
    weight: Any = model[0].weight
    assert torch.equal(copy.deepcopy(weight).to_local(), weight.to_local())


# RNN modules, which keep a list of their weights beside ``_parameters``.


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.rnn = kind(4, 5, batch_first=True, **options)
        width = options.get("proj_size") or 5
        self.last = nn.Linear(width * (2 if options.get("bidirectional") else 1), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, state = self.rnn(self.first(x))
        last = state[0] if isinstance(state, tuple) else state
        return self.last(output) + last.mean()


step = stepping(mean_square, 2, 6, 3)


@one_by_one(
    "kind, options",
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"proj_size": 3}),
        (nn.GRU, {"num_layers": 2}),
        (nn.GRU, {"bias": False}),
        (nn.RNN, {}),
    ],
    "policy",
    [units_of(nn.LSTM, nn.GRU, nn.RNN), "never"],
)
def test_recurrent_layers_as_units_and_inside_units(
    kind: type[nn.RNNBase], options: dict[str, Any], policy: Any
) -> None:
    assert_parity(
        seeded(lambda: Recurrent(kind, **options)),
        step,
        world_size=3,
        turns=2,
        optimizer=adam,
        settings={"policy": policy},
    )


def test_packed_sequences_go_in_and_out_of_a_unit() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.rnn = nn.GRU(4, 5, batch_first=True)
            self.last = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(self.first(x), torch.tensor([6, 4]), batch_first=True)
            output, _ = self.rnn(packed)
            assert isinstance(output, PackedSequence)
            return self.last(pad_packed_sequence(output, batch_first=True)[0])

    assert_parity(seeded(Packed), step, settings={"policy": units_of(nn.GRU)})


def test_an_lstm_from_the_meta_device_is_materialised() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        with world.lock:
            torch.manual_seed(5)
            with torch.device("meta"):
                mine = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5)).double()
            collectives = {"name": "threaded", "world": world, "rank": rank}
            config = polyshard.ShardConfig(collectives=collectives, policy=units_of(nn.LSTM), device="cpu")
        polyshard.shard(mine, config)
        assert not any(parameter.is_meta for parameter in mine.parameters())
        with polyshard.unsharded(mine):
            whole = copy.deepcopy([parameter.detach() for parameter in mine.parameters()])
        return [*whole, mine(torch.ones(2, 1, 3, dtype=torch.float64))[0].detach()]

    for *whole, output in on_ranks(2, on_rank):
        plain = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5)).double()
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), whole, strict=True):
                parameter.copy_(value)
            expected = plain(torch.ones(2, 1, 3, dtype=torch.float64))[0]
        assert float(expected.abs().max()) > 1e-3
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_an_lstm_does_not_take_its_gathered_weights_for_changed() -> None:
    """Else it would move them into memory of its own on CUDA, where gathers do not reach."""

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(lambda: Recurrent(nn.LSTM)), rank, world, policy=units_of(nn.LSTM))
        moved: list[int] = []
        lstm = mine.rnn
        lstm.__dict__["flatten_parameters"] = lambda: moved.append(1)
        for turn in range(2):
            step(mine, turn, rank)
        assert moved == []

    on_ranks(2, on_rank)
