"""How long a step takes: devices, links between ranks, and a clock that runs the streams beside each other."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from polyshard.config import did_you_mean
from polyshard.errors import ConfigError

from .recording import Begin, Bound, Issued, Kernel, Operation, Part, Signal, Span, Stream, Transfer, Wait


@dataclass(frozen=True, slots=True)
class Link:
    """One operation among one number of ranks: ``latency_s + received / bandwidth``."""

    operation: Operation
    ranks: int
    latency_s: float
    """Of a launch, whatever it carries."""
    bandwidth: float
    """Bytes a second that each rank receives."""
    member_s: float = 0.0
    """Added by each further collective of a launch."""
    interference: float = 0.0
    """By which part of its own time it delays compute beside it."""

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"A link of {self.operation.value} is among {self.ranks} ranks; it takes 2 or more.")
        for name in ("latency_s", "member_s", "interference", "bandwidth"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name == "bandwidth" and value == 0):
                raise ConfigError(
                    f"{name} of {self.operation.value} among {self.ranks} ranks is {value!r}; give 0 or more, and a "
                    "bandwidth above 0."
                )

    def seconds(self, received: int, ranks: int, members: int) -> float:
        """For ``received`` bytes among ``ranks``.

        Beyond the ranks that it is of, latency grows with the logarithm of their number, as that of trees does.
        """
        steps = max(1.0, math.log2(ranks) / math.log2(self.ranks))
        return steps * (self.latency_s + (members - 1) * self.member_s) + received / self.bandwidth


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The links of a machine, or of several alike."""

    name: str
    source: str
    """Where the figures come from."""
    ranks_per_host: int
    inside: tuple[Link, ...]
    """Among ranks of one host."""
    between: tuple[Link, ...] = ()
    """Among ranks of several hosts; ``ranks`` counts ranks. None: it is not known."""

    def __post_init__(self) -> None:
        if self.ranks_per_host < 1:
            raise ConfigError(f"links {self.name!r}: ranks_per_host is {self.ranks_per_host}; give 1 or more.")

    def link(self, operation: Operation, span: Span) -> Link:
        """The one of the nearest number of ranks, measured over hosts where ``span`` reaches over several.

        Raises ConfigError: there is none.
        """
        hosts = span.hosts(self.ranks_per_host)
        among = self.between if hosts > 1 else self.inside
        found = [link for link in among if link.operation is operation]
        if not found and operation in (Operation.RECEIVE, Operation.ALL_TO_ALL):
            # As many bytes go each way as in a gather.
            found = [link for link in among if link.operation is Operation.ALL_GATHER]
        if not found and operation is Operation.ALL_REDUCE:
            # A reduction and a gather of slices: both directions at the slower one's rate.
            found = [link for link in among if link.operation is Operation.REDUCE_SCATTER]
        if not found:
            where = f"{hosts} hosts of {self.ranks_per_host} ranks" if hosts > 1 else f"{span.ranks} ranks of one host"
            raise ConfigError(
                f"The links {self.name!r} say nothing of {operation.value} among {where}. Measure them there with "
                "'polyshard bench-links', or name others by --links."
            )
        return min(found, key=lambda link: (abs(math.log2(link.ranks / span.ranks)), link.ranks))

    def seconds(self, operation: Operation, nbytes: int, span: Span, members: int = 1) -> float:
        """Time of collectives over whole buffers of ``nbytes`` together."""
        if span.ranks == 1:
            return 0.0
        received = operation.received_nbytes(nbytes, span.ranks)
        return self.link(operation, span).seconds(received, span.ranks, members)

    def to_json(self) -> str:
        """As ``read_links`` reads it."""
        plain = asdict(self)
        for key in ("inside", "between"):
            for link in plain[key]:
                link["operation"] = link["operation"].value
        return json.dumps(plain, indent=1) + "\n"


