"""Saves whose failure nobody asks for, state that is no number, locks that are removed: each many times."""

from __future__ import annotations

import multiprocessing
import random
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections import Counter
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fault_figures import record
from polyshard import checkpoint
from polyshard.checkpoint.storage.local import LocalJobLock
from polyshard.errors import BackgroundSaveError, ConfigError, RankMismatchError
from polyshard_testing import Rank, RankProcesses, run_ranks
from program import Block, build
from torch import nn

RANKS = 3
PROGRAMS = 8
SPOILED = 60
REMOVED = 24
DISKS = 40
POLICY = {"name": "module_class", "classes": [Block]}

#: One rank of a program that ends behind a save in the background, which cannot write on one of them.
LAST_SAVE = """
import resource, signal, sys
from datetime import timedelta
import torch, polyshard
from polyshard import checkpoint
rank, victim, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
torch.manual_seed(0)
model = polyshard.shard(torch.nn.Linear(400, 300), polyshard.ShardConfig(timeout_s=20.0))
if rank == victim:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
checkpoint.async_save(f"{folder}/run", 1, model)
"""


def end_behind_a_save(folder: Path, victim: int) -> list[bool]:
    """Whether each rank's standard error tells of it, once where it logs and once at the end."""
    folder.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LAST_SAVE, str(rank), str(victim), str(folder)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    texts = [each.communicate(timeout=90)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], texts
    assert checkpoint.latest(folder / "run") is None
    where = f"The save of {folder / 'run' / 'step-00000001'} in the background failed on rank"
    return [
        f"{where} {rank}: " in text and f"polyshard: {where} {rank}: " in text and "File too large" in text
        for rank, text in enumerate(texts)
    ]


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_programs_that_end_behind_a_save_that_fails(tmp_path: Path) -> None:
    told = [each for turn in range(PROGRAMS) for each in end_behind_a_save(tmp_path / str(turn), turn % 2)]
    assert all(told), told
    record("last_saves", programs=PROGRAMS, ranks=len(told), told=sum(told))


