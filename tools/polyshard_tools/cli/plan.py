"""``polyshard plan``: what a training step would take. ``polyshard bench-links``: the links that it reads."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from polyshard import registry
from polyshard.errors import ConfigError
from polyshard.interfaces import Collectives, Group, PluginContext, bytes_of
from polyshard.pipelining import Gathers

from ..forecast import (
    BatchMaker,
    Kind,
    OptimizerModel,
    Order,
    Pipeline,
    PipelinePlan,
    Plan,
    RunOptimizer,
    ShapedBatches,
    batches_of,
    find_device,
    find_links,
    find_optimizer,
    plan,
    plan_pipeline,
)
from ..forecast.bench import bench_machine
from ..forecast.plan import draw
from ..forecast.timing import LinkModel
from ..pictures import require_drawable
from .output import Ink, inked, print_json, print_table
from .parser import LAUNCH
from .shared import (
    config_of,
    function_at,
    importing_beside,
    model_of,
    shown_progress,
)

#: Exit code of a step that does not fit.
DOES_NOT_FIT = 3
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def _pipeline_of(arguments: argparse.Namespace) -> Pipeline | None:
    """What the options say of a pipeline; ``arguments`` then are those of one stage's ranks."""
    outermost, _, others = (arguments.mesh or "").partition(",")
    name, _, size = outermost.partition("=")
    in_mesh = name.strip() == "pp"
    if arguments.schedule is None:
        if arguments.pp is not None:
            raise ConfigError("--pp is of no use without --schedule, which says in which order stages run.")
        return None
    if in_mesh == (arguments.pp is not None) or (arguments.mesh is not None and not in_mesh):
        raise ConfigError("--schedule needs the number of ranks with other stages: --pp, or 'pp=N,' first in --mesh.")
    ranks = int(size) if in_mesh and size.strip().isdecimal() else arguments.pp or 0
    found = Pipeline(
        Order(arguments.schedule), ranks, arguments.microbatches, arguments.pp_stages, Gathers(arguments.gathers)
    )
    if in_mesh:
        arguments.mesh = ",".join(["pp=1", *filter(None, [others])])
    elif arguments.world_size % ranks:
        raise ConfigError(f"--world-size {arguments.world_size} is no multiple of --pp {ranks}. Change one of them.")
    else:
        arguments.world_size //= ranks
    return found


def plan_step(arguments: argparse.Namespace) -> int:
    if arguments.picture:
        require_drawable(arguments.picture)
        if not arguments.batch:
            raise ConfigError("--picture has no step to draw without --batch.")
    pipeline = _pipeline_of(arguments)
    config, world_size = config_of(arguments)
    if arguments.links and not arguments.device:
        raise ConfigError("--links is of no use without --device: nothing is timed. Name a device, or leave it out.")
    if arguments.batch_size is not None and not arguments.batch:
        raise ConfigError("--batch-size is of no use without --batch, which says what a sample is.")
    if arguments.microbatches != 1 and not arguments.batch:
        raise ConfigError("--microbatches is of no use without --batch: no forward is run.")
    # Prints of the user's modules would stand in front of the JSON.
    with importing_beside(arguments.file), redirect_stdout(sys.stderr), shown_progress("Planning a step", "samples"):
        batch, samples = _batch_of(arguments)
        device = find_device(arguments.device) if arguments.device else None
        memory = _memory_of(arguments.device_memory)
        known: dict[str, Any] = {
            "batch": batch,
            "samples": samples,
            "device": device,
            "memory_nbytes": memory,
            "links": find_links(arguments.links) if arguments.links else None,
            "largest": batch is not None and (device is not None or memory is not None),
        }
        stages: PipelinePlan | None = None
        if pipeline is not None:
            if batch is None:
                raise ConfigError("--schedule needs --batch, one microbatch.")
            stages = plan_pipeline(
                config,
                lambda number, stages: model_of(arguments, number, stages),
                world_size * pipeline.ranks,
                pipeline,
                optimizer=lambda: _optimizer_of(arguments.optimizer),
                **known,
            )
            found = stages.worst
        else:
            model, optimizer = model_of(arguments), _optimizer_of(arguments.optimizer)
            found = plan(config, model, world_size, microbatches=arguments.microbatches, optimizer=optimizer, **known)
    if arguments.picture:
        draw(found, arguments.picture)
    if arguments.json:
        print_json((stages or found).to_dict())
    else:
        if stages is not None:
            _print_pipeline(stages)
        _print(found)
    return DOES_NOT_FIT if found.fits is False else 0


