"""Ranks that are killed inside of saves: the last committed checkpoint is whole, and of one step."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from fault_figures import record
from fleet import Fleet, run_to_end
from polyshard import checkpoint
from program import At, Job, digest

KILLS = 100


def saving(folder: Path, turn: int) -> Job:
    """Saves at every step, in the background at every other."""
    return Job(folder / str(turn), steps=5, save_every=1, keep=2 if turn % 2 else None)


def references(folder: Path) -> dict[str, str]:
    """The digest of the parameters at each step, of a run that nobody kills."""
    run_to_end(saving(folder, 0))
    found = {}
    for directory in sorted((folder / "0" / "checkpoints").iterdir()):
        if directory.name.startswith("step-"):
            checkpoint.verify(directory)
            found[directory.name] = digest(checkpoint.read(directory)["model"])
    assert len(set(found.values())) == 5
    return found


def kill_in_a_save(folder: Path, turn: int, expected: dict[str, str]) -> tuple[str, bool]:
    """Returns what the killed rank was doing, and whether the newest checkpoint is that of the step it was in."""
    chance = random.Random(turn)
    job = saving(folder, turn)
    with Fleet(job) as fleet:
        victim = chance.randrange(job.ranks)
        step = chance.randrange(1, job.steps - 1)
        fleet.await_place(victim, step, At.SAVE)
        # A save takes some hundredths of a second; one in the background goes on in the next step.
        time.sleep(chance.uniform(0.0, 0.08))
        place = fleet.place(victim)
        known = fleet.saved()
        fleet.kill(victim)
        fleet.wait(10.0, without=[victim])
    newest = checkpoint.latest(job.folder / "checkpoints", verify=True)
    assert newest is not None
    number = int(newest.name.partition("-")[2])
    assert number >= known, f"step {known} was committed, and {newest.name} is the newest"
    assert digest(checkpoint.read(newest)["model"]) == expected[newest.name], f"{newest} is of several steps"
    return place.name, number > step


def check_goes_on(job: Job, expected: dict[str, str]) -> None:
    run_to_end(job)
    newest = checkpoint.latest(job.folder / "checkpoints", verify=True)
    assert newest is not None
    assert digest(checkpoint.read(newest)["model"]) == expected[f"step-{job.steps:08d}"]
    left = [path.name for path in (job.folder / "checkpoints").iterdir() if path.name.startswith(".unfinished")]
    assert not left, f"leftovers of killed saves: {left}"


@pytest.mark.slow
def test_a_kill_in_a_save(tmp_path: Path) -> None:
    expected = references(tmp_path)
    kill_in_a_save(tmp_path, 1, expected)
    check_goes_on(saving(tmp_path, 1), expected)


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_many_kills_in_saves(tmp_path: Path) -> None:
    expected = references(tmp_path)
    places: Counter[str] = Counter()
    committed = 0
    for turn in range(1, KILLS + 1):
        place, is_new = kill_in_a_save(tmp_path, turn, expected)
        places[place] += 1
        committed += is_new
        if turn % 5 == 0:
            check_goes_on(saving(tmp_path, turn), expected)
    assert places["SAVE"] + places["SAVE_BEHIND"] >= KILLS // 2, places
    record("kills_in_saves", kills=KILLS, last_committed_loads=KILLS, mixed=0, places=places, committed=committed)
