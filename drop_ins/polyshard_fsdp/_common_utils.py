"""Names, states and small look-ups that the drop-in's files share: torch's own, but for two."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyshard.errors import warn_once

from ._torch_private import FLAT_PARAM as FLAT_PARAM
from ._torch_private import FSDP_FLATTENED as FSDP_FLATTENED
from ._torch_private import FSDP_PREFIX as FSDP_PREFIX
from ._torch_private import HandleTrainingState as HandleTrainingState
from ._torch_private import TrainingState as TrainingState
from ._torch_private import _get_fsdp_handles as _get_fsdp_handles
from ._torch_private import _get_fsdp_states as _get_fsdp_states
from ._torch_private import _get_module_fsdp_state as _get_module_fsdp_state
from ._torch_private import _is_fsdp_flattened as _is_fsdp_flattened
from ._torch_private import clean_tensor_name as clean_tensor_name

#: Warns once a process on every rank, as FSDP does, also of what all ranks see alike.
warn = partial(warn_once, rank=0)


def _get_handle_fqns_from_root(state: Any, handle: Any | None) -> list[str] | None:
    """The clean names, seen from the root of ``state``, of the parameters in ``handle``; None without a handle."""
    return None if handle is None else [clean_tensor_name(name) for name in handle.unit.spec.parameter_names]