def _batch_of(arguments: argparse.Namespace) -> tuple[BatchMaker | None, int]:
    text, samples = arguments.batch, arguments.batch_size
    if text is None:
        return None, 1
    if "[" not in text and ":" in text:
        return batches_of(function_at(text, "--batch"), text), 1 if samples is None else samples
    shaped = ShapedBatches.parse(text)
    return shaped, shaped.samples if samples is None else samples


def _optimizer_of(name: str) -> OptimizerModel:
    return RunOptimizer(function_at(name, "--optimizer"), name) if ":" in name else find_optimizer(name)


def _memory_of(text: str | None) -> int | None:
    if text is None:
        return None
    nbytes = bytes_of(int(text) if text.isdecimal() else text)
    if nbytes is None or nbytes <= 0:
        raise ConfigError(f"--device-memory must be bytes above 0, a number or text such as '80 GiB', not {text!r}.")
    return nbytes


def _print(found: Plan) -> None:
    ranks = f"{found.world_size} ranks" if found.world_size > 1 else "1 rank"
    print(
        f"{found.model} on {ranks}: {found.parameters:,} parameters in {found.units} units, {found.padding:,} elements "
        "of padding\n"
    )
    for over, units in found.over.items():
        print(f"over {over}: {', '.join(units)}")
    if found.over:
        print()
    size, unit = _unit_of(found.peak_nbytes)
    _print_memory(found, size, unit)
    _print_groups(found, size, unit)
    if found.traffic:
        print()
        named = any(row.over for row in found.traffic)
        rows: list[tuple[str, ...]] = [
            ("collective", *["over"] * named, "ranks", "launches", "collectives", f"{unit} received")
        ]
        for row in found.traffic:
            group = (row.over or "-",) if named else ()
            numbers = str(row.ranks), str(row.launches), str(row.collectives), f"{row.received_nbytes / size:.2f}"
            rows.append((row.operation.value, *group, *numbers))
        print_table(rows)
    _print_time(found)
    for note in found.notes:
        print(f"\nNote: {note}")
    _print_verdict(found)


def _print_pipeline(found: PipelinePlan) -> None:
    pipeline = found.pipeline
    size, unit = _unit_of(found.worst.peak_nbytes)
    print(
        f"{pipeline.stages} stages over {pipeline.ranks} ranks, {pipeline.order.value}, {pipeline.microbatches} "
        f"microbatches: ranks wait {pipeline.bubble:.1%} of a step where all stages take as long\n"
    )
    rows: list[tuple[str, ...]] = [("ranks", "stages", "in flight", "parameters", f"{unit} at the peak")]
    for each in found.ranks:
        ranks = f"{each.ranks[0]}" if len(each.ranks) == 1 else f"{each.ranks[0]} to {each.ranks[-1]}"
        numbers = ", ".join(map(str, each.stages))
        more = ", ..." if len(each.ranks) > 1 else ""
        peak = f"{each.plan.peak_nbytes / size:.2f}"
        rows.append((ranks, f"{numbers}{more}", str(each.in_flight), f"{each.plan.parameters:,}", peak))
    print_table(rows)
    time = found.time
    if time is not None:
        waits = " and ".join(f"{share:.1%}" for share in (min(time.waits), max(time.waits)))
        print(
            f"\n{time.device_s * 1e3:.1f} ms a step on {found.worst.device}; ranks wait for others between {waits} of "
            "it. What follows of one rank is its own time."
        )
        if time.step_s > time.device_s:
            print(f"The host needs about {time.step_s * 1e3:.0f} ms, so it decides.")
    print()


def _print_memory(found: Plan, size: int, unit: str) -> None:
    rows = [(f"memory of rank {found.rank}", f"{unit} at the peak", f"{unit} at most")]
    for kind in Kind:
        if found.most[kind]:
            rows.append((kind.value, f"{found.peak[kind] / size:.2f}", f"{found.most[kind] / size:.2f}"))
    rows.append(("total", f"{found.peak_nbytes / size:.2f}", ""))
    print_table(rows)
    if found.saved_nbytes is not None:
        print(
            f"\nThe peak is in the {found.peak_part}. {found.saved_nbytes / size:.2f} {unit} are saved for the "
            "backward."
        )


def _print_groups(found: Plan, size: int, unit: str) -> None:
    """The units over each group of a mesh, beside those over the others."""
    if not found.over:
        return
    rows: list[tuple[str, ...]] = [
        (f"{unit} of units over", "parts of", "units", "parameters", "gradients", "optimizer", "gather buffers")
    ]
    for group in found.groups:
        sizes = group.parameters_nbytes, group.gradients_nbytes, group.optimizer_nbytes, group.gathered_nbytes
        shown = (f"{nbytes / size:.2f}" for nbytes in sizes)
        rows.append((group.over or "-", group.parts or "-", str(group.units), *shown))
    print()
    print_table(rows)


