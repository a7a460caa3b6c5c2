"""Linear layers in fp8 on CUDA: the kernels beside the emulation, compiled, and captured. CPU twin:
``plugins/test_fp8_linear.py``."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from encodings_of_gathers import CASES, Watched, decoded, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import local
from polyshard.interfaces import FormedWeights, PluginContext, UnitSpec
from polyshard_plugins.block_codec import BlockCode, Number
from polyshard_plugins.block_scaled import BlockScaled, Fp8, Int8
from polyshard_plugins.fp8_linear import Fp8Linear
from processes import KeptRanks, gpu_ranks
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def bound(device: torch.device, weight: torch.Tensor, **options: Any) -> tuple[Any, Sequence[torch.Tensor]]:
    """The form of one whole weight on ``device``, and its tensors."""
    weights = FormedWeights(
        "layer", ("weight",), (tuple(weight.shape),), (0,), 1, weight.numel(), torch.bfloat16, device
    )  # type: ignore[arg-type]
    form = Fp8Linear(PluginContext("fp8_linear", device), **options).form(weights)
    lanes = [torch.full((1, nbytes), 77, dtype=torch.uint8, device=device) for nbytes in form.lanes]
    (tensors,) = form.bind(lanes)
    form.encode(weight.to(device).flatten(), [lane[0] for lane in lanes], 0)
    form.arrived()
    return form, tensors


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_kernels_compute_what_the_emulation_does(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(384, 256, generator=generator) * scale * torch.exp(torch.randn(384, 1, generator=generator))
    weight[7] = 0.0
    x = torch.randn(128, 256, generator=generator).bfloat16()
    gradient = torch.randn(128, 384, generator=generator).bfloat16()
    answers = []
    for device in (torch.device("cpu"), CUDA):
        form, tensors = bound(device, weight, weight_gradient="fp8")
        here = [
            form.product(x.to(device), tensors),
            form.input_gradient(gradient.to(device), tensors),
            form.weight_gradient(gradient.to(device), x.to(device)),
        ]
        codes = tensors[0].view(torch.uint8)
        answers.append([codes.cpu(), tensors[1].cpu(), *(each.float().cpu() for each in here)])
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])
    for wanted, found in zip(answers[0][2:], answers[1][2:], strict=True):
        # The sum of fast accumulation is short by some bits.
        assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_rows_have_the_bits_of_the_plain_operations(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 2816, generator=generator) * torch.exp(4 * torch.randn(64, 2816, generator=generator))
    rows[1], rows[2, 3], rows[4, -1] = 0.0, float("inf"), float("nan")
    rows = rows.to(dtype)
    (_, plain), (_, kernel) = bound(torch.device("cpu"), rows), bound(CUDA, rows)
    assert torch.equal(plain[0].view(torch.uint8), kernel[0].view(torch.uint8).cpu())
    torch.testing.assert_close(plain[1], kernel[1].cpu(), rtol=0.0, atol=0.0, equal_nan=True)
    assert plain[1].isnan().flatten().nonzero().flatten().tolist() == [2, 4]


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256)
        self.up = nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.down(functional.silu(self.up(self.norm(x))))
        return x + fed


def losses(
    model: nn.Module, steps: int, *, compiles: bool = False, captures: bool = False, **settings: Any
) -> list[float]:
    mine = copy.deepcopy(model)
    # Of torch 2.11's compiler, about leaves.
    warnings.filterwarnings("ignore", message=".*not a leaf Tensor")
    if compiles:
        for block in mine:  # type: ignore[union-attr]
            block.compile(fullgraph=True)
    collectives = {"name": "fake", "world_size": 1}
    policy = {"name": "module_class", "classes": [Feed]}
    polyshard.shard(mine, polyshard.ShardConfig(collectives=collectives, policy=policy, device=CUDA, **settings))
    optimizer = torch.optim.AdamW(polyshard.flat_parameters(mine), lr=1e-3, fused=True, capturable=True)
    generator = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(256, 256, device=CUDA, generator=generator)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (mine(x).float() - x.cumsum(1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    taken: Any = polyshard.CapturedStep(mine, optimizer, step, warmup=2, fallback="refuse") if captures else step
    return [taken(x).item() for _ in range(steps)]


@pytest.mark.filterwarnings("ignore:polyshard is switching")
@pytest.mark.parametrize("how", [{}, {"compiles": True}, {"captures": True}], ids=str)
@pytest.mark.parametrize("weight_gradient", ["compute", "fp8"])
def test_losses_are_near_those_of_bf16(weight_gradient: str, how: dict[str, bool]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Feed() for _ in range(3))).to(CUDA)
    plain = losses(model, 12, precision="bf16")
    precision = {"name": "fp8_linear", "weight_gradient": weight_gradient}
    fp8 = losses(model, 12, precision=precision, **how)
    assert plain[-1] < plain[0]
    assert fp8 == pytest.approx(plain, rel=0.01)


# Gathers of eight bits: kernels and plain codec, bit for bit, and over NCCL; CPU twin: ``test_encoded_gathers``.


WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)
PRECISIONS: dict[str, type[BlockScaled]] = {"int8": Int8, "fp8": Fp8}
COMPUTES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
NUMBERS = pytest.mark.parametrize("name", ["int8", "fp8"])


def plugin(name: str, **options: Any) -> BlockScaled:
    return PRECISIONS[name](PluginContext(name, CUDA), **{"min_numel": 0, **options})


def unit(shard: torch.Tensor) -> UnitSpec:
    numel = shard.numel()
    return UnitSpec("layer", nn.Linear, ("layer.weight",), 2 * numel, numel, shard.dtype, CUDA, False)


def on_host(shard: torch.Tensor, code: BlockCode) -> torch.Tensor:
    """``[1, nbytes]`` that the plain codec writes on the CPU."""
    message = torch.full((1, code.nbytes(shard.numel())), 77, dtype=torch.uint8)
    code.encode(message[0], shard)
    return message


def on_device(shards: list[torch.Tensor], name: str, block: int) -> list[torch.Tensor]:
    """``[1, nbytes]`` of each that the precision plugin writes on CUDA, where Triton is there by kernels."""
    code = BlockCode(Number(name), block)
    messages = [torch.full((1, code.nbytes(shard.numel())), 99, dtype=torch.uint8, device=CUDA) for shard in shards]
    given = [shard.to(CUDA) for shard in shards]
    plugin(name, block=block).encode_many([unit(shard) for shard in given], [message[0] for message in messages], given)
    return messages


def read(
    messages: list[torch.Tensor], shards: list[torch.Tensor], name: str, block: int, compute: str
) -> list[torch.Tensor]:
    """What the precision plugin makes of ``messages`` on CUDA, on the CPU."""
    outs = [torch.full((1, shard.numel()), math.nan, dtype=COMPUTES[compute], device=CUDA) for shard in shards]
    plugin(name, block=block, compute=compute).decode_many([unit(shard) for shard in shards], messages, outs)
    return [out.cpu() for out in outs]


def test_triton_is_there() -> None:
    # Without it everything below holds, for the plain codec.
    pytest.importorskip("triton")


@pytest.mark.parametrize(("block", "triton"), [(16, True), (128, True), (1024, True), (16, False), (128, False)])
@NUMBERS
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_plain_codec(
    case: str, name: str, block: int, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU they follow the formula: ``tests/plugins/test_encoded_gathers.py``."""
    if not triton:
        monkeypatch.setattr("polyshard_plugins.block_scaled.kernels_for", lambda tensor, name: None)
    shard = CASES[case]()
    code = BlockCode(Number(name), block)
    wanted = on_host(shard, code)
    (message,) = on_device([shard], name, block)
    assert torch.equal(message.cpu(), wanted)
    for compute, dtype in COMPUTES.items():
        plain = torch.empty(1, shard.numel(), dtype=dtype)
        code.decode(wanted, plain)
        (out,) = read([message], [shard], name, block, compute)
        # Kernels multiply in fp32.
        exact = 3e-7 if compute == "fp64" else 0.0
        torch.testing.assert_close(out, plain, rtol=exact, atol=0.0, equal_nan=True)


