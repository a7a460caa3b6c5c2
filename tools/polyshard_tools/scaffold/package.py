"""Writes a plugin, its test and its entry point: in a package of their own, or in one that is there."""

from __future__ import annotations

import ast
import enum
import importlib.util
import json
import keyword
import os
import re
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from polyshard._version import __version__
from polyshard.errors import ConfigError
from polyshard.interfaces import Group
from polyshard.registry.find import BUILT_IN, normalised, offers_of

from .files import Pyproject, write_all

_AUTHOR = re.compile(r"(?P<name>[^<>\n]*[^<>\s])(?:\s*<(?P<email>[^<>\s]+@[^<>\s]+)>)?")
_LICENCE = re.compile(r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*")
#: Licences that have templates.
_TEXTS = frozenset({"Apache-2.0", "BSD-3-Clause", "MIT"})
_PLUGIN = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
#: Names of distributions as package indexes take them: https://packaging.python.org/specifications/name-normalization.
_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
#: A plugin in the list of a README, behind which the next one is put.
_LISTED = re.compile(r"- `.*`: .*\.py\W+$")


class Kind(enum.Enum):
    """A kind of plugin, as a user asks for it. Templates have the names of the values."""

    COLLECTIVES = "collectives"
    """Changes what other collectives send, or counts it: a decorator."""
    BACKEND = "backend"
    """Moves bytes between ranks by itself."""
    PRECISION = "precision"
    """Chooses dtypes, and casts."""
    OFFLOAD = "offload"
    """Offloads shards between uses."""
    POLICY = "policy"
    """Chooses which modules become units."""
    LISTENER = "listener"
    """Watches."""

    @property
    def group(self) -> Group:
        """The entry-point group whose plugins are of this kind."""
        names = {Kind.BACKEND: Group.COLLECTIVES, Kind.POLICY: Group.POLICIES, Kind.LISTENER: Group.PLUGINS}
        return names.get(self) or Group[self.name]

    def setting(self, name: str) -> str:
        """The line of TOML that picks the plugin ``name``."""
        if self is Kind.LISTENER:
            return f'listeners = ["{name}"]'
        return f'{"collectives" if self is Kind.BACKEND else self.value} = "{name}"'


@dataclass(frozen=True)
class Ownership:
    """Whose a new package is, as its metadata say it; raises ``ConfigError`` for what metadata cannot say."""

    author: str = ""
    """``"Name"`` or ``"Name <mail>"``; empty: to be written later."""
    licence: str = ""
    """An SPDX expression, such as ``"MIT"``; empty: to be written later."""

    def __post_init__(self) -> None:
        if self.author and not _AUTHOR.fullmatch(self.author):
            raise ConfigError(f"--author {self.author!r} is no name. Write 'Name' or 'Name <mail@example.org>'.")
        if self.licence and not _LICENCE.fullmatch(self.licence):
            raise ConfigError(
                f"--license {self.licence!r} is no SPDX expression. Write 'Apache-2.0', 'MIT' or 'MIT OR Apache-2.0'."
            )

    def toml(self) -> str:
        lines = f'license = "{self.licence}"\n' if self.licence else "# TODO: license\n"
        if found := _AUTHOR.fullmatch(self.author):
            # A string of JSON is one of TOML.
            values = {key: json.dumps(text, ensure_ascii=False) for key, text in found.groupdict().items() if text}
            return lines + f"authors = [{{ {', '.join(f'{key} = {text}' for key, text in values.items())} }}]\n"
        return lines + "# TODO: authors\n"

    def text(self) -> str | None:
        """The licence's text, or a notice that names it; None where no template has it."""
        if self.licence not in _TEXTS:
            return None
        found = _AUTHOR.fullmatch(self.author)
        holder = found["name"] if found else "TODO: whose it is"
        return _filled(self.licence, {"holder": holder})

    @property
    def missing(self) -> tuple[str, ...]:
        """The keys of ``[project]``, and the file, that an index's readers would miss."""
        given = {"license": self.licence, "authors": self.author, "LICENSE": self.licence in _TEXTS}
        return tuple(key for key, value in given.items() if not value)


@dataclass(frozen=True)
class Written:
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
    missing: tuple[str, ...] = ()
    """Keys of its ``[project]``, and the file ``LICENSE``: to be written before it is published."""

    def as_json(self) -> dict[str, Any]:
        """Values of JSON: the fields, with paths as text, and the setting that picks the plugin."""
        paths = {"added": list(map(str, self.added)), "changed": list(map(str, self.changed))}
        named = {"distribution": self.distribution, "name": self.name, "kind": self.kind.value}
        setting = self.kind.setting(self.name)
        return {"folder": str(self.folder), **named, **paths, "missing": list(self.missing), "setting": setting}


def write_plugin(kind: Kind, name: str, into: Path | None = None, ownership: Ownership | None = None) -> Written:
    """Write a small complete plugin of ``kind`` that is called ``name``, with its test and its entry point.

    ``into``: the folder of its package: one that is not there, which is made and whose name the package gets, or that
    of a package that gets another plugin. By default the package that the working directory lies in, if that has
    plugins; else a new folder ``polyshard-NAME``. ``ownership``: of a package that is made; one
    that is there has its own.

    Raises ``ConfigError``, with nothing written, for a name or a folder that does not do, or cannot be written to.
    """
    class_name = _class_name(kind, name)
    folder = _folder(name) if into is None else into
    try:
        if not folder.exists():
            return _new(kind, name, class_name, folder, ownership or Ownership())
        if not (folder / "pyproject.toml").is_file():
            raise ConfigError(
                f"{folder} is there already, and is no package that a plugin could be added to: it has no "
                "pyproject.toml. Choose a folder that is not there, or a package's."
            )
        if ownership not in (None, Ownership()):
            raise ConfigError(f"--author and --license are for new packages, and {folder} is there: it has its own.")
        return _added(kind, name, class_name, folder)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Nothing was written.") from error


def _folder(name: str) -> Path:
    here = Path.cwd()
    nearest = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), None)
    if nearest is not None and Pyproject.read(nearest / "pyproject.toml").offers:
        return Path(os.path.relpath(nearest))
    return Path("polyshard-" + name.replace("_", "-"))


