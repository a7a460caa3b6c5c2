"""What a device can do: its memory, and how fast it multiplies, reads and launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import did_you_mean
from ..errors import ConfigError
from .recording import Kernel, Unit

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of accelerator. Rates are of one device."""

    name: str
    memory_nbytes: int
    """What tensors may take at most: what the driver reports, less what CUDA and NCCL take beside the allocator."""
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
    """What a kernel takes at least, from one launch to the next."""
    launch_s: float
    """What a launch takes the host: Python, dispatch and driver, of an operation launched by itself."""
    unit_s: float
    """What gathering or reducing one unit takes the host beside that: hooks, views, streams and events."""
    workspace_nbytes: int
    """What the matrix library takes of the allocator, for good."""
    links: str
    """Name of the links of a host of them."""
    links_between: str
    """Name of those of several hosts."""
    sources: str
    """Where all of it comes from."""

    def seconds(self, kernel: Kernel) -> float:
        """Time of ``kernel`` with the device to itself: what its arithmetic takes, or its memory, whichever is more."""
        moving = kernel.nbytes / (self.bandwidth * self.bandwidth_share)
        if kernel.unit is Unit.NONE:
            return self.kernel_s + moving
        share = self.matmul_share if kernel.unit is Unit.MATMUL else self.attention_share
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
    """The one called ``name``.

    Raises:
        ConfigError: none is.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(
            f"No device is called {name!r}.{did_you_mean(name, list(DEVICES))} Known: {', '.join(sorted(DEVICES))}. "
            "For another one give --device-memory."
        )
    return found
