"""Values as JSON with tags, and back: nothing that is read is looked up, imported or called.

``None``, ``bool``, ``int``, ``float``, ``str`` and dicts with names for keys are themselves, every other value is an
object with one tag. A dict that could be taken for one is written as pairs. Tensors and arrays are their
dtype, shape and place in a file.
"""

from __future__ import annotations

import base64
import datetime
import enum
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, NoReturn

import numpy as np
import torch

from ..errors import ConfigError, ConfigTypeError
from ..io.files import damaged
from ..io.memory import DTYPES, NAMES, NUMPY

Json = Any
#: Deeper nesting is refused in both directions; JSON is nested up to three times as deeply.
_DEPTH = 100
_MARK = "$"
#: Python reads no longer numbers from text, by its default.
_MOST_BITS = 10_000
_REMEDY = (
    "Give None, bool, int, float, str, bytes, lists, tuples, sets, dicts, paths, dates, tensors and arrays: a "
    "checkpoint holds no pickles. Of an object save what it is made of, as its state_dict()."
)
_SEQUENCES: dict[str, type[Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
#: Keys of one dict or set whose hash another one has.
_MOST_ALIKE = 1000
#: Sizes and offsets in bytes, and numbers of elements, stay below.
MOST = 1 << 62
_MOST_DIMENSIONS = 64


class Encoder:
    """Encodes values, and keeps the tensors in them to be written beside."""

    def __init__(self) -> None:
        self.tensors: list[tuple[dict[str, Json], torch.Tensor]] = []
        """Each with the object that describes it, in which its place is still missing."""

    def encode(self, value: Any, where: str, depth: int = 0) -> Json:
        """``value`` as JSON. ``where``: what users call it, for errors.

        Raises:
            ConfigTypeError: it has something that cannot be written; names the way there.
            ConfigError: it is nested too deeply, or in itself.
        """
        if depth > _DEPTH:
            raise ConfigError(f"{where[:200]}... is nested more than {_DEPTH} deep, or in itself. Flatten it.")
        kind = type(value)
        if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _MOST_BITS):
            return value
        if kind is float and math.isfinite(value):
            return value
        if isinstance(value, torch.Tensor):
            require_plain(value, where)
            return self._beside("tensor", value)
        if kind is np.ndarray and value.dtype.name in NUMPY:
            native = value.astype(value.dtype.newbyteorder("="), copy=True)
            return self._beside("array", torch.from_numpy(native.reshape(value.shape)))
        # A named tuple or an enum needs its class, which a file must not name.
        if not isinstance(value, enum.Enum) and not hasattr(value, "_fields"):
            if isinstance(value, Mapping):
                return self._of_mapping(value, where, depth)
            for tag, container in _SEQUENCES.items():
                if isinstance(value, container):
                    items = [self.encode(each, f"{where}[{index}]", depth + 1) for index, each in enumerate(value)]
                    # In an order of their own: the same set is written alike.
                    return _tagged(tag, sorted(items, key=repr) if container in (set, frozenset) else items)
        for tag, (takes, encoded, _) in _OTHERS.items():
            if takes(value):
                return _tagged(tag, encoded(value))
        raise ConfigTypeError(
            f"{where} is of {kind.__module__}.{kind.__qualname__}, which no checkpoint holds. {_REMEDY}"
        )

    def _of_mapping(self, value: Mapping[Any, Any], where: str, depth: int) -> Json:
        encoded = {key: self.encode(each, f"{where}[{key!r}]", depth + 1) for key, each in value.items()}
        if all(type(key) is str and not key.startswith(_MARK) for key in encoded):
            return encoded
        keys = [self.encode(key, f"the key {key!r} of {where}", depth + 1) for key in encoded]
        return _tagged("dict", [list(pair) for pair in zip(keys, encoded.values(), strict=True)])

    def _beside(self, tag: str, tensor: torch.Tensor) -> Json:
        entry: dict[str, Json] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        self.tensors.append((entry, tensor))
        return _tagged(tag, entry)


def require_plain(value: torch.Tensor, where: str) -> None:
    """Refuse a tensor that is more than its elements.

    Raises:
        ConfigTypeError: it is of a subclass, sparse or quantised, on the meta device, or of a dtype that is not served.
    """
    kind = type(value)
    if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise ConfigTypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot take apart. "
            "Give a plain tensor."
        )
    if value.layout is not torch.strided or value.is_meta or value.dtype not in NAMES:
        raise ConfigTypeError(
            f"{where} is a tensor of {value.dtype}, {value.layout}, on {value.device}, which no checkpoint holds. Give "
            "a dense one with elements, of a dtype with a size of its own."
        )


