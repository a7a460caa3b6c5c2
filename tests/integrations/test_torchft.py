"""Jobs that train together over torchft: here each is a thread with one rank; a test kills real ones of two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import polyshard
import pytest
import torch
from parity import whole
from polyshard import ShardConfig
from polyshard.errors import ConfigError, StateError
from polyshard.inspect import outermost_model
from polyshard.interfaces import Collectives, Listener, PluginContext
from polyshard.optim import AveragedWeights
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_testing import CollectivesSuite, Rank, plugin_context
from torch import nn

torchft = pytest.importorskip("torchft")

from elastic_jobs import Jobs, Lighthouse, compare, require_replayed  # noqa: E402
from elastic_rank import Plan  # noqa: E402
from polyshard_torchft import Elastic, Torchft  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402

T = TypeVar("T")

pytestmark = [
    pytest.mark.slow,
    # torchft's own, and torch's, where it reads what another job sent.
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]


class Net(nn.Module):
    """With a buffer that moves in each forward."""

    def __init__(self) -> None:
        super().__init__()
        # No bias that the norm takes out again: its gradient would be rounding, and Adam's step a sign of that.
        self.first, self.norm, self.last = nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return y


def build() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(number: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=made, dtype=torch.float64)


class Job(NamedTuple):
    """One that was made on a thread."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    averages: AveragedWeights
    elastic: Elastic
    heard: list[tuple[int, int]]


class Heard(Listener):
    """Jobs that came and went."""

    api_version = 1

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    @polyshard.hookimpl
    def on_replicas(self, before: int, now: int) -> None:
        self.sizes.append((before, now))


class Together:
    """Jobs on threads, and a lighthouse."""

    def __init__(self) -> None:
        self._server = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
        )
        self._jobs: list[Job] = []

    def make(self, *, seed: int = 0, min_replicas: int = 2) -> Job:
        """A job of one rank."""
        world = ThreadedCollectives(PluginContext("threaded", torch.device("cpu")), ThreadedWorld(1), 0)
        collectives = {
            "name": "torchft",
            "lighthouse": self._server.address(),
            "min_replicas": min_replicas,
            "timeout_s": 5.0,
            "inner": world,
        }
        model = build()
        with torch.no_grad():
            for each in model.parameters():
                each.add_(seed)
        heard = Heard()
        config = ShardConfig(collectives=collectives, strategy="no_shard", timeout_s=20.0, listeners=[heard])
        polyshard.shard(model, config)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        averages = AveragedWeights(model, 0.5)
        elastic = Elastic(model, optimizer, {"scheduler": scheduler, "averages": averages})
        job = Job(model, optimizer, scheduler, averages, elastic, heard.sizes)
        self._jobs.append(job)
        return job

    def run(self, *bodies: Callable[[], T]) -> list[T]:
        """Each on a thread of its own."""
        results: list[Any] = [None] * len(bodies)

        def call(index: int) -> None:
            try:
                results[index] = bodies[index]()
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(bodies))]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60.0)
        assert not any(each.is_alive() for each in threads), "a job hangs"
        return results

    def close(self) -> None:
        for job in self._jobs:
            polyshard.close(job.model)
        self._server.shutdown()


@pytest.fixture
def together() -> Iterator[Together]:
    made = Together()
    yield made
    made.close()


def train(job: Job, steps: int, microbatches: int = 1) -> list[tuple[int, float]]:
    """So many steps that count; the batch of each and the norm of its gradient."""
    told = []
    while job.elastic.steps < steps:
        with job.elastic.step() as step:
            for part in range(microbatches):
                last = part == microbatches - 1
                with nullcontext() if last else polyshard.no_sync(job.model):
                    rows = batch(step.batch * microbatches + part)
                    (job.model(rows).square().mean() / microbatches).backward()
            norm = float(polyshard.clip_grad_norm_(job.model, 0.1))
            if step.commits():
                job.optimizer.step()
                job.scheduler.step()
                job.averages.update()
                told.append((step.batch, norm))
    return told


