"""Checkpoints that somebody wrote pickles or a hostile manifest into: nothing is executed, and it is refused."""

from __future__ import annotations

import base64
import json
import pickle
import random
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from checkpoints import reseal, written
from fault_figures import record
from parity import threaded
from polyshard import checkpoint
from polyshard.errors import CheckpointDamagedError, ConfigError, StateError
from polyshard_backends.threaded import ThreadedWorld
from saved import Alone, write
from torch import nn

MARK = "the payload ran"


class Payload:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self._mark, MARK)


def looks(directory: Path, alone: Alone) -> Iterator[Callable[[], Any]]:
    """Everything that reads a checkpoint."""
    yield lambda: checkpoint.verify(directory)
    yield lambda: alone.load(directory)
    yield lambda: checkpoint.read(directory)
    yield lambda: checkpoint.latest(directory.parent, verify=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:passed over")
def test_planted_pickles_never_run(tmp_path: Path) -> None:
    (good,) = write(tmp_path / "saved", 3, extra={"note": "text", "raw": b"bytes", "path": Path("x")})
    mark = tmp_path / "mark"
    payload = pickle.dumps(Payload(mark))
    # The trap works.
    pickle.loads(payload)
    assert mark.read_text() == MARK
    mark.unlink()
    text = base64.b64encode(payload).decode()
    alone = Alone()
    tries = 0
    copy = tmp_path / "tried" / good.name
    names = [*sorted(path.name for path in good.iterdir()), "extra.pt", ".metadata", "written-by-1", ".job-lock"]
    for name in names:
        shutil.copytree(good, copy)
        (copy / name).write_bytes(payload)
        (copy.parent / f".unfinished-{'0' * 32}").mkdir()
        (copy.parent / f".unfinished-{'0' * 32}" / "written-by-0").write_bytes(payload)
        (copy.parent / ".job-lock").write_bytes(payload)
        tries += _try_all(copy, alone)
        shutil.rmtree(copy.parent)
    manifest = json.loads((good / "manifest.json").read_bytes())
    for planted in _with_text_everywhere(manifest, text):
        shutil.copytree(good, copy)
        reseal(copy, written(planted))
        tries += _try_all(copy, alone)
        shutil.rmtree(copy.parent)
    assert not mark.exists()
    record("pickles", looked=tries, ran=0)


def _try_all(directory: Path, alone: Alone) -> int:
    count = 0
    for look in looks(directory, alone):
        count += 1
        with suppress(StateError, ConfigError):
            look()
    return count


def _with_text_everywhere(value: Any, text: str) -> Iterator[Any]:
    """Copies of a document, each with one string replaced by ``text``: of lists the first, of dicts all."""
    if isinstance(value, str):
        yield text
    elif isinstance(value, dict):
        for key, each in list(value.items())[:8]:
            for changed in _with_text_everywhere(each, text):
                yield {**value, key: changed}
    elif isinstance(value, list) and value:
        for changed in _with_text_everywhere(value[0], text):
            yield [changed, *value[1:]]


HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 1.5, 2**62, 10**30, "x", "../../outside", "/etc/passwd"),
    *([], {}, [[]], {"$tensor": {}}),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("most", [2, pytest.param(None, marks=pytest.mark.nightly)])
def test_a_hostile_manifest_is_refused_at_every_place(tmp_path: Path, most: int | None) -> None:
    """Whoever can write can sign: what is inside must hold by itself, without memory that no file could fill."""
    (good,) = write(tmp_path / "saved", 3, extra={"note": "text"})
    manifest = json.loads((good / "manifest.json").read_bytes())
    alone = Alone()
    refused, passed = 0, []
    chance = random.Random(5)
    places = [each for alike in _kinds(manifest).values() for each in alike[:most]]
    for place in places:
        bad = chance.choice(HOSTILE)
        if _at(manifest, place) == bad:
            continue
        reseal(good, written(_replaced(manifest, place, bad)))
        try:
            alone.load(good)
            passed.append(place)
        except (CheckpointDamagedError, ConfigError):
            refused += 1
    # What users say of their runs may be anything: extra, and numbers among the settings.
    assert {place[0] for place in passed} <= {"extra", "optimizer"}, passed
    assert refused > (5 if most else 10) * len(passed), (refused, passed)
    reseal(good, written(manifest))
    alone.load(good)
    assert alone.steps() == {3.0}
    if most is None:
        record("manifests", changed=refused + len(passed), refused=refused)


