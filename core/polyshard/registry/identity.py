"""The identity of plugins, which ranks compare: origin, options, code, and a fingerprint of their own."""

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
from .make import Constructed

#: Method by which a plugin adds to what ranks compare.
FINGERPRINT = "fingerprint"


def fingerprint(constructed: Constructed[Any]) -> list[list[Any]]:
    """A row of JSON values for ``constructed`` and each plugin inside of it, for comparison between ranks.

    A row has the group; name, value and origin; each option; the digest of the code; and the text of the plugin's
    ``fingerprint()``, where it has one. Options named in the factory's ``local_options`` are left out. An object that
    the user gave has the fields of a dataclass as options; collectives and listeners that are objects have none.

    Raises ``PluginContractError`` for ``local_options`` that are not names, and a ``fingerprint()`` that is not text.
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
        row.append(["code", _code_digest(resolved.factory)])
    own = _own(instance, where)
    return row if own is None else [*row, [FINGERPRINT, own]]


def _named(option: object, constructed: Constructed[Any]) -> object:
    """``option`` with each inner plugin replaced by its name: inner plugins have rows of their own."""
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


def _code_digest(factory: object) -> str:
    """A digest of the Python files in the folders that define ``factory`` and its bases; empty where none is known.

    Of a module outside of packages, its file alone.
    """
    cls = factory if isinstance(factory, type) else type(factory)
    defined: list[object] = [factory] if inspect.isfunction(factory) else list(inspect.getmro(cls))
    return _digest(tuple(sorted({found for each in defined for found in _files(each)})))


@functools.cache
def engine_digest() -> str:
    """A digest of polyshard's own Python files, plugins aside: about 20 ms, once a process."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _files(defined: object) -> Iterator[tuple[str, str]]:
    """Name and path of the package, or the single module, that defines ``defined``."""
    module = inspect.getmodule(defined)
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__.partition(".")[0] in _NOT_PLUGINS:
        return
    if module.__package__:
        yield module.__package__, os.path.dirname(file)
    else:
        yield module.__name__, file


#: Packages that plugins derive from, and whose versions ranks compare instead.
_NOT_PLUGINS = frozenset({"polyshard", "torch", "abc", "typing", "builtins"})


@functools.lru_cache(maxsize=256)
def _digest(places: tuple[tuple[str, str], ...]) -> str:
    """Cached for the process: code that was imported does not change with its file."""
    digest = hashlib.sha256()
    for module, place in places:
        path = Path(place)
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(f"{module}/{file.name}\0".encode())
            try:
                digest.update(hashlib.sha256(file.read_bytes()).digest())
            except OSError:
                # Part of an archive, say: its version alone is compared.
                continue
    return digest.hexdigest()[:16] if places else ""
