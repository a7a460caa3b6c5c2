"""Gathers of eight bits with a scale a block: what arrives, what travels, and that models train with it.

Twin on CUDA: ``gpu/test_eight_bits_cuda.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import polyshard
import pytest
import torch
from encodings_of_gathers import CASES, Watched, decoded
from parity import Block, Net, draw, local, on_ranks, seeded, sharded_copy, units_of
from polyshard.interfaces import PluginContext, PrecisionPlugin, UnitSpec
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.block_codec import BlockCode, Number
from polyshard_plugins.block_scaled import BlockScaled, Fp8, Int8
from polyshard_testing import PrecisionSuite
from torch import nn

PRECISIONS: dict[str, type[BlockScaled]] = {"int8": Int8, "fp8": Fp8}
BLOCKS = {"policy": units_of(Block)}


def context(name: str) -> PluginContext:
    return PluginContext(name, torch.device("cpu"))


def plugin(name: str, **options: Any) -> BlockScaled:
    """One that encodes units of any size."""
    return PRECISIONS[name](context(name), **{"min_numel": 0, **options})


def sent_and_back(shard: torch.Tensor, name: str, block: int) -> torch.Tensor:
    """What arrives in fp32 of ``shard`` (``[numel]``)."""
    code = BlockCode(Number(name), block)
    message = torch.full((1, code.nbytes(shard.numel())), 77, dtype=torch.uint8)
    code.encode(message[0], shard)
    out = torch.full((1, shard.numel()), math.nan)
    code.decode(message, out)
    return out[0]


class TestInt8(PrecisionSuite):
    encoding_tolerance = 0.0065  # half a step of 1 in 127, and half a unit of bf16

    def make(self) -> PrecisionPlugin:
        return plugin("int8")


class TestFp8(PrecisionSuite):
    encoding_tolerance = 0.067  # half a step of 1 in 8 of the largest, and half a unit of bf16

    def make(self) -> PrecisionPlugin:
        return plugin("fp8")


@pytest.mark.slow
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("case", CASES)
def test_what_arrives_follows_the_formula(case: str, name: str, block: int) -> None:
    shard = CASES[case]()
    torch.testing.assert_close(
        sent_and_back(shard, name, block).double(), decoded(shard, name, block), rtol=3e-7, atol=0.0, equal_nan=True
    )


def unit(numel: int, shard_numel: int, **changes: Any) -> UnitSpec:
    fields: dict[str, Any] = {
        "name": "layers.0",
        "module_class": nn.Linear,
        "parameter_names": ("layers.0.weight",),
        "numel": numel,
        "shard_numel": shard_numel,
        "master_dtype": torch.float32,
        "device": torch.device("cpu"),
        "is_root": False,
    }
    return UnitSpec(**(fields | changes))


def test_units_that_would_gain_nothing_travel_as_they_compute() -> None:
    by_default = Int8(context("int8"))
    assert by_default.encoding(unit(65535, 32768)) is None
    encoded = by_default.encoding(unit(65536, 32768))
    assert encoded is not None
    assert encoded.nbytes_per_rank == 32768 + 4 * 256
    every = plugin("int8", leave_alone=nn.LayerNorm)
    assert every.encoding(unit(0, 0)) is None
    # 8 bytes in bf16 are no more than one scale, padded, and codes.
    assert every.encoding(unit(8, 4)) is None
    assert every.encoding(unit(4096, 2048, module_class=nn.LayerNorm)) is None
    assert every.encoding(unit(4096, 2048, master_dtype=torch.int64)) is None
    assert every.encoding(unit(4096, 2048)) is not None


@pytest.mark.parametrize(
    ("name", "compute", "offload"),
    [("int8", "bf16", "none"), ("int8", "fp32", "cpu"), ("fp8", "bf16", "cpu"), ("fp8", "fp32", "none")],
)
def test_all_ranks_compute_with_what_travelled_forward_and_backward(name: str, compute: str, offload: str) -> None:
    model = nn.Sequential(Watched(), nn.Linear(24, 4))

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(
            model,
            rank,
            world,
            precision=plugin(name, block=32, compute=compute),
            policy=units_of(Watched),
            offload=offload,
        )
        x = draw(4, 40, rank=rank).float().requires_grad_()
        mine(x).sum().backward()
        return list(mine[0].seen)

    # 320 elements a rank: ten blocks of 32.
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[compute]
    shards = Watched().weight.detach().flatten().split(320)
    wanted = torch.cat([decoded(shard, name, 32) for shard in shards]).view(24, 40)
    for seen in on_ranks(3, on_rank):
        assert len(seen) == 2
        for weight in seen:
            assert weight.dtype is dtype
            torch.testing.assert_close(weight.double(), wanted, rtol=2.0**-8 if compute == "bf16" else 3e-7, atol=0.0)
            assert torch.equal(weight, seen[0])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_master_that_is_not_finite_makes_the_loss_nan_on_every_rank(name: str) -> None:
    model = seeded(Net).float()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[float, float]:
        mine = sharded_copy(model, rank, world, precision=plugin(name), **BLOCKS)
        before = mine(draw(4, 3).float()).sum().item()
        if rank == 1:
            with torch.no_grad():
                local(next(mine.blocks.parameters()))[0] = -math.inf
        return before, mine(draw(4, 3).float()).sum().item()

    for before, after in on_ranks(2, on_rank):
        assert math.isfinite(before)
        assert math.isnan(after)


class Counting(Int8):
    """Notes how many units each call is for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(context("int8"), **options)
        self.encoded: list[int] = []
        self.decoded: list[int] = []

    def encode_many(
        self, units: Sequence[UnitSpec], messages: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
    ) -> None:
        self.encoded.append(len(units))
        super().encode_many(units, messages, shards)

    def decode_many(
        self, units: Sequence[UnitSpec], messages: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        self.decoded.append(len(units))
        super().decode_many(units, messages, outs)


def layers(number: int) -> list[nn.Module]:
    """Layers of 64 x 64 elements."""
    return [nn.Linear(64, 64, bias=False) for _ in range(number)]


def test_units_that_travel_together_are_encoded_and_decoded_by_one_call() -> None:
    counting = Counting(min_numel=4096)
    model = nn.Sequential(*layers(3), nn.LayerNorm(64, bias=False), *layers(3))
    collectives = FakeCollectives(PluginContext("fake", torch.device("cpu")), 0, 4)
    policy = units_of(nn.Linear, nn.LayerNorm)
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, precision=counting, policy=policy))
    x = torch.randn(2, 64)
    # A step whose order is known.
    for _ in range(2):
        for noted in (counting.encoded, counting.decoded, collectives.calls, collectives.batches):
            noted.clear()
        model(x).sum().backward()
    # All seven units follow the root, which has no parameters. The norm is small, and goes along as it computes. The
    # last unit is kept for its backward.
    assert list(collectives.batches) == [7, 6]
    assert counting.encoded == counting.decoded == [6, 5]
    sent = [call.dtype for call in collectives.calls if call.operation == "all_gather"]
    assert sent.count(torch.bfloat16) == 2
    assert sent.count(torch.uint8) == 11
