"""A rank that does not come: the others say at which communication they waited."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import polyshard
import pytest
import torch
from parity import Block, Net, draw, local, seeded, units_of
from polyshard.errors import CollectiveError, ParameterChangedError, PolyshardError, RankMismatchError
from processes import RankPool
from torch import nn

#: Ranks are processes, and wait for a time limit.
pytestmark = pytest.mark.slow


class Planned(Block):
    """Raises in its forward, or in its backward, where it is told to."""

    forward_fails = backward_fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_fails:
            raise ValueError("planned in forward")
        y: torch.Tensor = super().forward(x)
        if self.backward_fails and y.requires_grad:
            y.register_hook(_fail)
        return y


def _fail(gradient: torch.Tensor) -> None:
    raise ValueError("planned in backward")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30.0
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


class WordlessError(Exception):
    """Of a program, whose words cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def planned(model: nn.Sequential, *, forward: bool = False, backward: bool = False) -> None:
    middle = model[1]
    assert isinstance(middle, Planned)
    middle.forward_fails, middle.backward_fails = forward, backward
    with pytest.raises(ValueError, match="planned in"):
        model(torch.ones(4, 5)).sum().backward()
    middle.forward_fails = middle.backward_fails = False


def raise_elsewhere(model: nn.Sequential) -> None:
    """Behind its own backward, backwards raise that are none of the model."""
    traces = sys.gettrace()
    planned(model, backward=True)
    assert sys.gettrace() is traces
    with pytest.raises(RuntimeError, match="grad can be implicitly created"):
        (torch.ones(3, requires_grad=True) * 2).backward()


def replace(model: nn.Sequential) -> None:
    model[3] = nn.Linear(5, 2)
    with pytest.raises(ParameterChangedError, match=r"^'3\.weight', '3\.bias' came into the model"):
        model(torch.ones(4, 5))


def lack_a_batch(model: nn.Sequential) -> None:
    with pytest.raises(OSError, match=r"^the next batch cannot be read$"), polyshard.tell_failures(model):
        raise OSError("the next batch cannot be read")


def lack_words(model: nn.Sequential) -> None:
    with pytest.raises(WordlessError), polyshard.tell_failures(model):
        raise WordlessError


def fail_one(rank: int, folder: Path, act: Callable[[nn.Sequential], None]) -> tuple[float, str]:
    """Rank 1 does ``act`` behind the first step and lives on, until the other was told; what that was, and when."""
    layers = Planned(), Planned(), Planned(), nn.Linear(5, 2)
    model = polyshard.shard(nn.Sequential(*layers), polyshard.ShardConfig(timeout_s=1, policy=units_of(Block)))
    model(torch.ones(4, 5)).sum().backward()
    if rank == 1:
        act(model)
        wait_for(folder / "told")
        return 0.0, ""
    begun = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        model(torch.ones(4, 5)).sum().backward()
    took = time.monotonic() - begun
    (folder / "told").touch()
    remove_report(str(caught.value))
    return took, f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        pytest.param(partial(planned, forward=True), "ValueError: planned in forward", marks=pytest.mark.nightly),
        (partial(planned, backward=True), "ValueError: planned in backward"),
        (raise_elsewhere, "ValueError: planned in backward"),
        (replace, "ParameterChangedError: '3.weight', '3.bias' came"),
        (lack_a_batch, "OSError: the next batch cannot be read"),
        (lack_words, "WordlessError, whose words cannot be told: its __str__ raised RuntimeError"),
    ],
    ids=["forward", "backward", "elsewhere", "replaced", "between steps", "wordless"],
)
def test_another_ranks_exception_is_told_with_its_traceback(
    tmp_path: Path, act: Callable[[nn.Sequential], None], words: str
) -> None:
    with RankPool(2) as pool:
        (took, text), _ = pool.run(fail_one, tmp_path, act)
    assert took < 1 + 3
    assert text.startswith(f"PeerFailedError: Rank 1 raised {words}")
    assert " behind its communication number " in text
    # What the engine itself refuses is told where it is, before it comes to the program.
    assert ("test_peer_failures.py" in text) is (act is not replace)
    assert "Rank 0 waited for its communication number " in text
    assert "implicitly" not in text


def lose_one(rank: int, folder: Path) -> tuple[float, str, str]:
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(timeout_s=1, policy=units_of(Block)))
    model(draw(4, 3, rank=rank)).sum().backward()
    if rank == 2:
        for other in range(2):
            wait_for(folder / f"told {other}")
        return 0.0, "", ""
    begun = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        model(draw(4, 3, rank=rank))
    took = time.monotonic() - begun
    (folder / f"told {rank}").touch()
    return took, type(caught.value).__name__, str(caught.value)


