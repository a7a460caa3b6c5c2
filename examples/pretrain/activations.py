"""Which activations of a block are kept for the backward, and which are computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from settings import ActivationCheckpointing
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

#: What takes longest to compute again, for the bytes that it takes to keep: matrix products and attention.
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def checkpoint_blocks(blocks: nn.ModuleList, settings: ActivationCheckpointing) -> None:
    """Let every ``settings.every``-th of ``blocks``, from the first, compute activations again in its backward.

    "full" keeps a block's inputs alone, "selective" the results of its products and of attention as well.
    """
    if settings.mode == "none":
        return
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
    for block in list(blocks)[:: settings.every]:
        block.forward = _checkpointed(block.forward, contexts if settings.mode == "selective" else noop_context_fn)


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any]) -> Callable[..., Any]:
    # A function of this file, which torch.compile follows into the checkpoint; it stops before one of torch's own.
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return checkpointed


def _policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
