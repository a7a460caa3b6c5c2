"""Whole weights handed from trainer to engine: ``polyshard.stream`` beside FSDP2's ``full_tensor()`` of each parameter.

    torchrun --standalone --nproc-per-node 2 benchmarks/stream.py --out benchmarks/results/stream.json
    torchrun --standalone --nproc-per-node 2 benchmarks/stream.py --one-gpu --work 300m
    torchrun --standalone --nproc-per-node 2 benchmarks/stream.py --device cpu --work tiny --rounds 2 --times 3
    python benchmarks/stream.py --pretend 8 --device cpu --work host

The engine is a tensor in bf16 for each weight, on every rank's device, which what is handed out is copied to; masters
are fp32. FSDP2 comes twice: a gather of fp32, cast behind it, as most trainers do, and a cast before the gather. All
ways take turns within a round, on the models of that round; a time is from the first call until the device is through,
the slowest rank's. What the engine got is compared between the ways, bit by bit. With ``--one-gpu`` all ranks share a
device and NCCL takes them for hosts; with ``--pretend`` nothing travels, and what is left is the host's own time.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import polyshard
import torch
from measure import spread, undisturbed
from ranks import Ranks
from runs import environment, together
from torch import nn
from workloads import WORKLOADS, Block, LanguageModel, Workload, initial_value

_HANG_S = 150.0
_SENT = torch.bfloat16

Pairs = Iterator[tuple[str, torch.Tensor]]


class Engine:
    """What a generating engine does with weights: it copies them to its own."""

    def __init__(self, shapes: dict[str, torch.Size], device: torch.device) -> None:
        self.weights = {name: torch.zeros(shape, dtype=_SENT, device=device) for name, shape in shapes.items()}

    @torch.no_grad()
    def load(self, pairs: Pairs) -> int:
        """Take all of ``pairs``; returns how many there were."""
        count = 0
        for name, tensor in pairs:
            self.weights[name].copy_(tensor)
            count += 1
        return count

    def clear(self) -> None:
        """Forget them."""
        for weight in self.weights.values():
            weight.zero_()


def _meta(workload: Workload) -> LanguageModel:
    with torch.device("meta"):
        return LanguageModel(workload)


def _polyshard(workload: Workload, ranks: Ranks, layout: str, pretended: bool) -> nn.Module:
    model = _meta(workload)
    names = {module: f"{name}." if name else "" for name, module in model.named_modules()}

    @torch.no_grad()
    def initialize(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.copy_(initial_value(names[module] + name, parameter.shape, parameter.device))

    collectives: Any = "auto"
    if pretended:
        collectives = {"name": "fake", "rank": 0, "world_size": ranks.world_size}
    config = polyshard.ShardConfig(
        precision="bf16",
        policy={"name": "module_class", "classes": [Block]},
        device=ranks.device,
        layout=layout,
        collectives=collectives,
    )
    return polyshard.shard(model, config, initializer=initialize)


def _fsdp2(workload: Workload, ranks: Ranks) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _meta(workload)
    for unit in model.blocks:
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device=ranks.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            chunks = initial_value(name, parameter.shape, ranks.device).chunk(ranks.world_size)
            if ranks.rank < len(chunks):
                cast("Any", parameter).to_local().copy_(chunks[ranks.rank])
    return model


def _full_tensors(model: nn.Module, *, cast_first: bool) -> Pairs:
    for name, parameter in model.named_parameters():
        placed: Any = parameter.detach()
        yield name, placed.to(_SENT).full_tensor() if cast_first else placed.full_tensor().to(_SENT)


def _streamed(model: nn.Module, bucket_nbytes: int | None = None) -> Pairs:
    for names, tensors in polyshard.stream(model, dtype=_SENT, bucket_nbytes=bucket_nbytes):
        yield from zip(names, tensors, strict=True)


#: Of which model, and the pairs out of it.
WAYS: dict[str, tuple[str, Callable[[nn.Module], Pairs]]] = {
    "fsdp2 full_tensor": ("fsdp2", lambda model: _full_tensors(model, cast_first=False)),
    "fsdp2 cast, full_tensor": ("fsdp2", lambda model: _full_tensors(model, cast_first=True)),
    "polyshard stream": ("flat", _streamed),
    "polyshard stream, 64 MiB": ("flat", lambda model: _streamed(model, 64 << 20)),
    "polyshard stream, rows": ("rows", _streamed),
}


def measure(
    ranks: Ranks, workload: Workload, ways: Sequence[str], times: int, pretended: bool
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each way, and whether the engine got the same as by the first."""
    on_cuda = ranks.device.type == "cuda"
    models: dict[str, nn.Module] = {}
    with together(ranks):
        for kind in dict.fromkeys(WAYS[way][0] for way in ways):
            models[kind] = _fsdp2(workload, ranks) if kind == "fsdp2" else _polyshard(workload, ranks, kind, pretended)
        engine = Engine({name: each.shape for name, each in _meta(workload).named_parameters()}, ranks.device)
    first: dict[str, torch.Tensor] = {}
    taken: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        kind, pairs = WAYS[way]
        with together(ranks):
            engine.clear()
            if on_cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            count = engine.load(pairs(models[kind]))
            more = torch.cuda.max_memory_allocated() - before if on_cuda else None
            first = first or {name: weight.clone() for name, weight in engine.weights.items()}
            same = all(torch.equal(weight, first[name]) for name, weight in engine.weights.items())
            found[way] = {"tensors": count, "more_mib": None if more is None else round(more / 2**20, 1)}
            found[way]["same"] = None if pretended else same
    first.clear()
    with undisturbed():
        for number in range(times):
            for way in (*ways[number % len(ways) :], *ways[: number % len(ways)]):
                kind, pairs = WAYS[way]
                with together(ranks):
                    ranks.synchronize()
                    began = time.perf_counter()
                    engine.load(pairs(models[kind]))
                    ranks.synchronize()
                    taken[way].append((time.perf_counter() - began) * 1e3)
    for way in ways:
        found[way]["ms"] = spread(ranks.largest(taken[way]))
    return found


