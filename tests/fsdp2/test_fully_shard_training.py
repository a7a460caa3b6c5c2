"""``fully_shard`` trains as torch's does, number by number, both on gloo and in fp64 unless a test says otherwise.

Programs on one-dimensional meshes are drawn (``runtime/test_random_programs.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    OURS,
    PACKAGES,
    alike,
    as_whole,
    batches,
    both,
    cpu_mesh,
    loss_of,
    make,
    same,
    shard_all,
    train,
    wholes,
)
from processes import KeptRanks
from torch import nn


def replicas_of_shards(rank: int) -> None:
    def run(package: ModuleType) -> Any:
        model = shard_all(package, make(), cpu_mesh(2, 2))
        return train(model), wholes(model)

    both(run)


def _mixed(rank: int, policy: dict[str, Any], tolerance: float) -> None:
    def run(package: ModuleType) -> Any:
        seen: list[torch.dtype] = []
        model = make(dtype=torch.float32)
        model.blocks[0].up.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
        inner = {key: value for key, value in policy.items() if key != "output_dtype"}
        for block in model.blocks:
            package.fully_shard(block, mesh=cpu_mesh(), mp_policy=package.MixedPrecisionPolicy(**inner))
        package.fully_shard(model, mesh=cpu_mesh(), mp_policy=package.MixedPrecisionPolicy(**policy))
        told = train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        seen.append(model(next(batches(1))).dtype)
        kinds.append(seen)
        return told, wholes(model)

    kinds: list[list[torch.dtype]] = []
    both(run, rtol=tolerance, atol=tolerance)
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [
        # bf16 before torch 2.15.
        ({"param_dtype": torch.bfloat16}, 1e-5 if torch.__version__ >= (2, 15) else 2e-2),
        ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32}, 2e-3),
        pytest.param({"reduce_dtype": torch.bfloat16}, 2e-2, marks=pytest.mark.nightly),
    ],
)
def test_mixed_precision(ranks: KeptRanks, policy: dict[str, Any], tolerance: float) -> None:
    ranks.run(2, _mixed, policy, tolerance)


class _Norms(nn.Module):
    """Its norm computes in fp32 between layers that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 9), nn.RMSNorm(9), nn.Linear(9, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [x.dtype, self.up.weight.dtype, self.norm.weight.dtype, self.down.bias.dtype]
        hidden = self.norm(self.up(x).float()).to(x.dtype)
        return x + torch.relu(self.down(hidden))


def _trains_norms(package: ModuleType, overrides: bool) -> list[Any]:
    def chooses(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter)
        return parameter.dtype if parameter.shape == (9,) and parameter.eq(1).all() else None

    torch.manual_seed(0)
    blocks: Any = nn.Sequential(_Norms(), _Norms())
    expected, asked = list(blocks.parameters()), list[nn.Parameter]()
    policy = package.MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, **({"param_dtype_override_fn": chooses} if overrides else {})
    )
    for block in blocks:
        if not overrides:
            package.fully_shard(block.norm, mesh=cpu_mesh())
        package.fully_shard(block, mesh=cpu_mesh(), mp_policy=policy)
    model: Any = package.fully_shard(blocks, mesh=cpu_mesh(), mp_policy=policy)
    # Once each.
    assert not overrides or list(map(id, asked)) == list(map(id, expected))
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.5), list[Any]()
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        loss = model(torch.randn(4, 6, generator=random)).float().square().mean()
        loss.backward()
        told += [loss.item(), blocks[1].seen, *(as_whole(each.grad) for each in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*told, *wholes(model).values()]


def parameters_that_keep_their_dtype(rank: int) -> None:
    """As where norms are sharded by themselves; and as torch 2.15 has it."""
    ours = _trains_norms(OURS, overrides=True)
    assert ours[1] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    for overrides in (False, True) if torch.__version__ >= (2, 15) else (False,):
        # Of one bf16 rounding, 4e-3.
        alike(ours, _trains_norms(PACKAGES[0], overrides), rtol=1e-5, atol=1e-7)


def _factor(rank: int, factor: float) -> None:
    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make())
        for module in model.modules():
            if isinstance(module, package.FSDPModule):
                module.set_gradient_divide_factor(factor)
        told = train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        model.blocks[0].set_gradient_divide_factor(dist.get_world_size())
        loss_of(model, next(batches(1))).backward()
        loss_of(model, next(batches(1))).backward()
        grads = [parameter.grad for parameter in model.parameters()]
        # Rows of the same ranks, and so the same pieces.
        pieces = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        return told, {**wholes(model), **{str(index): piece for index, piece in enumerate(pieces) if piece is not None}}

    both(run)


