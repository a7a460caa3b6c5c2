"""Dtypes as safetensors names them."""

from __future__ import annotations

import torch

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
#: Among these a value keeps its meaning when it is cast.
_CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def dtype_called(name: str) -> torch.dtype | None:
    """The dtype that a file calls ``name``; None where torch has none."""
    return _DTYPES.get(name)


def name_of(dtype: torch.dtype) -> str | None:
    """What a file calls ``dtype``; None where the format has no name for it."""
    return _NAMES.get(dtype)


def castable(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of ``saved`` may be read as ``wanted``."""
    return saved == wanted or (saved in _CASTABLE and wanted in _CASTABLE)