@NUMBERS
@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_values_give_the_bits_of_the_plain_codec(name: str, values: list[float]) -> None:
    shard = torch.tensor(values, dtype=torch.float32)
    (message,) = on_device([shard], name, 16)
    assert torch.equal(message.cpu(), on_host(shard, BlockCode(Number(name), 16)))


@NUMBERS
def test_twenty_units_of_unlike_sizes_and_dtypes_go_in_few_launches(name: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    shards = [normal(17 * index + 1, dtypes[index % 2]) for index in range(40)]
    code = BlockCode(Number(name), 64)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        messages = on_device(shards, name, 64)
        torch.cuda.synchronize()
    for message, shard in zip(messages, shards, strict=True):
        assert torch.equal(message.cpu(), on_host(shard, code))
    for out, shard in zip(read(messages, shards, name, 64, "bf16"), shards, strict=True):
        plain = torch.empty(1, shard.numel(), dtype=torch.bfloat16)
        code.decode(on_host(shard, code), plain)
        assert torch.equal(out, plain)
    # Twenty of a dtype: one launch of sixteen and one of four.
    assert sum("_encode" in event.name for event in profiled.events()) == 4


def watched(rank: int, name: str, offload: str, infinite: bool) -> list[torch.Tensor]:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model = nn.Sequential(Watched(), nn.Linear(24, 4)).to(device)
    polyshard.shard(
        model,
        polyshard.ShardConfig(
            precision=plugin(name, block=32, compute="fp32"),
            policy={"name": "module_class", "classes": [Watched]},
            offload=offload,
        ),
    )
    if infinite and rank == 0:
        local(model[0].weight.detach())[0, 0] = math.inf
    model(torch.ones(4, 40, device=device, requires_grad=True)).sum().backward()
    return [weight.cpu() for weight in model[0].seen]


@pytest.mark.skipif(WORLD_SIZE < 2, reason="nothing travels where there is one rank")
@pytest.mark.parametrize("offload", ["none", "cpu"])
@NUMBERS
def test_all_ranks_compute_with_what_travelled_forward_and_backward(name: str, offload: str) -> None:
    shards = normal(960).split(960 // WORLD_SIZE)
    wanted = torch.cat([decoded(shard, name, 32) for shard in shards]).view(24, 40)
    for seen in run(watched, name, offload, False):
        assert len(seen) == 2
        for weight in seen:
            torch.testing.assert_close(weight.double(), wanted, rtol=3e-7, atol=0.0)
            assert torch.equal(weight, seen[0])
