"""What ``polyshard plan`` predicts beside what was measured: peak memory and time of a step, row by row.

    python benchmarks/plan_truth.py --out benchmarks/results/plan.json

Needs no device: models are built on the meta device with the configurations that ``contenders.py`` gives polyshard, and
compared with the files of ``benchmarks/results``. Nothing is fitted to a row that is judged: ``forecast/device.py``
says where each constant comes from. A row says whether it is within the bound of 5 % of memory and 15 % of time.

Where issuing takes the host longer than the device computes, the step is the host's, and hosts differ. Where the file
has the rows, what a launch takes it comes from compute without communication (peer ``local``) of the same workload, and
what a unit takes it from polyshard's eager step of ``host``, which then is not judged; the row says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import polyshard
import torch
from contenders import _POLYSHARD as POLYSHARD_SETTINGS
from measure import provenance, write
from polyshard_tools.forecast import (
    Device,
    NoOptimizer,
    Plan,
    ShapedBatches,
    TracedModel,
    find_device,
    plan,
)
from trainer import MODELS
from workloads import WORKLOADS, Block, Workload, meta_model

RESULTS = Path(__file__).parent / "results"
_GIB = 2**30
MEMORY_BOUND, TIME_BOUND = 0.05, 0.15
#: The model of ``trainer.py``, among the workloads.
LLAMA = "Llama 3.2 1B"


@dataclass(frozen=True, slots=True)
class Truth:
    """Rows of a result that are the same measurement."""

    file: str
    commit: str
    world_size: int
    workload: str
    peer: str
    peaks_gib: tuple[float, ...] = ()
    """Of each round; empty where they hold what other peers left."""
    steps_ms: tuple[float, ...] = ()
    local_host_ms: tuple[float, ...] = ()
    """Host time of compute without communication in the same file."""
    remark: str = ""
    microbatches: int = 1

    @property
    def captured(self) -> bool:
        """Whether the step is one CUDA graph, which the host launches at once."""
        return "captured" in self.peer


def truths() -> list[Truth]:
    """Every row of polyshard with ``nccl`` that one of the strategies or workloads tells from the others."""
    left = "peaks not compared: graphs of earlier peers hold memory of the process"
    found = [
        *_peers("peers2-8b.json", ["polyshard"]),
        *_peers("peers2-small.json", ["polyshard", "polyshard-captured"], peaks=False, remark=left),
        *_muon(),
        *_peers("peers4-8b.json", ["polyshard"]),
        *_peers("peers.json", ["polyshard", "polyshard-captured"], peaks=False, remark=left),
        *_peers(
            "peers4-strategies.json",
            ["polyshard", "polyshard-keep", "polyshard-hybrid", "polyshard-no-shard"],
            remark="peaks hold what a captured peer of an earlier round left; the smallest of the rounds counts",
        ),
        *_trainer("trainer.json"),
    ]
    return [truth for truth in found if truth.peaks_gib or truth.steps_ms]


def _read(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    data = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return data, data["environment"]


def _peers(file: str, peers: list[str], *, peaks: bool = True, remark: str = "") -> list[Truth]:
    data, environment = _read(file)
    found = []
    for workload in dict.fromkeys(row["workload"] for row in data["rows"]):
        of = {
            peer: [row for row in data["rows"] if (row["workload"], row["peer"]) == (workload, peer) and "ms" in row]
            for peer in [*peers, "local"]
        }
        found += [
            Truth(
                file,
                environment["commit"],
                environment["world_size"],
                workload,
                peer,
                tuple(row["peak_gib"] for row in of[peer]) if peaks else (),
                tuple(row["ms"]["median"] for row in of[peer]),
                tuple(row["host_ms"]["median"] for row in of["local"]),
                remark,
            )
            for peer in peers
            if of[peer]
        ]
    return found


def _muon() -> list[Truth]:
    file = "muon.json"
    data, environment = _read(file)
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        if row["peer"] == "polyshard adamw":
            rows.setdefault((row["workload"], row["microbatches"]), []).append(row)
    return [
        Truth(
            file,
            environment["commit"],
            environment["world_size"],
            workload,
            "polyshard",
            tuple(row["peak_gib"] for row in alike),
            tuple(row["ms"]["median"] for row in alike),
            remark="AdamW for all",
            microbatches=microbatches,
        )
        for (workload, microbatches), alike in rows.items()
    ]


def _trainer(file: str) -> list[Truth]:
    """Transformers' Llama by ``PolyshardTrainer``, with and without checkpointing."""
    data = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if row["peer"] == "polyshard"]
    return [
        Truth(
            file,
            data["commit"],
            data["world_size"],
            LLAMA,
            case,
            tuple(row["peak_gib"] for row in rows if row["case"] == case),
            tuple(row["ms"]["median"] for row in rows if row["case"] == case),
            remark="time contains the trainer's own, and clipping, which are not planned",
        )
        for case in dict.fromkeys(row["case"] for row in rows)
    ]


def _batches(workload: Workload) -> ShapedBatches:
    tokens = f"int64[{workload.batch},{workload.seq}]"
    return ShapedBatches.parse(f"{tokens} {tokens}")


@cache
def predicted(workload_name: str, peer: str, world_size: int, device: Device, microbatches: int = 1) -> Plan:
    """One step of ``peer``, as ``contenders.py`` wraps it, or of a case of ``trainer.py``."""
    if workload_name == LLAMA:
        return _predicted_llama(peer, world_size, device)
    workload = WORKLOADS[workload_name]
    settings = dict(POLYSHARD_SETTINGS[peer])
    if "hybrid" in peer:
        settings["shard_size"] = world_size // 2
    policy = {"name": "module_class", "classes": [Block]}
    config = polyshard.ShardConfig(precision="bf16", policy=policy, **settings)
    return plan(
        config,
        meta_model(workload),
        world_size,
        batch=_batches(workload),
        samples=workload.batch,
        device=device,
        microbatches=microbatches,
    )


