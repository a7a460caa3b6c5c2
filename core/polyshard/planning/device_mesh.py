"""A ``DeviceMesh`` over any collectives, for ``DTensor``: over their process group, or over themselves shown as one.

Collectives may be behind no process group of torch's: pretended ranks, threads as ranks, a stranger's transport. Here
they are shown as one, with the operations that ``DTensor`` and the functions of torch's over it use: norms and other
reductions, ``full_tensor``, ``redistribute``, ``clip_grad_norm_``, ``GradScaler``, state dicts. ``distribute_tensor``
asks torch's default group which rank it is, unless ``src_data_rank=None`` lets each rank cut what it has; so does
``set_model_state_dict`` with whole tensors.

Imported late: with ``torch.distributed.tensor`` it takes longer than the rest of the package.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from .. import _torch_private
from ..errors import CollectiveError
from ..interfaces import Collectives, ReduceOp, Work

_OPS = (
    (dist.ReduceOp.SUM, ReduceOp.SUM),
    (dist.ReduceOp.AVG, ReduceOp.MEAN),
    (dist.ReduceOp.MAX, ReduceOp.MAX),
    (dist.ReduceOp.MIN, ReduceOp.MIN),
)
_numbers = itertools.count()
#: By the ids of collectives, which their mesh keeps alive.
_meshes: WeakValueDictionary[tuple[int, ...], DeviceMesh] = WeakValueDictionary()


def mesh_over(collectives: Collectives | None, device_type: str) -> DeviceMesh:
    """The ranks of ``collectives`` as a mesh of one dimension; this rank alone where None.

    Of their own process group where they have one. Else the mesh is the same object for the same collectives, and its
    ranks count from 0, whichever others there are.
    """
    if collectives is None:
        return _meshed([AloneGroup(0, 1)], device_type, torch.arange(1), 0, None)
    group = collectives.process_group
    if isinstance(group, dist.ProcessGroup):
        return DeviceMesh.from_group(group, device_type)
    return grid_over([collectives], device_type, torch.arange(collectives.world_size), collectives.rank, None)


def grid_over(
    groups: Sequence[Collectives | dist.ProcessGroup],
    device_type: str,
    ranks: torch.Tensor,
    rank: int,
    names: tuple[str, ...] | None,
) -> DeviceMesh:
    """A mesh of ``ranks``, with a dimension for each of ``groups``, which are those that ``rank`` is among.

    The same object for the same collectives, as ``mesh_over``.
    """
    known = tuple(map(id, groups))
    mesh = _meshes.get(known)
    if mesh is None:
        shown = list(map(_shown, groups))
        if any(isinstance(each, _NamedGroup) for each in shown):
            mesh = _meshed(shown, device_type, ranks, rank, names)
        else:
            mesh = DeviceMesh.from_group(shown, device_type, mesh=ranks, mesh_dim_names=names)
        _meshes[known] = mesh
    return mesh


def _shown(group: Collectives | dist.ProcessGroup) -> dist.ProcessGroup:
    own = group if isinstance(group, dist.ProcessGroup) else group.process_group
    return own if isinstance(own, dist.ProcessGroup) else CollectivesGroup(group)  # type: ignore[arg-type]


def _meshed(
    groups: Sequence[dist.ProcessGroup],
    device_type: str,
    ranks: torch.Tensor,
    rank: int,
    names: tuple[str, ...] | None,
) -> DeviceMesh:
    own = [group for group in groups if isinstance(group, _NamedGroup)]
    for group in own:
        _torch_private.remember_group(group)
    mesh: DeviceMesh = _torch_private.mesh_over(_Mesh, groups, device_type, ranks, rank, names)
    for group in own:
        # Torch keeps the meshes that it planned operations for.
        finalize(mesh, _torch_private.forget_group, group.group_name)
    return mesh


class _Mesh(DeviceMesh):
    """Asks itself for its rank, where ``DeviceMesh`` asks torch's default group."""

    @override
    def get_rank(self) -> int:
        return int(self.mesh[tuple(self.get_coordinate() or ())])

    @override
    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        names = self.mesh_dim_names or ()
        dim = names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0
        return (self.get_coordinate() or [0])[dim]


class _NamedGroup(dist.ProcessGroup):
    """The names are those that torch calls."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, unused-ignore]
        self._name = f"polyshard_{next(_numbers)}"

    @property
    @override
    def group_name(self) -> str:  # type: ignore[override, unused-ignore]
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return "polyshard"


class AloneGroup(_NamedGroup):
    """One rank, which sends nothing."""

    @override
    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override, unused-ignore]
        return _Ended(tensors)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override, unused-ignore]
        return _Ended(tensors)

    @override
    def allgather_into_tensor_coalesced(
        self, outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], options: Any = None
    ) -> dist.Work:
        for out, shard in zip(outs, shards, strict=True):
            out.copy_(shard.view(out.shape))
        return _Ended(outs)


class CollectivesGroup(_NamedGroup):
    """Collectives as a process group. Operations end before they return, or are ordered on the current stream.

    Tensors may have any shape, and need not be contiguous where they are read.
    """

    def __init__(self, among: Collectives) -> None:
        super().__init__(among.rank, among.world_size)
        self._among = among

    @property
    def collectives(self) -> Collectives:
        return self._among

    @override
    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> dist.Work:  # type: ignore[override, unused-ignore]
        op = ReduceOp.SUM if options is None else self._op_of(options)
        return self._ended((self._among.all_reduce(each, op=op) for each in tensors), tensors)

    @override
    def allgather_into_tensor_coalesced(
        self, outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], options: Any = None
    ) -> dist.Work:
        """Fill each of ``outs`` with the tensor of ``shards`` that every rank has, in rank order."""
        pairs = zip(outs, shards, strict=True)
        return self._ended((self._among.all_gather(out.view(-1), _flat(shard)) for out, shard in pairs), outs)

    @override
    def reduce_scatter_tensor_coalesced(  # type: ignore[override, unused-ignore]
        self, outs: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor], options: Any
    ) -> dist.Work:
        """Fill each of ``outs`` with this rank's slice of what every rank's tensor of ``fulls`` is reduced to."""
        op = self._op_of(options)
        # A reduction may overwrite what it reads.
        pairs = zip(outs, fulls, strict=True)
        works = (self._among.reduce_scatter(out.view(-1), full.clone().view(-1), op=op) for out, full in pairs)
        return self._ended(works, outs)

    @override
    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> dist.Work:  # type: ignore[override, unused-ignore]
        return self._ended((self._among.broadcast(each, options.rootRank) for each in tensors), tensors)

    @override
    def alltoall_base(
        self,
        out: torch.Tensor,
        source: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        options: Any = None,
    ) -> dist.Work:
        """Send each rank a block of rows of ``source``; splits count rows, equal ones where there are none.

        Raises CollectiveError: the collectives do not exchange.
        """
        if not self._among.capabilities.exchanges:
            raise CollectiveError(
                f"{type(self._among).__name__} has no all_to_all, which a DTensor needs to change the dimension that "
                f"it is cut along (rank {self._among.rank}). Go by Replicate(), or choose other collectives."
            )
        blocks = [
            [rows * (tensor.numel() // max(1, tensor.shape[0])) for rows in splits or self._equal(tensor)]
            for tensor, splits in ((out, out_splits), (source, in_splits))
        ]
        work = self._among.all_to_all(out.view(-1), blocks[0], _flat(source), blocks[1])
        return self._ended([work], [out])

    def _equal(self, tensor: torch.Tensor) -> list[int]:
        ranks = self._among.world_size
        return [tensor.shape[0] // ranks] * ranks

    def _op_of(self, options: Any) -> ReduceOp:
        for theirs, ours in _OPS:
            if options.reduceOp == theirs:
                return ours
        raise CollectiveError(
            f"Collectives have no reduction {options.reduceOp} (rank {self._among.rank}). Use sum, avg, max or min."
        )

    def _ended(self, works: Iterable[Work], tensors: Sequence[torch.Tensor]) -> dist.Work:
        for work in works:
            work.wait()
        return _Ended(tensors)


class _Ended(dist.Work):
    """An operation that has ended, on the current stream."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    @override
    def wait(self, timeout: Any = None) -> bool:
        return True

    @override
    def is_completed(self) -> bool:
        return True

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    @override
    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1)
