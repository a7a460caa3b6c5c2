"""Which elements of the files a tensor is made of, against torch doing the same to real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.io.boxes import Box, Chunk, range_boxes, slabs, span
from polyshard_huggingface.conversion import converted, listed, transfers_of
from polyshard_huggingface.files import OpenFiles, SavedTensor, read_all, write_all

Tensors = Mapping[str, torch.Tensor]

SHAPES = {"a": (4, 6), "b": (4, 6), "c": (2, 3, 4), "d": (5,), "e": (), "f": (3, 1, 2)}

FOLLOWED: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "as it is": lambda t: t["a"],
    "slice of rows": lambda t: t["a"][1:3],
    "slice of columns": lambda t: t["a"][:, -4:-1],
    "one row": lambda t: t["a"][-1],
    "one element": lambda t: t["d"][3],
    "scalar": lambda t: t["e"],
    "cat of rows": lambda t: torch.cat([t["a"], t["b"]]),
    "cat of columns": lambda t: torch.cat([t["a"], t["b"]], dim=-1),
    "cat of parts": lambda t: torch.cat([t["a"][2:], t["b"][:1], t["a"][:2]]),
    "stack": lambda t: torch.stack([t["a"], t["b"]]),
    "stack inside": lambda t: torch.stack([t["a"], t["b"]], dim=1),
    "stack of cats": lambda t: torch.stack([torch.cat([t["a"], t["b"]]), torch.cat([t["b"], t["a"]])]),
    "chunk": lambda t: t["a"].chunk(2, dim=1)[1],
    "split": lambda t: torch.split(t["a"], [1, 3])[1],
    "unbind": lambda t: t["c"].unbind(1)[2],
    "transpose": lambda t: t["a"].T.contiguous(),
    "transpose of a cat": lambda t: torch.cat([t["a"], t["b"]]).t()[1:4],
    "permute": lambda t: t["c"].permute(2, 0, 1),
    "movedim and select": lambda t: t["c"].movedim(2, 0)[1],
    "cat of transposed": lambda t: torch.cat([t["a"].T, t["b"].T], dim=1).clone(),
    "squeeze": lambda t: t["f"].squeeze(1),
    "squeeze all": lambda t: t["f"][:1].squeeze(),
    "unsqueeze": lambda t: t["a"].unsqueeze(1),
    "None": lambda t: t["a"][None, 1:],
    "view with dimensions of 1": lambda t: t["f"].reshape(3, 2, 1),
    "narrow and detach": lambda t: t["a"].narrow(1, 2, 3).detach(),
    "empty": lambda t: t["a"][2:2],
    "same dtype": lambda t: t["a"].float(),
}


def stored(folder: Path, values: Tensors) -> dict[str, SavedTensor]:
    """Each of ``values`` in a file of its own that holds nothing else."""
    found = {}
    for name, value in values.items():
        (folder / name).write_bytes(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[name] = SavedTensor(name, value.dtype, tuple(value.shape), folder / name, 0)
    return found


class Files(OpenFiles):
    """Reads and writes by the plainest calls, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def read(self, file: Path, offset: int, memory: memoryview) -> None:
        with file.open("rb") as stream:
            stream.seek(offset)
            assert stream.readinto(memory) == len(memory)
        self.nbytes += len(memory)

    def write(self, file: Path, offset: int, memory: memoryview) -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(memory)
        self.nbytes += len(memory)


