"""The outermost FSDP instance, found when it is first used, and what it shares with those inside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyshard.engine.lanes import lanes_for
from polyshard.engine.ranks import RankGrid
from polyshard.engine.root import Root
from polyshard.engine.schedule import Schedule
from polyshard.engine.stage import Stage
from polyshard.errors import ConfigError, DeviceError, StepAssertionError
from polyshard.events import Events

from ._collectives import collectives_of
from ._common_utils import clean_tensor_name
from ._traversal_utils import _get_fsdp_states
from ._unit import FlatUnit, misplaced_offload

if TYPE_CHECKING:
    from ._state import FSDPInstance

#: What all instances under one root must have in common.
_HOMOGENEOUS = ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval")


class FSDPRoot(Root):
    """The engine's root over FSDP instances."""

    instances: tuple[FSDPInstance, ...] = ()

    def end_backward(self) -> None:
        super().end_backward()
        if not self.synchronises:
            for unit in self.units:
                assert isinstance(unit, FlatUnit)
                unit.flat_gradients.show_unreduced()


def establish_root(instance: FSDPInstance) -> FSDPRoot:
    """Make ``instance`` the root of every instance inside it.

    Raises:
        StepAssertionError: one inside was used as a root before.
        ConfigError: they differ in a setting that must be the same.
        DeviceError: parameters are not where they must be for training.
    """
    instances: list[FSDPInstance] = _get_fsdp_states(instance._stage.module)
    _refuse_roots_inside(instance, instances)
    _refuse_heterogeneous(instances)
    _refuse_misplaced(instances)
    _share_collectives(instances)
    world = collectives_of(instance.process_group, instance.compute_device)
    names = {module: name for name, module in instance._stage.module.named_modules()}
    stages: list[Stage] = []
    for each in instances:
        name = clean_tensor_name(f"{names[each._stage.module]}.").rstrip(".")
        each._stage.join(name, None)
        stages.append(each._stage)
    root = FSDPRoot(
        world,
        stages,
        lanes_for(world),
        Schedule(1 if instance.forward_prefetch else 0, 1),
        Events([]),
        check_ranks=False,
    )
    root.instances = tuple(instances)
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
    for attribute in _HOMOGENEOUS:
        values = {getattr(each, attribute) for each in instances}
        if len(values) > 1:
            raise ConfigError(
                f"Expects one homogeneous value for {attribute} but got {values} (rank {instances[0].rank}). Give "
                "every instance of the model the same."
            )


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
                f"An FSDP-managed module unexpectedly has parameters on {device}: '{name}' on rank {each.rank}. Make "
                f"sure to move the module to {each.compute_device} before training."
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
