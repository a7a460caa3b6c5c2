"""When FSDP gathers and lets go, in calls."""

from __future__ import annotations

import pytest
from fsdp_parity import habits
from fsdp_parity.ranks import Pools


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Six units; the root, whose parameters would stay, has none.
        ("FULL_SHARD", [(12, 0), (12, 0), (12, 6), (12, 6), (12, 6)]),
        # Kept from one iteration under no_sync to the next forward.
        ("SHARD_GRAD_OP", [(6, 0), (0, 0), (0, 6), (6, 6), (6, 6)]),
        ("NO_SHARD", [(0, 0)] * 5),
    ],
)
def test_gathers_under_no_sync(ranks: Pools, strategy: str, expected: list[tuple[int, int]]) -> None:
    assert ranks.run(2, habits.gathers_under_no_sync, strategy) == [expected, expected]


@pytest.mark.parametrize(("inputs_require_grad", "expected"), [(True, [6, 6]), (False, [5, 6])])
def test_ends_of_backward(ranks: Pools, inputs_require_grad: bool, expected: list[int]) -> None:
    """A frozen unit whose inputs want no gradient is let go of when the whole backward ends."""
    assert ranks.run(2, habits.ends_of_backward, inputs_require_grad) == [expected, expected]
