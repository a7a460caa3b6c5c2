"""Gradients that accumulate: over backwards outside of ``no_sync``, inside of it, and what ``.grad`` is meanwhile."""

from __future__ import annotations

import gc
import warnings
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from parity import Block, Net, draw, on_ranks, seeded
from polyshard.errors import StateError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp._unit import FlatGradients
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CONTEXT = PluginContext("test", torch.device("cpu"), timeout=timedelta(seconds=10))
FORMS = pytest.mark.parametrize("use_orig_params", [False, True])
EACH_STRATEGY = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])


def _wrapped(world: ThreadedWorld, rank: int, strategy: str, use_orig_params: bool) -> FSDP:
    with world.lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        return FSDP(
            seeded(Net),
            ThreadedCollectives(CONTEXT, world=world, rank=rank),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )


def _backward(model: nn.Module, turn: int, rank: int) -> None:
    model(draw(4, 3, turn=turn, rank=rank)).square().mean().backward()


def _gradients(turns: list[int], ranks: list[int]) -> dict[str, torch.Tensor]:
    """The mean over ``ranks`` of the unsharded model's gradients, summed over ``turns``."""
    model = seeded(Net)
    for rank in ranks:
        for turn in turns:
            _backward(model, turn, rank)
    return {name: p.grad / len(ranks) for name, p in model.named_parameters() if p.grad is not None}


def _step(model: FSDP) -> dict[str, torch.Tensor]:
    """By how much a step of SGD with a learning rate of one lowers each parameter: its whole gradient."""
    before = _parameters(model)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return {name: before[name] - after for name, after in _parameters(model).items()}


def _parameters(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-10, msg=f"{name}: {{}}".format)


