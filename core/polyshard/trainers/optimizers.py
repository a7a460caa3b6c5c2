"""Optimizers, and the parameters of the models that they are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from ..errors import ConfigError
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from .sharded import sharded_in


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """All that an optimizer of ``model`` may hold: its parameters, and flat ones that stand for those of a unit."""
    yield from model.parameters()
    for inner in model.modules():
        stage = inner.__dict__.get(MODULE_STATE_ATTRIBUTE)
        for unit in stage.units if stage is not None else ():
            if unit.flat is not None:
                yield unit.flat.parameter


def refuse_strangers(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], rank: int, remedy: str) -> None:
    """Raise where ``optimizer`` holds a parameter of none of ``models``: nothing would reduce its gradient.

    Args:
        optimizer: As the user made it.
        models: Sharded, or about to be.
        rank: Of this process.
        remedy: What to do, as sentences.

    Raises:
        ConfigError: naming the parameter.
    """
    known = {parameter for model in models for parameter in parameters_of(model)}
    for index, place, parameter in _held(optimizer):
        if parameter in known:
            continue
        alike = next(
            (
                f" It has the shape of '{name}' of {type(model).__name__}, but is another tensor."
                for model in models
                if sharded_in(model) is None
                for name, own in model.named_parameters()
                if own.shape == parameter.shape
            ),
            "",
        )
        there = " or ".join(type(model).__name__ for model in models)
        whose = f"is not among the parameters of {there}" if models else "is of no model: there is none"
        raise ConfigError(
            f"Parameter {place} of group {index} of {type(optimizer).__name__}, {tuple(parameter.shape)} on "
            f"{parameter.device}, {whose} (rank {rank}), so its gradient would be this rank's alone.{alike} {remedy}"
        )


def refuse_stepped(optimizer: torch.optim.Optimizer, to_be_cut: Iterable[nn.Module], rank: int, remedy: str) -> None:
    """Raise where ``optimizer`` has state of whole parameters of which each rank is about to keep a piece.

    Args:
        optimizer: As the user made it.
        to_be_cut: Models that are not sharded yet.
        rank: Of this process.
        remedy: What to do, as sentences.

    Raises:
        ConfigError: naming the parameter.
    """
    cut = {parameter: name for model in to_be_cut for name, parameter in model.named_parameters()}
    for _, _, parameter in _held(optimizer):
        if parameter in cut and optimizer.state.get(parameter):
            raise ConfigError(
                f"{type(optimizer).__name__} has taken steps: it has state of the whole '{cut[parameter]}', of which "
                f"this rank is about to keep a piece (rank {rank}). {remedy}"
            )


def _held(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, int, nn.Parameter]]:
    """Each parameter with the number of its group, and its number there."""
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield index, place, parameter
