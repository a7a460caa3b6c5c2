"""The example: its data, its settings, and short runs of the script."""

from __future__ import annotations

import importlib
import json
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import polyshard.checkpoint
import pytest
import torch
from polyshard import Strategy
from polyshard.errors import ConfigError
from processes import importing_from, run_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "byte_lm"
CONFIG = EXAMPLE / "run.toml"
#: Seconds for one run of the script.
LIMIT = 100.0
#: A model and a run that take about a second.
TINY = (
    "run.width=16",
    "run.layers=6",
    "run.heads=2",
    "run.context=16",
    "run.batch=6",
    "run.warmup=2",
    "run.eval_every=3",
    "run.eval_batches=1",
    "run.checkpoint_every=3",
    "run.sample=8",
)


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path() -> Iterator[None]:
    with importing_from(EXAMPLE):
        yield


def part(name: str) -> ModuleType:
    """The example's module ``name``."""
    return importlib.import_module(name)


def start(arguments: Sequence[str], *, ranks: int = 2, **variables: str) -> tuple[int, str]:
    """The code and the words of the script on ``ranks`` CPU processes, or on one without a launcher where that is 0."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYSHARD_")}
    environ = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    done = run_script(ranks, EXAMPLE / "train.py", ["--config", str(CONFIG), *arguments], environ, LIMIT)
    return next((code for code in done.codes if code), 0), done.output + done.errors


def changes(*settings: str) -> list[str]:
    """``--set`` for each of ``settings``."""
    return [word for setting in settings for word in ("--set", setting)]


def history(run: Path) -> dict[str, Any]:
    """What the run in folder ``run`` recorded."""
    found: dict[str, Any] = json.loads((run / "history.json").read_text())
    return found


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder that looks like a standard library, with 60 modules."""
    root = tmp_path / "lib"
    for number in range(60):
        path = root / ("package" if number % 2 else ".") / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {number}\n")
    for folder in ("site-packages", "test", "package/tests"):
        (root / folder).mkdir(parents=True)
        (root / folder / "other.py").write_text("# not for training\n")
    return root


def test_training_and_held_out_text_are_whole_files_and_share_none(library: Path) -> None:
    data = part("data")
    corpus = data.Corpus.read(library)
    train = bytes(corpus.train.tolist()).split(b"\0")
    held_out = bytes(corpus.held_out.tolist()).split(b"\0")
    assert train.pop() == held_out.pop() == b""
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(f"# {number}\n".encode() for number in range(60))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_ranks_parts_together_are_the_whole_batch(world_size: int) -> None:
    data = part("data")
    text = torch.arange(256, dtype=torch.uint8).repeat(20)
    batches = data.Batches(text, context=7, batch=12, seed=3)
    parts = [batches.part(4, rank=rank, world_size=world_size) for rank in range(world_size)]
    whole = batches.whole(4)
    for side in range(2):
        assert torch.equal(torch.cat([rows[side] for rows in parts]), whole[side])
    sizes = [len(rows[0]) for rows in parts]
    assert max(sizes) - min(sizes) <= 1
    # In this text each byte is one more than the byte before it.
    assert torch.equal(whole[1], (whole[0] + 1) % 256)


def test_the_model_of_run_toml_has_a_million_parameters_and_six_blocks_with_biases() -> None:
    settings, model = part("settings"), part("model")
    net = model.build_model(settings.load_settings(CONFIG, environ={}).run)
    assert sum(parameter.numel() for parameter in net.parameters()) >= 1_000_000
    assert len(net.blocks) >= 5
    linears = [module for module in net.modules() if isinstance(module, torch.nn.Linear)]
    assert all(linear.bias is not None for linear in linears)
    assert net.head.weight is not net.bytes.weight


def test_the_command_line_wins_over_the_environment_and_that_over_the_file() -> None:
    settings = part("settings")
    environ = {"POLYSHARD_STRATEGY": "shard_grad_op", "POLYSHARD_PRECISION": "bf16"}
    loaded = settings.load_settings(CONFIG, ["shard.strategy=no_shard", "run.steps=7", "run.lr=1"], environ=environ)
    assert loaded.shard.strategy is Strategy.NO_SHARD
    assert loaded.shard.precision == "bf16"
    assert loaded.shard.offload == "none"
    assert (loaded.run.steps, loaded.run.lr, loaded.run.width) == (7, 1, 128)
    assert not loaded.pretends


