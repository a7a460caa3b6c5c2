"""Weights in the files of Hugging Face, straight into the shards of a model and out of them.

A model is built on the meta device, sharded, and read: each rank reads the elements that it keeps::

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    polyshard.shard(model, config, initializer=polyshard_huggingface.to_be_loaded(model))
    polyshard_huggingface.load(model, folder)

    polyshard_huggingface.save(model, "trained")
    LlamaForCausalLM.from_pretrained("trained")

Neither Transformers nor safetensors is needed: a file is a header in JSON and the tensors behind it, and the library
that reads it has no call for a range of elements, which is what a rank holds.
"""

from __future__ import annotations

from .conversion import Conversion
from .engines import as_saved, merged
from .loading import load
from .saving import save
from .unloaded import to_be_loaded

__all__ = ["Conversion", "as_saved", "load", "merged", "save", "to_be_loaded"]
