"""Checkpoints on object stores: what they hold, and what failures, delays and kills leave."""

from __future__ import annotations

import errno
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import plain_states
import polyshard
import pytest
import torch
from checkpoints import alone
from object_store import Counting, ObjectStore, WithFolders, disturbed, memory, objects, put, store, undisturbed
from parity import on_ranks, threaded
from plain_states import Odd, State, differing, plain_state, state_of, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.checkpoint import URL
from polyshard.checkpoint.storage import remote
from polyshard.errors import CheckpointDamagedError, ConfigError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

__all__ = ["memory", "store"]

FULL = states.StateOptions(form="full")
Made = tuple[Odd, torch.optim.Optimizer]


def made(rank: int, world: ThreadedWorld, plain: State | None = None) -> Made:
    """Sharded, with the state ``plain``."""
    model, optimizer = plain_states.made(rank, world, seed=1)
    if plain is not None:
        give(model, optimizer, plain)
    return model, optimizer


def give(model: nn.Module, optimizer: torch.optim.Optimizer, plain: State) -> None:
    states.set_state_dict(model, optimizer, model_state_dict=plain["model"], optim_state_dict=plain["optimizer"])


def held(directory: Path | URL) -> State:
    read = checkpoint.read(directory)
    assert read.pop("extra") is not None
    return read


@pytest.fixture(scope="module")
def plains() -> dict[int, State]:
    """States of an unsharded model after so many steps."""
    return {steps: plain_state(steps) for steps in (2, 3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize("scheme", ["memory", "store"])
def test_a_checkpoint_of_two_ranks_is_loaded_by_three_bit_for_bit(
    scheme: str, background: bool, memory: Any, store: type[ObjectStore], plains: dict[int, State]
) -> None:
    root = URL(f"{scheme}://bucket/run")

    def save(rank: int, world: ThreadedWorld) -> URL:
        model, optimizer = made(rank, world, plains[2])
        if background:
            pending = checkpoint.async_save(root, 7, model, optimizer, extra={"epoch": 3})
            train(model, optimizer, 1)
            return pending.result(20)
        return checkpoint.save(root, 7, model, optimizer, extra={"epoch": 3})

    directory, other = on_ranks(2, save)
    assert directory == other == checkpoint.latest(root, verify=True)
    assert directory.parent == root
    assert directory.name.startswith("step-00000007.")

    def load(rank: int, world: ThreadedWorld) -> State:
        model, optimizer = made(rank, world)
        # A plain string does as well.
        assert checkpoint.load(str(directory), model, optimizer) == {"epoch": 3}  # type: ignore[arg-type]
        return state_of(model, optimizer)

    for found in on_ranks(3, load):
        assert not differing(found, plains[2])
    assert not differing(held(directory), plains[2])


@pytest.mark.slow
def test_a_large_file_is_sent_in_parts_and_read_in_ranges(store: type[ObjectStore], tmp_path: Path) -> None:
    model = nn.Linear(1 << 9, 11 << 10, bias=False)
    expected = model.weight.detach().clone()
    settings = polyshard.ShardConfig(collectives="fake", strategy="no_shard")
    polyshard.shard(model, settings)
    counting = Counting(lambda turn: None)
    with disturbed(counting):
        directory = checkpoint.save(URL("store://b/r"), 1, model)
    kinds = [kind for kind, path in counting.requests if path.endswith("__0_0.distcp")]
    assert kinds == ["part"] * (len(kinds) - 1) + ["put"]
    assert len(kinds) > 3
    assert not [key for key in objects() if key.endswith(".part")]
    counting = Counting(lambda turn: None)
    with disturbed(counting):
        assert torch.equal(checkpoint.read(directory)["model"]["weight"], expected)
    assert [kind for kind, path in counting.requests if path.endswith("__0_0.distcp")] == ["info"] + ["get"] * 6
    # What fails in the middle leaves no object of a part.
    ends = lambda kind, path: fail() if kind == "put" and path.endswith("__0_0.distcp") else None  # noqa: E731
    with disturbed(ends), pytest.raises(OSError, match=r"Input/output error.*__0_0\.distcp"):
        checkpoint.save(URL("store://b/r"), 2, model)
    assert not [key for key in objects() if "step-00000002" in key]


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.slow
def test_a_filesystem_with_folders_is_given_them(plains: dict[int, State], tmp_path: Path) -> None:
    fsspec.register_implementation("folders", WithFolders, clobber=True)
    root = URL(f"folders://{tmp_path}/deep/run")

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world, plains[2])
        for step in (1, 2, 3):
            checkpoint.save(root, step, model, optimizer, keep=2)

    on_ranks(2, body)
    newest = checkpoint.latest(root, verify=True)
    assert newest is not None
    assert not differing(held(newest), plains[2])
    assert [path.name[:13] for path in sorted((tmp_path / "deep" / "run").glob("step*"))] == [
        "step-00000002", "step-00000003"
    ]  # fmt: skip


def test_what_is_copied_from_and_to_a_disk_is_a_checkpoint_there(store: type[ObjectStore], tmp_path: Path) -> None:
    root = URL("store://copied/run")
    for path in checkpoint.save(tmp_path, 2, filled(7.0)).iterdir():
        put(f"copied/run/step-00000002/{path.name}", path.read_bytes())
    model = filled(8.0)
    checkpoint.load(root / "step-00000002", alone())
    first = checkpoint.save(root, 1, model)
    again = checkpoint.save(root, 2, model)
    assert first != again == checkpoint.latest(root, verify=True)
    copied = tmp_path / "copies" / again.name
    copied.mkdir(parents=True)
    for key, content in objects().items():
        if key.startswith(f"copied/run/{again.name}/"):
            (copied / key.rpartition("/")[2]).write_bytes(content)
    assert checkpoint.latest(copied.parent, verify=True) == copied
    found = [float(checkpoint.read(each)["model"]["bias"][0]) for each in (root / "step-00000002", again, copied)]
    assert found == [7.0, 8.0, 8.0]


def test_keep_removes_the_marker_first(store: type[ObjectStore]) -> None:
    root = URL("store://bucket/run")
    model = alone()
    made = [checkpoint.save(root, step, model) for step in (1, 2)]
    counting = Counting(lambda turn: None)
    with disturbed(counting):
        made.append(checkpoint.save(root, 3, model, keep=1))
    removed = [path for kind, path in counting.requests if kind == "delete" and "SAVING" not in path]
    for directory in made[:2]:
        of_it = [path.rpartition("/")[2] for path in removed if f"/{directory.name}/" in path]
        assert of_it[0] == "COMMITTED"
        assert sorted(of_it[1:]) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert {key.split("/")[2] for key in objects()} == {".job-lock", made[2].name}


def test_what_others_put_beside_the_files_of_a_save_stays(store: type[ObjectStore]) -> None:
    root, model = URL("store://bucket/run"), alone()
    first = checkpoint.save(root, 1, model)
    torn = "step-00000009.0123456789ab"
    mine = [f"bucket/run/{name}/{key}" for name in (first.name, torn) for key in ("notes.txt", "deep/__0_0.distcp")]
    for key in mine:
        put(key, b"mine")
    for name in ("SAVING", "__0_0.distcp", "__1_0.distcp.part", "manifest.json"):
        put(f"bucket/run/{torn}/{name}", b"half")
    kept = checkpoint.save(root, 2, model, keep=1)
    assert {key for key in objects() if kept.name not in key} == {"bucket/run/.job-lock", *mine}
    checkpoint.verify(kept)


def filled(value: float) -> nn.Module:
    model = alone()
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def test_damage_is_named(store: type[ObjectStore]) -> None:
    root, model = URL("store://bucket/run"), alone()
    first, second = (checkpoint.save(root, step, model) for step in (1, 2))
    key = f"bucket/run/{second.name}/__0_0.distcp"
    content = objects()[key]
    for changed, words in (
        (bytes([content[0] ^ 1]) + content[1:], "'__0_0.distcp' holds something else than was written from byte 0"),
        (content[:-1], f"'__0_0.distcp' has {len(content) - 1:,} bytes, and had {len(content):,}"),
        (None, "'__0_0.distcp' is gone"),
    ):
        if changed is None:
            (store.folder / key.replace("/", "%2F")).unlink()
        else:
            put(key, changed)
        for call in (checkpoint.verify, checkpoint.read, lambda directory: checkpoint.load(directory, model)):
            with pytest.raises(CheckpointDamagedError, match=words):
                call(second)  # type: ignore[operator]
        with pytest.warns(UserWarning, match=words):
            assert checkpoint.latest(root, verify=True) == first


# -- one job


def stranger(key: str) -> None:
    """Another machine's job takes the folder."""
    put(key, b'{"process":["elsewhere",7,"1","2"],"since":1750000000}')


@pytest.mark.slow
def test_a_job_of_this_machine_is_refused_until_the_other_one_ends(store: type[ObjectStore]) -> None:
    root = URL("store://job0/run")
    entered = multiprocessing.get_context("fork").Event()

    def other_job() -> None:
        model = alone()
        checkpoint.save(root, 1, model)
        entered.set()
        # Killed in the middle of a save.
        store.before = lambda kind, path: time.sleep(60) if path.endswith("manifest.json") else None
        checkpoint.save(root, 2, model)

    other = multiprocessing.get_context("fork").Process(target=other_job)
    other.start()
    try:
        assert entered.wait(20)
        model = alone()
        before = {key for key in objects() if "step-00000001" in key}
        for save in (checkpoint.save, checkpoint.async_save):
            with pytest.raises(ConfigError, match=rf"Another job saves into {root}: process {other.pid} on"):
                save(root, 3, model)
    finally:
        other.kill()
        other.join()
    directory = checkpoint.latest(root, verify=True)
    assert directory is not None
    checkpoint.load(directory, model)
    kept = checkpoint.save(root, 3, model)
    assert {key for key in objects() if kept.name not in key} == before | {"job0/run/.job-lock"}


def test_a_lock_of_another_machine_is_taken_and_that_jobs_save_ends_without_a_checkpoint(
    store: type[ObjectStore],
) -> None:
    root = URL("store://job1/run")
    stranger("job1/run/.job-lock")
    model = alone()
    first = checkpoint.save(root, 1, model)
    for number, (kind, name) in enumerate([("put", "manifest.json"), ("put", "COMMITTED"), ("put", "SAVING")]):
        mine = objects()["job1/run/.job-lock"]

        def taken(did: str, path: str, kind: str = kind, name: str = name) -> None:
            if did == kind and path.endswith(name):
                stranger("job1/run/.job-lock")

        store.behind = taken
        with pytest.raises(
            ConfigError, match=rf"Another job saves into {root}: process 7 on 'elsewhere', since 2025-06-"
        ):
            checkpoint.save(root, 2 + number, model, keep=1)
        store.behind = undisturbed
        # It stays so.
        with pytest.raises(ConfigError, match="process 7 on 'elsewhere'"):
            checkpoint.save(root, 2 + number, model)
        assert checkpoint.latest(root, verify=True) == first
        assert {key.split("/")[2] for key in objects()} == {".job-lock", first.name}
        put("job1/run/.job-lock", mine)


def test_a_lock_that_is_removed_is_noticed(store: type[ObjectStore]) -> None:
    root = URL("store://job2/run")
    model = alone()
    checkpoint.save(root, 1, model)
    fsspec.filesystem("store").rm_file("job2/run/.job-lock")
    with pytest.warns(UserWarning, match=rf"{root}/\.job-lock was removed while this job saves there"):
        checkpoint.save(root, 2, model)

    def removed(kind: str, path: str) -> None:
        if kind == "put" and path.endswith("manifest.json"):
            fsspec.filesystem("store").rm_file("job2/run/.job-lock")

    store.behind = removed
    with pytest.raises(ConfigError, match=r"\.job-lock was removed while this job saved there"):
        checkpoint.save(root, 3, model)
    store.behind = undisturbed
    with pytest.warns(UserWarning, match="was removed while this job saves there"):
        last = checkpoint.save(root, 3, model)
    other = alone()
    checkpoint.load(last, other)
    checkpoint.save(root, 4, other)
    # Models share the lock until the last one is closed.
    polyshard.close(model)
    assert "job2/run/.job-lock" in objects()
    polyshard.close(other)
    assert "job2/run/.job-lock" not in objects()


# -- arguments, and stores that are slow or not shared


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("nosuch://bucket/run", "fsspec has no filesystem for nosuch://bucket/run: Protocol not known: nosuch"),
        ("file:///tmp/run", "this machine's files have locks and renames. Give the path alone"),
        ("simplecache::memory://run", "must begin with one scheme"),
        ("memory://", "must name a folder behind 'memory://'"),
        (Path("s3://bucket/run"), r"a Path keeps one of the slashes .*checkpoint.URL\('s3://bucket/run'\)"),
    ],
    ids=str,
)
def test_what_is_no_place_for_checkpoints_is_refused_by_name(root: Any, words: str) -> None:
    model = alone()
    for call in (
        lambda: checkpoint.save(root, 1, model),
        lambda: checkpoint.async_save(root, 1, model),
        lambda: checkpoint.load(root, model),
        lambda: checkpoint.latest(root),
        lambda: checkpoint.verify(root),
        lambda: checkpoint.read(root),
    ):
        with pytest.raises(ConfigError, match=words):
            call()


