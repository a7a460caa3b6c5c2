"""The engine on CUDA devices, one process for each of at most two GPUs; its CPU twin is ``test_engine_gloo``."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any
from unittest import mock

import polyshard
import pytest
import torch
from cuda_models import Block, Net, sharded
from polyshard.interfaces import UnitEvent, UnitOperation
from polyshard.planning import thresholds
from polyshard.runtime.root import Root
from processes import KeptRanks, device_of, gpu_ranks, settle_on_device
from torch import nn

pytestmark = pytest.mark.gpu


WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)


def batches(device: torch.device, steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 31, (4 * WORLD_SIZE, 12), generator=generator).to(device) for _ in range(steps)]


def train(rank: int, dtype: torch.dtype, kind: dict[str, bool], settings: dict[str, Any], side: bool) -> list[float]:
    """Largest differences in loss and norm (relative) and in parameters; number of units left gathered."""
    device = settle_on_device(rank)
    torch.manual_seed(0)
    reference = Net(**kind).to(device, dtype)
    model = sharded(copy.deepcopy(reference), **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    loss_off = norm_off = 0.0
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for ids in batches(device, 6):
            loss = model(ids.chunk(WORLD_SIZE)[rank])
            loss.backward()
            norm = polyshard.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            whole = reference(ids)
            whole.backward()
            wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            expected.step()
            expected.zero_grad()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            loss_off = max(loss_off, abs((mean / WORLD_SIZE - whole).item()) / whole.item())
            norm_off = max(norm_off, abs((norm - wanted).item()) / wanted.item())
        with polyshard.unsharded(model):
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            parameters_off = max((one - other).abs().max().item() for one, other in pairs)
    root: Root = model.__dict__["_polyshard_module_state"].root
    return [loss_off, norm_off, parameters_off, float(len(root.gathered))]


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_training_equals_the_unsharded_model(strategy: str, offload: str) -> None:
    for loss, norm, parameters, gathered in run(
        train, torch.float64, {}, {"strategy": strategy, "offload": offload}, False
    ):
        assert loss < 1e-12
        assert norm < 1e-12
        assert parameters < 1e-10
        assert gathered == 0


@pytest.mark.parametrize("chosen", [{"strategy": "zero1"}, {"strategy": "hfsdp"}, {"strategy": "hpz"}], ids=str)
@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_strategies_with_parameters_of_their_own_train_alike(chosen: dict[str, Any], precision: str) -> None:
    if chosen["strategy"] != "zero1":
        if WORLD_SIZE < 4:
            pytest.skip("two groups of two ranks: POLYSHARD_RANKS_ON_ONE_GPU=4")
        chosen = {**chosen, "shard_size": 2}
    dtype = torch.float64 if precision == "none" else torch.float32
    for loss, _, parameters, _ in run(train, dtype, {}, {**chosen, "precision": precision}, True):
        assert loss < (1e-12 if precision == "none" else 0.02)
        assert parameters < 1e-10 or precision != "none"


@pytest.mark.parametrize("kind", [{"recurrent": True}, {"recomputes": True}])
def test_recurrent_and_recomputed_models_train_alike(kind: dict[str, bool]) -> None:
    for loss, _, parameters, gathered in run(train, torch.float64, kind, {}, False):
        assert loss < 1e-12
        assert parameters < 1e-10
        assert gathered == 0


def train_recorded(rank: int) -> list[float]:
    torch.cuda.memory._record_memory_history(device=device_of(rank))
    try:
        # Every linear layer is an autograd function of ours, the one that ends a recomputation, too.
        with mock.patch.object(thresholds, "DIRECT_NUMEL", 1):
            return train(rank, torch.float64, {"recomputes": True}, {}, False)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_recomputed_models_train_while_the_allocator_records_its_history() -> None:
    for loss, _, parameters, gathered in run(train_recorded):
        assert loss < 1e-12
        assert parameters < 1e-10
        assert gathered == 0


#: Two blocks of float64 travel together, three of bfloat16 that are not merged, all of them, none of them.
@pytest.mark.parametrize("batch_nbytes", [2 * 8 * 3800, 3 * 2 * 3900, "16 MiB", 0])
@pytest.mark.parametrize("precision", ["none", "bf16"])
def test_units_that_travel_together_train_alike(batch_nbytes: int | str, precision: str) -> None:
    dtype = torch.float64 if precision == "none" else torch.float32
    settings = {"batch_nbytes": batch_nbytes, "precision": precision}
    for loss, _, parameters, gathered in run(train, dtype, {}, settings, True):
        assert loss < (1e-12 if precision == "none" else 0.02)
        assert parameters < 1e-10 or precision != "none"
        assert gathered == 0


def wrap_from_meta(rank: int) -> tuple[int, int]:
    device = settle_on_device(rank)
    with torch.device("meta"):
        model = nn.Sequential(*(Block(512, False) for _ in range(12)))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sharded(model, device=device)
    peak = torch.cuda.max_memory_allocated() - before
    rows = ((parameter.shape[0], parameter[0].numel()) for parameter in Block(512, False).parameters())
    masters = 12 * sum(4 * -(-number // WORLD_SIZE) * numel for number, numel in rows)
    return peak, masters


def test_wrapping_from_meta_takes_the_shards_and_one_unit() -> None:
    unit = sum(parameter.numel() for parameter in Block(512, False).parameters()) * 4
    for peak, masters in run(wrap_from_meta):
        # 512-byte blocks of the allocator for 12 units, and alignment of parameters. It cuts segments of 20 MiB, and
        # leaves a rest below 1 MiB with the last block.
        assert masters <= peak <= masters + unit + 64 * 1024 + 2**20


# A model of two branches on two streams, one process for each of at most two GPUs; its twin is of the same name.


#: A few milliseconds: longer than all else that a step does.
CYCLES_OF_DELAY = 5_000_000
WIDTH = 192


class Late(torch.autograd.Function):
    """The identity, after a delay of the stream that it runs on, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES_OF_DELAY)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(CYCLES_OF_DELAY)
        return gradient.clone()


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TwoBranches(nn.Module):
    """Branches that share their last block. With ``side``, the second one is computed there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.here = nn.ModuleList(WideBlock() for _ in range(4))
        self.beside = nn.ModuleList(WideBlock() for _ in range(4))
        self.shared = WideBlock()
        self.last = nn.Linear(WIDTH, 1)
        self.side: torch.cuda.Stream | None = None
        #: The branch that is late.
        self.late = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.side is None:
            one, other = self.branch(x, "here"), self.branch(x, "beside")
        else:
            current = torch.cuda.current_stream()
            self.side.wait_stream(current)
            one = self.branch(x, "here")
            with torch.cuda.stream(self.side):
                other = self.branch(x, "beside")
            current.wait_stream(self.side)
            # What torch asks of tensors that two streams use.
            x.record_stream(self.side)
            other.record_stream(current)
        return self.last(one + other).square().mean()

    def branch(self, x: torch.Tensor, name: str) -> torch.Tensor:
        for block in (*getattr(self, name), self.shared):
            x = block(Late.apply(x) if self.late == name else x)
        return x


def delay_reductions(event: UnitEvent) -> None:
    """Hold the stream that reduces up, which has yet to read its input."""
    if event.begins and event.operation is UnitOperation.REDUCE:
        torch.cuda._sleep(CYCLES_OF_DELAY)


def train_branches(rank: int, late: str, direct: bool, settings: dict[str, Any]) -> tuple[float, float, int]:
    """Largest differences in loss and, after some steps, in parameters; number of units left gathered."""
    device = settle_on_device(rank)
    torch.manual_seed(0)
    reference = TwoBranches().to(device, torch.float64)
    model = sharded(copy.deepcopy(reference), WideBlock, **settings)
    assert isinstance(model, TwoBranches)
    model.side, model.late = torch.cuda.Stream(), late
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected = torch.optim.SGD(reference.parameters(), lr=1e-3)
    root: Root = model.__dict__["_polyshard_module_state"].root
    for unit in root.units:
        unit.observers = (delay_reductions,)
    loss_off = 0.0
    # A parameter that two streams use gathers its gradient on the first of them, and torch says so.
    warnings.filterwarnings("ignore", message=".*AccumulateGrad node's stream")
    with mock.patch.object(thresholds, "DIRECT_NUMEL", 1 if direct else thresholds.DIRECT_NUMEL):
        for _ in range(4):
            x = torch.randn(8 * WORLD_SIZE, 16, device=device, dtype=torch.float64)
            loss = model(x.chunk(WORLD_SIZE)[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = reference(x)
            whole.backward()
            expected.step()
            expected.zero_grad()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            loss_off = max(loss_off, abs((mean / WORLD_SIZE - whole).item()) / whole.item())
    with polyshard.unsharded(model):
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        parameters_off = max((one - other).abs().max().item() for one, other in pairs)
    return loss_off, parameters_off, len(root.gathered)


@pytest.mark.parametrize("late", ["here", "beside"])
@pytest.mark.parametrize("direct", [False, True], ids=["copied", "direct"])
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "full_shard", "batch_nbytes": 0},
        {"strategy": "full_shard", "batch_nbytes": "8 MiB"},
        {"strategy": "shard_grad_op", "batch_nbytes": 0},
        {"strategy": "no_shard"},
    ],
    ids=["full", "buckets", "grad_op", "whole"],
)
def test_branches_on_two_streams_train_as_the_unsharded_model(
    settings: dict[str, Any], direct: bool, late: str
) -> None:
    for loss, parameters, gathered in run(train_branches, late, direct, settings):
        assert loss < 1e-12
        assert parameters < 1e-10
        assert gathered == 0


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


class MayRaise(nn.Module):
    """The identity, whose backward raises once it is armed."""

    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Raises.apply(x) if self.armed else x


def written_behind_an_exception(rank: int) -> float:
    """What reductions of a backward that raised write into memory that ``.grad`` had, and others have now."""
    device = settle_on_device(rank)
    model = sharded(
        nn.Sequential(WideBlock(), MayRaise(), WideBlock(), WideBlock(), WideBlock()).to(device),
        WideBlock,
        batch_nbytes=0,
    )
    x = torch.randn(8, WIDTH, device=device)
    model(x).square().mean().backward()
    gradients = {each.grad.to_local().untyped_storage().nbytes() for each in model.parameters()}
    root: Root = model.__dict__["_polyshard_module_state"].root
    for unit in root.units:
        unit.observers = (delay_reductions,)
    model[1].armed = True
    with pytest.raises(ArithmeticError, match="in backward"):
        model(x).square().mean().backward()
    model.zero_grad()
    others = [torch.zeros(nbytes // 4, device=device) for nbytes in gradients for _ in range(len(model))]
    torch.cuda.synchronize()
    return max(each.abs().max().item() for each in others)


def test_a_backward_that_raised_writes_into_no_memory_that_others_have_since() -> None:
    assert max(run(written_behind_an_exception)) == 0.0