def _new(kind: Kind, name: str, class_name: str, folder: Path, ownership: Ownership) -> Written:
    parent = folder.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"cannot make {folder}: {parent} is not there; make it first")
    distribution, module = folder.resolve().name, _module_of(folder.resolve())
    values = {
        "distribution": distribution,
        "module": module,
        "name": name,
        "class_name": class_name,
        "group": kind.group.value,
        "entry": _entry(kind, name, f"src/{module}"),
        "ownership": ownership.toml(),
        "bounds": _bounds(),
    }
    contents = {
        "pyproject.toml": _filled("pyproject.toml", values),
        "README.md": _filled("README.md", values),
        ".github/workflows/test.yml": _filled("test.yml", values),
        f"src/{module}/__init__.py": f'"""Plugins of {distribution} for polyshard."""\n',
        f"src/{module}/py.typed": "",
        f"src/{module}/{name}.py": _filled(f"{kind.value}.py", values),
        f"tests/test_{name}.py": _filled(f"{kind.value}_test.py", values),
    }
    licence = ownership.text()
    if licence is not None:
        contents["LICENSE"] = licence
    write_all({folder / path: text for path, text in contents.items()}, {})
    return Written(folder, distribution, name, kind, tuple(map(Path, contents)), missing=ownership.missing)


