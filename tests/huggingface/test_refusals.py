"""Safetensors files that are wrong, damaged or cannot be written: what is said, and that nothing changed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polyshard
import polyshard_huggingface
import pytest
import torch
from parity import local, one_core
from polyshard import ShardConfig
from polyshard.errors import ConfigError, RankMismatchError, StateError, UnsupportedError
from polyshard.io.files import write_at
from polyshard_huggingface import saving
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from saved_net import Net, Values, net, on_ranks, same, state, whole


@pytest.fixture(autouse=True, scope="module")
def taking_turns() -> Iterator[None]:
    with one_core():
        yield


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
            polyshard_huggingface.load(model, tmp_path / "wrong.safetensors")
        before = whole(model)
        polyshard_huggingface.load(model, tmp_path / "right.safetensors")
        return str(refused.value), before, whole(model)

    for text, before, after in on_ranks(2, read):
        assert same(before, net().state_dict())
        assert same(after, state())
        missing = "4 missing from the files: 'embed.weight', 'blocks.0.down.weight', 'blocks.2.down.weight', "
        assert missing.split(": ")[0] in text
        for name in ("embed.weight", "norm.running_var"):
            assert f"'{name}'" in text
        assert "'blocks.0.down.weight', 'blocks.2.down.weight'" in text
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
            polyshard_huggingface.load(
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
    # One element, which one rank alone has.
    both["head.weight"][6, 5] += 1
    save_file(both, tmp_path / "both.safetensors")
    save_file(state(), tmp_path / "one.safetensors")

    def read(model: Net, rank: int) -> Values:
        # One rank may read for all.
        kind = RankMismatchError if rank and reads == "first" else ConfigError
        with pytest.raises(kind, match=r"ties 'embed.weight' and 'head.weight', but .* has different values"):
            polyshard_huggingface.load(model, tmp_path / "both.safetensors", ranks=reads)
        polyshard_huggingface.load(model, tmp_path / "one.safetensors", ranks=reads)
        return whole(model)

    assert all(same(values, state()) for values in on_ranks(3, read))


def _file(header: Any, nbytes: int) -> bytes:
    """A file of ``header``, and so many bytes that are no zeros behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\x3f" * nbytes


