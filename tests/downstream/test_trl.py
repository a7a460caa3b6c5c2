"""TRL's own trainers under ``accelerate launch``, with Accelerate's FSDP2."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import shown
import torch
import torch.distributed as dist
from beside import Beside, differences

pytestmark = pytest.mark.downstream

RANKS = Beside(__file__, "polyshard_fsdp2")

LAUNCHER = [
    *("accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0", "--use_fsdp"),
    *("--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    *("--fsdp_transformer_layer_cls_to_wrap", "LlamaDecoderLayer"),
]

#: What the trainers' settings say.
TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_steps": 2,
    "max_grad_norm": 0.5,
    "seed": 3,
    "data_seed": 3,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
    "model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"},
}


def prepare() -> None:
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # Accelerate takes FSDP up on devices other than CPUs alone.
    start = PartialState.__init__

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self._shared_state["distributed_type"] == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = started


def train(kinds: list[str], model: str) -> Any:
    """Train each of ``kinds``, and again from the checkpoint in its middle; what is logged, saved, and at the end."""
    from accelerate.state import PartialState

    PartialState(cpu=True)
    return {kind: _train(kind, model) for kind in kinds}


def _train(kind: str, model: str) -> Any:
    from safetensors.torch import load_file

    trainer = _trainer(kind, model, kind)
    trainer.train()
    end = shown.parameters(trainer.model_wrapped)
    told = ("loss", "grad_norm", "learning_rate", "rewards/margins", "reward", "kl", "mean_token_accuracy")
    steps = [{name: each[name] for name in told if name in each} for each in trainer.state.log_history]
    states = shown.states([trainer.optimizer.optimizer])
    trainer.save_model(f"{kind}/end")
    dist.barrier()
    saved = {file.name: load_file(file) for file in Path(kind, "end").glob("*.safetensors")}
    resumed = _trainer(kind, model, f"{kind}-again")
    resumed.train(resume_from_checkpoint=f"{kind}/checkpoint-2")
    assert not list(differences(shown.parameters(resumed.model_wrapped), end))
    files = sorted(str(file.relative_to(kind)) for file in Path(kind).rglob("*"))
    return {"steps": steps, "end": end, "states": states, "saved": saved, "files": files}


def _trainer(kind: str, model: str, out: str) -> Any:
    import datasets
    import peft
    import trl

    draw = random.Random(0)

    def text() -> str:
        return " ".join(f"w{draw.randrange(100)}" for _ in range(draw.randrange(4, 10)))

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [len(set(each.split())) + 0.1 * sum(map(ord, each)) % 7 for each in completions]

    name, _, adapters = kind.partition("_")
    rows = {
        "sft": lambda: {"text": text()},
        "dpo": lambda: {"prompt": text() + " ", "chosen": text(), "rejected": text()},
        "grpo": lambda: {"prompt": text()},
    }
    settings = {
        "sft": {"max_length": 32},
        "dpo": {"max_length": 48},
        "grpo": {"num_generations": 2, "max_completion_length": 8, "beta": 0.1},
    }
    config = getattr(trl, f"{name.upper()}Config")(output_dir=out, **TRAINING, **settings[name])
    return getattr(trl, f"{name.upper()}Trainer")(
        model,
        args=config,
        train_dataset=datasets.Dataset.from_list([rows[name]() for _ in range(48)]),
        peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]) if adapters else None,
        **({"reward_funcs": reward} if name == "grpo" else {}),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with its tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = str(tmp_path_factory.mktemp("model"))
    words = ["<unk>", "<pad>", "<eos>", *(f"w{place}" for place in range(100))]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=104,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        # Where loading is efficient TRL shards zeros of a reference model on all ranks but one: polyshard refuses them.
        pytest.param(
            ["sft", "sft_lora", "dpo", "grpo"],
            ["--fsdp_state_dict_type", "FULL_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false"],
            id="full",
        ),
        pytest.param(["sft"], ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"], id="sharded"),
    ],
)
def test_accelerate_launch(model: str, tmp_path: Path, kinds: list[str], options: list[str]) -> None:
    told = RANKS.compare(tmp_path, 2, train, [*LAUNCHER, *options], kinds=kinds, model=model)
    assert all(len(told[0][kind]["steps"]) == 5 for kind in kinds)
