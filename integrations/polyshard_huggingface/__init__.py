"""Weights in the files of Hugging Face, straight into the shards of a model and out of them.

A model is built on the meta device, sharded, and read: each rank reads the elements that it keeps::

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    polyshard.shard(model, config, initializer=polyshard_huggingface.to_be_loaded(model))
    polyshard_huggingface.load(model, folder)

    polyshard_huggingface.save(model, "trained")
    LlamaForCausalLM.from_pretrained("trained")

Transformers is needed for its own models, and where tensors are renamed or joined.
"""

from __future__ import annotations

from .engines import as_saved, merged
from .loading import load
from .saving import save
from .unloaded import to_be_loaded

__all__ = ["as_saved", "load", "merged", "save", "to_be_loaded"]
