"""What goes into a model's forward, for any number of samples, on the meta device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ConfigError
from ._torch_private import tree_map

_SHAPE = re.compile(r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d, ]*)\]$")


@dataclass(frozen=True)
class Batch:
    """Arguments of one forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


#: Makes the batch of so many samples.
BatchMaker = Callable[[int], Batch]


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str | None
    dtype: torch.dtype
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShapedBatches:
    """Tensors of fixed shapes, whose first dimension counts samples."""

    shapes: tuple[_Shape, ...]

    @classmethod
    def parse(cls, text: str) -> ShapedBatches:
        """From ``"int64[8,1024] labels=int64[8,1024]"``: dtypes and sizes, positional ones first, or by keyword.

        Raises:
            ConfigError: a word is none of these, or the first sizes differ.
        """
        shapes = tuple(_shape_of(word) for word in _words(text))
        firsts = {shape.sizes[0] for shape in shapes}
        if len(firsts) != 1:
            raise ConfigError(
                f"batch {text!r}: the first sizes, which count samples, are {sorted(firsts)}. Give one or more tensors "
                "whose first sizes are equal."
            )
        return cls(shapes)

    @property
    def samples(self) -> int:
        """How many samples were written down."""
        return self.shapes[0].sizes[0]

    def __call__(self, samples: int) -> Batch:
        """The batch of ``samples``."""
        tensors = [
            (shape.name, torch.empty((samples, *shape.sizes[1:]), dtype=shape.dtype, device="meta"))
            for shape in self.shapes
        ]
        positional = tuple(tensor for name, tensor in tensors if name is None)
        return Batch(positional, {name: tensor for name, tensor in tensors if name is not None})


def batches_of(factory: Callable[[int], Any], label: str) -> BatchMaker:
    """Batches made by the user's ``factory`` of the number of samples: a tensor, a tuple, or a dict of keywords.

    Its tensors may be anywhere; their shapes and dtypes count. ``label`` names it in messages.
    """

    def make(samples: int) -> Batch:
        with torch.device("meta"):
            try:
                made = factory(samples)
            except Exception as error:
                raise ConfigError(
                    f"the batch {label!r} raised {type(error).__name__}: {error}. It is called with the number of "
                    "samples, on the meta device, where tensors have no values."
                ) from error
        made = tree_map(_on_meta, made)
        if isinstance(made, Mapping):
            return Batch((), dict(made))
        return Batch(tuple(made) if isinstance(made, tuple | list) else (made,), {})

    return make


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _words(text: str) -> list[str]:
    # Spaces may stand inside of brackets.
    return re.findall(r"[^\s\[]+(?:\[[^\]]*\])?", text) or [text]


def _shape_of(word: str) -> _Shape:
    match = _SHAPE.match(word)
    dtype = getattr(torch, match["dtype"], None) if match else None
    sizes = tuple(int(size) for size in match["sizes"].replace(" ", "").split(",") if size) if match else ()
    if match is None or not isinstance(dtype, torch.dtype) or not sizes or 0 in sizes:
        raise ConfigError(
            f"{word!r} is no tensor of a batch. Write a dtype of torch and sizes, such as int64[8,1024] or, by "
            "keyword, input_ids=int64[8,1024]; or name a function as package.module:batch."
        )
    return _Shape(match["name"], dtype, sizes)
