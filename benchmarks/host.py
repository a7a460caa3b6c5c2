"""Host cost of polyshard beside FSDP2, on one CPU thread and pretended collectives. Ratios are the result.

    python benchmarks/host.py --out host.json

Every figure is a peer's own time less that of the same model unsharded. Peers take turns within each round, so a
machine that is busy for a while is busy for all of them; a ratio is taken within a round, and the median over rounds
is reported with its spread. Time is CPU time of the whole process, all threads: what other processes take meanwhile
does not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polyshard
import polyshard_fsdp2
import torch
import torch.distributed as dist
from measure import cpu_model, provenance, spread, undisturbed, write
from polyshard.interfaces import PluginContext, ReduceOp
from polyshard_backends.fake import FakeCollectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH = 16
PARAMETER_COUNTS = (1, 9, 27)
DIRECTIONS = ("forward", "backward")
#: The drop-in, and the same with an optimizer over plain parameters.
DROP_IN, FLAT = "drop-in", "drop-in, flat_parameters"
#: Largest accepted polyshard / FSDP2.
TARGETS = {
    "forward at 9": 0.32,
    "backward at 9": 0.34,
    "slope": 0.1,
    "wrap": 0.3,
    "beside TP": 0.5,
    DROP_IN: 0.8,
    FLAT: 0.5,
}


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int
    steps: int
    warmup: int
    units: int
    wrap_rounds: int
    wrap_units: int
    world_size: int


class Chain(nn.Module):
    """``count`` parameters of 16x16, each multiplied in once: one small kernel a parameter, so that Python shows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for factor in self.factors:
            x = x * factor
        return x


class ParallelBlock(nn.Module):
    """Two linear layers, the first cut by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return output


class Block(nn.Module):
    """Nine parameters in the modules that a transformer block has. For wrapping alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)


@dataclass(frozen=True, slots=True)
class Precision:
    """The same arithmetic for all three peers."""

    name: str
    polyshard: str
    fsdp2: MixedPrecisionPolicy
    plain: torch.dtype


PRECISIONS = (
    Precision("no cast", "none", MixedPrecisionPolicy(), torch.float32),
    Precision(
        "bf16, fp32 reduction",
        "bf16",
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        torch.bfloat16,
    ),
)


def config(precision: str, classes: Sequence[type[nn.Module]], world_size: int) -> polyshard.ShardConfig:
    """Full sharding over the pretended world, one unit per instance of ``classes``."""
    return polyshard.ShardConfig(
        collectives={"name": "fake", "world_size": world_size},
        precision=precision,
        policy={"name": "module_class", "classes": list(classes)},
    )


