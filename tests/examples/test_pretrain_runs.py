"""Whole runs of the second example on processes: against a plain model, taken up again, and exported."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import tensors_in
from plain_pretraining import plain_run
from processes import Finished, importing_from, run_script
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain"
STEPS = 6
#: A model and a run of seconds, with all that may change numbers.
TINY = {
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 3,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "data.files": f"{ROOT}/*.md",
    "data.vocabulary": 300,
    "training.steps": STEPS,
    "training.context": 16,
    "training.batch": 8,
    "training.microbatch": 2,
    "optimizer.lr": 0.01,
    # Where a gradient is all rounding, Adam's step is a sign of it, unless this is greater.
    "optimizer.eps": 1e-4,
    "optimizer.clip": 0.5,
    "schedule.warmup": 2,
    "activation_checkpointing.mode": "selective",
    "activation_checkpointing.every": 2,
    "evaluation.every": 3,
    "evaluation.batches": 1000,
    "checkpoint.every": 3,
}

pytestmark = pytest.mark.slow


def arguments(folder: Path) -> list[str]:
    """The command line of a run in ``folder``."""
    texts = {"data.held_out": f"{folder.parent}/held_out.txt", "data.cache": f"{folder.parent}/tokens"}
    settings = {**TINY, **texts, "output.folder": f"{folder}"}
    changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["--config", str(EXAMPLE / "llama_toy.toml"), *changes]


def start(ranks: int, words: Sequence[str], script: Path = EXAMPLE / "train.py") -> Finished:
    """Run the script on ``ranks`` CPU processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("POLYSHARD_")}
    environ = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return run_script(ranks, script, words, environ, 100.0)


