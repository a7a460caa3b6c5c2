"""Ranks that are killed or stopped at random moments: the others end soon, and the run is taken up bit for bit."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from fault_figures import record
from fleet import Fleet, run_to_end
from program import FAILED, At, Job

KILLS = 60
STOPS = 6
#: Seconds that the others have.
LIMIT_S = 5.0
PHASES = (At.FORWARD, At.BACKWARD, At.OPTIMIZER, At.BETWEEN, At.SAVE, At.SAVE_BEHIND)


def moment(chance: random.Random, at: At, job: Job) -> tuple[int, float]:
    """A step in which ranks come there, and seconds behind it."""
    steps = range(job.steps)
    if at in (At.SAVE, At.SAVE_BEHIND):
        due = [step for step in steps if (step + 1) % job.save_every == 0]
        behind = [step for step in due if ((step + 1) // job.save_every) % 2 == 0 and step + 1 != job.steps]
        chosen = behind if at is At.SAVE_BEHIND else [step for step in due if step not in behind]
        return chance.choice(chosen), chance.uniform(0.0, 0.03)
    return chance.choice(list(steps)), chance.uniform(0.0, 0.004)


def strike(job: Job, chance: random.Random, at: At, number: int) -> tuple[At, float, list[str]]:
    """Send signal ``number`` to a rank about there; returns where it was, the others' seconds, and what they raised."""
    with Fleet(job) as fleet:
        victim = chance.randrange(job.ranks)
        step, delay = moment(chance, at, job)
        fleet.await_place(victim, step, at)
        time.sleep(delay)
        found = fleet.place(victim)
        fleet.signal(victim, number)
        end = fleet.wait(job.timeout_s + LIMIT_S, without=[victim])
        others = [rank for rank in range(job.ranks) if rank != victim]
        # A kill that comes behind the last meeting of a run leaves the others nothing to miss.
        assert all(end.codes[rank] in (FAILED, 0) for rank in others), (end, fleet.told())
        return found, end.seconds, [told["type"] for told in fleet.told().values()]


def kill_and_resume(folder: Path, turn: int, expected: object) -> tuple[At, float, list[str]]:
    chance = random.Random(turn)
    at = PHASES[turn % len(PHASES)]
    job = Job(folder / str(turn))
    found, seconds, errors = strike(job, chance, at, signal.SIGKILL)
    assert seconds <= LIMIT_S, f"the others went on for {seconds:.1f} s behind a kill in {found.name}"
    assert run_to_end(job) == expected, f"killed in {found.name} (turn {turn}), the run ended elsewhere"
    return found, seconds, errors


@pytest.mark.slow
@pytest.mark.parametrize("turn", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_kill_is_noticed_and_made_up_for(tmp_path: Path, turn: int) -> None:
    kill_and_resume(tmp_path, turn, run_to_end(Job(tmp_path / "whole")))


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_kills_in_every_phase(tmp_path: Path) -> None:
    expected = run_to_end(Job(tmp_path / "whole"))
    phases: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    slowest = 0.0
    for turn in range(KILLS):
        at, seconds, raised = kill_and_resume(tmp_path, turn, expected)
        phases[at.name] += 1
        errors.update(raised)
        slowest = max(slowest, seconds)
    assert all(phases[at.name] >= KILLS // 30 for at in PHASES), phases
    record("kills", kills=KILLS, bit_equal=KILLS, slowest_s=round(slowest, 2), phases=phases, errors=errors)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_rank_that_stands_still_is_given_up(tmp_path: Path) -> None:
    expected = run_to_end(Job(tmp_path / "whole"))
    slowest = 0.0
    for turn in range(STOPS):
        chance = random.Random(100 + turn)
        job = Job(tmp_path / str(turn), timeout_s=3.0)
        at = (At.FORWARD, At.BACKWARD, At.BETWEEN)[turn % 3]
        _, seconds, errors = strike(job, chance, at, signal.SIGSTOP)
        assert set(errors) <= {"CollectiveTimeoutError", "CollectiveAbortedError", "RankMismatchError"}, errors
        assert "CollectiveTimeoutError" in errors
        assert seconds <= job.timeout_s + 2.0
        slowest = max(slowest, seconds)
        assert run_to_end(job) == expected
    record("stops", stops=STOPS, timeout_s=3.0, slowest_s=round(slowest, 2))
