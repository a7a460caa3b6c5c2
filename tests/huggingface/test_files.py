"""Safetensors files into shards and out of them: values, and bytes that move."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from parity import local, one_core
from polyshard_huggingface.loading import load_through
from polyshard_huggingface.saving import save_through
from processes import run_script
from safetensors.torch import load_file, save_file
from saved_net import Counted, Net, Values, net, on_ranks, same, state, whole


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
def test_replicas_share_the_writing(tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")

    def out(model: Net, rank: int) -> Counted:
        polyshard_huggingface.load(model, tmp_path)
        save_through(counted := Counted(), model, tmp_path / "out")
        return counted

    found = on_ranks(4, out, strategy="hybrid_shard", shard_size=2)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    total = sum(value.nbytes for value in expected.values())
    assert sum(each.nbytes for each in found) == total
    # None writes more than a quarter, but for what is not cut in equal parts, and rank 0 what is not sharded.
    assert max(each.nbytes for each in found) < total / 2


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


def test_a_conversion_of_ones_own(tmp_path: Path) -> None:
    expected = state()
    stacked = dict(expected)
    ups = [stacked.pop(f"blocks.{index}.up.weight") for index in range(3)]
    stacked["all_ups"] = torch.stack([each.T for each in ups]).contiguous()
    save_file(stacked, tmp_path / "model.safetensors")

    def apart(saved: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        found = dict(saved)
        for index, up in enumerate(found.pop("all_ups").unbind()):
            found[f"blocks.{index}.up.weight"] = up.T
        return found

    def together(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        found = dict(tensors)
        found["all_ups"] = torch.stack([found.pop(f"blocks.{index}.up.weight").T for index in range(3)])
        return found

    def in_and_out(model: Net, rank: int) -> Values:
        polyshard_huggingface.load(model, tmp_path, convert=apart)
        polyshard_huggingface.save(model, tmp_path / "out", convert=together)
        return whole(model)

    for values in on_ranks(3, in_and_out):
        assert same(values, expected)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), stacked)


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


# What moves.


def test_each_rank_reads_and_writes_its_own_bytes(tmp_path: Path) -> None:
    expected = {name: each for name, each in state().items() if not name.startswith(("conv", "norm.", "ignored"))}
    everywhere = {
        name: each for name, each in state().items() if name.startswith(("norm.running", "norm.num", "ignored"))
    }
    save_file(state(), tmp_path / "model.safetensors")

    def count(model: Net, rank: int) -> tuple[int, int, int]:
        load_through(reader := Counted(), model, tmp_path)
        save_through(writer := Counted(), model, tmp_path / "out")
        mine = sum(
            local(parameter).nbytes for name, parameter in model.named_parameters() if not name.startswith("ignored")
        )
        return reader.nbytes, writer.nbytes, mine

    assert expected
    whole_everywhere = sum(each.nbytes for each in everywhere.values())
    for rank, (read, written, mine) in enumerate(on_ranks(3, count)):
        assert read == mine + whole_everywhere
        assert written == mine + (whole_everywhere if rank == 0 else 0)


def test_at_most_a_bounded_part_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyshard_huggingface import files

    monkeypatch.setattr(files, "STAGED_NBYTES", 64)
    expected = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state().items()}
    save_file(expected, tmp_path / "model.safetensors")

    def move(model: Net, rank: int) -> tuple[int, int]:
        load_through(reader := Counted(), model, tmp_path)
        save_through(writer := Counted(), model, tmp_path / "out", dtype=torch.bfloat16)
        return tuple(max(stop - start for _, start, stop in each.ranges) for each in (reader, writer))

    assert all(largest <= 64 for both in on_ranks(2, move) for largest in both)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)


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
    on_ranks(1, lambda model, rank: polyshard_huggingface.save(model, tmp_path, max_shard_size="1 KiB"))
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
