"""Captured steps where there is no CUDA: refusals, the eager fallback, and all but the graph itself.

In the place of the CUDA graph stands ``Rerun``, which replays a step by running it again on the recorded inputs. So
does a graph; what only a graph does (memory of its own, Python that no longer runs) is in ``gpu/test_capture``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from parity import Net, assert_all_close, draw, on_ranks, seeded, train_reference, whole
from polyshard import CapturedStep, CaptureMode
from polyshard.capture.graph import Capturer, Recording
from polyshard.errors import CaptureError
from polyshard_backends.threaded import ThreadedWorld
from rerun import Rerun, Rerunning, alone, captured, momentum, on_thread, reference, stepping
from torch import nn

T = TypeVar("T")


class Failing(Rerun):
    """Fails as a graph does where the step reads from the device: somewhere in the middle of the step."""

    def record(self, step: Callable[[], T]) -> Recording[T]:
        step()
        raise AssertionError("the step was to raise")


class FailingOnRankOne(CapturedStep[Any, Any]):
    """Records, but for rank 1."""

    def _make_capturer(self) -> Capturer:
        return Failing() if self._sharded.rank == 1 else Rerun()


@dataclass
class Trained:
    losses: list[torch.Tensor]
    modes: list[CaptureMode]
    parameters: dict[str, torch.Tensor]
    reason: str | None


def train(kind: type[CapturedStep[Any, Any]], turns: int, fallback: str, **settings: Any) -> list[Trained]:
    def on_rank(rank: int, world: ThreadedWorld) -> Trained:
        model = on_thread(seeded(Net), rank, world, **settings)
        optimizer = momentum(model)
        step = kind(model, optimizer, stepping(model, optimizer), warmup=2, fallback=fallback)
        losses, modes = [], []
        for turn in range(turns):
            losses.append(step(draw(4, 3, turn=turn, rank=rank)).clone())
            modes.append(step.mode)
        return Trained(losses, modes, whole(model), step.reason)

    return on_ranks(2, on_rank)


def assert_trained(ranks: list[Trained], turns: int) -> None:
    wanted = reference(turns)
    for rank, got in enumerate(ranks):
        for turn, loss in enumerate(got.losses):
            torch.testing.assert_close(loss, wanted.observed[turn][rank][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.parameters, wanted.parameters, rtol=1e-12, atol=1e-12)


def test_without_cuda_the_fallback_trains_eagerly_as_the_unsharded_model() -> None:
    ranks = train(CapturedStep, 4, "eager")
    assert_trained(ranks, 4)
    for rank in ranks:
        assert rank.modes == [CaptureMode.EAGER] * 4
        assert rank.reason is not None
        assert "only CUDA devices record graphs" in rank.reason


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_every_call_trains_on_its_own_batch_whether_warming_up_capturing_or_replaying(strategy: str) -> None:
    ranks = train(Rerunning, 6, "refuse", strategy=strategy)
    assert_trained(ranks, 6)
    for rank in ranks:
        assert rank.modes == [CaptureMode.WARMING_UP] * 2 + [CaptureMode.CAPTURED] * 4
        assert rank.reason is None


def test_if_one_rank_cannot_capture_all_fall_back_with_the_same_reason_and_lose_no_step() -> None:
    # Rank 1 raises between its forward and its backward, with gathered units and nothing reduced.
    def on_rank(rank: int, world: ThreadedWorld) -> Trained:
        model = on_thread(seeded(Net), rank, world, strategy="no_shard")
        optimizer = momentum(model)
        calls = 0

        def train_step(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            loss = model(x).square().mean()
            if rank == 1 and calls == 3:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = FailingOnRankOne(model, optimizer, train_step, warmup=2, fallback="eager")
        losses, modes = [], []
        for turn in range(5):
            losses.append(step(draw(4, 3, turn=turn, rank=rank)).clone())
            modes.append(step.mode)
        return Trained(losses, modes, whole(model), step.reason)

    ranks = on_ranks(2, on_rank)
    assert_trained(ranks, 5)
    assert ranks[0].reason == ranks[1].reason
    for rank in ranks:
        assert rank.modes == [CaptureMode.WARMING_UP] * 2 + [CaptureMode.EAGER] * 3
        assert rank.reason is not None
        assert "On rank 1: " in rank.reason
        assert "item()" in rank.reason


def test_a_capture_that_fails_is_an_error_on_every_rank_and_trains_nothing() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[str, dict[str, torch.Tensor]]:
        model = on_thread(seeded(Net), rank, world)
        optimizer = momentum(model)
        step = FailingOnRankOne(model, optimizer, stepping(model, optimizer), warmup=2, fallback="refuse")
        for turn in range(2):
            step(draw(4, 3, turn=turn, rank=rank))
        with pytest.raises(CaptureError) as caught:
            # A keyword that cannot be static on one rank.
            step(draw(4, 3), **({"odd": object()} if rank == 1 else {}))
        return str(caught.value), whole(model)

    ranks = on_ranks(2, on_rank)
    for message, parameters in ranks:
        assert "On rank 1: argument 'odd' is a object" in message
        torch.testing.assert_close(parameters, reference(2).parameters, rtol=1e-12, atol=1e-12)


def test_with_the_fallback_a_batch_of_another_shape_runs_eagerly_and_the_next_replays() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[dict[str, torch.Tensor], list[str | None]]:
        model = on_thread(seeded(Net), rank, world)
        optimizer = momentum(model)
        step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2, fallback="eager")
        reasons = []
        for turn, rows in enumerate((4, 4, 4, 2, 4)):
            step(draw(rows, 3, turn=turn, rank=rank))
            assert step.mode is (CaptureMode.CAPTURED if turn > 1 else CaptureMode.WARMING_UP)
            reasons.append(step.reason)
        return whole(model), reasons

    def plain(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        model(draw(2 if turn == 3 else 4, 3, turn=turn, rank=rank)).square().mean().backward()
        return []

    wanted = train_reference(seeded(Net), plain, 2, 5, momentum)
    for parameters, reasons in on_ranks(2, on_rank):
        torch.testing.assert_close(parameters, wanted.parameters, rtol=1e-12, atol=1e-12)
        assert [reason is None for reason in reasons] == [True, True, True, False, True]


def test_what_outdates_a_graph_is_captured_anew_by_each_rank_for_itself() -> None:
    # A learning rate that changes outdates the graph of a plain SGD, ten batches of another shape that of rank 1.
    def rows(turn: int, rank: int) -> int:
        return 2 if rank == 1 and turn >= 9 else 4

    def on_rank(rank: int, world: ThreadedWorld) -> Trained:
        model = on_thread(seeded(Net), rank, world)
        optimizer = momentum(model)
        step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2)
        losses, modes = [], []
        for turn in range(23):
            if turn == 5:
                optimizer.param_groups[0]["lr"] = 0.05
            losses.append(step(draw(rows(turn, rank), 3, turn=turn, rank=rank)).clone())
            modes.append(step.mode)
            if turn == 5:
                assert "'lr' of SGD" in str(step.reason)
        return Trained(losses, modes, whole(model), step.reason)

    made: list[torch.optim.SGD] = []

    def plainly(model: nn.Module) -> torch.optim.SGD:
        made.append(momentum(model))
        return made[-1]

    def plain(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if turn == 5:
            made[rank].param_groups[0]["lr"] = 0.05
        model(draw(rows(turn, rank), 3, turn=turn, rank=rank)).square().mean().backward()
        return []

    wanted = train_reference(seeded(Net), plain, 2, 23, plainly)
    ranks = on_ranks(2, on_rank)
    warming, captured_ = CaptureMode.WARMING_UP, CaptureMode.CAPTURED
    assert ranks[0].modes == [warming] * 2 + [captured_] * 3 + [warming] * 3 + [captured_] * 15
    assert ranks[1].modes == ranks[0].modes[:18] + [warming] * 3 + [captured_] * 2
    for each in ranks:
        torch.testing.assert_close(each.parameters, wanted.parameters, rtol=1e-12, atol=1e-12)


def test_graphs_that_do_not_last_are_given_up_in_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = alone()
    optimizer = momentum(model)
    step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2)
    for turn in range(12):
        optimizer.param_groups[0]["lr"] = 0.1 / (turn + 1)
        step(draw(4, 3, turn=turn))
    assert step.mode is CaptureMode.EAGER
    assert "3 graphs served fewer than 10 steps each" in str(step.reason)
    assert [record.getMessage() for record in caplog.records] == [f"Steps run eagerly (rank 0): {step.reason}"]
    optimizer.param_groups[0]["lr"] = 0.0
    before = whole(model)
    step(draw(4, 3))
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)


def test_a_scheduler_inside_of_the_step_is_told_though_it_has_not_changed_a_rate_yet() -> None:
    model = alone()
    optimizer = momentum(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    inner, rate = stepping(model, optimizer), optimizer.param_groups[0]["lr"]

    def train_step(x: torch.Tensor) -> torch.Tensor:
        loss = inner(x)
        schedule.step()
        return loss

    step, rates = Rerunning(model, optimizer, train_step, warmup=2), []
    for turn in range(12):
        step(draw(4, 3, turn=turn))
        rates.append(optimizer.param_groups[0]["lr"] / rate)
    assert step.mode is CaptureMode.EAGER
    assert "steps a scheduler" in str(step.reason)
    assert rates == [1.0] * 4 + [0.5] * 5 + [0.25] * 3


def test_outputs_are_detached_and_the_same_memory_in_every_replay() -> None:
    _, _, step = captured()
    one = step(draw(4, 3, turn=7))
    value = one.clone()
    other = step(draw(4, 3, turn=8))
    assert not one.requires_grad
    assert other.data_ptr() == one.data_ptr()
    assert one != value


def test_evaluation_and_whole_parameters_between_replays_see_the_last_step() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = on_thread(seeded(Net), rank, world)
        optimizer = momentum(model)
        step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2)
        for turn in range(4):
            step(draw(4, 3, turn=turn, rank=rank))
        model.eval()
        with torch.no_grad():
            seen = [model(draw(4, 3)), whole(model)["last.weight"]]
        model.train()
        step(draw(4, 3, turn=4, rank=rank))
        return [*seen, whole(model)["last.weight"]]

    plain = copy.deepcopy(seeded(Net))
    plain.load_state_dict(reference(4).parameters)
    wanted = [
        plain(draw(4, 3)).detach(),
        reference(4).parameters["last.weight"],
        reference(5).parameters["last.weight"],
    ]
    assert_all_close(on_ranks(2, on_rank), wanted)


def test_the_warm_up_lasts_until_it_is_decided_which_units_are_kept() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[CaptureMode]:
        settings = {"reshard_after_forward": "auto", "memory_budget": 1 << 30}
        model = on_thread(seeded(Net), rank, world, **settings)
        optimizer = momentum(model)

        def train_step(x: torch.Tensor, learns: bool) -> None:
            model(x).square().mean().backward()
            if learns:
                optimizer.step()
            optimizer.zero_grad()

        step = Rerunning(model, optimizer, train_step, warmup=2)
        modes = []
        for turn in range(7):
            step(draw(4, 3, turn=turn, rank=rank), turn >= 3)
            modes.append(step.mode)
        return modes

    for modes in on_ranks(2, on_rank):
        assert modes[3] is CaptureMode.WARMING_UP
        assert modes[-1] is CaptureMode.CAPTURED
