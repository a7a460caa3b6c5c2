"""What a plugin, its class and its package may be called."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..registry.find import BUILT_IN, normalised, offers_of
from .kinds import Kind

_PLUGIN = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
#: Names of distributions as package indexes take them: https://packaging.python.org/specifications/name-normalization.
_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class PluginName:
    """A plugin's name, which is its module's too, and what its class is called."""

    name: str
    class_name: str

    @classmethod
    def parse(cls, kind: Kind, name: str, taken: frozenset[str]) -> PluginName:
        """``taken``: names that the class cannot have, since its file uses them.

        Raises ``ConfigError``: not lower-case words joined by underscores, a word of Python, the name of a built-in
        plugin of that kind, or one whose class would be in ``taken``.
        """
        if not _PLUGIN.fullmatch(name):
            words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
            near = "_".join(words).lstrip("0123456789_")
            cure = f" Did you mean {near!r}?" if _PLUGIN.fullmatch(near) else ""
            raise ConfigError(
                f"a plugin cannot be called {name!r}: its name is its module's, too. Give lower-case words joined by "
                f"underscores, beginning with a letter.{cure}"
            )
        if any(offer.built_in for offer in offers_of(kind.group, name=name)):
            raise ConfigError(
                f"{name!r} is a built-in plugin of {kind.group.value}, and that name goes on meaning it. Choose "
                f"another, 'my_{name}' for example."
            )
        class_name = "".join(word.capitalize() for word in name.split("_"))
        if keyword.iskeyword(name) or keyword.iskeyword(class_name) or class_name in taken:
            raise ConfigError(
                f"a plugin cannot be called {name!r}: its module {name} or its class {class_name} would stand for "
                f"something else in its file. Choose another name, 'my_{name}' for example."
            )
        return cls(name, class_name)


@dataclass(frozen=True)
class PackageName:
    """A distribution's name, and its module's."""

    distribution: str
    module: str

    @classmethod
    def parse(cls, folder: Path) -> PackageName:
        """Of the package that is to be made in ``folder``, whose last part is the distribution's name.

        Raises ``ConfigError`` for what is no name of a distribution, or where its module would be no module's name, or
        hide one that is there already.
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
        return cls(name, module)
