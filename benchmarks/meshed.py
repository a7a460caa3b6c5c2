"""Steps over meshes of two dimensions: tensor parallelism, and experts over ranks, beside FSDP2 with the same.

    torchrun --standalone --nproc-per-node 4 benchmarks/meshed.py --out benchmarks/results/meshed.json
    torchrun --standalone --nproc-per-node 4 benchmarks/meshed.py --device cpu --work tiny --rounds 1 --steps 2

Ranks form a mesh of W/2 by 2. ``tp``: every block's matrices are cut over two ranks, and sharded over the others.
``ep``: a block's feed-forward is eight experts, of which two ranks have half each; experts are sharded over the other
ranks, all else over all. Token i goes to expert i mod 8, so that all experts are equally busy and no peer waits for a
count. In every round each peer is built, warmed up, timed and dropped, in an order that rotates. All start from equal
weights and see the same batches, so their losses agree.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import polyshard
import torch
import torch.distributed as dist
from contenders import EagerStep, Site, Step, adamw
from measure import spread, turned, undisturbed, write
from memory import Memory
from ranks import Ranks
from runs import environment, job, make_parser, not_started, timed, together
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from workloads import WORKLOADS, Batches, Block, LanguageModel, Workload, initial_value

_HANG_S = 120
_POOL = 8
_EXPERTS = 8
_KINDS = ("tp", "ep")


class _Exchange(torch.autograd.Function):
    """Equal parts of the first dimension to each rank of a group, and gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    exchanged: torch.Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return exchanged


class Experts(nn.Module):
    """Gated feed-forwards, of which each rank of ``mesh`` has its share, as ``Shard(0)``."""

    gate: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter

    def __init__(self, workload: Workload, mesh: DeviceMesh, prefix: str, device: torch.device) -> None:
        super().__init__()
        self.group = mesh.get_group()
        share, first = _EXPERTS // mesh.size(), mesh.get_local_rank() * (_EXPERTS // mesh.size())
        dim, ffn = workload.dim, workload.ffn
        for name, shape in (("gate", (dim, ffn)), ("up", (dim, ffn)), ("down", (ffn, dim))):
            own = [initial_value(f"{prefix}.{name}.{first + index}", shape, device) for index in range(share)]
            parameter = nn.Parameter(DTensor.from_local(torch.stack(own), mesh, [Shard(0)]))
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, dim]`` to the same."""
        gate, up, down = (
            each.to_local() if isinstance(each, DTensor) else each for each in (self.gate, self.up, self.down)
        )
        rows = x.reshape(-1, _EXPERTS, x.shape[-1]).transpose(0, 1)
        # [ranks, experts of one, tokens, dim]; what arrives is in the order of the ranks that sent it.
        ranks = _EXPERTS // len(gate)
        sent = _exchange(rows.reshape(ranks, len(gate), *rows.shape[1:]), self.group)
        here = sent.transpose(0, 1).flatten(1, 2)
        made = torch.bmm(functional.silu(torch.bmm(here, gate)) * torch.bmm(here, up), down)
        back = _exchange(made.view(len(gate), ranks, -1, x.shape[-1]).transpose(0, 1), self.group)
        answer: torch.Tensor = back.flatten(0, 1).transpose(0, 1).reshape(x.shape)
        return answer


class ExpertBlock(Block):
    """A block whose feed-forward is experts."""

    def __init__(self, workload: Workload, mesh: DeviceMesh, prefix: str, device: torch.device) -> None:
        super().__init__(workload)
        del self.gate, self.up, self.down
        self.experts = Experts(workload, mesh, prefix, device)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, dim]`` to the same."""
        x = x + self.attend(self.attention_norm(x))
        fed: torch.Tensor = self.experts(self.ffn_norm(x))
        return x + fed