def _bounds() -> str:
    """This minor version of polyshard, as a dependency's specifier."""
    major, minor, *_ = __version__.split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _added(kind: Kind, name: str, class_name: str, folder: Path) -> Written:
    pyproject = Pyproject.read(folder / "pyproject.toml")
    source = _source(folder, pyproject.module)
    values = {"module": pyproject.module, "name": name, "class_name": class_name}
    added = {
        source / f"{name}.py": _filled(f"{kind.value}.py", values),
        Path("tests", f"test_{name}.py"): _filled(f"{kind.value}_test.py", values),
    }
    for path in added:
        if (folder / path).exists():
            raise ConfigError(f"{folder / path} is there already. Choose another name, or move that file.")
    changed: dict[Path, str] = {}
    readme = _with_entry(folder / "README.md", _entry(kind, name, source.as_posix()))
    if readme is not None:
        changed[Path("README.md")] = readme
    # Last: with the entry point the plugin can be found.
    value = f"{pyproject.module}.{name}:{class_name}"
    changed[Path("pyproject.toml")] = pyproject.with_entry_point(kind.group.value, name, value)
    write_all(
        {folder / path: text for path, text in added.items()}, {folder / path: text for path, text in changed.items()}
    )
    return Written(folder, pyproject.distribution, name, kind, tuple(added), tuple(changed))


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
    """The plugin's line in the list of a README. A link into the package would lead nowhere on a package index."""
    return f"- `{kind.setting(name)}`: `{source}/{name}.py`"


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


def _filled(name: str, values: Mapping[str, str]) -> str:
    template = files(__package__).joinpath("templates", f"{name}.template").read_text(encoding="utf-8")
    return string.Template(template).substitute(values)


def _class_name(kind: Kind, name: str) -> str:
    """The class of the plugin ``name``, which is its module's name, too.

    Raises ``ConfigError``: not lower-case words joined by underscores, a word of Python, the name of a built-in plugin
    of that kind, or one whose class or module the plugin's file would give another meaning.
    """
    if not _PLUGIN.fullmatch(name):
        words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
        near = "_".join(words).lstrip("0123456789_")
        cure = f" Did you mean {near!r}?" if _PLUGIN.fullmatch(near) else ""
        raise ConfigError(
            f"a plugin cannot be called {name!r}: its name is its module's, too. Give lower-case words joined by "
            f"underscores, beginning with a letter.{cure}"
        )
    if any(offer.built_in and offer.name == name for offer in offers_of(kind.group)):
        raise ConfigError(
            f"{name!r} is a built-in plugin of {kind.group.value}, and that name goes on meaning it. Choose "
            f"another, 'my_{name}' for example."
        )
    class_name = "".join(word.capitalize() for word in name.split("_"))
    if keyword.iskeyword(name) or keyword.iskeyword(class_name) or class_name in _identifiers(kind):
        raise ConfigError(
            f"a plugin cannot be called {name!r}: its module {name} or its class {class_name} would stand for "
            f"something else in its file. Choose another name, 'my_{name}' for example."
        )
    return class_name


def _identifiers(kind: Kind) -> set[str]:
    """The names that a plugin's file, or its test's, uses: the class cannot have one of them."""
    values = {"module": "package", "name": "plugin", "class_name": "_"}
    nodes = [
        node
        for name in (f"{kind.value}.py", f"{kind.value}_test.py")
        for node in ast.walk(ast.parse(_filled(name, values)))
    ]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return used | {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}


def _module_of(folder: Path) -> str:
    """The module of the package that is to be made in ``folder``, whose name is the distribution's.

    Raises ``ConfigError`` where the folder names no distribution or no module, or the module would hide another.
    """
    name = folder.name
    module = normalised(name).replace("-", "_")
    if not _DISTRIBUTION.fullmatch(name) or not module.isidentifier() or keyword.iskeyword(module):
        raise ConfigError(
            f"the folder {folder} cannot be a package's, which is called as its folder is: {name!r} does not name "
            "both a distribution and a module. Give letters, digits and hyphens, beginning with a letter."
        )
    if module == BUILT_IN or module in sys.stdlib_module_names:
        raise ConfigError(f"the package {name!r} would hide the module {module}. Choose another folder.")
    found = importlib.util.find_spec(module)
    # Folders without __init__.py that happen to lie on the path hide nothing.
    if found is not None and found.origin is not None:
        raise ConfigError(
            f"the package {name!r} would hide the module {module}, which is installed: {found.origin}. Choose "
            "another folder, or uninstall that one."
        )
    return module