def read_links(path: str | Path) -> LinkModel:
    """The links that ``LinkModel.to_json`` wrote to ``path``.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    name = repr(str(path))
    try:
        mapping = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the links in {name}: {error.strerror}. 'polyshard bench-links --out FILE' writes them."
        ) from error
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from error
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{name} holds no links, but a {type(mapping).__name__}.")
    try:
        links = {
            key: tuple(Link(**{**row, "operation": Operation(row["operation"])}) for row in mapping.get(key, ()))
            for key in ("inside", "between")
        }
        return LinkModel(**{**mapping, **links})
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{name} holds no links: {error}. 'polyshard bench-links --out FILE' writes such a file."
        ) from error


def fitted(operation: Operation, ranks: int, timings: Sequence[tuple[int, float]]) -> Link:
    """The latency and bandwidth nearest to ``timings``: bytes of whole buffers, and seconds of one collective.

    Least squares of relative errors, so that small buffers count as much as large ones; a latency that would come out
    below 0 is 0.

    Raises:
        ConfigError: there are fewer than two sizes, or time does not grow with them.
    """
    received = [operation.received_nbytes(nbytes, ranks) for nbytes, _ in timings]
    if len(set(received)) < 2:
        raise ConfigError(
            f"{operation.value} among {ranks} ranks was timed at {len(set(received))} sizes; it takes two."
        )
    # Minimise sum(((a + b x - t) / t)^2).
    seconds = torch.tensor([each for _, each in timings], dtype=torch.float64)
    terms = torch.stack((torch.ones_like(seconds), torch.tensor(received))) / seconds
    wanted = torch.ones_like(seconds)[:, None]
    latency, slope = torch.linalg.lstsq(terms.T, wanted).solution.flatten().tolist()
    if latency < 0:
        latency, slope = 0.0, torch.linalg.lstsq(terms[1:].T, wanted).solution.item()
    if slope <= 0:
        raise ConfigError(
            f"{operation.value} among {ranks} ranks did not take longer for more bytes: latency hides them. Time "
            "larger buffers."
        )
    return Link(operation, ranks, latency, 1 / slope)


_GATHERS = "benchmarks/results/gathers.json (b28b9f8, torch 2.11.0+cu130, NCCL 2.28.9)"


def _h200(ranks: int, gather: tuple[float, float, float], reduction: tuple[float, float, float]) -> tuple[Link, ...]:
    """Microseconds of latency, GB/s and interference, of each."""
    return tuple(
        Link(operation, ranks, latency * 1e-6, rate * 1e9, member_s=member * 1e-6, interference=delays)
        for operation, (latency, rate, delays), member in (
            # Several gathers in one launch take some 20 microseconds more for each further one:
            # benchmarks/failed-ideas.md, "Host time".
            (Operation.ALL_GATHER, gather, 20.0),
            (Operation.REDUCE_SCATTER, reduction, 0.0),
        )
    )


# ``fitted`` over the sizes of the source: gathers into registered memory, and reductions of bf16 that add up in fp32.
# Interference is the median of "gemm_cost" over sizes.
_INSIDE = (
    *_h200(2, (36.4, 349.8, 0.24), (82.0, 221.7, 0.46)),
    *_h200(3, (31.4, 345.3, 0.23), (55.6, 237.6, 0.39)),
    *_h200(4, (34.7, 348.8, 0.40), (93.4, 293.8, 0.30)),
)

# 400 Gb/s of each GPU's own adapter, the line rate; latencies and interference as inside a host. Not measured.
_NDR = tuple(
    Link(each.operation, 16, each.latency_s, 50e9, each.member_s, each.interference)
    for each in _INSIDE
    if each.ranks == 4
)

_ALL_LINKS = (
    LinkModel("h200-nvlink", f"{_GATHERS}: one host, up to 4 GPUs", 8, _INSIDE),
    LinkModel(
        "h200-ndr",
        f"inside a host {_GATHERS}; between hosts the line rate of one 400 Gb/s adapter a GPU, not measured",
        8,
        _INSIDE,
        _NDR,
    ),
)

#: By name.
LINKS = {links.name: links for links in _ALL_LINKS}


def find_links(name: str) -> LinkModel:
    """Those called ``name``, or in a file of that name.

    Raises:
        ConfigError: neither is there.
    """
    if name in LINKS:
        return LINKS[name]
    if "/" in name or name.endswith(".json") or Path(name).is_file():
        return read_links(name)
    raise ConfigError(
        f"No links are called {name!r}, and no file.{did_you_mean(name, list(LINKS))} Named ones: "
        f"{', '.join(sorted(LINKS))}."
    )


_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of accelerator. Rates are of one device."""

    name: str
    memory_nbytes: int
    """The most that tensors may take: the driver's figure, less the memory of CUDA and NCCL beside the allocator."""
    peak_flops: float
    """Multiplications, additions a second in 16-bit dtypes, dense. Wider ones take ``itemsize / 2`` times as long."""
    matmul_share: float
    """Of ``peak_flops``, what large matrix products reach."""
    attention_share: float
    """Of ``peak_flops``, what fused attention reaches."""
    bandwidth: float
    """Bytes a second of its memory, as its maker states."""
    bandwidth_share: float
    """Of ``bandwidth``, what element-wise kernels reach."""
    kernel_s: float
    """The least time of a kernel, from one launch to the next."""
    launch_s: float
    """Host time of a launch: Python, dispatch and driver, of an operation launched by itself."""
    unit_s: float
    """Further host time of gathering or reducing one unit: hooks, views, streams and events."""
    workspace_nbytes: int
    """Memory that the matrix library takes of the allocator, for good."""
    links: str
    """Name of the links of a host of them."""
    links_between: str
    """Name of those of several hosts."""
    sources: str
    """Where all of it comes from."""

    def seconds(self, kernel: Kernel) -> float:
        """Time of ``kernel`` with the device to itself: what its arithmetic takes, or its memory, whichever is more."""
        moving = kernel.nbytes / (self.bandwidth * self.bandwidth_share)
        if kernel.bound is Bound.NONE:
            return self.kernel_s + moving
        share = self.matmul_share if kernel.bound is Bound.MATMUL else self.attention_share
        wide = max(1.0, kernel.itemsize / 2)
        return self.kernel_s + max(moving, kernel.flops * wide / (self.peak_flops * share))


