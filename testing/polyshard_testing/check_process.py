"""The suite of an installed plugin in a process of its own, for ``polyshard plugins check``: both sides of it.

The process is pytest with this module as a plugin. Outcomes of tests are written down as they happen, so that those
before a crash are known.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from polyshard.errors import DeviceError
from polyshard.interfaces import Group

from .installed import InstalledPlugin, suites_of

#: In the folder of a run: the tests, and their outcomes, a line of JSON each.
_TESTS, _RECORD = "test_installed.py", "outcomes.jsonl"
#: The rule of outcomes about the construction of the plugin.
_MADE = "made"


class _Stage(enum.StrEnum):
    """How far a test has come."""

    BEGUN = "begun"
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


class _Outcome(NamedTuple):
    """One test has come to a stage."""

    device: str
    """Of the test; empty for no test."""
    rule: str
    """Name of its method, or ``_MADE``."""
    case: str
    """Its parameters, as pytest writes them; empty where there are none."""
    stage: _Stage
    message: str = ""
    """Why it failed or was skipped."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(config.rootpath / _RECORD))


class _Recorder:
    """Writes outcomes to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_pycollect_makeitem(self, name: str, obj: object) -> list[Any] | None:
        """No tests of a class whose plugin cannot be made: otherwise every one would fail."""
        if not (name.startswith("Test") and isinstance(obj, type) and issubclass(obj, InstalledPlugin)):
            return None
        self._add(name, _MADE, "", _Stage.BEGUN)
        stage, message = _Stage.PASSED, ""
        try:
            obj().try_making()
        except DeviceError as error:
            stage, message = _Stage.SKIPPED, str(error)
        except KeyboardInterrupt:
            raise
        # SystemExit of a factory, too.
        except BaseException as error:
            stage, message = _Stage.FAILED, f"{type(error).__name__}: {error}"
        self._add(name, _MADE, "", stage, message)
        return None if stage is _Stage.PASSED else []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._add_test(nodeid, _Stage.BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self._add_test(report.nodeid, _Stage.FAILED if report.failed else _Stage.SKIPPED, _message(report))
        elif report.when == "call":
            self._add_test(report.nodeid, _Stage.PASSED)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add("", _MADE, "", _Stage.FAILED, _message(report))

    def _add_test(self, nodeid: str, stage: _Stage, message: str = "") -> None:
        _, where, test = nodeid.split("::", 2)
        rule, _, case = test.partition("[")
        self._add(where, rule, case.removesuffix("]"), stage, message)

    def _add(self, where: str, rule: str, case: str, stage: _Stage, message: str = "") -> None:
        """``where``: a class of tests, named after a device."""
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps([where.removeprefix("Test").lower(), rule, case, stage, message]) + "\n")


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message)
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)


@dataclass(frozen=True)
class Failure:
    """One case in which a rule did not hold."""

    device: str
    case: str
    """Parameters of the test, as pytest writes them."""
    message: str


@dataclass(frozen=True)
class Rule:
    """One test of the suite, and how it went."""

    name: str
    """Of the method."""
    asked: bool
    """Whether the plugin was asked at all; False where its capabilities rule it out."""
    failures: tuple[Failure, ...]

    @property
    def holds(self) -> bool:
        """Whether it was asked and held in every case."""
        return self.asked and not self.failures


@dataclass(frozen=True)
class SuiteRun:
    devices: tuple[str, ...]
    """On which the plugin could be made."""
    unusable: str
    """Why it could not be made on any; empty where it could."""
    rules: tuple[Rule, ...] = ()
    ended_early: str = ""
    """Why the run ended before all rules were tried; empty where it did not."""


def run_suite(
    group: Group, label: str, options: str, attributes: Mapping[str, Any], devices: Sequence[str], timeout_s: float
) -> SuiteRun:
    """Run the suite of the plugin ``label``; arguments but the last as for ``suites_of``."""
    arguments = group.value, label, options, dict(attributes), tuple(devices)
    tests = f"from {suites_of.__module__} import suites_of\n\nglobals().update(suites_of(__name__, *{arguments!r}))\n"
    # The packages of this process, and neither pytest's plugins that happen to be there nor the current folder.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ.pop("PYTEST_ADDOPTS", None)
    with tempfile.TemporaryDirectory() as folder:
        file, settings, written = (Path(folder, name) for name in (_TESTS, "pytest.ini", "output.txt"))
        file.write_text(tests, encoding="utf-8")
        # Without the user's own settings for pytest.
        settings.write_text("[pytest]\n", encoding="utf-8")
        command: list[str | Path] = [
            *(sys.executable, "-P", "-m", "pytest", "-p", __name__, "-c", settings, "--rootdir", folder),
            *("--noconftest", "-p", "no:cacheprovider", "-q", "--tb=short", "--import-mode=importlib", file),
        ]
        with written.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            code = process.wait(timeout_s)
            # Tests failed, or there is none, as their outcomes say.
            known = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
            ended = "" if code in known else f"the suite's process ended with {code}"
        except subprocess.TimeoutExpired:
            ended = f"the suite had not ended after {timeout_s:g} s"
        finally:
            # Ranks that hang outlive the process that started them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        record = Path(folder, _RECORD)
        lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
        return _found(
            [_Outcome(*json.loads(line)) for line in lines],
            ended,
            written.read_text(encoding="utf-8", errors="replace"),
        )


def _found(outcomes: Sequence[_Outcome], ended: str, output: str) -> SuiteRun:
    made = {each.device: each for each in outcomes if each.rule == _MADE}
    devices = tuple(device for device, each in made.items() if each.stage == _Stage.PASSED)
    if not devices:
        reasons = [each.message for each in made.values() if each.message]
        return SuiteRun((), "; ".join(reasons) or f"{ended or 'nothing was tried'}\n{output[-2000:]}".strip())
    broken = [f"on {device}: {each.message}" for device, each in made.items() if each.stage == _Stage.FAILED]
    names = dict.fromkeys(each.rule for each in outcomes if each.rule != _MADE)
    rules = tuple(_rule(name, (each for each in outcomes if each.rule == name), ended) for name in names)
    return SuiteRun(devices, "; ".join(broken), rules, ended)


def _rule(name: str, outcomes: Iterable[_Outcome], ended: str) -> Rule:
    cases: dict[tuple[str, str], _Outcome] = {}
    for each in outcomes:
        earlier = cases.get((each.device, each.case))
        # A failure while a test is torn down follows its passing; one may also fail twice.
        if earlier is None or earlier.stage != _Stage.FAILED:
            cases[each.device, each.case] = each
    failures = tuple(
        Failure(each.device, each.case, each.message if each.stage == _Stage.FAILED else ended)
        for each in cases.values()
        if each.stage in (_Stage.FAILED, _Stage.BEGUN)
    )
    return Rule(name, any(each.stage != _Stage.SKIPPED for each in cases.values()), failures)
