"""torchtune's own recipes, with models of its own of a small size."""

from __future__ import annotations

import json
import random
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import shown
import torch
from beside import Beside, differences

pytestmark = pytest.mark.downstream

RANKS = Beside(__file__, "polyshard_fsdp2")

MODEL = {
    "_component_": "torchtune.models.llama3.llama3",
    "vocab_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 64,
    "intermediate_dim": 96,
}

ADAPTERS = {
    **MODEL,
    "_component_": "torchtune.models.llama3.lora_llama3",
    "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8,
}

#: What a recipe's file says of training.
TRAINING: dict[str, Any] = {
    "tokenizer": {"_component_": "test_torchtune.Tokenizer"},
    "dataset": {"_component_": "test_torchtune.Texts", "packed": False},
    "metric_logger": {"_component_": "test_torchtune.Metrics"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3.0e-3},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    "device": "cpu",
    "dtype": "fp32",
    "seed": 5,
    "shuffle": True,
    "batch_size": 2,
    "clip_grad_norm": 1.0,
    "epochs": 2,
    "max_steps_per_epoch": 2,
    "gradient_accumulation_steps": 1,
    "log_every_n_steps": 1,
    "compile": False,
    "enable_activation_checkpointing": False,
    "enable_activation_offloading": False,
}

#: The rate of learning of a recipe that has none of its own.
SCHEDULE = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 2}


class Tokenizer:
    """Of texts that are numbers already."""

    pad_id = 0


class Texts(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences of different lengths."""

    def __init__(self, tokenizer: Tokenizer, packed: bool) -> None:
        draw = random.Random(0)
        self._texts = [draw.choices(range(1, 128), k=draw.randint(6, 30)) for _ in range(64)]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> dict[str, list[int]]:
        return {"tokens": self._texts[place], "labels": self._texts[place]}


class Metrics:
    """What a recipe logs, but for its speed."""

    steps: ClassVar[list[Any]] = []

    def log_config(self, config: Any) -> None:
        pass

    def log_dict(self, told: dict[str, Any], step: int) -> None:
        self.steps.append([step, *(float(told[name]) for name in ("loss", "lr", "grad_norm") if name in told)])

    def close(self) -> None:
        pass


def prepare() -> None:
    from torchtune import training

    # Recipes ask for NCCL beside gloo.
    start = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_: start("gloo")
    # A CPU has no memory that torchtune could look at.
    torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
    training.get_memory_stats = lambda *_, **__: {}
    training.log_memory_stats = lambda *_: None


def tune(recipe: str, model: dict[str, Any], base: str, out: str = "out", resume: bool = False, **settings: Any) -> Any:
    """``tune run recipe --config ...``; what it logs and saves, and how model and optimizer end.

    With ``resume`` it goes on behind the first epoch of the run that wrote to ``out``.
    """
    import torchtune

    file = Path(torchtune.__file__).parents[1] / "recipes" / f"{recipe}.py"
    names = runpy.run_path(str(file), run_name="recipe")
    (kind,) = [each for name, each in names.items() if name.endswith("RecipeDistributed")]
    end: dict[str, Any] = {}
    cleanup = kind.cleanup

    def cleaned(self: Any) -> None:
        end["parameters"] = shown.parameters(self._model)
        if settings.get("optimizer_in_bwd") is None:
            end["states"] = shown.states([self._optimizer])
        cleanup(self)

    kind.cleanup = cleaned
    files = {"checkpoint_dir": base, "checkpoint_files": ["model.pt"], "output_dir": out}
    if resume and "lora" in recipe:
        files["adapter_checkpoint"] = "epoch_0/adapter_model.pt"
    elif resume:
        files["checkpoint_files"] = ["epoch_0/model-00001-of-00001.bin"]
    checkpointer = {"_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "model_type": "LLAMA3", **files}
    config = {**TRAINING, "model": model, "checkpointer": checkpointer, "output_dir": out, **settings}
    # What is valid JSON is valid YAML.
    Path("config.yaml").write_text(json.dumps({**config, "resume_from_checkpoint": resume}), encoding="utf-8")
    sys.argv = [recipe, "--config", "config.yaml"]
    # Its command ends the process.
    with suppress(SystemExit):
        names["recipe_main"]()
    saved = {
        str(file.relative_to(out)): torch.load(file)
        for file in Path(out).rglob("*.*")
        if file.suffix in (".bin", ".pt")
    }
    return {"steps": Metrics.steps, "saved": saved, **end}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that is tuned."""
    from torchtune.models.llama3 import llama3

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {name: size for name, size in MODEL.items() if name != "_component_"}
    torch.save(llama3(**sizes).state_dict(), folder / "model.pt")
    return str(folder)


NEEDS_GPU = pytest.mark.skip("FSDP2 offloads to memory that it pins, which needs a GPU")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "bf16"}, id="bf16"),
        pytest.param({"optimizer_in_bwd": True, "clip_grad_norm": None}, id="optimizer_in_backward"),
        pytest.param({"gradient_accumulation_steps": 2, "enable_activation_checkpointing": True}, id="accumulation"),
        pytest.param({"fsdp_cpu_offload": True}, id="offload", marks=NEEDS_GPU),
    ],
)
def test_full_finetune(base: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    told = RANKS.compare(tmp_path, 2, tune, recipe="full_finetune_distributed", model=MODEL, base=base, **settings)
    assert len(told[0]["steps"]) == 4


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        pytest.param("full_finetune_distributed", MODEL, id="full"),
        pytest.param("lora_finetune_distributed", ADAPTERS, id="lora"),
    ],
)
def test_resumes_from_the_other(base: str, tmp_path: Path, recipe: str, model: dict[str, Any]) -> None:
    settings = {"recipe": recipe, "model": model, "base": base, "lr_scheduler": SCHEDULE}
    whole = RANKS.compare(tmp_path / "whole", 2, tune, **settings)
    out = str(tmp_path / "whole/{other}/out")
    resumed = RANKS.compare(tmp_path / "resumed", 2, tune, out=out, resume=True, **settings)
    assert resumed[0]["steps"] == whole[0]["steps"][2:]
    assert not list(differences(resumed[0]["parameters"], whole[0]["parameters"]))