def everything(job: Job) -> dict[str, torch.Tensor]:
    """What a job has, by name."""
    found = {name: value.clone() for name, value in whole(job.model).items()}
    found |= {name: value.clone() for name, value in job.model.named_buffers()}
    for index, state in enumerate(job.optimizer.state.values()):
        found |= {f"{index}.{key}": value.clone() for key, value in state.items()}
    found |= {f"average.{index}": each.clone() for index, each in enumerate(job.averages.state_dict()["averages"])}
    found["rate"] = torch.tensor(job.scheduler.get_last_lr())
    found["updates"] = torch.tensor(job.averages.updates)
    return {name: each.to_local() if hasattr(each, "to_local") else each for name, each in found.items()}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_two_jobs_train_as_one_plain_model_on_all_batches(together: Together, microbatches: int) -> None:
    first, second = together.make(), together.make()
    told = together.run(lambda: train(first, 5, microbatches), lambda: train(second, 5, microbatches))
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    norms = []
    for step in range(5):
        for number in range(2 * microbatches):
            (model(batch(2 * microbatches * step + number)).square().mean() / (2 * microbatches)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for mine in told:
        assert [norm for _, norm in mine] == pytest.approx(norms, rel=1e-12)
    assert sorted(number for mine in told for number, _ in mine) == list(range(10))
    for job in (first, second):
        assert (job.elastic.steps, job.elastic.batches) == (5, 10)
        for name, value in whole(job.model).items():
            assert (value - model.get_parameter(name)).abs().max() < 1e-12, name


def test_a_job_that_comes_later_takes_over_all_that_the_other_has(together: Together) -> None:
    early = together.make(min_replicas=1)
    train(early, 3)
    late = together.make(seed=7, min_replicas=1)
    seen: list[dict[str, torch.Tensor]] = []

    def look(job: Job) -> None:
        size = 0
        while size != 2:
            with job.elastic.step() as step:
                size = step.size
                if size == 2:
                    seen.append(everything(job))
                job.model(batch(step.batch)).square().mean().backward()
                if step.commits():
                    job.optimizer.step()

    assert together.run(lambda: look(early), lambda: look(late)) == [None, None]
    mine, theirs = seen
    assert mine.keys() == theirs.keys()
    assert len(mine) > 20
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
    assert early.elastic.state_dict() == late.elastic.state_dict()
    assert (early.heard, late.heard) == ([(0, 1), (1, 2)], [(0, 2)])
    (reason,) = polyshard.report(early.model).reasons.values()
    assert reason.startswith("2 job(s) by http:")
    found = everything(early), everything(late)
    for name, value in found[0].items():
        if "norm.running" not in name:
            assert torch.equal(value, found[1][name]), f"{name} behind the step"


def test_a_step_in_which_one_job_fails_is_void_for_the_other(together: Together) -> None:
    first, second = together.make(), together.make()
    before = everything(first)

    def failing() -> None:
        with second.elastic.step(), pytest.raises(ValueError, match="planned"):
            raise ValueError("planned")

    def other() -> bool:
        with first.elastic.step() as step:
            first.model(batch(step.batch)).square().mean().backward()
            counts = step.commits()
            with pytest.raises(StateError, match=r"Adam\.step\(\) was called for a step .* that does not count"):
                first.optimizer.step()
        return counts

    failed, counts = together.run(failing, other)
    assert isinstance(failed, StateError)
    assert "ended without Step.commits()" in str(failed)
    assert counts is False
    assert first.elastic.steps == first.elastic.batches == 0
    assert all(each.grad is None for each in first.model.parameters())
    after = everything(first)
    # Buffers move in a forward, whatever becomes of the step.
    assert all(torch.equal(before[name], after[name]) for name in before if "norm." not in name)
    # The next one counts.
    assert [len(each) for each in together.run(lambda: train(first, 1), lambda: train(second, 1))] == [1, 1]


def test_a_job_whose_update_failed_begins_no_further_step(together: Together) -> None:
    job = together.make(min_replicas=1)

    def fail() -> None:
        with job.elastic.step() as step:
            job.model(batch(step.batch)).square().mean().backward()
            assert step.commits()
            raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        fail()
    with pytest.raises(StateError, match=r"Elastic\.step\(\) was called behind an error in a step that counts"):
        train(job, 2)


def test_jobs_that_were_trained_apart_do_not_average_their_gradients(together: Together) -> None:
    first, second = together.make(), together.make()
    for job, lineage in ((first, 5), (second, 9)):
        job.elastic.load_state_dict({"steps": 3, "batches": 6, "lineage": lineage})

    def step(job: Job) -> bool:
        with job.elastic.step() as step:
            job.model(batch(step.batch)).square().mean().backward()
            return step.commits()

    refused, void = together.run(lambda: step(first), lambda: step(second))
    assert isinstance(refused, StateError)
    assert "was trained apart from others for some of its 3 steps (rank 0)" in str(refused)
    assert void is False
    assert second.elastic.steps == 3


def test_jobs_that_average_different_gradients_are_told(together: Together) -> None:
    first, second = together.make(), together.make()

    def step(job: Job, backwards: int) -> bool:
        with job.elastic.step() as step:
            for _ in range(backwards):
                if step.number == 1:
                    job.model(batch(step.batch)).square().mean().backward()
            return step.commits()

    # The sizes that travel are the same: nothing but the number tells.
    assert together.run(lambda: step(first, 1), lambda: step(second, 1)) == [True, True]
    for job in (first, second):
        job.elastic._link._means += job is first
    for told in together.run(lambda: step(first, 1), lambda: step(second, 1)):
        assert isinstance(told, StateError)
        assert "Jobs averaged from" in str(told)


def test_a_job_of_another_model_is_refused(together: Together) -> None:
    early = together.make(min_replicas=1)
    train(early, 2)
    late = together.make(min_replicas=1)
    late.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    told_late = threading.Event()

    def ask() -> None:
        try:
            with late.elastic.step():
                pass
        finally:
            polyshard.close(late.model)
            told_late.set()

    def go_on() -> None:
        while not told_late.is_set():
            train(early, early.elastic.steps + 1)

    _, told = together.run(go_on, ask)
    assert isinstance(told, ConfigError)
    assert "Another job has other optimizers than this one (rank 0): 0 is [5] there and [5, 1] here" in str(told)


def test_what_does_not_fit_is_refused_by_name(together: Together) -> None:
    job = together.make(min_replicas=1)
    with pytest.raises(StateError, match=r"Elastic\(\) was called for a model that has one"):
        Elastic(job.model, job.optimizer)
    with pytest.raises(StateError, match=r"averaged over other jobs between steps \(rank 0\)\. Run backward inside of"):
        job.model(batch(0)).sum().backward()
    obstacle = outermost_model(job.model, "test").capture_obstacle()
    assert obstacle is not None
    assert obstacle.startswith("Torchft cannot be recorded in a graph")
    plain = polyshard.shard(build(), ShardConfig(collectives="fake", strategy="no_shard"))
    with pytest.raises(ConfigError, match=r"given a model over FakeCollectives .*\"name\": \"torchft\""):
        Elastic(plain, torch.optim.SGD(plain.parameters()))
    for options, told in (
        ({"lighthouse": "host0"}, "Give an address such as 'http://host0:29510'"),
        ({"lighthouse": "http://host0:1", "min_replicas": 0}, "Give a number of jobs"),
        ({"lighthouse": "http://host0:1", "timeout_s": 0.1}, "Give seconds, from 1 to a day"),
    ):
        with pytest.raises(ConfigError, match=told):
            Torchft(plugin_context("torchft"), **{"inner": "fake", **options})


class TestTorchft(CollectivesSuite):
    """Between the ranks of one job it is what it is around."""

    def make(self, rank: Rank) -> Collectives:
        return Torchft(plugin_context("torchft"), lighthouse="http://nowhere:1", inner=rank.collectives)


def test_a_job_is_killed_and_comes_back_with_the_same_bits(tmp_path: Path) -> None:
    lighthouse = Lighthouse()
    plan = Plan(tmp_path, lighthouse.address)
    try:
        with Jobs(plan) as jobs:
            jobs.await_together(2, steps=10, limit_s=90.0)
            jobs.kill(1)
            jobs.await_steps(0, 10, limit_s=20.0)
            jobs.start(1)
            jobs.await_together(2, steps=10)
            jobs.finish(steps=15)
        found = compare(plan)
    finally:
        lighthouse.kill()
    assert found.alone >= 5
    require_replayed(plan, found)
