"""Safetensors files into shards and out of them, beside what the disk needs for the same bytes alone.

    torchrun --standalone --nproc-per-node 2 benchmarks/huggingface_load.py --folder /local/disk/weights --out load.json
    torchrun --standalone --nproc-per-node 2 benchmarks/huggingface_load.py --device cpu --work tiny --folder weights

The model of ``peers.py``, in the shape of a Llama, is built on the meta device and sharded with made-up fp32 values,
which ``polyshard_huggingface.save`` writes in bf16: the export. It is then built anew and loaded from these files.
*plain* is the same bytes, by as many processes and threads, in requests of the same size, with nothing done to them;
writes are followed by fsync in both. *cold*: the files' pages were given back before (posix_fadvise); *warm*: they
were read just before. A time is the slowest rank's. Peaks are of one rank, the largest, above what it held when the
phase began: of the host the resident memory (Linux), of the device what the allocator gave out. The folder must be
empty or missing, and is removed at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import torch
from measure import write
from memory import Memory
from ranks import Ranks
from runs import FailedError, environment, job, make_parser, not_started, together
from torch.distributed.tensor import DTensor, distribute_tensor
from workloads import WORKLOADS, Block, LanguageModel, Workload, initial_value, initializer, meta_model

#: Of the plain reads and writes.
_REQUEST_NBYTES = 16 * 2**20
_THREADS = 4
_GIB = 2**30
_STATUS = Path("/proc/self/status")


class HostMemory:
    """Resident memory of this process; None of everything where the system does not say."""

    def begin(self) -> float | None:
        """GiB that are resident now, from which on the peak counts."""
        gc.collect()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
        return self._read("VmRSS")

    def peak(self) -> float | None:
        """GiB at most since ``begin``."""
        return self._read("VmHWM")

    def _read(self, key: str) -> float | None:
        if not _STATUS.is_file():
            return None
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024 / _GIB


class Benchmark:
    """The phases of one run, and the rows that they leave."""

    def __init__(self, ranks: Ranks, workload: Workload, folder: Path, asked: argparse.Namespace) -> None:
        self.ranks = ranks
        self.workload = workload
        self.folder = folder
        self.asked = asked
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()
        self._host, self._device = HostMemory(), Memory(ranks.device)
        # Made and touched here: what is measured plainly is the disk alone.
        self._buffers = [memoryview(bytearray(os.urandom(_REQUEST_NBYTES))) for _ in range(_THREADS)]

    def run(self) -> None:
        """All phases; those for which no time is left are skipped."""
        weights = self.folder / "weights"
        model = self._sharded(made_up=True)
        save = partial(polyshard_huggingface.save, model, weights, dtype=torch.bfloat16)
        self._phase("export", save)
        nbytes = sum(path.stat().st_size for path in weights.glob("*.safetensors"))
        self.rows[-1]["nbytes"] = nbytes
        polyshard.close(model)
        del model, save
        self._phase("plain write", partial(self._write_plainly, nbytes), nbytes)
        (self.folder / f"plain-{self.ranks.rank}").unlink(missing_ok=True)
        files = sorted(weights.glob("*.safetensors"))
        self._phase("plain read, cold", partial(self._read_plainly, files), nbytes, before=partial(_forget, files))
        model = self._sharded(made_up=False)
        load = partial(polyshard_huggingface.load, model, weights)
        self._phase("load, cold", load, nbytes, before=partial(_forget, files))
        self._check(model)
        self._phase("plain read, warm", partial(self._read_plainly, files), nbytes)
        self._phase("load, warm", load, nbytes)
        self._phase("load, rank 0 for all, warm", partial(load, ranks="first"), nbytes)
        self._check(model)
        polyshard.close(model)

    def _phase(
        self, name: str, work: Callable[[], object], nbytes: int = 0, *, before: Callable[[], None] | None = None
    ) -> None:
        spent = time.perf_counter() - self.began
        if self.asked.deadline is not None and self.ranks.decided(spent > self.asked.deadline):
            self.rows.append({"phase": name, "skipped": f"after {spent:.0f} s"})
            return
        faulthandler.dump_traceback_later(self.asked.hang_timeout, exit=True)
        if before is not None:
            before()
        self._device.settle()
        self._device.reset_peaks()
        with together(self.ranks):
            held, resident = self._device.allocated(), self._host.begin()
        began = time.perf_counter()
        with together(self.ranks):
            work()
            self.ranks.synchronize()
            seconds = time.perf_counter() - began
        device = self._device.peaks()
        peaks = {
            "host_peak_gib": _above(self._host.peak(), resident),
            "device_peak_gib": _above(device and device[0], held),
            "device_held_gib": held,
        }
        found = self.ranks.largest([seconds, *(-1.0 if value is None else value for value in peaks.values())])
        measured = dict(zip(peaks, (round(value, 4) if value >= 0 else None for value in found[1:]), strict=True))
        self.rows.append({"phase": name, "seconds": round(found[0], 4), "nbytes": nbytes, **measured})
        faulthandler.cancel_dump_traceback_later()
        if self.ranks.rank == 0:
            print(f"{name}: {found[0]:.2f} s", file=sys.stderr, flush=True)

    def _sharded(self, *, made_up: bool) -> LanguageModel:
        model = meta_model(self.workload)
        fill = initializer(model) if made_up else polyshard_huggingface.to_be_loaded(model)
        config = polyshard.ShardConfig(policy={"name": "transformer", "layers": Block}, device=self.ranks.device)
        with together(self.ranks):
            polyshard.shard(model, config, initializer=fill)
        return model

    def _check(self, model: LanguageModel) -> None:
        """Some parameters, as far as they are here, have the values that were written; nothing where none were read."""
        if "skipped" in self.rows[-1]:
            return
        with together(self.ranks):
            self._compare(model)

    def _compare(self, model: LanguageModel) -> None:
        last = self.workload.layers - 1
        for name in ("embedding.weight", "blocks.0.query.weight", f"blocks.{last}.down.weight", "tail.head.weight"):
            parameter = model.get_parameter(name)
            assert isinstance(parameter, DTensor)
            whole = initial_value(name, parameter.shape, self.ranks.device).bfloat16().float()
            # Each rank cuts what it has.
            expected = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            if not torch.equal(parameter.to_local(), expected.to_local()):
                raise RuntimeError(f"{name} has other values than were written")

    def _read_plainly(self, files: Iterable[Path]) -> None:
        """This rank's part of ``files``, into memory that is used again and again."""
        rank, ranks = self.ranks.rank, self.ranks.world_size
        requests: list[tuple[int, int, int]] = []
        descriptors = []
        for path in files:
            descriptors.append(os.open(path, os.O_RDONLY))
            size = path.stat().st_size
            requests += _requests(descriptors[-1], size * rank // ranks, size * (rank + 1) // ranks)

        def read(buffer: memoryview, mine: list[tuple[int, int, int]]) -> None:
            for descriptor, start, stop in mine:
                while start < stop:
                    start += os.preadv(descriptor, [buffer[: stop - start]], start)

        _in_threads([partial(read, each, requests[index::_THREADS]) for index, each in enumerate(self._buffers)])
        for descriptor in descriptors:
            os.close(descriptor)

    def _write_plainly(self, nbytes: int) -> None:
        rank, ranks = self.ranks.rank, self.ranks.world_size
        descriptor = os.open(self.folder / f"plain-{rank}", os.O_RDWR | os.O_CREAT)
        requests = _requests(descriptor, 0, nbytes * (rank + 1) // ranks - nbytes * rank // ranks)

        def write(buffer: memoryview, mine: list[tuple[int, int, int]]) -> None:
            for _, start, stop in mine:
                while start < stop:
                    start += os.pwritev(descriptor, [buffer[: stop - start]], start)

        _in_threads([partial(write, each, requests[index::_THREADS]) for index, each in enumerate(self._buffers)])
        os.fsync(descriptor)
        os.close(descriptor)


def _requests(descriptor: int, start: int, stop: int) -> list[tuple[int, int, int]]:
    return [(descriptor, at, min(at + _REQUEST_NBYTES, stop)) for at in range(start, stop, _REQUEST_NBYTES)]


def _in_threads(work: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(each) for each in work]:
            future.result()


def _forget(files: Iterable[Path]) -> None:
    """Ask the system to let go of what it keeps of ``files``."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _above(peak: float | None, before: float | None) -> float | None:
    return None if peak is None or before is None else max(0.0, peak - before)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows for reading: what took how long, and what it needed."""
    lines = [f"{'phase':<28}{'s':>9}{'GB/s':>8}{'host +GiB':>11}{'device +GiB':>13}{'device held':>13}"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['phase']:<28} skipped {row['skipped']}")
            continue
        peaks = [row["host_peak_gib"], row["device_peak_gib"], row["device_held_gib"]]
        shown = ["-" if value is None else f"{value:.2f}" for value in peaks]
        rate = row["nbytes"] / row["seconds"] / 1e9
        lines.append(f"{row['phase']:<28}{row['seconds']:>9.2f}{rate:>8.2f}{shown[0]:>11}{shown[1]:>13}{shown[2]:>13}")
    return "\n".join(lines)


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", choices=sorted(WORKLOADS), default="8b", help="size of the model")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured; made, and removed")
    parser.add_argument("--deadline", type=float, help="seconds after which no further phase is begun")
    parser.add_argument("--hang-timeout", type=float, default=150.0, help="seconds for one phase")
    asked = parser.parse_args()
    code = not_started(asked)
    if code is not None:
        return code
    workload: Workload = WORKLOADS[asked.work]
    folder: Path = asked.folder
    with job(asked, asked.hang_timeout) as ranks:
        try:
            with together(ranks):
                if ranks.rank == 0:
                    folder.mkdir(parents=True, exist_ok=True)
                    if any(folder.iterdir()):
                        raise RuntimeError("the folder is not empty")
            benchmark = Benchmark(ranks, workload, folder, asked)
            try:
                benchmark.run()
            finally:
                ranks.meet()
                if ranks.rank == 0:
                    shutil.rmtree(folder, ignore_errors=True)
            report = {
                "environment": environment(ranks, "huggingface_load.py", asked.commit),
                "work": workload.describe(),
                "elapsed_s": round(time.perf_counter() - benchmark.began, 1),
                "rows": benchmark.rows,
            }
            write(report, asked.out, ranks.rank)
            if ranks.rank == 0:
                print(table(benchmark.rows), flush=True)
        except FailedError as failure:
            print(f"{failure.reason}\n{failure.trace}", file=sys.stderr, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
