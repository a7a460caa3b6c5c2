"""How long an operation takes, by itself and beside matrix products."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Operation(Protocol):
    def run(self) -> None:
        """Issue the operation on the current stream, and order that stream after it."""


class Gemm:
    """A matrix product that keeps the device busy."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        rows, inner, columns = shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._left = torch.randn(rows, inner, device=device, dtype=dtype)
        self._right = torch.randn(inner, columns, device=device, dtype=dtype)
        self._out = torch.empty(rows, columns, device=device, dtype=dtype)

    def run(self, count: int) -> None:
        """Issue ``count`` products on the current stream."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)


class DeviceClock:
    """Times on CUDA, by events on the streams themselves. Seconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # As the engine's: a collective that waits behind compute kernels would not overlap with them.
        self._communication = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def alone(self, operation: Operation, repeats: int) -> float:
        with torch.cuda.stream(self._communication):
            operation.run()
            begin = self._mark()
            for _ in range(repeats):
                operation.run()
            end = self._mark()
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end)) / 1e3 / repeats

    def products(self, gemm: Gemm, count: int) -> float:
        with torch.cuda.stream(self._compute):
            gemm.run(2)
            begin = self._mark()
            gemm.run(count)
            end = self._mark()
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end)) / 1e3

    def together(self, operation: Operation, repeats: int, gemm: Gemm, count: int) -> tuple[float, float]:
        with torch.cuda.stream(self._compute):
            gemm.run(2)
            first = self._mark()
            gemm.run(count)
            last = self._mark()
        with torch.cuda.stream(self._communication):
            self._communication.wait_event(first)
            operation.run()
            begin = self._mark()
            for _ in range(repeats):
                operation.run()
            end = self._mark()
        torch.cuda.synchronize(self._device)
        return float(begin.elapsed_time(end)) / 1e3 / repeats, float(first.elapsed_time(last)) / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class HostClock:
    """The same on the CPU, one after the other: shows that everything runs, and no more."""

    def alone(self, operation: Operation, repeats: int) -> float:
        operation.run()
        begin = time.perf_counter()
        for _ in range(repeats):
            operation.run()
        return (time.perf_counter() - begin) / repeats

    def products(self, gemm: Gemm, count: int) -> float:
        begin = time.perf_counter()
        gemm.run(count)
        return time.perf_counter() - begin

    def together(self, operation: Operation, repeats: int, gemm: Gemm, count: int) -> tuple[float, float]:
        return self.alone(operation, repeats), self.products(gemm, count)