def test_without_fsspec_all_ranks_name_the_extra(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world)
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"memory://run needs fsspec: install polyshard\[remote\]"):
                checkpoint.save(URL("memory://run"), 1, model, optimizer)
            with pytest.raises(ConfigError, match=r"memory://run needs fsspec: install polyshard\[remote\]"):
                checkpoint.load(URL("memory://run"), model, optimizer)
        train(model, optimizer, 1)

    on_ranks(2, body)
    assert not memory.store


def test_directories_of_dcp_are_read_from_disks_alone(memory: Any) -> None:
    with pytest.raises(ConfigError, match=r"memory://run'?: load_dcp reads local paths alone"):
        checkpoint.load_dcp("memory://run", alone())  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_rank_that_sends_for_long_is_waited_for_as_long_as_it_sends(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file is in no listing before its end, and rank 0 gives up where nothing more comes."""
    monkeypatch.setattr(remote, "_SHOWN_NBYTES", 4 << 20)
    store.before = lambda kind, path: time.sleep(0.5) if kind == "part" and "__1_0" in path else None

    def body(rank: int, world: ThreadedWorld) -> float:
        with world.lock:
            model: nn.Module = nn.Linear(1 << 10, 11 << 10, bias=False)
        polyshard.shard(model, threaded(world, rank, check_ranks=False, timeout_s=1.2))
        before = time.monotonic()
        checkpoint.verify(checkpoint.async_save(URL("store://b/run"), 1, model).result(20))
        return time.monotonic() - before

    assert min(on_ranks(2, body)) > 1.5
    assert not [key for key in objects() if key.endswith(".part")]


def test_a_store_that_does_not_answer_makes_latest_fail_and_not_go_back(store: type[ObjectStore]) -> None:
    root = URL("store://bucket/run")
    model = alone()
    newest = [checkpoint.save(root, step, model) for step in (1, 2)][1]
    counting = Counting(lambda turn: None)
    with disturbed(counting):
        assert checkpoint.latest(root, verify=True) == newest
    for number in range(len(counting.requests)):
        failing = Counting(lambda turn, number=number: fail() if turn == number else None)
        with disturbed(failing), pytest.raises(OSError, match=f"Input/output error: '{root}"):
            checkpoint.latest(root, verify=True)
