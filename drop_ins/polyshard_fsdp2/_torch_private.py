"""Private names of torch that this package needs, with the versions in which they were looked at: 2.11 to 2.15."""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from inspect import unwrap
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _insert_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_state

#: Before ``torch.distributed.fsdp`` had FSDP2, it was imported from here; Transformers 5.23 and Lightning 2.6 still do.
_OLDER = "torch.distributed._composable.fsdp"


def places() -> list[ModuleType]:
    """The modules that programs import FSDP2 from, the public one first."""
    names = ["torch.distributed.fsdp"]
    if importlib.util.find_spec(_OLDER) is not None:
        names += [_OLDER, f"{_OLDER}.fully_shard"]
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
    return found


#: The class of what ``finalize_backward(async_op=True)`` returns, which torch has from 2.15 on.
GradientReductionHandle: Any = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)

#: What torch keeps of a module by FSDP2: its functions look for one of this class.
FSDPState: Any = _fsdp_state.FSDPState


def mesh_info_of(mesh: Any) -> Any:
    """What torch's functions take for the mesh of a ``fully_shard`` call, whose last dimension shards."""
    return _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=mesh.ndim - 1)


def note_composed(module: nn.Module, state: Any) -> None:
    """Let ``replicate`` see that ``module`` is sharded, and torch's functions find ``state``, an ``FSDPState``.

    They look into what composable functions keep in a module, and of it. The compiler, and Transformers where ranks
    must call a model equally often, ask each module inside by the two names below.
    """
    for inner in module.modules():
        inner._is_fsdp_managed_module = inner._fsdp_use_orig_params = True  # type: ignore[assignment]
    registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry.setdefault("fully_shard", RegistryItem())
    module.__dict__.setdefault(STATE_KEY, {})[unwrap(fully_shard)] = state
    _insert_module_state(module, state)


def premul_sum(factor: float) -> Any:
    """NCCL's sum of what is multiplied by ``factor`` before: what reductions of FSDP2 are given for other divisors."""
    return torch.distributed._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]


def flat_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The dimensions ``names`` of ``mesh`` as one, under the name that torch's FSDP2 gives it."""
    if len(names) == 1:
        return mesh[names[0]]
    flatten: Any = mesh[names]._flatten
    made: DeviceMesh = flatten("_".join(names))
    return made
