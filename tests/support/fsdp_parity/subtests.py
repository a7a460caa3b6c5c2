"""Many cases inside one process: their product, and the name of the one that fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def product(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one value an axis, the last axis fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


@contextmanager
def named(case: Mapping[str, Any]) -> Iterator[None]:
    """Adds ``case`` to whatever is raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note("in the case " + ", ".join(f"{name}={value}" for name, value in case.items()))
        raise


def run_subtests(axes: Mapping[str, Sequence[Any]], body: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Call ``body(*args, **case, **kwargs)`` for every case of the product; return how many there were."""
    count = 0
    for case in product(axes):
        with named(case):
            body(*args, **case, **kwargs)
        count += 1
    return count
