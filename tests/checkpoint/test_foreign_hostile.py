"""DCP directories that somebody made to do harm, or damaged: named, and nothing of them runs or is taken over."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import alone
from parity import local
from polyshard import checkpoint
from polyshard.errors import CheckpointDamagedError, ConfigError, PolyshardError, StateError
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

DATA, WEIGHT, LR, STEP = "__0_0.distcp", "model.weight", "optimizer.param_groups.0.lr", "optimizer.state.weight.step"
Change = Callable[[Path], object]


class Attack:
    """What executes a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def said(change: Callable[[Any], object]) -> Change:
    """Let ``.metadata`` say something else."""

    def make(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return make


def bare(data: bytes) -> Change:
    """Let ``.metadata`` be these bytes."""
    return lambda folder: (folder / ".metadata").write_bytes(data)


def where(metadata: Any, key: str) -> MetadataIndex:
    return next(each for each in metadata.storage_data if each.fqn == key)


def stored(key: str = WEIGHT, **changes: Any) -> Change:
    def change(metadata: Any) -> None:
        index = where(metadata, key)
        metadata.storage_data[index] = replace(metadata.storage_data[index], **changes)

    return said(change)


def tensor(key: str = WEIGHT, **changes: Any) -> Change:
    return said(lambda metadata: vars(metadata.state_dict_metadata[key]).update(changes))


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
    """Let the weight be in these, all in one place."""

    def change(metadata: Any) -> None:
        info = metadata.storage_data.pop(where(metadata, WEIGHT))
        made = [ChunkStorageMetadata(*(torch.Size(each) for each in box)) for box in boxes]
        metadata.state_dict_metadata[WEIGHT].chunks = made
        metadata.storage_data.update({MetadataIndex(WEIGHT, each.offsets): info for each in made})

    return said(change)


def archived(key: str, data: bytes) -> Change:
    """Let ``key`` lie in these bytes."""

    def make(folder: Path) -> None:
        with (folder / DATA).open("ab") as file:
            at = file.tell()
            file.write(data)
        stored(key, offset=at, length=len(data))(folder)

    return make


def saved(given: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(given, buffer)
    return buffer.getvalue()


def value(key: str, given: Any) -> Change:
    return archived(key, saved(given))


def instead(name: str, put: Callable[[Path, Path], object]) -> Change:
    """Let ``put`` make something in the place of a file; the second path is where the file is then."""
    return lambda folder: put(folder / name, (folder / name).rename(folder.parent / "elsewhere"))


def keyed(key: str, *path: Any) -> Change:
    return said(lambda metadata: metadata.planner_data.update({key: path}))


def typed(dtype: Any) -> Change:
    return said(lambda metadata: vars(metadata.state_dict_metadata[WEIGHT].properties).update(dtype=dtype))


def sized(name: str, size: int) -> Change:
    return lambda folder: os.truncate(folder / name, size)


#: Would give a class of torch another method, were that class there.
POISON = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x08\x00\x00\x00__hash__Ns\x86b."
BROKEN, UNKNOWN, OTHER = CheckpointDamagedError, StateError, ConfigError
CASES: dict[str, tuple[Change, type[PolyshardError], str]] = {
    # What would be executed.
    "a command": (bare(pickle.dumps(Attack())), UNKNOWN, r"names posix\.system in '\.metadata'"),
    "a command in metadata": (said(lambda m: m.planner_data.update(x=Attack())), UNKNOWN, r"names posix\.system"),
    "an old operation": (bare(b"(S'touch executed'\nios\nsystem\n."), UNKNOWN, r"names os\.system in"),
    "a command for a rate": (value(LR, Attack()), UNKNOWN, rf"object of posix\.system in '{LR}', .*without the opt"),
    "a command for a weight": (value(WEIGHT, Attack()), UNKNOWN, rf"object of posix\.system in '{WEIGHT}'"),
    "numpy for a rate": (value(LR, np.float64(1)), UNKNOWN, rf"numpy\..*scalar in '{LR}'"),
    "a method for a class": (bare(POISON), BROKEN, r"TypeError: .*__setstate__"),
    # What is no metadata.
    "half": (sized(".metadata", 700), BROKEN, r"'\.metadata' cannot be .* truncated"),
    "a dict": (bare(pickle.dumps({})), BROKEN, "it has dict for Metadata"),
    "lists in lists": (bare(b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."), BROKEN, "it has list for"),
    "a sparse file": (sized(".metadata", 1 << 43), UNKNOWN, r"'\.metadata' of 8,796,093,022,208 bytes"),
    "no keys": (keyed(WEIGHT, "model", ("weight",)), BROKEN, "for the way to 'model.weight'"),
    "groups": (keyed(LR, "optimizer", "param_groups", 1 << 40, "lr"), OTHER, "'lr' is missing in the ch"),
    # Paths.
    **{
        f"the path {path!r}": (stored(relative_path=path), BROKEN, "which is no file of the directory")
        for path in (f"../good/{DATA}", f"/tmp/{DATA}", f"a/{DATA}", "..", ".", "", f"{DATA}\0")
    },
    "extensions": (stored(transform_descriptors=["stream.zstd/1"]), BROKEN, "'model.weight' is transformed"),
    **{
        f"{words} for {name}": (instead(name, put), BROKEN, f"'{name}' is {words}")
        for put, words in ((Path.symlink_to, "a link"), (lambda path, there: os.mkfifo(path), "no file"))
        for name in (".metadata", DATA)
    },
    "a file gone": (instead(DATA, lambda path, there: None), BROKEN, f"'{DATA}' is gone"),
    # Places.
    "before the file": (stored(offset=-1), BROKEN, "'model.weight' is no number of anything"),
    "behind the file": (stored(offset=1 << 60), BROKEN, rf"'{DATA}' has no '{WEIGHT}' .* the file has [\d,]+ bytes"),
    "too little": (stored(length=59), BROKEN, r"has 60 bytes at \(0, 0\), and for them .* length=59"),
    "another place": (stored(offset=3), BROKEN, rf"no '{WEIGHT}' at byte 3: UnpicklingError"),
    "half a file": (sized(DATA, 3000), BROKEN, "the file has 3,000 bytes"),
    "nowhere": (said(lambda m: m.storage_data.pop(where(m, WEIGHT))), BROKEN, "and for them None"),
    # Tensors.
    "a chunk outside": (chunks(((1, 0), (3, 5))), BROKEN, r"of shape \(3, 5\) has a chunk at \(1, 0\) of \(3, 5\)"),
    "a negative chunk": (chunks(((0, 0), (-3, -5))), BROKEN, "'model.weight' is no number of anything"),
    "a flat chunk": (chunks(((0,), (15,))), BROKEN, r"has a chunk at \(0,\) of \(15,\)"),
    "twice": (chunks(((0, 0), (2, 5)), ((1, 0), (1, 5))), BROKEN, "'model.weight' has elements twice"),
    "a row missing": (chunks(((0, 0), (2, 5))), OTHER, "holds 10 of the 15 elements"),
    "other chunks": (chunks(((0, 0), (2, 5)), ((2, 0), (1, 5))), BROKEN, r"of \(3, 5\), and must be .* of \(2, 5\)"),
    "a huge tensor": (tensor(size=torch.Size((1 << 40, 5))), OTHER, r"has shape \(1099511627776, 5\)"),
    "huge steps": (tensor(STEP, size=torch.Size((1 << 50,)), chunks=[]), UNKNOWN, "allocate 4503599627370496 bytes"),
    "another dtype": (typed(torch.int32), OTHER, r"torch\.int32 in the directory"),
    "a file of another dtype": (value(WEIGHT, torch.zeros(3, 5).double()), BROKEN, r"it is torch\.float64 of \(3, 5\)"),
    "a file of another shape": (value(WEIGHT, torch.zeros(5, 3)), BROKEN, r"it is torch\.float32 of \(5, 3\)"),
    "a number for a tensor": (value(WEIGHT, [0] * 99), BROKEN, "it is list of another kind"),
    "a tensor of nothing": (value(WEIGHT, torch.zeros(3, 5, device="meta")), BROKEN, "it is Tensor of another kind"),
    # Other values.
    "a huge rate": (value(LR, torch.zeros(1).expand(1 << 45)), OTHER, r"'lr' was tensor\(\[0\."),
}


@pytest.mark.parametrize("name", CASES)
def test_is_named_and_changes_nothing(name: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, error, words = CASES[name]
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(good, tmp_path / "directory"))
    make(folder)
    torch.manual_seed(1)
    model = alone(nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = {key: local(each).clone() for key, each in model.state_dict().items()}
    with pytest.raises(PolyshardError, match=words) as caught:
        checkpoint.load_dcp(folder, model, optimizer)
    assert type(caught.value) is error
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "executed").exists()
    assert all(torch.equal(local(each), before[key]) for key, each in model.state_dict().items())
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.5
    checkpoint.load_dcp(good, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not torch.equal(local(model.weight), before["weight"])
