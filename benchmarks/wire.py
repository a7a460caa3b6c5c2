"""Gathers in int8 and fp8 beside bf16: what they err by, what they send, and what training makes of it.

    python benchmarks/wire.py --out benchmarks/results/wire.json
    torchrun --standalone --nproc-per-node 2 benchmarks/wire.py --train 1000 --out benchmarks/results/wire-train.json
    torchrun --standalone --nproc-per-node 2 benchmarks/wire.py --rounds 5 --out benchmarks/results/wire-step.json
    torchrun --standalone --nproc-per-node 2 benchmarks/wire.py --device cpu --work tiny --rounds 1

Without torchrun, on the CPU: errors of the codecs on values of three kinds, bytes of the gathers of a model, and losses
of a small one that two threads train from the same start on the same batches, by precision, on several draws of
batches, for what chance alone does. With torchrun: losses or step times of a workload, taken as ``peers.py`` does.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

import polyshard
import torch
from contenders import contender
from curves import CURVE, Configure, alone_environment, curves, tell_alone
from options import Settings
from peers import measure
from polyshard.interfaces import GatherEncoding, PluginContext, UnitSpec
from polyshard_backends.fake import FakeCollectives
from polyshard_plugins.block_codec import BlockCode, Number
from polyshard_plugins.block_scaled import Fp8, Int8
from runs import environment, job, make_parser, not_started
from workloads import WORKLOADS, Batches, Block, Workload, meta_model, whole_model

_HANG_S = 150.0
_NUMEL = 1 << 20
_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_PRECISIONS = ("bf16", "int8", "fp8")


def values_of(kind: str) -> torch.Tensor:
    """2**20 fp32 values with a deviation of 0.02: normal, of Student's t with 3 degrees, or with large columns."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(_NUMEL, generator=generator)
    if kind == "heavy tails":
        squares = torch.randn(3, _NUMEL, generator=generator).square().mean(0)
        normal = normal / squares.sqrt()
    elif kind == "large columns":
        # Every 64th column of a matrix 1024 wide, ten times as large as the others.
        normal.view(-1, 1024)[:, ::64] *= 10
    return normal * (0.02 / normal.std())


def errors() -> list[dict[str, Any]]:
    """Root mean square of what arrives less what was sent, as a share of that of the values; it arrives in bf16."""
    rows: list[dict[str, Any]] = []
    for kind in ("normal", "heavy tails", "large columns"):
        values = values_of(kind)
        rows.append({"values": kind, "precision": "bf16", "error": _share(values.bfloat16(), values)})
        for number in Number:
            for size in _SIZES:
                code = BlockCode(number, size)
                message = torch.empty(1, code.nbytes(_NUMEL), dtype=torch.uint8)
                code.encode(message[0], values)
                out = torch.empty(1, _NUMEL, dtype=torch.bfloat16)
                code.decode(message, out)
                share = round(message.numel() / (2 * _NUMEL), 4)
                rows.append(
                    {
                        "values": kind,
                        "precision": number.value,
                        "block": size,
                        "of_bf16_bytes": share,
                        "error": _share(out[0], values),
                    }
                )
    return rows


def _share(arrived: torch.Tensor, values: torch.Tensor) -> float:
    return round(float((arrived.double() - values.double()).norm() / values.double().norm()), 6)


class _Noting(Int8):
    """Keeps what it answered."""

    def __init__(self, context: PluginContext) -> None:
        super().__init__(context)
        self.answers: dict[str, tuple[UnitSpec, GatherEncoding | None]] = {}

    def encoding(self, unit: UnitSpec) -> GatherEncoding | None:
        answer = super().encoding(unit)
        self.answers[unit.name] = unit, answer
        return answer


def bytes_of(workload: Workload, world_size: int) -> dict[str, Any]:
    """Bytes of one gather of each unit, by the precision plugin's answers, without memory for the model."""
    model, device = meta_model(workload), torch.device("meta")
    plugin = _Noting(PluginContext("int8", device))
    collectives = FakeCollectives(PluginContext("fake", device), 0, world_size)
    policy = {"name": "module_class", "classes": [Block]}
    polyshard.shard(model, polyshard.ShardConfig(collectives, precision=plugin, policy=policy, device=device))
    plain = sum(2 * spec.shard_numel for spec, _ in plugin.answers.values()) * world_size
    encoded = sum(
        answer.nbytes_per_rank if answer is not None else 2 * spec.shard_numel
        for spec, answer in plugin.answers.values()
    )
    return {
        "workload": workload.name,
        "world_size": world_size,
        "units": len(plugin.answers),
        "bf16_mib": round(plain / 2**20, 3),
        "int8_mib": round(encoded * world_size / 2**20, 3),
        "share": round(encoded * world_size / plain, 4),
    }


