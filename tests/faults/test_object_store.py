"""Every request that a save makes of an object store fails once, or is the last of its process."""

from __future__ import annotations

import errno
import itertools
import threading
from collections import Counter

import polyshard
import pytest
import torch
from fault_figures import record
from object_store import Counting, KilledError, Memory, ObjectStore, memory, objects, store, undisturbed
from parity import on_ranks, one_core, threaded
from polyshard import checkpoint
from polyshard.checkpoint import URL
from polyshard.errors import PolyshardError, StateError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

__all__ = ["memory", "store"]

#: Removing the checkpoint before may fail, too, behind a commit.
pytestmark = pytest.mark.filterwarnings("ignore:Older checkpoints than")

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(rank: int, world: ThreadedWorld) -> Made:
    with world.lock:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    polyshard.shard(model, threaded(world, rank, check_ranks=False))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """All elements of the parameters, and of the optimizer's state."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            of_it = {name: torch.full_like(parameter, value) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(value), **of_it}


def value_of(directory: URL | None) -> float:
    """The one that all elements of a checkpoint have."""
    assert directory is not None
    read = checkpoint.read(directory)
    of_optimizer = [each for states in read["optimizer"]["state"].values() for each in states.values()]
    assert (len(read["model"]), len(of_optimizer)) == (4, 12)
    (value,) = {float(each) for whole in (*read["model"].values(), *of_optimizer) for each in whole.unique()}
    return value


def save(root: URL, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, behind: bool) -> URL:
    if behind:
        return checkpoint.async_save(root, step, model, optimizer, keep=1).result(20)
    return checkpoint.save(root, step, model, optimizer, keep=1)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def fail_everywhere(store: type[ObjectStore], *, behind: bool, late: bool, first: int, stride: int) -> Counter[str]:
    """On two ranks save step 1, and step 2 with a request that fails, train, and save step 3; until none fails.

    ``late``: the request is carried out, and its answer gets lost.
    """
    together = threading.Barrier(2)
    outcomes: Counter[str] = Counter()
    countings: dict[int, Counting] = {}
    seen: list[tuple[BaseException | None, URL | None]] = [(None, None)] * 2
    top = store.folder

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world)
        for number in itertools.count(first, stride):
            root = URL(f"store://failing/{number}")
            if together.wait(20) == 0:
                store.folder = top / f"{behind}-{late}-{number}"
                store.folder.mkdir()
                countings[number] = Counting(lambda turn, number=number: fail() if turn == number else None)
            together.wait(20)
            counting = countings[number]
            fill(model, optimizer, 1.0)
            checkpoint.save(root, 1, model, optimizer)
            fill(model, optimizer, 2.0)
            if together.wait(20) == 0:
                store.before, store.behind = (undisturbed, counting) if late else (counting, undisturbed)
            together.wait(20)
            raised = None
            try:
                save(root, 2, model, optimizer, behind)
            except (OSError, PolyshardError) as error:
                raised = error
            if together.wait(20) == 0:
                store.before = store.behind = undisturbed
            together.wait(20)
            newest = checkpoint.latest(root, verify=True)
            seen[rank] = (raised, newest)
            together.wait(20)
            (one, _), (other, also) = seen
            where = (number, counting.requests[number : number + 1], one, other, newest)
            assert newest == also, where
            assert (one is None) == (other is None) == (value_of(newest) == 2.0), where
            if raised is not None:
                assert "Input/output error" in str(raised), where
                assert any(isinstance(each, OSError) and "'store://failing/" in str(each) for each in (one, other)), (
                    where
                )
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.verify(checkpoint.save(root, 3, model, optimizer))
            is_over = len(counting.requests) <= number
            if rank == 0 and not is_over:
                outcomes["committed all the same" if raised is None else "raised on all ranks"] += 1
            together.wait(20)
            if is_over:
                return

    try:
        with one_core():
            ThreadedWorld(2, timeout=10.0).run(body, timeout=1200.0)
    finally:
        store.folder, store.before, store.behind = top, undisturbed, undisturbed
    return outcomes


def kill_everywhere(store: type[ObjectStore], scheme: str, *, behind: bool, first: int, stride: int) -> Counter[str]:
    """Two ranks save step 1, and are killed before some request of the save of step 2; until they live to its end.

    Another run of two ranks then continues from the newest checkpoint, and saves step 3.
    """
    outcomes: Counter[str] = Counter()
    top = store.folder
    for number in itertools.count(first, stride):
        root = URL(f"{scheme}://killed/{behind}-{number}")
        store.folder = top / f"killed-{scheme}-{behind}-{number}"
        store.folder.mkdir()
        Memory.store.clear()

        def killed(turn: int, number: int = number) -> None:
            if turn >= number:
                raise KilledError

        counting = Counting(killed)
        together = threading.Barrier(2)

        def run(
            rank: int, world: ThreadedWorld, root: URL = root, counting: Counting = counting,
            together: threading.Barrier = together,
        ) -> None:  # fmt: skip
            model, optimizer = made(rank, world)
            fill(model, optimizer, 1.0)
            checkpoint.save(root, 1, model, optimizer)
            fill(model, optimizer, 2.0)
            if together.wait(20) == 0:
                store.before = counting
            together.wait(20)
            save(root, 2, model, optimizer, behind)

        is_over = False
        try:
            on_ranks(2, run)
            is_over = True
        except (KilledError, PolyshardError, OSError):
            pass
        store.before = undisturbed
        newest = checkpoint.latest(root, verify=True)
        assert newest is not None
        is_new = value_of(newest) == 2.0
        assert newest.name.startswith("step-00000002" if is_new else "step-00000001"), number
        assert is_new or value_of(newest) == 1.0
        marked = {key.rpartition("/")[0] for key in objects(scheme) if key.endswith("/COMMITTED")}
        left = {key.rpartition("/")[0] for key in objects(scheme) if "/step-" in key} - marked
        for key in left:
            outcomes["uncommitted"] += 1
            with pytest.raises(StateError, match="is no complete checkpoint: it has no file 'COMMITTED'"):
                checkpoint.read(URL(f"{scheme}://{key}"))

        def resumed(rank: int, world: ThreadedWorld, root: URL = root, newest: URL = newest) -> None:
            model, optimizer = made(rank, world)
            checkpoint.load(newest, model, optimizer)
            fill(model, optimizer, 3.0)
            assert value_of(checkpoint.save(root, 3, model, optimizer)) == 3.0

        on_ranks(2, resumed)
        kept = {key.split("/")[2] for key in objects(scheme)} - {".job-lock"}
        assert all(f"{name}/COMMITTED" in "\n".join(objects(scheme)) for name in kept), (number, kept)
        assert newest.name in kept
        if is_over:
            break
        outcomes["new" if is_new else "before"] += 1
    store.folder = top
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("behind", "late"), [(False, True), (True, False)])
def test_some_requests_fail(behind: bool, late: bool, store: type[ObjectStore]) -> None:
    outcomes = fail_everywhere(store, behind=behind, late=late, first=4 + behind + late, stride=17)
    assert outcomes["raised on all ranks"]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "behind"), [("memory", True), ("store", False)])
def test_some_kills(scheme: str, behind: bool, store: type[ObjectStore], memory: type[Memory]) -> None:
    outcomes = kill_everywhere(store, scheme, behind=behind, first=7 + behind, stride=13)
    assert outcomes["before"]
    assert outcomes["uncommitted"]


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_every_request_fails(store: type[ObjectStore]) -> None:
    outcomes: Counter[str] = Counter()
    for behind, late in itertools.product((False, True), repeat=2):
        outcomes += fail_everywhere(store, behind=behind, late=late, first=0, stride=1)
    assert outcomes["raised on all ranks"] > 60
    record("object_store_failures", requests=outcomes.total(),
           **{name.replace(" ", "_"): count for name, count in outcomes.items()})  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_every_kill(store: type[ObjectStore], memory: type[Memory]) -> None:
    outcomes: Counter[str] = Counter()
    for scheme, behind in itertools.product(("memory", "store"), (False, True)):
        outcomes += kill_everywhere(store, scheme, behind=behind, first=0, stride=1)
    assert min(outcomes["before"], outcomes["new"], outcomes["uncommitted"]) > 10
    record("object_store_kills", kills=outcomes["before"] + outcomes["new"], last_committed_loads=outcomes["before"] +
           outcomes["new"], mixed=0, committed=outcomes["new"], left_uncommitted=outcomes["uncommitted"])  # fmt: skip
