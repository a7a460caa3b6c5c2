"""Settings that may be spelled in several ways and read as one type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ..errors import ConfigError
from ..interfaces import bytes_of
from .plugin_spec import PluginChoice


def device_of(value: torch.device | str | None) -> torch.device | None:
    """``value`` as a device; raises ``ConfigError`` for what is none that torch knows."""
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError as error:
            message = f"device {value!r} is none that torch knows. Write for example 'cpu' or 'cuda:0'."
            raise ConfigError(message) from error
    raise ConfigError(f"device must be a torch.device, a string or None, not {value!r}.")


def listeners_of(value: Iterable[PluginChoice]) -> tuple[PluginChoice, ...]:
    """``value`` as a tuple of plugins; raises ``ConfigError`` for a single one, and for what is no list."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"listeners must be a list of plugins, not {value!r}. Write [{value!r}] for a single one.")
    return tuple(value)


def memory_budget_of(value: int | str | None) -> int | None:
    """``value`` in bytes; raises ``ConfigError`` where it is not above 0."""
    if value is None:
        return None
    nbytes = bytes_of(value)
    if nbytes is None or nbytes <= 0:
        raise ConfigError(f"memory_budget must be bytes above 0, a number or text such as '70 GiB', not {value!r}.")
    return nbytes


def batch_nbytes_of(value: int | str) -> int:
    """``value`` in bytes; raises ``ConfigError`` where it is negative or no number of bytes."""
    nbytes = bytes_of(value)
    if nbytes is None or nbytes < 0:
        raise ConfigError(f"batch_nbytes must be bytes, 0 or more, a number or text such as '16 MiB', not {value!r}.")
    return nbytes
