"""CUDA devices: memory, capability, and whether they reach each other."""

from __future__ import annotations

from .finding import Finding, Level, Section
from .machine import Device, Machine

_GIB = 2**30
#: Devices from this capability on compute in bfloat16.
_BF16_CAPABILITY = (8, 0)
#: Less free memory than this before anything ran is somebody else's.
_FREE_SHARE = 0.9


def devices(machine: Machine) -> Section:
    """The devices that this process sees."""
    found = machine.devices
    if not found:
        return Section("devices", (("CUDA devices", "none"), ("CPUs", str(machine.cpus))))
    facts = [(f"cuda:{index}", _described(device)) for index, device in enumerate(found)]
    findings = [*_alone(found), *_alike(found), *_peers(found)]
    return Section("devices", (*facts, ("CPUs", str(machine.cpus))), tuple(findings))


def _described(device: Device) -> str:
    memory = f"{device.free_nbytes / _GIB:.1f} of {device.total_nbytes / _GIB:.1f} GiB free"
    reaches = ", ".join(str(peer) for peer in sorted(device.peers)) or "none"
    return f"{device.name}, capability {device.capability[0]}.{device.capability[1]}, {memory}, reaches {reaches}"


def _alone(found: tuple[Device, ...]) -> list[Finding]:
    findings = []
    for index, device in enumerate(found):
        if device.free_nbytes < _FREE_SHARE * device.total_nbytes:
            taken = (device.total_nbytes - device.free_nbytes) / _GIB
            findings.append(
                Finding(
                    Level.HINT,
                    f"cuda:{index}",
                    f"{taken:.1f} GiB are taken already",
                    "another process holds them, a run that hangs perhaps",
                    "nvidia-smi lists it; end it, or leave the device out with CUDA_VISIBLE_DEVICES",
                )
            )
        if device.capability < _BF16_CAPABILITY:
            findings.append(
                Finding(
                    Level.HINT,
                    f"cuda:{index}",
                    f"capability {device.capability[0]}.{device.capability[1]}",
                    "below 8.0 bfloat16 is emulated",
                    'take precision = "fp16", with a GradScaler, instead of "bf16"',
                    "CUDA C++ Programming Guide, table of arithmetic by compute capability",
                )
            )
    return findings


def _alike(found: tuple[Device, ...]) -> list[Finding]:
    names = list(dict.fromkeys(device.name for device in found))
    if len(names) == 1:
        return []
    why = "ranks wait for each other at every unit, so all are as fast as the slowest, and hold as much as the smallest"
    return [
        Finding(Level.HINT, "devices", f"of several kinds: {', '.join(names)}", why, "shard over those of one kind")
    ]


def _peers(found: tuple[Device, ...]) -> list[Finding]:
    everyone = frozenset(range(len(found)))
    apart = [index for index, device in enumerate(found) if everyone - {index} - device.peers]
    if not apart:
        return []
    return [
        Finding(
            Level.HINT,
            "peer access",
            f"of {', '.join(f'cuda:{index}' for index in apart)} to all others is not there",
            "NCCL sends through the host's memory, and the collectives 'symmetric' use NCCL alone",
            "look at 'nvidia-smi topo -m'; in a virtual machine, at how devices are passed through",
            "NCCL user guide, troubleshooting: GPU-to-GPU communication",
        )
    ]
