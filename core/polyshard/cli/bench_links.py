"""``polyshard bench-links``: what ``plan`` reads as ``--links``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .. import registry
from ..errors import ConfigError
from ..forecast.bench import ROUNDS, SIZES, bench_machine
from ..forecast.links import LinkModel
from ..interfaces import Collectives, Group, PluginContext, bytes_of
from .tables import print_table

_LAUNCH = "torchrun --standalone --nproc-per-node 2 -m polyshard bench-links --out links.json"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    parser = commands.add_parser(
        "bench-links",
        help="measure latency and bandwidth of gathers and reductions, for plan",
        description=f"Every rank runs it: {_LAUNCH}",
    )
    parser.add_argument("--out", metavar="FILE", help="write the links there, from rank 0")
    parser.add_argument("--collectives", default="auto", metavar="NAME", help="which to time (default: %(default)s)")
    parser.add_argument(
        "--sizes",
        default=",".join(str(size) for size in SIZES),
        metavar="BYTES,...",
        help="of whole buffers, such as '1 MiB,16 MiB' (default: 1 MiB to 256 MiB)",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each size (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--name", default="measured", help="what to call them (default: %(default)s)")
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    sizes = _sizes_of(arguments.sizes)
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds is {arguments.rounds}; give 1 or more.")
    if "RANK" not in os.environ:
        raise ConfigError(f"bench-links times several ranks, and this is one process. Start them together: {_LAUNCH}")
    if arguments.out and not Path(arguments.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {arguments.out!r}: there is no such folder.")
    ranks_per_host = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    with _collectives(arguments.collectives, _device(arguments.device)) as collectives:
        source = (
            f"bench-links: {collectives.world_size} ranks, collectives {arguments.collectives!r}, "
            f"{_described(collectives)}, torch {torch.__version__}"
        )
        links = bench_machine(collectives, ranks_per_host, arguments.name, source, sizes, arguments.rounds)
        if collectives.rank == 0:
            if arguments.out:
                Path(arguments.out).write_text(links.to_json(), encoding="utf-8")
            _print(links)
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


def _described(collectives: Collectives) -> str:
    device = collectives.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


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


def _print(links: LinkModel) -> None:
    rows = [("operation", "ranks", "where", "latency us", "GB/s received")]
    for where, those in (("inside a host", links.inside), ("between hosts", links.between)):
        rows += [
            (each.operation.value, str(each.ranks), where, f"{each.latency_s * 1e6:.1f}", f"{each.bandwidth / 1e9:.2f}")
            for each in those
        ]
    print_table(rows)
    sys.stdout.flush()
