"""The units of a model, as an explanation shows them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import PluginContractError
from ..planning.units import PlannedModule, PlannedUnit
from .explanation import ExplainedParameter, ExplainedUnit
from .plugins import WatchedPolicy


def explained_units(
    planned: Sequence[PlannedModule], policy: WatchedPolicy, layout: str, root: nn.Module
) -> tuple[ExplainedUnit, ...]:
    """The units of ``planned``, in its order. ``layout``: name of the one that the settings name."""
    found: list[ExplainedUnit] = []
    for each in planned:
        own = each.plugins.overrides.get("layout")
        arranged_by = layout if own is None else own.resolved.name
        reason = _reason(each, policy, root)
        found += [_unit(each, unit, arranged_by, reason) for unit in each.units]
    return tuple(found)


def _unit(module: PlannedModule, unit: PlannedUnit, layout: str, reason: str) -> ExplainedUnit:
    spec, flat, dtypes = unit.spec, unit.layout, unit.dtypes
    elements = sum(slot.numel for slot in flat.slots)
    if flat.world_size == 1:
        gather_nbytes = 0
    elif unit.wire is None:
        gather_nbytes = flat.shard_numel * dtypes.compute.itemsize
    else:
        gather_nbytes = unit.wire.nbytes_per_rank
    group = next(group for group in module.groups if group[0].names[0] in spec.parameter_names)
    return ExplainedUnit(
        name=spec.label,
        module_class=type(module.module).__name__,
        parameters=tuple(
            ExplainedParameter(name, slot.shape, slot.offset, slot.by_rows)
            for name, slot in zip(spec.parameter_names, flat.slots, strict=True)
        ),
        elements=elements,
        padding=flat.padded_numel - elements,
        shard_elements=flat.shard_numel,
        trained=group[0].original.requires_grad,
        master=spec.master_dtype,
        compute=dtypes.compute,
        wire=dtypes.wire,
        reduce=dtypes.reduce,
        grad=dtypes.grad,
        gather_nbytes=gather_nbytes,
        encoded=unit.wire is not None,
        layout=layout,
        overrides=dict(module.overrides),
        reason=reason,
    )


def _reason(module: PlannedModule, policy: WatchedPolicy, root: nn.Module) -> str:
    if module.module is root:
        return "what no unit inside of it holds"
    if module.parent is not None:
        return "a large module before or behind all units (split_root)"
    if module.module not in policy.chosen:
        return "the precision leaves it alone"
    where = f"reason of {type(policy.policy).__module__}:{type(policy.policy).__qualname__} for '{module.name}'"
    try:
        answer: object = policy.policy.reason(module.module, module.name)
    except Exception as error:
        raise PluginContractError(f"{where} failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise PluginContractError(f"{where} answered {answer!r}. Return text, empty where there is nothing to say.")
    return answer or "the policy chose it"
