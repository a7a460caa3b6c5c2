"""Body of the process in which ``polyshard plugins check`` runs a suite: ``python -m`` this, with a folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..errors import DeviceError
from .installed import InstalledPlugin
from .outcomes import MADE, Outcome, Record, Recorder, Stage

#: In the folder: the tests, and what became of them.
TESTS, RECORD = "test_installed.py", "outcomes.jsonl"


def main(folder: Path) -> int:
    """Run the tests of ``folder``, with nothing of the user's own settings for pytest."""
    record = Record(folder / RECORD)
    tests = [f"{folder / TESTS}::{name}" for name in _makeable(folder / TESTS, record)]
    if not tests:
        return 0
    arguments = [
        *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--noconftest"),
        *("-p", "no:cacheprovider", "-q", "--tb=short", "--import-mode=importlib"),
        *tests,
    ]
    return int(pytest.main(arguments, plugins=[Recorder(record)]))


def _makeable(file: Path, record: Record) -> Iterator[str]:
    """The classes of tests whose plugin can be made, which is tried here: every test would fail of it."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where ranks are processes, they are sent what this module defines by its name.
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    for name, tests in vars(module).items():
        if not (name.startswith("Test") and issubclass(tests, InstalledPlugin)):
            continue
        record.add(Outcome(name, MADE, "", Stage.BEGUN))
        try:
            tests().try_making()
        except DeviceError as error:
            record.add(Outcome(name, MADE, "", Stage.SKIPPED, str(error)))
        except KeyboardInterrupt:
            raise
        # SystemExit of a factory, too.
        except BaseException as error:
            record.add(Outcome(name, MADE, "", Stage.FAILED, f"{type(error).__name__}: {error}"))
        else:
            record.add(Outcome(name, MADE, "", Stage.PASSED))
            yield name


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
