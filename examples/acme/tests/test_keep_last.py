"""Holds ``KeepLast`` to the contract of policies."""

from __future__ import annotations

from polyshard.interfaces import PolicyContext
from polyshard_testing import PolicySuite, plugin_context
from torch import nn

from acme.keep_last import KeepLast


class TestKeepLast(PolicySuite):
    def make(self) -> KeepLast:
        return KeepLast(plugin_context())


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)


def test_entries_are_chosen_and_the_last_one_stays_gathered() -> None:
    model = _Model()
    plan = KeepLast(plugin_context(), attribute="blocks").plan(model, PolicyContext())
    assert plan == {model.blocks[0]: {}, model.blocks[1]: {"reshard_after_forward": False}}
