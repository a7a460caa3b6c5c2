"""Sharded training in scripts of Hugging Face's Accelerate::

    from polyshard import ShardConfig
    from polyshard_accelerate import Accelerator

    accelerator = Accelerator(shard=ShardConfig(policy={"name": "transformer", "layers": Block}))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of the script stays as it is: ``docs/accelerate.md``.
"""

from __future__ import annotations

from .accelerator import Accelerator

__all__ = ["Accelerator"]
