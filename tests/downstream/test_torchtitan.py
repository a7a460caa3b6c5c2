"""torchtitan's own trainer and debug configurations; the line that moves it stands before its ``main()``."""

from __future__ import annotations

import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import shown
import torch
import torch.distributed as dist
from beside import Beside, differences
from torch.nn.attention import flex_attention

pytestmark = pytest.mark.downstream

RANKS = Beside(__file__, "polyshard_fsdp2")


def prepare() -> None:
    """What torchtitan needs on a CPU, over either engine."""
    # A CPU is no accelerator: torchtitan asks torch for one, and for its memory's statistics.
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda *_: "cpu"
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 34)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.device_count = lambda: 8
    import spmd_types
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import fsdp, utils
    from torchtitan.models.common import attention

    # Behind the first step it names a device in a barrier, which gloo does not take.
    utils.set_pg_timeouts = lambda **_: None
    # FlexAttention's compiled form has no backward on a CPU, and its plain form, which has one, refuses all the same.
    attention.FlexAttention._compiled_flex_attn = flex_attention.flex_attention
    attention._compiled_create_block_mask = flex_attention.create_block_mask
    flex_attention._validate_device = lambda *_: None
    # Gloo has no operation that divides and adds up, which FSDP2 takes for `set_gradient_divide_factor`.
    undivided = fsdp.disable_fsdp_gradient_division

    def only_sums(model: Any) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = only_sums
    # Nor does it take lists of parts of different sizes, in which tokens go to their experts.
    spmd_types.set_dist(Gloo("torch.distributed over gloo"))


