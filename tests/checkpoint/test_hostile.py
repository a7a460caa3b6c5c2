"""Checkpoints that somebody damaged, or made to do harm: named, and nothing in them runs, escapes or fills memory."""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import psutil
import pytest
import torch
import xxhash
from checkpoints import alone, remark, reseal, written
from parity import local
from polyshard import checkpoint
from polyshard.errors import CheckpointDamagedError, ConfigError, StateError
from torch import nn

Change = Callable[[dict[str, Any]], Any]


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of one rank, trained for a step."""
    torch.manual_seed(seed)
    model = alone(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local(value).clone() for name, value in model.state_dict().items()}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = trained()
    root = tmp_path_factory.mktemp("pristine")
    return checkpoint.save(root, 1, model, optimizer, extra={"tensor": torch.arange(5), "text": "hello"})


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(pristine, tmp_path / "run" / pristine.name))


def refused(directory: Path, words: str) -> None:
    """Every way in says so, and changes nothing."""
    model, optimizer = trained(1)
    before = values(model)
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.load(directory, model, optimizer),
        lambda: checkpoint.read(directory),
        lambda: checkpoint.verify(directory),
    ]
    for call in calls:
        with pytest.raises(CheckpointDamagedError, match=words) as caught:
            call()
        assert str(directory) in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    with pytest.warns(UserWarning, match=f"passed over: .*{words}"):
        assert checkpoint.latest(directory.parent, verify=True) is None


def flip(path: Path, byte: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def test_a_flipped_bit_is_named_with_what_lies_there(directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_bytes())
    (at,) = manifest["model"]["0.weight"]["at"]
    flip(directory / "__0_0.distcp", at, 3)
    model, optimizer = trained(1)
    message = r"'__0_0\.distcp' holds something else .* byte 0 to .*'model\.0\.weight'.*: the digest differs"
    with pytest.raises(CheckpointDamagedError, match=message):
        checkpoint.load(directory, model, optimizer)
    with pytest.raises(CheckpointDamagedError, match=message):
        checkpoint.read(directory)
    assert checkpoint.latest(directory.parent) == directory
    with pytest.warns(UserWarning, match=r"passed over: .*'__0_0\.distcp' holds something else"):
        assert checkpoint.latest(directory.parent, verify=True) is None


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_of_other_content_are_refused(change: str, directory: Path) -> None:
    for path in sorted(directory.iterdir()):
        before = path.read_bytes()
        path.write_bytes(CHANGES[change](before))
        refused(directory, f"'{path.name}'")
        path.write_bytes(before)


def weight(**changes: Any) -> Change:
    """Let the manifest tell something else of a weight, which has one box."""
    return lambda manifest: manifest["model"]["0.weight"].update(changes)


def extra(value: Any) -> Change:
    return lambda manifest: manifest["extra"].update(x=value)


def state(**changes: Any) -> Change:
    return lambda manifest: manifest["optimizer"]["state"]["0.weight"].update(changes)


def group(**changes: Any) -> Change:
    return lambda manifest: manifest["optimizer"]["groups"][0].update(changes)


def rename(name: str) -> Change:
    """Let the manifest name another file."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"].pop("__0_0.distcp")

    return change


def grown(manifest: dict[str, Any]) -> None:
    # One megabyte of a file for a terabyte of memory: each chunk is there, but it is the same bytes.
    told, rows = manifest["model"]["0.weight"], 1 << 14
    offsets = [number for row in range(rows) for number in (row, 0)]
    told.update(shape=[1 << 20, 15], offsets=offsets, sizes=[1, 15] * rows, files=[0] * rows, at=told["at"] * rows)


def doubled(manifest: dict[str, Any]) -> None:
    told = manifest["model"]["0.weight"]
    for column in ("offsets", "sizes", "files", "at"):
        told[column] += told[column]


def shared(manifest: dict[str, Any]) -> None:
    manifest["model"]["0.weight"]["at"] = manifest["model"]["1.weight"]["at"]


