"""Runs ``--verify`` in every combination that the project promises, and prints one table for each number of ranks.

``python examples/byte_lm/verify_all.py [RANKS ...]``; 2 and 3 ranks where none is given. Exit code 1 on a failure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from data import Corpus
from ranks import join_ranks
from rich.console import Console
from rich.table import Table
from settings import Settings, load_settings
from verify import bounds_for, compare

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
_OFFLOADS = ("none", "cpu")
_DTYPES = (("fp64", "none"), ("fp32", "none"), ("fp32", "bf16"))


def combinations() -> list[tuple[tuple[str, ...], Settings]]:
    """Each combination's settings, and what is written before its figures."""
    config = Path(__file__).with_name("run.toml")
    made: list[tuple[tuple[str, ...], Settings]] = []
    for strategy, offload, (dtype, precision) in product(_STRATEGIES, _OFFLOADS, _DTYPES):
        changes = (
            f"shard.strategy={strategy}",
            f"shard.offload={offload}",
            f"shard.precision={precision}",
            f"run.dtype={dtype}",
        )
        made.append(((strategy, offload, dtype, precision), load_settings(config, changes, verify=True)))
    return made


def run_rank() -> bool:
    """Compare in every combination, as one rank of those that torchrun started; whether all of them passed."""
    passed = True
    made = combinations()
    with join_ranks(made[0][1]) as ranks:
        corpus = Corpus.read()
        table = Table(title=f"{ranks.world_size} ranks on {ranks.device.type}", title_justify="left")
        for name in ("strategy", "offload", "parameters", "precision"):
            table.add_column(name)
        for name in ("loss apart", "of the loss", "parameters apart", "moved"):
            table.add_column(name, justify="right")
        table.add_column("result")
        for labels, settings in made:
            found = compare(settings, ranks, corpus)
            failures = found.failures(bounds_for(settings))
            passed = passed and not failures
            figures = (found.loss, found.relative_loss, found.parameters, found.movement)
            table.add_row(*labels, *(f"{figure:.1e}" for figure in figures), "; ".join(failures) or "pass")
        if ranks.is_first:
            # Wide enough for every column where there is no terminal, whose width would otherwise be taken as 80.
            Console(width=None if sys.stdout.isatty() else 140).print(table)
    return passed


def main() -> int:
    """Start the ranks, or be one of them; returns the process's exit code."""
    if "RANK" in os.environ:
        return 0 if run_rank() else 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="*", default=[2, 3], help="numbers of ranks to try")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    codes = [subprocess.run([*launch, str(count), __file__]).returncode for count in parser.parse_args().ranks]
    return 0 if not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
