"""Ranks for the drop-in's tests: gloo on CPU, and NCCL where there are GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fsdp_parity.ranks import Pools


@pytest.fixture(
    scope="module",
    params=["cpu", pytest.param("cpu-pairs", marks=pytest.mark.nightly), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """Runs a body on every rank of a persistent group: on CPU with every setting, and with pairs of them; on GPUs."""
    device_type, _, _ = request.param.partition("-")
    pools = Pools(device_type, paired=request.param != "cpu")
    yield pools
    pools.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs processes is not among the quick tests: together they take minutes."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
