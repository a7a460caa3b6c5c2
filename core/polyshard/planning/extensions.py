"""Parameters that say themselves how they are gathered: tensor subclasses with torch's extension protocol.

``fsdp_pre_all_gather`` answers the tensors that are gathered, of any dtypes, and ``fsdp_post_all_gather`` makes the
parameter that computes out of what arrived. The engine moves bytes and knows nothing of what they mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
#: Arguments of ``fsdp_pre_all_gather``: the mesh; or mesh, whole size and stride, module and precision policy.
_ARITIES = (1, 5)
_PLAIN = (torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class ExtensionArguments:
    """What every call of ``fsdp_pre_all_gather`` is given, besides what differs between parameters."""

    mesh: DeviceMesh
    """Of one dimension: the ranks that share the parameter."""
    policy: object
    """The user's ``MixedPrecisionPolicy``."""


def gathers_itself(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of a class of its own that has the protocol."""
    return type(tensor) not in _PLAIN and hasattr(tensor, _PRE) and hasattr(tensor, _POST)


def protocol_fault(tensor: torch.Tensor) -> str:
    """What keeps ``tensor``, of a class of its own, from being gathered, as text; empty for nothing."""
    has = [hasattr(tensor, _PRE), hasattr(tensor, _POST)]
    if not any(has):
        return f"not a plain tensor, and has no {_PRE} and {_POST} that would tell how it is gathered"
    if not all(has):
        there, missing = (_PRE, _POST) if has[0] else (_POST, _PRE)
        return f"not a plain tensor, and has {there} without {missing}"
    number = arity(tensor)
    if number not in _ARITIES:
        return (
            f"not a plain tensor, and its {_PRE} takes {number} arguments, instead of (mesh) or (mesh, outer_size, "
            "outer_stride, module, mp_policy)"
        )
    return ""


def arity(tensor: torch.Tensor) -> int:
    """How many arguments ``fsdp_pre_all_gather`` of ``tensor`` takes."""
    call: Any = getattr(tensor, _PRE)
    return len(inspect.signature(call).parameters)


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that ``tensor`` is made of, itself where its class does not say."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if type(tensor) in _PLAIN or flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from inner_tensors(inner)


def own_rows(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of ``whole`` that ``rank`` of ``ranks`` has, in memory of their own, of the class of ``whole``.

    Made by the operations that torch's FSDP2 uses: a class that serves the protocol has these.
    """
    with torch.inference_mode(False), torch.no_grad():
        chunks = torch.chunk(whole, ranks, dim=0)
        rows = chunks[rank].size(0) if rank < len(chunks) else 0
        padded = whole.new_zeros(chunks[0].size())
        if rows:
            padded.narrow(0, 0, rows).copy_(chunks[rank])
        return padded.narrow(0, 0, rows)