def _entry(shape: Any, begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A, B = _entry([4, 4], 0, 64), _entry([4], 64, 80)
#: Header, bytes behind it, and what the library says; None where it reads such files.
HEADERS: dict[str, tuple[Any, int, str | None]] = {
    "bytes of two tensors": ({"weight": A, "bias": _entry([4], 48, 64)}, 64, "invalid offset for tensor `bias`"),
    "no JSON": (b'{"a": [1, 2]', 100, "invalid JSON in header"),
    "cut off": ({"weight": A, "bias": B}, 75, "not fully covered"),
    "bytes of none behind": ({"weight": A, "bias": B}, 96, "file not fully covered"),
    "offsets below zero": ({"weight": A, "bias": _entry([4], -16, 0)}, 80, "invalid value: integer"),
    "a huge shape": ({"weight": _entry([1 << 40, 1 << 40], 0, 64), "bias": B}, 80, "overflow"),
    "a deep one": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 80, "recursion limit"),
    "a name twice": (b'{"weight":%s,"weight":%s}' % (json.dumps(A).encode(), json.dumps(A).encode()), 64, None),
    "a name twice, empty": (b'{"w":%s,"w":%s}' % ((json.dumps(_entry([0], 0, 0)).encode(),) * 2), 0, None),
    "a shape that torch has not": ({"weight": A, "z": _entry([0, 1 << 40, 1 << 40], 64, 64)}, 64, None),
    "a thousand dimensions": ({"weight": _entry([1] * 1000, 0, 4)}, 4, None),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_damaged_header_is_refused_as_the_library_does(what: str, tmp_path: Path) -> None:
    header, nbytes, words = HEADERS[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(_file(header, nbytes))
    if words is None:
        with safe_open(path, "pt"):
            pass
    else:
        with pytest.raises(SafetensorError, match=words):
            safe_open(path, "pt")
    model = polyshard.shard(torch.nn.Linear(4, 4), ShardConfig(collectives="fake", strategy="no_shard", device="cpu"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for missing in ([], ["*"]):
        with pytest.raises(StateError, match=rf"model\.safetensors is damaged.*{words or ''}.*Copy it again"):
            polyshard_huggingface.load(model, path, missing=missing, unexpected=["*"])
    assert same(model.state_dict(), before)
    save_file({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, path)
    polyshard_huggingface.load(model, path)
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


def test_another_kind_of_file_is_told_on_every_rank_and_so_is_another_dtype(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content, words in (
        (b"PK\x03\x04 not safetensors at all", "is no safetensors file"),
        (_file({"a": _entry([2], 0, 1, "F4")}, 1), "dtype F4"),
    ):
        path.write_bytes(content)

        def read(model: Net, rank: int, words: str = words) -> Values:
            with pytest.raises(StateError, match=words):
                polyshard_huggingface.load(model, path)
            return whole(model)

        assert all(same(values, net().state_dict()) for values in on_ranks(2, read))


def test_an_index_names_files_of_its_folder_alone(tmp_path: Path) -> None:
    inside, index = tmp_path / "in", tmp_path / "in" / "model.safetensors.index.json"
    (inside / "deep").mkdir(parents=True)
    save_file(state(), tmp_path / "secret.safetensors")

    def refused(text: str, words: str) -> None:
        index.write_text(text)
        with pytest.raises(StateError, match=words):
            on_ranks(1, lambda model, rank: polyshard_huggingface.load(model, inside))

    for file in ("../secret.safetensors", "deep/../../secret.safetensors", str(tmp_path / "secret.safetensors")):
        refused(
            json.dumps({"weight_map": dict.fromkeys(state(), file)}), f"names files outside of its folder: '{file}'"
        )
    refused('{"weight_map":{"a":"b"},"weight_map":{"a":"c"}}', "is no index .*a name twice")
    refused('{"weight_map":{"a":"b","a":"c"}}', "is no index .*a name twice")
    refused('{"weight_map":{"a":3}}', "is no index .*the file of 'a' is no text")
    refused('{"weight_map":["a"]}', "is no index .*weight_map is no object")
    refused("[" * 100_000, "is no index .*nested too deeply")
    refused(json.dumps({"weight_map": {"a": "x" * 5000, "b": "a\0b", "c": "deep"}}), "names files that are not there")
    index.write_bytes(b"")
    os.truncate(index, 1 << 40)
    with pytest.raises(StateError, match=r"is no index .*it has 1,099,511,627,776 bytes"):
        on_ranks(1, lambda model, rank: polyshard_huggingface.load(model, inside))
    # Caches of the Hub have links to files elsewhere, and some checkpoints folders.
    (inside / "deep" / "a.safetensors").symlink_to(tmp_path / "secret.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state(), "deep/a.safetensors")}))

    def read(model: Net, rank: int) -> Values:
        polyshard_huggingface.load(model, inside)
        return whole(model)

    assert all(same(values, state()) for values in on_ranks(2, read))


def test_an_index_whose_files_are_not_there(tmp_path: Path) -> None:
    on_ranks(1, lambda model, rank: polyshard_huggingface.save(model, tmp_path, max_shard_size=700))
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(StateError, match=r"says that model-00002-of-\d+.safetensors holds .* which it does not"):
        on_ranks(1, lambda model, rank: polyshard_huggingface.load(model, tmp_path))
    second.unlink()
    with pytest.raises(StateError, match=r"names files that are not there: 'model-00002"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(StateError, match="is no index"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path))


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no checkpoint at .*snapshot_download"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds neither 'model.safetensors' nor"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path))
    with pytest.raises(ConfigError, match="ranks must be 'all' or 'first', not 'one'"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path, ranks="one"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="missing must be several patterns"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path, missing="head"))
    with pytest.raises(StateError, match="needs a sharded module"):
        polyshard_huggingface.load(net(), tmp_path)


def test_ranks_that_were_told_different_things(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "one.safetensors")
    save_file({**state(), "extra": torch.zeros(1)}, tmp_path / "other.safetensors")
    names = ["one.safetensors", "other.safetensors"]
    with pytest.raises(
        RankMismatchError, match=r"different checkpoints: .*\.safetensors on rank \d, .*\.safetensors on rank \d"
    ):
        on_ranks(2, lambda model, rank: polyshard_huggingface.load(model, tmp_path / names[rank]))
    kinds: list[Any] = ["all", "first"]
    with pytest.raises(RankMismatchError, match=r"'ranks' is '\w+' on rank \d, and '\w+' on rank \d"):
        on_ranks(
            2, lambda model, rank: polyshard_huggingface.load(model, tmp_path / "one.safetensors", ranks=kinds[rank])
        )
    with pytest.raises(RankMismatchError, match=r"'ranks' is '\w+' on rank \d, and '\w+' on rank \d"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.save(model, tmp_path / "out", ranks=kinds[rank]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("writes", ["all", "first"])
def test_a_rank_that_cannot_write_leaves_what_was_there(
    writes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(state(), tmp_path / "model.safetensors")

    def full(descriptor: int, pieces: Any, at: int, path: Path) -> None:
        if path.name.startswith("model-00003-of-"):
            raise OSError(28, "No space left on device")
        write_at(descriptor, pieces, at, path)

    def out(model: Net, rank: int) -> str:
        with pytest.raises((OSError, RankMismatchError)) as failed:
            polyshard_huggingface.save(model, tmp_path, ranks=writes, max_shard_size=700)
        # The model still trains, and saves elsewhere.
        model(torch.arange(7)).sum().backward()
        polyshard_huggingface.save(model, tmp_path / "elsewhere")
        return str(failed.value)

    monkeypatch.setattr(saving, "write_at", full)
    assert all("No space left on device" in text for text in on_ranks(2, out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "model.safetensors"]
    assert same(load_file(tmp_path / "model.safetensors"), state())
    assert same(load_file(tmp_path / "elsewhere" / "model.safetensors"), {"frozen": net().frozen.detach()})


def test_settings_of_a_save_that_cannot_be(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_shard_size": "5 apples"}, "max_shard_size must be bytes"),
        ({"max_shard_size": 0}, "max_shard_size must be bytes"),
        ({"dtype": torch.int8}, "dtype must be float64"),
        ({"ranks": "one"}, "ranks must be"),
        ({"convert": lambda tensors: tensors}, "convert is <function"),
        ({"convert": ["frozen"]}, r"convert is \['frozen'\]"),
    ]

    def out(model: Net, rank: int) -> None:
        for options, words in wrong:
            with pytest.raises(ConfigError, match=words):
                polyshard_huggingface.save(model, tmp_path / "out", **options)
        polyshard_huggingface.save(model, tmp_path / "right")

    on_ranks(2, out)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    # The rank that makes the folder raises the one, the other rank the other.
    with pytest.raises((ConfigError, RankMismatchError), match="is in the way"):
        on_ranks(2, lambda model, rank: polyshard_huggingface.save(model, tmp_path / "file"))


def test_one_rank_of_a_pretended_world_reads_its_part_and_saves_nothing(tmp_path: Path) -> None:
    expected = state()
    save_file(expected, tmp_path / "model.safetensors")
    model = net()
    config = ShardConfig(collectives={"name": "fake", "world_size": 4, "rank": 1}, device="cpu")
    polyshard.shard(model, config, ignored_modules=[model.ignored])
    polyshard_huggingface.load(model, tmp_path)
    # Of 13 rows each rank has 4.
    assert torch.equal(local(model.blocks[1].up.weight.detach()), expected["blocks.1.up.weight"][4:8])
    with pytest.raises(UnsupportedError, match="pretended world of 4"):
        polyshard_huggingface.save(model, tmp_path / "out")


def test_not_inside_a_step_or_of_a_part(tmp_path: Path) -> None:
    save_file(state(), tmp_path / "model.safetensors")

    def inside(model: Net, rank: int) -> None:
        with polyshard.unsharded(model), pytest.raises(StateError):
            polyshard_huggingface.load(model, tmp_path)
        with pytest.raises(StateError, match="needs the outermost"):
            polyshard_huggingface.save(model.blocks[0], tmp_path)
        polyshard_huggingface.load(model, tmp_path)

    on_ranks(2, inside)


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["all", "first"])
def test_a_conversion_that_fails_is_told_on_every_rank(reads: Any, tmp_path: Path) -> None:
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Late(ConversionOps):  # type: ignore[misc]
        """Fails where there are values."""

        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            ((tensor,),) = input_dict.values()
            if not tensor.is_meta:
                raise MemoryError("too much")
            return {target_patterns[0]: tensor}

    class Backwards(Late):
        @property
        def reverse_op(self) -> Late:
            return Late()

    def convert(operation: type[Late]) -> list[Any]:
        return [WeightConverter("down.weight", "down.weight", operations=[operation()])]

    save_file(state(), tmp_path / "model.safetensors")

    def in_and_out(model: Net, rank: int) -> Values:
        kind = RankMismatchError if rank and reads == "first" else ConfigError
        words = r"'blocks\.0\.down\.weight' of shapes \(6, 13\) cannot be put together .*MemoryError: too much"
        with pytest.raises(kind, match=words):
            polyshard_huggingface.load(model, tmp_path, ranks=reads, convert=convert(Late))
        with pytest.raises(kind, match=words):
            polyshard_huggingface.save(model, tmp_path / "out", ranks=reads, convert=convert(Backwards))
        with pytest.raises(UnsupportedError, match="a conversion has no way back"):
            polyshard_huggingface.save(model, tmp_path / "out", ranks=reads, convert=convert(Late))
        polyshard_huggingface.load(model, tmp_path, ranks=reads)
        return whole(model)

    assert all(same(values, state()) for values in on_ranks(2, in_and_out))
    assert not (tmp_path / "out").exists()