class TestUnreducedGradients:
    """What ``.grad`` is between backwards under ``no_sync``, and what a user does to it."""

    @pytest.mark.slow
    def test_on_the_device_while_parameters_are_on_the_host(self) -> None:
        """Fake tensors tell a device that is not here from the host, and autograd refuses the pair as it would."""
        model = FSDP(nn.Linear(3, 3), FakeCollectives(CONTEXT, rank=0, world_size=2), use_orig_params=True)
        unit = model._handle.unit
        assert isinstance(unit.gradients, FlatGradients)
        with FakeTensorMode():
            parameter = nn.Parameter(torch.empty(3))
            gradient = torch.empty(3, device="cuda")
            with pytest.raises(RuntimeError, match="assign a gradient with device type 'cuda'"):
                parameter.grad = gradient
            unit.gradients.show(parameter, gradient)
            assert parameter.grad is not None

    @FORMS
    @EACH_STRATEGY
    def test_zero_grad_frees_them_at_once(self, strategy: str, use_orig_params: bool) -> None:
        wanted = _gradients([7], [0, 1])

        def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
            model = _wrapped(world, rank, strategy, use_orig_params)
            for turn in range(3):
                with model.no_sync():
                    _backward(model, turn, rank)
                    _backward(model, turn + 3, rank)
                held = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
                assert len(held) == len(list(model.parameters()))
                assert all(each() is not None for each in held)
                model.zero_grad(set_to_none=True)
                assert [each() for each in held] == [None] * len(held)
            _backward(model, 7, rank)
            return _step(model)

        gc.disable()
        try:
            for got in on_ranks(2, on_rank):
                _assert_close(got, wanted)
        finally:
            gc.enable()

    @FORMS
    @EACH_STRATEGY
    def test_those_still_held_keep_their_memory(self, strategy: str, use_orig_params: bool) -> None:
        """They are what autograd adds to until a backward synchronises, and nothing's afterwards."""

        def on_rank(rank: int, world: ThreadedWorld) -> None:
            model = _wrapped(world, rank, strategy, use_orig_params)
            with model.no_sync():
                _backward(model, 0, rank)
            held = {name: p.grad for name, p in model.named_parameters()}
            _backward(model, 1, rank)
            model.zero_grad()
            with model.no_sync():
                _backward(model, 2, rank)
            _backward(model, 3, rank)
            own = _gradients([0, 1], [rank])
            for name, gradient in held.items():
                assert gradient is not None
                assert gradient.untyped_storage().nbytes() >= gradient.nbytes
                if use_orig_params:
                    torch.testing.assert_close(gradient, own[clean_tensor_name(name)], rtol=1e-10, atol=1e-10)

        on_ranks(2, on_rank)

    @FORMS
    @EACH_STRATEGY
    @pytest.mark.parametrize("change", ["in place", "data", "assigned"])
    def test_what_a_user_makes_of_them_is_reduced(self, strategy: str, use_orig_params: bool, change: str) -> None:
        """Tripled after the first of three microbatches, halved after the second."""
        first, second, third = (_gradients([turn], [0, 1]) for turn in range(3))
        wanted = {name: 0.5 * (3 * first[name] + second[name]) + third[name] for name in first}

        def scale(parameter: nn.Parameter, factor: float) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if change == "in place":
                gradient.mul_(factor)
            elif change == "data" or gradient.shape != parameter.shape:
                gradient.data = gradient.data * factor
            else:
                parameter.grad = gradient * factor

        def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
            model = _wrapped(world, rank, strategy, use_orig_params)
            for turn, factor in enumerate((3.0, 0.5)):
                with model.no_sync():
                    _backward(model, turn, rank)
                for parameter in model.parameters():
                    scale(parameter, factor)
            _backward(model, 2, rank)
            return _step(model)

        for got in on_ranks(2, on_rank):
            _assert_close(got, wanted)

    @EACH_STRATEGY
    def test_one_alone_may_be_dropped(self, strategy: str) -> None:
        first, second = (_gradients([turn], [0, 1]) for turn in range(2))
        wanted = {name: second[name] + (0 if "down" in name else first[name]) for name in first}

        def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
            model = _wrapped(world, rank, strategy, True)
            with model.no_sync():
                _backward(model, 0, rank)
            for name, parameter in model.named_parameters():
                if "down" in name:
                    parameter.grad = None
            _backward(model, 1, rank)
            return _step(model)

        for got in on_ranks(2, on_rank):
            _assert_close(got, wanted)

    def test_another_shape_is_refused(self) -> None:
        wanted = _gradients([2], [0, 1])

        def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
            model = _wrapped(world, rank, "FULL_SHARD", True)
            with model.no_sync():
                _backward(model, 0, rank)
            gradient = model.module.first.weight.grad
            gradient.data = torch.ones(2, 2, dtype=torch.float64)
            words = rf"(?s)Cannot writeback when the gradient shape changes.*rank {rank}, whose gradients under no_sync"
            with pytest.raises(StateError, match=words):
                _backward(model, 1, rank)
            model.zero_grad()
            _backward(model, 2, rank)
            return _step(model)

        for got in on_ranks(2, on_rank):
            _assert_close(got, wanted)

    @FORMS
    def test_casting_the_model_is_refused_until_they_are_reduced_or_dropped(self, use_orig_params: bool) -> None:
        def on_rank(rank: int, world: ThreadedWorld) -> list[torch.dtype]:
            model = _wrapped(world, rank, "FULL_SHARD", use_orig_params)
            with model.no_sync():
                _backward(model, 0, rank)
            with pytest.raises(
                StateError, match=r"cannot become torch.float32 on cpu while gradients .* no_sync\(\) wait"
            ):
                model.float()
            model.double()
            assert {p.dtype for p in model.parameters()} == {torch.float64}
            model.zero_grad()
            model.float()
            model(draw(4, 3, rank=rank).float()).square().mean().backward()
            return [p.grad.dtype for p in model.parameters() if p.grad is not None]

        for dtypes in on_ranks(2, on_rank):
            assert set(dtypes) == {torch.float32}


def test_a_reduced_gradient_is_freed_by_zero_grad() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        for use_orig_params in (False, True):
            model = _wrapped(world, rank, "FULL_SHARD", use_orig_params)
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for turn in range(2):
                _backward(model, turn, rank)
                held = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
                assert held
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                assert [each() for each in held] == [None] * len(held)

    gc.disable()
    try:
        on_ranks(2, on_rank)
    finally:
        gc.enable()
