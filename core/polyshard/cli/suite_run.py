"""Runs the suite of an installed plugin in a process of its own, and tells which rules hold."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..interfaces import Group

if TYPE_CHECKING:
    from ..testing.check_process import Outcome

#: The parts of the class that tests a plugin of each group, by what they do beside constructing it.
_MIXED_IN = {Group.COLLECTIVES: "InstalledCollectives", Group.POLICIES: "InstalledPolicy"}


@dataclass(frozen=True)
class Failure:
    """One case in which a rule did not hold."""

    device: str
    case: str
    """Parameters of the test, as pytest writes them; empty where there are none."""
    message: str


@dataclass(frozen=True)
class Rule:
    """What became of one test of the suite."""

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
    """What a run found."""

    devices: tuple[str, ...]
    """On which the plugin could be made."""
    unusable: str
    """Why it could not be made on any; empty where it could."""
    rules: tuple[Rule, ...]
    ended_early: str = ""
    """What ended the run before all rules were tried; empty where nothing did."""


@dataclass(frozen=True)
class Suite:
    """The tests of one plugin."""

    group: Group
    label: str
    """Its ``"distribution:name"``."""
    options: str
    """A TOML document whose ``table`` has its options."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the suite's class that are to differ."""
    model: str = ""
    """For a policy: ``"package.module:function"`` that builds a model; empty for the suite's own."""

    def run(self, devices: Sequence[str], timeout_s: float) -> SuiteRun:
        """Run them on each of ``devices``; pytest must be installed."""
        # Imported with pytest, so that all else of the command works without it.
        from ..testing.check_process import RECORD, TESTS, Record

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, TESTS).write_text(self._source(devices), encoding="utf-8")
            Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
            ended, output = _run(folder, timeout_s)
            return _found(list(Record(Path(folder, RECORD))), ended, output)

    def _source(self, devices: Sequence[str]) -> str:
        """A file of tests, as the plugin's author could have written it."""
        mixed_in = _MIXED_IN.get(self.group, "InstalledPlugin")
        lines = [
            "import torch",
            f"from polyshard.testing.installed import {mixed_in}",
            "from polyshard.testing.installed import OF_GROUP",
            "from polyshard.interfaces import Group",
        ]
        for device in devices:
            lines += [
                f"class Test{device.title()}({mixed_in}, OF_GROUP[Group({self.group.value!r})]):",
                f"    group = Group({self.group.value!r})",
                f"    label = {self.label!r}",
                f"    options = {self.options!r}",
                f"    device = torch.device({device!r})",
                *(f"    {name} = {value!r}" for name, value in self._set(device).items()),
            ]
        return "\n".join(lines) + "\n"

    def _set(self, device: str) -> dict[str, Any]:
        found = dict(self.attributes)
        if self.group is Group.COLLECTIVES:
            found = {"ranks": "processes", "device_type": device} | found
        if self.model:
            found["model_factory"] = self.model
        return found


def _run(folder: str, timeout_s: float) -> tuple[str, str]:
    """How the process ended, empty where as it should; and what it wrote."""
    # What is installed for this process, and neither pytest's plugins that happen to be there nor the current folder.
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-P", "-m", "polyshard.testing.check_process", folder]
    written = Path(folder, "output.txt")
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
        # 1: tests failed, which their outcomes tell.
        ended = "" if code in (0, 1) else f"the suite's process ended with {code}"
    except subprocess.TimeoutExpired:
        ended = f"the suite had not ended after {timeout_s:g} s"
    finally:
        # Ranks that hang outlive the process that started them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return ended, written.read_text(encoding="utf-8", errors="replace")


def _found(outcomes: Sequence[Outcome], ended: str, output: str) -> SuiteRun:
    from ..testing.check_process import MADE, Stage

    made = {each.where: each for each in outcomes if each.rule == MADE}
    devices = tuple(_device(each.where) for each in made.values() if each.stage is Stage.PASSED)
    if not devices:
        told = [each.message for each in made.values() if each.message]
        return SuiteRun((), "; ".join(told) or f"{ended or 'nothing was tried'}\n{output[-2000:]}".strip(), ())
    broken = [f"on {_device(each.where)}: {each.message}" for each in made.values() if each.stage is Stage.FAILED]
    by_rule: dict[str, list[Outcome]] = {}
    for each in outcomes:
        if each.rule != MADE:
            by_rule.setdefault(each.rule, []).append(each)
    rules = tuple(_rule(name, found, ended) for name, found in by_rule.items())
    return SuiteRun(devices, "; ".join(broken), rules, ended)


def _rule(name: str, outcomes: Iterable[Outcome], ended: str) -> Rule:
    from ..testing.check_process import Stage

    cases: dict[tuple[str, str], Outcome] = {}
    for each in outcomes:
        earlier = cases.get((each.where, each.case))
        # A failure while a test is torn down comes behind its passing; one may also fail twice.
        if earlier is None or earlier.stage is not Stage.FAILED:
            cases[each.where, each.case] = each
    failures = []
    for (where, case), each in cases.items():
        if each.stage is Stage.FAILED:
            failures.append(Failure(_device(where), case, each.message))
        elif each.stage is Stage.BEGUN:
            failures.append(Failure(_device(where), case, ended))
    return Rule(name, any(each.stage is not Stage.SKIPPED for each in cases.values()), tuple(failures))


def _device(where: str) -> str:
    return where.removeprefix("Test").lower()
