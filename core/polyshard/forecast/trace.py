"""x"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..api import no_sync, outermost_root, report, shard
from ..config import PluginSpec, ShardConfig
from ..errors import ConfigError, PolyshardError, UnsupportedError
from ..functions.memory import MemoryReport
from ..interfaces import COMPLETED, BufferRole, Collectives, CollectivesCapabilities, ReduceOp, Work
from ..runtime.gather import Gatherable
from ..runtime.root import Root
from ..runtime.streams import HostLanes, Reduction
from ._torch_private import TorchDispatchMode, tree_leaves
from .kernels import fused_as_on_cuda, note_operation
from .recording import Issued, Kind, Ledger, MemoryTimeline, Operation, Part, Recorder, Span, Stream
from .workload import Batch, OptimizerModel


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What one step issues, and what it holds meanwhile."""

    issued: tuple[Issued, ...]
    memory: MemoryTimeline


class TracedModel:
    """A model on the meta device, sharded as ``config`` says for rank 0 of ``world_size``.

    Args:
        model: on the meta device; it is sharded in place.
        optimizer: steps once a step.
        workspace_nbytes: what libraries hold for good.
        microbatches: forwards and backwards of a step; all but the last are under ``polyshard.no_sync``.

    Raises:
        ConfigError: as ``polyshard.shard``, or the offload manager's memory is not known.
        ShardingError: as ``polyshard.shard``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ShardConfig,
        world_size: int,
        optimizer: OptimizerModel,
        workspace_nbytes: int = 0,
        microbatches: int = 1,
    ) -> None:
        if microbatches < 1:
            raise ConfigError(f"microbatches is {microbatches}; give 1 or more.")
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}; give the number of ranks, 1 or more.")
        self.recorder = Recorder()
        self.notes: list[str] = []
        collectives = NotedCollectives(self.recorder, Span(world_size))
        with warnings.catch_warnings():
            # That of a single rank, which is as planned.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            self.model = shard(model, self._on_meta(config, collectives), initializer=_leave)
        self.root: Root = outermost_root(self.model, "plan")
        self.root.use_lanes(NotedLanes(self.recorder))
        self._optimizer = optimizer
        self._microbatches = microbatches
        self._ledger = Ledger(self.recorder)
        self._workspace_nbytes = workspace_nbytes
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._warm = False
        masters = [unit.master for unit in self.root.units]
        self._ledger.see([*masters, *self.model.parameters()], Kind.PARAMETERS)
        self._ledger.see(self.model.buffers(), Kind.BUFFERS)

    @property
    def report(self) -> MemoryReport:
        """What the layout says."""
        return report(self.model)

    @property
    def standing_nbytes(self) -> Mapping[Kind, int]:
        """What is there throughout, and no tensor on the meta device stands for."""
        return {
            Kind.OPTIMIZER: self._optimizer.standing_nbytes(self._parameters),
            Kind.BUFFERS: self._workspace_nbytes,
        }

    def step(self, batch: Batch) -> TracedStep:
        """Forward, backward, optimizer and ``zero_grad``, as they repeat.

        Raises:
            UnsupportedError: the model reads values, or does what the meta device cannot.
            ConfigError: its forward does not take the batch, or returns no loss.
        """
        self._ledger.see(_tensors((batch.args, batch.kwargs)), Kind.BUFFERS)
        with ExitStack() as watching:
            watching.enter_context(fused_as_on_cuda(self.recorder, self._branched))
            watching.enter_context(_Watch(self.recorder, self._ledger))
            if not self._warm:
                # The first forward records the order that later ones prefetch by; the first step makes states.
                self._once(batch)
                self._ledger.find_resized()
                self._warm = True
            self.recorder.clear()
            self._ledger.restart()
            self._once(batch)
        return TracedStep(tuple(self.recorder.issued), self._ledger.timeline(self.standing_nbytes))

    def _branched(self) -> None:
        note = (
            "The model branches on values of tensors, which are not known: each branch was planned as if its condition "
            "held."
        )
        if note not in self.notes:
            self.notes.append(note)

    def _once(self, batch: Batch) -> None:
        for _ in range(self._microbatches - 1):
            with no_sync(self.model):
                self._microbatch(batch)
        self._microbatch(batch)
        self._name_buffers()
        self.recorder.begin(Part.OPTIMIZER)
        self._optimizer.step(self._parameters, self.recorder, self._ledger)
        for parameter in self._parameters:
            parameter.grad = None

    def _microbatch(self, batch: Batch) -> None:
        """One forward and its backward."""
        recorder, ledger = self.recorder, self._ledger
        recorder.begin(Part.FORWARD)
        loss = self._forward(batch)
        ledger.end_forward()
        recorder.begin(Part.BACKWARD)
        try:
            torch.autograd.backward(loss)
        except PolyshardError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise _untraceable("backward", self.model, error) from error
        del loss
        ledger.look_again()

    def _forward(self, batch: Batch) -> torch.Tensor:
        try:
            output = self.model(*batch.args, **batch.kwargs)
        except PolyshardError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise _untraceable("forward", self.model, error) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"the forward of {type(self.model).__name__} raised {type(error).__name__}: {error}. Give a batch that "
                "it takes."
            ) from error
        return _loss_of(output, type(self.model).__name__)

    def _name_buffers(self) -> None:
        """Say what is what, of storages that streams and parts do not tell apart."""
        ledger = self._ledger
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        ledger.name(gradients, Kind.GRADIENTS)
        for unit in self.root.units:
            if unit.permanent:
                continue
            ledger.name([unit.buffer.flat], Kind.GATHERED)
            if unit.trainable and unit.grid.shard is not None:
                wholes = [unit.gradients.input.buffer, unit.gradients.input.sum]
                ledger.name([whole.flat for whole in wholes if whole is not None], Kind.REDUCTION)

    def _on_meta(self, config: ShardConfig, collectives: NotedCollectives) -> ShardConfig:
        offload = PluginSpec.parse(config.offload).name if isinstance(config.offload, str | Mapping) else "?"
        if offload != "none":
            raise ConfigError(
                f"plan does not know what the offload manager {offload!r} holds on the device. Plan with offload = "
                '"none": with it the masters, gradients and states of the table go to the host.'
            )
        changed: dict[str, Any] = {
            "collectives": collectives,
            "device": "meta",
            "listeners": (),
            "check_ranks": False,
            "sync_module_states": False,
        }
        if config.reshard_after_forward == "auto":
            changed |= {"reshard_after_forward": None, "memory_budget": None}
            self.notes.append(
                "reshard_after_forward = 'auto' is planned as if every unit were released: the units that a device "
                "keeps beyond that fill memory which is free."
            )
        return dataclasses.replace(config, **changed)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation and the storages of what it returns."""

    def __init__(self, recorder: Recorder, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._ledger.look_again()
        out = func(*args, **kwargs)
        note_operation(self._recorder, func, args, kwargs, out)
        self._ledger.see([out] if isinstance(out, torch.Tensor) else _tensors(out))
        return out


def _leave(module: nn.Module) -> None:
    """Initialise nothing: on the meta device there are no values."""


def _tensors(nested: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _untraceable(what: str, model: nn.Module, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"the {what} of {type(model).__name__} cannot run on the meta device: {type(error).__name__}: {error}. There "
        "tensors have shapes and no values: let it not read any (item(), tolist(), a branch on a tensor), and make its "
        "own tensors on its inputs' device. Without --batch its parameters are planned alone."
    )


def _loss_of(output: Any, model: str) -> torch.Tensor:
    """The loss in what a forward returned: itself, its ``loss``, or its first value; summed where it has elements."""
    found = output
    if not isinstance(found, torch.Tensor):
        if isinstance(output, Mapping) and "loss" in output:
            found = output["loss"]
        elif getattr(output, "loss", None) is not None:
            found = output.loss
        elif isinstance(output, tuple | list) and output:
            found = output[0]
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        raise ConfigError(
            f"the forward of {model} returned no loss to go back from, but {type(output).__name__}. Let it return a "
            "tensor with a gradient, or an object, dict or tuple that holds one as its loss or first value; Hugging "
            "Face models return one where the batch has labels."
        )
    return found if found.ndim == 0 else found.sum()


_META = torch.device("meta")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64})


