"""The outermost FSDP instance, found when it is first used, and what it shares with those inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyshard.engine.planning.ranks import RankGrid
from polyshard.engine.step.outputs import refuse_escape
from polyshard.engine.step.root import Root
from polyshard.engine.step.stage import Stage
from polyshard.engine.transport.lanes import lanes_for
from polyshard.errors import ConfigError, DeviceError, StateError, StepAssertionError
from polyshard.events import Events
from torch import nn

from . import _runtime_utils
from ._collectives import collectives_of
from ._common_utils import clean_tensor_name
from ._exec_order import CheckedSchedule, ForwardOrder, UnitSchedule, checks_order
from ._idle import IdleUnit
from ._init_utils import HYBRID_SHARDING_STRATEGIES
from ._traversal_utils import _get_fsdp_states
from ._unit import FlatUnit, misplaced_offload

if TYPE_CHECKING:
    from ._flat_param import FlatParamHandle
    from ._state import FSDPInstance

#: Where `_apply_optimizer_in_backward` leaves a parameter's optimizers.
_OPTIMIZERS = "_in_backward_optimizers"


class FSDPRoot(Root):
    """The engine's root over FSDP instances."""

    instances: tuple[FSDPInstance, ...] = ()
    #: None unless the debug level asks for checks.
    order: ForwardOrder | None = None
    #: Parameters that step as soon as their gradients are reduced.
    stepping: tuple[nn.Parameter, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: list[IdleUnit] = []

    def leave_idle(self, idle: IdleUnit) -> None:
        """A unit takes part in this backward's reductions although this rank has no gradient for it."""
        self._idle.append(idle)

    def refuse_escape(self, output: object) -> None:
        """As the engine's, but for what stays whole until backward ends, as FSDP's root does."""
        units = tuple(unit for stage in self.stages if not stage.awaits_backward for unit in stage.units)
        refuse_escape(units, output, "", self.rank)

    def end_backward(self) -> None:
        super().end_backward()
        for idle in self._idle:
            idle.settle()
        self._idle.clear()
        if self.synchronises and self.stepping:
            _step_in_backward(self.stepping)
        if self.order is not None:
            self.order.end_iteration()
        if not self.synchronises:
            for unit in self.units:
                assert isinstance(unit, FlatUnit)
                unit.flat_gradients.show_unreduced()

    def _turn(self) -> None:
        """Hand reduced gradients over while parameters are shards, which those of the other forward gather again."""
        self.bucket.flush()
        self.lanes.drain()

    def _presence_of_gradients(self) -> None:
        """A parameter that was not used in a unit that was has a gradient of zeros in FSDP; of units, see ``_idle``."""

    def abandon(self) -> None:
        super().abandon()
        self._idle.clear()
        if self.order is not None:
            self.order.abandon()


def establish_root(instance: FSDPInstance) -> FSDPRoot:
    """Make ``instance`` the root of every instance inside it.

    Raises:
        StepAssertionError: one inside was used as a root before.
        ConfigError: they differ in a setting that must be the same, or hybrid ones in their process groups.
        StateError: a flat parameter has an optimizer that steps in backward.
        DeviceError: parameters are not where they must be for training.
    """
    instances: list[FSDPInstance] = _get_fsdp_states(instance._stage.module)
    _refuse_roots_inside(instance, instances)
    _refuse_heterogeneous(instances)
    _refuse_other_hybrid_groups(instances)
    _refuse_stepping_flat(instances)
    _refuse_misplaced(instances)
    _share_collectives(instances)
    world = collectives_of(instance.process_group, instance.compute_device)
    names = {module: name for name, module in instance._stage.module.named_modules()}
    stages: list[Stage] = []
    for each in instances:
        name = clean_tensor_name(f"{names[each._stage.module]}.").rstrip(".")
        each._stage.join(name, None)
        stages.append(each._stage)
    ahead = 1 if instance.forward_prefetch else 0
    schedule = UnitSchedule(ahead, 1)
    order = ForwardOrder(_names_of_parameters(instances), world) if checks_order() and world.world_size > 1 else None
    if order is not None:
        handles: dict[Stage, FlatParamHandle] = {
            each._stage: each._handle for each in instances if each._handle is not None
        }
        schedule = CheckedSchedule(ahead, 1, order, handles)
    root = FSDPRoot(
        world,
        stages,
        lanes_for(world),
        schedule,
        Events([]),
        check_ranks=False,
    )
    root.instances = tuple(instances)
    root.order = order
    root.stepping = tuple(
        parameter
        for each in instances
        if each._handle is not None
        for parameter in (managed.original for managed in each._handle.parameters)
        if hasattr(parameter, _OPTIMIZERS)
    )
    for each in instances:
        each._is_root = each is instance
        each._root = root
    return root


def _refuse_roots_inside(instance: FSDPInstance, instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each is not instance and each._is_root:
            raise StepAssertionError(
                "Non-root FSDP instance's `_is_root` should not have been set yet or should have been set to `False`: "
                f"an instance inside {type(instance._stage.inner).__name__} ran by itself on rank {instance.rank}. Run "
                "the outermost instance first."
            )


def _refuse_heterogeneous(instances: Sequence[FSDPInstance]) -> None:
    for attribute in _runtime_utils.HOMOGENEOUS_ATTR_NAMES:
        values = {getattr(each, attribute) for each in instances}
        if len(values) > 1:
            raise ConfigError(
                f"Expects one homogeneous value for {attribute} but got {values} (rank {instances[0].rank}). Give "
                "every instance of the model the same."
            )


def _refuse_other_hybrid_groups(instances: Sequence[FSDPInstance]) -> None:
    hybrid = [each for each in instances if each.sharding_strategy in HYBRID_SHARDING_STRATEGIES]
    for each in hybrid:
        for kind, group, wanted in (
            ("intra", each.process_group, hybrid[0].process_group),
            ("inter", each._inter_node_pg, hybrid[0]._inter_node_pg),
        ):
            if group is not wanted:
                raise ConfigError(
                    f"{each.sharding_strategy} {kind}-node process groups do not match: '{each._stage.name}' has "
                    f"another than '{hybrid[0]._stage.name}' (rank {each.rank}). Give every instance of the model the "
                    "same pair of groups, or the same device mesh."
                )


def _refuse_stepping_flat(instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each._handle is not None and not each._use_orig_params and hasattr(each._handle.flat_param, _OPTIMIZERS):
            raise StateError(
                "FSDP optimizer in backward only supported with use_orig_params=True! "
                f"'{each._handle.flat_param._fqns[0]}' on rank {each.rank} is part of a flat parameter that has one."
            )


def _step_in_backward(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        # Without a gradient there is nothing of it on this rank, or the backward did not reach it.
        if parameter.grad is None:
            continue
        for optimizer in getattr(parameter, _OPTIMIZERS, ()):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def _names_of_parameters(instances: Sequence[FSDPInstance]) -> dict[FlatParamHandle, list[str]]:
    names: dict[FlatParamHandle, list[str]] = {}
    for each in instances:
        if each._handle is not None:
            prefix = f"{each._stage.name}." if each._stage.name else ""
            names[each._handle] = [prefix + name for name in each._handle.flat_param._fqns]
    return names


def _refuse_misplaced(instances: Sequence[FSDPInstance]) -> None:
    for each in instances:
        if each._handle is None:
            continue
        device, name = each._handle.flat_param.device, each._handle.flat_param._fqns[0]
        if each.cpu_offload.offload_params:
            if device.type != "cpu":
                raise misplaced_offload(device, name, each.rank)
        elif device != each.compute_device:
            raise DeviceError(
                f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move the module to "
                f"{each.compute_device} before training. The first of them is '{name}' (rank {each.rank})."
            )


def _share_collectives(instances: Sequence[FSDPInstance]) -> None:
    # One object for each group of ranks: norms then take one reduction for all units of a group.
    grids: dict[tuple[Any, Any, bool], RankGrid] = {}
    for each in instances:
        if each._handle is None:
            continue
        unit = each._handle.unit
        assert unit is not None
        key = (each.process_group, each._groups.replicate_group, unit.grid.shard is None)
        unit.grid = unit.gradients.grid = grids.setdefault(key, unit.grid)