_H200 = Device(
    name="h200",
    memory_nbytes=139 * _GIB,
    peak_flops=989.4e12,
    matmul_share=0.70,
    attention_share=0.40,
    bandwidth=4.8e12,
    bandwidth_share=0.80,
    kernel_s=2.8e-6,
    launch_s=45e-6,
    unit_s=280e-6,
    workspace_nbytes=2 * 32 * 2**20,
    links="h200-nvlink",
    links_between="h200-ndr",
    sources=(
        "memory: as the device shows it, in whole GiB; peaks: NVIDIA's data sheet (989.4 TFLOP/s dense in bf16, 4.8 "
        "TB/s); shares: round figures set beforehand, with which compute without communication (peer `local`, "
        "benchmarks/results/peers2-small.json and peers2-8b.json, b82dfe7) comes out within 3 % in 300m, 1b and 8b; "
        "kernel_s: what `local-captured` of host leaves to each of its 2,640 kernels; launch_s: host time of `local` "
        "in host, 300m and 1b, a launch (44.8 to 46.5 us); unit_s: what polyshard's eager step of host takes beyond "
        "its launches, a unit (all in peers2-small.json; other hosts take other times); workspace: 32 MiB of cuBLAS "
        "for each of the two threads that compute"
    ),
)

# The same processor with less and slower memory.
_H100 = replace(
    _H200,
    name="h100",
    memory_nbytes=79 * _GIB,
    bandwidth=3.35e12,
    sources=(
        "memory and peaks: NVIDIA's data sheet of the SXM module (989.4 TFLOP/s dense in bf16, 3.35 TB/s); shares, "
        "constants and links are those of h200, whose processor and links it has; nothing was measured on it"
    ),
)

_ALL = (_H200, _H100)

#: By name.
DEVICES = {device.name: device for device in _ALL}


