"""The environment of all tests, the order in which they run, and a process without other people's plugins."""

from __future__ import annotations

import gc
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import Distribution, MetadataPathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis measures draws and examples by the clock, and so fails tests where the machine is busy.
settings.register_profile("no clock", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no clock")

# Before torch is imported. Ranks share few cores; with more threads than cores they slow each other down, tenfold where
# the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["watchdog"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which every test has a mark that ``-m`` excludes are not imported: some import trainers, for seconds."""
    excluded = re.findall(r"not (\w+)", config.getoption("markexpr"))
    if not excluded or collection_path.suffix != ".py":
        return None
    whole = re.search(r"^pytestmark = pytest\.mark\.(\w+)$", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if whole and whole[1] in excluded else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Of what is imported and collected here nothing is garbage: a tenth of the time went into looking for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_unconfigure() -> None:
    """Pytest looks for garbage ten times behind the last test: once is enough."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_thin_out_products(items: list[pytest.Item]) -> None:
    """Of the product of several ``parametrize`` a part is enough for `make test`; `make test-nightly` runs the others.

    Every value is in that part, beside others as often as all are; with three decorators every pair of values is.
    """
    products: defaultdict[object, list[tuple[pytest.Item, list[object]]]] = defaultdict(list)
    for item in items:
        spec = getattr(item, "callspec", None)
        if spec is None or item.get_closest_marker("nightly") or item.get_closest_marker("gpu"):
            continue
        given = [mark.args[0] for mark in item.iter_markers("parametrize")]
        axes = [each.replace(" ", "").split(",") if isinstance(each, str) else list(each) for each in given]
        # All cases of a product share the objects of a decorator's list.
        values = {name: id(value) for name, value in spec.params.items()}
        where = [tuple(values.pop(name) for name in axis) for axis in axes]
        products[item.parent, getattr(item, "originalname", ""), *values.items()].append((item, where))
    for cases in products.values():
        places = [dict.fromkeys(axis) for axis in zip(*(where for _, where in cases), strict=True)]
        sizes = [len(axis) for axis in places if len(axis) > 1]
        if len(sizes) < 2 or len(cases) != math.prod(sizes):
            continue
        for item, where in cases:
            if sum(list(axis).index(value) for axis, value in zip(places, where, strict=True)) % min(sizes):
                item.add_marker(pytest.mark.nightly)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker begins a long one when the others are done.

    A file stays whole: its tests share what its fixtures start.
    """
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave what stands at the start of a file out of the collections of garbage while its tests run.

    Torch's modules alone are a million objects, over which a full collection takes longer than most tests; and a
    ``ThreadedWorld`` collects wherever it is due.
    """
    if item.session.stash.get(_FILE, None) != item.path:
        item.session.stash[_FILE] = item.path
        gc.collect()
        gc.freeze()
    return (yield)


_FILE = pytest.StashKey[object]()


@pytest.fixture(scope="module", autouse=True)
def close_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The processes that a file keeps as ``RANKS = KeptRanks()`` leave behind its tests."""
    yield
    close = getattr(getattr(request.module, "RANKS", None), "close", None)
    if close is not None:
        close()


@pytest.fixture
def no_other_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees polyshard's own plugins, and those of packages below ``tmp_path``, alone."""
    finds = MetadataPathFinder.find_distributions

    def find(*args: Any, **kwargs: Any) -> Iterator[Distribution]:
        return (each for each in finds(*args, **kwargs) if not _is_other(each, tmp_path))

    monkeypatch.setattr(MetadataPathFinder, "find_distributions", staticmethod(find))


def _is_other(distribution: Distribution, here: Path) -> bool:
    offers = any(each.group.startswith("polyshard.") for each in distribution.entry_points)
    own = distribution.metadata["Name"] == "polyshard"
    return offers and not own and not Path(str(distribution.locate_file(""))).is_relative_to(here)