class Gloo(types.ModuleType):
    """``torch.distributed``, with an ``all_to_all`` of lists through that of tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        received, sent = ([part.numel() for part in parts] for parts in (outputs, inputs))
        flat = torch.cat([part.flatten() for part in outputs])
        dist.all_to_all_single(flat, torch.cat([part.flatten() for part in inputs]), received, sent, group)
        for output, part in zip(outputs, flat.split(received), strict=True):
            output.copy_(part.view_as(output))


def train(module: str, config: str, options: list[str]) -> Any:
    """``python -m torchtitan.train`` with these options; losses, norms, parameters and optimizer states."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    steps: list[list[float]] = []
    log, close = MetricsProcessor.log, Trainer.close
    end: dict[str, Any] = {}

    def logged(self: Any, step: int, loss: float, highest: float, norm: float, *args: Any, **kwargs: Any) -> None:
        steps.append([step, loss, highest, norm])
        log(self, step, loss, highest, norm, *args, **kwargs)

    def closed(self: Any) -> None:
        end["parameters"] = [shown.parameters(part) for part in self.model_parts]
        end["states"] = shown.states(self.optimizers)
        close(self)

    MetricsProcessor.log, Trainer.close = logged, closed
    sys.argv = ["train", "--module", module, "--config", config, *options]
    main()
    return {"steps": steps, **end}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a tokenizer and texts, made here, and what keeps a step small."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("assets")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 7))) for _ in range(400)]
    often = [1 / (1 + place) for place in range(len(words))]
    texts = [" ".join(draw.choices(words, often, k=draw.randint(20, 200))) for _ in range(400)]
    (folder / "texts").mkdir()
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (folder / "texts" / "data.json").write_text(lines, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    kind = trainers.BpeTrainer(vocab_size=1800, special_tokens=list(special.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, kind)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
    return [
        *("--hf_assets_path", str(folder), "--dataloader.dataset_path", str(folder / "texts")),
        *("--training.seq_len", "64", "--training.local_batch_size", "2", "--training.steps", "3"),
        *("--training.disable_cuda_graphs", "--debug.seed", "7"),
    ]


def of(**parallelism: object) -> list[str]:
    """Options of ``[parallelism]``."""
    return [word for name, value in parallelism.items() for word in (f"--parallelism.{name}", str(value))]


NEEDS_GPU = pytest.mark.skip("torchtitan asks for gloo twice, for the device and for what is offloaded")

REFUSED = pytest.mark.xfail(
    strict=True, reason="`spmd_types` unties weights, and torchtitan ties them behind fully_shard"
)

LLAMA, QWEN = ("llama3", "llama3_debugmodel"), ("qwen3", "qwen3_debugmodel")
DEEPSEEK = ("deepseek_v3", "deepseek_v3_debugmodel")


@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [
        # As shipped: selective recomputation, a loss in chunks, bf16, parameters on the whole mesh with `spmd_types`.
        pytest.param(2, LLAMA, [], id="llama3"),
        pytest.param(2, LLAMA, of(spmd_backend="full_dtensor"), id="full_dtensor"),
        pytest.param(2, LLAMA, of(spmd_backend="partial_dtensor"), id="partial_dtensor"),
        pytest.param(2, ("llama3", "llama3_debugmodel_ce_loss"), [], id="whole_loss"),
        pytest.param(2, LLAMA, ["--training.global_batch_size", "8"], id="accumulation"),
        pytest.param(2, LLAMA, ["activation-checkpoint:full"], id="full_recomputation"),
        pytest.param(2, LLAMA, of(fsdp_reshard_after_forward="never"), id="no_reshard"),
        pytest.param(2, LLAMA, ["--training.enable_cpu_offload"], id="offload", marks=NEEDS_GPU),
        pytest.param(4, LLAMA, of(data_parallel_replicate_degree=2), id="hsdp"),
        pytest.param(4, LLAMA, of(tensor_parallel_degree=2), id="tensor_parallel"),
        pytest.param(2, LLAMA, [*of(context_parallel_degree=2), "--training.seq_len", "512"], id="context_parallel"),
        pytest.param(4, LLAMA, of(pipeline_parallel_degree=2), id="pipeline"),
        pytest.param(2, QWEN, of(spmd_backend="partial_dtensor"), id="tied"),
        pytest.param(2, QWEN, [], id="tied_later", marks=REFUSED),
        pytest.param(2, DEEPSEEK, [], id="deepseek"),
        pytest.param(2, DEEPSEEK, of(expert_parallel_degree=2), id="deepseek_experts"),
        pytest.param(4, DEEPSEEK, of(data_parallel_replicate_degree=2, expert_parallel_degree=2), id="deepseek_hsdp"),
    ],
)
def test_trains_as_shipped(
    assets: list[str], tmp_path: Path, ranks: int, model: tuple[str, str], options: list[str]
) -> None:
    told = RANKS.compare(tmp_path, ranks, train, module=model[0], config=model[1], options=assets + options)
    assert [step for step, *_ in told[0]["steps"]] == [1, 2, 3]


@pytest.mark.parametrize(
    ("ranks", "model", "options"),
    [
        pytest.param(2, LLAMA, [], id="llama3"),
        pytest.param(2, DEEPSEEK, of(expert_parallel_degree=2), id="deepseek_experts"),
    ],
)
def test_resumes_from_the_other(
    assets: list[str], tmp_path: Path, ranks: int, model: tuple[str, str], options: list[str]
) -> None:
    given = {"module": model[0], "config": model[1]}
    options = [*assets, *options, "--checkpoint.enable"]
    whole = RANKS.compare(tmp_path / "whole", ranks, train, **given, options=[*options, "--checkpoint.interval", "2"])
    resume = ["--dump_folder", str(tmp_path / "whole/{other}/outputs"), "--checkpoint.load_step", "2"]
    resumed = RANKS.compare(
        tmp_path / "resumed", ranks, train, **given, options=[*options, *resume, "--checkpoint.load_only"]
    )
    assert resumed[0]["steps"] == whole[0]["steps"][2:]
    assert not list(differences(resumed[0]["parameters"], whole[0]["parameters"]))
