"""A test that stands still with the interpreter lock held ends the run, and shows where every thread stood."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import watchdog

# A mutex of C, locked twice by a call that keeps the interpreter lock.
STANDS_STILL = """
import ctypes, threading

def waits_in_a_thread(leave):
    leave.wait()

def test_stands_still():
    threading.Thread(target=waits_in_a_thread, args=[threading.Event()], daemon=True).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.slow
def test_a_test_that_keeps_the_interpreter_lock_ends_with_all_stacks(tmp_path: Path) -> None:
    test = tmp_path / "test_stands_still.py"
    test.write_text(STANDS_STILL)
    command = [sys.executable, "-m", "pytest", "-p", "watchdog", "-p", "no:cacheprovider", "--timeout", "1"]
    done = subprocess.run(
        [*command, "-o", "deadlock_timeout=2", str(test)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(watchdog.__file__).parent)},
    )
    assert done.returncode == 1
    for function in ("in test_stands_still", "in waits_in_a_thread"):
        assert function in done.stderr