def test_fake_pretends_1024_ranks_unless_told_otherwise() -> None:
    load = part("settings").load_settings
    pretended = load(CONFIG, environ={"POLYSHARD_COLLECTIVES": "fake"})
    assert pretended.pretends
    assert pretended.shard.collectives == {"name": "fake", "world_size": 1024}
    fewer = {"POLYSHARD_COLLECTIVES": "fake", "POLYSHARD_COLLECTIVES__WORLD_SIZE": "8"}
    assert load(CONFIG, environ=fewer).shard.collectives == {"name": "fake", "world_size": 8}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.widht=64", "Did you mean 'width'"),
        ("shard.strateggy=no_shard", "Did you mean 'strategy'"),
        ("shard.strategy=none", "strategy 'none' does not exist"),
        ("steps=3", r"Write run\.NAME=VALUE"),
        ("run.steps=many", "type int"),
        ("run.steps=0", "at least 1"),
        ("run.heads=5", "not divisible by run.heads"),
        ("run.dtype=fp8", "There are: fp32, fp64"),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        part("settings").load_settings(CONFIG, [override], environ={})


@pytest.mark.nightly
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    tiny = [*changes(*TINY), "--steps", "6"]
    code, uninterrupted = start([*tiny, "--output", str(whole)])
    assert code == 0, uninterrupted
    code, stopped = start([*tiny, "--output", str(parted), "--stop-after", "3"])
    assert code == 0, stopped
    assert len(history(parted / "run-001")["train"]) == 3
    code, resumed = start([*tiny, "--output", str(parted), "--resume"])
    assert code == 0, resumed

    expected, found = history(whole / "run-001"), history(parted / "run-001")
    assert len(expected["train"]) == 6
    assert found == expected
    assert [step for step, _ in expected["held_out"]] == [0, 3, 6]
    # What the model writes depends on every parameter, the last update's as well.
    assert resumed.split("the model writes:")[1] == uninterrupted.split("the model writes:")[1]

    run = whole / "run-001"
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000006"]
    assert "tokens/s" in uninterrupted
    assert "7 units on 2 rank(s)" in uninterrupted


def test_one_flag_begins_and_goes_on_and_a_restart_goes_on_without_it(tmp_path: Path) -> None:
    checkpointing = part("checkpointing")

    def chosen(job: str, restarts: int = 0, *, resume: bool = False) -> str:
        folder: Path = checkpointing.run_folder(tmp_path, checkpointing.Launch(job, restarts), resume=resume)
        return folder.name

    # Nothing is there yet: to go on is to begin.
    assert chosen("a", resume=True) == "run-001"
    # Killed before its first checkpoint, a run begins again in its own folder, and never in that of an older job.
    assert chosen("a", 1) == "run-001"
    assert chosen("b") == "run-002"
    assert chosen("a", 2) == "run-001"
    assert chosen("b", 1, resume=True) == "run-002"
    # Of runs without a checkpoint there is none to go on in.
    assert chosen("c", resume=True) == "run-003"
    model = polyshard.shard(torch.nn.Linear(2, 2), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2}))
    polyshard.checkpoint.save(tmp_path / "run-002" / "checkpoints", 1, model)
    assert chosen("d", resume=True) == "run-002"
    assert chosen("d", 1) == "run-002"
    # A job that was killed before it had a folder.
    assert chosen("e", 1) == "run-004"


@pytest.mark.parametrize(
    ("variables", "job", "restarts"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, "x", 2),
        (
            {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"},
            f"{socket.gethostname()}-{os.getppid()}",
            1,
        ),
        ({}, f"{socket.gethostname()}-{os.getppid()}", 0),
    ],
    ids=["named", "restarted", "alone"],
)
def test_a_launch_is_what_torchrun_says(variables: dict[str, str], job: str, restarts: int) -> None:
    launch = part("checkpointing").Launch
    assert launch.from_environment(variables) == launch(job, restarts)


