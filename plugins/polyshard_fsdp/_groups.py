"""The ranks that an instance shards over, and those that hold the same shard, from the constructor's arguments."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from polyshard.errors import ConfigError, WorldSizeError
from polyshard.interfaces import Collectives
from torch.distributed.device_mesh import DeviceMesh

from ._collectives import GroupLike, rank_and_size
from .api import ShardingStrategy

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]


@dataclass(frozen=True)
class Groups:
    """The ranks that shard one instance's parameters, and those that hold the same shard."""

    process_group: Any
    """Shards lie over it: a ``ProcessGroup``, a ``Collectives``, or an object with ``rank()`` and ``size()``."""
    replicate_group: Any | None
    """Gradients are also averaged over it; None for strategies that are not hybrid."""
    rank: int
    """This process's rank in ``process_group``."""
    world_size: int
    """Number of ranks in ``process_group``."""
    device_mesh: DeviceMesh | None
    """The mesh that the groups were taken from, if any."""
    given: Any
    """The constructor's ``process_group``."""

    def for_children(self) -> Any:
        """The ``process_group`` argument with which modules inside use the same groups.

        Each instance would make groups of its own where a hybrid strategy was given none, and instances of one model
        must share theirs.
        """
        if self.replicate_group is None or self.device_mesh is not None:
            return self.given
        return self.process_group, self.replicate_group


def resolve_groups(
    strategy: ShardingStrategy | None,
    process_group: Any,
    device_mesh: DeviceMesh | None,
    policy: object | None,
    device_type: str,
) -> Groups:
    """The groups that the constructor's arguments name.

    Communicates only where a hybrid strategy is given neither groups nor a mesh: groups within and across nodes are
    then made, which all ranks do together.

    Args:
        strategy: None for ``FULL_SHARD``.
        process_group: one group; a (shard, replicate) pair for hybrid strategies; or None for the default group.
        device_mesh: one-dimensional, or two-dimensional (replicate, shard) for hybrid strategies.
        policy: the ``auto_wrap_policy``; wrapping by hand with a hybrid strategy must say which groups are meant.
        device_type: where the model computes, to count the devices of a node.

    Raises:
        ConfigError: groups and mesh are both given, of a wrong kind, or missing.
        WorldSizeError: this process is in none of the given groups, or nodes do not divide the ranks.
    """
    if process_group is not None and device_mesh is not None:
        raise ConfigError(
            "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them."
        )
    replicate_group: Any | None = None
    given = process_group
    if strategy not in HYBRID_SHARDING_STRATEGIES:
        if device_mesh is not None:
            process_group = device_mesh.get_group(mesh_dim=0)
        elif process_group is None:
            process_group = _default_group()
    elif device_mesh is not None:
        if not isinstance(device_mesh, DeviceMesh) or device_mesh.ndim != 2:
            raise ConfigError(f"Expected device_mesh to have ndim=2 but got {getattr(device_mesh, 'ndim', None)}")
        replicate_group, process_group = device_mesh.get_group(mesh_dim=0), device_mesh.get_group(mesh_dim=1)
    elif process_group is not None:
        if not (isinstance(process_group, tuple) and len(process_group) == 2 and all(map(_is_group, process_group))):
            raise ConfigError(
                "Expected process_group to be passed in as either None or "
                f"Tuple[dist.ProcessGroup, dist.ProcessGroup] but got {type(process_group)}; {strategy} shards over "
                f"the first group and replicates over the second"
            )
        process_group, replicate_group = process_group
    elif policy is None:
        raise ConfigError(
            f"Manual wrapping with {strategy} requires explicit specification of process group or device_mesh."
        )
    else:
        process_group, replicate_group = _init_intra_and_inter_node_groups(
            _default_group(), _devices_per_node(device_type)
        )
    rank, world_size = _place_in(process_group)
    return Groups(process_group, replicate_group, rank, world_size, device_mesh, given)


def _is_group(group: object) -> bool:
    return isinstance(group, dist.ProcessGroup | Collectives | GroupLike)


def _place_in(group: Any) -> tuple[int, int]:
    if not _is_group(group):
        raise WorldSizeError(
            f"{group!r} is not a process group that this process is in; give one torch.distributed.ProcessGroup that "
            f"contains this rank (a pair of groups is for hybrid strategies)"
        )
    return rank_and_size(group)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        raise ConfigError(
            "Default process group has not been initialized, please make sure to call init_process_group, or pass "
            "process_group or device_mesh"
        )
    return group


def _devices_per_node(device_type: str) -> int:
    """Ranks that share a node, as the launcher says, or else one for each device that this process sees."""
    world_size = dist.get_world_size()
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    if launched is not None:
        return int(launched)
    # Hosts without accelerators cannot tell how many ranks they have: all are taken to be on one.
    return min(world_size, torch.accelerator.device_count()) if device_type != "cpu" else world_size


def _init_intra_and_inter_node_groups(
    global_process_group: dist.ProcessGroup, num_devices_per_node: int
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """New groups of this rank's node, and of the ranks at the same place in every node. All ranks call it together.

    Ranks are taken to be numbered node by node, ``num_devices_per_node`` each.

    Raises:
        WorldSizeError: the nodes do not divide the ranks.
    """
    ranks = dist.get_process_group_ranks(global_process_group)
    if num_devices_per_node < 1 or len(ranks) % num_devices_per_node:
        raise WorldSizeError(
            f"{len(ranks)} ranks cannot be divided over nodes of {num_devices_per_node}; start as many ranks on every "
            f"node, or pass process_group=(shard group, replicate group)"
        )
    backend = dist.get_backend_config(global_process_group)
    nodes = [ranks[start : start + num_devices_per_node] for start in range(0, len(ranks), num_devices_per_node)]
    # Every rank makes every group, in the same order: making one is collective over the whole job.
    intra = [dist.new_group(node, backend=backend) for node in nodes]
    inter = [dist.new_group(list(peers), backend=backend) for peers in zip(*nodes, strict=True)]
    node, place = divmod(global_process_group.rank(), num_devices_per_node)
    return intra[node], inter[place]
