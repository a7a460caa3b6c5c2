"""The checks of a machine: versions, devices, links, environment variables, plugins, limits of the system."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from polyshard._version import __version__
from polyshard.config import ENVIRONMENT_PREFIX, FILE_FIELDS, NO_SETTINGS, did_you_mean
from polyshard.interfaces.options import ALLOWED_PLUGINS, DISABLE_PLUGINS
from polyshard.registry import Installed, PluginState

from .machine import Device, Machine
from .report import Finding, Level, Section

_GIB = 2**30
#: ``name[extras]>=1.2; extra == "that"``, the one form in which polyshard states its requirements.
_REQUIREMENT = re.compile(
    r"""^([\w.-]+)(?:\[[^\]]*\])?\s*\(?(?:>=\s*([\w.]+))?\)?\s*(?:;\s*extra\s*==\s*['"]([\w-]+)['"])?$"""
)
#: Extras for those who change polyshard itself.
_NOT_FOR_USERS = frozenset({"test", "docs", "dev"})
#: Devices from this capability on compute in bfloat16.
_BF16_CAPABILITY = (8, 0)
#: Less free memory than this before anything ran is somebody else's.
_FREE_SHARE = 0.9
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: Plugins that a longer name still reaches.
_REACHABLE = frozenset({PluginState.HIDDEN, PluginState.AMBIGUOUS})
#: A rank of gloo holds a connection to each other rank for each group, beside data loaders' pipes and files.
OPEN_FILES = 4096
#: NCCL maps tens of megabytes for each pair of devices, and data loaders pass batches through it.
SHARED_MEMORY_NBYTES = 2**30


def versions(machine: Machine) -> Section:
    """The installed versions, and those older than polyshard needs."""
    facts = [
        ("python", platform.python_version()),
        ("polyshard", __version__),
        *((name, machine.installed.get(name, "not installed")) for name in ("torch", "stevedore", "pluggy")),
        ("CUDA of torch", machine.cuda or "none"),
        ("NCCL", machine.nccl or "none"),
    ]
    findings = [*_installation(machine), *_torch_build(machine)]
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


def _installation(machine: Machine) -> Iterator[Finding]:
    found = machine.installed.get("polyshard")
    if found is None:
        what = "is on the path, but not installed"
        why = "its own plugins are found through what an installation writes, so every name is unknown"
        yield Finding(Level.PROBLEM, "polyshard", what, why, "pip install it, with -e for a folder that you change")
    elif found != __version__:
        what = f"{__version__} is imported, but {found} is installed"
        why = "plugins are found as the installation lists them, which another version may not have"
        yield Finding(Level.PROBLEM, "polyshard", what, why, "install again, or take the other one off the path")


def _torch_build(machine: Machine) -> Iterator[Finding]:
    # Hidden devices are reported under the variable.
    hidden = machine.cuda is not None and "CUDA_VISIBLE_DEVICES" in machine.environ
    if not machine.nvidia_devices or machine.devices or hidden:
        return
    if machine.cuda is None:
        what, cure = "is built without CUDA", "install a build of torch for CUDA"
    else:
        what, cure = f"is built for CUDA {machine.cuda} but sees no device", "compare the driver's version (nvidia-smi)"
    why = f"the driver knows {machine.nvidia_devices} NVIDIA devices, and models stay on the CPU"
    yield Finding(Level.PROBLEM, "torch", what, why, cure)


def _required(machine: Machine, name: str, oldest: str | None, extra: str | None) -> Iterator[Finding]:
    found = machine.installed.get(name)
    wanted = f"{name}>={oldest}" if oldest else name
    if found is None and not extra:
        yield Finding(Level.PROBLEM, name, "is not installed", "polyshard needs it", f"pip install '{wanted}'")
    elif found is not None and oldest is not None and _older(found, oldest):
        why = f"polyshard[{extra}] is made for {wanted}" if extra else f"polyshard needs {wanted}"
        level = Level.HINT if extra else Level.PROBLEM
        yield Finding(level, name, f"{found} is installed", why, f"pip install --upgrade '{wanted}'")


def _older(version: str, than: str) -> bool:
    """Whether ``version`` is before ``than``, by the numbers that both begin with; shorter ones end in zeros."""
    first, second = _numbers(version), _numbers(than)
    length = max(len(first), len(second))
    return (*first, *[0] * (length - len(first))) < (*second, *[0] * (length - len(second)))


def _numbers(version: str) -> tuple[int, ...]:
    # 2.13.0+cu130 is of 2.13.0, and 5.0.dev0 counts as 5.0: who installs one wants it.
    head = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in head[0].split(".")) if head else ()


