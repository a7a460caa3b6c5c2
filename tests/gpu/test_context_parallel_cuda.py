"""Torch's ``context_parallel`` around sharded models over NCCL; the CPU twin is in ``tests/meshes``.

Torch has attention over several ranks in half precision and fp32 alone: what is compared is within their rounding.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from long_sequences import Ended, assert_as_whole, train
from processes import KeptRanks, gpu_ranks

WORLD_SIZE = gpu_ranks(4)
RANKS = KeptRanks("nccl")
SIZES = (max(1, WORLD_SIZE // 2), 2)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD_SIZE not in (2, 4), reason="2 or 4 ranks: see POLYSHARD_RANKS_ON_ONE_GPU"),
]


def on_rank(rank: int, way: str) -> Ended:
    """``train`` in fp32 on the rank's device."""
    with warnings.catch_warnings():
        # Torch's own attention ends a generator in a way that Python 3.12 deprecates.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return train(rank, way, SIZES, "cuda", torch.float32)


@pytest.mark.parametrize("way", ["names", "flattened", "fully_shard", "fsdp"])
def test_parts_of_sequences_train_as_whole_ones(way: str) -> None:
    ranks = RANKS.run(WORLD_SIZE, on_rank, way)
    assert_as_whole(ranks, SIZES[0], torch.float32, 1e-4)