def next_call(joined: Rank, root: Path, victim: int, name: str) -> tuple[str, str, bool]:
    """What the call behind a failed save raises and says, and whether the save that it asked for was begun."""
    model = polyshard.shard(build(), polyshard.ShardConfig(policy=POLICY, timeout_s=20.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = checkpoint.save(root, 1, model, optimizer)
    wide = torch.zeros(5000) if joined.rank == 0 else None
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if joined.rank == victim:
        # Less than a rank's part: what others wait for is not written either.
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        pending = checkpoint.async_save(root, 2, model, optimizer, extra={"wide": wide})
        pending.own_failure()
    except Exception as error:
        return type(error).__name__, str(error), False
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    calls: dict[str, Any] = {
        "save": lambda: checkpoint.save(root, 3, model, optimizer),
        "async_save": lambda: checkpoint.async_save(root, 3, model, optimizer),
        "load": lambda: checkpoint.load(first, model, optimizer),
        "close": lambda: polyshard.close(model),
    }
    try:
        calls[name]()
    except BackgroundSaveError as error:
        polyshard.close(model)
        return type(error).__name__, str(error), (root / "step-00000003").exists()
    return "nothing", "", True


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_the_next_call_raises_alike_on_all_ranks(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    with RankProcesses(RANKS) as processes:
        for turn, (victim, name) in enumerate(
            (victim, name) for victim in range(1, RANKS) for name in ("save", "async_save", "load", "close")
        ):
            found = processes.run(partial(next_call, root=tmp_path / str(turn), victim=victim, name=name))
            assert {kind for kind, _, _ in found} == {"BackgroundSaveError"}, (victim, name, found)
            assert all(f"rank {victim}: OSError: [Errno 27]" in text for _, text, _ in found), found
            assert not any(begun for *_, begun in found)
            outcomes[name] += 1
    record("next_calls", calls=outcomes.total(), alike_on_all_ranks=outcomes.total(), kinds=outcomes)


def spoil(folder: Path, turn: int) -> tuple[bool, bool]:
    """Whether the state that one rank spoils is named, and the last finite checkpoint stays and loads."""
    chance = random.Random(turn)
    victim, behind = chance.randrange(RANKS), turn % 2 == 1
    key, value = chance.choice(["exp_avg", "exp_avg_sq"]), chance.choice([torch.nan, torch.inf, -torch.inf])
    strategy = chance.choice(["full_shard", "shard_grad_op", "no_shard"])

    def on_rank(rank: Rank) -> tuple[str, list[str]]:
        with rank.lock:
            model = build()
        settings = polyshard.ShardConfig(collectives=rank.collectives, policy=POLICY, strategy=strategy)
        polyshard.shard(model, settings)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        spoiled = ""
        texts = []
        for step in range(3):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and (rank.rank == victim or strategy == "no_shard"):
                names = {id(parameter): name for name, parameter in model.named_parameters()}
                held = [each for each in optimizer.state if each.numel()]
                chosen = held[turn % len(held)]
                flat = optimizer.state[chosen][key].view(-1)
                flat[turn % flat.numel()] = value
                spoiled = f"{key} of {names[id(chosen)]}"
            if step == 1:
                # Of the parameters nothing is known to be wrong yet.
                assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if behind:
                    checkpoint.async_save(folder, step, model, optimizer, keep=1).result()
                else:
                    checkpoint.save(folder, step, model, optimizer, keep=1)
                texts += [str(each.message) for each in caught]
        return spoiled, texts

    found = run_ranks(RANKS, on_rank)
    name = next(spoiled for spoiled, _ in found if spoiled)
    texts = [text for _, each in found for text in each]
    named = any(f"step 1 in {folder} holds values" in text and f"'{name}'" in text for text in texts)
    good = folder / "step-00000000"
    if good.is_dir():
        checkpoint.verify(good)
    return named, good.is_dir()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_state_of_optimizers_that_is_no_number(tmp_path: Path) -> None:
    found = [spoil(tmp_path / str(turn), turn) for turn in range(SPOILED)]
    assert all(named and kept for named, kept in found), found
    record("states", spoiled=SPOILED, named=sum(named for named, _ in found), last_finite_kept=sum(k for _, k in found))


def hold(folder: Path, held: Event, let_go: Event) -> None:
    """Another job, which has committed nothing yet."""
    folder.mkdir(exist_ok=True)
    lock = LocalJobLock(folder)
    held.set()
    let_go.wait(60)
    lock.release()


def remove_and_take(folder: Path, turn: int) -> bool:
    """Whether a job whose lock was removed learns at its next save that another one has the folder."""
    chance = random.Random(turn)
    model = polyshard.shard(
        nn.Linear(5, 3), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 1}, strategy="no_shard")
    )
    before = chance.randrange(1, 4)
    pending = [checkpoint.async_save(folder, step, model) for step in range(before)]
    if chance.random() < 0.5:
        pending[-1].result()
    context = multiprocessing.get_context("fork")
    if chance.random() < 0.5:
        (folder / ".job-lock").unlink()
    else:
        pending[-1].result()
        shutil.rmtree(folder)
    held, let_go = context.Event(), context.Event()
    other = context.Process(target=hold, args=(folder, held, let_go))
    other.start()
    try:
        assert held.wait(30)
        save = checkpoint.save if turn % 2 else checkpoint.async_save
        with pytest.raises(ConfigError, match=f"Another job saves into .*: process {other.pid} on"):
            save(folder, before, model)
        return not (folder / f"step-{before:08d}").exists()
    finally:
        let_go.set()
        other.join()


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_locks_that_are_removed(tmp_path: Path) -> None:
    learned = [remove_and_take(tmp_path / str(turn), turn) for turn in range(REMOVED)]
    assert all(learned)
    record("locks", removed=REMOVED, refused_at_the_next_save=sum(learned))


def look_elsewhere(folder: Path, turn: int) -> bool:
    """Whether all ranks name those that have a disk of their own, which for the test is another folder."""
    chance = random.Random(turn)
    ranks = chance.randrange(2, 6)
    apart = sorted(chance.sample(range(1, ranks), chance.randrange(1, ranks)))
    name = chance.choice(["save", "async_save", "load"])

    def on_rank(rank: Rank) -> str:
        with rank.lock:
            model = build()
        polyshard.shard(model, polyshard.ShardConfig(collectives=rank.collectives, policy=POLICY))
        own = folder / (f"disk-{rank.rank}" if rank.rank in apart else "shared")
        if name == "load":
            directory = checkpoint.save(folder / "shared", 1, model)
            # What a rank makes of it that asks for the latest one itself.
            given = checkpoint.latest(own) if turn % 2 else own / directory.name
            call = partial(checkpoint.load, given, model)
        else:
            call = partial(getattr(checkpoint, name), own, 1, model)
        with pytest.raises(RankMismatchError) as told:
            call()
        checkpoint.save(folder / "good", 2, model)
        return str(told.value)

    *others, last = map(str, apart)
    which = f"Ranks {', '.join(others)} and {last} do not see" if others else f"Rank {last} does not see"
    texts = run_ranks(ranks, on_rank)
    return all(text.startswith(which) and "they have not one file system" in text for text in texts)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_ranks_with_disks_of_their_own(tmp_path: Path) -> None:
    named = [look_elsewhere(tmp_path / str(turn), turn) for turn in range(DISKS)]
    assert all(named), named
    record("disks", calls=DISKS, named_on_all_ranks=sum(named))