def devices(machine: Machine) -> Section:
    """The CUDA devices that this process sees: memory, capability, and whether they reach each other."""
    found = machine.devices
    if not found:
        return Section("devices", (("CUDA devices", "none"), ("CPUs", str(machine.cpus))))
    facts = []
    for index, device in enumerate(found):
        memory = f"{device.free_nbytes / _GIB:.1f} of {device.total_nbytes / _GIB:.1f} GiB free"
        reaches = ", ".join(str(peer) for peer in sorted(device.peers)) or "none"
        capability = f"capability {device.capability[0]}.{device.capability[1]}"
        facts.append((f"cuda:{index}", f"{device.name}, {capability}, {memory}, reaches {reaches}"))
    if len(found) > 1:
        facts.append(
            ("units from 64 MiB", "by NCCL" if machine.uncopied else "by copy engines, with collectives 'auto'")
        )
    findings = (*_each_device(found), *_devices_together(found), *_uncopied(machine))
    return Section("devices", (*facts, ("CPUs", str(machine.cpus))), findings)


def _uncopied(machine: Machine) -> Iterator[Finding]:
    everyone = frozenset(range(len(machine.devices)))
    reached = all(everyone - {index} <= device.peers for index, device in enumerate(machine.devices))
    # Devices that do not reach each other are told of already.
    if machine.uncopied and reached:
        why = "collectives 'auto' leave units from 64 MiB to NCCL, which takes multiprocessors from computation"
        cure = "see docs/settings.md, Collectives; nothing is wrong where the devices have no NVLink"
        yield Finding(Level.HINT, "copy engines", f"do not move units: {machine.uncopied}", why, cure)


def _each_device(found: tuple[Device, ...]) -> Iterator[Finding]:
    for index, device in enumerate(found):
        if device.free_nbytes < _FREE_SHARE * device.total_nbytes:
            what = f"{(device.total_nbytes - device.free_nbytes) / _GIB:.1f} GiB are taken already"
            why = "another process holds them, a run that hangs perhaps"
            cure = "nvidia-smi lists it; end it, or leave the device out with CUDA_VISIBLE_DEVICES"
            yield Finding(Level.HINT, f"cuda:{index}", what, why, cure)
        if device.capability < _BF16_CAPABILITY:
            what = f"capability {device.capability[0]}.{device.capability[1]}"
            cure = 'take precision = "fp16", with a GradScaler, instead of "bf16"'
            source = "CUDA C++ Programming Guide, table of arithmetic by compute capability"
            yield Finding(Level.HINT, f"cuda:{index}", what, "below 8.0 bfloat16 is emulated", cure, source)


def _devices_together(found: tuple[Device, ...]) -> Iterator[Finding]:
    names = list(dict.fromkeys(device.name for device in found))
    if len(names) > 1:
        what = f"of several kinds: {', '.join(names)}"
        why = (
            "ranks wait for each other at every unit, so all are as fast as the slowest, and hold as much as the "
            "smallest"
        )
        yield Finding(Level.HINT, "devices", what, why, "shard over those of one kind")
    everyone = frozenset(range(len(found)))
    apart = [index for index, device in enumerate(found) if everyone - {index} - device.peers]
    if apart:
        what = f"of {', '.join(f'cuda:{index}' for index in apart)} to all others is not there"
        why = "NCCL sends through the host's memory, and the collectives 'symmetric' use NCCL alone"
        cure = "look at 'nvidia-smi topo -m'; in a virtual machine, at how devices are passed through"
        source = f"{_NCCL_TROUBLE}: GPU-to-GPU communication"
        yield Finding(Level.HINT, "peer access", what, why, cure, source)


def links(machine: Machine) -> Section:
    """Backends, interfaces, and the address by which other hosts would find this one."""
    facts = (
        ("backends", ", ".join(sorted(machine.backends)) or "none"),
        ("interfaces", ", ".join(machine.interfaces) or "none"),
        ("InfiniBand or RoCE", ", ".join(machine.infiniband) or "none"),
        ("host name resolves to", ", ".join(machine.host_addresses) or "nothing"),
        *((name, machine.environ.get(name, "not set: chosen by itself")) for name in _INTERFACE_VARIABLES),
    )
    return Section("links", facts, (*_backends(machine), *_address(machine), *_chosen(machine), *_lighthouse(machine)))


