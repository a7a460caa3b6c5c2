"""``step_in_backward``: training is that of an unsharded model, and what comes too late is refused."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    MakeOptimizer,
    Net,
    adam,
    assert_all_close,
    assert_parity,
    draw,
    is_sharded,
    local,
    on_ranks,
    seeded,
    sgd,
    sharded_copy,
    square_step,
    units_of,
    whole,
)
from polyshard.errors import ConfigError, PolyshardError, StateError
from polyshard.interfaces import OffloadCapabilities, OffloadManager, UnitSpec
from polyshard.optim import Muon, step_in_backward
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

OFFLOADED: dict[str, Any] = {"policy": units_of(Block), "offload": "optimizer"}
SOME_PARKED = {**OFFLOADED, "offload": {"name": "partial", "units": "blocks.[02]", "inner": "optimizer"}}


def in_backward(make: MakeOptimizer) -> MakeOptimizer:
    """``make``, and its optimizer steps in the backward where the model is sharded."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        if is_sharded(model):
            step_in_backward(model, optimizer)
        return optimizer

    return made


def flat_adam(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over one parameter a unit, where the model is sharded."""
    return torch.optim.AdamW(polyshard.flat_parameters(model) if is_sharded(model) else model.parameters(), lr=1e-2)


class Uncopied(torch.optim.SGD):
    """Holds what cannot be pickled, and so refuses ``copy.copy``, too."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle an optimizer that holds a lock")


# --- training ---


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((each, {}) for each in (torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax)),
        *((each, {}) for each in (torch.optim.NAdam, torch.optim.RAdam)),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (Uncopied, {"momentum": 0.9}),
    ],
)
def test_each_optimizer_that_goes_by_element_keeps_its_state(kind: Any, options: dict[str, Any]) -> None:
    """From the second step on it steps over what a rank holds: a state that it replaced there would be lost."""
    make = in_backward(lambda model: kind(model.parameters(), lr=1e-2, **options))
    assert_parity(seeded(Net), square_step, 2, turns=4, optimizer=make, settings=OFFLOADED, tolerance=1e-12)


class Late(OffloadManager):
    """A stranger's: gradients arrive some time later, by a thread, and gathers read copies."""

    api_version = 1
    capabilities = OffloadCapabilities(offloads=True, keeps_values=True, awaits_gradients=True)

    def __init__(self) -> None:
        self._copies: dict[UnitSpec, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1)
        self._arriving: dict[int, Future[object]] = {}

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return shard.clone()

    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        if unit not in self._copies:
            self._copies[unit] = master.clone()
        own_slice.copy_(self._copies[unit])

    def begin_forward(self) -> None:
        self._copies.clear()

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        if into is not None:
            return into.add_(grad)
        stored = torch.full_like(grad, torch.nan)

        def arrive() -> None:
            time.sleep(0.01)
            stored.copy_(grad)

        self._arriving[id(stored)] = self._thread.submit(arrive)
        return stored

    def await_grad(self, unit: UnitSpec, grad: torch.Tensor) -> None:
        if id(grad) in self._arriving:
            self._arriving[id(grad)].result()

    def sync_for_step(self) -> None:
        for each in self._arriving.values():
            each.result()
        self._arriving = {}


def test_a_strangers_manager_says_when_gradients_are_there() -> None:
    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        return polyshard.shard(model, dataclasses.replace(config, offload=Late(), batch_nbytes=0))

    settings = {"policy": units_of(Block)}
    assert_parity(seeded(Net), square_step, 2, turns=3, optimizer=in_backward(adam), settings=settings, wrap=wrap)


def test_a_hook_behind_accumulation_sees_the_gradient_before_the_step() -> None:
    def halved(model: nn.Module) -> torch.optim.Optimizer:
        def halve(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad *= 0.5

        model.blocks[1].up.weight.register_post_accumulate_grad_hook(halve)
        return adam(model)

    assert_parity(seeded(Net), square_step, 2, optimizer=in_backward(halved), settings=OFFLOADED)


def test_parameters_on_the_host_are_stepped_when_the_backward_returns_and_gradients_stay() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **SOME_PARKED)
        optimizer = in_backward(sgd)(model)
        before = {name: local(each.detach()).clone() for name, each in model.named_parameters()}
        square_step(model, 0, rank)
        for name, each in model.named_parameters():
            moved = before[name] - 0.1 * local(each.grad) if name.startswith(("blocks.0", "blocks.2")) else before[name]
            torch.testing.assert_close(local(each.detach()), moved, rtol=1e-12, atol=1e-12)
        optimizer.step()
        for name, each in model.named_parameters():
            moved = before[name] - 0.1 * local(each.grad)
            torch.testing.assert_close(local(each.detach()), moved, rtol=1e-12, atol=1e-12)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("settings", [{"strategy": "hybrid_shard", "shard_size": 2}, {}])
