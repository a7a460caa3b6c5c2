"""``fully_shard([a, b])``: one group, gathered by one launch and reduced by one, as torch's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    OURS,
    WIDTH,
    Words,
    as_unsharded,
    batches,
    beside_torch,
    both,
    copied,
    cpu_mesh,
    each_of,
    loss_of,
    make,
    same,
    seen,
    train,
    wholes,
)
from polyshard.errors import AlreadyShardedError
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


def shard_lists(face: ModuleType, model: Words, *shape: int, **settings: Any) -> Any:
    """The blocks, what is behind them, and the rest."""
    mesh = cpu_mesh(*shape)
    blocks = face.fully_shard(list(model.blocks), mesh=mesh, **settings)
    assert blocks == list(model.blocks)
    face.fully_shard([model.norm, model.head], mesh=mesh, **settings)
    return face.fully_shard(model, mesh=mesh, **settings)


def _trains(rank: int, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    def run(face: ModuleType) -> Any:
        policy = {"offload_policy": face.CPUOffloadPolicy(pin_memory=False)} if "offloads" in settings else settings
        model = shard_lists(face, make(), *shape, **policy)
        return train(model), wholes(model)

    both(run)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        pytest.param((1,), {}, marks=pytest.mark.nightly),
        ((2,), {}),
        pytest.param((3,), {"reshard_after_forward": True}, marks=pytest.mark.nightly),
        pytest.param((2,), {"reshard_after_forward": False}, marks=pytest.mark.nightly),
        ((2,), {"offloads": True}),
        ((2, 2), {}),
    ],
    ids=["one", "two", "releases", "keeps", "offloads", "replicas"],
)
def test_training_is_that_of_torch(ranks: KeptRanks, shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    ranks.run(4 if len(shape) == 2 else shape[0], _trains, shape if len(shape) == 2 else (), settings)


def the_unsharded_model(rank: int) -> None:
    as_unsharded(shard_lists(OURS, make()), make())


class Twice(Words):
    """The norm runs before the blocks and behind them, and the head behind both."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(words))
        for block in self.blocks:
            x = block(self.norm(x))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits + self.head(x)


def a_module_that_runs_several_times(rank: int) -> None:
    def run(face: ModuleType) -> Any:
        torch.manual_seed(0)
        model = shard_lists(face, Twice().double(), reshard_after_forward=True)
        return train(model), wholes(model)

    both(run)


class Selective(Words):
    """Runs the head where it is told to, and never the second block."""

    skips = False

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.norm(self.blocks[0](self.embedding(words)))
        return x @ self.embedding.weight.mT if self.skips else self.head(x)


def modules_that_do_not_run(face: ModuleType) -> Any:
    torch.manual_seed(0)
    model = shard_lists(face, Selective().double(), reshard_after_forward=True)
    found = []
    for skips in (False, True, False):
        model.skips = skips
        loss = loss_of(model, next(batches(1)))
        if face is OURS:
            # Released behind the outermost forward; FSDP2 of torch 2.11 keeps them until backward.
            assert all(isinstance(each, DTensor) for each in (model.blocks[0].up.weight, model.norm.weight))
        loss.backward()
        found.append(seen(model))
        model.zero_grad()
    model.skips = False
    return [*found, train(model), wholes(model)]


def any_of_a_list_stands_for_all(face: ModuleType) -> Any:
    model = shard_lists(face, make())
    first, second = model.blocks
    assert face.fully_shard.state(first) is face.fully_shard.state(second)
    assert face.fully_shard.state(model.norm) is not face.fully_shard.state(first)
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


def modules_inside_others_of_a_list(face: ModuleType) -> Any:
    model: Any = make()
    block = model.blocks[0]
    face.fully_shard([block.norm, block, model.blocks[1]], mesh=cpu_mesh())
    face.fully_shard(model, mesh=cpu_mesh())
    assert not isinstance(block.norm, face.FSDPModule)
    return train(model), seen(model)


