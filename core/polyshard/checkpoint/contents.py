"""What a save takes of a model: its state, its precision plugins' state, and checks of both before any write."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ConfigTypeError, UnsupportedError
from ..inspect import ShardedModel, idle_model, savable_model, state_name_of, taken_apart, without_wrappers
from ..interfaces import Collectives, PrecisionPlugin
from ..io.memory import NAMES
from ..state.contents import (
    Joint,
    Optimizers,
    expected_state,
    frozen_names,
    model_state,
    optimizer_state,
    require_state,
)
from ..state.exchange import Answers, together
from ..state.sharded import MODEL, OPTIMIZER, holdings
from ..state.source import chunks_of, in_chunks
from .encoding import Encoder
from .writing import Document, offered

#: Names that one rank reports, and ranks that are asked.
_NAMES, _RANKS = 64, 4


def state_of(sharded: ShardedModel, optimizer: Joint | None, *, frozen: bool) -> dict[str, Any]:
    """This rank's part of what a save writes; arguments and errors are those of ``save``."""
    values = model_state(sharded)
    if not frozen:
        left_out = frozen_names(sharded)
        values = {name: value for name, value in values.items() if name not in left_out}
    if sharded.rank != 0 and sharded.collectives.capabilities.can_communicate:
        # Buffers may differ between ranks (running statistics); one rank's must go together.
        values = {name: value for name, value in values.items() if in_chunks(value)}
    state: dict[str, Any] = {MODEL: values}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer_state(sharded, optimizer)
    return state


def precision_states(sharded: ShardedModel) -> dict[str, dict[str, Any]]:
    """State of each precision plugin that has some, under the name of the first unit that it serves."""
    states = {name: dict(precision.state_dict()) for name, precision in _precisions(sharded).items()}
    return {name: state for name, state in states.items() if state}


def restore_precisions(sharded: ShardedModel, states: Mapping[str, Mapping[str, Any]]) -> None:
    for name, precision in _precisions(sharded).items():
        if name in states:
            precision.load_state_dict(states[name])


def _precisions(sharded: ShardedModel) -> dict[str, PrecisionPlugin]:
    found: dict[int, tuple[str, PrecisionPlugin]] = {}
    for unit in sharded.units:
        found.setdefault(id(unit.precision), (without_wrappers(unit.name), unit.precision))
    return dict(found.values())


def number_of(given: object, name: str, least: int) -> int:
    """The argument ``name`` as an int. Raises ConfigTypeError: it is none; ConfigError: it is less than ``least``."""
    try:
        if isinstance(given, bool):
            raise TypeError
        number = operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigTypeError(f"{name} is {given!r}, and must be an int.") from None
    if number < least:
        raise ConfigError(f"{name} is {number}, and must be {least} or more.")
    return number


def extra_of(given: object) -> Mapping[str, Any]:
    """The argument ``extra`` as a mapping; an empty one for None. Raises ConfigTypeError: it is none."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return given
    raise ConfigTypeError(
        f"extra is {type(given).__name__}, and a checkpoint names what it holds. Give a mapping, such as "
        '{"position": 100}.'
    )


def require_saveable(
    model: nn.Module,
    optimizer: Optimizers | None,
    remedy: str,
    *,
    frozen: bool = True,
    writes: bool = True,
    also: Callable[[], object] = lambda: None,
) -> None:
    """Raise if ``save`` would refuse the state as it is now, or as the optimizers will make it. Every rank calls it.

    ``remedy``: what to do, as sentences. ``writes``: whether the files will be this package's; without, others write
    the state that is put together. ``also``: looks at other things, and raises where it finds something.

    Raises:
        ConfigError, UnsupportedError: as ``save``, on the ranks whose state it is.
        RankMismatchError: on the others.
    """
    sharded = idle_model(model, "training")
    what = "Looking at what checkpoints will hold"
    with sharded.meeting(what, (sharded.collectives,)), together(sharded.collectives, what):
        try:
            savable_model(model, "save()")
            also()
            joint = None if optimizer is None else Joint(optimizer)
            if writes:
                state = state_of(sharded, joint, frozen=frozen)
                Document.of(state, {}, None, precision_states(sharded), {})
                offered(state)
            elif joint is not None:
                optimizer_state(sharded, joint)
            if joint is not None:
                _require_expected(sharded, joint, writes=writes)
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"Checkpoints of this run would fail. {error} {remedy}".rstrip()) from error


def _require_expected(sharded: ShardedModel, joint: Joint, *, writes: bool) -> None:
    held = holdings(sharded, joint.groups)
    for each in joint.members:
        for parameter, stand_in, state in expected_state(each):
            holding = replace(held[parameter], parameter=stand_in)
            require_state(holding, state, sharded.rank)
            for key, value in taken_apart(state).items() if writes else ():
                where = f"{OPTIMIZER}.state[{holding.names[0]!r}][{key!r}]"
                if not isinstance(value, torch.Tensor):
                    Encoder().encode(value, where)
                elif value.dtype not in NAMES:
                    raise ConfigTypeError(f"{where} is of {value.dtype}, which no checkpoint holds.")


@torch.no_grad()
def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of sharded parameters and of optimizer state with such elements on this rank, in what ``state_of`` gave.

    Looks at each tensor once, and waits for the device once. Buffers are not looked at: masks are infinite on purpose.
    """
    named = [(name, value) for name, value in state[MODEL].items() if in_chunks(value)]
    for name, its in state.get(OPTIMIZER, {}).get("state", {}).items():
        tensors = [(key, value) for key, value in its.items() if isinstance(value, torch.Tensor)]
        named += [(f"{state_name_of(key)} of {name}", value) for key, value in tensors]
    views = [(name, chunk.view) for name, value in named for chunk in chunks_of(value)]
    # By the least and the largest of each, for which no memory is taken: a shard fills much of its device.
    ends: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, view in views:
        if view.numel() and view.is_floating_point():
            # Of eight bits torch computes nothing.
            for end in torch.aminmax(view.to(torch.float32) if view.element_size() == 1 else view):
                ends.setdefault((end.device, end.dtype), []).append((name, end))
    flags = [(found, torch.isfinite(torch.stack([end for _, end in found])).tolist()) for found in ends.values()]
    broken = {name for found, each in flags for (name, _), is_sound in zip(found, each, strict=True) if not is_sound}
    return [name for name in dict.fromkeys(name for name, _ in named) if name in broken]


def not_finite_anywhere(collectives: Collectives, models: Sequence[ShardedModel], names: Sequence[str]) -> list[str]:
    """What ``not_finite`` found on any rank, in the order of ``models``, which are this rank's. Every rank calls it."""
    answers = Answers(collectives, len(names), json.dumps(names[:_NAMES]) if names else "")
    reporting = [rank for rank, number in enumerate(answers.numbers) if number]
    found = [name for ranks in answers.alike(reporting)[:_RANKS] for name in json.loads(answers.words_of(ranks[0]))]
    known = (each.name for model in models for unit in model.units for each in unit.parameters)
    order = {name: at for at, name in enumerate(known)}
    return sorted(dict.fromkeys(found), key=lambda name: order.get(name, len(order)))
