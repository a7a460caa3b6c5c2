"""Jobs that are killed and stopped at random moments: the others train on, and who comes back has the same bits."""

from __future__ import annotations

import enum
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from elastic_jobs import Jobs, Lighthouse, compare, require_replayed
from elastic_rank import At, Plan
from fault_figures import record

pytest.importorskip("torchft")

STRIKES = 40
#: Seconds within which a job trains on behind another one's fault.
LIMIT_S = 10.0
STOP_S = 5.0


class Fault(enum.Enum):
    KILL_RANK = "kill a rank"
    KILL_JOB = "kill a job"
    STOP_RANK = "stop a rank for 5 s"
    STOP_JOB = "stop a job for 5 s"


#: Random delays behind the begin of each, in seconds.
PHASES = {
    At.QUORUM: 0.004,
    At.FORWARD: 0.002,
    At.BACKWARD: 0.004,
    At.COMMIT: 0.003,
    At.OPTIMIZER: 0.001,
    At.SAVE: 0.01,
    # Of the job that comes back.
    At.START: 0.0,
}


def strike(jobs: Jobs, chance: random.Random, fault: Fault, at: At) -> float:
    """Let ``fault`` happen to one of two jobs about there; returns the other one's seconds until it trains on."""
    plan = jobs.plan
    victim, rank = chance.randrange(plan.jobs), chance.randrange(plan.size)
    other = 1 - victim
    if at is At.START:
        # A kill, and the fault while the job takes the state over.
        jobs.kill(victim, hold=False)
        jobs.await_true("a new life", lambda: jobs.places.read(victim, rank)[1] == At.START, 20.0)
        jobs.await_place(victim, rank, At.QUORUM, 30.0)
        time.sleep(chance.uniform(0.0, 0.05))
    else:
        if at is At.SAVE:
            victim = next(job for job in range(plan.jobs) if leads(jobs, job))
            other = 1 - victim
        jobs.await_place(victim, rank, at)
        time.sleep(chance.uniform(0.0, PHASES[at]))
    if fault is Fault.KILL_RANK:
        jobs.signal(victim, rank, signal.SIGKILL)
    elif fault is Fault.KILL_JOB:
        jobs.kill(victim, hold=False)
    before = jobs.step(other)
    began = time.monotonic()
    if fault in (Fault.STOP_RANK, Fault.STOP_JOB):
        ranks = [rank] if fault is Fault.STOP_RANK else list(range(plan.size))
        jobs.stop(victim, ranks, STOP_S)
    jobs.await_true("a step of the other job", lambda: jobs.step(other) >= before + 3, 30.0)
    return time.monotonic() - began


def leads(jobs: Jobs, job: int) -> bool:
    """Whether ``job`` comes to save."""
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if jobs.places.read(job, 0)[1] is At.SAVE:
            return True
        time.sleep(0.0005)
    return False


@pytest.mark.faults
@pytest.mark.timeout(3000)
def test_faults_in_every_phase(tmp_path: Path) -> None:
    lighthouse = Lighthouse()
    plan = Plan(tmp_path, lighthouse.address)
    kinds: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    slowest = 0.0
    chance = random.Random(0)
    drawn = [(fault, at) for at in PHASES for fault in Fault]
    try:
        with Jobs(plan) as jobs:
            for turn in range(STRIKES):
                jobs.await_together(2, steps=10)
                fault, at = drawn[(turn * 5) % len(drawn)]
                seconds = strike(jobs, chance, fault, at)
                assert seconds < LIMIT_S, f"{fault.value} in {at.name}: the other job waited for {seconds:.1f} s"
                slowest = max(slowest, seconds)
                kinds[fault.value] += 1
                phases["BACK" if at is At.START else at.name] += 1
                jobs.await_together(2, steps=10)
            jobs.finish()
        found = compare(plan)
    finally:
        lighthouse.kill()
    assert found.alone >= STRIKES
    require_replayed(plan, found)
    record(
        "jobs",
        faults=STRIKES,
        steps=found.steps,
        of_one_job=found.alone,
        void=found.void,
        loss_off_at_most=found.largest,
        bit_equal_in_a_replay=len(found.bits),
        other_job_waits_s=round(slowest, 2),
        kinds=kinds,
        phases=phases,
    )


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_two_of_three_are_lost_one_behind_the_other_and_one_comes_back(tmp_path: Path) -> None:
    lighthouse = Lighthouse()
    plan = Plan(tmp_path, lighthouse.address, jobs=3)
    try:
        with Jobs(plan) as jobs:
            jobs.await_together(3, steps=10)
            jobs.kill(1)
            assert jobs.await_together(2, steps=20, limit_s=LIMIT_S) < LIMIT_S
            jobs.kill(2)
            assert jobs.await_together(1, steps=20, limit_s=LIMIT_S) < LIMIT_S
            jobs.start(1)
            jobs.await_together(2, steps=20)
            jobs.finish()
        found = compare(plan)
    finally:
        lighthouse.kill()
    assert found.alone >= 60


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_the_lighthouse_is_lost_and_comes_back(tmp_path: Path) -> None:
    lighthouse = Lighthouse()
    plan = Plan(tmp_path, lighthouse.address)
    try:
        with Jobs(plan) as jobs:
            jobs.await_together(2, steps=30)
            lighthouse.kill()
            time.sleep(0.5)
            before = jobs.step(0)
            # A job that is lost meanwhile is missed once there is a lighthouse again.
            jobs.kill(1, hold=False)
            time.sleep(3.0)
            assert jobs.step(0) <= before + 1, "a step began without the lighthouse"
            lighthouse.start()
            assert jobs.await_steps(0, 3, limit_s=LIMIT_S) < LIMIT_S
            jobs.await_together(2, steps=20)
            jobs.finish()
        compare(plan)
    finally:
        lighthouse.kill()
