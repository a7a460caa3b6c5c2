"""verl's own FSDP engine, over FSDP2 and over FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import importlib
import types
from pathlib import Path
from typing import Any

import pytest
import shown
import torch
import torch.distributed as dist
from beside import Beside, differences
from torch.distributed.fsdp import _init_utils

pytestmark = pytest.mark.downstream

RANKS = Beside(__file__, "polyshard_fsdp2", "polyshard_fsdp")


class Device(str):
    """A CPU where verl names a device by its number alone, and number 0 where it writes this behind the kind."""

    def __format__(self, spec: str) -> str:
        return "0"


def prepare() -> None:
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    # verl has a place for platforms, and none for a CPU.
    device = types.SimpleNamespace(
        **dict.fromkeys(["empty_cache", "synchronize", "reset_peak_memory_stats"], lambda *_: None),
        **dict.fromkeys(["memory_allocated", "memory_reserved", "max_memory_allocated"], lambda *_: 0),
        **dict.fromkeys(["max_memory_reserved"], lambda *_: 0),
        current_device=lambda: Device("cpu"),
        device_count=lambda: 1,
        is_available=lambda: False,
        mem_get_info=lambda *_: (0, 0),
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    answers = {
        "is_available": True,
        "current_device": Device("cpu"),
        "device_count": 1,
        "get_device_capability": (None, None),
        "communication_backend_name": "gloo",
        "visible_devices_envvar": "NO_DEVICES",
        "nvtx_range": contextlib.nullcontext(),
        "ray_resource_name": "CPU",
        "ray_noset_envvars": [],
        "is_ipc_supported": False,
    }
    asked = {name: lambda *_, name=name: answers.get(name) for name in PlatformBase.__abstractmethods__}
    names = {"device_name": "cpu", "vendor_name": "cpu", "device_module": device}
    platform = platform_manager.PlatformRegistry.register(platform="cpu")(type("CPU", (PlatformBase,), asked | names))
    platform_manager.set_platform(platform())
    # On a GPU it is a copy. On a CPU verl would read what FSDP has released.
    torch.Tensor.cpu = torch.Tensor.clone
    # Torch's FSDP broadcasts from a GPU alone.
    _init_utils._check_module_states_for_sync_module_states = lambda _: None
    for name in ("peft", "transformers.models.llama.modeling_llama", "verl.workers.engine.fsdp.transformer_impl"):
        importlib.import_module(name)


def train(strategy: str, model: str, lora: bool, settings: dict[str, Any], resume: str | None = None) -> Any:
    """Steps of an engine, what it hands to a generator, and what it saves; or only steps from a checkpoint on."""
    from safetensors.torch import load_file
    from verl.utils import fsdp_utils

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    engine = _engine(strategy, model, lora, settings)
    if resume is not None:
        engine.load_checkpoint(resume)
        return {"steps": [_step(engine, place) for place in (3, 4)], "whole": _synced(engine)}
    told: dict[str, Any] = {"parameters": shown.parameters(engine.module), "first": _synced(engine)}
    told["steps"] = [_step(engine, place) for place in range(3)]
    with engine.eval_mode():
        told["evaluated"] = engine.infer_batch(_batch(7), loss_function=_loss)["model_output"]["log_probs"].values()
    if lora:
        told["adapters"] = _synced(engine, layered_summon=True, base_sync_done=True)
        told["merged"] = {name: value.clone() for name, value in engine._merged_lora_per_tensor_param()}
        with engine.disable_adapter(), engine.eval_mode():
            told["base"] = engine.infer_batch(_batch(7), loss_function=_loss)["model_output"]["log_probs"].values()
    told["full"] = {name: value.clone() for name, value in fsdp_utils.get_fsdp_full_state_dict(engine.module).items()}
    fsdp_utils.load_fsdp_model_to_gpu(engine.module)
    fsdp_utils.offload_fsdp_model_to_cpu(engine.module)
    fsdp_utils.load_fsdp_model_to_gpu(engine.module)
    engine.save_checkpoint("saved", global_step=3)
    dist.barrier()
    told["exported"] = {file.name: load_file(file) for file in Path("saved/huggingface").glob("*.safetensors")}
    told["files"] = sorted(map(str, Path("saved").rglob("*")))
    told["states"] = shown.states([engine.optimizer])
    told["steps"] += [_step(engine, place) for place in (3, 4)]
    return {**told, "whole": _synced(engine)}


def _engine(strategy: str, model: str, lora: bool, settings: dict[str, Any]) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    torch.manual_seed(0)
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=model,
            load_tokenizer=False,
            use_remove_padding=False,
            override_config={"attn_implementation": "eager"},
            lora_rank=4 if lora else 0,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj", "down_proj"],
        ),
        FSDPEngineConfig(
            strategy=strategy,
            use_torch_compile=False,
            mixed_precision=precision,
            use_orig_params=lora,
            **{"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_remove_padding": False, **settings},
        ),
        FSDPOptimizerConfig(lr=1e-2, weight_decay=0.01, total_training_steps=10, lr_warmup_steps=0, clip_grad=0.5),
        CheckpointConfig(
            save_contents=["model", "optimizer", "extra", "hf_model"], load_contents=["model", "optimizer", "extra"]
        ),
    )
    engine.initialize()
    return engine


def _batch(place: int) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(100 * place + dist.get_rank())
    lengths = [7, 12, 5, 9]
    rows = {
        "input_ids": [torch.randint(0, 128, (length,), generator=draw) for length in lengths],
        "position_ids": [torch.arange(length) for length in lengths],
        "loss_mask": [(torch.arange(length) >= 2).long() for length in lengths],
    }
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()}
    batch = TensorDict(nested, batch_size=[4])
    settings = {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    more = {"temperature": 1.0, "pad_mode": "no_padding", "calculate_entropy": True}
    tensordict_utils.assign_non_tensor(batch, **settings, **more)
    return batch


def _loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    likely, mask = model_output["log_probs"].values(), data["loss_mask"].values().float()
    loss = -(likely * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
    loss = loss - 0.01 * model_output["entropy"].values().mean()
    return loss, {"told": loss.detach().item()}


def _step(engine: Any, place: int) -> Any:
    with engine.train_mode():
        metrics = engine.train_batch(_batch(place), loss_function=_loss)["metrics"]
    engine.lr_scheduler_step()
    told = {name: metrics[name] for name in ("loss", "told") if name in metrics}
    # FSDP1's norm differs in the seventh digit where parts lie elsewhere in memory.
    return {**told, "grad_norm": float(f"{metrics['grad_norm']:.6g}")}


def _synced(engine: Any, **settings: bool) -> Any:
    """What a generator is sent."""
    return {name: value.detach().clone() for name, value in dict(engine.get_per_tensor_param(**settings)[0]).items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model."""
    import transformers

    folder = str(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("strategy", "lora", "settings"),
    [
        pytest.param("fsdp2", False, {"param_offload": True, "optimizer_offload": True}, id="fsdp2"),
        pytest.param("fsdp2", True, {}, id="fsdp2_lora"),
        pytest.param("fsdp", False, {"param_offload": True, "optimizer_offload": True}, id="fsdp1"),
        pytest.param("fsdp", True, {}, id="fsdp1_lora"),
    ],
)
def test_trains_saves_and_resumes(
    model: str, tmp_path: Path, strategy: str, lora: bool, settings: dict[str, Any]
) -> None:
    arguments = {"strategy": strategy, "model": model, "lora": lora, "settings": settings}
    straight = RANKS.compare(tmp_path / "straight", 2, train, **arguments)
    saved = str(tmp_path / "straight/{other}/saved")
    resumed = RANKS.compare(tmp_path / "resumed", 2, train, resume=saved, **arguments)
    assert resumed[0]["steps"] == straight[0]["steps"][3:]
    assert not list(differences(resumed[0]["whole"], straight[0]["whole"]))