class NotedCollectives(Collectives):
    """Rank 0 of ``span``. What it can do, and the scratch that it takes, are those of ``nccl``."""

    api_version = 1

    def __init__(self, recorder: Recorder, span: Span) -> None:
        self._recorder = recorder
        self._span = span

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return CollectivesCapabilities(
            devices=frozenset({"meta"}),
            dtypes=_FLOATS,
            reduce_ops=frozenset(ReduceOp),
            widening=True,
            stream_ordered=False,
            capturable=False,
            fixed_addresses=False,
            can_communicate=False,
            exchanges=True,
        )

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return self._span.ranks

    @property
    def device(self) -> torch.device:
        return _META

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._note(Operation.ALL_GATHER, [out])

    def all_gather_many(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return self._note(Operation.ALL_GATHER, [out for out, _ in pairs])

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, op: ReduceOp, scratch: torch.Tensor | None = None
    ) -> Work:
        return self._note(Operation.REDUCE_SCATTER, [full])

    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        return self._note(Operation.REDUCE_SCATTER, [full for _, full, _ in triples])

    def scratch_nbytes(self, role: BufferRole, numel: int, wire_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
        return 0 if wire_dtype is out_dtype else numel * wire_dtype.itemsize

    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return self._note(Operation.ALL_REDUCE, [tensor])

    def broadcast(self, tensor: torch.Tensor, src: int) -> Work:
        return COMPLETED

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj] * self._span.ranks

    def barrier(self) -> None:
        return None

    def partition(self, rank_lists: Sequence[Sequence[int]]) -> NotedCollectives:
        own = next(ranks for ranks in rank_lists if 0 in ranks)
        stride = (own[1] - own[0]) * self._span.stride if len(own) > 1 else 1
        return NotedCollectives(self._recorder, Span(len(own), self._span.first, stride))

    def _note(self, operation: Operation, wholes: Sequence[torch.Tensor]) -> Work:
        if self._span.ranks > 1:
            self._recorder.transfer(operation, sum(whole.nbytes for whole in wholes), self._span, len(wholes))
        return COMPLETED