def main() -> int:
    """Run, print the table last; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="300m,1b")
    parser.add_argument("--ways", help="with + in the place of each comma; all where left out")
    parser.add_argument("--rounds", type=int, default=3, help="with new models each")
    parser.add_argument("--times", type=int, default=7, help="that each way runs in a round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on the first device")
    parser.add_argument("--pretend", type=int, default=0, help="so many ranks, of which this process is one")
    parser.add_argument("--commit", help="recorded instead of what git says")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if "RANK" not in os.environ and not given.pretend:
        print("nothing measured: start it with torchrun, or with --pretend, see --help", file=sys.stderr)
        return 0
    warnings.simplefilter("ignore")
    if given.device == "cpu":
        torch.set_num_threads(1)
    if given.one_gpu:
        # One host would refuse two ranks of one device.
        os.environ.update(NCCL_HOSTID=f"host{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        os.environ["LOCAL_RANK"] = "0"
    ranks = Ranks(given.device, timedelta(seconds=2 * _HANG_S), given.pretend)
    ways = [name.replace("+", ",") for name in given.ways.split(",")] if given.ways else list(WAYS)
    report: dict[str, Any] = {"environment": environment(ranks, "stream.py", given.commit), "rows": []}
    report["environment"]["one_gpu"] = given.one_gpu
    for work in given.work.split(","):
        for number in range(given.rounds):
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            # Another way is the first of each round, which the others' results are compared with.
            turned = ways[number % len(ways) :] + ways[: number % len(ways)]
            found = measure(ranks, WORKLOADS[work], turned, given.times, bool(given.pretend))
            for way in ways:
                _add(report, ranks, given.out, {"workload": work, "way": way, "round": number, **found[way]})
            gc.collect()
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    ranks.close()
    return 0


def _add(report: dict[str, Any], ranks: Ranks, out: Path | None, row: dict[str, Any]) -> None:
    report["rows"].append(row)
    if ranks.rank == 0:
        same = {None: "nothing compared", True: "the same", False: "OTHER VALUES"}[row["same"]]
        print(
            f"{row['workload']:5} {row['way']:25} {row['ms']['median']:9.2f} ms ({row['ms']['min']:.2f} to "
            f"{row['ms']['max']:.2f}), {row['tensors']} tensors, {row['more_mib'] or 0:.0f} MiB more, {same}",
            flush=True,
        )
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
