"""What Muon costs: whole steps and their optimizer's part, beside AdamW, and beside FSDP2 with the same two.

    torchrun --standalone --nproc-per-node 2 benchmarks/muon.py --out benchmarks/results/muon.json
    torchrun --standalone --nproc-per-node 2 benchmarks/muon.py --train 300 --out benchmarks/results/muon-train.json
    torchrun --standalone --nproc-per-node 2 benchmarks/muon.py --device cpu --work tiny --rounds 1 --steps 2

Every round builds each peer from the meta device, warms it up, times it and drops it; ratios are taken within a round.
A step is so many microbatches, the optimizers and zero_grad(). Hidden matrices go to Muon, embedding, head and norms to
fused AdamW. FSDP2's Muon keeps its momentum sharded, brings each matrix of it together by ``full_tensor()`` in bf16,
orthogonalises it on every rank, and takes its own rows of the result.
"""

from __future__ import annotations

import faulthandler
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import polyshard
import torch
from contenders import Site, adamw, fill_shards
from measure import spread, turned, undisturbed, write
from memory import Memory
from polyshard.optim import Muon, for_matrices
from polyshard.optim.muon import newton_schulz
from ranks import Ranks
from runs import compute_deterministically, environment, job, make_parser, not_started, together
from torch import nn
from workloads import WORKLOADS, Batches, Block, Workload, initializer, meta_model, whole_model

_HANG_S = 150.0
_POOL = 8


