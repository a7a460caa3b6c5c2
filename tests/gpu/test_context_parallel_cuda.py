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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(WORLD_SIZE < 2, reason="parts need two ranks: POLYSHARD_RANKS_ON_ONE_GPU=2"),
]


def on_rank(rank: int, way: str, sizes: tuple[int, int]) -> Ended:
    """``train`` in fp32 on the rank's device."""
    with warnings.catch_warnings():
        # Torch's own attention ends a generator in a way that Python 3.12 deprecates.
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return train(rank, way, sizes, "cuda", torch.float32)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)], ids=["1x2", "2x2"])
@pytest.mark.parametrize("way", ["names", "flattened", "fully_shard", "fsdp"])
def test_parts_of_sequences_train_as_whole_ones(way: str, sizes: tuple[int, int]) -> None:
    number = sizes[0] * sizes[1]
    if number > WORLD_SIZE:
        pytest.skip(f"{number} ranks: POLYSHARD_RANKS_ON_ONE_GPU={number}")
    ranks = RANKS.run(number, on_rank, way, sizes)
    assert_as_whole(ranks, sizes[0], torch.float32, 1e-4)