def sharded_modules_inside_those_of_a_list(face: ModuleType) -> Any:
    model: Any = make()
    face.fully_shard([each.norm for each in model.blocks], mesh=cpu_mesh())
    shard_lists(face, model)
    return train(model), seen(model)


def a_list_over_several_parents(face: ModuleType) -> Any:
    """Each of them is sharded by itself, and contains one module of the list."""
    model: Any = make()
    face.fully_shard([each.norm for each in model.blocks], mesh=cpu_mesh())
    for block in model.blocks:
        face.fully_shard(block, mesh=cpu_mesh())
    face.fully_shard(model, mesh=cpu_mesh())
    return train(model), seen(model)


def methods_beside_forward(face: ModuleType) -> Any:
    model = shard_lists(face, make(), reshard_after_forward=True)
    face.register_fsdp_forward_method(model.blocks[1], "doubled")
    told = train(model, 1)
    doubled = copied(model.blocks[1].doubled(torch.ones(2, WIDTH, dtype=torch.float64)))
    return told, doubled, train(model), wholes(model)


def meta_models(face: ModuleType) -> Any:
    with torch.device("meta"):
        model = shard_lists(face, Words().double())
    model = model.to_empty(device="cpu").float()
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 0.01 * len(name))
    model.scale.fill_(1.0)
    model.head.to(torch.float64)
    model.to(torch.float64)
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


def refusals(face: ModuleType) -> None:
    mesh = cpu_mesh()
    model: Any = make()
    face.fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(AssertionError, match="composable distributed API can only be applied to a module once"):
        face.fully_shard([model.norm, model.blocks[0]], mesh=mesh)
    if face is OURS:
        assert type(model.norm) is nn.LayerNorm
        assert type(model.norm.weight) is nn.Parameter
    pair, other = (face.fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], mesh=mesh) for _ in range(2))
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got"):
        other[0]._get_fsdp_state()._lazy_init()
    with pytest.raises(RuntimeError, match="single root module"):
        pair[0](torch.ones(1, 2))
    with torch.device("meta"):
        unmade = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="materialized from meta device"):
        face.fully_shard(unmade, mesh=mesh)._get_fsdp_state()._lazy_init()


def _checkpointed(rank: int, reentrant: bool, number: int) -> None:
    def run(face: ModuleType) -> Any:
        model = make()
        for block in list(model.blocks)[:number]:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
        shard_lists(face, model)
        return train(model), wholes(model)

    both(run)


@pytest.mark.parametrize(("reentrant", "number"), [pytest.param(False, 1, marks=pytest.mark.nightly), (True, 2)])
def test_checkpoints_inside_a_group(ranks: KeptRanks, reentrant: bool, number: int) -> None:
    ranks.run(2, _checkpointed, reentrant, number)


def _checkpoint_around(rank: int, reentrant: bool) -> None:
    def step(model: Any, words: torch.Tensor) -> torch.Tensor:
        def blocks(x: torch.Tensor) -> torch.Tensor:
            for block in model.blocks:
                x = block(x)
            return x

        def forward(words: torch.Tensor) -> torch.Tensor:
            x = checkpoint(blocks, model.embedding(words), use_reentrant=reentrant)
            logits: torch.Tensor = model.head(model.norm(x))
            return logits

        model.forward = forward
        return loss_of(model, words)

    as_unsharded(shard_lists(OURS, make()), make(), step)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_checkpoint_around_a_group(ranks: KeptRanks, reentrant: bool) -> None:
    ranks.run(2, _checkpoint_around, reentrant)


class Careful(Words):
    """Goes on without its head where that fails, which is then the second of its group or the first."""

    first = False

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        logits = self._of_head(x) if self.first else 0
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x @ self.embedding.weight.mT + (logits if self.first else self._of_head(x))

    def _of_head(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(ValueError):
            logits: torch.Tensor = self.head(x)
            return logits
        return torch.zeros(1)


def _fails(*_: object) -> None:
    raise ValueError("of the user")


def _caught(rank: int, first: bool) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Careful().double())
    shard_lists(OURS, models[0], reshard_after_forward=True)
    for model in models:
        model.first = first
        model.head.register_forward_hook(_fails)
    as_unsharded(*models)


