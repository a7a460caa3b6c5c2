"""Carrying out an ``auto_wrap_policy``: torch's functions, where programs look for them."""

from ._torch_private import _auto_wrap as _auto_wrap
from ._torch_private import _validate_frozen_params as _validate_frozen_params