def stop_one(rank: int) -> str:
    """Rank 1 is stopped by a signal, so that none of its threads runs; rank 0 wakes it behind its own error."""
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(timeout_s=1, policy=units_of(Block)))
    pids: list[int] = [0, 0]
    torch.distributed.all_gather_object(pids, os.getpid())
    model(draw(4, 3, rank=rank)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    try:
        with pytest.raises(CollectiveError) as caught:
            model(draw(4, 3, rank=rank))
    finally:
        os.kill(pids[1], signal.SIGCONT)
    remove_report(str(caught.value))
    return str(caught.value)


def test_a_rank_of_which_nothing_runs_gave_no_word() -> None:
    with RankPool(2) as pool:
        text, _ = pool.run(stop_one)
    assert "  rank 1 gave no word: stuck elsewhere, dead, or done with fewer batches. Look there first" in text


def remove_report(text: str) -> None:
    match = re.search(r"stacks are in (\S+\.json) on", text)
    if match is not None:
        Path(match[1]).unlink()


def fail_and_go_on(rank: int, folder: Path) -> str:
    """Rank 1 raises before anything is gathered and comes back; then rank 0 waits for it in vain."""
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(timeout_s=1, policy=units_of(Block)))
    for step in range(2):
        if (rank, step) == (1, 1):
            with pytest.raises(KeyError), polyshard.tell_failures(model):
                raise KeyError("caught")
        model(draw(4, 3, rank=rank)).sum().backward()
    if rank == 1:
        wait_for(folder / "told")
        return ""
    with pytest.raises(CollectiveError) as caught:
        model(draw(4, 3, rank=rank))
    (folder / "told").touch()
    remove_report(str(caught.value))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_a_rank_came_through_is_told_no_more(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        text, _ = pool.run(fail_and_go_on, tmp_path)
    assert text.startswith("CollectiveTimeoutError")
    assert "KeyError" not in text
    assert "in wait_for" in text


def lose_one_without_a_folder(rank: int, folder: Path) -> str:
    tempfile.tempdir = str(folder / "missing")
    try:
        return lose_one(rank, folder)[2]
    finally:
        tempfile.tempdir = None


def test_a_report_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    with RankPool(3) as pool:
        text, _, _ = pool.run(lose_one_without_a_folder, tmp_path)
    assert text.startswith("all_gather on rank 0 did not end within 1 s")
    assert "Rank 0 waited for its communication number " in text
    assert "stacks are in" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"told 0", "told 1"}


def test_ranks_say_where_the_others_stood_and_in_what_one_is_stuck(tmp_path: Path) -> None:
    with RankPool(3) as pool:
        first, second, _ = pool.run(lose_one, tmp_path)
    for (took, kind, text), other in ((first, 1), (second, 0)):
        assert took < 1 + 3
        assert kind == "CollectiveTimeoutError"
        assert f"Rank {1 - other} waited for its communication number " in text
        assert "all_gather of '(root)', in forward." in text
        assert f"rank {other} waited, too, for its communication number " in text
        assert re.search(r"rank 2 issued nothing for \d\.\d s behind its communication number \d+, end of a ", text)
        assert "in wait_for" in text
        match = re.search(r"stacks are in (\S+\.json) on", text)
        assert match is not None
        report = json.loads(Path(match[1]).read_text())
        Path(match[1]).unlink()
        assert report["rank"] == 1 - other
        assert str(other) in report["others"]
        assert [each["number"] for each in report["operations"]] == list(range(1, len(report["operations"]) + 1))
        assert any("lose_one" in line for stack in report["stacks"].values() for line in stack)


