"""The process in which ``polyshard plugins check`` runs a suite: ``python -m`` this, with a folder.

Outcomes of tests are written down as they happen, so that those before a crash are known.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from polyshard.errors import DeviceError

from .installed import InstalledPlugin


class Stage(enum.StrEnum):
    """How far a test has come."""

    BEGUN = "begun"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Outcome:
    """A line of the record: one test has come to a stage."""

    device: str
    """Of the test; empty for no test."""
    rule: str
    """Name of its method, or ``MADE``."""
    case: str
    """Its parameters, as pytest writes them; empty where there are none."""
    stage: Stage
    message: str = ""
    """Why it failed or was skipped."""


#: The rule of outcomes about the construction of the plugin.
MADE = "made"
#: In the folder: the tests, and their outcomes.
TESTS, RECORD = "test_installed.py", "outcomes.jsonl"


def outcomes_in(folder: Path) -> list[Outcome]:
    """What was recorded in ``folder``, in that order."""
    file = folder / RECORD
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Outcome(**(fields | {"stage": Stage(fields["stage"])})) for fields in map(json.loads, lines)]


class Recorder:
    """A plugin of pytest that records outcomes in a folder, one line of JSON each."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / RECORD

    def add(self, test: str, rule: str, case: str, stage: Stage, message: str = "") -> None:
        """``test``: a class of tests, named after a device."""
        outcome = Outcome(test.removeprefix("Test").lower(), rule, case, stage, message)
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(outcome)) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._add(nodeid, Stage.BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._add(report.nodeid, Stage.FAILED, _message(report))
        elif report.skipped:
            self._add(report.nodeid, Stage.SKIPPED, _message(report))
        elif report.when == "call":
            self._add(report.nodeid, Stage.PASSED)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.add("", MADE, "", Stage.FAILED, _message(report))

    def _add(self, nodeid: str, stage: Stage, message: str = "") -> None:
        _, where, test = nodeid.split("::", 2)
        rule, _, case = test.partition("[")
        self.add(where, rule, case.removesuffix("]"), stage, message)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)


def main(folder: Path) -> int:
    """Run the tests of ``folder``, without the user's own settings for pytest."""
    recorder = Recorder(folder)
    tests = [f"{folder / TESTS}::{name}" for name in _makeable(folder / TESTS, recorder)]
    if not tests:
        return 0
    arguments = [
        *("-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--noconftest"),
        *("-p", "no:cacheprovider", "-q", "--tb=short", "--import-mode=importlib"),
        *tests,
    ]
    return int(pytest.main(arguments, plugins=[recorder]))


def _makeable(file: Path, recorder: Recorder) -> Iterator[str]:
    """The classes of tests whose plugin can be constructed, which is tried here: otherwise every test would fail."""
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
        recorder.add(name, MADE, "", Stage.BEGUN)
        try:
            tests().try_making()
        except DeviceError as error:
            recorder.add(name, MADE, "", Stage.SKIPPED, str(error))
        except KeyboardInterrupt:
            raise
        # SystemExit of a factory, too.
        except BaseException as error:
            recorder.add(name, MADE, "", Stage.FAILED, f"{type(error).__name__}: {error}")
        else:
            recorder.add(name, MADE, "", Stage.PASSED)
            yield name


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
