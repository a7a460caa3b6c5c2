"""JSON that somebody else may have written: parsed, and its parts taken with the types that they must have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .disk import damaged

#: Sizes and offsets in bytes, and numbers of elements, stay below.
_MOST = 1 << 62


class MalformedError(ValueError):
    """What a document must not have; ``checked`` names the file."""


def render(content: Any) -> bytes:
    """``content`` as it is written: the same bytes for the same content, so that these can be compared."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), sort_keys=False, ensure_ascii=True)
    return text.encode() + b"\n"


def parse(content: bytes) -> Any:
    """What ``render`` wrote.

    Raises:
        MalformedError: it is no JSON, has a name twice, or numbers that JSON has not.
    """
    try:
        return json.loads(content, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except ValueError as error:
        raise MalformedError(f"it is no such JSON as is written there: {error}") from error


@contextmanager
def checked(directory: Path, name: str) -> Iterator[None]:
    """What goes wrong inside with the content of the file ``name`` is an error that names it.

    Raises:
        CheckpointDamagedError: instead of what the body raised.
    """
    try:
        yield
    except RecursionError:
        raise damaged(directory, f"'{name}' is nested too deeply") from None
    except (ValueError, TypeError, KeyError, LookupError, OverflowError, AttributeError) as error:
        told = str(error) if isinstance(error, MalformedError) else f"{type(error).__name__}: {error}"
        raise damaged(directory, f"'{name}' cannot be what was written ({told})") from error


def an_object(value: Any, what: str) -> dict[str, Any]:
    """``value``, which must be an object."""
    if not isinstance(value, dict):
        raise MalformedError(f"{what} is no object")
    return value


def a_list(value: Any, what: str) -> list[Any]:
    """``value``, which must be a list."""
    if not isinstance(value, list):
        raise MalformedError(f"{what} is no list")
    return value


def a_text(value: Any, what: str) -> str:
    """``value``, which must be a string."""
    if not isinstance(value, str):
        raise MalformedError(f"{what} is no text")
    return value


def a_count(value: Any, what: str) -> int:
    """``value``, which must be a whole number from 0 to 2**62."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise MalformedError(f"{what} is no number of anything")
    return value


def counts(value: Any, what: str) -> tuple[int, ...]:
    """``value``, which must be a list of such numbers."""
    return tuple(a_count(each, what) for each in a_list(value, what))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError("it has a name twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise MalformedError(f"it has the number {text}")
