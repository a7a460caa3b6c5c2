"""Weights that linear layers compute with as bytes: which they are, where they lie, and how their caster forms them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedError
from ..interfaces import FormedWeights, LinearForm, PrecisionCaster, UnitSpec
from .answers import form_of, is_packed, yes_or_no
from .layout import FlatLayout, contiguous_stride
from .plan import ManagedParameter, ModuleParameters


def split_by_caster(
    planned: ModuleParameters, group: Sequence[ManagedParameter], caster: PrecisionCaster, unit: UnitSpec, rank: int
) -> list[tuple[ManagedParameter, ...]]:
    """``group``, one of ``planned``, as up to three: parameters in the compute dtype, those that keep their own, and
    weights that ``caster`` forms.

    Weights of a module that was split off are not formed: other modules may compute with them.
    """
    # Most casters answer neither question by themselves, and models have many parameters.
    keeps, forms = _answers(caster, "keeps_dtype"), _answers(caster, "forms")
    parts: tuple[list[ManagedParameter], ...] = [], [], []
    for each in group:
        each.keeps_dtype = keeps and _keeps_dtype(caster, unit, each, rank)
        may_be_formed = forms and planned.parent is None and not each.keeps_dtype and _may_be_formed(each)
        each.formed = may_be_formed and _forms(caster, unit, each, rank)
        parts[1 if each.keeps_dtype else 2 if each.formed else 0].append(each)
    return [tuple(part) for part in parts if part]


def forms_in(
    caster: PrecisionCaster, unit: UnitSpec, layout: FlatLayout, compute: torch.dtype, rank: int
) -> tuple[LinearForm, ...]:
    """The forms of a unit's weights, one a segment of ``layout``.

    Raises:
        ConfigError: the caster does not form weights that are cut so.
        PluginContractError: it answered what its contract does not allow.
        UnsupportedError: a weight is cut along another dimension than the first.
    """
    return tuple(form_of(caster, weights, rank) for weights in weights_in(unit, layout, compute))


def weights_in(unit: UnitSpec, layout: FlatLayout, compute: torch.dtype) -> tuple[FormedWeights, ...]:
    """The weights of ``unit`` as a caster sees them, those of each segment of ``layout`` by themselves."""
    if layout.staged:
        raise UnsupportedError(
            f"'{unit.parameter_names[layout.staged[0]]}' would be cut along dimension "
            f"{layout.slots[layout.staged[0]].dim}, and its caster computes with the bytes of a gather, which lie rank "
            "by rank then. Place it along 0, or take another precision."
        )
    found = []
    for number, numel in enumerate(layout.slices):
        first = layout.world_size * layout.segments[number].start if layout.segments else 0
        inside = [
            (name, slot)
            for name, slot in zip(unit.parameter_names, layout.slots, strict=True)
            if slot.segment == number
        ]
        found.append(
            FormedWeights(
                unit=unit.label,
                names=tuple(name for name, _ in inside),
                shapes=tuple((slot.shape[0], slot.shape[1]) for _, slot in inside),
                offsets=tuple(slot.offset - first for _, slot in inside),
                shards=layout.world_size,
                shard_numel=numel,
                compute=compute,
                device=unit.device,
            )
        )
    return tuple(found)


def _may_be_formed(parameter: ManagedParameter) -> bool:
    original: Any = parameter.original
    if parameter.leaf is not None or parameter.extended or len(parameter.sites) > 1:
        return False
    module, attribute = parameter.sites[0]
    return (
        # Of a subclass, or with a replaced method, the forward computes something else.
        type(module) is nn.Linear
        and attribute == "weight"
        and "forward" not in module.__dict__
        and type(original) is nn.Parameter
        and original.dtype.is_floating_point
        and not is_packed(original.dtype)
        and original.stride() == contiguous_stride(original.shape)
        and original.numel() > 0
    )


def _answers(caster: PrecisionCaster, question: str) -> bool:
    """Whether ``caster`` has a method of its own for ``question``, and not the contract's."""
    return getattr(getattr(caster, question), "__func__", None) is not getattr(PrecisionCaster, question)


def _keeps_dtype(caster: PrecisionCaster, unit: UnitSpec, parameter: ManagedParameter, rank: int) -> bool:
    name = parameter.names[0]
    return yes_or_no(caster, "keeps_dtype", caster.keeps_dtype(unit, name), f"'{name}'", rank)


def _forms(caster: PrecisionCaster, unit: UnitSpec, parameter: ManagedParameter, rank: int) -> bool:
    linear: Any = parameter.sites[0][0]
    name = parameter.names[0].removesuffix("weight").removesuffix(".")
    return yes_or_no(caster, "forms", caster.forms(unit, linear, name), f"'{name}'", rank)