def counted(workload: Workload) -> dict[str, Any]:
    """Bytes that the gathers of a real step on the CPU carried, its gathers, and its communications."""
    found: dict[str, Any] = {"workload": workload.name, "world_size": 4}
    for precision in _PRECISIONS:
        collectives = FakeCollectives(PluginContext("fake", torch.device("cpu")), 0, 4)
        model = whole_model(workload, torch.device("cpu"))
        polyshard.shard(model, _config(precision, collectives=collectives))
        tokens, targets = Batches(workload, 0, torch.device("cpu")).batch(0)
        for _ in range(2):
            collectives.calls.clear()
            collectives.batches.clear()
            model(tokens, targets).backward()
        gathers = [call for call in collectives.calls if call.operation == "all_gather"]
        found[precision] = {
            "mib": round(sum(call.numel * call.dtype.itemsize for call in gathers) / 2**20, 4),
            "gathers": len(gathers),
            "communications": len(gathers) - sum(collectives.batches) + len(collectives.batches),
        }
    return found


def _config(precision: object, **settings: Any) -> polyshard.ShardConfig:
    policy = {"name": "module_class", "classes": [Block]}
    return polyshard.ShardConfig(precision=_precisions()[str(precision)], policy=policy, **settings)


def _precisions() -> dict[str, Any]:
    context = PluginContext("message", torch.device("cpu"))
    return {"bf16": "bf16", "int8": Int8(context), "fp8": Fp8(context)}


def _by_precision(name: str) -> Configure:
    return lambda collectives: _config(name, collectives=dict(collectives))


def alone(given: argparse.Namespace) -> dict[str, Any]:
    """What needs no other process."""
    torch.set_num_threads(1)
    return {
        "environment": alone_environment("wire.py", given.commit),
        "errors": errors(),
        "bytes": [bytes_of(WORKLOADS[name], size) for name in ("300m", "1b", "8b") for size in (2, 8)],
        "counted": counted(replace(CURVE, batch=1, seq=16)),
        "curves": curves({name: _by_precision(name) for name in _PRECISIONS}, "bf16", given.steps, given.draws),
    }


def among_ranks(given: argparse.Namespace) -> int:
    """Losses or step times of a workload, with polyshard by precision as the peers."""
    code = not_started(given)
    if code is not None:
        return code
    # Units of the smallest model would all travel as they compute.
    every = ":precision__min_numel=0" if given.work == "tiny" else ""
    peers = tuple(contender(f"polyshard:precision={name}{every if name != 'bf16' else ''}") for name in _PRECISIONS)
    work = (WORKLOADS[given.work],)
    settings = Settings(work, peers, given.rounds, None, 3, None, _HANG_S, given.out, given.by_step, kernels=False)
    with job(given, _HANG_S) as ranks:
        report: dict[str, Any] = {"environment": environment(ranks, "wire.py", given.commit)}
        measure(ranks, settings, report, given.train, given.every)
    return 0


def main() -> int:
    """Run, and write the file; returns the process's exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of the small model, without torchrun")
    parser.add_argument("--draws", type=int, default=4, help="of batches for the small model, without torchrun")
    parser.add_argument("--work", choices=list(WORKLOADS), default="300m", help="with torchrun")
    parser.add_argument("--train", type=int, help="with torchrun: compare losses over so many steps")
    parser.add_argument("--every", type=int, default=20, help="steps between two losses of --train")
    parser.add_argument("--rounds", type=int, default=3, help="with torchrun: of timed steps")
    parser.add_argument("--by-step", action="store_true", help="with torchrun: peers take turns at each step")
    given = parser.parse_args()
    if "RANK" in os.environ:
        return among_ranks(given)
    tell_alone(alone(given), given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
