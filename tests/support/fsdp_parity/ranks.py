"""Where a test body runs: which rank it is, and on which device."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import RankPool

from fsdp_parity.subtests import every_pair

#: Seconds that one body may take before the stacks of all ranks are shown.
BODY_TIMEOUT = 110.0

#: Marks of tests.
on_cpu = pytest.mark.parametrize("ranks", ["cpu"], indirect=True)
orig = pytest.mark.parametrize("use_orig_params", [False, True])
world_sizes = pytest.mark.parametrize(
    ("ranks", "world_size"),
    [("cpu", 1), ("cpu", 3), pytest.param("cuda", 2, marks=pytest.mark.gpu)],
    indirect=["ranks"],
)


@dataclass(frozen=True)
class Ranks:
    """One rank of a group, as a test body sees it."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The default group, of all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def on_cpu(self) -> bool:
        """Whether there is one place alone: a model moved before wrapping, after it, or never, is the same there."""
        return self.device.type == "cpu"


def _enter(
    rank: int, world_size: int, device_type: str, paired: bool, body: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    with every_pair(paired):
        return body(Ranks(rank, world_size, device), *args)


class Pools:
    """One group of processes for each world size, kept from test to test; a group that failed is replaced.

    ``paired``: bodies with subtests take every pair of settings.
    """

    def __init__(self, device_type: str, paired: bool = True) -> None:
        self.device_type = device_type
        self._paired = paired
        self._pools: dict[int, RankPool] = {}

    def run(self, world_size: int, body: Callable[..., Any], *args: Any, timeout: float = BODY_TIMEOUT) -> list[Any]:
        """Call ``body(Ranks, *args)`` on every one of ``world_size`` ranks; return the results in rank order.

        Skips the test where there are fewer GPUs than ranks.
        """
        if self.device_type == "cuda" and world_size > torch.cuda.device_count():
            pytest.skip(f"needs {world_size} GPUs, and here are {torch.cuda.device_count()}")
        pool = self._pools.get(world_size)
        if pool is None or pool.closed:
            pool = self._pools[world_size] = RankPool(world_size, "nccl" if self.device_type == "cuda" else "gloo")
        return pool.run(_enter, world_size, self.device_type, self._paired, body, args, timeout=timeout)

    def close(self) -> None:
        """Let all processes leave."""
        for pool in self._pools.values():
            pool.close()


def across(*world_sizes: int) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a function of ``Ranks`` a test that calls it on every rank of a group of each size.

    Without sizes the test is parametrized by ``world_size``. Other arguments are the test's own.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        def test(ranks: Pools, **case: Any) -> None:
            for world_size in world_sizes or (case.pop("world_size"),):
                ranks.run(world_size, _call_body, body.__module__, body.__qualname__, case)

        signature = inspect.signature(body)
        size = [] if world_sizes else [inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        parameters = [*signature.parameters.values(), *size]
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _call_body(ranks: Ranks, module: str, name: str, case: dict[str, Any]) -> Any:
    # A rank finds under this name the test, which cannot be sent itself.
    return getattr(importlib.import_module(module), name).body(ranks, **case)
