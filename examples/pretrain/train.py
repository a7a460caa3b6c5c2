"""Pretrains a Llama on local text, sharded by polyshard. Launched by torchrun; ``README.md`` shows how."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import polyshard
import torch
from checkpointing import Checkpoints, keeps_ranks, load, require_same
from documents import Files
from export import export
from metrics import flops_per_token, matmul_parameters, readable
from model import Config, build_on_meta, model_config
from parallel import make_mesh
from polyshard.errors import ConfigError
from ranks import Ranks, join_ranks, pretend_ranks
from report import Reporter, Silent, make_reporter
from settings import Settings, load_settings
from sharding import build_sharded
from tokenizers import Tokenizer
from tokens import Tokens, prepare
from trackers import make_trackers, require_trackers
from training import Training

#: AdamW keeps two tensors of a parameter's size.
_ADAMW_STATES = 2


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pretrain a Llama on local text, sharded by polyshard.")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("llama_toy.toml"), help="a TOML file")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="TABLE.NAME=VALUE", help="change any setting"
    )
    parser.add_argument("--prepare", action="store_true", help="without torchrun: make the tokens, and leave")
    parser.add_argument("--stop-after", type=_positive, metavar="STEP", help="save and leave after this step")
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="go on from a checkpoint of other settings, text or number of ranks",
    )
    parser.add_argument(
        "--dry-run",
        type=_positive,
        metavar="RANKS",
        help="without torchrun: check the settings for so many ranks, say what one of them needs, and leave",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return int(text)


def train(settings: Settings, ranks: Ranks, arguments: argparse.Namespace) -> int:
    """Train from the first step or the newest checkpoint to the end, then export.

    Returns the exit code: 0, or that of a run which a signal ended behind a checkpoint.
    """
    code = 0
    output = Path(settings.output.folder)
    settings = settings.at(ranks.world_size)
    settings.microbatches(ranks.world_size)
    require_trackers(settings.output)
    tokens = Tokens.read(ranks.from_first(lambda: prepare(settings.data)))
    training = Training(settings, ranks, tokens)
    checkpoints = Checkpoints(output, settings)
    notes = [describe(training.config, settings, ranks.world_size)]
    directory = checkpoints.latest(ranks)
    if directory is not None:
        progress = load(directory, training.models, training.optimizers, settings)
        changes = progress.changes(settings, ranks, tokens.digest)
        if not arguments.accept_changes:
            require_same(changes, directory, any_ranks=settings.checkpoint.any_ranks)
        training.go_on(progress, changes)
        notes += [f"going on from {directory}", *(f"accepted: {change}" for change in changes.values())]
        if not keeps_ranks(changes):
            notes.append("random numbers begin anew: ranks share the run in another way")
    reporter: Reporter = Silent()
    if ranks.is_first:
        trackers = make_trackers(settings.output, settings.deciding(), training.done)
        reporter = make_reporter(settings.training.steps, training.done, trackers)
    with reporter:
        for note in notes:
            reporter.note(note)
        last = min(settings.training.steps, arguments.stop_after or sys.maxsize)
        with ExitStack() as stack:
            for model in training.models:
                stack.enter_context(polyshard.tell_failures(model))
            preemption = stack.enter_context(polyshard.Preemption(training.models[0]))
            training.train(last, reporter, checkpoints, preemption)
        if training.done < last:
            reporter.note(
                f"a signal ended the run behind step {training.done}, which is saved: start it again to go on"
            )
            code = preemption.exit_code
        elif settings.output.export and training.done >= settings.training.steps:
            export(training.models[0], tokens, output / "model", ranks)
            reporter.note(f"{output / 'model'} is for from_pretrained")
    for model in training.models:
        polyshard.close(model)
    return code


def describe(config: Config, settings: Settings, world_size: int) -> str:
    """What runs, in two lines."""
    training, experts = settings.training, settings.model.num_local_experts
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    name = f"Mixtral of {experts} experts a block, a token meets" if experts else "Llama of"
    mesh = " x ".join(f"{dim} {size}" for dim, size in settings.parallel.sizes(world_size).items() if size > 1)
    accumulation = settings.microbatches(world_size)
    return (
        f"{name} {matmul_parameters(config):,} parameters without embeddings on {world_size:,} rank(s)"
        f"{f' ({mesh})' if mesh else ''}, {device}, {settings.shard.strategy.value}; "
        f"{flops_per_token(config, training.context):,} FLOPs a token\n"
        f"a step: {training.batch} sequences of {training.context} tokens, in {accumulation} microbatch(es) of "
        f"{training.microbatch} a rank; torch {torch.__version__}"
    )


def dry_run(settings: Settings, world_size: int) -> None:
    """Check what can be checked without other ranks, and say what a rank of ``world_size`` needs."""
    files = Files.find(settings.data)
    settings = settings.at(world_size)
    training = settings.training
    accumulation = settings.microbatches(world_size)
    given = settings.data.tokenizer
    vocabulary = Tokenizer.from_file(given).get_vocab_size() if given else settings.data.vocabulary
    config = model_config(settings, vocabulary, 0)
    # Of all ranks only this one is there. On a GPU its share may be smaller than a whole unit: the CPU has room.
    pretended = dataclasses.replace(settings, shard=dataclasses.replace(settings.shard, collectives="fake"))
    device = torch.device("cpu")
    with pretend_ranks(world_size):
        mesh = make_mesh(settings.parallel, world_size, device)
        stages = settings.parallel.pp * settings.parallel.pp_stages
        reports = [
            polyshard.report(build_sharded(pretended, config, device, mesh, stage=(number, stages)))
            for number in range(stages)
        ]
    print(describe(config, settings, world_size))
    print(
        f"text: {len(files.train)} files to learn from, {len(files.held_out)} held out, {readable(files.nbytes)}; all "
        f"{training.steps:,} steps are trained on {training.steps * training.tokens_per_step:,} tokens"
    )
    # The report has this rank's parts of them alone.
    parameters = sum(parameter.numel() for parameter in build_on_meta(config).parameters())
    taken = [report.total_nbytes(_ADAMW_STATES) for report in reports]
    # Of the rank whose stages need most.
    worst = max(sum(taken[place :: settings.parallel.pp]) for place in range(settings.parallel.pp))
    print(
        f"memory of a rank, activations aside: {readable(worst)}; {parameters:,} parameters in "
        f"{sum(report.units for report in reports)} units"
    )
    print(f"checkpoints of {readable(parameters * 4 * (1 + _ADAMW_STATES))}, {settings.checkpoint.keep} kept")
    if accumulation > 1:
        print("gradients of the whole model wait on each rank: more than one microbatch a step")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks; returns the process's exit code."""
    parsed = parse_arguments(arguments)
    # torchdata 0.11 tells torch what it uses, in a way that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    try:
        settings = load_settings(parsed.config, parsed.overrides)
        if parsed.prepare:
            print(f"tokens are in {prepare(settings.data)}")
            return 0
        if parsed.dry_run is not None:
            dry_run(settings, parsed.dry_run)
            return 0
        with join_ranks(settings.shard) as ranks:
            return train(settings, ranks, parsed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
