"""Progress of saves and loads: what listeners hear, and the line that ``progress`` writes to a terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from polyshard import ShardConfig, checkpoint, hookimpl
from polyshard.interfaces import PluginContext
from polyshard_plugins.progress import Progress, ProgressLine
from saved_net import Net, on_ranks
from torch import nn

#: Bytes of a block of a checkpoint's file.
BLOCK = 4 << 20


class Heard:
    """Keeps what was said of each model."""

    def __init__(self) -> None:
        self.said: dict[int, list[tuple[str, int, int]]] = {}

    @hookimpl
    def on_progress(self, model: nn.Module, work: str, done: int, total: int) -> None:
        self.said.setdefault(id(model), []).append((work, done, total))


class Screen(io.StringIO):
    """Where a line is written, and whether that is a terminal."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def sharded(*listeners: Any, rank: int = 0) -> nn.Module:
    """Two units, of 8 MiB and 1 KiB on each of four ranks."""
    model = nn.Sequential(nn.Linear(4096, 2048, bias=False), nn.Linear(32, 32, bias=False))
    config = ShardConfig(
        collectives={"name": "fake", "world_size": 4, "rank": rank}, policy="always", listeners=listeners
    )
    return polyshard.shard(model, config)


def test_a_listener_that_fails_says_nothing_of_the_checkpoint(tmp_path: Path) -> None:
    class Fails:
        fails = False

        @hookimpl
        def on_progress(self, done: int) -> None:
            if self.fails:
                raise ValueError(f"behind {done} bytes")

    listener = Fails()
    model = sharded(listener)
    directory = checkpoint.save(tmp_path, 3, model)
    listener.fails = True
    # As it raised it, and not as damage for which an older checkpoint would be loaded.
    with pytest.raises(ValueError, match=r"behind .* bytes") as caught:
        checkpoint.load(directory, model)
    assert caught.type is ValueError
    listener.fails = False
    checkpoint.load(directory, model)


@pytest.mark.slow
def test_listeners_hear_of_each_block_until_all_bytes_are_there(tmp_path: Path) -> None:
    heard = Heard()
    model = sharded(heard)
    directory = checkpoint.save(tmp_path, 3, model)
    size = (directory / "__0_0.distcp").stat().st_size
    assert size > 2 * BLOCK
    saved = [(f"Saving {directory}", done, size) for done in (BLOCK, 2 * BLOCK, size)]
    assert heard.said.pop(id(model)) == saved
    checkpoint.load(directory, model)
    # As much is read: all that this rank wrote.
    assert heard.said.pop(id(model)) == [(f"Loading {directory}", done, total) for _, done, total in saved]
    # A save in the background speaks to nobody: a line would come up while a step is printed.
    checkpoint.async_save(tmp_path, 4, model).result()
    model.zero_grad()
    assert heard.said == {}


@pytest.mark.parametrize("ranks", ["all", "first"])
def test_files_of_hugging_face_are_heard_of_on_each_rank(ranks: Any, tmp_path: Path) -> None:
    heard = Heard()

    def out_and_in(model: Net, rank: int) -> list[tuple[str, int, int]]:
        polyshard_huggingface.save(model, tmp_path, ranks=ranks)
        polyshard_huggingface.load(model, tmp_path, ranks=ranks)
        return heard.said[id(model)]

    every = on_ranks(2, out_and_in, listeners=[heard])
    for rank, said in enumerate(every):
        works = [f"Saving {tmp_path}", f"Loading {tmp_path}"]
        # Rank 0 may write for all.
        works = works[1:] if rank and ranks == "first" else works
        assert list(dict.fromkeys(work for work, _, _ in said)) == works
        for work in works:
            done = [each for name, each, _ in said if name == work]
            (total,) = {each for name, _, each in said if name == work}
            assert done == sorted(done)
            assert done[-1] == total > 0


@pytest.mark.slow
def test_a_line_is_written_over_and_removed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    model = sharded({"name": "progress"})
    directory = checkpoint.save(tmp_path, 3, model)
    nothing, first, *others, last = screen.getvalue().split("\r\x1b[K")
    assert (nothing, first, last) == ("", f"Saving {directory}: 50%, 4.0 of 8.0 MiB", "")
    # Where the disk is quick, its pause is longer than all of it.
    assert all(re.fullmatch(r"Saving .*: 100%, 8\.0 of 8\.0 MiB, [\d,]+ MiB/s", each) for each in others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "terminal", "term"), [(0, False, "xterm"), (1, True, "xterm"), (0, True, "dumb")], ids=str
)
def test_it_is_quiet_without_a_terminal_and_on_other_ranks(
    rank: int, terminal: bool, term: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    context = PluginContext("progress", torch.device("cpu"), rank=rank, world_size=4)
    checkpoint.save(tmp_path, 3, sharded(Progress(context), rank=rank))
    assert screen.getvalue() == ""


def test_work_of_an_unknown_size_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    line = ProgressLine(unit="samples", stream=screen)
    line("Planning a step", 4096, 0)
    line.end()
    line.end()
    assert screen.getvalue().split("\r\x1b[K") == ["", "Planning a step: 4,096 samples", ""]


def test_a_long_name_does_not_break_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    screen = Screen()
    ProgressLine(stream=screen)(f"Saving {'runs/' * 20}step-00000001", BLOCK, 4 * BLOCK)
    _, shown = screen.getvalue().split("\r\x1b[K")
    assert len(shown) == 39
    assert shown.startswith("...")
    assert shown.endswith("step-00000001: 25%, 4.0 of 16.0 MiB")