def tensor_entry(value: Json) -> Json | None:
    """The entry of the tensor that ``value`` is; None where it is no tensor."""
    if isinstance(value, dict) and len(value) == 1:
        return value.get(f"{_MARK}tensor")
    return None


def decode(value: Json, tensor: Callable[[Json], torch.Tensor], depth: int = 0) -> Any:
    """The value that was encoded. ``tensor``: gives that of an entry, whose elements may be filled later.

    Raises MalformedError, ValueError, TypeError, LookupError, OverflowError: it was not made by ``Encoder``.
    """
    if depth > _DEPTH:
        raise MalformedError("it has a value that is nested too deeply")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    entry = an_object(value, "a value")
    tag = next(iter(entry), "")
    if not tag.startswith(_MARK):
        if any(key.startswith(_MARK) for key in entry):
            raise MalformedError("it has a value with a tag beside names")
        return {key: decode(each, tensor, depth + 1) for key, each in entry.items()}
    if len(entry) != 1:
        raise MalformedError("it has a value with several tags")
    inner, kind = entry[tag], tag[len(_MARK) :]
    if kind == "tensor":
        return tensor(inner)
    if kind == "array":
        return tensor(inner).numpy()
    if kind == "dict":
        pairs = [[decode(part, tensor, depth + 1) for part in a_list(pair, "a pair")] for pair in a_list(inner, kind)]
        _require_hashes([pair[0] for pair in pairs])
        return dict(pairs)
    if kind in _SEQUENCES:
        items = [decode(each, tensor, depth + 1) for each in a_list(inner, kind)]
        if kind in ("set", "frozenset"):
            _require_hashes(items)
        return _SEQUENCES[kind](items)
    if kind in _OTHERS:
        return _OTHERS[kind][2](inner)
    raise MalformedError(f"it has a value of kind {kind!r}, which this polyshard does not know")


def no_tensor(entry: Json) -> torch.Tensor:
    """For ``decode`` of a value that has no tensor in it."""
    raise MalformedError("it has a tensor where none can be")


def _require_hashes(keys: list[Any]) -> None:
    """Raise MalformedError where so many keys have one hash that to put them together would take minutes."""
    if len(keys) - len(set(map(hash, keys))) > _MOST_ALIKE:
        raise MalformedError("it has keys that were made to have one hash")


def _tagged(tag: str, value: Json) -> Json:
    return {f"{_MARK}{tag}": value}


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: Json) -> bytes:
    return base64.b64decode(a_text(text, "bytes"), validate=True)


def _number(text: Json) -> float:
    return float(a_text(text, "a number"))


def _device(text: Json) -> torch.device:
    try:
        return torch.device(a_text(text, "a device"))
    except RuntimeError as error:
        raise MalformedError(f"it has the device {text!r}") from error


def _scalar(parts: Json) -> Any:
    name, raw = a_list(parts, "a scalar")
    if name not in NUMPY:
        raise MalformedError(f"it has a scalar of {name!r}")
    (element,) = np.frombuffer(_bytes(raw), np.dtype(name).newbyteorder("<"))
    return np.dtype(name).type(element)


