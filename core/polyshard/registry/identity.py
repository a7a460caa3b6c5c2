"""What ranks compare of plugins: where each is from, its options, its code, and what it says itself."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import PluginContractError
from ..fingerprint import fields_of, local_options, options_of
from ..interfaces import Group
from .construct import Constructed

#: Method by which a plugin adds to what ranks compare.
FINGERPRINT = "fingerprint"


def fingerprint(constructed: Constructed[Any]) -> list[list[Any]]:
    """What ranks compare of a plugin, and of those that it constructed: a row of JSON values for each.

    Its group; name, value and origin; each option; the digest of its code; and what its ``fingerprint()`` returns where
    it has one. Of an object that the user gave, the fields of a dataclass count as options; those of collectives
    and listeners are each rank's own. Options that the factory's ``local_options`` name are left out.

    Raises ``PluginContractError`` for ``local_options`` that are not names, and for a ``fingerprint()`` that is no
    text.
    """
    return [_row(each) for each in constructed.walk()]


def _row(constructed: Constructed[Any]) -> list[Any]:
    resolved, instance = constructed.resolved, constructed.instance
    where = f"plugin {resolved.name!r} of {resolved.group.value}"
    if resolved.distribution:
        local = local_options(resolved.group, resolved.factory, where)
        options = options_of({name: _named(each, constructed) for name, each in resolved.options.items()}, local)
    elif resolved.group in (Group.COLLECTIVES, Group.PLUGINS):
        options = []
    else:
        options = fields_of(instance, local_options(resolved.group, instance, where))
    origin = f"{resolved.distribution} {resolved.version}" if resolved.distribution else "the program"
    row: list[Any] = [resolved.group.value, {"name": resolved.name, "is": resolved.value, "from": origin}, *options]
    if resolved.distribution:
        row.append(["code", code_digest(resolved.factory)])
    own = _own(instance, where)
    return row if own is None else [*row, [FINGERPRINT, own]]


def _named(option: object, constructed: Constructed[Any]) -> object:
    """``option`` with inner plugins, which have rows of their own, by name: their rank, say, may differ."""
    for choice, inner in zip(constructed.choices, constructed.inner, strict=True):
        if option is choice:
            return inner.resolved.name
    if isinstance(option, list | tuple):
        return [_named(each, constructed) for each in option]
    if isinstance(option, Mapping):
        return {key: _named(each, constructed) for key, each in option.items()}
    return option


def _own(instance: object, where: str) -> str | None:
    method: Any = getattr(instance, FINGERPRINT, None)
    if method is None:
        return None
    answer = method() if callable(method) else method
    if not isinstance(answer, str):
        raise PluginContractError(
            f"{FINGERPRINT}() of {where} answered {answer!r}. Return text that is equal on ranks that may train "
            "together."
        )
    return answer


def code_digest(factory: object) -> str:
    """A digest of the Python files beside the one in which ``factory`` is defined, and beside those of its bases.

    That is the folder of a package, without folders inside; of a module outside of packages, the file alone. Empty
    where no file is known.
    """
    cls = factory if isinstance(factory, type) else type(factory)
    defined: list[object] = [factory] if inspect.isfunction(factory) else list(inspect.getmro(cls))
    folders = sorted({found for each in defined for found in _files(each)})
    return _digest(tuple(folders))


@functools.cache
def engine_digest() -> str:
    """A digest of polyshard's own Python files, but for plugins: it takes some 20 ms, once a process."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(defined: object) -> Iterator[tuple[str, str]]:
    """Module and path of what is digested for ``defined``."""
    module = inspect.getmodule(defined)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.partition(".")[0] in _NOT_PLUGINS:
        return
    if module.__package__:
        yield module.__package__, os.path.dirname(file)
    else:
        yield module.__name__, file


#: What classes of plugins derive from beside plugins: their versions tell.
_NOT_PLUGINS = frozenset({"polyshard", "torch", "abc", "typing", "builtins"})


@functools.lru_cache(maxsize=256)
def _digest(places: tuple[tuple[str, str], ...]) -> str:
    """Of what the process began with: code that was imported does not change with its file."""
    digest = hashlib.sha256()
    for module, place in places:
        path = Path(place)
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(f"{module}/{file.name}\0".encode())
            try:
                digest.update(hashlib.sha256(file.read_bytes()).digest())
            except OSError:
                # Part of an archive, say: then its version has to tell.
                continue
    return digest.hexdigest()[:16] if places else ""
