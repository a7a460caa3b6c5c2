"""What ``auto`` chooses on CUDA by where ranks run, and what it says of that; the GPU twin is ``test_auto_cuda.py``."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from polyshard.interfaces import BufferRole, PluginContext
from polyshard_backends import _torch_private
from polyshard_backends.auto import ChosenCollectives
from polyshard_backends.places import Place, obstacle, unasked_obstacle
from processes import run_processes

ALL = frozenset(range(8))
RANKS = (0, 1, 2, 3)


def places(number: int = 4, **changes: Any) -> list[Place]:
    """Ranks of one host whose NVLinks connect all of its eight devices."""
    fields: dict[str, Any] = {"host": "one", "device_count": 8, "problem": "", **changes}
    links = {"nvlinks": tuple(ALL)} if "nvlinks" not in changes else {}
    return [Place(device_index=index, **links, **fields) for index in range(number)]


def why_not(found: list[Place], monkeypatch: pytest.MonkeyPatch, peers: bool = True) -> str:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
    return obstacle(found) or unasked_obstacle(found, RANKS)


def test_ranks_of_one_host_with_nvlink_between_all_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(places(), monkeypatch) == ""
    # Those that share memory among themselves already met equally often.
    assert why_not(places(met=frozenset({RANKS})), monkeypatch) == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (places(2) + places(2, host="two"), "4 ranks on 2 hosts"),
        # What one rank cannot do, no rank does.
        ([*places(3), Place("one", 3, 8, "no memory", tuple(ALL))], "no memory"),
        ([*places(3), Place("one", 3, 8, "", (0, 1))], "NVLink does not connect device 3 with device 2"),
        (places(3, nvlinks=(0, 1)) + places(4)[3:], "NVLink does not connect device 0 with device 2"),
        (places(nvlinks=None), f"torch {torch.__version__} does not tell here which devices NVLink connects"),
        (places(3) + places(4, nvlinks=None)[3:], "does not tell here which devices NVLink connects"),
        # One device for each process, which all of them call number 0.
        (places(1, device_count=1) * 4, "processes do not see each other's devices"),
        (places(3) + places(4, met=frozenset({(3, 4)}))[3:], "share symmetric memory in another group already, [3, 4]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_that_is_missing_is_named(found: list[Place], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said in why_not(found, monkeypatch)
    # All ranks are told the same places, and say the same.
    assert why_not(list(found), monkeypatch) == why_not(found, monkeypatch)


def test_devices_that_cannot_access_each_other_do_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(places(), monkeypatch, peers=False) == "device 0 cannot access device 1"


class ChosenOnGloo(ChosenCollectives):
    """The same over gloo, on a host whose ranks have no symmetric memory."""

    transport = "gloo"
    device_type = "cpu"


def gather_large_and_small(rank: int) -> tuple[list[str], list[float]]:
    """What is said before and after a unit of 64 MiB, and what was gathered."""
    _torch_private.current_stream = lambda device_index: (0, device_index, 1)
    torch.cuda.is_current_stream_capturing = lambda: False
    assert _torch_private.group_timeout(dist.group.WORLD, torch.device("cpu")) > timedelta(seconds=1)  # type: ignore[arg-type]
    collectives = ChosenOnGloo(PluginContext("auto", torch.device("cpu", 0)))
    # NCCL has no memory to register here, which is another matter.
    collectives._smallest_registered = None
    said = [collectives.reason]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for role, mib in ((BufferRole.REDUCE, 64), (BufferRole.GATHER, 63), (BufferRole.GATHER, 64)):
            with collectives.allocation(role, mib << 20):
                out = torch.zeros(6)
            own = out.narrow(0, rank * 3, 3).fill_(rank + 1.0)
            collectives.all_gather(out, own).wait()
            said.append(collectives.reason)
    collectives.close()
    return said, out.tolist()


@pytest.mark.slow
def test_ranks_ask_at_the_first_large_gather_and_nothing_warns() -> None:
    first, second = run_processes(2, gather_large_and_small, timeout=60.0)
    assert first == second
    said, gathered = first
    assert gathered == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    undecided = (
        "symmetric, if it finds 2 ranks on one host, NVLink between all (units from 64 MiB by copy engines, the rest "
        "by NCCL); nccl otherwise. Ranks ask at the first such unit"
    )
    assert said[:3] == [undecided] * 3
    assert said[3].startswith("nccl: ")
    assert "symmetric memory" in said[3]
