"""What saves and loads are called with: refused where it is of another kind, or differs between ranks."""

from __future__ import annotations

import pickle
import socket
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polyshard
import polyshard_huggingface
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import alone
from parity import Block, Net, adam, draw, on_ranks, seeded, sgd, sharded_copy, units_of, whole
from polyshard import checkpoint
from polyshard.errors import BackgroundSaveError, ConfigError, ConfigTypeError, RankMismatchError, StateError
from polyshard.hookspecs import hookimpl
from polyshard.interfaces import Collectives, CollectivesDecorator, PluginContext, Work
from polyshard.state.exchange import together
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
RANKS = 3


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(draw(2, 3, rank=rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def written_by_torch(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # That one process saves is what no_dist asks for.
        dcp.save({"model": dict(values)}, checkpoint_id=folder, no_dist=True)


def scheduled(model: nn.Module) -> torch.optim.Optimizer:
    """With a setting that others have not."""
    optimizer = adam(model)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    return optimizer


SAVES: list[Callable[..., Any]] = [checkpoint.save, checkpoint.async_save]
ALL = [*SAVES, checkpoint.load]
#: What is called otherwise on rank 1, by which functions; the name of what differs, and both values.
DIFFERENT: list[tuple[Mapping[str, Any], list[Callable[..., Any]], str, str, str]] = [
    ({"step": 8}, SAVES, "step", "7", "8"),
    ({"keep": 2}, SAVES, "keep", "None", "2"),
    ({"frozen": False}, ALL, "frozen", "True", "False"),
    ({"make": None}, ALL, "optimizer", "'AdamW of 1 group(s)'", "'None'"),
    ({"make": sgd}, SAVES, "optimizer", "'AdamW of 1 group(s)'", "'SGD of 1 group(s)'"),
    ({"make": scheduled}, SAVES[:1], "initial_lr of the optimizer's group 0", "left out", "0.25"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "other", "name", "usual", "own"),
    [
        pytest.param(call, other, *words, id=f"{call.__name__} {number}")
        for number, (other, calls, *words) in enumerate(DIFFERENT)
        for call in calls
    ],
)
def test_ranks_that_save_or_load_otherwise_are_told_and_nothing_is_changed(
    tmp_path: Path, call: Callable[..., Any], other: Mapping[str, Any], name: str, usual: str, own: str
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        given = {"step": 7, "make": adam, **(other if rank == 1 else {})}
        make = given.pop("make")
        optimizer = adam(model)
        step(model, optimizer, rank)
        saved = optimizer if make is adam else make and make(model)
        arguments = [tmp_path, given.pop("step")]
        if call is checkpoint.load:
            arguments = [checkpoint.save(tmp_path, 7, model, optimizer)]
            step(model, optimizer, rank)
        before = whole(model)
        with pytest.raises(
            RankMismatchError, match=r"(Preparing the checkpoint of step .|Opening the checkpoint) .* was given up"
        ) as refused:
            call(*arguments, model, saved, **given)
        assert all(torch.equal(before[name], value) for name, value in whole(model).items())
        if call is checkpoint.load:
            checkpoint.load(*arguments, model, optimizer)
        else:
            # Settings may stand in any order.
            group = optimizer.param_groups[0]
            items = list(group.items())
            group.clear()
            group.update(items if rank else reversed(items))
            checkpoint.save(tmp_path, 7, model, optimizer)
        return str(refused.value)

    told = on_ranks(RANKS, on_rank)
    assert f": '{name}' is {usual} on rank 0, and {own} on rank 1. Call it with the same on every rank." in told[0]
    assert f": '{name}' is {own} on rank 1, and {usual} on rank 0, {usual} on rank 2." in told[1]
    # Of the save that was refused nothing is left.
    assert {path.name for path in tmp_path.iterdir()} - {".job-lock"} == {"step-00000007"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (1.0, r"^step is 1\.0, and must be an int"),
        (True, "^step is True, and must be an int"),
        ("1", "^step is '1', and must be an int"),
        (None, "^step is None, and must be an int"),
    ],
)
def test_steps_that_are_no_whole_numbers_are_refused(tmp_path: Path, given: Any, words: str) -> None:
    model = alone()
    with pytest.raises(ConfigTypeError, match=words):
        checkpoint.save(tmp_path, given, model)
    with pytest.raises(ConfigError, match=r"^keep is 0, and must be 1 or more"):
        checkpoint.save(tmp_path, 1, model, keep=0)
    with pytest.raises(ConfigTypeError, match=r"^keep is 1\.5, and must be an int"):
        checkpoint.save(tmp_path, 1, model, keep=1.5)
    assert checkpoint.save(tmp_path, 1, model).name == "step-00000001"


@pytest.mark.parametrize("given", [np.int64(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_a_step_may_be_any_whole_number_and_a_root_a_text(tmp_path: Path, given: Any) -> None:
    model = alone()
    directory = checkpoint.save(str(tmp_path), given, model, keep=np.int32(2))
    assert directory == tmp_path / "step-00000003"
    checkpoint.load(directory, model)


@pytest.mark.parametrize("given", ["", "a\0b", b"bytes", None], ids=["empty", "null", "bytes", "none"])
def test_what_no_path_can_be_is_refused_by_name(tmp_path: Path, given: Any) -> None:
    model = alone()
    kind = ConfigError if isinstance(given, str) else ConfigTypeError
    words = "None, and must be a path. latest\\(\\) returns None where a folder holds no checkpoint"
    for name, call in (
        ("root", lambda: checkpoint.save(given, 1, model)),
        ("root", lambda: checkpoint.async_save(given, 1, model)),
        ("directory", lambda: checkpoint.load(given, model)),
        ("directory", lambda: checkpoint.load_dcp(given, model)),
        ("directory", lambda: checkpoint.verify(given)),
        ("folder", lambda: checkpoint.latest(given)),
        ("folder", lambda: polyshard_huggingface.save(model, given)),
        ("path", lambda: polyshard_huggingface.load(model, given)),
    ):
        with pytest.raises(kind, match=f"^{name} is {words if given is None else ''}"):
            call()


def made_useless(folder: Path, kind: str) -> Path:
    """A path that can be no folder."""
    if kind == "long":
        return folder / ("x" * 300)
    path = folder / kind
    if kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling":
        path.symlink_to(folder / "nowhere")
    else:
        path.write_text("mine")
    return path / "below" if kind == "parent" else path


@pytest.mark.parametrize("kind", ["file", "parent", "loop", "dangling", "long"])
def test_a_root_that_can_be_no_folder_is_refused_on_all_ranks_and_nothing_is_changed(tmp_path: Path, kind: str) -> None:
    root = made_useless(tmp_path, kind)
    before = sorted(path.name for path in tmp_path.iterdir())

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        for save in (
            lambda: checkpoint.save(root, 1, model),
            lambda: checkpoint.async_save(root, 1, model),
            lambda: polyshard_huggingface.save(model, root),
        ):
            with pytest.raises(
                ConfigError if rank == 0 else RankMismatchError, match="can be no folder to save into"
            ) as refused:
                save()
            assert str(root) in str(refused.value)
        with pytest.raises(StateError, match="is no complete checkpoint"):
            checkpoint.load(root, model)
        # All the ranks still meet.
        checkpoint.save(tmp_path / "good", 1, model)

    on_ranks(RANKS, on_rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "good"])


@pytest.mark.slow
def test_ranks_that_have_not_one_file_system_are_named_on_all_of_them(tmp_path: Path) -> None:
    """Each rank has a disk of its own, mounted under the name that all use: here that is a folder for each."""
    single = alone(seeded(Net))
    checkpoint.save(tmp_path / "seen", 1, single)
    written_by_torch(tmp_path / "dcp", {})
    polyshard_huggingface.save(single, tmp_path / "files")

    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        own = tmp_path / ("seen" if rank == 1 else f"other-{rank}")
        newest = checkpoint.latest(own)
        texts = []
        for call in (
            lambda: checkpoint.save(tmp_path / f"disk-{rank}", 1, model),
            lambda: checkpoint.async_save(tmp_path / f"disk-{rank}", 1, model),
            lambda: polyshard_huggingface.save(model, tmp_path / f"disk-{rank}"),
            lambda: checkpoint.load(own / "step-00000001", model),
            lambda: checkpoint.load(newest, model),
            lambda: checkpoint.load_dcp(tmp_path / ("dcp" if rank == 1 else "none"), model),
            lambda: polyshard_huggingface.load(model, tmp_path / ("files" if rank == 1 else "none")),
        ):
            with pytest.raises(RankMismatchError, match="they have not one file system") as told:
                call()
            texts.append(str(told.value))
        # All the ranks still meet.
        checkpoint.save(tmp_path / "good", 1, model)
        return texts

    for texts in on_ranks(RANKS, on_rank):
        assert all(text.startswith("Ranks 1 and 2 do not see ") for text in texts[:3])
        assert all("disk-0" in text and "which rank 0 sees" in text for text in texts[:3])
        assert all(text.startswith("Ranks 0 and 2 do not see ") for text in texts[3:])
        assert all("which rank 1 sees" in text for text in texts[3:])
        assert ["Pass ranks='first'" in text for text in texts] == [False, False, True, False, False, False, True]
    assert [path.name for path in (tmp_path / "disk-0").iterdir()] == [".job-lock"]
    assert not (tmp_path / "disk-1").exists()
    with pytest.raises(StateError, match=rf"does not exist on host '{socket.gethostname()}'"):
        checkpoint.verify(tmp_path / "nothing")


class Counting(CollectivesDecorator):
    """Counts the bytes that this rank receives."""

    api_version = 1

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.received = 0
        self.calls = 0

    def around(self, inner: Collectives) -> Collectives:
        return Counting(inner)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        self.calls += 1
        self.received += out.nbytes
        return super().all_gather(out, shard)

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        self.calls += 1
        self.received += tensor.nbytes
        return super().broadcast(tensor, src)

    def all_gather_object(self, obj: Any) -> list[Any]:
        self.calls += 1
        self.received += self.world_size * len(pickle.dumps(obj))
        return super().all_gather_object(obj)


def meeting(rank: int, world: ThreadedWorld) -> Collectives:
    return ThreadedCollectives(PluginContext("threaded", torch.device("cpu")), world=world, rank=rank)


@pytest.mark.slow
@pytest.mark.parametrize("save", [checkpoint.save, checkpoint.async_save], ids=["save", "async_save"])
def test_a_save_takes_as_many_communications_on_many_ranks_as_on_few(tmp_path: Path, save: Callable[..., Any]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> int:
        collectives = Counting(meeting(rank, world))
        with world.lock:
            model = seeded(Net)
        polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, check_ranks=False, **BLOCKS))
        optimizer = adam(model)
        step(model, optimizer, rank)
        before = collectives.calls
        save(tmp_path / str(world.world_size), 1, model, optimizer)
        polyshard.close(model)
        return collectives.calls - before

    few, many = set(on_ranks(2, on_rank)), set(on_ranks(8, on_rank))
    assert few == many
    assert len(few) == 1


def save_with(collectives: Collectives, error: Exception | None) -> str:
    """What a rank is told of a save in which some ranks meet an error."""
    try:
        with together(collectives, "Saving"):
            if error is not None:
                raise error
    except (OSError, ValueError):
        return ""
    except RankMismatchError as told:
        return str(told)
    return "no error"


def test_errors_of_many_ranks_are_told_in_few_words() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> tuple[int, str]:
        collectives = Counting(meeting(rank, world))
        error = OSError("x" * 1000 + ("full" if rank % 2 else str(rank)))
        text = save_with(collectives, error if rank else None)
        return collectives.received, text

    found = on_ranks(16, on_rank)
    text = found[0][1]
    assert all(received < 48 * 16 + 4 * 1100 for received, _ in found), found
    assert "ranks 1, 3, 5, 7 and 4 more: OSError: xxx" in text
    assert text.endswith("  and 4 more")


class WordlessError(ValueError):
    """What cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_without_words_is_told_of_all_the_same() -> None:
    texts = on_ranks(2, lambda rank, world: save_with(meeting(rank, world), WordlessError() if rank == 1 else None))
    assert "rank 1: WordlessError, whose words cannot be told" in texts[0]


class Raising:
    """A listener that does not come to its end."""

    @hookimpl
    def on_save(self, path: Path) -> None:
        raise LookupError(f"on_save of {path.name}")

    @hookimpl
    def on_load(self, path: Path) -> None:
        raise LookupError(f"on_load of {path.name}")


@pytest.mark.slow
def test_what_one_ranks_listener_raises_is_told_on_all(tmp_path: Path) -> None:
    single = alone(seeded(Net))
    values = whole(single)
    written_by_torch(tmp_path / "dcp", values)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        listeners = [Raising()] if rank == 1 else []
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, listeners=listeners, check_ranks=False)
        directory = tmp_path / "run" / "step-00000001"
        files, foreign = tmp_path / "hf", tmp_path / "dcp"
        for done, name, call in (
            (f"the save of {directory}, which is", directory.name, lambda: checkpoint.save(tmp_path / "run", 1, model)),
            (f"the load of {directory}", directory.name, lambda: checkpoint.load(directory, model)),
            (f"the load of {foreign}", "dcp", lambda: checkpoint.load_dcp(foreign, model)),
            (f"the export to {files}, which is written", "hf", lambda: polyshard_huggingface.save(model, files)),
            (f"the load of {files}", "hf", lambda: polyshard_huggingface.load(model, files)),
        ):
            with pytest.raises(LookupError if rank == 1 else RankMismatchError) as told:
                call()
            words = "".join(getattr(told.value, "__notes__", ())) if rank == 1 else str(told.value)
            assert f"behind {done}" in words
            assert f" of {name}" in str(told.value)
        pending = checkpoint.async_save(tmp_path / "run", 2, model)
        with pytest.raises(BackgroundSaveError, match="committed:\n  rank 1: LookupError: on_save of step-00000002"):
            checkpoint.load(directory, model)
        assert pending.done()
        assert all(torch.equal(values[name], value) for name, value in whole(model).items())

    on_ranks(RANKS, on_rank)
    checkpoint.verify(tmp_path / "run" / "step-00000001")
    checkpoint.verify(tmp_path / "run" / "step-00000002")
