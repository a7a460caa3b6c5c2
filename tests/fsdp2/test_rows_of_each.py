"""The layout of ``fully_shard`` keeps the contract of layouts, and cuts as ``torch.chunk`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from polyshard.interfaces import Layout, ParameterGeometry, PluginContext, UnitGeometry
from polyshard_fsdp2._settings import RowsOfEach
from polyshard_testing import LayoutSuite


def rows_of_each(context: PluginContext) -> RowsOfEach:
    """What an entry point would name: the class is given as an object, and takes no context."""
    return RowsOfEach()


rows_of_each.api_version = 1  # type: ignore[attr-defined]


class TestRowsOfEach(LayoutSuite):
    def make(self) -> Layout:
        return RowsOfEach()

    def factory(self) -> Callable[..., Any]:
        return rows_of_each


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(301, 173), (7, 3, 2), (5,), (1, 9), (2, 4096)])
def test_slices_are_the_chunks_of_torch(shape: tuple[int, ...], shards: int) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parameter = ParameterGeometry("weight", shape, whole.stride(), torch.float32, True)
    (arrangement,) = RowsOfEach().arrange(UnitGeometry("unit", (parameter,), shards, 4))
    chunks = torch.chunk(whole, shards)
    flat = whole.flatten()
    for rank in range(shards):
        ours = flat[rank * arrangement.shard_numel : (rank + 1) * arrangement.shard_numel]
        theirs = chunks[rank].flatten() if rank < len(chunks) else flat[:0]
        assert torch.equal(ours, theirs)