def build(site: Site, kind: str) -> tuple[LanguageModel, DeviceMesh]:
    """The model with its values, parallel over the second dimension of the mesh, not yet sharded."""
    mesh = init_device_mesh(site.device.type, (site.world_size // 2, 2), mesh_dim_names=("dp", kind))
    with torch.device(site.device):
        model = LanguageModel(site.workload)
        if kind == "ep":
            for index in range(len(model.blocks)):
                model.blocks[index] = ExpertBlock(site.workload, mesh["ep"], f"blocks.{index}.experts", site.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, DTensor):
                parameter.copy_(initial_value(name, parameter.shape, site.device))
    if kind == "tp":
        columns, rows = ("query", "key", "value", "gate", "up"), ("project", "down")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {
            name: RowwiseParallel() for name in rows
        }
        for block in model.blocks:
            parallelize_module(block, mesh[kind], plan)
    return model, mesh


def _polyshard(site: Site, kind: str) -> Step:
    model, mesh = build(site, kind)
    policy: dict[str, Any] = {"name": "module_class", "classes": [Block]}
    if kind == "ep":
        policy["classes"] = [ExpertBlock, Experts]
        policy["overrides"] = {"Experts": {"mesh": "dp", "gradient_divisor": "data"}}
    shard: str | tuple[str, ...] = "dp" if kind == "tp" else ("dp", "ep")
    polyshard.shard(
        model, polyshard.ShardConfig(mesh=mesh, shard=shard, precision="bf16", policy=policy, device=site.device)
    )
    return EagerStep(model, adamw(polyshard.flat_parameters(model)))


def _fsdp2(site: Site, kind: str, *, drop_in: bool = False) -> Step:
    package = "polyshard_fsdp2" if drop_in else "torch.distributed.fsdp"
    fully_shard: Callable[..., Any] = importlib.import_module(package).fully_shard
    model, mesh = build(site, kind)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    over = mesh["dp"] if kind == "tp" else init_device_mesh(site.device.type, (site.world_size,))
    for block in model.blocks:
        if isinstance(block, ExpertBlock):
            fully_shard(block.experts, mesh=mesh["dp"], mp_policy=precision)
            # Ranks of one mesh of experts see the tokens of all ranks.
            block.experts.set_gradient_divide_factor(float(site.world_size))  # type: ignore[operator]
            if site.device.type == "cpu" and not drop_in:
                # Gloo has no sum that multiplies first.
                block.experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        fully_shard(block, mesh=over, mp_policy=precision)
    fully_shard(model, mesh=over, mp_policy=precision)
    # A fused kernel takes parameters of one mesh alone.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return EagerStep(model, adamw({"params": each} for each in by_mesh.values()))


PEERS: dict[str, Callable[[Site, str], Step]] = {
    "fsdp2": _fsdp2,
    "drop-in": partial(_fsdp2, drop_in=True),
    "polyshard": _polyshard,
}


def measure(ranks: Ranks, peer: str, kind: str, workload: Workload, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, the slowest rank's; mean loss over ranks after the last; peak memory."""
    site = Site(workload, ranks.device, ranks.rank, ranks.world_size, compiled=False)
    # Ranks along tp are one rank with one batch; along ep each has its own.
    data = ranks.rank // 2 if kind == "tp" else ranks.rank
    batches = Batches(workload, data, ranks.device)
    pool = [batches.batch(index) for index in range(_POOL)]
    memory = Memory(ranks.device)
    memory.settle()
    with together(ranks):
        step = PEERS[peer](site, kind)
    taken = []
    with undisturbed():
        for index in range(3 + steps):
            if index == 3:
                memory.reset_peaks()
            with together(ranks):
                one, loss = timed(step, *pool[index % _POOL])
                taken.append(one)
    peak, reserved = memory.peaks() or (None, None)
    return {
        "ms": spread(ranks.largest([one.device for one in taken[3:]])),
        "host_ms": spread(ranks.largest([one.host for one in taken[3:]])),
        "loss": ranks.mean([loss.item()])[0],
        "peak_gib": peak,
        "reserved_gib": reserved,
    }


def main() -> int:
    """Run, print the rows of each kind; returns the process's exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--work", default="300m")
    parser.add_argument("--kinds", default=",".join(_KINDS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    code = not_started(given)
    if code is not None:
        return code
    peers = given.peers.split(",")
    with job(given, _HANG_S) as ranks:
        report: dict[str, Any] = {"environment": environment(ranks, "meshed.py", given.commit), "rows": []}
        for number in range(given.rounds):
            for work in given.work.split(","):
                for kind in given.kinds.split(","):
                    rows = []
                    for peer in turned(peers, number):
                        faulthandler.dump_traceback_later(_HANG_S, exit=True)
                        found = measure(ranks, peer, kind, WORKLOADS[work], given.steps)
                        rows.append({"workload": work, "kind": kind, "peer": peer, "round": number, **found})
                    report["rows"] += rows
                    write(report, given.out, ranks.rank)
                    if ranks.rank == 0:
                        _tell(rows)
    return 0


def _tell(rows: list[dict[str, Any]]) -> None:
    fsdp2_ms = next((row["ms"]["median"] for row in rows if row["peer"] == "fsdp2"), None)
    for row in rows:
        ratio = f", FSDP2 / it {fsdp2_ms / row['ms']['median']:.3f}" if fsdp2_ms else ""
        peak = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.2f} GiB"
        print(
            f"{row['workload']} {row['kind']} {row['peer']:10} {row['ms']['median']:8.2f} ms, host "
            f"{row['host_ms']['median']:8.2f}{ratio}{peak}, loss {row['loss']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
