"""Programs that call torch's ``fully_shard`` run over ours, unedited, and find what they find over torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import titan
from fsdp2_models import alike, copied, forget_trainers
from parity import seed_all
from processes import KeptRanks


def _unedited(rank: int, program: Callable[..., Any], *args: Any) -> None:
    """``program(...)`` finds the same over torch's ``fully_shard`` and over ours in its place."""
    import polyshard_fsdp2

    # Of torch's compiler, of its random numbers over DTensors, and of its FSDP2.
    warnings.simplefilter("ignore")
    forget_trainers()
    found = []
    for context in (nullcontext, polyshard_fsdp2.install):
        seed_all(0)
        with context():
            found.append(copied(program(*args)))
    alike(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("program", "args"),
    [
        # Torch's own compiler of backwards fails over sequence parallel norms (torch 2.13).
        (titan.llama, ({"shard": 2, "tensor": 2}, "eager")),
        (titan.llama, ({"replicate": 2, "shard": 2}, "aot_eager")),
        (titan.mixture, (2,)),
    ],
    ids=["llama_tensor_parallel", "llama_replicated", "mixture"],
)
def test_torchtitan(ranks: KeptRanks, tmp_path: Any, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ranks.run(4, _unedited, program, str(tmp_path / "checkpoint"), *args)


@pytest.mark.parametrize("interleaved", [False, True], ids=["1f1b", "interleaved"])
def test_pipelines(ranks: KeptRanks, interleaved: bool) -> None:
    ranks.run(4, _unedited, titan.pipeline, interleaved)
