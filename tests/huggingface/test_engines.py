"""Adapters merged into what a stream hands out, and tensors put together as files have them."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from parity import chain, one_core, seed_all, sharded_copy
from polyshard.errors import ConfigError, UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

# Importing Transformers and PEFT takes most of the first one's time.
pytestmark = pytest.mark.slow

Values = dict[str, torch.Tensor]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj", "embed_tokens"]}


@pytest.fixture(scope="module")
def peft() -> Iterator[ModuleType]:
    """Imported late: every process collects this file, and one of them runs it."""
    with warnings.catch_warnings(action="ignore"):
        import peft

        with one_core():
            yield peft


def adapted(peft: ModuleType, config: str = "LoraConfig", family: str = "Llama", **settings: Any) -> Any:
    """With adapters of values that are no first ones'."""
    import transformers

    shape = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    seed_all(3)
    made = getattr(transformers, f"{family}Config")(**shape, **heads)
    with warnings.catch_warnings(action="ignore"):
        model = peft.get_peft_model(
            getattr(transformers, f"{family}ForCausalLM")(made),
            getattr(peft, config)(task_type="CAUSAL_LM", **settings),
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def layers(model: nn.Module) -> dict[str, Any]:
    return {"name": "transformer", "layers": [type(model.get_base_model().model.layers[0])]}  # type: ignore[operator]


def collected(weights: Any) -> Values:
    return {name: each for names, tensors in weights for name, each in zip(names, tensors, strict=True)}


def same(got: Values, wanted: Mapping[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(
        each.dtype == wanted[name].dtype and torch.equal(each, wanted[name]) for name, each in got.items()
    )


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (LORA, torch.float32),
        ({**LORA, "target_modules": "all-linear", "use_rslora": True}, torch.bfloat16),
        ({**LORA, "target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}, torch.float64),
        ({**LORA, "use_dora": True}, torch.float32),
        ({"config": "IA3Config", "target_modules": ["q_proj"], "feedforward_modules": []}, torch.float32),
    ],
    ids=["embedding", "all linear", "modules to save", "magnitudes", "scales"],
)
def test_merged_weights_are_those_of_merge_and_unload(
    peft: ModuleType, settings: dict[str, Any], kept: torch.dtype
) -> None:
    plain = adapted(peft, **settings).to(kept)
    wanted = copy.deepcopy(plain).merge_and_unload().state_dict()

    def on_rank(rank: int, world: ThreadedWorld) -> list[bool]:
        model = sharded_copy(plain, rank, world, policy=layers(plain))
        before = collected(polyshard.stream(model))
        found = [
            same(collected(polyshard_huggingface.merged(model)), wanted),
            same(
                collected(polyshard_huggingface.merged(model, dtype=torch.bfloat16, bucket_nbytes=1 << 20)),
                {name: each.bfloat16() for name, each in wanted.items()},
            ),
            same(collected(polyshard_huggingface.merged(model, ranks=[1])), wanted if rank == 1 else {}),
        ]
        return [*found, same(collected(polyshard.stream(model)), before)]

    for found in ThreadedWorld(2).run(on_rank):
        assert all(found), found


def test_several_adapters_are_added_and_one_is_chosen(peft: ModuleType) -> None:
    plain = adapted(peft, **LORA)
    plain.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.normal_() if "other" in name else None
    wanted = {
        names: copy.deepcopy(plain).merge_and_unload(adapter_names=list(names)).state_dict()
        for names in (("other",), ("default", "other"))
    }

    def on_rank(rank: int, world: ThreadedWorld) -> list[bool]:
        model = sharded_copy(plain, rank, world, policy=layers(plain))
        return [
            same(collected(polyshard_huggingface.merged(model, adapters=names)), values)
            for names, values in wanted.items()
        ]

    for found in ThreadedWorld(2).run(on_rank):
        assert all(found), found


def test_merged_weights_come_in_names_of_files(peft: ModuleType) -> None:
    """Mixtral's files have three tensors for each expert, and the model two for all of them."""
    plain = adapted(peft, family="Mixtral", **{**LORA, "target_modules": ["q_proj"]})
    unloaded = copy.deepcopy(plain).merge_and_unload().state_dict()

    def on_rank(rank: int, world: ThreadedWorld) -> Values:
        model = sharded_copy(plain, rank, world, policy=layers(plain))
        return collected(polyshard_huggingface.as_saved(model, polyshard_huggingface.merged(model)))

    for found in ThreadedWorld(2).run(on_rank):
        for layer in range(2):
            experts = f"model.layers.{layer}.mlp.experts"
            gate, up = unloaded[f"{experts}.gate_up_proj"][3].chunk(2)
            moved = f"model.layers.{layer}.block_sparse_moe.experts.3"
            assert torch.equal(found[f"{moved}.w1.weight"], gate)
            assert torch.equal(found[f"{moved}.w3.weight"], up)
            query = f"model.layers.{layer}.self_attn.q_proj.weight"
            assert torch.equal(found[query], unloaded[query])
        assert not any("gate_up_proj" in name for name in found)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ("LoraConfig", {"target_modules": ["q_proj"], "trainable_token_indices": [3]}, "embed_tokens' has an adapter"),
        ("LoraConfig", {"target_modules": ["q_proj"], "lora_bias": True}, "q_proj' has an adapter.*no bias"),
        ("PromptTuningConfig", {"num_virtual_tokens": 4}, "PeftModelForCausalLM"),
    ],
)
def test_what_peft_merges_otherwise_is_refused_by_name(
    peft: ModuleType, config: str, settings: dict[str, Any], words: str
) -> None:
    plain = adapted(peft, config, **settings)

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(plain, rank, world, policy=layers(plain))
        with pytest.raises(UnsupportedError, match="which is not merged here") as caught:
            polyshard_huggingface.merged(model)
        return str(caught.value)

    for rank, message in enumerate(ThreadedWorld(2).run(on_rank)):
        assert re.search(words, message)
        assert f"rank {rank}" in message


def test_adapters_that_no_layer_has_are_refused(peft: ModuleType) -> None:
    plain = adapted(peft, **LORA)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(plain, rank, world, policy=layers(plain))
        with pytest.raises(ConfigError, match="no layer has an adapter 'orther'"):
            polyshard_huggingface.merged(model, adapters=["orther"])
        with pytest.raises(ConfigError, match=r"as_saved\(\) got 'base_model.*', which the model lacks"):
            next(polyshard_huggingface.as_saved(model, polyshard.stream(model)))

    ThreadedWorld(2).run(on_rank)


def test_tensors_that_are_joined_wait_for_all_of_their_parts() -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    # Files have one matrix of both, and its second half turned.
    plain = chain(left=nn.Linear(4, 4, bias=False), right=nn.Linear(4, 4, bias=False))
    convert = [WeightConverter("both", ["left.weight", "right.weight"], operations=[Chunk(dim=0)])]

    def on_rank(rank: int, world: ThreadedWorld) -> Values:
        model = sharded_copy(plain, rank, world, policy={"name": "module_class", "classes": [nn.Linear]})
        with pytest.raises(ConfigError, match=r"got no 'right.weight', which .* together with 'left.weight'"):
            for _ in polyshard_huggingface.as_saved(
                model, polyshard.stream(model, names=lambda name: name if "left" in name else None), convert=convert
            ):
                pass
        lists = list(map(list, polyshard_huggingface.as_saved(model, polyshard.stream(model), convert=convert)))
        assert [names for names, _ in lists] == [[], ["both"]]
        return collected(polyshard_huggingface.as_saved(model, polyshard.stream(model), convert=convert))

    for found in ThreadedWorld(2).run(on_rank):
        assert same(found, {"both": torch.cat([plain.left.weight, plain.right.weight]).detach()})
