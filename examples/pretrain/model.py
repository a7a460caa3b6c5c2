"""Transformers' Llama or Mixtral: nothing in it knows that it will be sharded."""

from __future__ import annotations

import zlib
from typing import TypeAlias

import torch
from experts import Experts, balance_loss
from settings import Settings
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

#: Without experts, and with some. Transformers' Mixtral is its Llama with experts in each block.
Model: TypeAlias = LlamaForCausalLM | MixtralForCausalLM
Config: TypeAlias = LlamaConfig | MixtralConfig


def model_config(settings: Settings, vocabulary: int, end_of_text: int) -> Config:
    """What ``settings`` ask for. ``vocabulary``: tokens that there are; ``end_of_text``: the one between documents."""
    model = settings.model
    shape = {
        "vocab_size": vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "max_position_embeddings": settings.training.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    if not model.num_local_experts:
        return LlamaConfig(**shape)
    return MixtralConfig(
        **shape,
        num_local_experts=model.num_local_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        router_aux_loss_coef=model.router_aux_loss_coef,
    )


def build_on_meta(config: Config) -> Model:
    """The model without memory for its parameters, which are fp32."""
    with torch.device("meta"):
        if isinstance(config, MixtralConfig):
            model = MixtralForCausalLM(config)
            for block in model.model.layers:
                block.mlp.experts = Experts(config)
        else:
            model = LlamaForCausalLM(config)
    # A few numbers that follow from the configuration, and that no one would compute again.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


class Stage(nn.Module):
    """The blocks of one stage of a pipeline, under their names in the whole model.

    The first stage takes tokens and has the embedding, the last one has the head and returns logits; between stages
    travel the activations of blocks, ``[sequences, context, hidden]``.
    """

    def __init__(self, whole: LlamaForCausalLM, number: int, stages: int) -> None:
        """Take the parts of stage ``number`` out of ``whole``, which is of no use afterwards."""
        super().__init__()
        self.config = whole.config
        #: Of the tokens, ``[1, context]``, where they are parts of sequences.
        self.positions: torch.Tensor | None = None
        self.model = whole.model
        blocks = self.model.layers
        self.model.layers = nn.ModuleList()
        for index in range(number * len(blocks) // stages, (number + 1) * len(blocks) // stages):
            self.model.layers.add_module(f"{index}", blocks[index])
        if number > 0:
            self.model.embed_tokens = None
        self.lm_head = None
        if number == stages - 1:
            self.lm_head = whole.lm_head
        else:
            self.model.norm = nn.Identity()

    @property
    def shared(self) -> nn.Module | None:
        """What has the weight that the first and the last stage have in common, if this is one of the two."""
        if not self.config.tie_word_embeddings:
            return None
        found: nn.Module | None = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return found

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """``given``: int64 ``[sequences, context]`` for the first stage, what the one before returned for others."""
        name = "inputs_embeds" if self.model.embed_tokens is None else "input_ids"
        made = self.model(**{name: given}, position_ids=self.positions, use_cache=False)
        hidden: torch.Tensor = made.last_hidden_state
        return hidden if self.lm_head is None else self.lm_head(hidden)


class Initializer:
    """Fills one parameter after another, each from a stream of random numbers of its own.

    What a parameter begins with follows from its name and the seed, whatever is initialised before it, and where.
    """

    def __init__(self, model: Model | Stage, seed: int) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        if model.config.tie_word_embeddings and model.model.embed_tokens is not None:
            # One parameter, which two stages may have one each of.
            self._names[model.model.embed_tokens] = "lm_head"
        self._std: float = model.config.initializer_range
        self._seed = seed

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Fill the parameters that ``module`` holds directly."""
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, (LlamaRMSNorm, MixtralRMSNorm)):
                parameter.fill_(1.0)
            else:
                seed = zlib.crc32(f"{self._seed}:{self._names[module]}.{name}".encode())
                generator = torch.Generator(parameter.device).manual_seed(seed)
                parameter.normal_(std=self._std, generator=generator)


def logits_of(model: nn.Module, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """``[sequences, context, vocabulary]`` for ``inputs``, int64 ``[sequences, context]``.

    ``positions``: of ``inputs``, ``[1, context]``, where they are parts of sequences.
    """
    logits: torch.Tensor = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
    return logits


def logits_and_balance(
    model: Model, inputs: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits_of``, and the load-balancing loss of its experts; 0 of a model without."""
    config = model.config
    if not isinstance(config, MixtralConfig):
        logits = logits_of(model, inputs, positions)
        return logits, logits.new_zeros(())
    made = model(input_ids=inputs, position_ids=positions, use_cache=False, output_router_logits=True)
    return made.logits, balance_loss(made.router_logits, config.num_experts_per_tok)


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy in nats, summed over tokens, in fp32. ``targets``: int64 ``[sequences, context]``."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
