"""Values that are infinite or no number, which a checkpoint would hand on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..runtime.root import Root
from ..state.agreement import Answers
from ..state.optimizers import Joint
from ..state.places import Holding, holdings

#: Names that one rank tells, and ranks that are asked.
_NAMES, _RANKS = 64, 4


def not_finite(owner: Root, joint: Joint | None) -> list[str]:
    """Names of the model's sharded parameters and of the optimizer's state with such elements on this rank.

    Looks at each unit's flat master and at each tensor of the state once, and waits for the device once. Buffers are
    not looked at: masks are infinite on purpose.
    """
    units = [unit for unit in owner.units if _has_numbers(unit.master)]
    states = [] if joint is None else list(_states(joint))
    sound = _are_finite([*(unit.master for unit in units), *(values for *_, values in states)])
    found = [
        parameter.names[0]
        for unit, is_sound in zip(units, sound, strict=False)
        if not is_sound
        for parameter, piece in zip(unit.parameters, unit.originals.tensors, strict=True)
        if piece.numel() and not _are_finite([piece])[0]
    ]
    broken = [state for state, is_sound in zip(states, sound[len(units) :], strict=True) if not is_sound]
    if joint is not None and broken:
        held = holdings(owner, joint.groups)
        found += [f"{key} of {name}" for parameter, key, values in broken for name in _named(held[parameter], values)]
    return list(dict.fromkeys(found))


def of_all(owner: Root, names: Sequence[str]) -> list[str]:
    """What ``not_finite`` found on any rank: nothing where it found nothing on all. Every rank calls it."""
    answers = Answers(owner.collectives, len(names), json.dumps(names[:_NAMES]) if names else "")
    telling = [rank for rank, number in enumerate(answers.numbers) if number]
    found = [name for ranks in answers.alike(telling)[:_RANKS] for name in json.loads(answers.words_of(ranks[0]))]
    order = {parameter.names[0]: at for at, parameter in enumerate(p for unit in owner.units for p in unit.parameters)}
    return sorted(dict.fromkeys(found), key=lambda name: order.get(name, len(order)))


def _states(joint: Joint) -> Iterator[tuple[nn.Parameter, str, torch.Tensor]]:
    for group in joint.groups:
        for parameter in group["params"]:
            for key, value in joint.state_of(parameter).items():
                for values in _plain(value):
                    yield parameter, key, values


def _plain(value: object) -> Iterator[torch.Tensor]:
    """The tensors with numbers that ``value`` is made of: of eight bits, say, those of its scales."""
    if not isinstance(value, torch.Tensor):
        return
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _plain(getattr(value, name))
    elif _has_numbers(value):
        yield value.detach()


def _has_numbers(values: torch.Tensor) -> bool:
    return values.numel() > 0 and values.is_floating_point()


def _named(holding: Holding, values: torch.Tensor) -> list[str]:
    """Which of the parameters that ``holding`` stands for have such elements in ``values``, of their state."""
    if values.shape != holding.parameter.shape or not holding.places:
        return list(holding.names)
    return [
        name
        for name, part in holding.parts(values).items()
        if not all(_are_finite([chunk.view for chunk in part.chunks if chunk.view.numel()]))
    ]


@torch.no_grad()
def _are_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    # By the least and the largest of each, for which no memory is taken: a shard fills much of its device.
    ends: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        # Of eight bits torch computes nothing.
        least, most = torch.aminmax(tensor.to(torch.float32) if tensor.element_size() == 1 else tensor)
        ends.setdefault((least.device, least.dtype), []).extend(((index, least), (index, most)))
    result = [True] * len(tensors)
    for found in ends.values():
        flags = torch.isfinite(torch.stack([end for _, end in found])).tolist()
        for (index, _), value in zip(found, flags, strict=True):
            result[index] &= value
    return result
