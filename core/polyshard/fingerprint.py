"""What ranks compare before they shard: settings and plans as values that mean the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from .errors import PluginContractError
from .interfaces import Group

#: Attribute of a plugin's factory that names the options that may differ between ranks.
LOCAL_OPTIONS = "local_options"

#: What ``object.__repr__`` and its kin print, which no other process would.
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
#: Characters of a ``repr`` from which on its digest is compared.
_LONG = 200


def local_options(group: Group, plugin: object, where: str) -> frozenset[str]:
    """The options of a plugin (its factory, or the object that the user gave) that may differ between ranks.

    The rank among those of collectives differs in any case.

    Raises:
        PluginContractError: the plugin's ``local_options`` are not names. ``where``: the plugin, for the message.
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
    return [[name, described(options[name])] for name in sorted(options) if name not in local]


def fields_of(plugin: object, local: Collection[str]) -> list[list[Any]]:
    """The fields of a plugin that is a dataclass, as ``options_of``; nothing for any other object."""
    if not dataclasses.is_dataclass(plugin) or isinstance(plugin, type):
        return []
    return options_of({field.name: getattr(plugin, field.name) for field in dataclasses.fields(plugin)}, local)


def described(value: object) -> Any:
    """``value`` as JSON that is equal on two ranks that mean the same by it.

    Classes and functions go by their qualified names, dataclasses by their fields, other objects by their class and,
    where it holds no address, their ``repr``. Devices and process groups are each rank's own.
    """
    if isinstance(value, enum.Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return _short(repr(value))
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Mapping):
        # In order, which may matter: the first entry that fits.
        return ["mapping", [[described(key), described(each)] for key, each in value.items()]]
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if isinstance(value, set | frozenset):
        return ["set", sorted((described(each) for each in value), key=json.dumps)]
    if isinstance(value, type):
        return f"class {_qualified(value)}"
    if isinstance(value, functools.partial):
        return ["partial", described(value.func), described(value.args), described(value.keywords)]
    if isinstance(value, MethodType):
        return ["method", described(value.__func__), described(value.__self__)]
    if isinstance(value, FunctionType):
        # Of the functions of one scope that have no name, the line tells which is meant.
        line = f":{value.__code__.co_firstlineno}" if "<lambda>" in value.__qualname__ else ""
        return f"function {value.__module__}:{value.__qualname__}{line}"
    if isinstance(value, BuiltinFunctionType):
        return f"function {value.__module__}:{value.__qualname__}"
    return _object(value)


def _object(value: object) -> Any:
    name = _qualified(type(value))
    if isinstance(value, torch.Tensor):
        return [name, str(value.dtype), list(value.shape)]
    if isinstance(value, torch.device):
        return name
    if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
        return name
    if dataclasses.is_dataclass(value):
        return [name, fields_of(value, ())]
    if type(value).__repr__ is object.__repr__:
        return name
    text = repr(value)
    return name if _ADDRESS.search(text) else [name, _short(text)]


def _short(text: str) -> str:
    if len(text) <= _LONG:
        return text
    return f"{text[:_LONG]}... (sha256 {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]})"


def _qualified(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
