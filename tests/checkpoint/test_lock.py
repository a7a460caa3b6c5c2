"""A folder of checkpoints belongs to one job at a time."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import polyshard
import pytest
from checkpoints import alone
from polyshard import checkpoint
from polyshard.checkpoint.manifest import Marker
from polyshard.checkpoint.storage.local import LocalStorage
from polyshard.errors import ConfigError
from processes import start_script

#: Saves, says so, and waits to be ended.
OTHER = """
import sys, time, polyshard
from polyshard import checkpoint
from torch import nn
model = polyshard.shard(nn.Linear(3, 2), polyshard.ShardConfig(collectives="fake", strategy="no_shard"))
checkpoint.save(sys.argv[1], int(sys.argv[2]), model)
print("saved", flush=True)
time.sleep(60)
"""


def is_locked(folder: Path) -> bool:
    """Whether another process cannot have the lock."""
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", program, str(folder / ".job-lock")]
    return subprocess.run(command, check=False, capture_output=True).returncode == 1


@contextmanager
def start(folder: Path, program: str, *arguments: object) -> Iterator[BaseProcess]:
    """``program``, once it has said something, until the block ends; its files lie beside ``folder``."""
    script, output, errors = (folder.with_name(f"{folder.name}-{name}") for name in ("other.py", "output", "errors"))
    script.write_text(program)
    other = start_script(script, list(map(str, arguments)), os.environ, output, errors)
    try:
        while not output.read_text():
            assert other.is_alive(), errors.read_text()
            time.sleep(0.01)
        yield other
    finally:
        other.kill()
        other.join()


@pytest.mark.slow
def test_another_jobs_folder_is_refused_until_that_job_ends_however_it_does(tmp_path: Path) -> None:
    model = alone()
    with start(tmp_path, OTHER, tmp_path, 1) as other:
        for save in (checkpoint.save, checkpoint.async_save):
            with pytest.raises(ConfigError, match=rf"process {other.pid} on '{socket.gethostname()}', since 20\d\d-"):
                save(tmp_path, 2, model)
        assert sorted(path.name for path in tmp_path.iterdir()) == [".job-lock", "step-00000001"]
        # Reading is anybody's.
        newest = checkpoint.latest(tmp_path, verify=True)
        assert newest is not None
        checkpoint.load(newest, model)
        # What the lock says is not what holds it.
        for content in (b"[" * 4000, b'{"process": [1, 2], "since": -1}', b"", b"\x80", b"[]"):
            (tmp_path / ".job-lock").write_bytes(content)
            with pytest.raises(ConfigError, match="Another job saves into"):
                checkpoint.save(tmp_path, 2, model)
    assert checkpoint.save(tmp_path, 2, model).name == "step-00000002"


@pytest.mark.slow
def test_a_closed_model_gives_its_folder_back_and_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    """A loader's workers outlive a killed parent by seconds, in which the job may be started again."""
    model = alone()
    checkpoint.save(tmp_path, 1, model)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    try:
        polyshard.close(model)
        with start(tmp_path, OTHER, tmp_path, 2):
            pass
    finally:
        child.kill()
        child.join()


def test_a_link_in_the_locks_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / ".job-lock").symlink_to(target)
    with pytest.raises(OSError, match=r"\.job-lock"):
        checkpoint.save(tmp_path / "saved", 1, alone())
    assert target.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lock", "folder"])
def test_a_job_whose_lock_was_removed_learns_at_its_next_save_that_another_has_the_folder(
    tmp_path: Path, what: str
) -> None:
    root = tmp_path / "saved"
    model = alone()
    checkpoint.save(root, 1, model)
    if what == "lock":
        (root / ".job-lock").unlink()
    else:
        shutil.rmtree(root)
    with start(root, HOLDS, root) as other:
        for save in (checkpoint.save, checkpoint.async_save):
            with pytest.raises(ConfigError, match=rf"Another job saves into .*: process {other.pid} on"):
                save(root, 2, model)
        assert {path.name for path in root.iterdir()} - {"step-00000001"} == {".job-lock"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoint.save(root, 2, model).name == "step-00000002"
    # Whoever removed the whole folder has begun a new one.
    told = ["was removed while this job saves there" in str(each.message) for each in caught]
    assert told == ([True] if what == "lock" else [])


#: Claims a folder as a save does that has not committed anything yet.
HOLDS = """
import sys, time
from pathlib import Path
from polyshard.checkpoint.storage.local import LocalJobLock
Path(sys.argv[1]).mkdir(exist_ok=True)
lock = LocalJobLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_model_keeps_the_folder_when_another_of_its_process_is_closed(tmp_path: Path) -> None:
    one, other = alone(), alone()
    checkpoint.save(tmp_path, 1, one)
    directory = checkpoint.latest(tmp_path)
    assert directory is not None
    checkpoint.load(directory, other)
    checkpoint.save(tmp_path, 2, other)
    polyshard.close(one)
    checkpoint.save(tmp_path, 3, other)
    assert is_locked(tmp_path)


def test_a_checkpoint_that_is_in_the_way_is_not_moved(tmp_path: Path) -> None:
    """Whoever is killed while it has another name would leave it as what a save left that did not end."""
    directory = checkpoint.save(tmp_path, 1, alone())
    before = directory.stat()
    local = LocalStorage()
    with (
        local.attempt(tmp_path, directory.name) as attempt,
        pytest.raises(ConfigError, match="was made while this save went on"),
    ):
        attempt.commit(Marker.read(directory).rendered())
    after = directory.stat()
    assert (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns)
    checkpoint.verify(directory)
