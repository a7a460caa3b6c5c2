"""TRL's trainers behind ``PolyshardMixin``, on two ranks, beside TRL's own on the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from polyshard.errors import ConfigError
from processes import KeptRanks
from transformers_runs import VOCABULARY, counted_gathers, launched, make_model, parameters, quiet, shard_config

pytest.importorskip("trl")

#: Two ranks import Transformers and TRL.
pytestmark = pytest.mark.slow

#: Of losses and norms in fp32.
CLOSE = {"rel": 2e-5, "abs": 2e-5}
#: Of each trainer: steps, and samples a rank and step. GRPO's are generated, four of each prompt.
SIZES = {"sft": (4, 2), "dpo": (3, 2), "grpo": (6, 4)}

RANKS = KeptRanks()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, VOCABULARY)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def write_rows(kind: str, folder: str) -> None:
    """Texts of different lengths, in the columns that the trainer of ``kind`` reads.

    On disk: beside it ranks find what one of them has computed of it.
    """
    from datasets import Dataset

    made = torch.Generator().manual_seed(5)

    def text(shortest: int, longest: int) -> str:
        length = int(torch.randint(shortest, longest, (), generator=made))
        return " ".join(f"w{number}" for number in torch.randint(2, VOCABULARY, (length,), generator=made).tolist())

    columns: dict[str, Callable[[], dict[str, str]]] = {
        "sft": lambda: {"text": text(4, 12)},
        "dpo": lambda: {"prompt": text(3, 6), "chosen": " " + text(2, 8), "rejected": " " + text(2, 8)},
        "grpo": lambda: {"prompt": text(3, 6)},
    }
    Dataset.from_list([columns[kind]() for _ in range(24)]).save_to_disk(folder)


def share_of_even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward."""
    return [sum(token % 2 == 0 for token in each) / len(each) for each in completion_ids]


@contextmanager
def repeatable(first: int) -> Iterator[None]:
    """Let the same row of the global batch draw the same tokens, whichever rank has it; ``first``: this rank's."""
    own, calls = torch.multinomial, 0

    def draw(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        seeds = [1000 * calls + first + row for row in range(len(probabilities))]
        made = [torch.Generator().manual_seed(seed) for seed in seeds]
        return torch.stack([own(p, num_samples, generator=g) for p, g in zip(probabilities, made, strict=True)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", draw)
        # Elsewhere TRL tells the Hub of each trainer.
        patch.setenv("CI", "1")
        yield


def make_trainer(kind: str, folder: str, world_size: int, base: str, **settings: Any) -> Any:
    """Ours on several processes, and TRL's own on one, with the batches of two."""
    import trl
    from datasets import load_from_disk
    from polyshard_transformers import PolyshardMixin
    from transformers import AutoModelForCausalLM

    made = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "grpo": trl.GRPOTrainer}[kind]
    arguments = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "grpo": trl.GRPOConfig}[kind]
    steps, samples = SIZES[kind]
    given: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "max_steps": steps, "logging_steps": 1, "report_to": [],
        "per_device_train_batch_size": 2 * samples // world_size, "disable_tqdm": True, "save_strategy": "no",
        "learning_rate": 5e-3, "log_level": "error", "dataloader_pin_memory": False, "seed": 11,
    }  # fmt: skip
    extra: dict[str, Any] = {}
    if kind == "grpo":
        # A rank that ends early would draw less often than the others.
        given |= {"num_generations": 4, "max_completion_length": 6, "generation_kwargs": {"min_new_tokens": 6}}
        extra |= {"reward_funcs": share_of_even_tokens}
    if world_size > 1:
        made = type("Sharded", (PolyshardMixin, made), {})
        given |= {"ddp_backend": "gloo"}
        extra |= {"shard": shard_config(listeners=settings.pop("listeners", ()))}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return made(
        model=model,
        args=arguments(**{**given, **settings}),
        train_dataset=load_from_disk(f"{folder}-rows"),
        processing_class=tokenizer(),
        **extra,
    )


#: What is compared of each step, where the trainer logs it.
LOGGED = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins", "logps/chosen", "reward", "kl")


def curve(trainer: Any) -> list[dict[str, float]]:
    entries = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [{name: float(entry[name]) for name in LOGGED if name in entry} for entry in entries]


def train_both(rank: int, folder: str, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A sharded run; on rank 0, TRL's own, too."""
    quiet()
    import polyshard
    from transformers import TrainerCallback

    if rank == 0:
        make_model("llama").save_pretrained(f"{folder}/base")
        for name in ("ours", "plain"):
            write_rows(kind, f"{folder}/{name}-rows")
    torch.distributed.barrier()
    listener, gathers = counted_gathers()
    generated: list[int] = []

    class CountsGenerate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            own = model.generate

            def generate(*args: Any, **kwargs: Any) -> Any:
                gathers.clear()
                result = own(*args, **kwargs)
                generated.append(len(gathers))
                return result

            model.generate = generate

    with launched(rank, 2), repeatable(rank * SIZES[kind][1]):
        trainer = make_trainer(kind, f"{folder}/ours", 2, f"{folder}/base", listeners=[listener], **settings)
        trainer.add_callback(CountsGenerate())
        trainer.train()
        found: dict[str, Any] = {
            "ours": curve(trainer),
            "parameters": parameters(trainer.model),
            "units": polyshard.report(trainer.model).units,
            "generated": generated,
        }
        reference = getattr(trainer, "ref_model", None)
        found["reference"] = None if reference is None else polyshard.report(reference).units
    if not rank:
        with repeatable(0):
            trainer = make_trainer(kind, f"{folder}/plain", 1, f"{folder}/base", **settings)
            trainer.train()
            found |= {"plain": curve(trainer), "plain parameters": parameters(trainer.model)}
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sft", {}),
        ("dpo", {}),
        ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 1}),
        ("dpo", {"precompute_ref_log_probs": True}),
        ("grpo", {"beta": 0.1}),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given) or "defaults",
)
def test_trains_as_trl_does(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    results = RANKS.run(2, train_both, str(tmp_path), kind, settings)
    steps, _ = SIZES[kind]
    plain = results[0]
    assert len(plain["plain"]) == steps
    for found in results:
        for mine, theirs in zip(found["ours"], plain["plain"], strict=True):
            assert mine == pytest.approx(theirs, **CLOSE)
        for name, whole in plain["plain parameters"].items():
            torch.testing.assert_close(found["parameters"][name], whole, rtol=2e-4, atol=2e-4, msg=name)
        # Each call gathers each unit once, whatever the number of tokens.
        assert found["generated"] == ([found["units"]] * steps if kind == "grpo" else [])
        holds = kind != "sft" and "precompute_ref_log_probs" not in settings
        assert found["reference"] == (found["units"] if holds else None)


def refuse(rank: int, folder: str, kind: str, setting: str) -> str:
    quiet()
    if rank == 0:
        make_model("llama").save_pretrained(f"{folder}/base")
        write_rows(kind, f"{folder}/refused-rows")
    torch.distributed.barrier()
    with launched(rank, 2), repeatable(0), pytest.raises(ConfigError) as caught:
        make_trainer(kind, f"{folder}/refused", 2, f"{folder}/base", **{setting: True})
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("grpo", "use_vllm"),
        ("grpo", "use_transformers_continuous_batching"),
        ("sft", "activation_offloading"),
    ],
)
def test_settings_of_trl_that_shards_cannot_serve_are_refused(tmp_path: Path, kind: str, setting: str) -> None:
    for told in RANKS.run(2, refuse, str(tmp_path), kind, setting):
        assert setting in told
