"""``polyshard explain --picture``: what can be read in the picture."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from polyshard import ShardConfig
from polyshard.errors import ConfigError
from polyshard.planning.meshes import WorldMesh
from polyshard_tools.cli import main
from polyshard_tools.explaining import Explanation, explain
from polyshard_tools.explaining.picture import draw
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, inner: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        if inner:
            self.experts = Experts()


class Experts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 64, bias=False)


class Net(nn.Module):
    def __init__(self, depth: int, inner: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Block(64, inner) for _ in range(depth))
        self.last = Block(128, False)


def explained(depth: int, inner: bool = False, world_size: int = 8, **settings: Any) -> Explanation:
    with torch.device("meta"):
        model = Net(depth, inner)
    config = ShardConfig(policy={"name": "module_class", "classes": [Block, *[Experts] * inner]}, **settings)
    return explain(config, model, world_size, device="cuda")


def words_in(path: Path) -> list[str]:
    """The text of an SVG, in the order in which it was written."""
    return [each.strip() for each in re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_the_picture_names_units_with_sizes_and_ranks(tmp_path: Path) -> None:
    draw(explained(2, precision="bf16", strategy="hybrid_shard", shard_size=4), tmp_path / "units.svg")
    words = words_in(tmp_path / "units.svg")
    assert "Net on 8 ranks, computing on cuda: hybrid_shard, units in 4 shards, 2 replicas of each" in words
    assert "all ranks: 4 shards, 2 replicas" in words
    assert "(root)  Net" in words
    # 64 * 256 elements: two bytes each while it is whole, and a quarter of them in four bytes on each rank.
    assert "blocks.0 to blocks.1  2 x Block" in words
    assert "32.0 KiB gathered, bfloat16; 2 x 16.0 KiB on each rank, float32" in words
    # 576 + 2 * 16384 + 65536 elements of four bytes, over four ranks.
    assert any(each.startswith("4 units of 98,880 elements; each rank keeps 96.6 KiB of them.") for each in words)


@pytest.mark.slow
def test_sixty_units_and_those_inside_of_them_are_a_few_rows(tmp_path: Path) -> None:
    told = explained(30, inner=True)
    assert len(told.units) == 62
    draw(told, tmp_path / "units.svg")
    rows = [each for each in words_in(tmp_path / "units.svg") if "  " in each]
    assert rows == [
        "(root)  Net",
        "blocks.0 to blocks.29  30 x Block",
        "blocks.0.experts to blocks.29.experts  30 x Experts",
        "last  Block",
    ]


def test_each_group_of_a_mesh_has_its_ranks(tmp_path: Path) -> None:
    mesh: Any = WorldMesh.pretended({"pp": 1, "replicas": 2, "dp": 4})
    draw(explained(2, strategy="hybrid_shard", mesh=mesh, shard="dp", replicate="replicas"), tmp_path / "units.svg")
    assert "dp and replicas: 4 shards, 2 replicas" in words_in(tmp_path / "units.svg")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "run.toml").write_text('[shard]\npolicy = "always"\n')
    monkeypatch.chdir(tmp_path)
    model = ["--model", "torch.nn:Linear", "--model-args", "[4, 4]"]
    return ["explain", "run.toml", *model, "--world-size", "8", "--picture"]


@pytest.mark.slow
def test_the_command_draws_beside_its_tables(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "units.svg"]) == 0
    assert "(root)  Linear" in words_in(Path("units.svg"))
    assert "\nunit " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "why"),
    [
        ("absent/units.svg", "there is no such folder"),
        ("units.jpg", "its ending is none of .svg, .png, .pdf"),
        ("units", "its ending is none of .svg, .png, .pdf"),
        ("folder.svg", "it is a folder"),
    ],
)
@pytest.mark.parametrize("verb", ["explain", "plan"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    verb: str, file: str, why: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder.svg").mkdir()
    # The model is not there either, which would be noticed next.
    command[:4] = [verb, "run.toml", "--model", "torch.nn:Absent"]
    assert main([*command, file]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == f"polyshard: cannot write the picture '{file}': {why}. Name a file in a folder that is there, as .svg.\n"
    )


def test_without_matplotlib_it_says_what_to_install(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = explained(1)
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*command, "units.svg"]) == 2
    wanted = "Drawing needs matplotlib: install polyshard[docs], or leave out --picture."
    assert capsys.readouterr().err == f"polyshard: {wanted}\n"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        draw(told, "units.svg")
    # Without a picture nothing is missing.
    assert main(command[:-1]) == 0
