"""RNN modules, which keep a list of their weights beside ``_parameters``."""

from __future__ import annotations

import copy
from typing import Any

import polyshard
import torch
from parity import (
    adam,
    assert_all_close,
    assert_parity,
    draw,
    mean_square,
    on_ranks,
    one_by_one,
    seeded,
    sharded_copy,
    stepping,
    units_of,
)
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence


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


def test_a_recurrent_weight_replaced_between_steps_is_honoured() -> None:
    model = seeded(lambda: Recurrent(nn.GRU))
    new = draw(15, 5, turn=4)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        mine = sharded_copy(model, rank, world, policy=units_of(nn.GRU))
        mine(draw(2, 6, 3))
        old: Any = mine.rnn.weight_hh_l0
        value = distribute_tensor(new.clone(), old.device_mesh, old.placements, src_data_rank=None)
        mine.rnn.weight_hh_l0 = nn.Parameter(value)
        return mine(draw(2, 6, 3)).detach()

    expected = copy.deepcopy(model)
    with torch.no_grad():
        expected.rnn.weight_hh_l0.copy_(new)
    assert_all_close(on_ranks(2, on_rank), expected(draw(2, 6, 3)).detach())


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
