"""How fast a run is, what memory it takes, and how much of the device's arithmetic it uses."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch
from model import Config
from settings import Settings
from transformers import MixtralConfig

#: Dense bf16 operations a second, in units of 10**12, from the manufacturers' data sheets. The first that is in the
#: device's name counts.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "MI300X": 1307.0,
}


def matmul_parameters(config: Config) -> int:
    """Parameters with which each token is multiplied: all but the embedding's, the norms', and experts of others."""
    size = config.hidden_size // config.num_attention_heads
    heads = size * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    experts, router = 1, 0
    if isinstance(config, MixtralConfig):
        experts, router = config.num_experts_per_tok, config.num_local_experts
    block = config.hidden_size * (heads + router + 3 * experts * config.intermediate_size)
    return int(config.num_hidden_layers * block + config.vocab_size * config.hidden_size)


def flops_per_token(config: Config, context: int) -> int:
    """Floating-point operations of a forward and its backward for one token: ``6 N + 12 L H Q T``.

    The formula of PaLM (Chowdhery et al. 2022, appendix B), in which model-FLOPs utilisation is usually given: ``N``
    are the parameters that multiply, ``L`` blocks have ``H`` heads of ``Q`` features, and ``T`` is the context, all of
    which counts, masked or not. What activation checkpointing computes again is no work of the model's, and not
    counted.
    """
    attention = 12 * config.num_hidden_layers * config.hidden_size * context
    return int(6 * matmul_parameters(config) + attention)


def peak_flops(settings: Settings, device: torch.device) -> float | None:
    """Operations a second that ``device`` could do in bf16, or what the settings say; None where nobody knows."""
    if settings.output.peak_tflops:
        return settings.output.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for known, peak in _PEAK_TFLOPS.items() if known in name), None)


@dataclass(frozen=True)
class Memory:
    """Of one rank, or the worst of all."""

    peak_nbytes: int
    """Bytes that tensors took on the GPU at most since the last look; on a CPU, all of the process ever."""
    retries: int
    """How often the allocator gave cached memory back and asked again, which makes a step slow."""
    ooms: int
    """How often there was no memory even then."""

    @classmethod
    def look(cls, device: torch.device) -> Memory:
        """This rank's, now."""
        if device.type != "cuda":
            # Bytes on macOS, KiB elsewhere.
            unit = 1 if sys.platform == "darwin" else 1024
            return cls(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, 0, 0)
        stats = torch.cuda.memory_stats(device)
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return cls(peak, stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0))


@dataclass(frozen=True)
class Speed:
    """Over the steps since the last report, evaluation and checkpoints aside."""

    tokens_per_second: float
    """Of all ranks together."""
    seconds_per_step: float
    mfu: float | None
    """Share of the devices' peak, 0 to 1."""


class Clock:
    """Measures speed between reports."""

    def __init__(self, tokens_per_step: int, flops_per_token: int, peak_of_all: float | None) -> None:
        self._tokens = tokens_per_step
        self._flops = flops_per_token
        self._peak = peak_of_all
        self._began = time.perf_counter()

    def start(self) -> None:
        """Leave what was until now out of the next reading."""
        self._began = time.perf_counter()

    def read(self, steps: int) -> Speed:
        """The speed of the last ``steps`` steps; call it once the device has done them."""
        seconds = time.perf_counter() - self._began
        rate = steps * self._tokens / seconds
        return Speed(rate, seconds / steps, None if self._peak is None else rate * self._flops / self._peak)


def readable(nbytes: int) -> str:
    """``nbytes`` with three digits and a unit."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
