"""Checkpoints that somebody wrote pickles or a hostile manifest into: nothing is executed, and it is refused."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reseal, written
from fault_figures import record
from polyshard import checkpoint
from polyshard.errors import ConfigError, StateError
from saved import Alone, write

MARK = "the payload ran"


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