def wrap_fsdp2(model: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """FSDP2 on every block, then on the root."""
    wrap_with(fully_shard, model, mesh, precision)


def wrap_with(fully_shard: Callable[..., Any], model: nn.Module, mesh: DeviceMesh, policy: object) -> None:
    """``fully_shard`` of FSDP2, or of the drop-in, on every block, then on the root."""
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def chains(count: int, precision: Precision, mesh: DeviceMesh, settings: Settings) -> dict[str, nn.Module]:
    """The three peers, with equal weights."""

    def build() -> nn.Sequential:
        return nn.Sequential(*(Chain(count) for _ in range(settings.units)))

    plain, ours, fsdp2 = build().to(precision.plain), build(), build()
    polyshard.shard(ours, config(precision.polyshard, [Chain], settings.world_size))
    wrap_fsdp2(fsdp2, mesh, precision.fsdp2)
    return {"plain": plain, "polyshard": ours, "fsdp2": fsdp2}


def step(
    model: nn.Module, x: torch.Tensor, gradient: torch.Tensor, cleared: Sequence[nn.Parameter] | None = None
) -> tuple[float, float, torch.Tensor]:
    """Seconds of one forward and of one backward, and the output.

    ``cleared``: the parameters that get gradients, where they are not the model's.
    """
    begin = time.process_time()
    output = model(x)
    forward = time.process_time()
    output.backward(gradient)
    end = time.process_time()
    for parameter in model.parameters() if cleared is None else cleared:
        parameter.grad = None
    return forward - begin, end - forward, output.detach()


def time_steps(
    peers: dict[Any, nn.Module], x: torch.Tensor, gradient: torch.Tensor, settings: Settings
) -> dict[Any, dict[str, list[float]]]:
    """Microseconds a unit, the median of each round's steps: peer -> direction -> one value a round."""
    cleared = {peer: polyshard.flat_parameters(model) for peer, model in peers.items() if peer == FLAT}
    for peer, model in peers.items():
        for _ in range(settings.warmup):
            step(model, x, gradient, cleared.get(peer))
    times: dict[Any, dict[str, list[float]]] = {peer: {direction: [] for direction in DIRECTIONS} for peer in peers}
    for _ in range(settings.rounds):
        with undisturbed():
            for peer, model in peers.items():
                step(model, x, gradient, cleared.get(peer))
                taken = [step(model, x, gradient, cleared.get(peer))[:2] for _ in range(settings.steps)]
                for direction, values in zip(DIRECTIONS, zip(*taken, strict=True), strict=True):
                    times[peer][direction].append(statistics.median(values) * 1e6 / settings.units)
    return times


def time_chains(mesh: DeviceMesh, precision: Precision, settings: Settings) -> dict[Any, dict[str, list[float]]]:
    """``time_steps`` of polyshard, FSDP2 and the plain module, each with every count of parameters a unit.

    All in every round: a slope is a difference between counts, and must not see the machine's drift.
    """
    peers = {
        (count, name): model
        for count in PARAMETER_COUNTS
        for name, model in chains(count, precision, mesh, settings).items()
    }
    x = torch.rand(WIDTH, WIDTH, dtype=precision.plain) + 0.5
    gradient = torch.ones_like(x)
    # All weights are ones: a peer that computed with anything else would be timed on other work.
    for (count, name), model in peers.items():
        if not torch.equal(step(model, x, gradient)[2], x):
            raise RuntimeError(f"{name} with {count} parameters a unit computed something else than the plain module")
    return time_steps(peers, x, gradient, settings)


def beside_tensor_parallelism(settings: Settings) -> dict[str, Any]:
    """Own microseconds a unit of 4 DTensor parameters above the same model with TP alone, and ratios."""
    mesh = init_device_mesh("cpu", (settings.world_size // 2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(ParallelBlock() for _ in range(settings.units)))
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        plan = {f"{unit}.{name}": style for unit in range(settings.units) for name, style in styles.items()}
        parallelize_module(model, mesh["tp"], plan)
        return model

    plain, ours, fsdp2 = build(), build(), build()
    meshed = dataclasses.replace(config("none", [ParallelBlock], settings.world_size), mesh=mesh, shard="dp")
    polyshard.shard(ours, meshed)
    wrap_fsdp2(fsdp2, mesh["dp"], MixedPrecisionPolicy())
    x = torch.rand(WIDTH, WIDTH)
    return compare({"plain": plain, "polyshard": ours, "fsdp2": fsdp2}, x, torch.ones_like(x), settings)


def of_the_drop_in(mesh: DeviceMesh, settings: Settings) -> dict[str, Any]:
    """Own microseconds a unit of the drop-in, with DTensors and with ``flat_parameters``: precision -> count."""
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        found[precision.name] = {}
        for count in PARAMETER_COUNTS:
            peers: dict[str, nn.Module] = {
                name: nn.Sequential(*(Chain(count) for _ in range(settings.units)))
                for name in ("plain", DROP_IN, FLAT, "fsdp2")
            }
            peers["plain"].to(precision.plain)
            for name in (DROP_IN, FLAT):
                wrap_with(polyshard_fsdp2.fully_shard, peers[name], mesh, precision.fsdp2)
            wrap_fsdp2(peers["fsdp2"], mesh, precision.fsdp2)
            x = torch.rand(WIDTH, WIDTH, dtype=precision.plain) + 0.5
            found[precision.name][count] = compare(peers, x, torch.ones_like(x), settings)
    return found


def optimizer_steps(mesh: DeviceMesh, settings: Settings) -> dict[str, Any]:
    """Microseconds of one step of fused AdamW over 64 blocks of nine parameters."""
    peers = {name: nn.Sequential(*(Chain(9) for _ in range(64))) for name in (DROP_IN, FLAT, "fsdp2")}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, model in peers.items():
        wrap_with(fully_shard if name == "fsdp2" else polyshard_fsdp2.fully_shard, model, mesh, MixedPrecisionPolicy())
        parameters = polyshard.flat_parameters(model) if name == FLAT else list(model.parameters())
        optimizers[name] = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
        model(torch.ones(WIDTH, WIDTH)).sum().backward()
    times: dict[str, list[float]] = {name: [] for name in peers}
    for repeat in range(settings.rounds + 2):
        for name, optimizer in optimizers.items():
            with undisturbed():
                begin = time.process_time()
                optimizer.step()
                taken = time.process_time() - begin
            if repeat > 1:
                times[name].append(taken * 1e6)
    return {"parameters": 64 * 9, "us": {name: spread(values) for name, values in times.items()}}


def compare(peers: dict[str, nn.Module], x: torch.Tensor, gradient: torch.Tensor, settings: Settings) -> dict[str, Any]:
    """Own microseconds a unit of each of ``peers`` above "plain", and their ratios to "fsdp2"."""
    times = time_steps(peers, x, gradient, settings)
    own = {
        peer: {direction: less(times[peer], times["plain"], direction) for direction in DIRECTIONS}
        for peer in peers
        if peer != "plain"
    }
    return {
        "plain_us": {each: spread(times["plain"][each]) for each in DIRECTIONS},
        "own_us": _spreads(own),
        "ratio": {
            peer: {each: _ratio(own[peer][each], own["fsdp2"][each]) for each in DIRECTIONS}
            for peer in own
            if peer != "fsdp2"
        },
    }


def transport(count: int, precision: Precision, settings: Settings) -> dict[str, dict[str, float]]:
    """Microseconds that the pretended collectives themselves take for one unit, outside of either engine."""
    world_size = settings.world_size
    numel = count * WIDTH * WIDTH
    full = torch.ones(numel, dtype=precision.plain)
    own = full[: numel // world_size]
    wide, reduced = torch.ones(numel), torch.empty(numel // world_size)
    fake = FakeCollectives(PluginContext("fake", torch.device("cpu")), world_size=world_size)
    single = hasattr(dist, "all_gather_single") and hasattr(dist, "reduce_scatter_single")
    gather = dist.all_gather_single if single else dist.all_gather_into_tensor
    scatter = dist.reduce_scatter_single if single else dist.reduce_scatter_tensor
    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "polyshard": {
            "gather": lambda: fake.all_gather(full, own),
            "reduce": lambda: fake.reduce_scatter(reduced, full, op=ReduceOp.MEAN),
        },
        "fsdp2": {"gather": lambda: gather(full, own), "reduce": lambda: scatter(reduced, wide)},
    }
    return {
        peer: {operation: _median_us(call, settings) for operation, call in operations.items()}
        for peer, operations in calls.items()
    }


def _median_us(call: Callable[[], Any], settings: Settings) -> float:
    repeats = 50
    times = []
    with undisturbed():
        for _ in range(settings.rounds):
            begin = time.process_time()
            for _ in range(repeats):
                call()
            times.append((time.process_time() - begin) / repeats)
    return statistics.median(times) * 1e6


def wrap_from_meta(mesh: DeviceMesh, settings: Settings) -> dict[str, list[float]]:
    """Milliseconds from a meta model to initialised shards; also of wrapping alone, for a model on the CPU."""

    def build(device: str) -> nn.Sequential:
        with torch.device(device):
            return nn.Sequential(*(Block() for _ in range(settings.wrap_units)))

    def ours(model: nn.Sequential) -> None:
        polyshard.shard(model, config("bf16", [Block], settings.world_size))

    def fsdp2(model: nn.Sequential) -> None:
        wrap_fsdp2(model, mesh, PRECISIONS[1].fsdp2)

    def fsdp2_from_meta(model: nn.Sequential) -> None:
        fsdp2(model)
        model.to_empty(device="cpu")
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    ways: dict[str, tuple[str, Callable[[nn.Sequential], None]]] = {
        "polyshard from meta": ("meta", ours),
        "fsdp2 from meta": ("meta", fsdp2_from_meta),
        "polyshard from cpu": ("cpu", ours),
        "fsdp2 from cpu": ("cpu", fsdp2),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    # The first round pays for imports.
    for repeat in range(settings.wrap_rounds + 1):
        for name, (device, way) in ways.items():
            model = build(device)
            with undisturbed():
                begin = time.process_time()
                way(model)
                taken = time.process_time() - begin
            if repeat:
                times[name].append(taken * 1e3)
    return times


def less(peer: dict[str, list[float]], plain: dict[str, list[float]], direction: str) -> list[float]:
    """A peer's own time in each round."""
    return [a - b for a, b in zip(peer[direction], plain[direction], strict=True)]


def analyse(times: dict[Any, dict[str, list[float]]]) -> dict[str, Any]:
    """From ``time_chains`` to own costs, slopes and ratios, each with its spread."""
    counts = PARAMETER_COUNTS
    result: dict[str, Any] = {"own_us": {}, "plain_us": {}, "slope_us": {}, "ratio": {}}
    for direction in DIRECTIONS:
        own = {
            peer: {count: less(times[count, peer], times[count, "plain"], direction) for count in counts}
            for peer in ("polyshard", "fsdp2")
        }
        slopes = {
            peer: {
                "27 to 9": [(b - a) / 18 for a, b in zip(costs[9], costs[27], strict=True)],
                "least squares": [
                    statistics.linear_regression(counts, of_round).slope
                    for of_round in zip(*costs.values(), strict=True)
                ],
            }
            for peer, costs in own.items()
        }
        result["plain_us"][direction] = {count: spread(times[count, "plain"][direction]) for count in counts}
        result["own_us"][direction] = _spreads(own)
        result["slope_us"][direction] = _spreads(slopes)
        ratios = {f"at {count}": _ratio(own["polyshard"][count], own["fsdp2"][count]) for count in counts}
        ratios |= {f"slope, {how}": _ratio(slopes["polyshard"][how], slopes["fsdp2"][how]) for how in slopes["fsdp2"]}
        result["ratio"][direction] = ratios
    return result


def _spreads(costs: dict[str, dict[Any, list[float]]]) -> dict[str, dict[Any, dict[str, float]]]:
    return {peer: {key: spread(values) for key, values in of_peer.items()} for peer, of_peer in costs.items()}


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    return spread([mine / other for mine, other in zip(ours, theirs, strict=True)])


def environment(commit: str | None) -> dict[str, Any]:
    return {
        "command": " ".join(["python", "benchmarks/host.py", *sys.argv[1:]]),
        **provenance(commit),
        "torch": str(torch.__version__),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
    }


def table(report: dict[str, Any]) -> str:
    """The short result: own microseconds a unit, ratios, targets."""
    lines = []
    heading = f"{'':22}{'polyshard':>12}{'FSDP2':>12}{'ratio':>8}  {'q1..q3':14}{'target':>7}"
    for name, result in report["step"].items():
        lines += ["", f"{name}: own µs a unit (less the plain module's)", heading]
        for direction in DIRECTIONS:
            own, slope = result["own_us"][direction], result["slope_us"][direction]
            rows = [(f"{direction}, k={c}", f"at {c}", own["polyshard"][c], own["fsdp2"][c]) for c in own["fsdp2"]]
            rows += [
                (f"  slope, {how}", f"slope, {how}", slope["polyshard"][how], slope["fsdp2"][how])
                for how in slope["fsdp2"]
            ]
            for label, key, ours, theirs in rows:
                target = TARGETS["slope"] if key.startswith("slope") else TARGETS.get(f"{direction} {key}")
                lines.append(_row(label, ours["median"], theirs["median"], result["ratio"][direction][key], target))
        for operation in ("gather", "reduce"):
            ours, theirs = (result["transport_us"][9][peer][operation] for peer in ("polyshard", "fsdp2"))
            lines.append(f"  fake {operation + ' alone, k=9':17}{ours:12.2f}{theirs:12.2f}")
    lines += ["", "beside tensor parallelism over 2 ranks, own µs a unit of 4 DTensor parameters"]
    lines += _rows(report["tensor_parallel"], "polyshard", "", TARGETS["beside TP"])
    for name, of_counts in report["drop_in"].items():
        for peer in (DROP_IN, FLAT):
            lines += ["", f"{peer}, {name}: own µs a unit"]
            for count, result in of_counts.items():
                lines += _rows(result, peer, f", k={count}", TARGETS[peer])
    lines += ["", f"one step of fused AdamW over {report['optimizer']['parameters']} parameters, µs"]
    lines += [f"  {peer:26}{taken['median']:10.0f}" for peer, taken in report["optimizer"]["us"].items()]
    lines += ["", f"wrap {report['settings']['wrap_units']} units of 9 parameters, ms", heading]
    wrap = report["wrap"]
    for start in ("from meta", "from cpu"):
        ours, theirs = (wrap["ms"][f"{peer} {start}"]["median"] for peer in ("polyshard", "fsdp2"))
        lines.append(_row(start, ours, theirs, wrap["ratio"][start], TARGETS["wrap"] if start == "from meta" else None))
    return "\n".join(lines)


def _rows(result: dict[str, Any], peer: str, suffix: str, target: float) -> list[str]:
    medians = [[result["own_us"][each][direction]["median"] for each in (peer, "fsdp2")] for direction in DIRECTIONS]
    return [
        _row(direction + suffix, ours, theirs, result["ratio"][peer][direction], target)
        for direction, (ours, theirs) in zip(DIRECTIONS, medians, strict=True)
    ]


def _row(label: str, ours: float, theirs: float, ratio: dict[str, float], target: float | None) -> str:
    quartiles = f"{ratio['q1']:.3f}..{ratio['q3']:.3f}"
    limit = "" if target is None else f"{target:7.2f} {'ok' if ratio['median'] <= target else 'MISSED'}"
    return f"{label:22}{ours:12.2f}{theirs:12.2f}{ratio['median']:8.3f}  {quartiles:14}{limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--commit", help="recorded instead of what git says")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=6, help="steps of each peer in a round")
    parser.add_argument("--units", type=int, default=16, help="blocks of the model whose steps are timed")
    parser.add_argument("--wrap-rounds", type=int, default=9)
    parser.add_argument("--wrap-units", type=int, default=100)
    parser.add_argument("--world-size", type=int, default=8)
    given = parser.parse_args()
    settings = Settings(
        given.rounds, given.steps, 4, given.units, given.wrap_rounds, given.wrap_units, given.world_size
    )
    # A warning that is shown costs more than what is measured here.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)

    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=settings.world_size, store=FakeStore())
    report: dict[str, Any] = {
        "environment": environment(given.commit),
        "settings": asdict(settings),
        "targets": TARGETS,
        "step": {},
    }
    try:
        mesh = init_device_mesh("cpu", (settings.world_size,))
        for precision in PRECISIONS:
            print(f"stepping: {precision.name}", file=sys.stderr)
            result = analyse(time_chains(mesh, precision, settings))
            result["transport_us"] = {count: transport(count, precision, settings) for count in PARAMETER_COUNTS}
            report["step"][precision.name] = result
        print("beside tensor parallelism", file=sys.stderr)
        report["tensor_parallel"] = beside_tensor_parallelism(settings)
        print("the drop-in", file=sys.stderr)
        report["drop_in"] = of_the_drop_in(mesh, settings)
        report["optimizer"] = optimizer_steps(mesh, settings)
        print("wrapping", file=sys.stderr)
        wrap = wrap_from_meta(mesh, settings)
        report["wrap"] = {
            "ms": {name: spread(values) for name, values in wrap.items()},
            "ratio": {s: _ratio(wrap[f"polyshard {s}"], wrap[f"fsdp2 {s}"]) for s in ("from meta", "from cpu")},
        }
    finally:
        dist.destroy_process_group()
    write(report, given.out)
    print(table(report))


if __name__ == "__main__":
    main()
