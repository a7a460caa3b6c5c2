"""The inputs of a planned step: batches of any number of samples, and optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from polyshard.config import did_you_mean
from polyshard.errors import ConfigError
from torch import nn
from typing_extensions import override

from ._torch_private import tree_map
from .recording import Bound, Kind, Ledger, StepRecorder, own_part

_SHAPE = re.compile(r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d, ]*)\]$")


@dataclass(frozen=True)
class Batch:
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

        Raises ConfigError: a word is none of these, or the first sizes differ.
        """
        # Spaces may stand inside of brackets.
        shapes = tuple(_shape_of(word) for word in re.findall(r"[^\s\[]+(?:\[[^\]]*\])?", text) or [text])
        firsts = {shape.sizes[0] for shape in shapes}
        if len(firsts) != 1:
            raise ConfigError(
                f"batch {text!r}: the first sizes, which count samples, are {sorted(firsts)}. Give one or more tensors "
                "whose first sizes are equal."
            )
        return cls(shapes)

    @property
    def samples(self) -> int:
        return self.shapes[0].sizes[0]

    def __call__(self, samples: int) -> Batch:
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
        made = tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, made)
        if isinstance(made, Mapping):
            return Batch((), dict(made))
        return Batch(tuple(made) if isinstance(made, tuple | list) else (made,), {})

    return make


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


#: Parameters that one launch of a fused or foreach kernel takes, about: torch cuts by blocks and by arguments.
_TOGETHER = 32


class OptimizerModel:
    """An optimizer of the model's parameters."""

    def standing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of its state that no tensor on the meta device stands for."""
        return 0

    def state_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of its state of some ``parameters``, after a step."""
        return self.standing_nbytes(parameters)

    def step(self, parameters: Sequence[nn.Parameter], recorder: StepRecorder, ledger: Ledger) -> None:
        """Record one step with the gradients that are there."""


class NoOptimizer(OptimizerModel):
    """Parameters are not updated."""


@dataclass(frozen=True, slots=True)
class FusedAdamW(OptimizerModel):
    """``torch.optim.AdamW(fused=True)``: two states a parameter, everything read once and written once.

    Its kernel does not run on the meta device, so it is counted: 16 bytes a parameter for fp32 master, gradient and
    states (ZeRO, table 1, without the half-precision copies that polyshard does not keep).
    """

    states: int = 2

    @override
    def standing_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return self.states * sum(own_part(parameter).nbytes for parameter in parameters)

    @override
    def step(self, parameters: Sequence[nn.Parameter], recorder: StepRecorder, ledger: Ledger) -> None:
        given = [
            (own_part(parameter), own_part(parameter.grad)) for parameter in parameters if parameter.grad is not None
        ]
        # Master and states are read and written, gradients read.
        nbytes = sum(parameter.nbytes * (2 + 2 * self.states) + gradient.nbytes for parameter, gradient in given)
        launches = -(-len(given) // _TOGETHER)
        for _ in range(launches):
            recorder.kernel("fused_adamw", Bound.NONE, 0, nbytes // launches, 4)


class RunOptimizer(OptimizerModel):
    """Any optimizer, made by ``factory`` of the parameters and run on the meta device: what it allocates is seen."""

    def __init__(self, factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer], label: str) -> None:
        self._factory = factory
        self._label = label
        self._optimizer: torch.optim.Optimizer | None = None

    @override
    def state_nbytes(self, parameters: Sequence[nn.Parameter]) -> int:
        states = {} if self._optimizer is None else self._optimizer.state
        held = [value for each in parameters for value in states.get(each, {}).values()]
        parts = (own_part(value) for value in held if isinstance(value, torch.Tensor))
        return sum(part.nbytes for part in parts if part.is_meta)

    @override
    def step(self, parameters: Sequence[nn.Parameter], recorder: StepRecorder, ledger: Ledger) -> None:
        try:
            if self._optimizer is None:
                self._optimizer = self._factory(list(parameters))
            self._optimizer.step()
        except Exception as error:
            raise ConfigError(
                f"the optimizer {self._label!r} raised {type(error).__name__}: {error}. It is made of a list of "
                "parameters and steps on the meta device, where tensors have no values: leave out fused=True, which "
                "'adamw' stands for."
            ) from error
        states = self._optimizer.state.values()
        ledger.see(
            [value for state in states for value in state.values() if isinstance(value, torch.Tensor)], Kind.OPTIMIZER
        )


_NAMED: dict[str, Callable[[], OptimizerModel]] = {
    "adamw": FusedAdamW,
    "adamw-foreach": lambda: RunOptimizer(partial(torch.optim.AdamW, foreach=True), "adamw-foreach"),
    "sgd": lambda: RunOptimizer(partial(torch.optim.SGD, lr=0.1, foreach=True), "sgd"),
    "none": NoOptimizer,
}

OPTIMIZERS = tuple(_NAMED)


def find_optimizer(name: str) -> OptimizerModel:
    """The one called ``name``, made anew.

    Raises:
        ConfigError: none is.
    """
    if name not in _NAMED:
        raise ConfigError(
            f"No optimizer is called {name!r}.{did_you_mean(name, list(_NAMED))} Named ones: {', '.join(_NAMED)}; or "
            "package.module:factory, which takes a list of parameters."
        )
    return _NAMED[name]()