def test_gradient_divide_factor(ranks: KeptRanks) -> None:
    ranks.run(2, _factor, 5.0)


def _alone(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    plain = make()
    words = next(batches(1))
    for factor in (2.0, 1.0):
        for module in model.modules():
            if isinstance(module, OURS.FSDPModule):
                module.set_gradient_divide_factor(factor)
        # The second of two waits for none: both are divided once.
        model.set_requires_gradient_sync(False)
        loss_of(model, words).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, words).backward()
        for _ in range(2):
            (loss_of(plain, words) / factor).backward()
    same([as_whole(each.grad) for each in model.parameters()], [each.grad for each in plain.parameters()])


@pytest.mark.nightly
def test_one_rank_divides(ranks: KeptRanks) -> None:
    ranks.run(1, _alone)


def ignored_parameters(rank: int) -> None:
    def run(package: ModuleType) -> Any:
        model = make()
        ignored = {model.head.weight, *model.blocks[0].parameters()}
        shapes = [parameter.shape for parameter in ignored]
        shard_all(package, model, ignored_params=ignored)
        assert [parameter.shape for parameter in ignored] == shapes
        others = [parameter for parameter in model.parameters() if parameter not in ignored]
        for words in batches(2):
            loss_of(model, words).backward()
        told = [as_whole(parameter.grad).norm().item() for parameter in ignored if parameter.grad is not None]
        torch.optim.SGD(others, lr=0.1).step()
        return sorted(told), wholes(model)

    both(run)


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 6).double(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.narrow(self.wide(x).float())
        return out


def parameters_of_several_dtypes(rank: int) -> None:
    torch.manual_seed(0)
    model, plain = _TwoDtypes(), _TwoDtypes()
    plain.load_state_dict(model.state_dict())
    OURS.fully_shard(model, mesh=cpu_mesh())
    x = torch.ones(1, 4, dtype=torch.float64)
    for each in (model, plain):
        each(x).sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    same(wholes(model), dict(plain.state_dict()))


def parameters_that_came_later(rank: int) -> None:
    """An adapter around a sharded layer, whose gradients the program averages, as Transformers' Trainer does."""

    def average(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make())
        model.blocks[0].up = nn.Sequential(model.blocks[0].up, nn.Linear(49, 49).double())
        for parameter in model.blocks[0].up[1].parameters():
            nn.init.constant_(parameter, 0.1)
            parameter.register_post_accumulate_grad_hook(average)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        told = []
        for words in batches(3):
            loss = loss_of(model, words)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.append(loss.item())
        return told, wholes(model)

    both(run)


def compiled_blocks(rank: int) -> None:
    # The compiler looks at .grad of the tensors that a frame takes in.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    expected = train(shard_all(OURS, make()))
    for before in (True, False):
        torch.compiler.reset()
        model: Any = make()
        if not before:
            shard_all(OURS, model)
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
        if before:
            shard_all(OURS, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        same(train(model, 1, optimizer), expected[:2])
        # Later steps, and the second block, go through the code that is there.
        with torch._dynamo.config.patch(error_on_recompile=True):
            loss_of(model, next(batches(1))).backward()


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    replicas_of_shards: 4,
    parameters_that_keep_their_dtype: 2,
    ignored_parameters: 2,
    parameters_of_several_dtypes: 2,
    parameters_that_came_later: 2,
    compiled_blocks: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