def differ_in_size(rank: int) -> str:
    """One rank's unit has another size from the third step on, which gloo would end the process for."""
    config = polyshard.ShardConfig(timeout_s=5, policy=units_of(nn.Linear), check_ranks="always", split_root=False)
    model = polyshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config)
    small, wide = nn.Linear(4, 4), nn.Linear(4, 40)
    polyshard.shard(small, config)
    polyshard.shard(wide, config)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        small(torch.ones(2, 4)).sum().backward()
        wide(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RankMismatchError) as caught:
        (small if rank else wide)(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


def test_sizes_that_differ_in_a_later_step_are_compared_where_that_is_asked_for() -> None:
    with RankPool(2) as pool:
        for text in pool.run(differ_in_size):
            assert "Ranks are about to issue different collectives" in text
            assert "elements of torch.float32" in text


def refused(call: Callable[[], object]) -> str:
    """What ``call`` raised; it must not wait for anybody."""
    begun = time.monotonic()
    try:
        call()
    except PolyshardError as error:
        assert time.monotonic() - begun < 0.3
        remove_report(str(error))
        return f"{type(error).__name__}: {error}"
    return "nothing"


def come_late(rank: int, folder: str, backward: bool, check_ranks: bool) -> list[str]:
    """Rank 1 comes once rank 0 has given up waiting, and has tried to go on; what each rank was told, call by call."""
    settings = {"timeout_s": 1.0, "policy": units_of(Block), "check_ranks": check_ranks}
    model = polyshard.shard(seeded(lambda: Net(5)), polyshard.ShardConfig(**settings))
    gave_up, came = Path(folder) / "gave up", Path(folder) / "came"

    def step() -> None:
        loss = model(draw(4, 3, rank=rank)).sum()
        if backward and rank:
            wait_for(gave_up)
        loss.backward()

    model(draw(4, 3, rank=rank)).sum().backward()
    if rank and not backward:
        wait_for(gave_up)
    with pytest.raises(CollectiveError) as caught:
        step()
    remove_report(str(caught.value))
    told = [f"{type(caught.value).__name__}: {caught.value}"]
    del caught
    calls: list[Callable[[], object]] = [
        lambda: model(draw(4, 3, rank=rank)),
        lambda: polyshard.clip_grad_norm_(model, 1.0),
        lambda: polyshard.unsharded(model).__enter__(),
        lambda: polyshard.checkpoint.save(folder, 1, model),
        lambda: polyshard.check_replicas(model),
        lambda: model(draw(4, 3, rank=rank)),
    ]
    told += [refused(call) for call in calls]
    if not rank:
        gave_up.touch()
        # What the late rank sends arrives meanwhile.
        wait_for(came)
    else:
        came.touch()
    # This rank's rows can be had still.
    assert all(bool(local(value).isfinite().all()) for value in model.state_dict().values())
    polyshard.close(model)
    return told


@pytest.mark.parametrize(
    ("backward", "check_ranks"), [pytest.param(False, True, marks=pytest.mark.nightly), (True, True), (False, False)]
)
def test_behind_a_communication_that_timed_out_every_other_is_refused_on_both_ranks(
    tmp_path: Path, backward: bool, check_ranks: bool
) -> None:
    with RankPool(2) as pool:
        everyone = pool.run(come_late, str(tmp_path), backward, check_ranks)
    for rank, (first, *later) in enumerate(everyone):
        assert first.startswith(("CollectiveTimeoutError", "CollectiveAbortedError")), first
        number = re.search(rf"Rank {rank} waited for its communication (number \d+, [^.]*)\.", first)
        assert number is not None, first
        for text in later:
            assert text.startswith("StateError"), text
            assert f"refused on rank {rank}, because an earlier communication of this model did not end" in text
            assert number[1].splitlines()[0] in text
            assert "Start the job again from its last checkpoint, or make new process groups" in text


def use_another_model(rank: int, folder: str) -> list[str]:
    """Of two models over one group, the first one's gather times out; what the others of that group say then."""
    config = polyshard.ShardConfig(timeout_s=1.0, policy=units_of(Block))
    model, other = (polyshard.shard(seeded(lambda: Net(5)), config) for _ in range(2))
    for each in (model, other):
        each(draw(4, 3, rank=rank)).sum().backward()
    ends = [Path(folder) / f"ended {number}" for number in range(2)]
    if rank:
        wait_for(ends[0])
    told = []
    for each in (model, other, polyshard.shard(nn.Linear(2, 2), polyshard.ShardConfig(check_ranks=False))):
        with pytest.raises(CollectiveError) as caught:
            each(draw(4, 3, rank=rank) if each in (model, other) else torch.ones(1, 2))
        remove_report(str(caught.value))
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    ends[rank].touch()
    wait_for(ends[1 - rank])
    return told


def test_other_models_over_a_group_that_failed_are_refused(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for rank, (first, *others) in enumerate(pool.run(use_another_model, str(tmp_path))):
            assert first.startswith("CollectiveTimeoutError")
            for text in others:
                assert text.startswith("CollectiveAbortedError"), text
                assert f"on rank {rank} are of no further use: all_gather on rank {rank} did not end within 1 s" in text
