"""Holds ``Bf16ButNorms`` to the contract of precision plugins."""

from __future__ import annotations

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard_testing import PrecisionSuite, plugin_context

from acme.bf16_but_norms import Bf16ButNorms


class TestBf16ButNorms(PrecisionSuite):
    def make(self) -> Bf16ButNorms:
        return Bf16ButNorms(plugin_context())


def test_layers_compute_in_bfloat16_and_normalisation_in_its_own_dtype() -> None:
    precision = Bf16ButNorms(plugin_context())
    units = [unit for unit in PrecisionSuite().units() if unit.master_dtype is torch.float32]
    computed = {unit.module_class: precision.dtypes(unit).compute for unit in units}
    assert computed[torch.nn.Linear] is torch.bfloat16
    assert computed[torch.nn.LayerNorm] is torch.float32


def test_a_dtype_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="give one of bfloat16"):
        Bf16ButNorms(plugin_context(), compute="int8")
