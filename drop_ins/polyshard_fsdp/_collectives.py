"""The group that FSDP was given, as the engine's ``Collectives``.

Every operation is looked up on ``torch.distributed`` when it is issued, so that a program which replaces
``torch.distributed.reduce_scatter_tensor`` (to count, to check dtypes, to record) sees what FSDP would have shown it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from polyshard.errors import CollectiveError, StateError, UnsupportedError, WorldSizeError
from polyshard.interfaces import Collectives, CollectivesCapabilities, ReduceOp, Work
from polyshard.interfaces.collectives import COMPLETED
from polyshard_backends.nccl import StreamWork
from polyshard_backends.process_group import group_backend
from polyshard_backends.tensors import GROUP_DTYPES, check_source, torch_op
from torch.distributed import distributed_c10d
from typing_extensions import override

#: The names that FSDP's users know, and those that newer versions of torch have for the same.
_NEWER_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}

#: Transports that move tensors of an accelerator through the host: an operation is over when its ``wait`` returns.
_HOST_TRANSPORTS = frozenset({"gloo", "mpi", "ucc"})


@runtime_checkable
class GroupLike(Protocol):
    """The least that a group must know: enough to wrap a model, not to run one."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


def predivide_factor(world_size: int) -> float:
    """By how much gradients are divided before they are summed; the sum is divided by ``world_size / factor``.

    A power of two near the square root of ``world_size``: neither the addends of a low-precision sum underflow, nor
    does the sum overflow.
    """
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


def rank_and_size(group: Any) -> tuple[int, int]:
    """This process's rank in ``group``, and the number of its ranks."""
    if isinstance(group, Collectives):
        return group.rank, group.world_size
    return int(group.rank()), int(group.size())


