"""Safetensors files into shards and out of them: values, and bytes that move."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from parity import local, one_core
from polyshard.errors import ConfigError, RankMismatchError
from processes import run_script
from safetensors.torch import load_file, save_file
from saved_net import Net, Values, net, on_ranks, same, state, whole
from torch import nn


@pytest.fixture(autouse=True, scope="module")
def taking_turns() -> Iterator[None]:
    with one_core():
        yield


# Values.


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reads", ["all", "first"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "no_shard"}, {"offload": "cpu"}, {"precision": "mixed"}, {"policy": "never"}],
    ids=str,
)
def test_values_go_in_and_out(ranks: int, reads: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")

    def in_and_out(model: Net, rank: int) -> Values:
        polyshard_huggingface.load(model, tmp_path, ranks=reads)
        polyshard_huggingface.save(model, tmp_path / "out", ranks=reads)
        assert torch.equal(model.cache, torch.arange(4.0))
        return whole(model)

    for values in on_ranks(ranks, in_and_out, **settings):
        assert same(values, expected)
        assert torch.equal(values["head.weight"], expected["embed.weight"])
    # Another reader finds the same, whatever the number of ranks.
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert same(written, expected)


@pytest.mark.slow
def test_the_tied_tensor_is_found_under_either_name(tmp_path: Path) -> None:
    expected = state()
    other = {("head.weight" if name == "embed.weight" else name): value for name, value in expected.items()}
    both = {**expected, "head.weight": expected["embed.weight"].clone()}
    for content in (other, both):
        save_file(content, tmp_path / "model.safetensors")

        def read(model: Net, rank: int) -> Values:
            polyshard_huggingface.load(model, tmp_path)
            assert model.head.weight is model.embed.weight
            return whole(model)

        assert all(same(values, expected) for values in on_ranks(2, read))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["all", "first"])
def test_a_conversion_of_ones_own_goes_both_ways(ranks: Any, tmp_path: Path) -> None:
    from transformers.core_model_loading import Concatenate, Transpose, WeightConverter, WeightRenaming

    convert = [
        WeightRenaming("layers", "blocks"),
        WeightConverter(["up.left", "up.right"], "up.weight", operations=[Concatenate(dim=1)]),
        WeightConverter("down.kernel", "down.weight", operations=[Transpose()]),
    ]
    expected = state()
    given = {name.replace("blocks", "layers"): value for name, value in expected.items()}
    for index in range(3):
        up, down = (given.pop(f"layers.{index}.{each}.weight") for each in ("up", "down"))
        given[f"layers.{index}.up.left"], given[f"layers.{index}.up.right"] = up.chunk(2, 1)
        given[f"layers.{index}.down.kernel"] = down.T
    given = {name: value.contiguous() for name, value in given.items()}
    save_file(given, tmp_path / "model.safetensors")

    def in_and_out(model: Net, rank: int) -> Values:
        kind = RankMismatchError if rank and ranks == "first" else ConfigError
        with pytest.raises(kind, match="12 in the files and not in the model: 'layers"):
            polyshard_huggingface.load(model, tmp_path, ranks=ranks, convert=convert[1:])
        polyshard_huggingface.load(model, tmp_path, ranks=ranks, convert=convert)
        polyshard_huggingface.save(model, tmp_path / "out", ranks=ranks, convert=convert)
        return whole(model)

    for values in on_ranks(3, in_and_out):
        assert same(values, expected)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == given.keys()
    assert same(written, given)


def test_dtypes_are_cast_element_by_element(tmp_path: Path) -> None:
    expected = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state().items()}
    save_file(expected, tmp_path / "model.safetensors")

    def in_and_out(model: Net, rank: int) -> Values:
        polyshard_huggingface.load(model, tmp_path)
        polyshard_huggingface.save(model, tmp_path / "out", dtype=torch.float16)
        return whole(model)

    for values in on_ranks(2, in_and_out):
        assert all(torch.equal(values[name], each.to(values[name].dtype)) for name, each in expected.items())
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["norm.num_batches_tracked"].dtype == torch.int64
    halves = {name: each.float().half() if each.is_floating_point() else each for name, each in expected.items()}
    assert same(written, halves)


def test_flat_parameters_and_optimizers_see_what_was_read(tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")

    def read(model: Net, rank: int) -> Values:
        optimizer = torch.optim.SGD(polyshard.flat_parameters(model), lr=0.0)
        polyshard_huggingface.load(model, tmp_path)
        model(torch.arange(7)).sum().backward()
        optimizer.step()
        return whole(model)

    for values in on_ranks(2, read):
        assert same(values, {name: each for name, each in expected.items() if not name.startswith("norm.")})


# What it takes.


def peak_of(work: Callable[[], object]) -> int:
    """MiB of this process above what it had, at most."""
    begun = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    work()
    return _resident("VmHWM") - begun


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) >> 10


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_has_the_whole_model(tmp_path: Path) -> None:
    """128 MiB in 16 layers, of which each rank keeps an eighth."""

    def made(rank: int) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(16)))
        config = {"policy": {"name": "module_class", "classes": [nn.Linear]}, "device": "cpu"}
        collectives = {"name": "fake", "world_size": 8, "rank": rank} if rank else {"name": "fake", "world_size": 1}
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # one rank shards nothing
            return polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, **config))

    # What a stream has at a time, and a tensor on its way to the disk.
    assert peak_of(partial(polyshard_huggingface.save, made(0), tmp_path)) < 80
    part = made(5)
    # Pages of the files, as many as the system reads ahead.
    assert peak_of(lambda: polyshard_huggingface.load(part, tmp_path)) < 100
    whole = load_file(tmp_path / "model.safetensors")["3.weight"]
    assert torch.equal(local(part.get_parameter("3.weight").detach()), whole[5 * 256 : 6 * 256])


@pytest.mark.slow
def test_the_layout_of_several_files(tmp_path: Path) -> None:
    on_ranks(2, lambda model, rank: polyshard_huggingface.save(model, tmp_path, max_shard_size=700))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    expected = state(0)
    for name in files:
        held = load_file(tmp_path / name)
        assert sum(each.nbytes for each in held.values()) <= 700 or len(held) == 1
        assert all(index["weight_map"][each] == name for each in held)
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    parameters = {id(each): each.numel() for each in net().parameters()}
    assert index["metadata"]["total_parameters"] == sum(parameters.values())

    # Fewer files replace them; what is not of the weights stays.
    (tmp_path / "notes.txt").write_text("mine")
    on_ranks(3, lambda model, rank: polyshard_huggingface.save(model, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    on_ranks(1, lambda model, rank: polyshard_huggingface.save(model, tmp_path, max_shard_size="1KB"))
    assert not (tmp_path / "model.safetensors").exists()
    on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path))


@pytest.mark.nightly
def test_the_benchmark_runs_on_processes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "huggingface_load.py"
    out = tmp_path / "load.json"
    arguments = ["--device", "cpu", "--work", "tiny", "--folder", str(tmp_path / "weights"), "--out", str(out)]
    finished = run_script(2, script, arguments)
    assert finished.codes == [0, 0], finished.errors
    report = json.loads(out.read_text())
    # It compares what it loaded with what it wrote, over gloo and from one rank's files, too.
    phases = [row["phase"] for row in report["rows"]]
    assert phases[0] == "export"
    assert phases[-1] == "load, rank 0 for all, warm"
    assert not any("skipped" in row for row in report["rows"])
    assert finished.output.splitlines()[-1].startswith("load, rank 0 for all, warm")
    assert not (tmp_path / "weights").exists()
