"""Programs that go wrong on one rank: all ranks end soon, by name, and the run is taken up bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fault_figures import record
from fleet import Fleet, run_to_end
from program import BROKE, FAILED, At, Job, Kind, Mistake

#: Seconds that the others have.
LIMIT_S = 5.0
RANKS = 3
FLIPS = 20
#: How often each is made, and what the others raise.
PLANS: list[tuple[Kind, tuple[At, ...], int, str]] = [
    (Kind.RAISE, (At.FORWARD, At.BACKWARD, At.OPTIMIZER, At.BETWEEN), 12, "PeerFailedError"),
    (Kind.OUT_OF_MEMORY, (At.FORWARD, At.BACKWARD), 8, "PeerFailedError"),
    (Kind.SKIP, (At.FORWARD,), 8, "RankMismatchError"),
    (Kind.AGAIN, (At.FORWARD,), 8, "RankMismatchError"),
    (Kind.NOT_FINITE, (At.FORWARD,), 8, "NonFiniteError"),
]


def drawn(turn: int, kind: Kind, places: tuple[At, ...]) -> Mistake:
    chance = random.Random(f"{kind} {turn}")
    # Of the step's number alone the last checkpoint depends, and the first step is compared more closely.
    step = chance.choice([0, *range(12)])
    return Mistake(chance.randrange(RANKS), step, kind, places[turn % len(places)], chance.randrange(1, 4))


def err(job: Job) -> tuple[float, dict[int, dict[str, str]], list[int | None]]:
    """Let one rank go wrong; returns the seconds that the others took from there, and what all raised."""
    mistake = job.mistake
    assert mistake is not None
    with Fleet(job) as fleet:
        fleet.await_place(mistake.rank, mistake.step, At.BETWEEN)
        end = fleet.wait(job.timeout_s + LIMIT_S)
        return end.seconds, fleet.told(), list(end.codes)


def err_and_resume(folder: Path, turn: int, plan: tuple[Kind, tuple[At, ...], int, str], expected: object) -> float:
    kind, places, _, raised = plan
    mistake = drawn(turn, kind, places)
    job = Job(folder / f"{kind.name}-{turn}", mistake=mistake, check_ranks="always" if turn % 2 else True)
    seconds, told, codes = err(job)
    assert seconds <= LIMIT_S, (mistake, seconds, told)
    own = told[mistake.rank]
    if raised == "PeerFailedError":
        assert codes[mistake.rank] == BROKE
        assert own["type"] == ("OutOfMemoryError" if kind is Kind.OUT_OF_MEMORY else "ValueError")
        others = {rank: each for rank, each in told.items() if rank != mistake.rank}
        words = f"Rank {mistake.rank} raised {own['type']}: {own['text']}"
        assert all(words in each["text"] for each in others.values()), (mistake, told)
    else:
        others = told
    assert set(told) == set(range(RANKS)), (mistake, told)
    assert {each["type"] for each in others.values()} == {raised}, (mistake, told)
    assert all(codes[rank] == FAILED for rank in others), (mistake, codes)
    assert run_to_end(replace(job, mistake=None)) == expected, mistake
    return seconds


@pytest.mark.nightly
def test_a_mistake_of_each_consequence_is_named_and_made_up_for(tmp_path: Path) -> None:
    expected = run_to_end(Job(tmp_path / "whole"))
    for plan in {plan[3]: plan for plan in PLANS}.values():
        err_and_resume(tmp_path, 1, plan, expected)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_many_mistakes(tmp_path: Path) -> None:
    expected = run_to_end(Job(tmp_path / "whole"))
    made: Counter[str] = Counter()
    slowest = 0.0
    for plan in PLANS:
        for turn in range(plan[2]):
            slowest = max(slowest, err_and_resume(tmp_path, turn, plan, expected))
            made[plan[0].value] += 1
    total = sum(made.values())
    record("mistakes", mistakes=total, named=total, bit_equal=total, slowest_s=round(slowest, 2), kinds=made)
