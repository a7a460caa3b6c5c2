"""Dtypes as settings: by name or as ``torch.dtype``, and how wide each is."""

from __future__ import annotations

import difflib

import torch
from polyshard.errors import ConfigError

#: What a setting of a dtype takes: a name, a ``torch.dtype``, or None where the setting has a meaning for it.
DtypeSetting = str | torch.dtype | None

#: The dtypes that parameters compute in and gradients are reduced in, in order of width.
COMPUTABLE: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_BY_NAME: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
    "double": torch.float64,
}


def resolve_dtype(value: DtypeSetting, where: str) -> torch.dtype | None:
    """The dtype that ``value`` means, or None for None and for ``"none"`` (a TOML file cannot say None).

    ``where`` names the setting in messages. Raises ``ConfigError`` for an unknown name and for a dtype that
    parameters cannot compute in.
    """
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        if value in COMPUTABLE:
            return value
        raise ConfigError(
            f"{value} is not a dtype to compute or reduce in, in {where}. Use one of "
            f"{', '.join(str(dtype) for dtype in COMPUTABLE)}."
        )
    if not isinstance(value, str):
        raise ConfigError(
            f"a {type(value).__name__} is not a dtype, in {where}. Give a name such as 'bf16', or a torch.dtype."
        )
    name = value.casefold().removeprefix("torch.")
    if name == "none":
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"no dtype has the name {value!r}, in {where}. {hint}Names: {', '.join(_BY_NAME)}.")


def narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one with fewer bytes an element; ``second`` where both have as many."""
    return first if first.itemsize < second.itemsize else second


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether ``wide`` represents every value of ``narrow``; fp16 and bf16 do not hold each other."""
    return wide == narrow or wide.itemsize > narrow.itemsize
