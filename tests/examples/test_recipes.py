"""The recipes, all by one launch of two ranks, beside the same training in this process without polyshard."""

from __future__ import annotations

import importlib
import importlib.util
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from processes import KeptRanks, importing_from
from safetensors.torch import load_file
from torchrun import launched

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
PRETRAIN = ROOT / "examples" / "pretrain"
TEXT = {"files": [str(ROOT / "docs" / "tutorial.md")], "context": 16}
#: Recipes of lora.py. bitsandbytes is no part of what tests install.
ADAPTERS = ["lora", "qlora"] if importlib.util.find_spec("bitsandbytes") else ["lora"]
#: A run of llama_8b.toml of seconds.
TOY = {
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "data.files": f"{ROOT}/CONTRIBUTING.md",
    "data.held_out": f"{ROOT}/SECURITY.md",
    "data.vocabulary": 300,
    "training.context": 16,
    "training.steps": 4,
    "compile.loss": "false",
    "output.tensorboard": "false",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recipes() -> Iterator[None]:
    with importing_from(RECIPES):
        yield


def recipe(name: str) -> ModuleType:
    return importlib.import_module(name)


def settings_of(name: str, folder: str) -> dict[str, Any]:
    """Those of the file, with less text and fewer steps."""
    settings = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    settings["data"] = TEXT
    if name == "muon":
        settings["training"].update(steps=6, folder=folder)
    else:
        few = {
            "max_steps": 6,
            "logging_steps": 1,
            "save_steps": 6,
            "log_level": "error",
            "lr_scheduler_type": "constant",
        }
        settings["training"].update(few, output_dir=folder, dataloader_pin_memory=False)
    return settings


def quiet() -> None:
    """Of what packages still call in each other by old names."""
    for text in (
        "`is_gradient_checkpointing` is deprecated",
        "`gradient_checkpointing.* is deprecated",
        "'set_vital'",
        "Could not find a config file in",
    ):
        warnings.filterwarnings("ignore", message=text)


def run_all(rank: int, folder: str) -> dict[str, list[float]]:
    """The losses of every step of each."""
    quiet()
    with importing_from(RECIPES), importing_from(PRETRAIN), launched(rank, 2):
        losses = {name: losses_of(recipe("lora").train(settings_of(name, f"{folder}/{name}"))) for name in ADAPTERS}
        muon = recipe("muon").train(settings_of("muon", f"{folder}/muon"))
        recipe("train").train(*pretraining(rank, folder))
    return {**losses, "muon": muon}


def losses_of(trained: Any) -> list[float]:
    """What a trainer of Transformers' logged."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def pretraining(rank: int, folder: str) -> tuple[Any, Any, Any]:
    """What examples/pretrain is given for a toy of llama_8b.toml."""
    texts = {"data.cache": f"{folder}/tokens", "output.folder": f"{folder}/8b"}
    overrides = [f"{name}={value}" for name, value in {**TOY, **texts}.items()]
    settings = recipe("settings").load_settings(RECIPES / "llama_8b.toml", overrides, environ={})
    arguments = recipe("train").parse_arguments(["--config", str(RECIPES / "llama_8b.toml")])
    return settings, recipe("ranks").Ranks(rank, 2, torch.device("cpu")), arguments


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("recipes")
    ranks = KeptRanks()
    (first, second) = ranks.run(2, run_all, str(folder), timeout=200.0)
    ranks.close()
    assert first["muon"] == second["muon"]
    return folder, first


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("recipes")
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_adapters_are_what_transformers_own_trainer_comes_to(name: str, runs: Any, tmp_path: Path) -> None:
    quiet()
    if name == "qlora":
        pytest.importorskip("bitsandbytes")
    import transformers

    folder, losses = runs
    settings = settings_of(name, str(tmp_path))
    settings["training"]["per_device_train_batch_size"] *= 2
    plain = transformers.Trainer(
        model=recipe("lora").build_model(settings),
        args=transformers.TrainingArguments(use_cpu=True, **settings["training"]),
        train_dataset=recipe("lora").read_samples(settings),
    )
    plain.train()
    plain.save_model()
    expected = losses_of(plain)
    assert losses[name] == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < expected[0] - 0.05
    found, wanted = (load_file(each / "adapter_model.safetensors") for each in (folder / name, tmp_path))
    # Four blocks of seven matrices, with two factors each.
    assert len(wanted) == 56
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("recipes")
def test_muon_is_torchs_on_the_whole_model(runs: Any) -> None:
    settings = settings_of("muon", "")
    model = recipe("muon").build_model(settings)
    blocks = dict(model.model.layers.named_parameters())
    hidden = [each for each in blocks.values() if each.ndim == 2]
    others = [each for each in model.parameters() if not any(each is one for one in hidden)]
    optimizers = [torch.optim.Muon(hidden, **settings["muon"]), torch.optim.AdamW(others, **settings["adamw"])]
    losses = []
    for batch in recipe("muon").read_batches(settings):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["training"]["clip"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    # Muon orthogonalises in bf16.
    assert runs[1]["muon"] == pytest.approx(losses, rel=2e-3)
    assert losses[-1] < losses[0] - 0.5
    assert [each.name for each in (runs[0] / "muon").glob("step-*")] == ["step-00000006"]


@pytest.mark.usefixtures("recipes")
def test_the_toy_of_the_8b_file_trains_and_its_plan_counts_8b(runs: Any) -> None:
    weights = load_file(runs[0] / "8b" / "model" / "model.safetensors")
    assert weights["model.layers.1.mlp.up_proj.weight"].shape == (48, 32)
    with importing_from(PRETRAIN):
        made = recipe("llama_8b").model()
    # 32 blocks of 4096 x (4096 + 1024) x 2 for attention, 3 x 4096 x 14336 and two norms; embedding, head and norm.
    block = 2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336 + 2 * 4096
    assert sum(each.numel() for each in made.parameters()) == 32 * block + 2 * 128256 * 4096 + 4096
