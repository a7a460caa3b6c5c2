"""Many cases inside one process: every setting or every pair of them, and the name of the case that fails."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

#: Whether values of several axes meet in pairs; in `make test` each is in a case.
_every_pair = False


@contextmanager
def every_pair(whether: bool) -> Iterator[None]:
    """``run_subtests`` inside takes ``pairs``, or ``values``."""
    global _every_pair
    before, _every_pair = _every_pair, whether
    try:
        yield
    finally:
        _every_pair = before


def values(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """As many cases as the longest axis has values, in which every value of each axis occurs."""
    for number in range(max(map(len, axes.values()))):
        yield {name: each[number % len(each)] for name, each in axes.items()}


def pairs(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Cases in which every value of each axis meets every value of each other; with one or two axes that is all."""
    every = list(itertools.product(*(range(len(values)) for values in axes.values())))

    def met(case: Sequence[int]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2)) or set(enumerate(case))

    missing = set().union(*map(met, every))
    while missing:
        best = max(every, key=lambda case: len(met(case) & missing))
        missing -= met(best)
        yield {name: values[index] for (name, values), index in zip(axes.items(), best, strict=True)}


@contextmanager
def named(case: Mapping[str, Any]) -> Iterator[None]:
    """Adds ``case`` to whatever is raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note("in the case " + ", ".join(f"{name}={value}" for name, value in case.items()))
        raise


def run_subtests(axes: Mapping[str, Sequence[Any]], body: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call ``body(*args, **case, **kwargs)`` for every case of ``values``, or inside of ``every_pair`` of ``pairs``."""
    for case in (pairs if _every_pair else values)(axes):
        with named(case):
            body(*args, **case, **kwargs)


def subtests(**axes: Sequence[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a body run for every case of ``run_subtests``, which it gets as keyword arguments."""

    def decorated(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            run_subtests(axes, body, *args, **kwargs)

        signature = inspect.signature(body)
        left = [each for name, each in signature.parameters.items() if name not in axes]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorated
