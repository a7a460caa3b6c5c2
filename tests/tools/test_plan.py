"""What a plan says, beside formulas, and beside what autograd saves in a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import local, peak_of_live_bytes
from polyshard import ShardConfig
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.interfaces import BufferRole, PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_tools.forecast import (
    Device,
    Kind,
    Link,
    LinkModel,
    Operation,
    Plan,
    ShapedBatches,
    Span,
    find_optimizer,
    plan,
    timed,
)
from polyshard_tools.forecast.recording import (
    Begin,
    Bound,
    Issued,
    Kernel,
    Part,
    Signal,
    Stream,
    Transfer,
    Wait,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

WIDTH, DEPTH, ROWS = 128, 3, 32


class Layer(nn.Module):
    """A residual block of 4 * width * width elements, in two matrices without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return mixed


class Tower(nn.Module):
    """``depth`` layers between two matrices, to a mean of squares; ``recomputes``: every layer in backward."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.first = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.last(x).square().mean()


#: Elements of ``Tower()``.
NUMEL = (2 + 4 * DEPTH) * WIDTH * WIDTH
LAYERS = {"name": "module_class", "classes": Layer}
SHAPES = ShapedBatches.parse(f"float32[{ROWS},{WIDTH}]")


def on_meta(**arguments: Any) -> nn.Module:
    with torch.device("meta"):
        return Tower(**arguments)


def planned(world_size: int = 2, *, batch: Any = SHAPES, model: nn.Module | None = None, **settings: Any) -> Plan:
    further = {
        key: settings.pop(key)
        for key in ("optimizer", "device", "memory_nbytes", "largest", "samples", "microbatches")
        if key in settings
    }
    config = ShardConfig(**{"policy": LAYERS, **settings})
    return plan(config, model or on_meta(), world_size, batch=batch, **{"samples": ROWS, **further})


# Memory, beside ZeRO's table.


def test_a_part_of_each_unit_is_kept_and_gathered_among_neighbours() -> None:
    found, without, released = (
        planned(8, precision="bf16", reshard_after_forward=releases, **batch)
        for releases, batch in ((2, {}), (2, {"batch": None}), (True, {}))
    )
    rows = {row.ranks: row.received_nbytes for row in found.traffic if row.operation is Operation.ALL_GATHER}
    assert rows == {8: NUMEL * 2 * 7 // 8, 2: NUMEL * 2 // 2}
    assert rows == {row.ranks: row.received_nbytes for row in without.traffic if row.operation is Operation.ALL_GATHER}
    # The halves of the layers, beside what is whole at the forward's end.
    assert found.most[Kind.GATHERED] - released.most[Kind.GATHERED] == 4 * DEPTH * WIDTH * WIDTH
    assert found.most[Kind.GATHERED] <= without.most[Kind.GATHERED]


def test_microbatches_gather_each_time_and_reduce_once() -> None:
    once, thrice = (planned(2, precision="bf16", microbatches=number) for number in (1, 3))
    gathers, reductions = (
        [next(row.received_nbytes for row in each.traffic if row.operation is operation) for each in (once, thrice)]
        for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
    )
    assert gathers[1] == 3 * gathers[0]
    # Gradients of one backward travel in bf16; sums of several wait whole and travel in fp32.
    assert thrice.most[Kind.REDUCTION] >= 4 * NUMEL
    assert reductions == [2 * NUMEL // 2, 4 * NUMEL // 2]


# Memory, beside real runs.


class Exchanging(FakeCollectives):
    """Receives the gradients of 16 bits of all ranks before it adds them up, as a plan expects."""

    @override
    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        return numel * communication_dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_the_peak_is_that_of_a_run_on_the_cpu(recomputes: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    collectives = Exchanging(PluginContext("fake", torch.device("cpu")), 0, 4)
    model = polyshard.shard(
        Tower(256, 4, recomputes), ShardConfig(policy=LAYERS, collectives=collectives, device="cpu", precision="bf16")
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.zeros(512, 256)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    standing = 12 * sum(local(p).numel() for p in model.parameters()) + x.nbytes
    measured = standing + peak_of_live_bytes(step, tmp_path)
    found = planned(
        4,
        model=on_meta(width=256, depth=4, recomputes=recomputes),
        batch=ShapedBatches.parse("float32[512,256]"),
        samples=512,
        precision="bf16",
        optimizer=find_optimizer("adamw-foreach"),
    )
    assert found.peak_nbytes == pytest.approx(measured, rel=0.03)


# Time, by hand.

_TOY = Device(
    "toy", 1000, 100.0, 1.0, 0.5, 10.0, 1.0, 0.0, 0.0, 0.0, 0, "h200-nvlink", "h200-ndr", "a test"
)  # fmt: skip


def kernel(stream: Stream, *, nbytes: int = 0, flops: int = 0) -> Kernel:
    return Kernel(stream, Part.FORWARD, "k", Bound.MATMUL if flops else Bound.NONE, flops, nbytes, 2)


def toy_links(interference: float = 0.0) -> LinkModel:
    return LinkModel("toy", "a test", 8, (Link(Operation.ALL_GATHER, 2, 1.0, 5.0, interference=interference),))


def gather(nbytes: int) -> Transfer:
    return Transfer(Stream.GATHER, Part.FORWARD, Operation.ALL_GATHER, nbytes, Span(range(2)), 1)


@pytest.mark.parametrize(
    ("issued", "seconds", "waited"),
    [
        # 40 bytes at 10 a second, or 1000 operations at 100.
        ([kernel(Stream.COMPUTE, nbytes=40)], 4.0, 0.0),
        ([kernel(Stream.COMPUTE, nbytes=40, flops=1000)], 10.0, 0.0),
        # Half of 20 bytes comes from the other rank: 1 + 10 / 5 seconds, beside 4 of compute.
        ([gather(20), kernel(Stream.COMPUTE, nbytes=40)], 4.0, 0.0),
        # Compute that uses it waits for it, and what it did before hides that much of it.
        ([gather(20), Signal(Stream.GATHER, 1), Wait(Stream.COMPUTE, 1), kernel(Stream.COMPUTE, nbytes=40)], 7.0, 3.0),
        (
            [
                gather(20),
                Signal(Stream.GATHER, 1),
                kernel(Stream.COMPUTE, nbytes=20),
                Wait(Stream.COMPUTE, 1),
                kernel(Stream.COMPUTE, nbytes=40),
            ],
            7.0,
            1.0,
        ),
    ],
)
def test_streams_run_beside_each_other(issued: Sequence[Issued], seconds: float, waited: float) -> None:
    found = timed([Begin(Part.FORWARD), *issued], _TOY, toy_links())
    assert found.device_s == pytest.approx(seconds)
    assert found.waited_s == pytest.approx(waited)


def test_what_travels_slows_compute_beside_it() -> None:
    # Three of the four seconds of compute are beside a gather that takes half of its own time from it.
    found = timed([Begin(Part.FORWARD), gather(20), kernel(Stream.COMPUTE, nbytes=40)], _TOY, toy_links(0.5))
    assert found.device_s == pytest.approx(4 + 0.5 * 3)
    assert found.delayed_s == pytest.approx(1.5)


# The largest batch.


@pytest.mark.slow
def test_the_largest_batch_is_traced() -> None:
    one, more = planned(2, samples=1), planned(2, samples=300)
    found = planned(2, samples=1, memory_nbytes=more.peak_nbytes, largest=True)
    assert found.fits
    assert found.largest_samples == 300
    assert one.peak_nbytes < more.peak_nbytes
    assert planned(2, samples=300, memory_nbytes=more.peak_nbytes - 1).fits is False
    assert planned(2, memory_nbytes=1000, largest=True).largest_samples == 0


# Optimizers.


def test_an_optimizer_that_is_run_shows_its_temporaries() -> None:
    fused, foreach, sgd = (planned(2, optimizer=find_optimizer(name)) for name in ("adamw", "adamw-foreach", "sgd"))
    shard = NUMEL // 2
    assert fused.most[Kind.OPTIMIZER] == 8 * shard
    # torch's foreach AdamW takes the roots of all second moments at once.
    assert foreach.most[Kind.OPTIMIZER] == pytest.approx(12 * shard, rel=0.01)
    assert sgd.most[Kind.OPTIMIZER] == 0


# What cannot be planned.


class Reads(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum() * x.sum().item()


class Branches(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum() if (x == 0).all() else x.sum()


def small(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind(8, 8)  # type: ignore[call-arg]


EIGHT = ShapedBatches.parse("float32[2,8]")


def test_a_model_that_reads_values_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"forward of Reads cannot run on the meta device.*item\(\).*--batch"):
        planned(2, model=small(Reads), batch=EIGHT, policy="never")


def test_a_branch_on_values_is_taken_and_told_and_what_stands_in_is_gone_afterwards() -> None:
    found = planned(2, model=small(Branches), batch=EIGHT, policy="never")
    assert any("branch" in note for note in found.notes)
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.zeros((), device="meta"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": ShapedBatches.parse("float32[4,7]")}, r"forward of Tower.*meta device|batch that it takes"),
        ({"batch": ShapedBatches.parse("float32[4,8] float32[4,8]")}, "Give a batch that it takes"),
        ({"offload": "cpu"}, "offload manager 'cpu'"),
        ({"samples": 0}, "samples is 0"),
        ({"largest": True}, "needs a batch to begin from, and a device"),
    ],
)
def test_what_cannot_be_planned_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        planned(2, **change)


def test_a_forward_without_a_loss_is_named() -> None:
    class Silent(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x)}

    with pytest.raises(ConfigError, match=r"forward of Silent returned no loss.*dict"):
        planned(2, model=small(Silent), batch=EIGHT, policy="never")


def test_auto_is_planned_as_released_and_told() -> None:
    found = planned(4, precision="bf16", reshard_after_forward="auto")
    assert found.peak == planned(4, precision="bf16").peak
    assert "'auto'" in found.notes[0]
