"""The variables that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def launched(rank: int, world_size: int, **further: object) -> Iterator[None]:
    """Variables of rank ``rank`` on one host, and ``further`` ones; the environment is as before afterwards."""
    size = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    told = {"RANK": rank, "LOCAL_RANK": rank, **size, "OMP_NUM_THREADS": 1, **further}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