def pretended() -> tuple[Any, Any]:
    """A run's settings and its training, on one rank of 1024 that are pretended."""
    loaded = part("settings").load_settings(CONFIG, [*TINY, "shard.collectives=fake"], environ={})
    text = torch.zeros(100, dtype=torch.uint8)
    alone = part("ranks").Ranks(0, 1024, torch.device("cpu"), communicates=False)
    return loaded.run, part("training").Training(loaded, alone, part("data").Corpus(text, text, "one"))


@pytest.mark.parametrize("ranks_before", [0, 3], ids=["none were saved", "of three ranks"])
def test_random_numbers_that_cannot_go_on_are_told(tmp_path: Path, ranks_before: int) -> None:
    checkpointing, (run, training) = part("checkpointing"), pretended()
    states = polyshard.random_states(training.model) * ranks_before
    extra = {"step": 1, "run": asdict(run), "digest": "one", "history": training.history.as_table()}
    extra |= {"random": states} if ranks_before else {}
    directory = polyshard.checkpoint.save(tmp_path, 1, training.model, training.optimizer, extra=extra)
    drawn = torch.get_rng_state()
    found = checkpointing.load_checkpoint(directory, training.model, training.optimizer, run=run, digest="one")
    assert (found.step, found.draws_on) == (1, False)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.slow
def test_resuming_with_another_rate_or_another_text_is_refused(tmp_path: Path) -> None:
    checkpointing, (run, training) = part("checkpointing"), pretended()
    training.step(0)
    model, optimizer, history = training.model, training.optimizer, training.history
    folder = checkpointing.run_folder(tmp_path, checkpointing.Launch("a", 0), resume=False)
    checkpointing.save_checkpoint(folder, 1, model, optimizer, run=run, digest="one", history=history)

    def resumed(run: Any, digest: str) -> int:
        directory = checkpointing.latest_checkpoint(folder)
        step: int = checkpointing.load_checkpoint(directory, model, optimizer, run=run, digest=digest).step
        return step

    assert resumed(replace(run, output="elsewhere"), "one") == 1
    with pytest.raises(ConfigError, match=r"run\.lr was 0\.004 and is 0\.1"):
        resumed(replace(run, lr=0.1), "one")
    with pytest.raises(ConfigError, match="the standard library differs"):
        resumed(run, "another")


@pytest.mark.nightly
def test_verify_passes_on_three_ranks_and_prints_what_it_measured() -> None:
    small = changes("run.width=16", "run.context=16", "run.layers=2", "run.batch=6")
    code, said = start(["--verify", "--dtype", "fp64", "--offload", "cpu", *small], ranks=3)
    assert code == 0, said
    assert "20 AdamW steps on 3 rank(s), fp64 parameters" in said
    assert "PASS" in said
    apart = next(line for line in said.splitlines() if "difference in parameters" in line)
    assert float(apart.split()[4]) <= 1e-10


@pytest.mark.slow
def test_one_pretended_rank_of_1024_says_what_memory_it_needs() -> None:
    code, said = start([], ranks=0, POLYSHARD_COLLECTIVES="fake")
    assert code == 0, said
    assert "memory of rank 0 of 1,024" in said
    rows = {
        line.split("│")[1].strip(): int(line.split("│")[2].replace(",", ""))
        for line in said.splitlines()
        if line.count("│") == 4
    }
    settings, model = part("settings"), part("model")
    shapes = [each.shape for each in model.build_model(settings.load_settings(CONFIG, environ={}).run).parameters()]
    # In fp32, one 1024th of each parameter's rows, rounded up, from a multiple of 16 bytes on.
    parts = [4 * -(-shape[0] // 1024) * math.prod(shape[1:]) for shape in shapes]
    shard = rows["parameters: this rank's shards"]
    assert sum(parts) <= shard <= sum(-(-nbytes // 16) * 16 for nbytes in parts)
    assert rows["optimizer state (AdamW)"] == 2 * shard
    assert rows["total"] == sum(nbytes for name, nbytes in rows.items() if name != "total")


@pytest.mark.slow
def test_without_torchrun_the_script_says_how_to_launch_it() -> None:
    code, said = start([], ranks=0, RANK="")
    assert code == 2
    assert "torchrun --standalone --nproc-per-node 2" in said
    assert "Traceback" not in said
