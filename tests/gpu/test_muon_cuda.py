"""Muon on GPUs: over NCCL, captured, and its kernels beside their formulas; CPU twins: ``test_muon*``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from matrices import FormulaMuon, distance
from polyshard.optim import Muon, for_matrices
from polyshard.optim.muon import COEFFICIENTS, go_along, mix, newton_schulz
from processes import KeptRanks, device_of, gpu_ranks
from torch import nn

pytestmark = pytest.mark.gpu

Kind = Callable[..., torch.optim.Optimizer]

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)
CUDA = torch.device("cuda", 0)
ROWS = 256


class Block(nn.Module):
    """Matrices of one block of the kernels and more, and of odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.across = nn.Linear(2 * width + 1, 2 * width + 1, bias=False)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.across(torch.tanh(self.up(x)))))


class Net(nn.Module):
    def __init__(self, width: int = 72) -> None:
        super().__init__()
        self.first = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.last = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) - x[:, :5]).square().mean()


def made(dtype: torch.dtype, device: torch.device) -> Net:
    torch.manual_seed(0)
    return Net().to(device, dtype)


def batch(turn: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The whole batch of a turn: as many rows that matrices' gradients have full rank."""
    generator = torch.Generator().manual_seed(3 + turn)
    return torch.randn(ROWS * WORLD_SIZE, 24, generator=generator, dtype=torch.float64).to(device, dtype)


def optimizers(model: nn.Module, kind: Kind, capturable: bool = False, **settings: Any) -> list[torch.optim.Optimizer]:
    split = for_matrices(model)
    muon = kind(split.matrices, lr=settings.pop("lr", 0.02), momentum=0.9, weight_decay=0.05, **settings)
    return [muon, torch.optim.AdamW(split.others, lr=1e-2, capturable=capturable)]


def sharded(model: nn.Module, **settings: Any) -> nn.Module:
    strategy = {} if WORLD_SIZE > 1 else {"strategy": "no_shard"}
    policy = {"name": "module_class", "classes": [Block]}
    return polyshard.shard(model, polyshard.ShardConfig(policy=policy, **{**settings, **strategy}))


def wholes(model: nn.Module, is_sharded: bool) -> dict[str, torch.Tensor]:
    if not is_sharded:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with polyshard.unsharded(model):
        return wholes(model, False)


def trained(
    rank: int,
    kind: Kind,
    of_model: torch.dtype,
    shards: dict[str, Any] | None,
    **muon: Any,
) -> dict[str, torch.Tensor]:
    """Twenty steps: on this rank's part of the batch over shards, on the whole one without."""
    device = device_of(rank)
    model: nn.Module = made(of_model, device)
    if shards is not None:
        model = sharded(model, **shards)
    both = optimizers(model, kind, **muon)
    for turn in range(20):
        x = batch(turn, of_model, device)
        model(x if shards is None else x.chunk(WORLD_SIZE)[rank]).backward()
        for each in both:
            each.step()
            each.zero_grad()
    return wholes(model, shards is not None)


def against_torch(rank: int, shards: dict[str, Any]) -> tuple[float, float, float]:
    expected = trained(rank, torch.optim.Muon, torch.float32, None)
    rounding = distance(trained(rank, FormulaMuon, torch.float32, None), expected)
    start = wholes(made(torch.float32, device_of(rank)), False)
    return distance(trained(rank, Muon, torch.float32, shards), expected), rounding, distance(start, expected)


@pytest.mark.parametrize(
    "shards",
    [{}, {"strategy": "no_shard"}, {"offload": "cpu"}],
    ids=str,
)
def test_twenty_steps_in_bf16_are_those_of_torchs_muon(shards: dict[str, Any]) -> None:
    """To within what rounding to bf16 makes: torch's own distance from the formula; the kernels round elsewhere."""
    for apart, rounding, moved in run(against_torch, shards):
        assert 0 < rounding < 0.2 * moved
        assert apart < 3 * rounding


def captured_and_eager(rank: int, dtype: torch.dtype, tensor_lr: bool) -> tuple[float, float, list[str]]:
    """How far captured steps end from eager ones, how far both went, and how the captured ones ran."""
    device = device_of(rank)
    ends, modes = [], []
    for captures in (True, False):
        model = sharded(made(torch.float64 if dtype is torch.float64 else torch.float32, device))
        lr: Any = torch.tensor(0.02, device=device) if tensor_lr else 0.02
        both = optimizers(model, Muon, capturable=True, lr=lr, dtype=dtype)

        def step(x: torch.Tensor, model: nn.Module = model, both: list[torch.optim.Optimizer] = both) -> torch.Tensor:
            loss: torch.Tensor = model(x)
            loss.backward()
            for each in both:
                each.step()
                each.zero_grad()
            return loss

        take: Any = polyshard.CapturedStep(model, both, step, fallback="refuse") if captures else step
        for turn in range(10):
            if tensor_lr and turn == 6:
                lr.fill_(0.005)
            take(batch(turn, next(model.parameters()).dtype, device).chunk(WORLD_SIZE)[rank])
            if captures:
                modes.append(take.mode.value)
        ends.append(wholes(model, True))
        if captures:
            take.reset()
    start = wholes(made(torch.float64, device), False)
    return distance(ends[0], ends[1]), distance(start, {name: end.double() for name, end in ends[1].items()}), modes


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 1e-2)])
def test_captured_steps_equal_eager_ones(dtype: torch.dtype, tolerance: float, tensor_lr: bool) -> None:
    for apart, moved, modes in run(captured_and_eager, dtype, tensor_lr):
        assert modes == ["warming_up"] * 3 + ["captured"] * 7
        assert moved > 0.1
        assert apart <= tolerance * moved


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(CUDA, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("rows", [1, 7, 127, 128, 129, 391])
def test_products_that_are_symmetric(rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> None:
    from polyshard.optim import kernels

    matrices = (random(3, columns, rows).mT if transposed else random(3, rows, columns)) / columns**0.5
    matrices = matrices.to(dtype)
    gram = kernels.gram(matrices)
    # One rounding of sums in fp32: half a unit in the last of 8 or 11 bits, and what fp32 adds.
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    exact = matrices.double() @ matrices.double().mT
    assert gram.dtype is dtype
    torch.testing.assert_close(gram.double(), exact, rtol=1.01 * rounding, atol=1e-4)
    a, b, c = COEFFICIENTS
    found = kernels.quadratic(gram, a, b, c)
    whole = gram.double()
    wanted = a * torch.eye(rows, dtype=torch.float64, device=CUDA) + b * whole + c * whole @ whole
    # Sums of terms far larger than themselves keep the terms' rounding in fp32.
    torch.testing.assert_close(found.double(), wanted, rtol=1.01 * rounding, atol=1e-4 * float(wanted.abs().max()))
    # What is below the diagonal blocks is written twice, and not computed twice.
    for product in (gram, found):
        assert torch.equal(product[:, 128:, :128], product[:, :128, 128:].mT)


@pytest.mark.parametrize("shape", [(1, 300), (300, 1), (129, 391), (391, 129), (128, 128), (1, 1)])
def test_orthogonal_factors_in_bf16_are_near_those_in_fp64(shape: tuple[int, int]) -> None:
    rows, columns = shape
    # Singular values between a half and one, so that rounding is not amplified.
    u, _, v = torch.linalg.svd(random(4, rows, columns), full_matrices=False)
    values = torch.linspace(0.5, 1.0, min(shape), dtype=torch.float64, device=CUDA)
    matrices = (u * values) @ v
    expected = newton_schulz(matrices)
    found = newton_schulz(matrices.bfloat16()).double()
    apart = torch.linalg.vector_norm(found - expected, dim=(1, 2)) / torch.linalg.vector_norm(expected, dim=(1, 2))
    assert float(apart.max()) < 0.05


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("of_gradient", "of_place"), [("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("numel", [1, 2047, 2048, 2049, 100_003])
def test_the_running_mean(numel: int, of_gradient: str, of_place: str, nesterov: bool) -> None:
    gradient = random(numel, dtype=getattr(torch, of_gradient))
    mean = random(numel, dtype=torch.float32, seed=1)
    place = torch.full((numel,), float("nan"), dtype=getattr(torch, of_place), device=CUDA)
    moved = 0.9 * mean.double() + 0.1 * gradient.double()
    wanted = 0.9 * moved + 0.1 * gradient.double() if nesterov else moved
    guard = mean.new_full((numel + 4096,), 7.0)
    guard[:numel] = mean
    mix([guard[:numel]], [gradient], [place], 0.9, nesterov)
    torch.testing.assert_close(guard[:numel].double(), moved, rtol=1e-6, atol=1e-6)
    assert torch.equal(guard[numel:], torch.full_like(guard[numel:], 7.0))
    torch.testing.assert_close(place.double(), wanted, rtol=2**-8 if of_place == "bfloat16" else 1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("of_direction", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 683), (129, 391)])
def test_a_step_along_a_direction(shape: tuple[int, int], of_direction: str, kind: str) -> None:
    parameter = random(*shape, dtype=torch.float32)
    direction = random(*shape, dtype=getattr(torch, of_direction), seed=1)
    wanted = (1 - 0.1 * 0.3) * parameter.double() - 0.1 * 2.0 * direction.double()
    lr: Any = 0.1 if kind == "number" else torch.tensor(0.1, device=CUDA)
    # Transposed, no kernel takes them.
    for each, along, end in ((parameter.t().clone(), direction.t(), wanted.t()), (parameter, direction, wanted)):
        go_along([each], [along], lr, 2.0, 0.3)
        torch.testing.assert_close(each.double(), end, rtol=1e-6, atol=1e-6)
