"""Computes in bfloat16 or another dtype, normalisation layers aside; gradients keep the dtype of their parameters."""

from __future__ import annotations

from typing import Any

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import InputCast, OutputCast, PluginContext, PrecisionPlugin, UnitDtypes, UnitSpec
from polyshard.nested import map_tensors
from torch import nn

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


class Bf16ButNorms(PrecisionPlugin):
    """Units compute in the dtype called ``compute``; normalisation layers in that of their own parameters."""

    api_version = 1

    def __init__(self, context: PluginContext, compute: str = "bfloat16") -> None:
        if compute not in _DTYPES:
            raise ConfigError(f"compute of precision {context.name!r} is {compute!r}; give one of {', '.join(_DTYPES)}")
        self._compute = _DTYPES[compute]

    def leaves_alone(self, module: nn.Module) -> bool:
        return isinstance(module, _NORMS)

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        master = unit.master_dtype
        return UnitDtypes(compute=self._computes_in(unit), communication=master, reduce=master, grad=master)

    def input_cast(self, unit: UnitSpec) -> InputCast:
        dtype = self._computes_in(unit)

        def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            arguments: tuple[tuple[Any, ...], dict[str, Any]] = _floats_to(dtype, (args, kwargs))
            return arguments

        return cast

    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        if not issubclass(unit.module_class, _NORMS):
            return None
        return lambda output: _floats_to(self._compute, output)

    def _computes_in(self, unit: UnitSpec) -> torch.dtype:
        keeps = issubclass(unit.module_class, _NORMS) or not unit.master_dtype.is_floating_point
        return unit.master_dtype if keeps else self._compute


def _floats_to(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with every floating-point tensor in it, however deep, in ``dtype``; the rest stays the same object."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)
