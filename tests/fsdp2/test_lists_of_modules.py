"""``fully_shard([a, b])``: one group, gathered by one launch and reduced by one, as torch's.

Of lists in all settings, programs are drawn (``runtime/test_random_programs.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from fsdp2_models import OURS, Words, batches, beside_torch, copied, cpu_mesh, loss_of, make, seen, train, wholes
from polyshard.errors import AlreadyShardedError
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor import DTensor


def shard_lists(package: ModuleType, model: Words, *shape: int, **settings: Any) -> Any:
    """The blocks, what is behind them, and the rest."""
    mesh = cpu_mesh(*shape)
    blocks = package.fully_shard(list(model.blocks), mesh=mesh, **settings)
    assert blocks == list(model.blocks)
    package.fully_shard([model.norm, model.head], mesh=mesh, **settings)
    return package.fully_shard(model, mesh=mesh, **settings)


class Selective(Words):
    """Runs the head where it is told to, and never the second block."""

    skips = False

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.norm(self.blocks[0](self.embedding(words)))
        return x @ self.embedding.weight.mT if self.skips else self.head(x)


def modules_that_do_not_run(package: ModuleType) -> Any:
    torch.manual_seed(0)
    model = shard_lists(package, Selective().double(), reshard_after_forward=True)
    found = []
    for skips in (False, True, False):
        model.skips = skips
        loss = loss_of(model, next(batches(1)))
        if package is OURS:
            # Released behind the outermost forward; FSDP2 of torch 2.11 keeps them until backward.
            assert all(isinstance(each, DTensor) for each in (model.blocks[0].up.weight, model.norm.weight))
        loss.backward()
        found.append(seen(model))
        model.zero_grad()
    model.skips = False
    return [*found, train(model), wholes(model)]


def any_of_a_list_stands_for_all(package: ModuleType) -> Any:
    model = shard_lists(package, make())
    first, second = model.blocks
    assert package.fully_shard.state(first) is package.fully_shard.state(second)
    assert package.fully_shard.state(model.norm) is not package.fully_shard.state(first)
    found = []
    first.unshard()
    found.append(copied([first.up.weight, second.down.bias, model.head.weight]))
    second.reshard()
    found.append(copied([first.up.weight, second.down.bias]))
    second.set_reshard_after_forward(False)
    loss = loss_of(model, next(batches(1)))
    found.append(copied([first.up.weight, second.down.bias]))
    first.set_requires_gradient_sync(False)
    loss.backward()
    found.append([each.grad is None for each in second.parameters()])
    second.set_requires_gradient_sync(True)
    second.set_gradient_divide_factor(5.0)
    loss_of(model, next(batches(1))).backward()
    return [*found, seen(model)]


def modules_inside_others_of_a_list(package: ModuleType) -> Any:
    model: Any = make()
    block = model.blocks[0]
    package.fully_shard([block.norm, block, model.blocks[1]], mesh=cpu_mesh())
    package.fully_shard(model, mesh=cpu_mesh())
    assert not isinstance(block.norm, package.FSDPModule)
    return train(model), seen(model)


def casts_of_each(rank: int) -> None:
    """As in FSDP2 of torch 2.13."""
    dtypes: list[torch.dtype] = []
    policy = OURS.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model = shard_lists(OURS, make(dtype=torch.float32), mp_policy=policy)
    for module in (*model.blocks, model.norm, model.head):
        module.register_forward_hook(lambda _, args, out: dtypes.extend((args[0].dtype, out.dtype)))
    model(next(batches(1)))
    assert dtypes == [torch.bfloat16, torch.float32] * 4


def refusals(package: ModuleType) -> None:
    mesh = cpu_mesh()
    model: Any = make()
    package.fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(AssertionError, match="composable distributed API can only be applied to a module once"):
        package.fully_shard([model.norm, model.blocks[0]], mesh=mesh)
    if package is OURS:
        assert type(model.norm) is nn.LayerNorm
        assert type(model.norm.weight) is nn.Parameter
    pair, other = (package.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], mesh=mesh) for _ in range(2))
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got"):
        other[0]._get_fsdp_state()._lazy_init()
    with pytest.raises(RuntimeError, match="single root module"):
        pair[0](torch.ones(1, 2))
    with torch.device("meta"):
        unmade = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        package.fully_shard(unmade, mesh=mesh)._get_fsdp_state()._lazy_init()


def a_parameter_that_calls_would_part(rank: int) -> None:
    model, mesh = Words(tied=True).double(), cpu_mesh()
    OURS.fully_shard(model.embedding, mesh=mesh)
    for module, name in ((model.head, "weight"), (model, "head.weight")):
        with pytest.raises(AlreadyShardedError, match=f"'{name}' of .*, as 'weight' of a module that.*one list"):
            OURS.fully_shard(module, mesh=mesh)


#: Bodies over both packages, and on how many ranks each runs.
BESIDE: dict[Callable[[ModuleType], object], int] = {
    modules_that_do_not_run: 2,
    any_of_a_list_stands_for_all: 2,
    modules_inside_others_of_a_list: 2,
    refusals: 2,
}


@pytest.mark.parametrize("body", BESIDE, ids=lambda body: body.__name__)
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BESIDE[body], beside_torch, body)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {casts_of_each: 2, a_parameter_that_calls_would_part: 2}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
