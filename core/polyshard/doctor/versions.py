"""Versions, beside the ranges that polyshard's own metadata ask for."""

from __future__ import annotations

import platform
import re

from .._version import __version__
from .finding import Finding, Level, Section
from .machine import Machine

#: ``name[extras]>=1.2; extra == "that"``, the one form in which polyshard states what it needs.
_REQUIREMENT = re.compile(
    r"""^([\w.-]+)(?:\[[^\]]*\])?\s*\(?(?:>=\s*([\w.]+))?\)?\s*(?:;\s*extra\s*==\s*['"]([\w-]+)['"])?$"""
)
#: Extras for those who change polyshard itself.
_NOT_FOR_USERS = frozenset({"test", "docs", "dev"})


def versions(machine: Machine) -> Section:
    """What is installed, and what of it is older than polyshard needs."""
    facts = [
        ("python", platform.python_version()),
        ("polyshard", __version__),
        *((name, machine.installed.get(name, "not installed")) for name in ("torch", "stevedore", "pluggy")),
        ("CUDA of torch", machine.cuda or "none"),
        ("NCCL", machine.nccl or "none"),
    ]
    findings = [*_own(machine), *_torch_build(machine)]
    extras: dict[str, list[str]] = {}
    for text in machine.requirements:
        parsed = _REQUIREMENT.match(text)
        name = parsed[1].lower().replace("_", "-") if parsed else ""
        if parsed is None:
            findings.append(Finding(Level.HINT, "requirements", f"{text!r} is in a form that is not checked here"))
        elif name != "polyshard" and parsed[3] not in _NOT_FOR_USERS:
            findings += _required(machine, name, parsed[2], parsed[3])
            if parsed[3]:
                extras.setdefault(parsed[3], []).append(f"{name} {machine.installed.get(name, 'not installed')}")
    facts += [(f"extra {extra}", ", ".join(packages)) for extra, packages in extras.items()]
    return Section("versions", tuple(facts), tuple(findings))


def _required(machine: Machine, name: str, oldest: str | None, extra: str | None) -> list[Finding]:
    found = machine.installed.get(name)
    wanted = f"{name}>={oldest}" if oldest else name
    if found is None:
        if extra:
            return []
        return [Finding(Level.PROBLEM, name, "is not installed", "polyshard needs it", f"pip install '{wanted}'")]
    if oldest is None or not older(found, oldest):
        return []
    why = f"polyshard[{extra}] is made for {wanted}" if extra else f"polyshard needs {wanted}"
    level = Level.HINT if extra else Level.PROBLEM
    return [Finding(level, name, f"{found} is installed", why, f"pip install --upgrade '{wanted}'")]


def older(version: str, than: str) -> bool:
    """Whether ``version`` comes before ``than``, by the numbers that both begin with; shorter ones end in zeros."""
    first, second = _numbers(version), _numbers(than)
    length = max(len(first), len(second))
    return (*first, *[0] * (length - len(first))) < (*second, *[0] * (length - len(second)))


def _numbers(version: str) -> tuple[int, ...]:
    # 2.13.0+cu130 is of 2.13.0, and 5.0.dev0 counts as 5.0: who installs one wants it.
    head = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in head[0].split(".")) if head else ()


def _own(machine: Machine) -> list[Finding]:
    found = machine.installed.get("polyshard")
    if found is None:
        return [
            Finding(
                Level.PROBLEM,
                "polyshard",
                "is on the path, but not installed",
                "its own plugins are found through what an installation writes, so every name is unknown",
                "pip install it, with -e for a folder that you change",
            )
        ]
    if found != __version__:
        return [
            Finding(
                Level.PROBLEM,
                "polyshard",
                f"{__version__} is imported, but {found} is installed",
                "plugins are found as the installation lists them, which another version may not have",
                "install again, or take the other one off the path",
            )
        ]
    return []


def _torch_build(machine: Machine) -> list[Finding]:
    if not machine.nvidia_devices or machine.devices:
        return []
    if machine.cuda is None:
        what, cure = "is built without CUDA", "install a build of torch for CUDA"
    elif "CUDA_VISIBLE_DEVICES" in machine.environ:
        return []  # Said of the variable.
    else:
        what, cure = f"is built for CUDA {machine.cuda} but sees no device", "compare the driver's version (nvidia-smi)"
    why = f"the driver knows {machine.nvidia_devices} NVIDIA devices, and models stay on the CPU"
    return [Finding(Level.PROBLEM, "torch", what, why, cure)]
