"""Models of Transformers through its own files: read as ``from_pretrained`` does, written so that it reads them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from parity import one_core, seed_all
from polyshard import ShardConfig
from polyshard.errors import ConfigError
from polyshard_backends.threaded import ThreadedWorld
from safetensors.torch import load_file
from torch import nn

# Importing Transformers takes most of the first one's time.
pytestmark = pytest.mark.slow

Values = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    """Imported late: every process collects this file, and one of them runs it."""
    with warnings.catch_warnings(action="ignore"):
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        with one_core():
            yield transformers


_LLAMA = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ENCODER = {
    key: _LLAMA[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}

#: Model, configuration and layers, by what is special about each.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, "LlamaDecoderLayer"),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}, "LlamaDecoderLayer"),
    "gpt2, tied and with Conv1D": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
        "GPT2Block",
    ),
    "t5, one embedding for three": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "T5Block",
    ),
    "vit, renamed": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 8, "patch_size": 4},
        "ViTLayer",
    ),
    "mixtral, experts in one tensor": (
        "MixtralForCausalLM",
        "MixtralConfig",
        # More than ten: their order is not that of their names.
        {**_LLAMA, "num_local_experts": 11},
        "MixtralDecoderLayer",
    ),
}


def built(transformers: ModuleType, family: str, **settings: Any) -> Any:
    model, config, options, _ = FAMILIES[family]
    return getattr(transformers, model)(getattr(transformers, config)(**{**options, **settings}))


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """``model`` with values that nobody could mistake for initial ones, as ``save_pretrained`` writes it."""
    seed_all(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder, **options)
    return folder


def sharded(model: Any, world: ThreadedWorld, rank: int, family: str, fresh: tuple[str, ...] = ()) -> Any:
    layers = {type(module) for module in model.modules() if type(module).__name__ == FAMILIES[family][3]}
    config = ShardConfig(
        collectives={"name": "threaded", "world": world, "rank": rank},
        device="cpu",
        policy={"name": "transformer", "layers": list(layers)},
    )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # one rank shards nothing
        return polyshard.shard(model, config, initializer=polyshard_huggingface.to_be_loaded(model, fresh=fresh))


def on_meta(make: Callable[[], Any], world: ThreadedWorld) -> Any:
    with world.lock, torch.device("meta"):
        return make()


def whole(model: nn.Module) -> Values:
    with polyshard.unsharded(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_go_in_and_out_unchanged(family: str, transformers: ModuleType, tmp_path: Path) -> None:
    given = saved(built(transformers, family), tmp_path / "given", max_shard_size="20KB")
    reference = type(built(transformers, family)).from_pretrained(given)
    expected, buffers = reference.state_dict(), dict(reference.named_buffers())
    for ranks in (1, 2, 3):
        written = tmp_path / f"written by {ranks}"

        def in_and_out(rank: int, world: ThreadedWorld, written: Path = written) -> Values:
            model = sharded(on_meta(lambda: built(transformers, family), world), world, rank, family)
            polyshard_huggingface.load(model, given)
            for name, buffer in model.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
            polyshard_huggingface.save(model, written, max_shard_size="20KB")
            return whole(model)

        for values in ThreadedWorld(ranks).run(in_and_out):
            assert values.keys() == expected.keys()
            assert all(torch.equal(values[name], expected[name]) for name in expected)
        again, told = type(reference).from_pretrained(written, output_loading_info=True)
        assert not any(told.values())
        assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
        # The names are those that Transformers writes, not those that the model has.
        indices = [json.loads((each / "model.safetensors.index.json").read_text()) for each in (given, written)]
        assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
        assert indices[0]["metadata"] == indices[1]["metadata"]


@pytest.mark.parametrize("family", FAMILIES)
def test_streams_have_names_and_shapes_of_files_where_asked(
    family: str, transformers: ModuleType, tmp_path: Path
) -> None:
    given = saved(built(transformers, family), tmp_path / "given")
    expected = load_file(given / "model.safetensors")
    kind = type(built(transformers, family))

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[Values, Values]:
        with world.lock:
            model = kind.from_pretrained(given)
        model = sharded(model, world, rank, family)
        found: list[Values] = []
        for settings in ({"ranks": [1]}, {"bucket_nbytes": 1 << 20, "dtype": torch.bfloat16}):
            found.append({})
            for names, tensors in polyshard_huggingface.as_saved(model, polyshard.stream(model, **settings)):
                assert not found[-1].keys() & set(names)
                found[-1].update(zip(names, tensors, strict=True))
        return found[0], found[1]

    for rank, (first, narrow) in enumerate(ThreadedWorld(2).run(on_rank)):
        assert first.keys() == (expected.keys() if rank == 1 else set())
        assert all(torch.equal(value, expected[name]) for name, value in first.items())
        assert narrow.keys() == expected.keys()
        assert all(torch.equal(value, expected[name].bfloat16()) for name, value in narrow.items())


def test_a_base_model_is_read_into_one_with_a_head(transformers: ModuleType, tmp_path: Path) -> None:
    base = transformers.LlamaModel(transformers.LlamaConfig(**_LLAMA))
    given = saved(base, tmp_path / "given")

    def read(rank: int, world: ThreadedWorld) -> Values:
        def make() -> Any:
            return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**_LLAMA, num_labels=3))

        model = on_meta(make, world)
        with world.lock:  # threads share one random state
            seed_all(1)
        sharded(model, world, rank, "llama", fresh=("score.*",))
        polyshard_huggingface.load(model, given, missing=["score.*"])
        return whole(model)

    for values in ThreadedWorld(2).run(read):
        head = values.pop("score.weight")
        # Transformers draws it with a deviation of 0.02.
        assert 0.01 < head.std() < 0.03
        assert {name.removeprefix("model.") for name in values} == base.state_dict().keys()
        assert all(torch.equal(value, base.state_dict()[name.removeprefix("model.")]) for name, value in values.items())


def test_a_model_with_a_head_is_read_into_its_base(transformers: ModuleType, tmp_path: Path) -> None:
    given = saved(built(transformers, "llama"), tmp_path / "given")
    expected = transformers.LlamaModel.from_pretrained(given).state_dict()

    def read(rank: int, world: ThreadedWorld) -> Values:
        config = transformers.LlamaConfig(**_LLAMA)
        model = sharded(on_meta(lambda: transformers.LlamaModel(config), world), world, rank, "llama")
        with pytest.raises(ConfigError, match=r"1 in the files and not in the model: 'lm_head.weight'"):
            polyshard_huggingface.load(model, given)
        polyshard_huggingface.load(model, given, unexpected=["lm_head.*"])
        return whole(model)

    for values in ThreadedWorld(2).run(read):
        assert all(torch.equal(values[name], expected[name]) for name in expected)
