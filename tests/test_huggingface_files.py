"""Safetensors files into shards and out of them: values, bytes that move, damage, and wrong use."""

from __future__ import annotations

import json
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from one_core import one_core
from polyshard import ShardConfig, huggingface
from polyshard.errors import ConfigError, PolyshardError, RankMismatchError, StateError, UnsupportedError
from polyshard.huggingface.loading import load_through
from polyshard.huggingface.saving import save_through
from polyshard_backends.threaded import ThreadedWorld
from safetensors.torch import load_file, save_file
from seeding import seed_all
from torch import nn

Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def taking_turns() -> Iterator[None]:
    with one_core():
        yield


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Every kind of tensor that a file meets: odd sizes, a tie, another memory order, buffers, what is not sharded."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 5, 3).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.ignored = nn.Linear(6, 2)
        self.register_buffer("cache", torch.arange(4.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        head: torch.Tensor = self.head(self.norm(x))
        return head


def net(seed: int = 0, **options: Any) -> Net:
    seed_all(seed)
    return Net(**options)


def state(seed: int = 5) -> Values:
    """What a file of ``Net`` holds: the tied tensor once."""
    values = net(seed).state_dict()
    del values["head.weight"]
    values["norm.running_mean"].normal_()
    return {name: value.contiguous() for name, value in values.items()}


def sharded(model: Net, world: ThreadedWorld, rank: int, **settings: Any) -> Net:
    options: dict[str, Any] = {"policy": {"name": "transformer", "layers": Block}, **settings}
    config = ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}, device="cpu", **options)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # one rank shards nothing
        return polyshard.shard(model, config, ignored_modules=[model.ignored])