def collectives_of(group: Any, device: torch.device) -> Collectives:
    """The engine's view of ``group``, which computes on ``device``. Does not communicate, and makes no group.

    ``group`` is a ``torch.distributed.ProcessGroup``; or anything with ``rank()`` and ``size()``, with which a model
    can be wrapped but not run; or a ``Collectives``, which is returned as it is.

    Raises:
        WorldSizeError: ``group`` is none of these, such as the placeholder for a group without this process.
    """
    if isinstance(group, Collectives):
        return group
    if isinstance(group, dist.ProcessGroup | GroupLike):
        return GroupCollectives(group, device)
    raise WorldSizeError(
        f"{group!r} is not a process group that this process is in; give a torch.distributed.ProcessGroup that "
        f"contains this rank"
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Others than those that can be summed are only carried; whoever looks at what is sent sees bf16 as bf16.
    return tensor if tensor.dtype in GROUP_DTYPES else tensor.view(torch.uint8)


@torch.no_grad()
def _divide_(tensor: torch.Tensor, divisor: float) -> None:
    if divisor == 1.0:
        return
    if tensor.is_floating_point():
        tensor.div_(divisor)
    else:
        tensor.div_(divisor, rounding_mode="trunc")


@dataclass(slots=True)
class _HostWork:
    """An operation in flight on another thread, and the local part that follows it."""

    work: Any
    finish: Callable[[], None] | None
    note: str

    def wait(self) -> None:
        if self.work is not None:
            try:
                self.work.wait()
            except RuntimeError as error:
                error.add_note(self.note)
                raise
            self.work = None
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


class GroupCollectives(Collectives):
    """A ``torch.distributed.ProcessGroup``, which FSDP uses alone: gathers and reductions share its communicator.

    Sums and means are taken in the dtype of the tensors, and ``MEAN`` as FSDP takes it: a sum whose addends were
    divided by ``predivide_factor`` and which is divided by the rest. Errors are ``torch.distributed``'s own, which
    scripts written for FSDP expect, with a note that says which operation and rank.

    Args:
        group: a group that contains this process, of any backend; or anything with ``rank()`` and ``size()``, in any
            relation to the processes that there are: a model can be wrapped with it, and every operation raises
            ``StateError``.
        device: where the tensors are. On CUDA, operations run on the stream that is current when they are issued.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank, self._world_size = rank_and_size(group)

    @property
    @override
    def rank(self) -> int:
        return self._rank

    @property
    @override
    def world_size(self) -> int:
        return self._world_size

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @property
    @override
    def process_group(self) -> Any:
        return self._group

    @cached_property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        group, device = self._group, self._device.type
        transport = group_backend(group, device) if isinstance(group, dist.ProcessGroup) else "fake"
        on_streams = device == "cuda" and transport not in _HOST_TRANSPORTS
        return CollectivesCapabilities(
            devices=frozenset({device}),
            dtypes=GROUP_DTYPES,
            reduce_ops=frozenset(ReduceOp),
            widening=False,
            stream_ordered=on_streams,
            capturable=on_streams,
            fixed_addresses=False,
            can_communicate=transport != "fake",
        )

    @override
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> Collectives:
        raise UnsupportedError(
            f"FSDP shards over the group that it was given, and cannot divide it (on rank {self._rank}); pass a "
            f"(shard, replicate) pair of process groups, or a two-dimensional device_mesh"
        )

    @override
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        if out.numel() == 0:
            return COMPLETED
        return self._issue("all_gather_into_tensor", _as_bytes(out), _as_bytes(shard))

    @override
    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        if out.dtype is not full.dtype:
            raise CollectiveError(
                f"reduce_scatter on rank {self._rank}: the result is {out.dtype} and what is sent {full.dtype}; "
                f"FSDP's groups sum in the dtype that travels, so cast before or after the call"
            )
        if full.numel() == 0:
            return COMPLETED
        before, after = self._divisors(full, op)
        _divide_(full, before)
        finish = partial(_divide_, out, after)
        return self._issue("reduce_scatter_tensor", out, full, finish=finish, **_op_option(op))

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        if tensor.numel() == 0:
            return COMPLETED
        before, after = self._divisors(tensor, op)
        _divide_(tensor, before)
        return self._issue("all_reduce", tensor, finish=partial(_divide_, tensor, after), **_op_option(op))

    @override
    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        check_source(src, self._rank, self._world_size)
        if tensor.numel() == 0:
            return COMPLETED
        return self._issue("broadcast", _as_bytes(tensor), group_src=src)

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        answers: list[Any] = [None] * self._world_size
        # Objects travel through the current device, which need not be this group's.
        with self._current_device():
            self._operation("all_gather_object")[0](answers, obj, group=self._group)
        return answers

    @override
    def barrier(self) -> None:
        options: dict[str, Any] = {}
        if self._device.type != "cpu" and self._device.index is not None:
            options["device_ids"] = [self._device.index]
        self._operation("barrier")[0](group=self._group, **options)

    def _divisors(self, addends: torch.Tensor, op: ReduceOp) -> tuple[float, float]:
        if op is not ReduceOp.MEAN:
            return 1.0, 1.0
        # Dividing integers before they are summed would lose more than the last digit of the mean.
        before = predivide_factor(self._world_size) if addends.is_floating_point() else 1.0
        return before, self._world_size / before

    def _current_device(self) -> AbstractContextManager[Any]:
        if self._device.type == "cuda" and self._device.index is not None:
            return torch.cuda.device(self._device)
        return nullcontext()

    def _operation(self, name: str) -> tuple[Callable[..., Any], bool]:
        """The function that ``torch.distributed`` now has under ``name``, and whether it is torch's own.

        The older names of two operations warn in versions that have a newer one, so an older name is called only where
        somebody has replaced it.
        """
        if not isinstance(self._group, dist.ProcessGroup):
            raise StateError(
                f"{name} on rank {self._rank} of {self._world_size}: {self._group!r} is a dummy group, which knows its "
                "rank and size and cannot communicate; give a torch.distributed.ProcessGroup to run the model"
            )
        function: Callable[..., Any] = getattr(dist, name)
        if function is not getattr(distributed_c10d, name):
            return function, False
        newer = _NEWER_NAMES.get(name)
        if newer is not None and hasattr(distributed_c10d, newer):
            function = getattr(dist, newer)
            return function, function is getattr(distributed_c10d, newer)
        return function, True

    def _issue(
        self, name: str, *tensors: torch.Tensor, finish: Callable[[], None] | None = None, **options: Any
    ) -> Work:
        function, is_torchs = self._operation(name)
        on_streams = self.capabilities.stream_ordered
        # A replacement is called as FSDP calls it, and need not know of asynchronous operations.
        if is_torchs and not on_streams:
            options["async_op"] = True
        note = f"in {name} of FSDP on rank {self._rank} of {self._world_size}"
        try:
            work = function(*tensors, group=self._group, **options)
        except RuntimeError as error:
            error.add_note(note)
            raise
        if not on_streams:
            return _HostWork(work, finish, note)
        if finish is not None:
            finish()
        return StreamWork()


def _op_option(op: ReduceOp) -> dict[str, Any]:
    # FSDP names no operation for a sum, and replacements of the function need not take one. A mean is a divided sum.
    return {} if op in (ReduceOp.SUM, ReduceOp.MEAN) else {"op": torch_op(op)}
