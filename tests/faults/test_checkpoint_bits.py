"""Checkpoints that were changed behind their save: every change is named, none is loaded, nothing of it is executed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fault_figures import record
from polyshard import checkpoint
from polyshard.checkpoint.encoding import render
from polyshard.errors import CheckpointDamagedError, ConfigError, StateError
from saved import Alone, write

MARK = "the payload ran"


def flipped(directory: Path, alone: Alone, file: str, bit: int) -> str:
    """What a flip of one bit comes to: "named" where both ``verify`` and ``load`` raise with the file's name."""
    path = directory / file
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        for look in (checkpoint.verify, alone.load):
            try:
                look(directory)
            except CheckpointDamagedError as error:
                if f"'{file}'" not in str(error):
                    return f"another file named: {error}"
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            else:
                return f"passed by {look.__name__}"
    finally:
        path.write_bytes(before)
    return "named"


def flip(root: Path, count: int, seed: int) -> Counter[str]:
    """``count`` flips, spread over files alike, then over bits; heads and tails of files among them."""
    (directory,) = write(root, 3, extra={"note": "x" * 100, "numbers": list(range(50))})
    alone, chance = Alone(), random.Random(seed)
    files = sorted(path.name for path in directory.iterdir())
    outcomes: Counter[str] = Counter()
    for turn in range(count):
        file = files[turn % len(files)]
        bits = 8 * (directory / file).stat().st_size
        bit = {0: turn % 8, 1: bits - 1 - turn % 8}.get(turn // len(files) % 20, chance.randrange(bits))
        outcome = flipped(directory, alone, file, bit)
        kind = "data" if file.endswith(".bin") else file
        assert outcome == "named", f"bit {bit} of {file}: {outcome}"
        outcomes[kind] += 1
    alone.load(directory)
    assert alone.steps() == {3.0}
    return outcomes


@pytest.mark.slow
def test_flipped_bits_are_named(tmp_path: Path) -> None:
    assert flip(tmp_path, 25, seed=1).total() == 25


def truncate(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path, other: Path) -> None:
    path.unlink()


def zero(path: Path, other: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lengthen(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def exchange(path: Path, other: Path) -> None:
    """With the same file of another step."""
    shutil.copy(other / path.name, path)


def link(path: Path, other: Path) -> None:
    """To a file with the very content, elsewhere."""
    aside = other.parent / f"aside-{path.name}"
    shutil.copy(path, aside)
    path.unlink()
    path.symlink_to(aside)


def pipe(path: Path, other: Path) -> None:
    """Which nobody writes to: whoever waits for a byte waits forever."""
    path.unlink()
    os.mkfifo(path)


CHANGES: tuple[Callable[[Path, Path], None], ...] = (truncate, empty, remove, zero, lengthen, exchange, link, pipe)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_files_that_are_not_what_was_written_are_refused(tmp_path: Path, change: Callable[[Path, Path], None]) -> None:
    good, other = write(tmp_path / "saved", 3, 4)
    files = sorted(path.name for path in good.iterdir())
    alone = Alone()
    before = alone.values()
    for file in files:
        copy = tmp_path / "copy"
        shutil.copytree(good, copy)
        if change is exchange and file == "COMMITTED":
            # The other step's, whose manifest is not here.
            pass
        change(copy / file, other)
        for look in (checkpoint.verify, alone.load, checkpoint.read):
            with pytest.raises(StateError) as caught:
                look(copy)
            assert change in (remove, exchange) or isinstance(caught.value, CheckpointDamagedError)
            assert str(copy) in str(caught.value)
        shutil.rmtree(copy)
    alone.load(good)
    assert alone.steps() == {3.0}
    assert before.keys() == alone.values().keys()


def test_two_ranks_files_that_were_exchanged_are_refused(tmp_path: Path) -> None:
    (good,) = write(tmp_path, 3)
    one, two = (good / f"rank-0000{rank}.bin" for rank in (0, 1))
    aside = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(aside)
    for look in (checkpoint.verify, Alone().load):
        with pytest.raises(CheckpointDamagedError, match=r"rank-0000[01]\.bin"):
            look(good)


def test_a_file_that_nobody_wrote_is_left_alone(tmp_path: Path) -> None:
    (good,) = write(tmp_path, 3)
    (good / "notes.txt").write_text("mine")
    checkpoint.verify(good)
    alone = Alone()
    alone.load(good)
    assert alone.steps() == {3.0}


class Payload:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self._mark, MARK)


def sign(directory: Path, manifest: Any) -> None:
    """Write ``manifest`` as if it had been committed: whoever can write to a folder can do that."""
    content = manifest if isinstance(manifest, bytes) else render(manifest)
    (directory / "manifest.json").write_bytes(content)
    marker = json.loads((directory / "COMMITTED").read_bytes())
    del marker["sha256"]
    marker["manifest"] = hashlib.sha256(content).hexdigest()
    marker["files"]["manifest.json"] = len(content)
    marker["sha256"] = hashlib.sha256(render(marker)).hexdigest()
    (directory / "COMMITTED").write_bytes(render(marker))


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
        sign(copy, planted)
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
def test_a_hostile_manifest_is_refused_at_every_place(tmp_path: Path) -> None:
    """Whoever can write can sign: what is inside must hold by itself, without memory that no file could fill."""
    (good,) = write(tmp_path / "saved", 3, extra={"note": "text"})
    manifest = json.loads((good / "manifest.json").read_bytes())
    alone = Alone()
    refused = passed = 0
    chance = random.Random(5)
    places = list(_places(manifest))
    for place in places:
        bad = chance.choice(HOSTILE)
        if _at(manifest, place) == bad:
            continue
        sign(good, _replaced(manifest, place, bad))
        try:
            alone.load(good)
            passed += 1
        except (CheckpointDamagedError, ConfigError):
            refused += 1
    # What users say of their runs may be anything: extra, and numbers among the settings.
    assert refused > 10 * passed, (refused, passed)
    deep = b"[" * 100_000 + b"]" * 100_000
    for content in (deep, b"{}", b"[]", b"null", b"\xff\xfe", b'{"format": 3, "format": 3}', b'{"format": NaN}', b""):
        sign(good, content)
        for look in (checkpoint.verify, alone.load, checkpoint.read):
            with pytest.raises(CheckpointDamagedError, match=r"manifest\.json"):
                look(good)
    sign(good, manifest)
    alone.load(good)
    assert alone.steps() == {3.0}
    record("manifests", changed=refused + passed, refused=refused)


Place = tuple[str | int, ...]


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    if isinstance(value, dict):
        for key in list(value)[:12]:
            yield from _places(value[key], (*place, key))
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield from _places(value[index], (*place, index))


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