@dataclass(frozen=True, slots=True)
class Trainer:
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    synchronise: Callable[[bool], Any]
    """Called before a microbatch with whether its backward reduces; returns a context for it."""

    def compute(self, microbatches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Forward and backward of all of them; the last one's loss."""
        loss = torch.zeros(())
        for number, (tokens, targets) in enumerate(microbatches):
            with self.synchronise(number == len(microbatches) - 1):
                loss = self.model(tokens, targets)
                (loss / len(microbatches)).backward()
        return loss.detach()

    def update(self) -> None:
        """All optimizers, and gradients to None."""
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class FullTensorMuon(torch.optim.Optimizer):
    """Muon on DTensors as one writes it without help: every rank brings every matrix together, and computes all."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"]
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                mixed = parameter.grad.lerp(mean, group["momentum"]).bfloat16()
                whole = newton_schulz(mixed.full_tensor().unsqueeze(0))[0]
                rank, ranks = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size()
                local = parameter.to_local()
                chunks = whole.chunk(ranks)
                local.mul_(1 - group["lr"] * group["weight_decay"])
                if rank < len(chunks):
                    ratio = math.sqrt(max(1, whole.size(0) / whole.size(1)))
                    local.add_(chunks[rank], alpha=-group["lr"] * ratio)


def _polyshard(site: Site, muon: bool = True) -> Trainer:
    model = meta_model(site.workload)
    policy = {"name": "module_class", "classes": [Block]}
    config = polyshard.ShardConfig(precision="bf16", policy=policy, device=site.device)
    polyshard.shard(model, config, initializer=initializer(model))
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        split = for_matrices(model, leave_out=[model.tail])
        optimizers = [Muon(split.matrices, lr=1e-3), adamw(split.others)]
    else:
        optimizers = [adamw(polyshard.flat_parameters(model))]
    return Trainer(model, optimizers, lambda last: nullcontext() if last else polyshard.no_sync(model))


def _fsdp2(site: Site, muon: bool = True) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(site.device.type, (site.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = meta_model(site.workload)
    for unit in model.blocks:
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    fill_shards(model, site, site.world_size)
    split = for_matrices(model, leave_out=[model.tail])
    optimizers: list[torch.optim.Optimizer] = [adamw(list(model.parameters()))]
    if muon:
        optimizers = [FullTensorMuon(split.matrices, lr=1e-3), adamw(split.others)]

    def synchronise(last: bool) -> Any:
        cast("Any", model).set_requires_gradient_sync(last)
        return nullcontext()

    return Trainer(model, optimizers, synchronise)


class _Unsharded(nn.Module):
    """A whole model on every rank, whose gradients are averaged when the last microbatch's are there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return self.model(tokens, targets)


def _unsharded(site: Site) -> Trainer:
    """torch.optim.Muon over DDP's whole model, as a reference for losses."""
    model = whole_model(site.workload, site.device)
    ids = [site.device.index] if site.device.type == "cuda" else None
    wrapped = nn.parallel.DistributedDataParallel(_Unsharded(model), device_ids=ids)
    split = for_matrices(model, leave_out=[model.tail])
    optimizers = [torch.optim.Muon(split.matrices, lr=1e-3), adamw(split.others)]
    return Trainer(wrapped, optimizers, lambda last: nullcontext() if last else wrapped.no_sync())


PEERS: dict[str, Callable[[Site], Trainer]] = {
    "polyshard adamw": lambda site: _polyshard(site, muon=False),
    "polyshard muon": _polyshard,
    "fsdp2 adamw": lambda site: _fsdp2(site, muon=False),
    "fsdp2 muon": _fsdp2,
    "unsharded muon": _unsharded,
}


def measure(ranks: Ranks, peer: str, workload: Workload, microbatches: int, steps: int) -> dict[str, Any]:
    """Milliseconds of whole steps and of their optimizer's part, the slowest rank's of each."""
    site = Site(workload, ranks.device, ranks.rank, ranks.world_size, compiled=False)
    batches = Batches(workload, ranks.rank, ranks.device)
    pool = [batches.batch(index) for index in range(_POOL)]
    on_cuda = ranks.device.type == "cuda"
    memory = Memory(ranks.device)
    memory.settle()
    memory.reset_peaks()
    times: list[tuple[float, float]] = []
    with together(ranks):
        trainer = PEERS[peer](site)
    with undisturbed():
        for index in range(3 + steps):
            given = [pool[(index + number) % _POOL] for number in range(microbatches)]
            with together(ranks):
                marks = [_mark(on_cuda)]
                loss = trainer.compute(given)
                marks.append(_mark(on_cuda))
                trainer.update()
                marks.append(_mark(on_cuda))
                if on_cuda:
                    torch.cuda.synchronize()
                times.append((_between(marks[0], marks[2]), _between(marks[1], marks[2])))
    whole, part = (ranks.largest([each[which] for each in times[3:]]) for which in (0, 1))
    peaks = memory.peaks()
    losses = ranks.mean([loss.item()])
    return {"ms": spread(whole), "optimizer_ms": spread(part), "loss": losses[0], "peak_gib": peaks and peaks[0]}


def train(ranks: Ranks, peer: str, workload: Workload, steps: int, every: int) -> list[float]:
    """Losses, mean over ranks, after each ``every`` steps."""
    site = Site(workload, ranks.device, ranks.rank, ranks.world_size, compiled=False)
    batches = Batches(workload, ranks.rank, ranks.device)
    with together(ranks):
        trainer = PEERS[peer](site)
    losses = []
    for index in range(1, steps + 1):
        loss = trainer.compute([batches.batch(index)])
        trainer.update()
        if index % every == 0:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            losses.append(ranks.mean([loss.item()])[0])
    return losses


def _mark(on_cuda: bool) -> Any:
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def main() -> int:
    """Run, print a line for each row; returns the process's exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", default="300m,1b")
    parser.add_argument(
        "--peers", default=",".join(name.replace(", ", "+") for name in PEERS if "unsharded" not in name)
    )
    parser.add_argument("--microbatches", default="1,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--train", type=int, help="compare losses over so many deterministic steps instead")
    parser.add_argument("--every", type=int, default=20, help="steps between two losses of --train")
    given = parser.parse_args()
    code = not_started(given)
    if code is not None:
        return code
    if given.train:
        compute_deterministically()
    peers = [name.replace("+", ", ") for name in given.peers.split(",")]
    with job(given, _HANG_S) as ranks:
        report: dict[str, Any] = {"environment": environment(ranks, "muon.py", given.commit), "rows": []}
        for work in given.work.split(","):
            if given.train:
                for peer in peers:
                    losses = train(ranks, peer, WORKLOADS[work], given.train, given.every)
                    row = {"workload": work, "peer": peer, "every": given.every, "losses": losses}
                    _add(report, ranks, given.out, row)
                continue
            for number in range(given.rounds):
                for microbatches in map(int, given.microbatches.split(",")):
                    for peer in turned(peers, number):
                        faulthandler.dump_traceback_later(_HANG_S, exit=True)
                        found = measure(ranks, peer, WORKLOADS[work], microbatches, given.steps)
                        row = {"workload": work, "peer": peer, "microbatches": microbatches, "round": number, **found}
                        _add(report, ranks, given.out, row)
    return 0


def _add(report: dict[str, Any], ranks: Ranks, out: Path | None, row: dict[str, Any]) -> None:
    report["rows"].append(row)
    write(report, out, ranks.rank)
    if ranks.rank == 0:
        told = row.get("losses") or (
            f"{row['ms']['median']:9.2f} ms, optimizer {row['optimizer_ms']['median']:8.2f} ms, "
            f"loss {row['loss']:.4f}, peak {row['peak_gib'] or 0:.2f} GiB"
        )
        print(f"{row['workload']:5} {row['peer']:22} {row.get('microbatches', '')} {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
