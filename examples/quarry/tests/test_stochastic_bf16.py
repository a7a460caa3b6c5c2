"""Holds ``StochasticBf16`` to the contract of precision plugins."""

from __future__ import annotations

import math

import torch
from polyshard.interfaces import UnitSpec
from polyshard_testing import PrecisionSuite, plugin_context

from quarry.stochastic_bf16 import StochasticBf16

ELEMENTS, FORWARDS = 256, 400


class TestStochasticBf16(PrecisionSuite):
    def make(self) -> StochasticBf16:
        return StochasticBf16(plugin_context())


def unit() -> UnitSpec:
    units = PrecisionSuite().units()
    return next(unit for unit in units if unit.master_dtype is torch.float32 and unit.shard_numel > ELEMENTS)


def rounded(precision: StochasticBf16, shard: torch.Tensor) -> torch.Tensor:
    """``shard`` as one rank alone gathers it."""
    spec = unit()
    whole = torch.zeros(spec.shard_numel)
    whole[: len(shard)] = shard
    (described,) = [precision.encoding(spec)]
    assert described is not None
    message = torch.empty(1, described.nbytes_per_rank, dtype=torch.uint8)
    out = torch.empty(1, spec.shard_numel, dtype=torch.bfloat16)
    precision.encode(spec, message[0], whole)
    precision.decode(spec, message, out)
    return out[0, : len(shard)].float()


def forwards(precision: StochasticBf16, shard: torch.Tensor, number: int) -> torch.Tensor:
    found = []
    for _ in range(number):
        precision.prepare([unit()], None)  # type: ignore[arg-type]
        found.append(rounded(precision, shard))
    return torch.stack(found)


def test_each_element_is_a_neighbour_and_the_mean_is_the_master() -> None:
    shard = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    found = forwards(StochasticBf16(plugin_context()), shard, FORWARDS)
    # The spacing of bfloat16, with 8 bits of mantissa, at each element.
    step = 2.0 ** (shard.abs().log2().floor() - 7)
    assert ((found - shard).abs() < step).all()
    # Of a coin between neighbours the standard deviation is at most half a step.
    assert ((found.mean(0) - shard).abs() / step).max() < 5 * 0.5 / math.sqrt(FORWARDS)
    # To the nearest, elements would be off by up to half a step each time, in one direction.
    assert ((shard.bfloat16().float() - shard).abs() / step).max() > 0.4


def test_what_bfloat16_can_hold_and_what_is_not_finite_stays() -> None:
    shard = torch.tensor([0.0, -1.5, 256.0, math.inf, -math.inf, math.nan])
    torch.testing.assert_close(rounded(StochasticBf16(plugin_context()), shard), shard, rtol=0, atol=0, equal_nan=True)


def test_a_gather_for_backward_rounds_as_its_forward_did_and_the_next_forward_otherwise() -> None:
    shard, precision = torch.full((ELEMENTS,), 1 + 2.0**-9), StochasticBf16(plugin_context())
    (first,) = forwards(precision, shard, 1)
    assert torch.equal(rounded(precision, shard), first)
    assert not torch.equal(forwards(precision, shard, 1)[0], first)


def test_a_run_that_goes_on_rounds_as_if_it_had_not_ended() -> None:
    shard, precision = torch.full((ELEMENTS,), 1 + 2.0**-9), StochasticBf16(plugin_context(), seed=3)
    forwards(precision, shard, 2)
    other = StochasticBf16(plugin_context(), seed=3)
    other.load_state_dict(precision.state_dict())
    assert torch.equal(forwards(other, shard, 2), forwards(precision, shard, 2))
