"""The units of a model, as an explanation shows them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import PluginContractError
from ..planning.draft import Draft, DraftedUnit
from ..setup.shard import Drafted
from .explanation import ExplainedParameter, ExplainedUnit
from .plugins import WatchedPolicy


def explained_units(
    drafted: Sequence[Drafted], policy: WatchedPolicy, layout: str, root: nn.Module
) -> tuple[ExplainedUnit, ...]:
    """The units of ``drafted``, in the order of its stages. ``layout``: name of the one that the settings name."""
    found: list[ExplainedUnit] = []
    for each in drafted:
        own = each.overrides.get("layout")
        arranged_by = layout if own is None else own.resolved.name
        reason = _reason(each.draft, policy, root)
        found += [_unit(each.draft, unit, arranged_by, reason) for unit in each.draft.units]
    return tuple(found)


def _unit(draft: Draft, unit: DraftedUnit, layout: str, reason: str) -> ExplainedUnit:
    spec, flat, dtypes = unit.spec, unit.layout, unit.dtypes
    elements = sum(slot.numel for slot in flat.slots)
    if flat.world_size == 1:
        gather_nbytes = 0
    elif unit.wire is None:
        gather_nbytes = flat.shard_numel * dtypes.compute.itemsize
    else:
        gather_nbytes = unit.wire.nbytes_per_rank
    group = next(group for group in draft.module_state.groups if group[0].names[0] in spec.parameter_names)
    return ExplainedUnit(
        name=spec.label,
        module_class=type(draft.module_state.module).__name__,
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
        overrides=dict(draft.module_state.overrides),
        reason=reason,
    )


def _reason(draft: Draft, policy: WatchedPolicy, root: nn.Module) -> str:
    stage = draft.module_state
    if stage.module is root:
        return "what no unit inside of it holds"
    if stage.parent is not None:
        return "a large module before or behind all units (split_root)"
    if stage.module not in policy.chosen:
        return "the precision leaves it alone"
    where = f"reason of {type(policy.policy).__module__}:{type(policy.policy).__qualname__} for '{stage.name}'"
    try:
        answer: object = policy.policy.reason(stage.module, stage.name)
    except Exception as error:
        raise PluginContractError(f"{where} failed: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str):
        raise PluginContractError(f"{where} answered {answer!r}. Return text, empty where there is nothing to say.")
    return answer or "the policy chose it"