def scalars(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard shows of the run in ``folder``, by step."""
    # Here, since it takes long and most runs of the tests do without.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    return {event.step: event.value for event in board.Scalars(name)}


class Run(NamedTuple):
    """A run of two ranks that never stopped."""

    folder: Path
    ended: Finished


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All steps, with checkpoints after the third and the sixth."""
    folder = tmp_path_factory.mktemp("pretrain") / "whole"
    # Batches of four sequences on two ranks, and a last one that leaves the second rank with nothing.
    # Characters of two bytes that no page has, so that no change of a page joins them into fewer tokens.
    (folder.parent / "held_out.txt").write_text("\u0133\u0167\u0142" * 70)
    ended = start(2, arguments(folder))
    assert ended.codes == [0, 0], ended
    return Run(folder, ended)


@pytest.fixture
def example() -> Iterator[None]:
    with importing_from(EXAMPLE):
        yield


def stopped(whole: Run, name: str) -> Path:
    """What was left of the run, had it been killed behind its third step."""
    folder = whole.folder.parent / name
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    return folder


@pytest.mark.usefixtures("example")
def test_two_ranks_train_as_one_process_with_plain_torch_does(whole: Run) -> None:
    from settings import load_settings
    from tokens import Tokens

    words = [f"{name}={value}" for name, value in TINY.items()]
    settings = load_settings(EXAMPLE / "llama_toy.toml", words, environ={})
    (cache,) = (whole.folder.parent / "tokens").iterdir()
    tokens = Tokens.read(cache)
    assert (len(tokens.held_out.map()) - 1) // 16 % 4 in (1, 2)
    (losses, _, norms, evaluated), _, model = plain_run(settings, tokens, STEPS, 3)
    found = scalars(whole.folder, "loss/train")
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert list(found.values()) == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.3
    assert min(norms) > 0.5, "every gradient was clipped"
    assert list(scalars(whole.folder, "gradient_norm").values()) == pytest.approx(norms, rel=1e-4)
    assert scalars(whole.folder, "loss/held_out") == pytest.approx(dict(zip((3, 6), evaluated, strict=True)), abs=1e-5)
    exported = load_file(whole.folder / "model" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert (exported[name] - parameter).abs().max() < 1e-5, name


def test_what_is_exported_is_the_last_checkpoint_to_transformers(whole: Run) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(whole.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(whole.folder / "model")
    saved = tensors_in(whole.folder / "checkpoints" / "step-00000006")
    assert loaded.config.vocab_size == len(tokenizer) == 300
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved[f"model.{name}"]), name
    # The same logits from the same numbers in a model that was never a file.
    plain = LlamaForCausalLM(loaded.config)
    plain.load_state_dict({name: saved[f"model.{name}"] for name in plain.state_dict()})
    inputs = tokenizer("Gradients are averaged over ranks", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(inputs).logits, plain(inputs).logits)
    assert tokenizer.decode(inputs[0]) == "Gradients are averaged over ranks"


@pytest.mark.nightly
def test_a_run_that_is_started_again_is_the_run_that_never_stopped(whole: Run) -> None:
    folder = stopped(whole, "again")
    ended = start(2, arguments(folder))
    assert ended.codes == [0, 0], ended
    assert f"going on from {folder}/checkpoints/step-00000003" in ended.output
    assert "step      4/6" in ended.output
    assert scalars(folder, "loss/train") == scalars(whole.folder, "loss/train")
    expected, found = (tensors_in(each / "checkpoints" / "step-00000006") for each in (whole.folder, folder))
    assert expected.keys() == found.keys()
    assert len(expected) > 3 * 25
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    one, other = ((each / "model" / "model.safetensors").read_bytes() for each in (whole.folder, folder))
    assert one == other


@pytest.mark.nightly
def test_another_number_of_ranks_and_compiled_blocks_see_the_same_text(whole: Run) -> None:
    folder = stopped(whole, "alone")
    # Compiled without generating code, which would take longest; what is traced is the same.
    compiled = ("compile.blocks=true", "compile.loss=true", "compile.backend=aot_eager", "shard.strategy=no_shard")
    words = [word for each in compiled for word in ("--set", each)]
    ended = start(1, [*arguments(folder), *words, "--accept-changes"])
    assert ended.codes == [0], ended
    assert "accepted: there were 2 ranks and are 1" in ended.output
    assert "random numbers begin anew" in ended.output
    expected, found = scalars(whole.folder, "loss/train"), scalars(folder, "loss/train")
    assert found == pytest.approx(expected, abs=1e-5)
    assert "tokens/s  memory" in ended.output


def exact_losses(folder: Path) -> list[float]:
    """Of each step of the run in ``folder``, in fp64."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return [loss for line in lines for loss in json.loads(line)[1]]


def test_a_run_goes_on_at_another_number_of_ranks_with_the_same_batch(tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("\u0133\u0167\u0142" * 70)
    script = ROOT / "tests" / "support" / "pretrain_fp64.py"

    def train(ranks: int, name: str, *words: str) -> Path:
        # Of twelve sequences, four ranks take three each, two take six, and six take two.
        changes = ("training.batch=12", "training.microbatch=3", "checkpoint.any_ranks=true", "output.export=false")
        ended = start(ranks, [*arguments(tmp_path / name), *(w for c in changes for w in ("--set", c)), *words], script)
        assert set(ended.codes) == {0}, ended
        return tmp_path / name

    expected = exact_losses(train(4, "whole"))
    ended = train(4, "stopped", "--stop-after", "3")
    for ranks in (2, 6):
        shutil.copytree(ended, tmp_path / f"with-{ranks}")
        found = exact_losses(train(ranks, f"with-{ranks}"))
        assert found == pytest.approx(expected, abs=1e-9, rel=0), f"on {ranks} ranks"
        assert len(found) == STEPS
        assert expected[-1] < expected[0] - 0.1


def test_two_jobs_over_torchft_train_as_one_with_twice_the_batch(whole: Run) -> None:
    pytest.importorskip("torchft")
    from elastic_jobs import Lighthouse

    lighthouse = Lighthouse()
    shared = (
        "training.batch=4",
        "shard.collectives=torchft",
        f"shard.collectives.lighthouse={lighthouse.address}",
        "shard.collectives.min_replicas=2",
        "output.export=false",
    )
    folders = [whole.folder.parent / "jobs" / name for name in ("first", "second")]
    words = [word for each in shared for word in ("--set", each)]
    # The held-out text lies beside the folder of a run.
    texts = ["--set", f"data.held_out={whole.folder.parent}/held_out.txt"]
    try:
        with ThreadPoolExecutor() as pool:
            runs = [pool.submit(start, 2, [*arguments(folder), *words, *texts]) for folder in folders]
            ended = [each.result() for each in runs]
    finally:
        lighthouse.kill()
    assert [each.codes for each in ended] == [[0, 0]] * 2, ended
    expected = scalars(whole.folder, "loss/held_out")
    mean = dict.fromkeys(scalars(whole.folder, "loss/train"), 0.0)
    for folder in folders:
        assert scalars(folder, "loss/held_out") == pytest.approx(expected, abs=1e-5)
        mean = {step: mean[step] + loss / 2 for step, loss in scalars(folder, "loss/train").items()}
    assert mean == pytest.approx(scalars(whole.folder, "loss/train"), abs=1e-5)
    # One of them saves.
    saved = sorted(each.name for each in (whole.folder.parent / "jobs").glob("*/checkpoints/step-*"))
    assert saved == ["step-00000003", "step-00000006"]