def real() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", FOLLOWED)
def test_any_range_of_what_is_put_together_is_read(name: str, tmp_path: Path) -> None:
    values = real()
    expected = FOLLOWED[name](values)
    (made,) = converted(
        lambda t: {"x": FOLLOWED[name](t)}, {k: (s, torch.float32) for k, s in SHAPES.items()}, ""
    ).values()
    assert tuple(made.shape) == tuple(expected.shape)
    files = stored(tmp_path, values)
    numel = expected.numel()
    for start, stop in {(0, numel), (0, numel // 3), (numel // 3, numel - 1), (numel - 1, numel)}:
        if not 0 <= start < stop:
            continue
        flat = torch.full((stop - start,), float("nan"))
        cursor, chunks = 0, []
        for box in range_boxes(expected.shape, start, stop):
            chunks.append(Chunk(box, flat.narrow(0, cursor, box.numel).view(box.sizes)))
            cursor += box.numel
        read_all(transfers_of(chunks, made.parts, files), Files())
        assert torch.equal(flat, expected.reshape(-1)[start:stop])


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_put_together_is_written_back_from_ranges(name: str, tmp_path: Path) -> None:
    values = real()
    expected = FOLLOWED[name](values)
    (made,) = converted(
        lambda t: {"x": FOLLOWED[name](t)}, {k: (s, torch.float32) for k, s in SHAPES.items()}, ""
    ).values()
    target = stored(tmp_path, {"x": torch.full_like(expected, float("nan"))})
    for source, value in values.items():
        parts = [part.turned("x") for part in made.parts if part.source == source]
        for start, stop in ((0, value.numel() // 3), (value.numel() // 3, value.numel())):
            boxes, cursor = range_boxes(value.shape, start, stop), start
            for box in boxes:
                view = value.reshape(-1).narrow(0, cursor, box.numel).view(box.sizes)
                cursor += box.numel
                write_all(transfers_of([Chunk(box, view)], parts, target), Files())
    written = torch.frombuffer(bytearray((tmp_path / "x").read_bytes() or b"\0" * 4), dtype=torch.float32)
    assert torch.equal(written[: expected.numel()].view(expected.shape), expected)


REFUSED: dict[str, tuple[Callable[[Tensors], torch.Tensor], str]] = {
    "arithmetic": (lambda t: t["a"] + 1, "does more than to put tensors together"),
    "a sum": (lambda t: t["a"].sum(), "does more than to put tensors together"),
    "every second": (lambda t: t["a"][::2], "every 2th element"),
    "rows of another length": (lambda t: t["a"].reshape(24), r"makes \(24,\) of a tensor of shape \(4, 6\)"),
    "another dtype": (lambda t: t["a"].bfloat16(), "Leave dtypes alone"),
    "own values": (lambda t: torch.cat([t["a"], torch.zeros(1, 6)]), "joins a tensor of its own"),
    "other shapes": (lambda t: torch.cat([t["a"], t["c"][0]]), r"shapes \(4, 6\) and \(3, 4\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_computes_is_refused(name: str) -> None:
    function, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        converted(lambda t: {"x": function(t)}, {k: (s, torch.float32) for k, s in SHAPES.items()}, "")


def test_a_conversion_that_asks_for_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="asks for 'z', which the files lack"):
        converted(lambda t: {"x": t["z"]}, {}, "the files")
    with pytest.raises(ConfigError, match="something else than tensors of the files for 'x'"):
        converted(lambda t: {"x": torch.zeros(3)}, {}, "the files")


def test_slabs_cover_a_box_once() -> None:
    shape = (4, 5, 6)
    indices = torch.arange(math.prod(shape)).view(shape)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        low = [int(torch.randint(0, size, (), generator=generator)) for size in shape]
        sizes = [
            int(torch.randint(1, size - at + 1, (), generator=generator)) for at, size in zip(low, shape, strict=True)
        ]
        box = Box(tuple(low), tuple(sizes))
        inside = indices[tuple(slice(at, at + size) for at, size in zip(low, sizes, strict=True))].reshape(-1).tolist()
        assert span(shape, box) == (min(inside), max(inside) + 1)
        for most in (1, 7, 1000):
            for gaps in (False, True):
                found = list(slabs(shape, box, most, gaps=gaps))
                cut = [indices[tuple(slice(a, a + s) for a, s in zip(b.offsets, b.sizes, strict=True))] for b in found]
                assert torch.cat([each.reshape(-1) for each in cut]).tolist() == inside
                widths = [stop - first for first, stop in (span(shape, each) for each in found)]
                assert all(width <= most for width in widths)
                if not gaps:
                    assert widths == [each.numel for each in found]
                assert sum(widths) <= 2 * len(inside)


def test_names_that_differ_in_numbers_are_listed_together() -> None:
    names = [f"h.{layer}.experts.{expert}.w.weight" for layer in (0, 1, 2, 5) for expert in range(2)]
    assert listed([*names, "head.weight", "h.7.bias"]) == (
        "'h.{0-2,5}.experts.{0-1}.w.weight', 'head.weight', 'h.7.bias'"
    )
    # Not all of the combinations: each by itself.
    assert listed(["a.0.b.0.c", "a.1.b.1.c"]) == "'a.0.b.0.c', 'a.1.b.1.c'"
    assert listed([]) == ""
