"""Checkpoints of ``polyshard.checkpoint`` beside ``torch.distributed.checkpoint`` of the same sharded state dicts.

    python benchmarks/checkpoints.py --folder /local/disk/checkpoints --out benchmarks/results/checkpoints.json
    python benchmarks/checkpoints.py --gib 0.05 --small 200 --rounds 1

A model and its AdamW of so many GiB together, in fp32, over gloo processes on the CPU; the same model over a mesh, of
which one dimension of two ranks is tensor parallel; and one of many small parameters. Both write to the same folder and
end with fsync; both read files that were just written, so that the disk does not count. The two take turns in going
first. A time is the slowest rank's, and the median over rounds. *stall*: what ``async_save`` keeps the training from,
beside what ``save`` takes. The folder's content is removed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import polyshard
import polyshard.checkpoint
import polyshard.state
import torch
import torch.distributed as dist
from measure import write
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

_GIB = 2**30
#: AdamW has two values beside each parameter.
_VALUES = 3
_WIDTH = 1024


@dataclass(frozen=True)
class Row:
    """What one model took on so many ranks."""

    what: str
    ranks: int
    parameters: int
    gib: float
    save_s: float
    dcp_save_s: float
    load_s: float
    dcp_load_s: float
    stall_s: float

    def shown(self) -> str:
        """A line of the table."""
        return (
            f"{self.what:<24}{self.ranks:>6}{self.gib:>7.2f}{self.save_s:>9.3f}{self.dcp_save_s:>9.3f}"
            f"{self.save_s / self.dcp_save_s:>8.2f}{self.load_s:>9.3f}{self.dcp_load_s:>9.3f}"
            f"{self.load_s / self.dcp_load_s:>8.2f}{self.stall_s / self.save_s:>8.0%}"
        )


_HEAD = (
    f"{'state':<24}{'ranks':>6}{'GiB':>7}{'save s':>9}{'DCP s':>9}{'ratio':>8}{'load s':>9}{'DCP s':>9}{'ratio':>8}"
    f"{'stall':>8}"
)


def large(gib: float) -> nn.Module:
    """Of linear layers that come to ``gib`` with their optimizer's state."""
    count = max(1, round(gib * _GIB / 4 / _VALUES / _WIDTH**2))
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))


def small(count: int) -> nn.Module:
    """Of ``count`` parameters with a few elements each."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count // 2)))


def parallel(model: nn.Module) -> tuple[nn.Module, polyshard.ShardConfig]:
    """Pairs of layers cut over two ranks, columns and then rows, to be sharded over the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, ParallelStyle] = {
        name: RowwiseParallel() if int(name) % 2 else ColwiseParallel() for name, _ in model.named_children()
    }
    parallelize_module(model, mesh["tp"], plan)
    return model, polyshard.ShardConfig(mesh=mesh, shard="dp")


def measured(
    rank: int, model: nn.Module, what: str, folder: Path, rounds: int, config: polyshard.ShardConfig | None = None
) -> Row:
    """Every rank calls it."""
    polyshard.shard(model, config or polyshard.ShardConfig(collectives="gloo"))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        ours, theirs = folder / "ours", folder / "theirs"
        directory = ours / f"step-{2 * number:08d}"
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: polyshard.checkpoint.save(ours, 2 * number, model, optimizer),  # noqa: B023
            "dcp_save": lambda: save(_state(model, optimizer), checkpoint_id=theirs),  # noqa: B023
            "load": lambda: polyshard.checkpoint.load(directory, model, optimizer),  # noqa: B023
            "dcp_load": lambda: load(_state(model, optimizer), checkpoint_id=theirs),  # noqa: B023
        }
        # Memory that was just given back is quicker to write to: each goes first as often.
        order = ("save", "dcp_save", "load", "dcp_load") if number % 2 else ("dcp_save", "save", "dcp_load", "load")
        for name in order:
            times.setdefault(name, []).append(_timed(calls[name]))
        pending: list[polyshard.checkpoint.PendingSave[Path]] = []
        stall = _timed(
            lambda: pending.append(polyshard.checkpoint.async_save(ours, 2 * number + 1, model, optimizer))  # noqa: B023
        )
        times.setdefault("stall", []).append(stall)
        pending[0].result()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
            folder.mkdir()
        dist.barrier()
    median = {f"{name}_s": round(statistics.median(each), 4) for name, each in times.items()}
    numels = [value.numel() for value in polyshard.state.get_model_state_dict(model).values()]
    gib = round(sum(numels) * 4 * _VALUES / _GIB, 3)
    row = Row(what, dist.get_world_size(), len(numels), gib, **median)
    polyshard.close(model)
    return row


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    one, other = polyshard.state.get_state_dict(model, optimizer)
    return {"model": one, "optimizer": other}


def _timed(call: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    slowest = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _on_rank(rank: int, ranks: int, asked: argparse.Namespace, folder: Path, out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{out}.store", rank=rank, world_size=ranks, timeout=timedelta(minutes=10)
    )
    torch.manual_seed(0)
    rows = [
        measured(rank, large(asked.gib), "large parameters", folder, asked.rounds),
        measured(rank, small(asked.small), f"{asked.small} small ones", folder, min(2, asked.rounds)),
    ]
    if ranks % 2 == 0:
        model, config = parallel(large(asked.gib))
        rows.insert(1, measured(rank, model, "large, tensor parallel", folder, asked.rounds, config))
    if rank == 0:
        out.write_text(json.dumps([asdict(row) for row in rows]))
    dist.destroy_process_group()


def _run(ranks: int, asked: argparse.Namespace, folder: Path, out: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_on_rank, args=(rank, ranks, asked, folder, out)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")


def main() -> int:
    """Run, print the table; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="of parameters and optimizer state together")
    parser.add_argument("--small", type=int, default=4000, help="parameters of the second model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a temporary one where it is left out")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    asked = parser.parse_args()
    if asked.folder is not None:
        asked.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    print(_HEAD, flush=True)
    for ranks in asked.ranks:
        with tempfile.TemporaryDirectory(dir=asked.folder, prefix="checkpoints-") as temporary:
            folder, out = Path(temporary, "content"), Path(temporary, "rows.json")
            folder.mkdir()
            _run(ranks, asked, folder, out)
            found = [Row(**each) for each in json.loads(out.read_text())]
        rows += found
        print("\n".join(row.shown() for row in found), flush=True)
    environment = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "polyshard": polyshard.__version__,
    }
    write({"environment": environment, "rounds": asked.rounds, "rows": [asdict(row) for row in rows]}, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
