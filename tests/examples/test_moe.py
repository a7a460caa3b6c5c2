"""The pretraining example over meshes of several dimensions, with experts, pipelines and neither, on gloo processes."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tensors_in
from plain_pretraining import Curves, Plain, plain_run
from processes import KeptRanks, importing_from
from torch.nn import functional
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pretrain"
CONFIGS = {"mixtral": ROOT / "examples" / "moe" / "mixtral_toy.toml", "llama": EXAMPLE / "llama_toy.toml"}
RANKS = KeptRanks()
STEPS = 5
#: Of nine experts three ranks have three each and a fourth has none; of two ranks, one has five.
TINY = {
    "model.hidden_size": 32,
    "model.intermediate_size": 16,
    "model.num_hidden_layers": 2,
    "model.num_key_value_heads": 2,
    # One that rarely changes: an expert must be without tokens.
    "data.files": f"{ROOT}/CONTRIBUTING.md",
    "data.held_out": f"{ROOT}/CITATION.cff",
    "data.vocabulary": 300,
    "training.steps": STEPS,
    "training.context": 8,
    "training.batch": 4,
    "optimizer.lr": 0.01,
    "schedule.warmup": 2,
    "evaluation.batches": 1000,
    "checkpoint.every": 2,
    "output.tensorboard": "false",
}
SHAPES = {
    "mixtral": {"model.num_local_experts": 9, "model.router_aux_loss_coef": 0.1},
    "llama": {"model.tie_word_embeddings": "true"},
}
#: No stage has the balance of all blocks.
UNBALANCED = {"model.router_aux_loss_coef": 0.0}
HYBRID = {"parallel.dp_replicate": 2, "shard.strategy": "hybrid_shard"}
#: Of a run with a pipeline or without, a step of which has several microbatches.
DEEP = {
    "model.num_hidden_layers": 4,
    "training.batch": 16,
    "training.steps": 20,
    "checkpoint.asynchronous": "false",
    "output.export": "false",
}
INTERLEAVED = {"parallel.pp_schedule": "interleaved_1f1b", "parallel.pp_stages": 2}
WHOLE = {"shard.strategy": "no_shard"}
TOPOLOGIES = {
    "dp4": {"training.microbatch": 2},
    "pp2 x dp2": {"parallel.pp": 2, "training.microbatch": 2},
    "pp2 x tp2": {"parallel.pp": 2, "parallel.tp": 2, "training.microbatch": 4, **WHOLE},
    "dp2 x tp2": {"parallel.tp": 2, "training.microbatch": 4},
    "pp2 x cp2": {"parallel.pp": 2, "parallel.cp": 2, "training.microbatch": 4},
    "cp4": {"parallel.cp": 4, "training.microbatch": 8},
    "cp2 x tp2": {"parallel.cp": 2, "parallel.tp": 2, "training.microbatch": 8},
    "replicate2 x tp2": {"parallel.tp": 2, "training.microbatch": 2, **HYBRID},
    "dp8": {"training.microbatch": 1},
    "replicate2 x dp4": {"training.microbatch": 1, **HYBRID},
    "dp4 x tp2": {"parallel.tp": 2, "training.microbatch": 2},
    "pp2 x dp4": {"parallel.pp": 2, "training.microbatch": 1},
    "pp4 x dp2": {"parallel.pp": 4, "training.microbatch": 2},
    "pp4 x tp2": {"parallel.pp": 4, "parallel.tp": 2, "training.microbatch": 4, **WHOLE},
    "pp2 x dp2 x tp2": {"parallel.pp": 2, "parallel.tp": 2, "training.microbatch": 2},
    "pp2 of two stages x dp4": {"parallel.pp": 2, "training.microbatch": 1, **INTERLEAVED},
    "pp2 x replicate2 x dp2": {"parallel.pp": 2, "parallel.pp_schedule": "gpipe", "training.microbatch": 1, **HYBRID},
}

pytestmark = pytest.mark.slow


def settings_of(name: str, folder: Path, **changes: Any) -> Any:
    """Of a run in ``folder``, whose texts and tokens all runs of a test share."""
    from settings import load_settings

    chosen = {**TINY, **SHAPES[name], **changes}
    chosen |= {"data.cache": f"{folder.parent}/tokens", "output.folder": f"{folder}"}
    return load_settings(CONFIGS[name], [f"{key}={value}" for key, value in chosen.items()], environ={})


@contextmanager
def in_fp64() -> Iterator[None]:
    """All of a model computes in fp64: what it casts to fp32 (norms, routing, the loss), too, and grouped products."""
    to, softmax = torch.Tensor.to, functional.softmax

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return to(tensor, *args, **kwargs)

    def by_loop(x: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        ends = offs.tolist()
        parts = [x[start:end] @ weight for start, end, weight in zip([0, *ends], ends, weights, strict=False)]
        return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weights.shape[-1])])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", kept)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(functional, "softmax", lambda x, *args, dtype=None, **kwargs: softmax(x, *args, **kwargs))
        patch.setattr(functional, "grouped_mm", by_loop)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def train_in_fp64(rank: int, name: str, folder: Path, changes: dict[str, Any], count: int = 4) -> Curves:
    with in_fp64():
        return train_steps(rank, name, folder, changes, count)


def train_steps(rank: int, name: str, folder: Path, changes: dict[str, Any], count: int = 4) -> Curves:
    """What a rank knows of a run over a mesh."""
    # torchdata 0.11 tells torch what it uses, in a way that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    with importing_from(EXAMPLE):
        import polyshard
        from ranks import Ranks
        from tokens import Tokens, prepare
        from training import Training

        settings = settings_of(name, folder, **changes)
        ranks = Ranks(rank, count, torch.device("cpu"))
        tokens = Tokens.read(ranks.from_first(lambda: prepare(settings.data)))
        training = Training(settings, ranks, tokens)
        steps = [training.step() for _ in range(settings.training.steps)]
        losses, balances = ([step.loss for step in steps], [step.balance for step in steps])
        means = [[total / count for total in ranks.total(values)] for values in (losses, balances)]
        held_out = training.evaluate()
        for model in training.models:
            polyshard.close(model)
        return Curves(*means, [step.norm.item() for step in steps], [held_out])


def plain_steps(name: str, folder: Path, steps: int = STEPS, **changes: Any) -> Plain:
    """What a run over a mesh is held to."""
    from tokens import Tokens, prepare

    settings = settings_of(name, folder, **changes)
    return plain_run(settings, Tokens.read(prepare(settings.data)), steps, steps)


@pytest.fixture
def example() -> Iterator[None]:
    with importing_from(EXAMPLE):
        yield


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("mixtral", [{"parallel.ep": 2, "parallel.tp": 2, "training.microbatch": 2}]),
        ("llama", [{"parallel.cp": 2, "training.microbatch": 2}]),
        pytest.param(
            "mixtral",
            [
                {"parallel.ep": 4, "training.microbatch": 1},
                {"parallel.ep": 2, "training.microbatch": 1},
                {"parallel.ep": 2, "training.microbatch": 1, **HYBRID},
                {"parallel.ep": 2, "parallel.cp": 2, "training.microbatch": 2},
            ],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_ranks_of_a_mesh_train_as_one_process_does(name: str, meshes: Sequence[dict[str, Any]], tmp_path: Path) -> None:
    expected, counts, _ = plain_steps(name, tmp_path / "run")
    if name == "mixtral":
        assert any(0 in each for each in counts), "every expert has tokens in every step"
    assert expected.losses[-1] < expected.losses[0] - 0.05
    for changes in meshes:
        # fp32, in which sums over ranks have another order than in one process.
        for found in RANKS.run(4, train_steps, name, tmp_path / "run", changes):
            assert found.losses == pytest.approx(expected.losses, abs=1e-5), changes
            assert found.balances == pytest.approx(expected.balances, abs=1e-5), changes
            assert found.norms == pytest.approx(expected.norms, rel=1e-4), changes
            assert found.held_out == pytest.approx(expected.held_out, abs=1e-5), changes


def assert_same(found: Curves, expected: Curves) -> None:
    """To rounding of fp64."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=1e-9)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("name", "count", "asked"),
    [
        ("llama", 4, TOPOLOGIES["pp2 x dp2"]),
        ("mixtral", 4, {"parallel.pp": 2, "parallel.ep": 2, "training.microbatch": 2, **UNBALANCED}),
        pytest.param(
            "mixtral",
            8,
            {"parallel.pp": 2, "parallel.ep": 2, "training.microbatch": 1, **INTERLEAVED, **UNBALANCED},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["dp2", "ep2", "two stages x edp2 x ep2"],
)
def test_a_pipeline_trains_and_evaluates_as_one_process_does(
    name: str, count: int, asked: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**DEEP, "training.steps": 4, **asked}
    with in_fp64():
        expected = plain_steps(name, tmp_path / "run", 4, **changes).curves
    for found in RANKS.run(count, train_in_fp64, name, tmp_path / "run", changes, count):
        assert_same(found, expected)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize(("count", "names"), [(4, list(TOPOLOGIES)[:8]), (8, list(TOPOLOGIES)[8:])])
def test_topologies_train_as_one_process_does(count: int, names: Sequence[str], tied: bool, tmp_path: Path) -> None:
    changes = {**DEEP, "model.tie_word_embeddings": f"{tied}".lower()}
    with in_fp64():
        expected = plain_steps("llama", tmp_path / "run", 20, **changes).curves
    assert expected.losses[-1] < expected.losses[0] - 0.5
    for name in names:
        asked = {**changes, **TOPOLOGIES[name]}
        for found in RANKS.run(count, train_in_fp64, "llama", tmp_path / "run", asked, count, timeout=300.0):
            assert_same(found, expected)


@pytest.mark.usefixtures("example")
def test_a_dry_run_tells_the_memory_of_a_rank_of_a_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from model import model_config
    from train import dry_run
    from transformers import MixtralForCausalLM

    # Without the ranks along ep each rank has a 64th of all. With them experts are cut no further.
    said = []
    for ep in (1, 4):
        settings = settings_of("mixtral", tmp_path / "run", **{"training.batch": 256, "parallel.ep": ep})
        dry_run(settings, 64)
        said.append(capsys.readouterr().out)
    parameters = sum(each.numel() for each in MixtralForCausalLM(model_config(settings, 300, 0)).parameters())
    assert all(f"{parameters:,} parameters in 5 units" in each for each in said)
    assert "64 rank(s) (edp 16 x ep 4)" in said[1]


def run_program(rank: int, name: str, folder: Path, changes: dict[str, Any], *words: str, count: int = 4) -> int:
    """``train.py``'s run on one rank."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
    with importing_from(EXAMPLE):
        from ranks import Ranks
        from train import parse_arguments, train

        ranks = Ranks(rank, count, torch.device("cpu"))
        return train(settings_of(name, folder, **changes), ranks, parse_arguments(words))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "changes", "others"),
    [
        ("llama", {**HYBRID, "training.microbatch": 1}, {"parallel.cp": 2, "training.microbatch": 2}),
        (
            "mixtral",
            {"parallel.ep": 2, "parallel.tp": 2, "training.microbatch": 2},
            {"parallel.ep": 4, "training.microbatch": 1},
        ),
        (
            "llama",
            {"parallel.pp": 2, "training.microbatch": 1, "output.export": "false", "checkpoint.asynchronous": "false"},
            {**HYBRID, "training.microbatch": 1},
        ),
        (
            "mixtral",
            {
                "parallel.pp": 2,
                "parallel.ep": 2,
                "training.microbatch": 1,
                "output.export": "false",
                "checkpoint.asynchronous": "false",
                **UNBALANCED,
            },
            {"parallel.ep": 4, "training.microbatch": 1, **UNBALANCED},
        ),
    ],
)
def test_a_run_goes_on_over_its_mesh_bit_for_bit_and_over_another_within_rounding(
    name: str, changes: dict[str, Any], others: dict[str, Any], tmp_path: Path
) -> None:
    changes, others = ({**each, "training.steps": 4} for each in (changes, others))
    whole, stopped, moved = tmp_path / "whole", tmp_path / "stopped", tmp_path / "moved"
    assert RANKS.run(4, run_program, name, whole, changes) == [0] * 4
    assert RANKS.run(4, run_program, name, stopped, changes, "--stop-after", "2") == [0] * 4
    assert [each.name for each in (stopped / "checkpoints").glob("step-*")] == ["step-00000002"]
    shutil.copytree(stopped, moved)
    assert RANKS.run(4, run_program, name, stopped, changes) == [0] * 4
    assert RANKS.run(4, run_program, name, moved, others, "--accept-changes") == [0] * 4
    expected, same, other = (tensors_in(each / "checkpoints" / "step-00000004") for each in (whole, stopped, moved))
    assert expected.keys() == same.keys() == other.keys()
    for key, tensor in expected.items():
        assert torch.equal(same[key], tensor), key
        # A step of AdamW without its state, or on other sequences, is off by the rate, 0.01.
        torch.testing.assert_close(other[key], tensor, rtol=0, atol=1e-3, msg=key)
    if not (whole / "model").exists():
        # No stage could; the same run without a pipeline does.
        assert RANKS.run(4, run_program, name, whole, others, "--accept-changes") == [0] * 4
    loaded = AutoModelForCausalLM.from_pretrained(whole / "model")
    for key, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[f"model.{key}"]), key