#: Numbers of one hash.
ALIKE = [number * (2**61 - 1) for number in range(2000)]
NO_BOX: dict[str, list[int]] = {"offsets": [], "sizes": [], "files": [], "at": []}


HOSTILE: dict[str, tuple[Change | bytes, str]] = {
    "no model": (lambda m: m.pop("model"), "KeyError"),
    "of no dtype": (weight(dtype="os"), "KeyError"),
    "a huge shape": (weight(shape=[1 << 45, 5]), "has 15 elements"),
    "a shape of no tensor": (weight(shape=[0, 1 << 61, 1 << 61]), "no tensor has"),
    "a value of no tensor's shape": (
        extra({"$tensor": {"dtype": "int8", "shape": [0, *[1 << 61] * 60], **NO_BOX}}),
        "no tensor has",
    ),
    "a number of 400 digits": (weight(shape=[10**400, 5]), "no number of anything"),
    "a negative shape": (weight(shape=[-3, -5]), "no number of anything"),
    "a thousand dimensions": (weight(shape=[1] * 1000), "1000 dimensions"),
    "elements missing": (weight(**NO_BOX), "has 0 elements"),
    "elements twice": (doubled, "has 30 elements"),
    "the same memory": (grown, "elements"),
    "two in one place": (shared, "is in two boxes"),
    "outside of the shape": (weight(offsets=[1, 0]), "has a box at"),
    "of huge extents": (weight(sizes=[(1 << 62) - 1, (1 << 62) - 1]), "has a box at"),
    "of fractions": (weight(at=[64.0]), "something else than numbers"),
    "below nothing": (weight(at=[-64]), "something else than numbers"),
    "behind the file's end": (weight(at=[1 << 40]), "is said to lie at byte"),
    "between alignments": (weight(at=[65]), "is said to lie at byte"),
    "in no file": (weight(files=[1]), "is said to lie at byte"),
    "above the folder": (rename("../__0_0.distcp"), "which no rank writes"),
    "a name with a line break": (rename("__0_0.distcp\n"), "which no rank writes"),
    "a name of other digits": (rename("__\u0660_0.distcp"), "which no rank writes"),
    "another file": (rename("__1_0.distcp"), "not those of 'COMMITTED'"),
    "too few digests": (lambda m: m["files"]["__0_0.distcp"].update(xxh3_128=[]), "has 0 digests"),
    "digests that are none": (lambda m: m["files"]["__0_0.distcp"].update(xxh3_128=["x" * 32]), "has 1 digests"),
    "a strange alias": (lambda m: m["aliases"].update({"a": "nowhere"}), "'a' is said to be 'nowhere'"),
    "no values": (lambda m: m.update(extra=[3]), "a value is no object"),
    "a number for values": (lambda m: m.update(extra=3), "extra is no object"),
    "an unknown tag": (extra({"$call": ["os.system", "true"]}), "'call', which this polyshard"),
    "a pickle in a tag": (extra({"$bytes": 3}), "bytes is no text"),
    "no base64": (extra({"$bytes": "§"}), "ValueError|Error"),
    "a dtype of torch's": (extra({"$dtype": "load"}), "KeyError"),
    "a scalar of objects": (extra({"$scalar": ["object", "AAAAAAAAAAA="]}), "scalar of 'object'"),
    "a device of none": (extra({"$device": "nowhere:1"}), "the device"),
    "a list for a key": (extra({"$dict": [[{"$list": []}, 1]]}), "TypeError"),
    "a year of none": (extra({"$date": "99999-99-99"}), "ValueError"),
    "a huge duration": (extra({"$timedelta": [10**30, 0, 0]}), "OverflowError"),
    "a tensor in a number": (extra({"$tensor": {"$tensor": 1}}), "KeyError"),
    "keys of one hash": (extra({"$dict": [[each, 1] for each in ALIKE]}), "keys that were made to have one hash"),
    "members of one hash": (extra({"$set": ALIKE}), "keys that were made to have one hash"),
    "state of nobody": (lambda m: m["optimizer"]["state"].update(ghost={"step": 1}), "of 'ghost', which no group has"),
    "groups that are none": (lambda m: m["optimizer"].update(groups={"0": {}}), "groups is no list"),
    "a group without names": (lambda m: m["optimizer"]["groups"][0].pop("params"), "KeyError"),
    "a class that is none": (lambda m: m["optimizer"].update(kind={"module": 3, "class": "AdamW"}), "kind is no text"),
    "a tensor in state": (state(x={"$list": [{"$tensor": {}}]}), "a tensor where none can be"),
    "lists in lists": (
        extra(functools.reduce(lambda value, _: {"$list": [value]}, range(150), 1)),
        "nested too deeply",
    ),
    "a format of none": (lambda m: m.update(format=[3]), "it is of format"),
    # What is no manifest.
    "nothing": (b"", "cannot be what was written"),
    "no text": (b"\xff\xfe\x00", "cannot be what was written"),
    "a pickle": (pickle.dumps({"a": 1}), "cannot be what was written"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "not a number": (b'{"format":NaN}', "the number NaN"),
    "twice": (b'{"format":3,"format":3}', "a name twice"),
    "a long number": (b'{"format":' + b"9" * 5000 + b"}", "cannot be what was written"),
    "a list": (b"[]", "the manifest is no object"),
}


MARKERS: dict[str, tuple[Change, str]] = {
    "a path": (lambda m: m["files"].update({"../x": 1}), "which is none of the directory"),
    "a negative size": (lambda m: m["files"].update({"manifest.json": -1}), "no number of anything"),
    "sizes in a list": (lambda m: m.update(files=[1]), "files is no object"),
    "a text for a number": (lambda m: m.update(step="1"), "step is no number"),
    "no manifest": (lambda m: m.pop("manifest"), "KeyError"),
    "no identity": (lambda m: m.update(identity=None), "identity is no text"),
    "half complete": (lambda m: m.update(complete=1), "neither true nor false"),
    "a format that is none": (lambda m: m.update(format=None), "format is no number"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name"),
    [*(("manifest.json", name) for name in HOSTILE), *(("COMMITTED", name) for name in MARKERS)],
)
def test_what_cannot_have_been_written_is_refused(file: str, name: str, directory: Path) -> None:
    if file == "COMMITTED":
        change, words = MARKERS[name]
        remark(directory, change)
    else:
        given, words = HOSTILE[name]
        reseal(directory, given)
    refused(directory, f"'{file}' .*({words})")


@pytest.mark.parametrize("number", [0, 2, 5])
def test_another_format_is_refused_by_number(directory: Path, number: int) -> None:
    remark(directory, lambda marker: marker.update(format=number))
    model, optimizer = trained(1)
    for call in (checkpoint.verify, checkpoint.read, lambda path: checkpoint.load(path, model, optimizer)):
        with pytest.raises(StateError, match=f"has format {number}, but this polyshard reads 3 and 4"):
            call(directory)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["__0_0.distcp", "manifest.json", "COMMITTED"])
def test_links_and_pipes_are_not_followed(name: str, directory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (directory / name).rename(elsewhere)
    (directory / name).symlink_to(elsewhere)
    refused(directory, f"'{name}' is a link, and must be a file")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    refused(directory, f"'{name}' is no file")
    (directory / name).unlink()
    (directory / name).mkdir()
    refused(directory, f"'{name}' is no file")


def test_state_of_one_rank_of_many_has_no_more_elements_than_its_parameter(directory: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        step = manifest["optimizer"]["state"]["0.weight"]["step"]["$tensor"]
        step.update(shape=[1 << 40], **NO_BOX)

    reseal(directory, change)
    remark(directory, lambda marker: marker.update(complete=False))
    model, optimizer = trained(1)
    before = values(model)
    with pytest.raises(CheckpointDamagedError, match=r"'0\.weight\.step' of shape \(1099511627776,\) has 0 elements"):
        checkpoint.load(directory, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def add_file(directory: Path, size: int, told: dict[str, Any]) -> None:
    """Let a file of ``size`` zeros be there, too, and in ``extra`` the tensor ``told`` of it."""
    (directory / "__1_0.distcp").touch()
    os.truncate(directory / "__1_0.distcp", size)
    block = 4 << 20
    digests = [xxhash.xxh3_128(bytes(min(block, size))).hexdigest()] * (size // block)
    digests += [xxhash.xxh3_128(bytes(size % block)).hexdigest()] * (size % block > 0)

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"]["__1_0.distcp"] = {"size": size, "xxh3_128": digests}
        manifest["extra"]["more"] = {"$tensor": told}

    reseal(directory, change)
    remark(directory, lambda marker: marker["files"].update({"__1_0.distcp": size}))


def test_a_sparse_file_of_more_than_the_machines_memory_is_refused(directory: Path) -> None:
    size = psutil.virtual_memory().total + psutil.swap_memory().total + (4 << 20)
    size -= size % (4 << 20)
    told = {"dtype": "uint8", "shape": [size], "offsets": [0], "sizes": [size], "files": [1], "at": [0]}
    add_file(directory, size, told)
    model, optimizer = trained(1)
    before = values(model)
    for call in (lambda: checkpoint.load(directory, model, optimizer), lambda: checkpoint.read(directory)):
        with pytest.raises(StateError, match=r"has [\d,]+ bytes to be read into host memory .* this machine has"):
            call()
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())

    def named(manifest: dict[str, Any]) -> None:
        told = manifest["extra"].pop("more")["$tensor"]
        told.update(shape=[size // 2], sizes=[size // 2])
        manifest["model"]["large"] = told
        manifest["aliases"].update({"again": "large", "once more": "large"})

    # Each name of a tensor is given memory.
    reseal(directory, named)
    with pytest.raises(StateError, match=r"has [\d,]+ bytes to be read into host memory"):
        checkpoint.read(directory)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_thousands_of_chunks_beside_each_other_take_no_minutes(directory: Path) -> None:
    count = 8000
    columns = list(range(count))
    random.Random(0).shuffle(columns)
    told = {"dtype": "uint8", "shape": [2, count], "sizes": [2, 1] * count, "files": [1] * count}
    told.update(offsets=[number for column in columns for number in (0, column)], at=[64 * each for each in columns])
    add_file(directory, 64 * count, told)
    checkpoint.verify(directory)
    model, optimizer = trained(1)
    assert torch.equal(checkpoint.load(directory, model, optimizer)["more"], torch.zeros(2, count, dtype=torch.uint8))

    def twice(manifest: dict[str, Any]) -> None:
        offsets = manifest["extra"]["more"]["$tensor"]["offsets"]
        offsets[1] = offsets[3]

    reseal(directory, twice)
    refused(directory, "'manifest.json' .*has elements twice")


NONSENSE: dict[str, tuple[Change, str]] = {
    "a list for a rate": (group(lr={"$list": [1, 2]}), r"'lr' was \[1, 2\] and is 0.001"),
    "a text for a rate": (group(lr="0.001"), "'lr' was '0.001' and is 0.001"),
    "no number for a rate": (group(lr={"$float": "nan"}), "'lr' was nan and is 0.001"),
    "three betas": (group(betas={"$tuple": [0.9, 0.95, 0.99]}), r"was \(0.9, 0.95, 0.99\) and is \(0.9, 0.999\)"),
    "a text for a beta": (group(betas={"$tuple": [0.9, "a"]}), r"'betas' was \(0.9, 'a'\) and is"),
    "a text for steps": (state(step="abc"), "optimizer state 'step'.* is 'abc'"),
    "a list for steps": (state(step={"$list": [1]}), r"optimizer state 'step'.* is \[1\]"),
    "no number of steps": (state(step={"$float": "nan"}), "optimizer state 'step'.* is nan"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_what_no_optimizer_has_is_refused(name: str, directory: Path) -> None:
    change, words = NONSENSE[name]
    good = checkpoint.read(directory)["model"]
    reseal(directory, change)
    model, optimizer = trained(1)
    fresh = torch.optim.AdamW(model.parameters())
    flat = torch.optim.AdamW(polyshard.flat_parameters(model))
    before = values(model)
    for each in (optimizer, fresh, flat):
        with pytest.raises(ConfigError, match=words):
            checkpoint.load(directory, model, each)
    assert all(torch.equal(value, before[key]) for key, value in values(model).items())
    # Without its optimizer it loads.
    checkpoint.load(directory, model)
    assert all(torch.equal(value, good[key]) for key, value in values(model).items())


@pytest.mark.parametrize(("name", "fits"), [("AdamW", True), ("Some", False)])
def test_a_forged_class_of_an_optimizer_is_compared_and_not_imported(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fits: bool
) -> None:
    mark = tmp_path / "imported"
    (tmp_path / "planted_optimizer.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass {name}: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    forged = {"module": "planted_optimizer", "class": name}
    reseal(directory, lambda manifest: manifest["optimizer"]["kind"].update(forged))
    checkpoint.verify(directory)
    checkpoint.read(directory)
    model, optimizer = trained(1)
    before = values(model)
    if fits:
        # Classes move between versions of torch: the name alone decides.
        checkpoint.load(directory, model, optimizer)
    else:
        with pytest.raises((StateError, ConfigError), match=name):
            checkpoint.load(directory, model, optimizer)
        assert all(torch.equal(value, before[key]) for key, value in values(model).items())
    checkpoint.load(directory, model)
    assert not mark.exists()


def as_0_2_wrote_it(directory: Path) -> None:
    """Put the same state in the files of format 3 in the place of those of format 4."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    (old,) = manifest["files"]
    content = (directory / old).read_bytes()
    (directory / old).rename(directory / "rank-00000.bin")
    (directory / ".metadata").unlink()

    def rewritten(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(rewritten, value))
        if not isinstance(value, dict):
            return value
        if value.keys() >= {"dtype", "shape", "at"}:
            nbytes = getattr(torch, value["dtype"]).itemsize * math.prod(value["shape"])
            rows = [[value["offsets"], value["sizes"], "rank-00000.bin", at, nbytes] for at in value["at"]]
            return {"dtype": value["dtype"], "shape": value["shape"], "chunks": rows}
        return {key: rewritten(each) for key, each in value.items()}

    told = {"size": len(content), "xxh3_128": [xxhash.xxh3_128(content).hexdigest()]}
    new = written({**rewritten(manifest), "format": 3, "files": {"rank-00000.bin": told}})
    reseal(directory, new)

    def change(marker: dict[str, Any]) -> None:
        del marker["described"]
        marker.update(format=3, files={"manifest.json": len(new), "rank-00000.bin": len(content)})

    remark(directory, change)


def test_what_polyshard_0_2_wrote_is_read(directory: Path) -> None:
    before = checkpoint.read(directory)
    as_0_2_wrote_it(directory)
    assert {path.name for path in directory.iterdir()} == {"COMMITTED", "manifest.json", "rank-00000.bin"}
    checkpoint.verify(directory)
    after = checkpoint.read(directory)
    assert before["model"].keys() == after["model"].keys()
    assert all(torch.equal(value, after["model"][name]) for name, value in before["model"].items())
    model, optimizer = trained(1)
    checkpoint.load(directory, model, optimizer)
    assert all(torch.equal(value, before["model"][name]) for name, value in values(model).items())
    flip(
        directory / "rank-00000.bin",
        json.loads((directory / "manifest.json").read_bytes())["model"]["0.weight"]["chunks"][0][3],
        1,
    )
    refused(directory, r"'rank-00000\.bin' holds something else")