class NotedLanes(HostLanes):
    """Runs everything where it is issued, as ``HostLanes`` does, and notes on which stream a device would run it.

    Memory comes and goes as with streams: a reduction is delivered when it is issued, and its input let go of when
    compute would have been ordered behind it.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._arriving: dict[Gatherable, int] = {}
        # The last use of gathered memory since the gather stream was ordered behind compute.
        self._released: int | None = None

    def begin_forward(self) -> None:
        self._released = None
        self._order(Stream.COMPUTE, Stream.GATHER)

    def gather(self, units: Sequence[Gatherable]) -> None:
        if self._released is not None:
            self._recorder.wait(Stream.GATHER, self._released)
            self._released = None
        with self._recorder.on(Stream.GATHER):
            super().gather(units)
        event = self._recorder.signal(Stream.GATHER)
        for unit in units:
            self._arriving[unit] = event

    def arrive(self, unit: Gatherable) -> None:
        event = self._arriving.pop(unit, None)
        if event is not None:
            self._recorder.wait(Stream.COMPUTE, event)
        super().arrive(unit)

    def release(self, unit: Gatherable) -> None:
        super().release(unit)
        self._released = self._recorder.signal(Stream.COMPUTE)

    def reduce(self, reduction: Reduction, taken_at: Sequence[object]) -> None:
        self._order(Stream.COMPUTE, Stream.REDUCE)
        with self._recorder.on(Stream.REDUCE):
            reduction.issue().wait()
            reduction.deliver()
        self._reductions.append((self._recorder.signal(Stream.REDUCE), reduction.retire))

    def drain(self) -> None:
        super().drain()
        for stream in (Stream.REDUCE, Stream.GATHER):
            self._order(stream, Stream.COMPUTE)

    def give_up(self) -> None:
        self.drain()

    def _retire_oldest(self) -> None:
        event, retire = self._reductions.popleft()
        self._recorder.wait(Stream.COMPUTE, event)
        retire()

    def _order(self, first: Stream, then: Stream) -> None:
        self._recorder.wait(then, self._recorder.signal(first))