def _backends(machine: Machine) -> Iterator[Finding]:
    if not machine.backends:
        why, cure = "ranks cannot speak to each other", "install a build of torch that has torch.distributed"
        yield Finding(Level.PROBLEM, "torch.distributed", "has no backend", why, cure)
        return
    if "gloo" not in machine.backends:
        why, cure = "models on the CPU cannot be sharded over ranks", "install a build of torch with gloo"
        yield Finding(Level.HINT, "gloo", "is not in this torch", why, cure)
    if machine.devices and "nccl" not in machine.backends:
        why, cure = "models on CUDA devices cannot be sharded over ranks", "install a build of torch with NCCL"
        yield Finding(Level.PROBLEM, "nccl", "is not in this torch", why, cure)


def _address(machine: Machine) -> Iterator[Finding]:
    outside = [each for each in machine.host_addresses if not each.startswith("127.") and each != "::1"]
    if not outside and not machine.environ.get("GLOO_SOCKET_IFNAME"):
        what = "resolves to loopback alone" if machine.host_addresses else "does not resolve"
        why = "gloo then listens on loopback, where ranks of other hosts do not find it; one host is fine"
        cure = "for several hosts, set GLOO_SOCKET_IFNAME to the interface between them, or mend /etc/hosts"
        yield Finding(Level.HINT, "host name", what, why, cure, "warning of torch's ProcessGroupGloo")


def _chosen(machine: Machine) -> Iterator[Finding]:
    for name in _INTERFACE_VARIABLES:
        value = machine.environ.get(name, "")
        exact = name.startswith("GLOO")
        if value and not _selects(value, machine.interfaces, exact):
            what = f"{value!r} leaves no interface; there are {', '.join(machine.interfaces) or 'none'}"
            why = "ranks fail when they connect, or wait for each other until the time limit"
            source = "torch docs, distributed, choosing the network interface" if exact else "NCCL user guide, " + name
            yield Finding(Level.PROBLEM, name, what, why, "name one of these, or unset the variable", source)


def _lighthouse(machine: Machine) -> Iterator[Finding]:
    if machine.lighthouse is False:
        what = f"{machine.environ.get('TORCHFT_LIGHTHOUSE')!r} takes no connection"
        why, cure = (
            "jobs over torchft wait for it before each step",
            "start torchft_lighthouse, or mend the address",
        )
        yield Finding(Level.PROBLEM, "TORCHFT_LIGHTHOUSE", what, why, cure)


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


def variables(machine: Machine) -> Section:
    """The variables that hurt, and threads and devices that are not as they should be."""
    findings: list[Finding] = []
    for rule in RULES:
        value = machine.environ.get(rule.variable)
        level = Level.FINE if value is None else rule.hurts(value, machine)
        if level is not Level.FINE:
            findings.append(Finding(level, rule.variable, f"is {value!r}", rule.why, rule.cure, rule.source))
    findings += [*_allocator(machine), *_threads(machine), *_visible(machine), *_settings(machine)]
    names = ("CUDA_", "GLOO_", "NCCL_", "OMP_NUM", "PYTORCH_", "TORCH_", ENVIRONMENT_PREFIX)
    facts = [(name, value) for name, value in sorted(machine.environ.items()) if name.startswith(names)]
    return Section("variables", tuple(facts), tuple(findings))


def _allocator(machine: Machine) -> Iterator[Finding]:
    # Torch reads the second where the first is not set.
    name = next((name for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if machine.environ.get(name)), None)
    given = "" if name is None else machine.environ[name]
    if machine.devices and "expandable_segments:true" not in given.replace(" ", "").lower():
        what = f"is {given!r}, without expandable_segments" if name else "does not ask for expandable_segments"
        why = "torch keeps segments of fixed sizes, between which memory is lost"
        cure = "where memory is short: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        yield Finding(Level.HINT, name or "PYTORCH_ALLOC_CONF", what, why, cure, "polyshard, docs/memory.md")


def _threads(machine: Machine) -> Iterator[Finding]:
    text = machine.environ.get("OMP_NUM_THREADS", "")
    ranks = _number(machine.environ.get("LOCAL_WORLD_SIZE", "")) or max(1, len(machine.devices))
    source = "torch docs, torchrun, which sets it to 1 where several ranks share a host"
    why = "more threads than CPUs take turns, and the rank that waits longest holds up all"
    cure = f"OMP_NUM_THREADS={max(1, machine.cpus // ranks)}"
    threads = _number(text)
    if threads is None and "LOCAL_WORLD_SIZE" in machine.environ and ranks > 1:
        yield Finding(Level.HINT, "OMP_NUM_THREADS", "is not set", why, f"{cure}, or start by torchrun", source)
    elif threads is not None and threads * ranks > machine.cpus and threads > 1:
        what = f"is {text!r}, for {ranks} rank{'s' * (ranks > 1)} on {machine.cpus} CPUs"
        yield Finding(Level.HINT, "OMP_NUM_THREADS", what, why, cure, source)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _visible(machine: Machine) -> Iterator[Finding]:
    value = machine.environ.get("CUDA_VISIBLE_DEVICES")
    seen = len(machine.devices)
    if value is not None and machine.cuda is not None and seen < machine.nvidia_devices:
        what = f"is {value!r}: {seen} of {machine.nvidia_devices} devices are seen"
        why = "devices behind the first index that does not exist are hidden, too"
        cure = "leave it to the scheduler; torchrun needs all devices of its ranks visible to each"
        level = Level.HINT if seen else Level.PROBLEM
        yield Finding(level, "CUDA_VISIBLE_DEVICES", what, why, cure, _CUDA)


def _settings(machine: Machine) -> Iterator[Finding]:
    """Variables with polyshard's prefix, or nearly, that set nothing."""
    # The others are suggested, too: a misspelt allow-list allows everything.
    settings = [*(ENVIRONMENT_PREFIX + name.upper() for name in FILE_FIELDS), *sorted(NO_SETTINGS)]
    for name in sorted(set(machine.environ) - set(NO_SETTINGS)):
        head = name.partition("__")[0]
        meant = did_you_mean(head, settings)
        if name.startswith(ENVIRONMENT_PREFIX) and head not in settings:
            why = "every configuration that is read from a file stops at it"
            yield Finding(Level.PROBLEM, name, "is no setting", why, f"unset it.{meant}", "polyshard, docs/settings.md")
        elif not name.startswith(ENVIRONMENT_PREFIX) and _resembles(name):
            why = "nobody reads it, so the setting that was meant keeps its value"
            cure = f"write it with {ENVIRONMENT_PREFIX}.{meant}"
            yield Finding(Level.HINT, name, "looks like a setting", why, cure, "polyshard, docs/settings.md")


def _resembles(name: str) -> bool:
    first, *others = name.casefold().split("_")
    if not others:
        return False
    prefix = ENVIRONMENT_PREFIX.rstrip("_").casefold()
    # POLYSHRAD_PRECISION, and POLY_SHARD_PRECISION; other programs' POLYGON_... is neither.
    return first + others[0] == prefix or bool(difflib.get_close_matches(first, [prefix], cutoff=0.8))


def plugins(installed: Iterable[Installed]) -> Section:
    """The plugins of ``installed`` that are not ready."""
    found = list(installed)
    findings = tuple(_plugin(plugin) for plugin in found if plugin.state is not PluginState.READY)
    packages = sorted({f"{plugin.distribution} {plugin.version}".strip() for plugin in found})
    facts = (("plugins", str(len(found))), ("packages", ", ".join(packages) or "none"))
    return Section("plugins", facts, findings)


def _plugin(plugin: Installed) -> Finding:
    about = f"{plugin.group.value} {plugin.name} ({plugin.distribution})"
    if plugin.state in _REACHABLE:
        what = f"is {plugin.state.value}"
        return Finding(Level.HINT, about, what, plugin.error, f'say "{plugin.distribution}:{plugin.name}"')
    if plugin.state is PluginState.REFUSED:
        cure = f"{ALLOWED_PLUGINS} and {DISABLE_PLUGINS} decide, which `polyshard doctor` shows under variables"
        return Finding(Level.HINT, about, "is refused, and was not imported", plugin.error, cure)
    cure = f"repair or update {plugin.distribution}, or uninstall it"
    return Finding(Level.PROBLEM, about, f"cannot be used ({plugin.state.value})", plugin.error, cure)


def limits(machine: Machine) -> Section:
    """Limits of the system that hurt many ranks on one host: open files, shared memory, locked memory."""
    facts = (
        ("open files (ulimit -n)", "no limit" if machine.open_files is None else str(machine.open_files)),
        ("shared memory (/dev/shm)", _size(machine.shared_memory_nbytes)),
        ("locked memory (ulimit -l)", "no limit" if machine.locked_nbytes is None else _size(machine.locked_nbytes)),
    )
    return Section("limits", facts, tuple(_limits(machine)))


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return "not there"
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / 2**20:.1f} MiB"


def _limits(machine: Machine) -> Iterator[Finding]:
    files, shared, locked = machine.open_files, machine.shared_memory_nbytes, machine.locked_nbytes
    if files is not None and files < OPEN_FILES:
        why = "each rank holds connections to all others for each group: hundreds run out, as 'Too many open files'"
        yield Finding(Level.HINT, "ulimit -n", str(files), why, f"ulimit -n {OPEN_FILES} before starting")
    if shared is None or shared < SHARED_MEMORY_NBYTES:
        level = Level.PROBLEM if len(machine.devices) > 1 else Level.HINT
        why = "NCCL between devices of one host, and workers of data loaders, share memory there; containers get 64 MiB"
        cure, source = "start the container with --shm-size=8g or --ipc=host", f"{_NCCL_TROUBLE}: shared memory"
        yield Finding(level, "/dev/shm", _size(shared), why, cure, source)
    if locked is not None and machine.infiniband:
        why = "InfiniBand adapters send from locked memory, and NCCL fails to register more than the limit"
        cure = "ulimit -l unlimited; for a container, --ulimit memlock=-1"
        yield Finding(Level.HINT, "ulimit -l", _size(locked), why, cure, f"{_NCCL_TROUBLE}: shared memory")


# The environment variables that hurt: each with when, why, and where that is written down.

_NCCL = "NCCL user guide, environment variables"
_NCCL_TROUBLE = "NCCL user guide, troubleshooting"
_CUDA = "CUDA C++ Programming Guide, environment variables"
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


def _hint_if(harmful: Callable[[str], bool]) -> Callable[[str, Machine], Level]:
    return lambda value, machine: Level.HINT if harmful(value) else Level.FINE


def _slows_devices(value: str, machine: Machine, least: int = 1) -> Level:
    """A switch that slows every step on CUDA devices, where there are at ``least`` so many."""
    if not _on(value):
        return Level.FINE
    return Level.PROBLEM if len(machine.devices) >= least else Level.HINT


#: A variable that is not set does no harm.
RULES: tuple[Rule, ...] = (
    Rule(
        "NCCL_P2P_DISABLE",
        partial(_slows_devices, least=2),
        "devices of one host send through its memory instead of NVLink or PCIe",
        "unset it; where it was set against a hang, look for the cause (IOMMU, ACS)",
        _NCCL,
    ),
    Rule(
        "NCCL_SHM_DISABLE",
        partial(_slows_devices, least=2),
        "devices that do not reach each other send over the network, on one host too",
        "unset it, and give /dev/shm room",
        _NCCL,
    ),
    Rule(
        "NCCL_IB_DISABLE",
        lambda value, machine: Level.PROBLEM if _on(value) and machine.infiniband else Level.FINE,
        "hosts send over TCP, although there are InfiniBand or RoCE adapters",
        "unset it",
        _NCCL,
    ),
    Rule(
        "NCCL_PROTO",
        _hint_if(bool),
        "NCCL no longer chooses by message size; small gathers and large ones want different protocols",
        "unset it, unless a bug of one protocol is being avoided",
        _NCCL,
    ),
    Rule(
        "NCCL_ALGO",
        _hint_if(bool),
        "NCCL no longer chooses by message size and topology",
        "unset it, unless a bug of one algorithm is being avoided",
        _NCCL,
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        _slows_devices,
        "the host waits for every kernel, so that gathers and reductions no longer run beside compute",
        "unset it once the error that it was set for is found",
        _CUDA,
    ),
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _hint_if(lambda value: value.strip() == "1"),
        "streams share one queue to the device, so that a gather waits for compute that was issued before it",
        "unset it: the default is 8",
        "Megatron-LM refuses it where parameters are sharded",
    ),
    Rule(
        "TORCH_NCCL_BLOCKING_WAIT",
        _slows_devices,
        "the host waits for each gather, instead of letting the device order it, and steps cannot be captured",
        "unset it: time limits are held without it",
        _TORCH_NCCL,
    ),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _hint_if(lambda value: value.strip() == "0"),
        "a rank that fails leaves the others waiting without end",
        "unset it",
        _TORCH_NCCL,
    ),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        _hint_if(lambda value: value.strip().upper() == "DETAIL"),
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
)