#: Kinds of values without others in them, by tag: whether a value is of it, and the way there and back.
_OTHERS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Json], Callable[[Json], Any]]] = {
    "scalar": (
        lambda value: isinstance(value, np.generic) and value.dtype.name in NUMPY,
        lambda value: [value.dtype.name, _base64(value.astype(value.dtype.newbyteorder("<")).tobytes())],
        _scalar,
    ),
    "float": (lambda value: type(value) is float, repr, _number),
    "bytes": (lambda value: type(value) in (bytes, bytearray), _base64, _bytes),
    "complex": (
        lambda value: type(value) is complex,
        lambda value: [repr(value.real), repr(value.imag)],
        lambda parts: complex(*(_number(part) for part in a_list(parts, "a complex number"))),
    ),
    "dtype": (lambda value: type(value) is torch.dtype and value in NAMES, NAMES.__getitem__, DTYPES.__getitem__),
    "device": (lambda value: type(value) is torch.device, str, _device),
    "path": (lambda value: isinstance(value, PurePath), str, lambda text: Path(a_text(text, "a path"))),
    "datetime": (
        lambda value: type(value) is datetime.datetime and type(value.tzinfo) in (type(None), datetime.timezone),
        datetime.datetime.isoformat,
        lambda text: datetime.datetime.fromisoformat(a_text(text, "a date")),
    ),
    "date": (
        lambda value: type(value) is datetime.date,
        datetime.date.isoformat,
        lambda text: datetime.date.fromisoformat(a_text(text, "a date")),
    ),
    "timedelta": (
        lambda value: type(value) is datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda parts: datetime.timedelta(*a_list(parts, "a duration")),
    ),
}


class MalformedError(ValueError):
    """What a document must not have; ``checked`` names the file."""


def render(content: Any, other: Callable[[Any], Json] | None = None) -> bytes:
    """``content`` as it is written: the same bytes for the same content, so that these can be compared.

    ``other``: what stands for a value that JSON does not have, made when it is written.
    """
    text = json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=True, default=other)
    return text.encode() + b"\n"


def parse(content: bytes) -> Any:
    """What ``render`` wrote. Raises MalformedError: it is no JSON, has a name twice, or numbers that JSON has not."""
    try:
        return json.loads(content, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise MalformedError("it is nested too deeply") from None
    except ValueError as error:
        raise MalformedError(f"it is no such JSON as is written there: {error}") from error


@contextmanager
def checked(directory: object, name: str) -> Iterator[None]:
    """What goes wrong inside with the content of the file ``name`` is an error that names it.

    Raises CheckpointDamagedError: instead of what the body raised.
    """
    try:
        yield
    except RecursionError:
        raise damaged(directory, f"'{name}' is nested too deeply") from None
    except (ValueError, TypeError, KeyError, LookupError, OverflowError, AttributeError) as error:
        why = str(error) if isinstance(error, MalformedError) else f"{type(error).__name__}: {error}"
        raise damaged(directory, f"'{name}' cannot be what was written ({why})") from error


# Each raises MalformedError for a value that is not what its name says.


def an_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedError(f"{what} is no object")
    return value


def a_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedError(f"{what} is no list")
    return value


def a_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise MalformedError(f"{what} is no text")
    return value


def a_count(value: Any, what: str) -> int:
    """``value``, which must be a whole number from 0 to 2**62."""
    if type(value) is not int or not 0 <= value < MOST:
        raise MalformedError(f"{what} is no number of anything")
    return value


def counts(value: Any, what: str) -> tuple[int, ...]:
    """``value``, which must be a list of such numbers."""
    return tuple(a_count(each, what) for each in a_list(value, what))


def a_shape(value: Any, what: str) -> tuple[int, ...]:
    """``value``, which must be the shape of a tensor that torch could have, without elements too."""
    shape = counts(value, what)
    if len(shape) > _MOST_DIMENSIONS:
        raise MalformedError(f"{what} has {len(shape)} dimensions")
    if math.prod(max(extent, 1) for extent in shape) >= MOST:
        raise MalformedError(f"{what} has the shape {shape}, which no tensor has")
    return shape


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise MalformedError("it has a name twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise MalformedError(f"it has the number {text}")
