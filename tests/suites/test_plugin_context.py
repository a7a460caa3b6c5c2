"""``polyshard.testing.plugin_context``: factories of plugins that are made of others are tested with it."""

from __future__ import annotations

import pytest
import torch
from polyshard.errors import PluginNotFoundError
from polyshard.interfaces import Group, PolicyContext
from polyshard.testing import plugin_context


def test_it_constructs_plugins_by_name() -> None:
    context = plugin_context("outer", device="cpu")
    assert (context.name, context.device) == ("outer", torch.device("cpu"))
    assert (context.rank, context.world_size) == (None, None)
    fake = context.construct(Group.COLLECTIVES, {"name": "fake", "world_size": 3})
    assert fake.world_size == 3
    assert context.construct(Group.PRECISION, "bf16").capabilities.encodes is False
    assert context.construct(Group.OFFLOAD, "cpu").capabilities.parks is True
    root = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert set(context.construct(Group.POLICIES, "always").plan(root, PolicyContext())) == {root[0]}


def test_a_name_that_nothing_has_is_an_error_of_the_catalogue() -> None:
    with pytest.raises(PluginNotFoundError, match=r"no installed plugin of polyshard\.offload is named 'cpuu'"):
        plugin_context().construct(Group.OFFLOAD, "cpuu")


def test_rank_and_size_are_handed_on_for_listeners() -> None:
    context = plugin_context(rank=1, world_size=4)
    assert (context.rank, context.world_size) == (1, 4)
