"""Private names of torch that a trace needs, each with what makes it so. Looked at in torch 2.11 to 2.15."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# The one way to see every operation of a backward, too; torch's own FLOP and memory counters are built on it.

# Nested arguments and results as the dispatcher has them: torch.fx.immutable lists and named tuples among them.

__all__ = [
    "TorchDispatchMode",
    "argument",
    "attention",
    "tree_leaves",
    "tree_map",
]

# The kernels that scaled_dot_product_attention chooses between on CUDA have no public names; what they save for
# backward, and the order of their results, is theirs.
_aten = torch.ops.aten


def attention(
    kernel: Literal["flash", "efficient", "math"],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention by one of them.

    ``flash``: ``[batch, heads, length, width]``, halves, no bias; keys and values may have fewer heads. ``efficient``:
    the same with a bias ``[batch, heads, length, length]``, in any dtype. ``math``: any number of dimensions, by
    products and a softmax.
    """
    if kernel == "flash":
        found = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)
    elif kernel == "efficient":
        operands = (query, key, value, bias, True, dropout, causal)
        found = _aten._scaled_dot_product_efficient_attention(*operands, scale=scale)
    else:
        found = _aten._scaled_dot_product_attention_math(query, key, value, bias, dropout, causal, None, scale=scale)
    return cast("torch.Tensor", found[0])


def argument(func: Any, name: str, args: Any, kwargs: dict[str, Any], default: Any) -> Any:
    """The argument called ``name`` of an operation: only its schema knows at which place it stands."""
    for index, each in enumerate(func._schema.arguments):
        if each.name == name:
            return args[index] if index < len(args) else kwargs.get(name, default)
    return default
