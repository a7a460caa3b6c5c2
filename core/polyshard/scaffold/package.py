"""A plugin's files, in a package of their own or in one that is there."""

from __future__ import annotations

import ast
import os
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import ConfigError
from .files import write_all, write_folder
from .kinds import Kind
from .names import PackageName, PluginName
from .pyproject import Pyproject

#: A plugin in the list of a README: what the next one is put behind.
_LISTED = re.compile(r"- `.*`: \[.*\]\(.*\.py\)$")


@dataclass(frozen=True)
class Written:
    """What was written."""

    folder: Path
    """The package's."""
    distribution: str
    """The package's name."""
    name: str
    """The plugin's."""
    kind: Kind
    added: tuple[Path, ...]
    """Files that are new, inside of ``folder``."""
    changed: tuple[Path, ...] = ()
    """Files that were there, inside of ``folder``."""


def write_plugin(kind: Kind, name: str, into: Path | None = None) -> Written:
    """Write a small complete plugin of ``kind`` that is called ``name``, with its test and its entry point.

    ``into``: the folder of its package: one that is not there, which is made and whose name the package gets, or that
    of a package that gets another plugin. By default the package that the working directory lies in, if that has
    plugins; else a new folder ``polyshard-NAME``.

    Raises ``ConfigError``, with nothing written, for a name or a folder that does not do, or cannot be written to.
    """
    plugin = PluginName.parse(kind, name, _identifiers(kind))
    folder = _folder(name) if into is None else into
    try:
        if not folder.exists():
            return _new(kind, plugin, folder)
        if not (folder / "pyproject.toml").is_file():
            raise ConfigError(
                f"{folder} is there already, and is no package that a plugin could be added to: it has no "
                "pyproject.toml. Choose a folder that is not there, or a package's."
            )
        return _added(kind, plugin, folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Nothing was written.") from error


def _folder(name: str) -> Path:
    here = Path.cwd()
    nearest = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), None)
    if nearest is not None and Pyproject.read(nearest / "pyproject.toml").offers:
        return Path(os.path.relpath(nearest))
    return Path("polyshard-" + name.replace("_", "-"))


def _new(kind: Kind, plugin: PluginName, folder: Path) -> Written:
    parent = folder.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"cannot make {folder}: {parent} is not there; make it first")
    package = PackageName.parse(folder.resolve())
    values = {
        "distribution": package.distribution,
        "module": package.module,
        "name": plugin.name,
        "class_name": plugin.class_name,
        "group": kind.group.value,
        "entry": _entry(kind, plugin.name, f"src/{package.module}"),
    }
    contents = {
        "pyproject.toml": _filled("pyproject.toml", values),
        "README.md": _filled("README.md", values),
        f"src/{package.module}/__init__.py": f'"""Plugins of {package.distribution} for polyshard."""\n',
        f"src/{package.module}/py.typed": "",
        f"src/{package.module}/{plugin.name}.py": _filled(f"{kind.value}.py", values),
        f"tests/test_{plugin.name}.py": _filled(f"{kind.value}_test.py", values),
    }
    write_folder(folder, contents)
    return Written(folder, package.distribution, plugin.name, kind, tuple(map(Path, contents)))


def _added(kind: Kind, plugin: PluginName, folder: Path) -> Written:
    pyproject = Pyproject.read(folder / "pyproject.toml")
    source = _source(folder, pyproject.module)
    values = {"module": pyproject.module, "name": plugin.name, "class_name": plugin.class_name}
    added = {
        source / f"{plugin.name}.py": _filled(f"{kind.value}.py", values),
        Path("tests", f"test_{plugin.name}.py"): _filled(f"{kind.value}_test.py", values),
    }
    for path in added:
        if (folder / path).exists():
            raise ConfigError(f"{folder / path} is there already. Choose another name, or move that file.")
    changed: dict[Path, str] = {}
    readme = _with_entry(folder / "README.md", _entry(kind, plugin.name, source.as_posix()))
    if readme is not None:
        changed[Path("README.md")] = readme
    # Last: with the entry point the plugin can be found.
    value = f"{pyproject.module}.{plugin.name}:{plugin.class_name}"
    changed[Path("pyproject.toml")] = pyproject.with_entry_point(kind.group.value, plugin.name, value)
    write_all(
        {folder / path: text for path, text in added.items()}, {folder / path: text for path, text in changed.items()}
    )
    return Written(folder, pyproject.distribution, plugin.name, kind, tuple(added), tuple(changed))


def _source(folder: Path, module: str) -> Path:
    """Where in ``folder`` the package ``module`` lies."""
    for source in (Path("src", module), Path(module)):
        if (folder / source / "__init__.py").is_file():
            return source
    raise ConfigError(
        f"the module {module} of the package in {folder} is found neither in src/{module} nor in {module}. Write the "
        "plugin into a new folder, and move it from there."
    )


def _entry(kind: Kind, name: str, source: str) -> str:
    """The plugin's line in the list of a README."""
    code = f"{source}/{name}.py"
    return f"- `{kind.setting(name)}`: [{code}]({code})"


def _with_entry(readme: Path, entry: str) -> str | None:
    """The text of ``readme`` with ``entry`` in its list of plugins; None where it has no such list any more."""
    if not readme.is_file():
        return None
    lines = readme.read_bytes().decode("utf-8").split("\n")
    listed = [index for index, line in enumerate(lines) if _LISTED.match(line)]
    if not listed:
        return None
    lines.insert(listed[-1] + 1, entry)
    return "\n".join(lines)


def _template(name: str) -> str:
    return files(__package__).joinpath("templates", f"{name}.template").read_text(encoding="utf-8")


def _filled(name: str, values: Mapping[str, str]) -> str:
    return string.Template(_template(name)).substitute(values)


def _identifiers(kind: Kind) -> frozenset[str]:
    """What a plugin's file, or its test's, gives names to: the class cannot have one of them."""
    values = {"module": "package", "name": "plugin", "class_name": "_"}
    nodes = [
        node
        for name in (f"{kind.value}.py", f"{kind.value}_test.py")
        for node in ast.walk(ast.parse(_filled(name, values)))
    ]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(used | {node.asname or node.name for node in nodes if isinstance(node, ast.alias)})