def on_ranks(number: int, body: Callable[[Net, int], Any], **settings: Any) -> list[Any]:
    """What ``body(model, rank)`` returns on each rank, of models that begin with other values than the file's."""

    def run(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:  # threads share one random state
            model = net()
        return body(sharded(model, world, rank, **settings), rank)

    return ThreadedWorld(number).run(run)


def whole(model: nn.Module) -> Values:
    with polyshard.unsharded(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def same(values: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(values[name], value) for name, value in expected.items())


class Counted:
    """Reads and writes by plain calls, and notes which bytes; fails on demand."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.ranges: list[tuple[str, int, int]] = []
        self._lock = threading.Lock()
        self._fails_after = fails_after

    def read(self, file: Path, offset: int, memory: memoryview) -> None:
        self._note(file, offset, memory)
        with file.open("rb") as stream:
            stream.seek(offset)
            assert stream.readinto(memory) == len(memory)

    def write(self, file: Path, offset: int, memory: memoryview) -> None:
        self._note(file, offset, memory)
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(memory)

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)

    def _note(self, file: Path, offset: int, memory: memoryview) -> None:
        with self._lock:
            self.ranges.append((file.name, offset, offset + len(memory)))
            if self._fails_after is not None and len(self.ranges) > self._fails_after:
                raise OSError(28, "No space left on device")


# Values.


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reads", ["all", "first"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"strategy": "no_shard"}, {"layout": "rows"}, {"offload": "cpu"}, {"precision": "mixed"}, {"policy": "never"}],
    ids=str,
)
def test_values_go_in_and_out(ranks: int, reads: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")

    def in_and_out(model: Net, rank: int) -> Values:
        huggingface.load(model, tmp_path, ranks=reads)
        huggingface.save(model, tmp_path / "out", ranks=reads)
        assert torch.equal(model.cache, torch.arange(4.0))
        return whole(model)

    for values in on_ranks(ranks, in_and_out, **settings):
        assert same(values, expected)
        assert torch.equal(values["head.weight"], expected["embed.weight"])
    # Another reader finds the same, whatever the number of ranks.
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert same(written, expected)


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")

    def out(model: Net, rank: int) -> Counted:
        huggingface.load(model, tmp_path)
        save_through(counted := Counted(), model, tmp_path / "out")
        return counted

    found = on_ranks(4, out, strategy="hybrid_shard", shard_size=2)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    total = sum(value.nbytes for value in expected.values())
    assert sum(each.nbytes for each in found) == total
    # None writes more than a quarter, but for what is not cut in equal parts, and rank 0 what is not sharded.
    assert max(each.nbytes for each in found) < total / 2


def test_a_trained_model_is_written(tmp_path: Path) -> None:
    tokens = torch.arange(7)
    reference = net()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    reference(tokens).square().mean().backward()
    optimizer.step()

    def train(model: Net, rank: int) -> None:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens).square().mean().backward()
        sgd.step()
        huggingface.save(model, tmp_path)

    on_ranks(2, train)
    written = load_file(tmp_path / "model.safetensors")
    for name, value in written.items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_the_tied_tensor_is_found_under_either_name(tmp_path: Path) -> None:
    expected = state()
    other = {("head.weight" if name == "embed.weight" else name): value for name, value in expected.items()}
    both = {**expected, "head.weight": expected["embed.weight"].clone()}
    for content in (other, both):
        save_file(content, tmp_path / "model.safetensors")

        def read(model: Net, rank: int) -> Values:
            huggingface.load(model, tmp_path)
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
        huggingface.load(model, tmp_path, convert=apart)
        huggingface.save(model, tmp_path / "out", convert=together)
        return whole(model)

    for values in on_ranks(3, in_and_out):
        assert same(values, expected)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), stacked)


def test_dtypes_are_cast_element_by_element(tmp_path: Path) -> None:
    expected = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state().items()}
    save_file(expected, tmp_path / "model.safetensors")

    def in_and_out(model: Net, rank: int) -> Values:
        huggingface.load(model, tmp_path)
        huggingface.save(model, tmp_path / "out", dtype=torch.float16)
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
        huggingface.load(model, tmp_path)
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
        mine = sum(parameter.nbytes for name, parameter in model.named_parameters() if not name.startswith("ignored"))
        return reader.nbytes, writer.nbytes, mine

    assert expected
    whole_everywhere = sum(each.nbytes for each in everywhere.values())
    for rank, (read, written, mine) in enumerate(on_ranks(3, count)):
        # The piece of a channels_last convolution is strided in the file: up to as much again lies between.
        assert mine + whole_everywhere <= read <= mine + whole_everywhere + net().conv.weight.nbytes
        assert written == mine + (whole_everywhere if rank == 0 else 0)


def test_at_most_a_bounded_part_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyshard.huggingface import transfers

    monkeypatch.setattr(transfers, "STAGED_NBYTES", 64)
    expected = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state().items()}
    save_file(expected, tmp_path / "model.safetensors")

    def move(model: Net, rank: int) -> tuple[int, int]:
        load_through(reader := Counted(), model, tmp_path)
        save_through(writer := Counted(), model, tmp_path / "out", dtype=torch.bfloat16)
        return tuple(max(stop - start for _, start, stop in each.ranges) for each in (reader, writer))

    assert all(largest <= 64 for both in on_ranks(2, move) for largest in both)
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_the_layout_of_several_files(tmp_path: Path) -> None:
    on_ranks(2, lambda model, rank: huggingface.save(model, tmp_path, max_shard_size=700))
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
    on_ranks(3, lambda model, rank: huggingface.save(model, tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    on_ranks(1, lambda model, rank: huggingface.save(model, tmp_path, max_shard_size="1 KiB"))
    assert not (tmp_path / "model.safetensors").exists()
    on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path))


# Wrong use.


def test_everything_that_does_not_fit_is_named_and_nothing_changed(tmp_path: Path) -> None:
    wrong = state()
    wrong["extra.weight"] = torch.zeros(2)
    wrong["blocks.1.up.weight"] = torch.zeros(6, 13)
    wrong["frozen"] = torch.zeros(3, dtype=torch.int32)
    for name in ("embed.weight", "blocks.0.down.weight", "blocks.2.down.weight", "norm.running_var"):
        del wrong[name]
    save_file(wrong, tmp_path / "wrong.safetensors")
    save_file(state(), tmp_path / "right.safetensors")

    def read(model: Net, rank: int) -> tuple[str, Values, Values]:
        with pytest.raises(ConfigError) as refused:
            huggingface.load(model, tmp_path / "wrong.safetensors")
        before = whole(model)
        huggingface.load(model, tmp_path / "right.safetensors")
        return str(refused.value), before, whole(model)

    for text, before, after in on_ranks(2, read):
        assert same(before, net().state_dict())
        assert same(after, state())
        missing = "4 missing from the files: 'embed.weight', 'blocks.0.down.weight', 'blocks.2.down.weight', "
        assert missing.split(": ")[0] in text
        for name in ("embed.weight", "norm.running_var"):
            assert f"'{name}'" in text
        assert "'blocks.{0,2}.down.weight'" in text
        assert "1 in the files and not in the model: 'extra.weight'" in text
        assert "1 of shape (6, 13) in the files and (13, 6) in the model: 'blocks.1.up.weight'" in text
        assert "1 of torch.int32 in the files and torch.float32 in the model, which cannot be cast: 'frozen'" in text


def test_what_was_named_may_be_missing_or_left_out(tmp_path: Path) -> None:
    some = state()
    some["extra.weight"] = torch.zeros(2)
    del some["frozen"], some["blocks.1.up.weight"]
    save_file(some, tmp_path / "model.safetensors")

    def read(reads: Any) -> Callable[[Net, int], Values]:
        def body(model: Net, rank: int) -> Values:
            huggingface.load(
                model, tmp_path, missing=["frozen", "blocks.*.up.weight"], unexpected=["extra.*"], ranks=reads
            )
            return whole(model)

        return body

    kept = {name: net().state_dict()[name] for name in ("frozen", "blocks.1.up.weight")}
    del some["extra.weight"]
    for reads in ("all", "first"):
        for values in on_ranks(2, read(reads)):
            assert same(values, some)
            assert same(values, kept)


@pytest.mark.parametrize("reads", ["all", "first"])
def test_tied_tensors_that_differ_in_the_file_are_refused(reads: Any, tmp_path: Path) -> None:
    both = {**state(), "head.weight": state()["embed.weight"].clone()}
    # One element, which one rank alone sees.
    both["head.weight"][6, 5] += 1
    save_file(both, tmp_path / "model.safetensors")

    def read(model: Net, rank: int) -> Values:
        with pytest.raises(ConfigError, match=r"ties 'embed.weight' and 'head.weight', but .* has different values"):
            huggingface.load(model, tmp_path, ranks=reads)
        return whole(model)

    assert all(same(values, net().state_dict()) for values in on_ranks(3, read))


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _another_kind(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04 not safetensors at all")


def _bad_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 12) + b'{"a": [1, 2]' + b"\0" * 100)


def _unknown_dtype(path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut_off, "is damaged or was cut off"),
        (_another_kind, "is no safetensors file"),
        (_bad_header, "cannot be read"),
        (_unknown_dtype, "dtype F4"),
    ],
)
def test_damage_is_told_from_the_wrong_checkpoint(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state(), path)
    damage(path)

    def read(model: Net, rank: int) -> Values:
        with pytest.raises(StateError, match=words):
            huggingface.load(model, path)
        return whole(model)

    assert all(same(values, net().state_dict()) for values in on_ranks(2, read))


def test_an_index_whose_files_are_not_there(tmp_path: Path) -> None:
    on_ranks(1, lambda model, rank: huggingface.save(model, tmp_path, max_shard_size=700))
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(StateError, match=r"says that model-00002-of-\d+.safetensors holds .* which it does not"):
        on_ranks(1, lambda model, rank: huggingface.load(model, tmp_path))
    second.unlink()
    with pytest.raises(StateError, match=r"names files that are not there: model-00002"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(StateError, match="is no index"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path))


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no checkpoint at .*snapshot_download"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds neither 'model.safetensors' nor"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path))
    with pytest.raises(ConfigError, match="ranks must be 'all' or 'first', not 'one'"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path, ranks="one"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="missing must be several patterns"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path, missing="head"))
    with pytest.raises(StateError, match="needs a sharded model"):
        huggingface.load(net(), tmp_path)


def test_ranks_that_were_told_different_things(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "one.safetensors")
    save_file({**state(), "extra": torch.zeros(1)}, tmp_path / "other.safetensors")
    names = ["one.safetensors", "other.safetensors"]
    with pytest.raises(RankMismatchError, match=r"one.safetensors on rank 0, .*other.safetensors on rank 1"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path / names[rank]))
    kinds: list[Any] = ["all", "first"]
    with pytest.raises(RankMismatchError, match="ranks='all' on rank 0 and ranks='first' on rank 1"):
        on_ranks(2, lambda model, rank: huggingface.load(model, tmp_path / "one.safetensors", ranks=kinds[rank]))
    with pytest.raises((ConfigError, RankMismatchError), match=r"save\(\) was given ranks='all' on rank 0 and 'first'"):
        on_ranks(2, lambda model, rank: huggingface.save(model, tmp_path / "out", ranks=kinds[rank]))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("writes", ["all", "first"])
def test_a_rank_that_cannot_write_leaves_what_was_there(writes: Any, tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")

    def out(model: Net, rank: int) -> str:
        with pytest.raises((OSError, RankMismatchError)) as failed:
            save_through(Counted(2 if rank == 0 else None), model, tmp_path, ranks=writes, max_shard_size=700)
        # The model still trains, and saves elsewhere.
        model(torch.arange(7)).sum().backward()
        huggingface.save(model, tmp_path / "elsewhere")
        return str(failed.value)

    first, second = on_ranks(2, out)
    assert "No space left on device" in first
    assert "No space left on device" in second
    assert "rank 0: OSError" in second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model.safetensors"]
    assert same(load_file(tmp_path / "model.safetensors"), state())
    assert same(load_file(tmp_path / "elsewhere" / "model.safetensors"), {"frozen": net().frozen.detach()})


def test_reading_that_fails_is_told_on_every_rank(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")

    def read(reads: Any) -> Callable[[Net, int], str]:
        def body(model: Net, rank: int) -> str:
            with pytest.raises((OSError, RankMismatchError)) as failed:
                load_through(Counted(2 if rank == 0 else None), model, tmp_path, ranks=reads)
            return str(failed.value)

        return body

    for reads in ("all", "first"):
        assert all("No space left" in text for text in on_ranks(2, read(reads)))


def test_ranks_with_file_systems_of_their_own_are_told(tmp_path: Path) -> None:
    with pytest.raises(PolyshardError, match=r"Rank 1 does not see .* Pass ranks='first'"):
        on_ranks(2, lambda model, rank: huggingface.save(model, tmp_path / str(rank)))
    assert not list((tmp_path / "0").iterdir())
    on_ranks(2, lambda model, rank: huggingface.save(model, tmp_path / str(rank), ranks="first"))
    assert same(load_file(tmp_path / "0" / "model.safetensors"), {"frozen": net().frozen.detach()})


def test_settings_of_a_save_that_cannot_be(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_shard_size": "5 apples"}, "max_shard_size must be bytes"),
        ({"max_shard_size": 0}, "max_shard_size must be bytes"),
        ({"dtype": torch.int8}, "dtype must be float64"),
        ({"ranks": "one"}, "ranks must be"),
        ({"convert": lambda tensors: {}}, "returns no tensors"),
        ({"convert": lambda tensors: {"frozen": tensors["frozen"]}}, r"leaves out 'conv.weight'.*'blocks.\{0-2\}.up"),
        ({"convert": lambda tensors: {**tensors, "frozen": tensors["frozen"][1:]}}, "leaves out 'frozen'"),
    ]

    def out(model: Net, rank: int) -> None:
        for options, words in wrong:
            with pytest.raises(ConfigError, match=words):
                huggingface.save(model, tmp_path / "out", **options)
        with pytest.raises(UnsupportedError, match="does more than to put tensors together"):
            huggingface.save(model, tmp_path / "out", convert=lambda tensors: {"x": tensors["frozen"] * 2})
        huggingface.save(model, tmp_path / "right")

    on_ranks(2, out)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is in the way"):
        on_ranks(2, lambda model, rank: huggingface.save(model, tmp_path / "file"))


def test_one_rank_of_a_pretended_world_reads_its_part_and_saves_nothing(tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")
    model = net()
    config = ShardConfig(collectives={"name": "fake", "world_size": 4, "rank": 1}, device="cpu")
    polyshard.shard(model, config, ignored_modules=[model.ignored])
    load_through(reader := Counted(), model, tmp_path)
    assert 0 < reader.nbytes < sum(each.nbytes for each in expected.values()) / 2
    place = polyshard.placement(model.blocks[1].up.weight)
    wanted = expected["blocks.1.up.weight"].reshape(-1)[place.start : place.stop]
    assert torch.equal(model.blocks[1].up.weight.detach(), wanted)
    with pytest.raises(UnsupportedError, match="pretended world of 4"):
        huggingface.save(model, tmp_path / "out")


def test_not_inside_a_step_or_of_a_part(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")

    def inside(model: Net, rank: int) -> None:
        with polyshard.unsharded(model), pytest.raises(StateError):
            huggingface.load(model, tmp_path)
        with pytest.raises(StateError, match="needs the outermost"):
            huggingface.save(model.blocks[0], tmp_path)
        huggingface.load(model, tmp_path)

    on_ranks(2, inside)
