"""Holds ``Tally`` to the contract of listeners."""

from __future__ import annotations

import pytest
from polyshard.errors import ConfigError
from polyshard_testing import ListenerSuite, plugin_context

from acme.tally import Tally


class TestTally(ListenerSuite):
    def make(self) -> Tally:
        return Tally(plugin_context())


@pytest.mark.parametrize(("rank", "lines"), [(0, ["step 2: 0 gathers, 0 reductions"]), (1, [])])
def test_rank_0_logs_every_second_step(rank: int, lines: list[str], caplog: pytest.LogCaptureFixture) -> None:
    listener = Tally(plugin_context(rank=rank, world_size=2), every=2)
    with caplog.at_level("INFO"):
        for _ in range(3):
            listener.step_begin()
            listener.step_end()
    assert caplog.messages == lines


def test_every_zeroth_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        Tally(plugin_context(), every=0)