def _predicted_llama(case: str, world_size: int, device: Device) -> Plan:
    import transformers

    settings = transformers.LlamaConfig(**MODELS["1b"], use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    model.train()
    if "checkpointing" in case:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    samples, length = (int(word) for word in case.split(",")[0].split(" x "))
    batch = ShapedBatches.parse(f"input_ids=int64[{samples},{length}] labels=int64[{samples},{length}]")
    config = polyshard.ShardConfig(precision="bf16", policy="transformers")
    return plan(config, model, world_size, batch=batch, samples=samples, device=device)


@cache
def local_launches(workload_name: str) -> int:
    """What compute without communication launches in a step: its kernels, and the optimizer's."""
    workload = WORKLOADS[workload_name]
    traced = TracedModel(meta_model(workload).to(torch.bfloat16), polyshard.ShardConfig(), 1, NoOptimizer())
    return len(traced.step(_batches(workload)(workload.batch)).issued) + 1


def _on_its_host(truth: Truth, device: Device, everything: list[Truth]) -> tuple[Device, str]:
    """``device`` behind the host of that run, as far as other rows of its file tell, and which these were."""
    if truth.captured or not truth.local_host_ms:
        return device, "device.py"
    device = dataclasses.replace(device, launch_s=_launch_s(truth))
    small = [each for each in everything if (each.file, each.workload, each.peer) == (truth.file, "host", "polyshard")]
    if not small:
        return device, "local"
    time = predicted("host", "polyshard", truth.world_size, device).time
    assert time is not None
    over = statistics.median(small[0].steps_ms) / 1e3 - time.launches * _launch_s(small[0])
    return dataclasses.replace(device, unit_s=over / time.units), "local, and polyshard of host"


def _launch_s(truth: Truth) -> float:
    return statistics.median(truth.local_host_ms) / 1e3 / local_launches(truth.workload)


def judged(truth: Truth, device: Device, everything: list[Truth]) -> dict[str, Any]:
    """One row: predicted, measured, and the errors."""
    device, host_from = _on_its_host(truth, device, everything)
    found = predicted(truth.workload, truth.peer, truth.world_size, device, truth.microbatches)
    assert found.time is not None
    row: dict[str, Any] = {
        "file": truth.file,
        "measured_at": truth.commit,
        "ranks": truth.world_size,
        "workload": truth.workload,
        "peer": truth.peer,
        "microbatches": truth.microbatches,
        "remark": truth.remark,
    }
    if truth.peaks_gib:
        measured = min(truth.peaks_gib)
        row["peak_gib"] = _compared(found.peak_nbytes / _GIB, measured, MEMORY_BOUND)
    if truth.steps_ms:
        seconds = found.time.device_s if truth.captured else found.time.total_s
        row["step_ms"] = _compared(seconds * 1e3, statistics.median(truth.steps_ms), TIME_BOUND)
        row["step_ms"]["rounds"] = [min(truth.steps_ms), max(truth.steps_ms)]
        by_host = not truth.captured and found.time.host_s > found.time.device_s
        row["bound_by"] = "host" if by_host else "device"
        row["host_from"] = host_from
        row["calibrates"] = by_host and truth.workload == "host" and host_from != "device.py"
        if row["calibrates"]:
            row["step_ms"]["within"] = None
        row["device_ms"], row["host_ms"] = (round(each * 1e3, 3) for each in (found.time.device_s, found.time.host_s))
    return row


def _compared(value: float, measured: float, bound: float) -> dict[str, Any]:
    error = value / measured - 1
    return {
        "predicted": round(value, 4),
        "measured": round(measured, 4),
        "error": round(error, 4),
        "within": abs(error) <= bound,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | workload | peer | file | peak GiB: predicted, measured, error | ms: predicted, measured, error | "
        "bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = ["—" if key not in row else _cell(row[key]) for key in ("peak_gib", "step_ms")]
        lines.append(
            f"| {row['ranks']} | {row['workload']} | {row['peer']}{_times(row)} | {row['file']} | {cells[0]} | "
            f"{cells[1]} | {row.get('bound_by', '—')} |"
        )
    return "\n".join(lines)


def _times(row: dict[str, Any]) -> str:
    return f", {row['microbatches']} microbatches" if row["microbatches"] > 1 else ""


def _cell(pair: dict[str, Any]) -> str:
    mark = {True: "", False: " **off**", None: " (calibrates)"}[pair["within"]]
    return f"{pair['predicted']:.2f}, {pair['measured']:.2f}, {pair['error']:+.1%}{mark}"


def main() -> int:
    """Compare, print, write; 0 where every row is within its bounds, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file")
    parser.add_argument("--device", default="h200", help="whose constants to use (default: %(default)s)")
    parser.add_argument("--commit", help="what predicted, where the working tree has no history")
    given = parser.parse_args()
    device, began = find_device(given.device), time.perf_counter()
    everything = truths()
    rows = [judged(truth, device, everything) for truth in everything]
    report = {
        **provenance(given.commit),
        "command": "python benchmarks/plan_truth.py --out benchmarks/results/plan.json",
        "torch": str(torch.__version__),
        "device": dataclasses.asdict(device),
        "bounds": {"peak_gib": MEMORY_BOUND, "step_ms": TIME_BOUND},
        "seconds": round(time.perf_counter() - began, 1),
        "rows": rows,
    }
    print(table(rows))
    write(report, given.out)
    missed = [row for row in rows if any(row[key]["within"] is False for key in ("peak_gib", "step_ms") if key in row)]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
