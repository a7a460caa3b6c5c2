"""The engine on CUDA devices, one process for each of at most two GPUs; its CPU twin is ``test_engine_gloo``."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import polyshard
import pytest
import torch
from cuda_models import Block, Net, sharded
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
