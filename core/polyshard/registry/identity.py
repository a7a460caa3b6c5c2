"""What ranks compare before they shard: settings and plans as values that mean the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from ..errors import PluginContractError
from ..interfaces import Group
from .check import qualified
from .make import Constructed

#: Attribute of a plugin's factory that names the options that may differ between ranks.
LOCAL_OPTIONS = "local_options"

#: What ``object.__repr__`` and its kin print, which no other process would.
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
#: Characters of a ``repr`` from which on its digest is compared.
_LONG = 200


def local_options(group: Group, plugin: object, where: str) -> frozenset[str]:
    """The options of a plugin (its factory, or the object that the user gave) that may differ between ranks.

    The rank among those of collectives differs in any case.

    Raises PluginContractError: the plugin's ``local_options`` are not names. ``where``: the plugin, for the message.
    """
    named: Any = getattr(plugin, LOCAL_OPTIONS, ())
    sound = isinstance(named, Collection) and not isinstance(named, str | bytes)
    if not sound or not all(isinstance(name, str) for name in named):
        raise PluginContractError(
            f"{LOCAL_OPTIONS} of {where} is {named!r}. Name the options that may differ between ranks, in a frozenset."
        )
    return frozenset(named) | ({"rank"} if group is Group.COLLECTIVES else set())


def options_of(options: Mapping[str, Any], local: Collection[str]) -> list[list[Any]]:
    """``options`` but for those that are ``local``, by name, as values that JSON holds and ranks compare."""
    return [[name, comparable(options[name])] for name in sorted(options) if name not in local]


def fields_of(plugin: object, local: Collection[str]) -> list[list[Any]]:
    """The fields of a plugin that is a dataclass, as ``options_of``; nothing for any other object."""
    if not dataclasses.is_dataclass(plugin) or isinstance(plugin, type):
        return []
    return options_of({field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}, local)


def comparable(value: object) -> Any:
    """``value`` as JSON that is equal on two ranks that mean the same by it.

    Classes and functions go by their qualified names, dataclasses by their fields, other objects by their class and,
    where it holds no address, their ``repr``. Devices, process groups and slices of meshes are each rank's own.
    """
    if isinstance(value, enum.Enum):
        return f"{qualified(type(value))}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return _short(repr(value))
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        # In order, which may matter: the first entry that fits.
        return ["mapping", [[comparable(key), comparable(each)] for key, each in value.items()]]
    if isinstance(value, list | tuple):
        return [comparable(each) for each in value]
    if isinstance(value, set | frozenset):
        return ["set", sorted((comparable(each) for each in value), key=json.dumps)]
    if isinstance(value, type):
        return f"class {qualified(value)}"
    if isinstance(value, functools.partial):
        return ["partial", comparable(value.func), comparable(value.args), comparable(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", comparable(value.__func__), comparable(value.__self__)]
    if isinstance(value, FunctionType | BuiltinFunctionType):
        # Of the functions of one scope that have no name, the line tells which is meant.
        code = getattr(value, "__code__", None)
        line = f":{code.co_firstlineno}" if code is not None and "<lambda>" in value.__qualname__ else ""
        return f"function {value.__module__}:{value.__qualname__}{line}"
    name = qualified(type(value))
    if isinstance(value, torch.Tensor):
        return [name, str(value.dtype), list(value.shape)]
    if isinstance(value, torch.device):
        return name
    if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
        return name
    if type(value).__name__ == "DeviceMesh":
        # Its ranks are those of this rank's slice.
        mesh: Any = value
        return [name, list(mesh.mesh_dim_names or ()), list(mesh.shape)]
    if dataclasses.is_dataclass(value):
        return [name, fields_of(value, ())]
    text = repr(value)
    return name if _ADDRESS.search(text) else [name, _short(text)]


def _short(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]}... (sha256 {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]})"


#: Method by which a plugin adds to what ranks compare.
FINGERPRINT = "fingerprint"


def fingerprint(constructed: Constructed) -> list[list[Any]]:
    """A row of JSON values for ``constructed`` and each plugin inside of it, for comparison between ranks.

    A row has the group; name, value and origin; each option; the digest of the code; and the text of the plugin's
    ``fingerprint()``, where it has one. Options named in the factory's ``local_options`` are left out. An object that
    the user gave has the fields of a dataclass as options; collectives and listeners that are objects have none.

    Raises ``PluginContractError`` for ``local_options`` that are not names, and a ``fingerprint()`` that is not text.
    """
    return [_row(each) for each in constructed.walk()]


def _row(constructed: Constructed) -> list[Any]:
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
    own: Any = getattr(instance, FINGERPRINT, None)
    if own is None:
        return row
    answer = own() if callable(own) else own
    if not isinstance(answer, str):
        raise PluginContractError(
            f"{FINGERPRINT}() of {where} answered {answer!r}. Return text that is equal on ranks that may train "
            "together."
        )
    return [*row, [FINGERPRINT, answer]]


def _named(option: object, constructed: Constructed) -> object:
    """``option`` with each inner plugin replaced by its name: inner plugins have rows of their own."""
    for inner in constructed.inner:
        if option is inner.choice:
            return inner.resolved.name
    if isinstance(option, list | tuple):
        return [_named(each, constructed) for each in option]
    if isinstance(option, Mapping):
        return {key: _named(each, constructed) for key, each in option.items()}
    return option


def _code_digest(factory: object) -> str:
    """A digest of the Python files that define ``factory`` and its bases; empty where none is known."""
    cls = factory if isinstance(factory, type) else type(factory)
    defined: list[object] = [factory] if inspect.isfunction(factory) else list(inspect.getmro(cls))
    return _digest(tuple(sorted({found for each in defined for found in _files(each)})))


@functools.cache
def engine_digest() -> str:
    """A digest of polyshard's own Python files, plugins aside: about 20 ms, once a process."""
    root = Path(__file__).parents[1]
    return _digest_of((f"{file.relative_to(root)}", file) for file in sorted(root.rglob("*.py")))


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
    if not places:
        return ""
    files = ((module, file) for module, place in places for file in (sorted(Path(place).glob("*.py")) or [Path(place)]))
    return _digest_of((f"{module}/{file.name}", file) for module, file in files)


def _digest_of(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(f"{name}\0".encode())
        # Part of an archive, say: its version alone is compared.
        with suppress(OSError):
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
