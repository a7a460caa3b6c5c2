"""What torch.distributed can send with, and over which interfaces."""

from __future__ import annotations

from .finding import Finding, Level, Section
from .machine import Machine

_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def links(machine: Machine) -> Section:
    """Backends, interfaces, and the address by which other hosts would find this one."""
    facts = [
        ("backends", ", ".join(sorted(machine.backends)) or "none"),
        ("interfaces", ", ".join(machine.interfaces) or "none"),
        ("InfiniBand or RoCE", ", ".join(machine.infiniband) or "none"),
        ("host name resolves to", ", ".join(machine.host_addresses) or "nothing"),
        *((name, machine.environ.get(name, "not set: chosen by itself")) for name in _INTERFACE_VARIABLES),
    ]
    return Section("links", tuple(facts), (*_backends(machine), *_address(machine), *_chosen(machine)))


def _backends(machine: Machine) -> list[Finding]:
    if not machine.backends:
        why, cure = "ranks cannot speak to each other", "install a build of torch that has torch.distributed"
        return [Finding(Level.PROBLEM, "torch.distributed", "has no backend", why, cure)]
    findings = []
    if "gloo" not in machine.backends:
        why, cure = "models on the CPU cannot be sharded over ranks", "install a build of torch with gloo"
        findings.append(Finding(Level.HINT, "gloo", "is not in this torch", why, cure))
    if machine.devices and "nccl" not in machine.backends:
        why, cure = "models on CUDA devices cannot be sharded over ranks", "install a build of torch with NCCL"
        findings.append(Finding(Level.PROBLEM, "nccl", "is not in this torch", why, cure))
    return findings


def _address(machine: Machine) -> list[Finding]:
    outside = [each for each in machine.host_addresses if not each.startswith("127.") and each != "::1"]
    if outside or machine.environ.get("GLOO_SOCKET_IFNAME"):
        return []
    what = "resolves to loopback alone" if machine.host_addresses else "does not resolve"
    return [
        Finding(
            Level.HINT,
            "host name",
            what,
            "gloo then listens on loopback, where ranks of other hosts do not find it; one host is fine",
            "for several hosts, set GLOO_SOCKET_IFNAME to the interface between them, or mend /etc/hosts",
            "warning of torch's ProcessGroupGloo",
        )
    ]


def _chosen(machine: Machine) -> list[Finding]:
    findings = []
    for name in _INTERFACE_VARIABLES:
        value = machine.environ.get(name, "")
        exact = name.startswith("GLOO")
        if value and not _selects(value, machine.interfaces, exact):
            findings.append(
                Finding(
                    Level.PROBLEM,
                    name,
                    f"{value!r} leaves no interface; there are {', '.join(machine.interfaces) or 'none'}",
                    "ranks fail when they connect, or wait for each other until the time limit",
                    "name one of these, or unset the variable",
                    "torch docs, distributed, choosing the network interface" if exact else "NCCL user guide, " + name,
                )
            )
    return findings


def _selects(value: str, interfaces: tuple[str, ...], exact: bool) -> bool:
    """Whether ``value`` leaves an interface: of names, as gloo reads it, or of prefixes, as NCCL does.

    NCCL: ``=`` before the list for names instead of prefixes, ``^`` before all for those that are left out.
    """
    if exact:
        return all(name.strip() in interfaces for name in value.split(","))
    excludes, rest = value.startswith("^"), value.removeprefix("^")
    names, wanted = rest.startswith("="), rest.removeprefix("=").split(",")
    matches = [
        any(interface == each if names else interface.startswith(each) for each in wanted) for interface in interfaces
    ]
    return not all(matches) if excludes else any(matches)
