"""FSDP instances inside a module: torch's functions, where programs look for them."""

from ._torch_private import _get_fsdp_handles as _get_fsdp_handles
from ._torch_private import _get_fsdp_states as _get_fsdp_states
