"""OLMo-core's own trainer, with a small model of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import shown
from beside import Beside, differences

pytestmark = pytest.mark.downstream

RANKS = Beside(__file__, "polyshard_fsdp2")


def prepare() -> None:
    for name in ("data", "nn.transformer", "optim", "train.train_module"):
        importlib.import_module(f"olmo_core.{name}")


def train(tokens: str, parallel: dict[str, Any], recompute: bool = False, load: str | None = None) -> Any:
    """``Trainer.fit()``, which saves in its middle; or from what was saved on. Metrics, model and optimizer."""
    from olmo_core.config import DType
    from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig, CosWithWarmup
    from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
    from olmo_core.train import train_module as modules
    from olmo_core.train.callbacks import Callback, CheckpointerCallback

    told: list[Any] = []

    class Told(Callback):
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/CE loss" in metrics:
                # The others are of time.
                told.append([step, *(metrics[name] for name in sorted(metrics) if name.startswith(("train", "optim")))])

    prepare_training_environment(seed=3, backend="gloo")
    model = TransformerConfig.llama_like(vocab_size=128, d_model=64, n_layers=3, n_heads=4).build(init_device="meta")
    tokenizer = TokenizerConfig(vocab_size=128, eos_token_id=0, pad_token_id=1)
    module = modules.TransformerTrainModuleConfig(
        rank_microbatch_size=64,
        max_sequence_length=32,
        optim=AdamWConfig(lr=1e-2),
        scheduler=CosWithWarmup(warmup_steps=2),
        max_grad_norm=1.0,
        dp_config=modules.TransformerDataParallelConfig(
            DataParallelType(parallel.pop("name")), DType.bfloat16, DType.float32, **parallel
        ),
        ac_config=modules.TransformerActivationCheckpointingConfig() if recompute else None,
    ).build(model)
    data = NumpyFSLDatasetConfig(tokenizer=tokenizer, paths=[tokens], sequence_length=32, work_dir="work").build()
    loader = NumpyDataLoaderConfig(global_batch_size=512, seed=5, work_dir="work").build(
        data, dp_process_group=module.dp_process_group
    )
    # Saved behind its back, a checkpoint's seconds are told by ranks that are later alone, which wait for the others.
    trainer = TrainerConfig(
        save_folder="saved",
        load_path=load,
        max_duration=Duration.steps(4),
        metrics_collect_interval=1,
        callbacks={"told": Told(), "checkpointer": CheckpointerCallback(save_interval=2, save_async=False)},
    ).build(module, loader)
    trainer.fit()
    return {"steps": told, "parameters": shown.parameters(module.model), "states": shown.states([module.optim])}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of tokens."""
    import numpy as np

    file = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.random.default_rng(0).zipf(1.3, 1 << 15).clip(2, 127).astype(np.uint16).tofile(file)
    return str(file)


@pytest.mark.parametrize(
    ("ranks", "parallel", "recompute"),
    [
        pytest.param(2, {"name": "fsdp"}, False, id="fsdp"),
        pytest.param(4, {"name": "hsdp", "num_replicas": 2, "shard_degree": 2}, True, id="hsdp"),
    ],
)
def test_resumes_from_the_other(
    tokens: str, tmp_path: Path, ranks: int, parallel: dict[str, Any], recompute: bool
) -> None:
    given = {"tokens": tokens, "parallel": parallel, "recompute": recompute}
    whole = RANKS.compare(tmp_path / "whole", ranks, train, **given)
    saved = str(tmp_path / "whole/{other}/saved/step2")
    resumed = RANKS.compare(tmp_path / "resumed", ranks, train, load=saved, **given)
    assert [step for step, *_ in whole[0]["steps"]] == [1, 2, 3, 4]
    assert resumed[0]["steps"] == whole[0]["steps"][2:]
    assert not list(differences(resumed[0]["parameters"], whole[0]["parameters"]))
