"""Trains a byte-level language model, sharded by polyshard. Launched by torchrun; ``README.md`` shows how."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import polyshard
import torch
from checkpointing import Launch, latest_checkpoint, load_checkpoint, run_folder, save_checkpoint
from data import Corpus
from history import draw_curve
from model import generate
from polyshard.errors import ConfigError
from progress import Progress, make_progress, show_memory
from ranks import Ranks, join_ranks
from settings import Settings, load_settings
from training import Training
from verify import verify

#: Flags that are short for ``--set``.
_SHORTHANDS = {
    "steps": "run.steps",
    "dtype": "run.dtype",
    "output": "run.output",
    "collectives": "shard.collectives",
    "precision": "shard.precision",
    "offload": "shard.offload",
    "strategy": "shard.strategy",
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked on the command line; ``overrides`` holds all that changes a setting."""
    parser = argparse.ArgumentParser(description="Train a byte-level language model, sharded by polyshard.")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("run.toml"), help="a TOML file")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the latest checkpoint, or begin where there is none"
    )
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save and leave after this step")
    parser.add_argument(
        "--verify", action="store_true", help="compare with an unsharded copy; exit code 1 if it differs"
    )
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="TABLE.NAME=VALUE", help="change any setting"
    )
    for flag, setting in _SHORTHANDS.items():
        parser.add_argument(f"--{flag}", metavar="VALUE", help=f"short for --set {setting}=VALUE")
    parsed = parser.parse_args(arguments)
    given = vars(parsed)
    parsed.overrides += [f"{name}={given[flag]}" for flag, name in _SHORTHANDS.items() if given[flag] is not None]
    return parsed


def pretend(settings: Settings, ranks: Ranks, corpus: Corpus) -> None:
    """Run a few steps of one rank of a world that is not there, and say what memory such a rank needs."""
    run = settings.run
    training = Training(settings, ranks, corpus)
    print(describe(training))
    print("the other ranks are pretended: losses mean nothing, shapes, memory and the order of work do")
    for step in range(run.steps):
        began = time.perf_counter()
        training.step(step)
        print(f"step {step + 1}/{run.steps}  {time.perf_counter() - began:.3f} s", flush=True)
    show_memory(polyshard.report(training.model))


def describe(training: Training) -> str:
    """One line on what runs where."""
    report, ranks = polyshard.report(training.model), training.ranks
    where = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "CPU"
    nccl = ""
    if ranks.device.type == "cuda":
        nccl = f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]
    return (
        f"{report.parameters:,} parameters in {report.units} units on {ranks.world_size:,} rank(s), {where}; "
        f"{training.batch} x {training.run.context} bytes a step; torch {torch.__version__}{nccl}"
    )


def train(settings: Settings, ranks: Ranks, corpus: Corpus, progress: Progress, arguments: argparse.Namespace) -> int:
    """Train from the first step or the latest checkpoint to the end, then draw the curve and let the model write.

    Returns the exit code: 0, or that of a run which a signal ended behind a checkpoint.
    """
    run = settings.run
    output = Path(run.output)
    training = Training(settings, ranks, corpus)
    progress.note(describe(training))
    first = 0
    chosen = None
    if ranks.is_first:
        mine = run_folder(output, Launch.from_environment(), resume=arguments.resume)
        chosen = mine, latest_checkpoint(mine)
    # One rank decides: what two see in one folder may differ.
    chosen = ranks.from_first(chosen)
    assert chosen is not None
    folder, checkpoint = chosen
    if checkpoint is not None:
        loaded = load_checkpoint(
            checkpoint,
            training.model,
            training.optimizer,
            run=run,
            digest=corpus.digest,
        )
        first, training.history = loaded.step, loaded.history
        progress.note(f"going on in {folder} after step {first}")
        if not loaded.draws_on:
            progress.note("random numbers begin anew: other ranks than these saved theirs")

    def save(step: int) -> None:
        saved = save_checkpoint(
            folder,
            step,
            training.model,
            training.optimizer,
            run=run,
            digest=corpus.digest,
            history=training.history,
        )
        progress.note(f"saved {saved}")

    last = min(run.steps, arguments.stop_after or run.steps)
    with progress, polyshard.tell_failures(training.model), polyshard.Preemption(training.model) as preemption:
        done = training.train(first, last, progress, save, preemption)
    if done < last:
        progress.note(f"a signal ended the run behind step {done}, which is saved: go on with --resume")
        return preemption.exit_code
    if ranks.is_first:
        (folder / "history.json").write_text(json.dumps(training.history.as_table()), encoding="utf-8")
        draw_curve(
            training.history, folder / "curve.png", f"{settings.shard.strategy.value}, {ranks.world_size} rank(s)"
        )
        progress.note(f"loss curve in {folder / 'curve.png'}")
    text = generate(
        training.model,
        run.prompt.encode(),
        run.sample,
        context=run.context,
        temperature=run.temperature,
        seed=run.seed,
        device=ranks.device,
    )
    progress.note(f"the model writes:\n{shown(text)}")
    return 0


def shown(text: bytes) -> str:
    """``text`` without what a terminal would obey, or could not show."""
    return "".join(
        char if char in "\n\t" or (char.isascii() and char.isprintable()) else "?" for char in map(chr, text)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks; returns the process's exit code."""
    parsed = parse_arguments(arguments)
    try:
        settings = load_settings(parsed.config, parsed.overrides, verify=parsed.verify)
        with join_ranks(settings) as ranks:
            corpus = Corpus.read()
            if settings.pretends and parsed.verify:
                raise ConfigError("pretended ranks add nothing true to a sum: --verify needs real ones. Use torchrun.")
            if settings.pretends:
                pretend(settings, ranks, corpus)
                return 0
            progress = make_progress(settings.run.steps, shown=ranks.is_first)
            if parsed.verify:
                return 0 if verify(settings, ranks, corpus, progress) else 1
            return train(settings, ranks, corpus, progress, parsed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