def test_microbatches_that_replicas_add_up_later_are_accumulated(settings: dict[str, Any]) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = []
        for part in range(3):
            waits = polyshard.no_all_reduce(model) if part < 2 and is_sharded(model) else nullcontext()
            with waits:
                loss = model(draw(4, 3, turn=3 * turn + part, rank=rank)).square().mean()
                loss.backward()
            losses.append(loss.detach())
        return losses

    assert_parity(seeded(Net), step, 4, turns=2, optimizer=in_backward(adam), settings={**OFFLOADED, **settings})


def test_schedulers_state_and_another_optimizer_go_on() -> None:
    """A rate that a scheduler sets holds for the next backward; a loaded state is that of the steps behind it."""

    def train(model: nn.Module, hand_over: Callable[..., object]) -> None:
        optimizer = adam(model)
        hand_over(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for turn in range(3):
            square_step(model, turn, 0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        after = adam(model)
        after.load_state_dict(optimizer.state_dict())
        hand_over(model, after)
        square_step(model, 3, 0)
        after.step()
        after.zero_grad()
        hand_over(model, None)
        square_step(model, 4, 0)
        after.step()

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **OFFLOADED)
        train(model, step_in_backward)
        return whole(model)

    plain = seeded(Net)
    train(plain, lambda *_: None)
    assert_all_close(on_ranks(2, on_rank), {name: each.detach() for name, each in plain.named_parameters()})


# --- refused ---


def _again(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(draw(4, 3)).sum().backward()


def _at_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
    outputs = [model(draw(4, 3)), model(draw(4, 3, turn=1))]
    for output in outputs:
        output.sum().backward()


def _clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    polyshard.clip_grad_norm_(model, 0.01)


def _clip_by_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def _drop(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    optimizer.step()


def _set_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def _unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = polyshard.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


def _save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state_dict()


def _average(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    polyshard.optim.AveragedWeights(model, 0.9)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (_again, "A forward came between a backward.*'blocks.2' and 3 other units.*no_sync"),
        (_at_once, "got a second gradient behind a step of SGD.*no_sync"),
        (_clip, r"clip_grad_norm_\(\) came behind a backward"),
        (_clip_by_torch, "gradient of 'blocks.2' was changed behind the backward"),
        (_drop, "gradient of 'blocks.2' was changed behind the backward"),
        (_set_rate, "Settings of SGD were changed"),
        (_unscale, "GradScaler came behind a backward"),
        (_save, r"state_dict\(\) of the optimizer came between"),
        (_average, r"AveragedWeights\(\) came between"),
    ],
)
def test_what_comes_too_late_is_refused(then: Callable[..., None], says: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **OFFLOADED)
        optimizer = in_backward(sgd)(model)
        model(draw(4, 3)).sum().backward()
        with pytest.raises(StateError, match=rf"(?s){says}.*"):
            then(model, optimizer)
        # Told once: the program goes on as it likes.
        optimizer.zero_grad()
        square_step(model, 0, rank)
        optimizer.step(None)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("keeps_former", [False, True])
def test_closures_are_refused(keeps_former: bool) -> None:
    """Their backward would step inside of a step."""

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **OFFLOADED)
        optimizer = sgd(model)
        step_in_backward(model, optimizer, keeps_former=keeps_former)
        with pytest.raises(StateError, match="SGD was given a closure"):
            optimizer.step(lambda: 0.0)  # type: ignore[arg-type, unused-ignore]

    on_ranks(2, on_rank)


# --- taken back ---


def _rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 2.0


def _clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def _halve_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    found: Any = model
    found.blocks[1].up.weight.grad.mul_(0.5)


@pytest.mark.parametrize("make", [adam, flat_adam])
@pytest.mark.parametrize("then", [_rate, _clear, _halve_one])
def test_with_former_values_what_comes_late_is_what_an_unsharded_model_does(
    then: Callable[..., None], make: MakeOptimizer
) -> None:
    """Clipping, further backwards and failures are drawn (``runtime/test_random_programs.py``).

    All ranks see the same batches: the mean of their gradients is each one's.
    """
    if then is _halve_one and make is flat_adam:
        pytest.skip("a view of the flat gradient, made anew: nothing tells")

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for turn in range(4):
            model(draw(4, 3, turn=turn)).square().mean().backward()
            if turn != 1:
                then(model, optimizer)
            optimizer.step()
            if turn != 2:
                optimizer.zero_grad()

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, batch_nbytes=0, **SOME_PARKED)
        optimizer = make(model)
        step_in_backward(model, optimizer, keeps_former=True)
        train(model, optimizer)
        return whole(model)

    reference = seeded(Net)
    train(reference, make(reference))
    wanted = {name: each.detach() for name, each in reference.named_parameters()}
    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_norm_below_its_limit_leaves_the_step_of_the_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **OFFLOADED)
        optimizer = adam(model)
        step_in_backward(model, optimizer, keeps_former=True)
        square_step(model, 0, rank)
        stepped = [local(each.detach()).clone() for each in model.parameters()]
        for clip in (polyshard.clip_grad_norm_, lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm)):
            clip(model, 1e6)
        optimizer.step()
        for each, before in zip(model.parameters(), stepped, strict=True):
            assert local(each.detach()).tolist() == before.tolist()
            assert optimizer.state[each]["step"] == 1

    on_ranks(2, on_rank)


