"""Packages whose metadata cannot be read, as while pip works: a run that names none of them goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polyshard
import pytest
from fake_distribution import install
from polyshard.errors import PluginLoadError, PluginNotFoundError
from polyshard.interfaces import Group
from polyshard.registry import PluginState, installed
from polyshard_tools.cli import main
from torch import nn

FAKE = {"name": "fake", "world_size": 2}
POLICY = """
from polyshard.interfaces import WrapPolicy

class Blocks(WrapPolicy):
    api_version = 1
    def __init__(self, context): pass
    def plan(self, root, context): return {}
"""


def sharded(policy: Any = "never") -> polyshard.MemoryReport:
    return polyshard.report(polyshard.shard(nn.Linear(4, 4), polyshard.ShardConfig(collectives=FAKE, policy=policy)))


#: The file of the metadata that is broken, what it holds (None: it is gone; a folder: "/"), and the words for it.
UNNAMED = [("METADATA", None), ("METADATA", b""), ("METADATA", b"Name: \xff\xfe\nVersion: 1.0\n"), ("METADATA", "/")]
UNREADABLE = [
    (b"[polyshard.policies]\nhalf = half_mod:Blocks\n\xff\xfe", "UnicodeDecodeError"),
    (b"[polyshard.policies]\nhalf = half_mod:Blocks\nhal", "TypeError"),
]


def broken(site: Path, file: str, content: bytes | str | None) -> Path:
    """A package that offers the policy ``half``, one of whose files is broken; the folder of its metadata."""
    install(site, "half", "1.0", [("polyshard.policies", "half", "half_mod:Blocks")], {"half_mod": POLICY})
    path = site / "half-1.0.dist-info" / file
    path.unlink(missing_ok=True)
    if content == "/":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    return path.parent


@pytest.mark.parametrize(("file", "content"), UNNAMED)
def test_a_distribution_without_a_name(
    file: str, content: bytes | str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = broken(tmp_path, file, content)
    monkeypatch.syspath_prepend(tmp_path)
    assert sharded().units == 1
    words = f"{folder} does not say of which distribution it is"
    with pytest.raises(PluginLoadError, match=r"cannot be imported: .* Install the distribution anew") as caught:
        sharded("half")
    assert words in str(caught.value)
    assert main(["plugins", "list", "policies"]) == 0
    text = capsys.readouterr().out
    assert f"polyshard.policies half (unnamed): cannot be imported: {words}" in text
    if content is None:
        (folder / file).write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
        assert sharded("half").units == 1
        (folder / file).unlink()
    # Of another package that is sound, the name is that one's alone.
    install(
        tmp_path / "more", "whole", "2.0", [("polyshard.policies", "half", "whole_mod:Blocks")], {"whole_mod": POLICY}
    )
    monkeypatch.syspath_prepend(tmp_path / "more")
    assert sharded("half").units == 1
    states = {each.distribution: each.state for each in installed(Group.POLICIES) if each.name == "half"}
    assert states == {"": PluginState.BROKEN, "whole": PluginState.READY}


@pytest.mark.parametrize(("content", "cause"), UNREADABLE)
def test_a_file_of_entry_points_that_cannot_be_read(
    content: bytes, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = broken(tmp_path, "entry_points.txt", content)
    install(tmp_path, "whole", "2.0", [("polyshard.policies", "whole", "whole_mod:Blocks")], {"whole_mod": POLICY})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match=rf"entry points of {folder} cannot be read, .*: {cause}: .* or remove"):
        assert sharded("whole").units == 1
    with pytest.raises(PluginNotFoundError, match=r"no installed plugin of polyshard\.policies is named 'half'"):
        sharded("half")
    # Looked at again as soon as pip has put the whole file in its place.
    whole = folder / "entry_points.tmp"
    whole.write_text("[polyshard.policies]\nhalf = half_mod:Blocks\n")
    whole.rename(folder / "entry_points.txt")
    assert sharded("half").units == 1


def test_a_value_that_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "half", "1.0", [("polyshard.policies", "half", "half-mod Blocks")])
    monkeypatch.syspath_prepend(tmp_path)
    assert sharded().units == 1
    (half,) = (each for each in installed(Group.POLICIES) if each.name == "half")
    assert (half.state, half.distribution, half.file) == (PluginState.BROKEN, "half", "")
    with pytest.raises(PluginLoadError, match=r"cannot be imported: 'half-mod Blocks' is no 'module:attr"):
        sharded("half")
