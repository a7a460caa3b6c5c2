"""Torch's functions that mean whole parameters: refused by name for pieces, and right where parameters are whole."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_all_close,
    draw,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    units_of,
    whole,
)
from polyshard import ShardConfig
from polyshard._torch_private import when_imported
from polyshard.errors import AlreadyShardedError, ParameterChangedError, PolyshardError, StateError, UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from polyshard_testing.plugin import group_of_one
from torch import nn
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap
from torch.nn.init import kaiming_uniform_, normal_
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, stateless, vector_to_parameters
from torch.optim import optimizer as optimizers

BLOCKS = {"policy": units_of(Block)}

CUT = [
    (2, {"strategy": "full_shard"}),
    (3, {"strategy": "shard_grad_op", "layout": "rows"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2, "layout": {"name": "blocks", "size": 8, "smallest": 1}}),
]

WHOLE = (2, {"strategy": "no_shard"})

INPUTS = draw(4, 3)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def refusal(model: nn.Module, call: Callable[[nn.Module], object], kind: type[PolyshardError], rank: int) -> str:
    """What ``call`` is refused with; the model is as before, and goes on training."""
    before = whole(model)
    with pytest.raises(kind) as caught:
        call(model)
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
    expected = seeded(Net)
    expected.load_state_dict(before)
    torch.testing.assert_close(model(INPUTS), expected(INPUTS), rtol=1e-12, atol=1e-12)
    square_step(model, 0, rank)
    assert f"rank {rank}" in str(caught.value)
    return str(caught.value)


def other() -> dict[str, torch.Tensor]:
    return values(seeded(Net, seed=5))


def apply_normal(model: nn.Module) -> None:
    model.apply(lambda module: normal_(module.weight) if isinstance(module, nn.Linear) else None)


REFUSED: dict[str, tuple[Callable[[nn.Module], object], type[PolyshardError], list[str]]] = {
    "functional_call": (
        lambda model: functional_call(model, other(), (INPUTS,)),
        UnsupportedError,
        ["torch.func.functional_call", "'first.weight'", "polyshard.unsharded(model)"],
    ),
    "functional_call of a unit": (
        lambda model: functional_call(model.blocks[1], {"up.bias": torch.ones(7).double()}, (draw(4, 5),)),  # type: ignore[index]
        UnsupportedError,
        ["torch.func.functional_call", "'blocks.1.up.bias'"],
    ),
    "stateless": (
        lambda model: stateless.functional_call(model, other(), (INPUTS,)),
        UnsupportedError,
        ["functional_call", "'first.weight'"],
    ),
    "its own pieces": (
        lambda model: functional_call(model, {n: 2 * p.detach() for n, p in model.named_parameters()}, (INPUTS,)),
        UnsupportedError,
        ["functional_call", "would be taken for a new value, and kept"],
    ),
    "grad": (
        lambda model: grad(lambda given: functional_call(model, given, (INPUTS,)).sum())(other()),
        UnsupportedError,
        ["functional_call", "'first.weight'"],
    ),
    "grad of inputs": (
        lambda model: grad(lambda x: model(x).sum())(INPUTS),
        UnsupportedError,
        ["torch.func (grad, vjp, jacrev, hessian, nested jvp) called '(root)', a Net that is sharded"],
    ),
    "jacrev of a unit": (
        lambda model: jacrev(model.blocks[1])(draw(4, 5)),  # type: ignore[index]
        UnsupportedError,
        ["torch.func (grad, vjp, jacrev, hessian, nested jvp) called 'blocks.1', a Block", "jacfwd"],
    ),
    "parameters_to_vector": (
        lambda model: parameters_to_vector(model.parameters()),
        StateError,
        ["torch.nn.utils.parameters_to_vector got 'first.weight'", "with polyshard.unsharded(model)'"],
    ),
    "vector_to_parameters": (
        lambda model: vector_to_parameters(torch.zeros(263).double(), model.parameters()),
        StateError,
        ["torch.nn.utils.vector_to_parameters got 'first.weight'", "writeback=True"],
    ),
    "apply": (apply_normal, StateError, ["torch.nn.init.normal_ got 'first.weight'", "initializer="]),
    "kaiming_uniform_": (
        lambda model: kaiming_uniform_(model.blocks[0].down.weight),  # type: ignore[index]
        StateError,
        ["torch.nn.init.kaiming_uniform_ got 'blocks.0.down.weight'"],
    ),
    "reset_parameters": (
        lambda model: model.last.reset_parameters(),
        StateError,
        ["torch.nn.init.kaiming_uniform_ got 'last.weight'"],
    ),
    "distribute_tensor": (
        lambda model: distribute_tensor(model.last.weight),
        StateError,
        ["torch.distributed.tensor.distribute_tensor got 'last.weight'", "polyshard.as_dtensor"],
    ),
    "distribute_module": (
        lambda model: distribute_module(model),
        StateError,
        ["torch.distributed.tensor.distribute_module would divide 'first.weight'", "Call it first"],
    ),
    "parallelize_module": (
        lambda model: parallelize_module(model, None, {"last": ColwiseParallel()}),
        StateError,
        ["torch.distributed.tensor.parallel.parallelize_module would divide 'first.weight'", "Call it first"],
    ),
    "xavier, by keyword": (
        lambda model: nn.init.xavier_normal_(tensor=model.last.weight, gain=2.0),
        StateError,
        ["torch.nn.init.xavier_normal_ got 'last.weight'"],
    ),
}


# Torch's own: what stateless calls is called by another name.
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.stateless.functional_call` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_means_whole_parameters_is_refused_for_pieces_on_every_rank(name: str) -> None:
    call, kind, words = REFUSED[name]
    more = {"functional_call": [*CUT, WHOLE], "apply": CUT, "parameters_to_vector": CUT}
    more |= {key: [CUT[0], WHOLE] for key in ("vmap", "jacrev", "distribute_module", "parallelize_module")}
    for world_size, settings in more.get(name, CUT[:1]):

        def on_rank(rank: int, world: ThreadedWorld, settings: dict[str, Any] = settings) -> str:
            return refusal(sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings), call, kind, rank)

        for message in on_ranks(world_size, on_rank):
            for word in words:
                assert word in message


REPLACES: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": lambda model: parametrizations.weight_norm(model.blocks[0].up),  # type: ignore[index]
    "spectral_norm": lambda model: parametrizations.spectral_norm(model.blocks[0].up),  # type: ignore[index]
    "l1": lambda model: prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5),  # type: ignore[index]
    "global": lambda model: prune.random_unstructured(model.blocks[0].up, "weight", amount=3),  # type: ignore[index]
}


@pytest.mark.parametrize("name", REPLACES)
@pytest.mark.parametrize(("world_size", "settings"), [CUT[0], WHOLE])
def test_what_would_replace_sharded_parameters_is_refused(name: str, world_size: int, settings: dict[str, Any]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        return refusal(model, REPLACES[name], UnsupportedError, rank)

    for message in on_ranks(world_size, on_rank):
        assert "would replace 'blocks.0.up.weight'" in message
        assert "before sharding" in message


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    ],
)
def test_what_is_parametrized_or_pruned_before_sharding_trains_as_the_unsharded_model(
    change: Callable[[nn.Module], object],
) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = nn.Linear(3, 4).double()
            change(module)
        return module

    def trained(module: nn.Module, ranks: list[int]) -> torch.Tensor:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for turn in range(2):
            for rank in ranks:
                (module(draw(4, 3, turn=turn, rank=rank)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return module.eval()(INPUTS).detach()

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        with world.lock:
            module = make()
        module.eval()
        polyshard.shard(module, threaded(world, rank))
        return trained(module, [rank])

    expected = trained(make().eval(), [0, 1])
    assert_all_close(on_ranks(2, on_rank), expected)


def test_a_parametrization_is_not_removed_from_pieces() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = seeded(lambda: parametrizations.weight_norm(nn.Linear(3, 4)))
        polyshard.shard(model, threaded(world, rank))
        expected = model(INPUTS).detach()
        with pytest.raises(UnsupportedError, match=rf"remove_parametrizations would replace 'param.*rank {rank}"):
            parametrize.remove_parametrizations(model, "weight")
        torch.testing.assert_close(model(INPUTS).detach(), expected, rtol=0, atol=0)

    on_ranks(2, on_rank)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "settings"), [*CUT, WHOLE])
def test_inside_of_unsharded_they_see_the_whole_model(world_size: int, settings: dict[str, Any]) -> None:
    plain, given = seeded(Net), other()

    def calls(model: nn.Module) -> list[Any]:
        def loss(each: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(model, each, (x,)).square().sum()

        own = {name: value.detach() for name, value in model.named_parameters()}
        with torch.no_grad():
            seen: list[Any] = [functional_call(model, given, (INPUTS,))]
        seen += [grad(loss)(given, INPUTS), vmap(grad(loss), (None, 0))(own, INPUTS), vmap(model)(INPUTS)]
        seen += [jacrev(model)(INPUTS[:1]), parameters_to_vector(model.parameters()).detach()]
        return seen

    def on_rank(rank: int, world: ThreadedWorld) -> list[Any]:
        model = sharded_copy(plain, rank, world, **BLOCKS, **settings)
        square_step(model, 0, rank)
        model.zero_grad()
        before = whole(model)
        with polyshard.unsharded(model):
            seen = calls(model)
        torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
        square_step(model, 0, rank)
        return seen

    expected = calls(seeded(Net))
    assert_all_close(on_ranks(world_size, on_rank), expected)


@pytest.mark.parametrize(("world_size", "settings"), [*CUT, WHOLE])
def test_inside_of_unsharded_what_they_write_is_written_back(world_size: int, settings: dict[str, Any]) -> None:
    vector = parameters_to_vector(seeded(Net, seed=5).parameters()).detach()

    def change(model: Any) -> None:
        vector_to_parameters(vector, model.parameters())
        normal_(model.first.weight, generator=torch.Generator().manual_seed(1))
        nn.init.xavier_uniform_(model.last.weight, generator=torch.Generator().manual_seed(2))
        prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
        prune.remove(model.blocks[0].up, "weight")

    plain = seeded(Net)
    change(plain)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        before = whole(model)
        with polyshard.unsharded(model):
            vector_to_parameters(vector, model.parameters())
        torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
        with polyshard.unsharded(model, writeback=True):
            change(model)
        square_step(model, 0, rank)
        return whole(model)

    for got in on_ranks(world_size, on_rank):
        torch.testing.assert_close(got, values(plain), rtol=0, atol=0)


def test_a_parameter_that_is_removed_inside_of_unsharded_is_missed_by_the_next_forward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        up, weight = model.blocks[0].up, model.blocks[0].up.weight
        with polyshard.unsharded(model):
            prune.l1_unstructured(up, "weight", amount=0.5)
        for _ in range(2):
            with pytest.raises(ParameterChangedError, match=rf"'blocks.0.up.weight' on rank {rank}.*parametrizations"):
                model(INPUTS)
        del up.weight_orig, up.weight_mask, up.weight
        up._forward_pre_hooks.clear()
        up.weight = weight
        torch.testing.assert_close(model(INPUTS), seeded(Net)(INPUTS), rtol=1e-12, atol=1e-12)

    on_ranks(2, on_rank)


def test_what_is_not_sharded_is_left_to_torch() -> None:
    polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    model, twin = seeded(Net), seeded(Net, seed=5)
    vector_to_parameters(vec=parameters_to_vector(twin.parameters()), parameters=model.parameters())
    torch.testing.assert_close(values(model), values(twin), rtol=0, atol=0)
    expected = torch.empty(2, 3).normal_(1.0, 2.0, generator=torch.Generator().manual_seed(0))
    got = nn.init.normal_(torch.empty(2, 3), std=2.0, mean=1.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(got, expected)
    bound = math.sqrt(6 / 3)
    assert kaiming_uniform_(torch.empty(400, 3)).abs().max() <= bound
    with pytest.raises(ValueError, match="fewer than 2 dimensions"):
        kaiming_uniform_(torch.empty(3))
    with pytest.raises(TypeError):
        vector_to_parameters([1.0], model.parameters())  # type: ignore[arg-type]
    parametrizations.weight_norm(model.last)  # type: ignore[arg-type]
    parametrize.remove_parametrizations(model.last, "weight")  # type: ignore[arg-type]
    prune.l1_unstructured(model.last, "bias", amount=1)
    assert list(inspect.signature(nn.init.normal_).parameters) == ["tensor", "mean", "std", "generator"]
    stacked, _ = stack_module_state([seeded(Net), seeded(Net)])
    assert stacked["first.weight"].shape == (2, 5, 3)


def test_constants_are_right_on_pieces() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        nn.init.ones_(model.first.weight)
        nn.init.constant_(model.last.weight, 0.5)
        nn.init.zeros_(model.last.bias)
        return whole(model)

    for got in on_ranks(2, on_rank):
        assert torch.equal(got["first.weight"], torch.ones(5, 3).double())
        assert torch.equal(got["last.weight"], torch.full((2, 5), 0.5).double())
        assert not got["last.bias"].any()


def test_buffers_alone_may_be_put_in_for_a_call() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()

    buffers = {"1.running_mean": draw(4), "1.running_var": draw(4).square() + 1}

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(make), rank, world)
        return functional_call(model, dict(buffers), (INPUTS,)).detach()

    expected = functional_call(seeded(make), dict(buffers), (INPUTS,)).detach()
    assert_all_close(on_ranks(2, on_rank), expected)


def test_flat_parameters_are_pieces_too() -> None:
    model = polyshard.shard(seeded(Net), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}, **BLOCKS))
    flat = polyshard.flat_parameters(model)
    for call in (lambda: normal_(flat[1]), lambda: parameters_to_vector(flat[1:])):
        with pytest.raises(StateError, match=r"got 'blocks\.0', of which this rank holds a piece"):
            call()
    normal_(torch.empty(3))


def test_gradients_of_parameters_come_by_backward_alone() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        parameters = list(model.parameters())
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(model(INPUTS).sum(), parameters)
        assert not any(
            each is not None for each in torch.autograd.grad(model(INPUTS).sum(), parameters, allow_unused=True)
        )
        square_step(model, 0, rank)

    on_ranks(2, on_rank)


def test_penalties_of_single_elements_count_in_the_loss() -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        return model(draw(4, 3, rank=rank)).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())

    plain = seeded(Net)
    for rank in range(2):
        (loss(plain, rank) / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        loss(model, rank).backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)

    for got in on_ranks(2, on_rank):
        torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)


def test_modules_that_are_imported_later_are_reached_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_imported_late.py").write_text("def answer():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    seen: list[int] = []
    when_imported("acme_imported_late", lambda module: seen.append(module.answer()))
    assert seen == []
    importlib.import_module("acme_imported_late")
    assert seen == [1]
    when_imported("acme_imported_late", lambda module: seen.append(module.answer()))
    assert seen == [1, 1]
    assert sys.meta_path == before
    assert importlib.reload(sys.modules["acme_imported_late"]).answer() == 1


EXCHANGED = {
    "torch.amp.grad_scaler.GradScaler._unscale_grads_",
    "torch.autograd.backward",
    "torch.nn.init.normal_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.nn.utils.convert_parameters.parameters_to_vector",
    "torch.nn.utils.parametrize.register_parametrization",
    "torch.utils.checkpoint.checkpoint",
}


def sharded() -> nn.Module:
    return polyshard.shard(nn.Linear(4, 2), ShardConfig(collectives={"name": "fake", "rank": 0, "world_size": 2}))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_distributed_data_parallel_refuses_a_sharded_model(strategy: Any) -> None:
    fake = {"name": "fake", "world_size": 2}
    inner = polyshard.shard(nn.Linear(4, 2), ShardConfig(collectives=fake, strategy=strategy))
    around = nn.Sequential(inner, nn.Linear(2, 2))
    for model in (inner, around):
        with group_of_one(), pytest.raises(AlreadyShardedError, match=r"DistributedDataParallel got .*Leave it out"):
            nn.parallel.DistributedDataParallel(model)
    inner(torch.ones(1, 4)).sum().backward()
    # Models beside it are theirs.
    with group_of_one():
        nn.parallel.DistributedDataParallel(nn.Linear(4, 2))


def test_torch_gets_its_functions_back() -> None:
    polyshard.restore_torch()
    assert polyshard.exchanged_functions() == ()
    hooks = len(optimizers._global_optimizer_pre_hooks)  # type: ignore[attr-defined]
    initialise, backward = nn.init.normal_.__code__, torch.autograd.backward.__code__
    unscale = torch.amp.GradScaler._unscale_grads_
    piece = next(sharded().parameters())
    assert set(polyshard.exchanged_functions()) >= EXCHANGED
    assert nn.init.normal_.__code__ is not initialise
    polyshard.restore_torch()
    assert polyshard.exchanged_functions() == ()
    assert nn.init.normal_.__code__ is initialise
    assert torch.autograd.backward.__code__ is backward
    assert torch.amp.GradScaler._unscale_grads_ is unscale
    assert len(optimizers._global_optimizer_pre_hooks) == hooks  # type: ignore[attr-defined]
    # Torch's own again, which takes a piece for a parameter.
    nn.init.normal_(piece, std=0.0)
    assert piece.detach().eq(0).all()


def test_the_next_shard_exchanges_them_again() -> None:
    polyshard.restore_torch()
    model = sharded()
    first = set(polyshard.exchanged_functions())
    polyshard.restore_torch()
    sharded()
    assert set(polyshard.exchanged_functions()) == first >= EXCHANGED
    assert model(torch.ones(1, 4)).shape == (1, 2)
