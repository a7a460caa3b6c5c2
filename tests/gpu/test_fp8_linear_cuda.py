"""Linear layers in fp8 on CUDA: the kernels beside the emulation, compiled, and captured. CPU twin:
``plugins/test_fp8_linear.py``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import polyshard
import pytest
import torch
from polyshard.interfaces import FormedWeights, PluginContext
from polyshard_plugins.fp8_linear import Fp8Linear
from torch import nn
from torch.nn import functional

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
