"""What can be asked of ``peers.py``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import runs
from contenders import Contender, contender, peer_names
from switches import SWITCHES
from workloads import WORKLOADS, Workload

_DEFAULT_PEERS = (
    "local,ddp,fsdp1,fsdp2,fsdp2-tuned,fsdp2-keep,fsdp2-hybrid,polyshard,polyshard-keep,polyshard-auto,"
    "polyshard-captured,polyshard-no-shard,polyshard-hybrid"
)


@dataclass(frozen=True, slots=True)
class Settings:
    workloads: tuple[Workload, ...]
    contenders: tuple[Contender, ...]
    rounds: int
    steps: int | None
    warmup: int
    deadline_s: float | None
    hang_timeout_s: float
    out: Path | None
    by_step: bool
    kernels: bool

    def steps_of(self, workload: Workload) -> int:
        return self.steps if self.steps is not None else workload.steps


def make_parser(description: str | None) -> argparse.ArgumentParser:
    sizes = "\n".join(f"  {workload.describe()}" for workload in WORKLOADS.values())
    parser = runs.make_parser(
        description,
        f"workloads:\n{sizes}\n\npeers: {', '.join(peer_names())}; polyshard:forward_prefetch=2 sets what "
        "POLYSHARD_FORWARD_PREFETCH=2 would;\nNAME+compile compiles every block, NAME+compile-model the whole model;\n"
        f"polyshard:without=MECHANISM lacks one of\n{', '.join(SWITCHES)}.",
        pretends=True,
    )
    parser.add_argument("--work", help="workloads (default: host,300m,1b,8b; with --train 300m)")
    parser.add_argument("--peers", help=f"default: {_DEFAULT_PEERS}; with --train fsdp2,polyshard")
    parser.add_argument("--compile", action="store_true", help="torch.compile on every block, for all peers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed steps of a peer in a round (default: by workload)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, at least 3 (default: %(default)s)")
    parser.add_argument("--deadline", type=float, help="seconds after which no further round is begun")
    parser.add_argument("--hang-timeout", type=float, default=150.0, help="seconds for one peer in one round")
    parser.add_argument(
        "--by-step",
        action="store_true",
        help="the peers of a round are there at once and take turns at each step, so that a busy host hits all alike; "
        "says nothing about memory",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="profile one more step of each peer, and say what its kernels compute"
    )
    parser.add_argument("--train", type=int, help="compare losses over so many steps instead of timing")
    parser.add_argument("--every", type=int, default=100, help="steps between two losses of --train")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="no operation whose result differs between two runs: another in its place, or an error; slower",
    )
    return parser


def settings_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Settings:
    """What ``given`` asks for. Leaves the program, saying why, where that cannot be."""
    names = (given.work or ("300m" if given.train else "host,300m,1b,8b")).split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        parser.error(f"no workload is called {unknown[0]!r}. Workloads: {', '.join(WORKLOADS)}.")
    peers = (given.peers or ("fsdp2,polyshard" if given.train else _DEFAULT_PEERS)).split(",")
    if given.compile and given.peers is None:
        peers.remove("ddp")
    try:
        contenders = tuple(contender(name, given.compile) for name in peers)
    except ValueError as error:
        parser.error(str(error))
    if given.by_step and given.train:
        parser.error("--by-step times steps, which --train does not.")
    if given.by_step and any(peer.compiled for peer in contenders):
        parser.error("--by-step cannot have compiled peers: the compiler starts anew for each.")
    labels = [peer.name for peer in contenders]
    if len(set(labels)) < len(labels):
        parser.error(f"two peers have the same name: {', '.join(labels)}.")
    if given.warmup < 3 or given.rounds < 1 or (given.steps is not None and given.steps < 1):
        parser.error("--warmup must be at least 3, --rounds and --steps at least 1.")
    return Settings(
        tuple(WORKLOADS[name] for name in names),
        contenders,
        given.rounds,
        given.steps,
        given.warmup,
        given.deadline,
        given.hang_timeout,
        given.out,
        given.by_step,
        given.kernels,
    )