Place = tuple[str | int, ...]


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    if isinstance(value, dict):
        for key in list(value)[:12]:
            yield from _places(value[key], (*place, key))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from _places(value[index], (*place, index))


def _kinds(manifest: Any) -> dict[Any, list[Place]]:
    """Places, by part of the manifest, field and depth: ranks, files and parameters have the same fields."""
    found: defaultdict[Any, list[Place]] = defaultdict(list)
    for place in _places(manifest):
        field = next((each for each in reversed(place) if isinstance(each, str)), "")
        found[place[:1], field, len(place)].append(place)
    return found


def _at(value: Any, place: Place) -> Any:
    for each in place:
        value = value[each]
    return value


def _replaced(value: Any, place: Place, by: Any) -> Any:
    if not place:
        return by
    first, *rest = place
    if isinstance(value, dict):
        return {**value, first: _replaced(value[first], tuple(rest), by)}
    assert isinstance(first, int)
    return [*value[:first], _replaced(value[first], tuple(rest), by), *value[first + 1 :]]


FLIPS = 500


def made(rank: int, world: ThreadedWorld) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each rank's file of three has about 4 MB."""
    with world.lock:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 3))
    polyshard.shard(model, threaded(world, rank))
    return model, torch.optim.AdamW(model.parameters())


def saved(root: Path) -> Path:
    def body(rank: int, world: ThreadedWorld) -> Path:
        model, optimizer = made(rank, world)
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        return checkpoint.save(root, 1, model, optimizer, extra={"text": "hello"})

    return ThreadedWorld(3, timeout=30.0).run(body, timeout=60.0)[0]


def bits(directory: Path) -> list[tuple[Path, int]]:
    """Files in turn; in each its first and its last bit, then any."""
    chosen = random.Random(22)
    files = sorted(directory.iterdir())
    found = []
    for number in range(FLIPS):
        path, turn = files[number % len(files)], number // len(files)
        nbits = path.stat().st_size * 8
        found.append((path, (0, nbits - 1)[turn] if turn < 2 else chosen.randrange(nbits)))
    return found


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def outcome(error: BaseException | None, path: Path) -> str:
    if error is None:
        return "silent"
    # On all ranks alike, also on one that reads nothing of the file: programs go back to an older one alike.
    return "named" if isinstance(error, CheckpointDamagedError) and f"'{path.name}'" in str(error) else "other"


def loaded(directory: Path, flips: list[tuple[Path, int]]) -> list[list[str]]:
    """The outcome of each load, by rank of two; the last load, of the whole checkpoint, must succeed."""
    turn = threading.Barrier(2)

    def body(rank: int, world: ThreadedWorld) -> list[str]:
        model, optimizer = made(rank, world)
        found = []
        for path, bit in flips:
            if rank == 0:
                flip(path, bit)
            turn.wait(60)
            error: Exception | None = None
            try:
                checkpoint.load(directory, model, optimizer)
            except Exception as caught:
                error = caught
            found.append(outcome(error, path))
            turn.wait(60)
            if rank == 0:
                flip(path, bit)
        turn.wait(60)
        checkpoint.load(directory, model, optimizer)
        return found

    return ThreadedWorld(2, timeout=30.0).run(body, timeout=1200.0)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_every_flipped_bit_is_named_and_none_loaded(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    flips = bits(directory)
    ranks = loaded(directory, flips)
    verified = []
    for path, bit in flips:
        flip(path, bit)
        problem: Exception | None = None
        try:
            checkpoint.verify(directory)
        except Exception as caught:
            problem = caught
        verified.append(outcome(problem, path))
        flip(path, bit)
    checkpoint.verify(directory)
    told: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for (path, _), *each in zip(flips, *ranks, verified, strict=True):
        told[next(name for name in ("silent", "other", "named") if name in each)] += 1
        kinds[path.suffix[1:] or path.name] += 1
    assert told == {"named": FLIPS}, told
    record("flips", flips=FLIPS, named=told["named"], loaded=told["silent"], by_file=kinds)
