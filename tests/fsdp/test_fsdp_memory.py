"""What a step holds on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsdp_parity import memory
from fsdp_parity.memory import MIB, Measured
from fsdp_parity.ranks import Pools

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pools]:
    """Only CUDA's allocator tells what it has given out."""
    pools = Pools("cuda")
    yield pools
    pools.close()


def _expected(measured: Measured, turn: int) -> dict[str, int]:
    """In MiB, a shard rounded down: parameters, gradients, from the first step on momentum, and one for the batch."""
    shard = round(measured.model / MIB) // 2
    momentum = shard if turn else 0
    return {
        "start": shard + momentum + 1,
        "after backward": 2 * shard + momentum + 1,
        "after step": 3 * shard + 1,
        "done": 2 * shard + 1,
    }


class TestFSDPMemory:
    """Four steps, the same at each."""

    @pytest.mark.parametrize("use_orig_params", [False, True])
    @pytest.mark.parametrize("recomputes", [False, True])
    def test_fsdp_memory(self, gpus: Pools, recomputes: bool, use_orig_params: bool) -> None:
        for measured in gpus.run(2, memory.allocated_in_steps, recomputes, {"use_orig_params": use_orig_params}):
            assert len(measured.ours) == memory.ITERATIONS
            for turn, (ours, torchs) in enumerate(zip(measured.ours, measured.torchs, strict=True)):
                for point, wanted in _expected(measured, turn).items():
                    assert abs(round(ours[point] / MIB) - wanted) <= 1, (turn, point, measured)
                for point, theirs in torchs.items():
                    # It may be less, as after the first step with `use_orig_params`.
                    assert ours[point] - theirs <= MIB, (turn, point, measured)