@pytest.mark.parametrize("first", [False, True])
def test_an_exception_that_the_model_catches(ranks: KeptRanks, first: bool) -> None:
    ranks.run(2, _caught, first)


def an_exception_between_two_of_a_group(rank: int) -> None:
    model: Any = shard_lists(OURS, make())
    plain = make()
    for at in (*model.blocks, model.head):
        hook = at.register_forward_hook(_fails)
        with pytest.raises(ValueError, match="of the user"):
            model(next(batches(1)))
        hook.remove()
    with torch.no_grad():
        same(model(next(batches(1))), plain(next(batches(1))))
    as_unsharded(model, plain)


class Inside(Words):
    """Differentiates a loss of its own between the norm and the head."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        self.norm(x.detach()).square().mean().backward()
        normal = self.norm(x)
        normal.detach().requires_grad_().sum().backward()
        logits: torch.Tensor = self.head(normal)
        return logits


def backwards_between_two_of_a_group(rank: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Inside().double())
    shard_lists(OURS, models[0], reshard_after_forward=True)
    as_unsharded(*models)


class Heads(nn.Module):
    """Two of one group, of which each rank's loss uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.body(words.double()))
        return self.first(x), self.second(x)


def ranks_that_use_other_modules_of_a_group(rank: int) -> None:
    def step(model: Any, words: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(words)[dist.get_rank()].square().mean()
        return loss

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Heads().double())
    OURS.fully_shard([models[0].first, models[0].second], mesh=cpu_mesh(), reshard_after_forward=True)
    OURS.fully_shard(models[0], mesh=cpu_mesh())
    as_unsharded(*models, step)


class Headless(Words):
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        normal: torch.Tensor = self.norm(x)
        return normal


def a_head_that_is_called_in_chunks(rank: int) -> None:
    """The model's forward ends with the norm; the head runs behind it, for some words at a time."""

    def chunked(model: Any, words: torch.Tensor) -> torch.Tensor:
        x = model(words)
        losses = [nn.functional.cross_entropy(model.head(x[:, place]), words[:, place]) for place in range(5)]
        return torch.stack(losses).mean()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Headless().double())
    shard_lists(OURS, models[0], reshard_after_forward=True)
    as_unsharded(*models, chunked)


def a_parameter_that_calls_would_part(rank: int) -> None:
    model, mesh = Words(tied=True).double(), cpu_mesh()
    OURS.fully_shard(model.embedding, mesh=mesh)
    for module, name in ((model.head, "weight"), (model, "head.weight")):
        with pytest.raises(AlreadyShardedError, match=f"'{name}' of .*, as 'weight' of a module that.*one list"):
            OURS.fully_shard(module, mesh=mesh)


#: Bodies over both faces, and on how many ranks each runs.
BESIDE: dict[Callable[[ModuleType], object], int] = {
    modules_that_do_not_run: 2,
    any_of_a_list_stands_for_all: 2,
    modules_inside_others_of_a_list: 2,
    sharded_modules_inside_those_of_a_list: 2,
    a_list_over_several_parents: 2,
    methods_beside_forward: 2,
    meta_models: 2,
    refusals: 2,
}


@pytest.mark.parametrize("body", each_of(BESIDE, newer=[methods_beside_forward]))
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BESIDE[body], beside_torch, body)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    the_unsharded_model: 2,
    casts_of_each: 2,
    a_module_that_runs_several_times: 2,
    an_exception_between_two_of_a_group: 2,
    a_head_that_is_called_in_chunks: 2,
    backwards_between_two_of_a_group: 2,
    ranks_that_use_other_modules_of_a_group: 2,
    a_parameter_that_calls_would_part: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
