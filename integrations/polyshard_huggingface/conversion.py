"""The tensors of a sharded model by name, and how those of files become them, and back: in steps of a few tensors.

Steps are tried without values first: what they make is known before anything is read, written or sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from polyshard.errors import ConfigError
from polyshard.inspect import ShardedModel
from polyshard.state.contents import model_state, names_within
from polyshard.state.source import chunks_of, listed

#: Parameters and persistent buffers by all of their names; ``chunks_of`` one are what this rank holds of it.
Held = Mapping[tuple[str, ...], torch.Tensor]


def tensors_of(sharded: ShardedModel) -> Held:
    """All of the model's, those of units first; last what packed ones have beside.

    Raises:
        ConfigError: something has no memory to be read into, or to be written from.
        ParameterChangedError: modules moved, so that a name is another parameter's now.
    """
    names = names_within(sharded)
    held = {names[first]: value for first, value in model_state(sharded).items()}
    hollow = [f"'{each[0]}'" for each, value in held.items() if any(chunk.view.is_meta for chunk in chunks_of(value))]
    if hollow:
        raise ConfigError(
            f"{', '.join(hollow)} are on the meta device (rank {sharded.rank}): shard() was told to leave them alone, "
            "so there is nothing to read into. Give each memory before shard(), by module.name = "
            "torch.nn.Parameter(torch.empty_like(module.name, device='cpu'))."
        )
    return held


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


#: ``WeightConverter`` and ``WeightRenaming`` of ``transformers.core_model_loading``: from files to a model.
Conversion = Sequence[Any]
Made = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of some tensors."""

    sources: tuple[str, ...]
    """Their names."""
    make: Callable[[Sequence[torch.Tensor]], Made]
    """Of these tensors, in order: others by name, which may be views of them."""

    def run(self, tensors: Sequence[torch.Tensor]) -> Made:
        """As ``make``. Raises ConfigError, naming ``sources``: it failed."""
        try:
            with torch.no_grad():
                return self.make(tensors)
        except Exception as error:
            shapes = ", ".join(str(tuple(each.shape)) for each in tensors[:4])
            raise ConfigError(
                f"{listed(self.sources)} of shapes {shapes} cannot be put together as the conversion says: "
                f"{type(error).__name__}: {error}"
            ) from error


def unchanged(names: Iterable[str]) -> list[Step]:
    """Where both sides have the same names."""

    def step(name: str) -> Step:
        return Step((name,), lambda tensors: {name: tensors[0]})

    return [step(name) for name in names]


#: By name what a step makes, and that step; the tensors are on the meta device.
Outcomes = dict[str, tuple[torch.Tensor, Step]]


def foreseen(steps: Iterable[Step], given: Mapping[str, Any]) -> Outcomes:
    """What ``steps`` make of ``given``, which has shape and dtype. Raises ConfigError: one fails, or two clash."""
    found: Outcomes = {}
    for step in steps:
        described = map(given.__getitem__, step.sources)
        hollow = [torch.empty(tuple(each.shape), dtype=each.dtype, device="meta") for each in described]
        for name, tensor in step.run(hollow).items():
            if name in found:
                raise ConfigError(
                    f"The conversion makes '{name}' of {listed(found[name][1].sources)} and of {listed(step.sources)}."
                )
            found[name] = tensor, step
    return found
