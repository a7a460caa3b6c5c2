"""Notes the collectives of ``torch.distributed`` that a plugin issues where it may not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})


def is_collective(operation: Any) -> bool:
    """Whether an operation that torch dispatches communicates."""
    return operation.namespace in _NAMESPACES


@contextmanager
def group_of_one() -> Iterator[None]:
    """The default process group, where there is none: of this process alone, so that collectives can be issued."""
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    # torch puts the rank before what an exception prints, once more for each group that is made.
    printing = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = printing


@contextmanager
def collectives_noted() -> Iterator[list[str]]:
    """Names of the collectives that are issued inside, over a group of this process at least."""
    with group_of_one(), _Noting() as noting:
        yield noting.issued


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issued: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            self.issued.append(func.name())
        return func(*args, **(kwargs or {}))
