"""The dtypes that a checkpoint can hold, by the names that stand in its manifest."""

from __future__ import annotations

import torch

_NAMES = (
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)

#: A name in a file is looked up here, never in a module.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
#: Of these numpy has the same, in the same bytes.
NUMPY = frozenset(name for name in _NAMES if name != "bfloat16" and not name.startswith("float8"))