def _print_time(found: Plan) -> None:
    time = found.time
    if time is None:
        return
    parts = ", ".join(f"{part.value} {seconds * 1e3:.1f}" for part, seconds in time.parts_s.items())
    print(f"\n{time.device_s * 1e3:.1f} ms a step on {found.device}: {parts}. {time.flops / 1e12:.2f} TFLOP.")
    print(
        f"Compute waits {time.waited_s * 1e3:.1f} ms for other streams, and is slowed by {time.delayed_s * 1e3:.1f} "
        f"ms. Links: {found.links}."
    )
    if time.host_s > time.device_s:
        print(
            f"The host needs about {time.host_s * 1e3:.0f} ms to issue {time.launches} launches one by one, so it "
            "decides: hosts differ by half of that. A step in a CUDA graph does not wait for it."
        )


def _print_verdict(found: Plan) -> None:
    if found.memory_nbytes is None:
        return
    verdict, ink = {
        True: ("It fits", Ink.GREEN),
        False: ("It does not fit", Ink.RED),
        None: ("Without activations it takes", None),
    }[found.fits]
    colon = "" if found.fits is None else ":"
    largest = f" The largest batch that does is {found.largest_samples}." if found.largest_samples else ""
    if found.largest_samples == 0:
        largest = " No batch does."
    print(f"\n{inked(verdict, ink)}{colon} {_shown(found.peak_nbytes)} of {_shown(found.memory_nbytes)}.{largest}")


def _unit_of(nbytes: int) -> tuple[int, str]:
    return next((each for each in _UNITS if nbytes >= each[0]), _UNITS[-1])


def _shown(nbytes: int) -> str:
    size, unit = _unit_of(nbytes)
    return f"{nbytes / size:.2f} {unit}"


def bench_links(arguments: argparse.Namespace) -> int:
    sizes = _sizes_of(arguments.sizes)
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds is {arguments.rounds}; give 1 or more.")
    if "RANK" not in os.environ:
        raise ConfigError(f"bench-links times several ranks, and this is one process. Start them together: {LAUNCH}")
    if arguments.out and not Path(arguments.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {arguments.out!r}: there is no such folder.")
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    with _collectives(arguments.collectives, _device(arguments.device)) as collectives:
        on_cuda = collectives.device.type == "cuda"
        device = torch.cuda.get_device_name(collectives.device) if on_cuda else "CPU"
        source = (
            f"bench-links: {collectives.world_size} ranks, collectives {arguments.collectives!r}, "
            f"{device}, torch {torch.__version__}"
        )
        with shown_progress("Timing links", "timings", collectives.rank):
            links = bench_machine(collectives, ranks_per_host, arguments.name, source, sizes, arguments.rounds)
        if collectives.rank == 0:
            if arguments.out:
                Path(arguments.out).write_text(links.to_json(), encoding="utf-8")
            print(links.to_json(), end="") if arguments.json else _print_links(links)
    return 0


@contextmanager
def _collectives(name: str, device: torch.device) -> Iterator[Collectives]:
    """The named ones over all ranks of the launch."""
    resolved = registry.resolve(Group.COLLECTIVES, name)
    began = not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=5))
    try:
        made = registry.construct(resolved, PluginContext(resolved.name, device)).instance
        assert isinstance(made, Collectives)
        try:
            yield made
        finally:
            made.close()
    finally:
        if began:
            dist.destroy_process_group()


def _device(kind: str | None) -> torch.device:
    if kind == "cpu" or (kind is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device here. Leave it out, or give cpu.")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _sizes_of(text: str) -> tuple[int, ...]:
    found = []
    for word in text.split(","):
        nbytes = bytes_of(int(word) if word.strip().isdecimal() else word)
        if nbytes is None or nbytes <= 0:
            raise ConfigError(f"--sizes: {word!r} is no number of bytes. Write such as '1 MiB,16 MiB'.")
        found.append(nbytes)
    if len(set(found)) < 2:
        raise ConfigError(f"--sizes {text!r}: latency and bandwidth take two sizes or more.")
    return tuple(found)


def _print_links(links: LinkModel) -> None:
    rows = [("operation", "ranks", "where", "latency us", "GB/s received")]
    for where, those in (("inside a host", links.inside), ("between hosts", links.between)):
        rows += [
            (each.operation.value, str(each.ranks), where, f"{each.latency_s * 1e6:.1f}", f"{each.bandwidth / 1e9:.2f}")
            for each in those
        ]
    print_table(rows)
    sys.stdout.flush()
