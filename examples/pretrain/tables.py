"""Tables of a TOML file, checked against the dataclasses that they fill."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_type_hints

from polyshard.errors import ConfigError

_WORDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def read_table(kind: type[Any], table: Any, name: str, where: str) -> dict[str, Any]:
    """The values in ``table`` for the fields of the dataclass ``kind``. Raises ``ConfigError``."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: {name} is {table!r}. Write a table, [{name}].")
    hints = get_type_hints(kind)
    require_known(table, list(hints), f"{where}, [{name}]")
    return {key: _value(f"{name}.{key}", value, hints[key]) for key, value in table.items()}


def require_known(names: Iterable[str], known: Sequence[str], where: str, what: str = "setting") -> None:
    """Raise ``ConfigError`` for the first of ``names`` that is not in ``known``, with the nearest that is."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{where}: unknown {what} {name!r}.{hint} There are: {', '.join(known)}.")


def toml_value(text: str) -> Any:
    """What ``text`` means as a TOML value; the text itself where it is none, so that words need no quotes."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _value(name: str, value: Any, kind: Any) -> Any:
    if kind == tuple[str, ...]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
            raise ConfigError(f"{name} is {value!r}. Give a list of texts.")
        return tuple(texts)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name} is {value!r}. Give {_WORDS[kind]}.")
    return value