def find_device(name: str) -> Device:
    """The one called ``name``. Raises ConfigError: none is."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(
            f"No device is called {name!r}.{did_you_mean(name, list(DEVICES))} Known: {', '.join(sorted(DEVICES))}. "
            "For another one give --device-memory."
        )
    return found


#: By which part of its own time a kernel beside compute delays it: both want the same memory and multiprocessors.
_KERNEL_INTERFERENCE = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    stream: Stream
    begin_s: float
    end_s: float
    name: str


@dataclass(frozen=True, slots=True)
class StepTime:
    device_s: float
    """Until everything has run, on a device that never waits for the host."""
    parts_s: Mapping[Part, float]
    """The same, by part: compute's own time and its waits."""
    busy_s: Mapping[Stream, float]
    """How long each stream has something to run. Compute's contains what others delay it by."""
    delayed_s: float
    """By which work on other streams slows compute down."""
    waited_s: float
    """How long compute waits for other streams."""
    launches: int
    """Kernels and collectives that the host launches."""
    units: int
    """Gathers and reductions of one unit, however many go in a launch."""
    host_s: float
    """Host time of issuing all of it; a step that is one CUDA graph has none."""
    flops: int
    """Of matrix products and attention."""
    issued_at: tuple[tuple[int, Interval], ...]
    """The interval of each operation, with its index among all that were issued."""

    @property
    def total_s(self) -> float:
        """The step, launched one by one: the device's time or the host's, whichever is longer."""
        return max(self.device_s, self.host_s)


def timed(issued: Sequence[Issued], device: Device, links: LinkModel) -> StepTime:
    """Run the operations on a pretended clock.

    Raises:
        ConfigError: ``links`` do not know a group of ranks.
    """
    clock = _Clock(device, links)
    for index, each in enumerate(issued):
        clock.run(index, each)
    return clock.result()


class _Clock:
    def __init__(self, device: Device, links: LinkModel) -> None:
        self._device = device
        self._links = links
        self._now = dict.fromkeys(Stream, 0.0)
        self._busy = dict.fromkeys(Stream, 0.0)
        self._events: dict[int, float] = {}
        self._begins: list[tuple[Part, float]] = []
        # Operations beside compute: from, to, and by which part of it compute is delayed.
        self._beside: deque[tuple[float, float, float]] = deque()
        self._delayed = self._waited = 0.0
        self._launches = self._flops = self._units = 0
        self._intervals: list[tuple[int, Interval]] = []

    def run(self, index: int, each: Issued) -> None:
        if isinstance(each, Kernel):
            self._launches += 1
            self._flops += each.flops if each.bound is not Bound.NONE else 0
            self._take(index, each.stream, self._device.seconds(each), _KERNEL_INTERFERENCE, each.name)
        elif isinstance(each, Transfer):
            self._launches += 1
            self._units += each.members
            link = self._links.link(each.operation, each.span)
            seconds = self._links.seconds(each.operation, each.nbytes, each.span, each.members)
            self._take(index, each.stream, seconds, link.interference, each.operation.value)
        elif isinstance(each, Signal):
            self._events[each.event] = self._now[each.stream]
        elif isinstance(each, Wait):
            # Operations before the step have run.
            until = self._events.get(each.event, 0.0)
            if each.stream is Stream.COMPUTE:
                self._waited += max(0.0, until - self._now[each.stream])
            self._now[each.stream] = max(self._now[each.stream], until)
        elif isinstance(each, Begin):
            self._begins.append((each.part, self._now[Stream.COMPUTE]))

    def result(self) -> StepTime:
        end = max(self._now.values())
        ends = [begin for _, begin in self._begins[1:]] + [end]
        parts: dict[Part, float] = {}
        for (part, begin), until in zip(self._begins, ends, strict=True):
            parts[part] = parts.get(part, 0.0) + until - begin
        return StepTime(
            device_s=end,
            parts_s=parts,
            busy_s=dict(self._busy),
            delayed_s=self._delayed,
            waited_s=self._waited,
            launches=self._launches,
            units=self._units,
            host_s=self._launches * self._device.launch_s + self._units * self._device.unit_s,
            flops=self._flops,
            issued_at=tuple(self._intervals),
        )

    def _take(self, index: int, stream: Stream, seconds: float, interference: float, name: str) -> None:
        begin = self._now[stream]
        if stream is Stream.COMPUTE:
            delay = self._delay(begin, begin + seconds)
            self._delayed += delay
            seconds += delay
        else:
            self._beside.append((begin, begin + seconds, interference))
        self._now[stream] = begin + seconds
        self._busy[stream] += seconds
        self._intervals.append((index, Interval(stream, begin, begin + seconds, name)))

    def _delay(self, begin: float, end: float) -> float:
        while self._beside and self._beside[0][1] <= begin:
            self._beside.popleft()
        return sum(part * max(0.0, min(end, to) - max(begin, since)) for since, to, part in self._beside)