def test_with_former_values_a_scaler_skips_and_unscales() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> float:
        for turn in range(4):
            loss = model(draw(4, 3, turn=turn)).square().mean()
            scaler.scale(loss * (torch.inf if turn == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return float(scaler.get_scale())

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[float, dict[str, torch.Tensor]]:
        model = sharded_copy(seeded(Net), rank, world, **OFFLOADED)
        optimizer = adam(model)
        step_in_backward(model, optimizer, keeps_former=True)
        return train(model, optimizer, polyshard.GradScaler("cpu", init_scale=4.0)), whole(model)

    reference = seeded(Net)
    scale = train(reference, adam(reference), torch.amp.GradScaler("cpu", init_scale=4.0))
    wanted = {name: each.detach() for name, each in reference.named_parameters()}
    for found in on_ranks(2, on_rank):
        assert found[0] == scale
        torch.testing.assert_close(found[1], wanted, rtol=1e-12, atol=1e-12)


# --- optimizers ---


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as schedules inside of optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)


def test_an_optimizer_that_counts_in_its_groups_is_refused_in_its_first_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **OFFLOADED)
        step_in_backward(model, Counting(model.parameters(), lr=0.1))
        with pytest.raises(StateError, match="Counting keeps numbers of its own in its parameter groups"):
            model(draw(4, 3)).sum().backward()

    on_ranks(2, on_rank)


def test_a_backward_that_fails_behind_steps_warns_and_training_goes_on() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, batch_nbytes=0, **OFFLOADED)
        optimizer = in_backward(sgd)(model)
        handle = model.first.register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
        with pytest.raises(ArithmeticError):
            model(draw(4, 3)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        square_step(model, 0, rank)
        optimizer.step()

    with pytest.warns(UserWarning, match="SGD stepped over . units in a backward that failed"):
        on_ranks(2, on_rank)


def _muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon([each for each in model.parameters() if each.ndim == 2])


@pytest.mark.parametrize(
    ("settings", "optimizer", "says"),
    [
        ({"offload": "none"}, sgd, "SGD holds no offloaded parameter"),
        ({"offload": "cpu"}, sgd, "CpuOffload offloads '\\(root\\)', and gathers of a backward may read"),
        ({"precision": "fp16"}, sgd, "Fp16 of '\\(root\\)' needs a scaled loss"),
        ({}, _muon, "Muon cannot step in the backward"),
        ({}, lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS cannot step in the backward"),
    ],
)
def test_what_cannot_step_there_is_refused(settings: dict[str, Any], optimizer: MakeOptimizer, says: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> type[PolyshardError]:
        model = sharded_copy(seeded(Net).float(), rank, world, **{**OFFLOADED, **settings})
        with pytest.raises(ConfigError, match=says) as caught:
            step_in_backward(model, optimizer(model))
        return caught.type

    assert on_ranks(2, on_rank) == [ConfigError] * 2
