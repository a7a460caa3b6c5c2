"""The host's work and the traffic of a step, for each unit: later changes may not let either grow unseen.

The counts are of Python functions of polyshard that a step calls, and do not depend on the machine. They follow from
models of two depths, so that the step's fixed part cancels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import polyshard
import polyshard_backends
import polyshard_plugins
import polyshard_policies
import pytest
import torch
from polyshard import ShardConfig
from torch import nn

#: Where code of polyshard lies: a clone's own folder, with torch in its .venv, may be called so too.
PACKAGES = (polyshard, polyshard_backends, polyshard_plugins, polyshard_policies)
OURS = tuple(f"{Path(str(package.__file__)).parent}{os.sep}" for package in PACKAGES)
WORLD = 4
WIDTH = 8
#: Comprehensions are calls in Python 3.11, and none from 3.12 on.
INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


def chain(depth: int, **settings: Any) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    collectives = {"name": "fake", "rank": 0, "world_size": WORLD}
    policy = {"name": "module_class", "classes": [nn.Linear]}
    return polyshard.shard(model, ShardConfig(collectives=collectives, policy=policy, **settings))


def calls_of(function: Callable[[], Any]) -> int:
    """How many functions of polyshard ``function`` calls."""
    found = 0
    ours: dict[CodeType, bool] = {}

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        if event == "call":
            code = frame.f_code
            if code not in ours:
                ours[code] = code.co_filename.startswith(OURS) and code.co_name not in INLINED
            found += ours[code]

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def calls_of_step(depth: int, **settings: Any) -> tuple[int, int]:
    """Calls of one forward and one backward, once steps repeat."""
    model = chain(depth, **settings)
    batch = torch.ones(2, WIDTH, requires_grad=True)
    for _ in range(3):
        model(batch).sum().backward()
    loss: list[torch.Tensor] = []
    forward = calls_of(lambda: loss.append(model(batch).sum()))
    return forward, calls_of(lambda: loss[0].backward())


@pytest.mark.parametrize(
    ("settings", "forward", "backward"), [({"batch_nbytes": 0}, 63, 99), ({}, 48, 52)], ids=["alone", "batched"]
)
def test_calls_of_a_unit(settings: dict[str, Any], forward: int, backward: int) -> None:
    small, large = calls_of_step(8, **settings), calls_of_step(24, **settings)
    found = [(after - before) / 16 for before, after in zip(small, large, strict=True)]
    assert found[0] <= forward, "a change lets each unit cost the host more in forward"
    assert found[1] <= backward, "a change lets each unit cost the host more in backward"
