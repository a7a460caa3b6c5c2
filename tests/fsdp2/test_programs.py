"""Programs that call torch's ``fully_shard`` run over ours, unedited, and find what they find over torch's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_pipeline
from fsdp2_models import TENSOR_PARALLEL, Mlps, alike, unedited, wholes, without_trainers
from processes import KeptRanks
from safetensors.torch import load_file
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from torchrun import launched


@pytest.mark.parametrize(
    ("schedule", "each"),
    [
        ("1F1B", 1),
        pytest.param("Interleaved1F1B", 2, marks=pytest.mark.nightly),
        pytest.param("InterleavedZeroBubble", 2, marks=pytest.mark.nightly),
    ],
)
def test_pipelines(ranks: KeptRanks, schedule: str, each: int) -> None:
    ranks.run(4, unedited, torch_pipeline.pipeline, schedule, each)


def _hub_models(folder: Path) -> None:
    """Weights of two small models, written by Transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dtype": "float64",
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).double().save_pretrained(folder / "llama")
    experts = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    MixtralForCausalLM(experts).double().save_pretrained(folder / "mixtral")


def _by_plan(folder: str, saved: Path, sizes: dict[str, dict[str, int]]) -> Any:
    """Transformers shards while it loads: beside tensor parallelism, and with experts on ranks of their own."""
    from torch.distributed.fsdp import FSDPModule
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.distributed.fsdp import is_fsdp_managed_module

    told = []
    for name, its in sizes.items():
        # The others take no fp64.
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/{name}", distributed_config=DistributedConfig(**its), experts_implementation="eager"
        )
        assert isinstance(model, FSDPModule)
        told += [inner for inner, module in model.named_modules() if is_fsdp_managed_module(module)]
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        random = torch.Generator().manual_seed(dist.get_rank() // its.get("tp_size", 1))
        for _ in range(2):
            words = torch.randint(0, 32, (2, 6), generator=random)
            loss = model(words, labels=words).loss
            loss.backward()
            told += [loss.item(), torch_pipeline.clip(list(model.parameters()))]
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(f"{saved}/{name}")
        dist.barrier()
        told.append(load_file(f"{saved}/{name}/model.safetensors"))
    return told


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        # Beside tensor and expert parallelism: the last nightly case.
        (2, {"llama": {"fsdp_size": 2}}),
        pytest.param(2, {"mixtral": {"fsdp_size": 2}}, marks=pytest.mark.nightly),
        pytest.param(
            4,
            {"llama": {"fsdp_size": 2, "tp_size": 2}, "mixtral": {"fsdp_size": 4, "ep_size": 2}},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_transformers_own_plan(
    ranks: KeptRanks, tmp_path: Path, world_size: int, sizes: dict[str, dict[str, int]]
) -> None:
    pytest.importorskip("transformers")
    _hub_models(tmp_path)
    ranks.run(world_size, unedited, _by_plan, str(tmp_path), tmp_path, sizes)


def _experts_of_each(rank: int, folder: Path) -> None:
    """Of two ranks each has experts that no other rank shares: their gradients are divided, and not reduced."""
    import polyshard_fsdp2

    warnings.simplefilter("ignore")
    random = torch.Generator().manual_seed(0)
    batches = torch.randint(0, 32, (2, 2, 2, 6), generator=random)
    with without_trainers(), polyshard_fsdp2.install():
        from transformers import AutoModelForCausalLM, MixtralForCausalLM
        from transformers.distributed import DistributedConfig

        plain = MixtralForCausalLM.from_pretrained(folder / "mixtral", experts_implementation="eager").train()
        model = AutoModelForCausalLM.from_pretrained(
            f"{folder}/mixtral",
            distributed_config=DistributedConfig(fsdp_size=2, ep_size=2),
            experts_implementation="eager",
        ).train()
        for one in (model, plain):
            optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
            for step in batches:
                # One process takes the mean over both ranks' batches.
                for words in step[rank : rank + 1] if one is model else step:
                    (one(words, labels=words).loss / (1 if one is model else 2)).backward()
                optimizer.step()
                optimizer.zero_grad()
        model.save_pretrained(folder / "trained")
        plain.save_pretrained(folder / "plain")
    dist.barrier()
    found, wanted = (load_file(folder / name / "model.safetensors") for name in ("trained", "plain"))
    before = load_file(folder / "mixtral" / "model.safetensors")
    assert any((found[name] - value).abs().max() > 1e-3 for name, value in before.items() if "experts" in name)
    alike(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
def test_experts_that_no_other_rank_shares(ranks: KeptRanks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    _hub_models(tmp_path)
    # Torch 2.13 itself divides gradients in fp64 on one rank twice.
    ranks.run(2, _experts_of_each, tmp_path)


def _with_lightning(rank: int, folder: Path, sizes: tuple[int, int]) -> None:
    variables = {"TORCHELASTIC_RUN_ID": "tests", "GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    with launched(rank, dist.get_world_size(), **variables):
        unedited(rank, _by_strategy, folder, sizes)


def _by_strategy(folder: Path, sizes: tuple[int, int]) -> Any:
    """Lightning makes the mesh, clips, and saves; ``configure_model`` shards."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import FSDPModule, fully_shard

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Mlps().double()
            self.told: list[Any] = []

        def configure_model(self) -> None:
            if isinstance(self.net, FSDPModule):
                return
            mesh = self.device_mesh
            assert mesh is not None
            if mesh["tensor_parallel"].size() > 1:
                parallelize_module(self.net, mesh["tensor_parallel"], TENSOR_PARALLEL)
            for module in (*(each for each in self.net.modules() if type(each).__name__ == "Mlp"), self.net):
                fully_shard(module, mesh=mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(batch).square().mean()
            self.told.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    random = torch.Generator().manual_seed(dist.get_rank() // sizes[1])
    rows: Any = [torch.randn(3, 12, generator=random, dtype=torch.float64) for _ in range(3)]
    loader = DataLoader(rows, batch_size=None)
    told = []
    for checkpoint in (None, f"{folder}/saved"):
        module = Regression()
        trainer = lightning.Trainer(
            strategy=ModelParallelStrategy(*sizes),
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_epochs=2 if checkpoint else 1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader, ckpt_path=checkpoint)
        assert isinstance(module.net, FSDPModule)
        if checkpoint is None:
            trainer.save_checkpoint(f"{folder}/saved")
        told += [module.told, wholes(module)]
    return told


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=str)
def test_lightnings_model_parallel_strategy(ranks: KeptRanks, tmp_path: Path, sizes: tuple[int, int]) -> None:
    pytest.importorskip("lightning")
    ranks.run(sizes[0] * sizes[1], _with_lightning, tmp_path, sizes)
