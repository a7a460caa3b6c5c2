"""The files of a package: its ``pyproject.toml``, read and extended as text, and writes of all files or none."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyshard.errors import ConfigError
from polyshard.interfaces import Group
from polyshard.registry.find import normalised

_HEADER = re.compile(r"^\s*\[")
_GROUPS = frozenset(group.value for group in Group)


@dataclass(frozen=True)
class Pyproject:
    path: Path
    text: str
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Pyproject:
        """Raises ``ConfigError`` where ``path`` is not TOML, or has no name for the package."""
        try:
            text = path.read_bytes().decode("utf-8")
            document = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}. Mend it first.") from error
        read = cls(path, text, document)
        if not isinstance(read._project.get("name"), str):
            raise ConfigError(f"{path} has no name in [project]: it is no package's. Choose another folder.")
        return read

    @property
    def distribution(self) -> str:
        name: str = self._project["name"]
        return name

    @property
    def offers(self) -> Mapping[str, Mapping[str, str]]:
        """Its entry points in polyshard's groups: by group, from names to values."""
        groups = self._project.get("entry-points", {})
        return {group: dict(named) for group, named in groups.items() if group in _GROUPS}

    @property
    def module(self) -> str:
        """The module that holds its plugins; where it has none, the one that is called as the package is."""
        values = [value for named in self.offers.values() for value in named.values()]
        module = re.split(r"[.:]", values[0])[0] if values else normalised(self.distribution).replace("-", "_")
        return module.strip()

    @property
    def _project(self) -> Mapping[str, Any]:
        project = self.document.get("project", {})
        return project if isinstance(project, Mapping) else {}

    def with_entry_point(self, group: str, name: str, value: str) -> str:
        """The text with one more entry point, and otherwise as it is.

        Raises ``ConfigError`` where the group has ``name`` already, and where entry points are written elsewhere, or in
        a way that a line or a table more cannot go on.
        """
        if name in self.offers.get(group, {}):
            raise ConfigError(
                f"{self.distribution!r} has a plugin {name!r} of {group} already: {self.offers[group][name]}. "
                "Choose another name."
            )
        if "entry-points" in self._project.get("dynamic", ()):
            raise ConfigError(
                f"{self.path} says that entry points are dynamic, so they are written elsewhere. Write the plugin "
                f"into a new folder, move it from there, and add {name} = {value!r} to {group} where they are."
            )
        header, line = f'[project.entry-points."{group}"]', f'{name} = "{value}"'
        expected: Any = copy.deepcopy(self.document)
        expected["project"].setdefault("entry-points", {}).setdefault(group, {})[name] = value
        text = _inserted(self.text, header, line)
        try:
            fits = tomllib.loads(text) == expected
        except tomllib.TOMLDecodeError:
            fits = False
        if not fits:
            raise ConfigError(
                f"{self.path} writes its entry points in a form that polyshard does not edit. Give each group a table "
                f"of its own, as {header} with {line} below."
            )
        return text


def _inserted(text: str, header: str, line: str) -> str:
    """``text`` with ``line`` at the end of the table ``header``; where there is none, behind the last such table."""
    end_of_line = "\r" if "\r\n" in text else ""
    lines = text.removesuffix("\n").split("\n")
    tables = [(index, table) for index, table in enumerate(map(_table, lines)) if table is not None]
    same = [index for index, table in tables if table == header]
    others = [index for index, table in tables if table.startswith("[project.entry-points.")]
    new = [line] if same else ["", header, line]
    end = _end_of_table(lines, (same or others)[-1]) if same or others else len(lines)
    lines[end:end] = [each + end_of_line for each in new]
    return "\n".join(lines) + "\n"


def _table(line: str) -> str | None:
    """The header in ``line``, in one form whatever its quotes and blanks, or None."""
    if not _HEADER.match(line):
        return None
    return re.sub(r"\s*([.\[\]])\s*", r"\1", line.split("#")[0].replace("'", '"').strip())


def _end_of_table(lines: list[str], header: int) -> int:
    """Index behind the last line of the table that begins at ``header``; blanks and comments ahead of the next one are
    that one's."""
    end = next((index for index in range(header + 1, len(lines)) if _HEADER.match(lines[index])), len(lines))
    while not lines[end - 1].strip() or (end < len(lines) and lines[end - 1].lstrip().startswith("#")):
        end -= 1
    return end


def write_all(added: Mapping[Path, str], changed: Mapping[Path, str]) -> None:
    """Write ``added``, new files, then ``changed``, files that are there, in order.

    Raises ``OSError``, and then everything is as it was: ``FileExistsError`` for a file of ``added`` that is there.
    """
    made: list[Path] = []
    before = {path: path.read_bytes() for path in changed}
    try:
        for path, text in added.items():
            made += _make_folders(path.parent)
            with path.open("xb") as stream:
                made.append(path)
                stream.write(text.encode())
        for path, text in changed.items():
            path.write_bytes(text.encode())
    except BaseException:
        for path, content in before.items():
            if path.read_bytes() != content:
                path.write_bytes(content)
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink()
        raise


def _make_folders(folder: Path) -> list[Path]:
    """Make ``folder`` and what is missing above it; returns those that were made, outermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing
