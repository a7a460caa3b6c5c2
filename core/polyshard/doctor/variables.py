"""Environment variables that hurt: each with when, why, and where that is written down."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from ..config import ENVIRONMENT_PREFIX, FILE_FIELDS, NO_SETTINGS, did_you_mean
from .finding import Finding, Level, Section
from .machine import Machine

_NCCL = "NCCL user guide, environment variables"
_TORCH = "torch docs, CUDA environment variables"
_TORCH_NCCL = "torch docs, ProcessGroupNCCL environment variables"


@dataclass(frozen=True, slots=True)
class Rule:
    """A variable, and when its value does harm."""

    variable: str
    hurts: Callable[[str, Machine], Level]
    """The level of a value on a machine; ``FINE`` where it does no harm."""
    why: str
    cure: str
    source: str


def _on(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on", "y", "t")


def _with_devices(value: str, machine: Machine) -> Level:
    """A switch that slows every step on CUDA devices."""
    if not _on(value):
        return Level.FINE
    return Level.PROBLEM if machine.devices else Level.HINT


def _between_devices(value: str, machine: Machine) -> Level:
    """A switch that takes a road away from devices of one host."""
    if not _on(value):
        return Level.FINE
    return Level.PROBLEM if len(machine.devices) > 1 else Level.HINT


def _with_adapters(value: str, machine: Machine) -> Level:
    return Level.PROBLEM if _on(value) and machine.infiniband else Level.FINE


#: Of these, each is looked up in the environment; what is not set does no harm.
RULES: tuple[Rule, ...] = (
    Rule(
        "NCCL_P2P_DISABLE",
        _between_devices,
        "devices of one host send through its memory instead of NVLink or PCIe",
        "unset it; where it was set against a hang, look for the cause (IOMMU, ACS)",
        _NCCL,
    ),
    Rule(
        "NCCL_SHM_DISABLE",
        _between_devices,
        "devices that do not reach each other send over the network, on one host too",
        "unset it, and give /dev/shm room",
        _NCCL,
    ),
    Rule(
        "NCCL_IB_DISABLE",
        _with_adapters,
        "hosts send over TCP, although there are InfiniBand or RoCE adapters",
        "unset it",
        _NCCL,
    ),
    Rule(
        "NCCL_PROTO",
        lambda value, machine: Level.HINT if value else Level.FINE,
        "NCCL no longer chooses by message size; small gathers and large ones want different protocols",
        "unset it, unless a bug of one protocol is being avoided",
        _NCCL,
    ),
    Rule(
        "NCCL_ALGO",
        lambda value, machine: Level.HINT if value else Level.FINE,
        "NCCL no longer chooses by message size and topology",
        "unset it, unless a bug of one algorithm is being avoided",
        _NCCL,
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        _with_devices,
        "the host waits for every kernel, so that gathers and reductions no longer run beside compute",
        "unset it once the error that it was set for is found",
        "CUDA C++ Programming Guide, environment variables",
    ),
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value, machine: Level.HINT if value.strip() == "1" else Level.FINE,
        "streams share one queue to the device, so that a gather waits for compute that was issued before it",
        "unset it: the default is 8",
        "Megatron-LM refuses it where parameters are sharded",
    ),
    Rule(
        "TORCH_NCCL_BLOCKING_WAIT",
        _with_devices,
        "the host waits for each gather, instead of letting the device order it, and steps cannot be captured",
        "unset it: time limits are held without it",
        _TORCH_NCCL,
    ),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        lambda value, machine: Level.HINT if value.strip() == "0" else Level.FINE,
        "a rank that fails leaves the others waiting without end",
        "unset it",
        _TORCH_NCCL,
    ),
    Rule(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        lambda value, machine: Level.HINT if _on(value) else Level.FINE,
        "it has no effect any more: torch warns of it on every rank",
        "unset it",
        "warning of torch's ProcessGroupNCCL",
    ),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value, machine: Level.HINT if value.strip().upper() == "DETAIL" else Level.FINE,
        "ranks compare every collective before it runs",
        "unset it once the difference that it was set for is found; polyshard compares the first step itself",
        "torch docs, distributed, debugging",
    ),
    Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        # Torch asks whether it is there, whatever its value.
        lambda value, machine: Level.PROBLEM if machine.devices else Level.HINT,
        "the driver allocates and frees every gather buffer, and waits for the device; steps cannot be captured",
        "unset it: memory of gathers comes and goes at every unit",
        _TORCH,
    ),
    Rule(
        "PYTORCH_CUDA_ALLOC_CONF",
        lambda value, machine: Level.HINT if value else Level.FINE,
        "it is the former name: torch warns of it on every rank",
        "rename it to PYTORCH_ALLOC_CONF",
        "warning of torch's allocator",
    ),
)


def variables(machine: Machine) -> Section:
    """Those that are set and hurt, and threads and devices that are not as they should be."""
    findings: list[Finding] = []
    for rule in RULES:
        value = machine.environ.get(rule.variable)
        level = Level.FINE if value is None else rule.hurts(value, machine)
        if level is not Level.FINE:
            findings.append(Finding(level, rule.variable, f"is {value!r}", rule.why, rule.cure, rule.source))
    findings += [*_threads(machine), *_visible(machine), *_own(machine)]
    names = ("CUDA_", "GLOO_", "NCCL_", "OMP_NUM", "PYTORCH_", "TORCH_", ENVIRONMENT_PREFIX)
    facts = [(name, value) for name, value in sorted(machine.environ.items()) if name.startswith(names)]
    return Section("variables", tuple(facts), tuple(findings))


def _threads(machine: Machine) -> list[Finding]:
    text = machine.environ.get("OMP_NUM_THREADS", "")
    ranks = _number(machine.environ.get("LOCAL_WORLD_SIZE", "")) or max(1, len(machine.devices))
    source = "torch docs, torchrun, which sets it to 1 where several ranks share a host"
    threads = _number(text)
    if threads is None and "LOCAL_WORLD_SIZE" in machine.environ and ranks > 1:
        what, cure = "is not set", f"OMP_NUM_THREADS={max(1, machine.cpus // ranks)}, or start by torchrun"
    elif threads is not None and threads * ranks > machine.cpus and threads > 1:
        what = f"is {text!r}, for {ranks} rank{'s' * (ranks > 1)} on {machine.cpus} CPUs"
        cure = f"OMP_NUM_THREADS={max(1, machine.cpus // ranks)}"
    else:
        return []
    why = "more threads than CPUs take turns, and the rank that waits longest holds up all"
    return [Finding(Level.HINT, "OMP_NUM_THREADS", what, why, cure, source)]


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _visible(machine: Machine) -> list[Finding]:
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    seen = len(machine.devices)
    if value is None or machine.cuda is None or seen >= machine.nvidia_devices:
        return []
    return [
        Finding(
            Level.HINT if seen else Level.PROBLEM,
            "CUDA_VISIBLE_DEVICES",
            f"is {value!r}: {seen} of {machine.nvidia_devices} devices are seen",
            "devices behind the first index that does not exist are hidden, too",
            "leave it to the scheduler; torchrun needs all devices of its ranks visible to each",
            "CUDA C++ Programming Guide, environment variables",
        )
    ]


def _own(machine: Machine) -> list[Finding]:
    """Variables with polyshard's prefix, or nearly, that set nothing."""
    findings = []
    # The others are suggested, too: a misspelt allow-list allows everything.
    settings = [*(ENVIRONMENT_PREFIX + name.upper() for name in FILE_FIELDS), *sorted(NO_SETTINGS)]
    for name in sorted(machine.environ):
        if name in NO_SETTINGS:
            continue
        head = name.partition("__")[0]
        if name.startswith(ENVIRONMENT_PREFIX) and head not in settings:
            why = "every configuration that is read from a file stops at it"
            cure = f"unset it.{did_you_mean(head, settings)}"
            findings.append(Finding(Level.PROBLEM, name, "is no setting", why, cure, "polyshard, docs/settings.md"))
        elif not name.startswith(ENVIRONMENT_PREFIX) and _resembles(name):
            why = "nobody reads it, so the setting that was meant keeps its value"
            cure = f"write it with {ENVIRONMENT_PREFIX}.{did_you_mean(head, settings)}"
            findings.append(Finding(Level.HINT, name, "looks like a setting", why, cure, "polyshard, docs/settings.md"))
    return findings


def _resembles(name: str) -> bool:
    first, *others = name.casefold().split("_")
    if not others:
        return False
    prefix = ENVIRONMENT_PREFIX.rstrip("_").casefold()
    # POLYSHRAD_PRECISION, and POLY_SHARD_PRECISION; other programs' POLYGON_... is neither.
    return first + others[0] == prefix or bool(difflib.get_close_matches(first, [prefix], cutoff=0.8))
