"""One step of a sharded model on the meta device, as the engine itself runs it.

[Note: why the engine]
The engine's hooks, schedule, buckets and reductions decide what is alive when and what travels when. A model of them
would have to be kept equal to them. On the meta device they run as they are, and only a device's part is missing:
kernels, bytes, time. Those are recorded.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from polyshard.api import no_sync, shard
from polyshard.config import PluginSpec, ShardConfig, config_of
from polyshard.errors import ConfigError, PolyshardError, UnsupportedError
from polyshard.inspect import ShardedModel, ShardedUnit, is_dtensor, outermost_model
from polyshard.interfaces import BufferRole, PluginContext, ReduceOp, Work
from polyshard_backends.fake import FakeCall, FakeCollectives
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from ._torch_private import TorchDispatchMode, tree_leaves
from .kernels import fused_as_on_cuda, note_operation
from .recording import Issued, Kind, Ledger, MemoryTimeline, Operation, Part, RecordedCuda, Span, StepRecorder
from .workload import Batch, OptimizerModel

_BRANCHED = (
    "The model branches on values of tensors, which are not known: each branch was planned as if its condition held."
)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The operations of one step, and the memory meanwhile."""

    issued: tuple[Issued, ...]
    memory: MemoryTimeline


class TracedModel:
    """A model on the meta device, sharded as ``config`` says for rank 0 of ``world_size``.

    Args:
        model: on the meta device; it is sharded in place.
        optimizer: steps once a step.
        workspace_nbytes: what libraries hold for good.
        microbatches: forwards and backwards of a step; all but the last are under ``polyshard.no_sync``.
        beside: another model of the same rank, with which this one is recorded.

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
        beside: TracedModel | None = None,
    ) -> None:
        if microbatches < 1:
            raise ConfigError(f"microbatches is {microbatches}; give 1 or more.")
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}; give the number of ranks, 1 or more.")
        self.recorder: StepRecorder = StepRecorder() if beside is None else beside.recorder
        self.notes: list[str] = []
        config = config_of(config, "plan(config, model, ...)")
        sizes = _sizes_of(config.mesh, world_size)
        collectives = RecordedCollectives(self.recorder, range(world_size), sizes)
        _refuse_other_job(model, world_size)
        with warnings.catch_warnings():
            # That of a single rank, which is as planned. On the meta device there is nothing to initialise.
            warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
            self.model = shard(model, self._on_meta(config, collectives), initializer=lambda module: None)
        self.sharded: ShardedModel = outermost_model(self.model, "plan")
        self.sharded.pretend_streams(RecordedCuda(self.recorder))
        self._note_uncounted(sizes or {})
        self._optimizer = optimizer
        self._microbatches = microbatches
        self.ledger: Ledger = Ledger(self.recorder) if beside is None else beside.ledger
        self._workspace_nbytes = workspace_nbytes
        self._parameters = [each for each in self.model.parameters() if each.requires_grad]
        self._warm = False
        masters = [each for unit in self.sharded.units for each in (*unit.values, *unit.attribute_tensors)]
        self.ledger.see([*masters, *self.model.parameters()], Kind.PARAMETERS)
        self.ledger.see(self.model.buffers(), Kind.BUFFERS)

    @property
    def standing_nbytes(self) -> Mapping[Kind, int]:
        """Bytes that are there throughout, and that no tensor on the meta device stands for."""
        return {Kind.OPTIMIZER: self._optimizer.standing_nbytes(self._parameters), Kind.BUFFERS: self._workspace_nbytes}

    def state_nbytes(self, unit: ShardedUnit) -> int:
        """Bytes of the optimizer's state of ``unit``, as far as steps were run."""
        return self._optimizer.state_nbytes([each for each in unit.tensors if each.requires_grad])

    def step(self, batch: Batch) -> TracedStep:
        """Forward, backward, optimizer and ``zero_grad``, as they repeat.

        Raises:
            UnsupportedError: the model reads values, or runs an operation that the meta device does not have.
            ConfigError: its forward does not take the batch, or returns no loss.
        """
        self.ledger.see(_tensors((batch.args, batch.kwargs)), Kind.BUFFERS)
        return self.record(lambda: self._once(batch), self.standing_nbytes)

    def record(self, once: Callable[[], None], standing: Mapping[Kind, int]) -> TracedStep:
        """What ``once`` is, where it repeats; ``standing``: bytes that are there throughout."""
        with ExitStack() as watching:
            watching.enter_context(fused_as_on_cuda(self.recorder, lambda: self._note(_BRANCHED)))
            watching.enter_context(_Watch(self.recorder, self.ledger))
            if not self._warm:
                # The first forward records the order that later ones prefetch by; the first step makes states.
                once()
                self.ledger.find_resized()
                self._warm = True
            self.recorder.clear()
            self.ledger.restart()
            once()
        return TracedStep(tuple(self.recorder.issued), self.ledger.timeline(standing))

    def _note_uncounted(self, sizes: Mapping[str, int]) -> None:
        reached = [spans_of(unit) for unit in self.sharded.units]
        own = [
            name
            for name, size in sizes.items()
            if size > 1 and any(all(name not in span.over for span in spans) for spans in reached)
        ]
        if own:
            self._note(f"What the model itself sends along {', '.join(own)}, activations or tokens, is not counted.")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _once(self, batch: Batch) -> None:
        for _ in range(self._microbatches - 1):
            with no_sync(self.model):
                self._microbatch(batch)
        self._microbatch(batch)
        self.update()

    def update(self) -> None:
        # Their kind does not follow from stream and part.
        gradients = [each.grad for each in self.model.parameters() if each.grad is not None]
        self.ledger.name(gradients, Kind.GRADIENTS)
        for unit in self.sharded.units:
            if unit.gather_buffers:
                self.ledger.name(unit.gather_buffers, Kind.GATHERED)
                self.ledger.name(unit.reduction_buffers, Kind.REDUCTION)
        self.recorder.begin(Part.OPTIMIZER)
        self._optimizer.step(self._parameters, self.recorder, self.ledger)
        for parameter in self._parameters:
            parameter.grad = None

    def _microbatch(self, batch: Batch) -> None:
        loss = self.forward(batch, self.model)
        self.backward(partial(torch.autograd.backward, loss))
        del loss
        self.ledger.look_again()

    def forward(self, batch: Batch, call: Callable[..., Any], *, ends: bool = True) -> torch.Tensor:
        """What ``call``, the model or what calls it, makes of ``batch``: the loss where it ``ends``, or a tensor."""
        self.recorder.begin(Part.FORWARD)
        try:
            output = call(*batch.args, **batch.kwargs)
        except PolyshardError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise _untraceable("forward", self.model, error) from error
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
            raise ConfigError(
                f"the forward of {type(self.model).__name__} raised {type(error).__name__}: {error}. Give a batch that "
                "it takes."
            ) from error
        name = type(self.model).__name__
        if ends:
            output = _loss_of(output, name)
            if output.numel() != 1:
                self._note(
                    f"The forward of {name} returned no loss, but a tensor of {output.ndim} dimensions: its sum was "
                    "planned in the place of a loss. What a loss outside of it takes, memory and time, is beyond this "
                    "plan. Plan a module whose forward returns the loss."
                )
            output = output.sum() if output.ndim else output
        elif not isinstance(output, torch.Tensor):
            raise ConfigError(
                f"the forward of {name} returned {type(output).__name__}, and is no last stage. Let it return the "
                "tensor that the next stage takes."
            )
        self.ledger.end_forward()
        found: torch.Tensor = output
        return found

    def backward(self, call: Callable[[], object]) -> None:
        self.recorder.begin(Part.BACKWARD)
        try:
            call()
        except PolyshardError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            raise _untraceable("backward", self.model, error) from error

    def _on_meta(self, config: ShardConfig, collectives: RecordedCollectives) -> ShardConfig:
        offload = PluginSpec.parse(config.offload).name if isinstance(config.offload, str | Mapping) else "?"
        if offload != "none":
            raise ConfigError(
                f"plan does not know what the offload manager {offload!r} holds on the device. Plan with offload = "
                '"none": with it the masters, gradients and states of the table go to the host, and with "optimizer" a '
                "rank's slice in the dtype of compute comes to the device."
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
            self._note(
                "reshard_after_forward = 'auto' is planned as if every unit were released: the units that a device "
                "keeps beyond that fill memory which is free."
            )
        return dataclasses.replace(config, **changed)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation and the storages of its results."""

    def __init__(self, recorder: StepRecorder, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self.ledger = ledger

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            # What a DTensor makes of it is seen in its place: operations on this rank's part.
            return NotImplemented
        kwargs = kwargs or {}
        self.ledger.look_again()
        out = func(*args, **kwargs)
        note_operation(self._recorder, func, args, kwargs, out)
        self.ledger.see([out] if isinstance(out, torch.Tensor) else _tensors(out))
        return out


def _tensors(nested: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _untraceable(what: str, model: nn.Module, error: Exception) -> UnsupportedError:
    return UnsupportedError(
        f"the {what} of {type(model).__name__} cannot run on the meta device: {type(error).__name__}: {error}. There "
        "tensors have shapes and no values: let it not read any (item(), tolist(), a branch on a tensor), and make its "
        "own tensors on its inputs' device. Without --batch its parameters are planned alone."
    )


def _loss_of(output: Any, model: str) -> torch.Tensor:
    """The loss in a forward's output: itself, its ``loss``, or its first value that is a number; else the first."""
    found = output
    if not isinstance(found, torch.Tensor):
        if isinstance(output, Mapping) and "loss" in output:
            found = output["loss"]
        elif getattr(output, "loss", None) is not None:
            found = output.loss
        elif isinstance(output, tuple | list) and output:
            numbers = (each for each in _tensors(output) if each.requires_grad and each.numel() == 1)
            found = next(numbers, output[0])
    if not isinstance(found, torch.Tensor) or not found.requires_grad:
        raise ConfigError(
            f"the forward of {model} returned no loss to go back from, but {type(output).__name__}. Let it return a "
            "tensor with a gradient, or an object, dict or tuple that holds one as its loss or first value; Hugging "
            "Face models return one where the batch has labels."
        )
    return found


def spans_of(unit: ShardedUnit) -> list[Span]:
    """The groups that a unit of a traced model is sharded and replicated over."""
    return [each.span for each in (unit.shard, unit.replicate) if isinstance(each, RecordedCollectives)]


class RecordedCollectives(FakeCollectives):
    """Rank 0 of ``members``, whose launches a step's recorder is told. The scratch that it takes is that of ``nccl``.

    Args:
        recorder: is told of each transfer.
        members: ranks of the job, in ascending order.
        sizes: those of the dimensions of the job's mesh by name, outermost first; None where it has none.
    """

    api_version = 1

    def __init__(self, recorder: StepRecorder, members: Sequence[int], sizes: Mapping[str, int] | None = None) -> None:
        super().__init__(PluginContext("fake", torch.device("meta")), 0, len(members))
        self._recorder = recorder
        self._sizes = sizes
        self.span = Span(members, () if sizes is None else _over(members, sizes))
        self.record = self._tell

    @override
    def reduce_scatter_many(
        self, triples: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], *, op: ReduceOp
    ) -> Work:
        calls: list[FakeCall] = []
        self.record = calls.extend
        work = super().reduce_scatter_many(triples, op=op)
        self.record = self._tell
        self._tell(calls)
        return work

    def _tell(self, calls: Sequence[FakeCall]) -> None:
        operation = calls[0].operation
        if self.span.ranks > 1 and operation in _TRANSFERS:
            nbytes = sum(call.numel * call.dtype.itemsize for call in calls)
            if operation == "all_to_all":
                if self._recorder.part is Part.OPTIMIZER:
                    return
                nbytes = sum(call.sent_nbytes for call in calls)
            self._recorder.transfer(Operation(operation), nbytes, self.span, len(calls))

    @override
    def scratch_nbytes(
        self, role: BufferRole, numel: int, communication_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> int:
        return 0 if communication_dtype is out_dtype else numel * communication_dtype.itemsize

    @override
    def partition(self, rank_lists: Sequence[Sequence[int]]) -> RecordedCollectives:
        own = next(ranks for ranks in rank_lists if 0 in ranks)
        return RecordedCollectives(self._recorder, [self.span.members[each] for each in own], self._sizes)


#: Operations that are timed; others come at wrap. Those of optimizers are not.
_TRANSFERS = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_to_all"})


def _sizes_of(mesh: Any, world_size: int) -> Mapping[str, int] | None:
    """Sizes of the dimensions of ``mesh``, outermost first; None where it has no names.

    Raises ConfigError: it is no mesh of ``world_size`` ranks.
    """
    if mesh is None or not mesh.mesh_dim_names:
        return None
    sizes = dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))
    if mesh.mesh.flatten().tolist() != list(range(world_size)):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"the mesh {shown} is not one of the ranks 0 to {world_size - 1} in order. Plan with a mesh of all ranks, "
            "as WorldMesh.pretended makes it of sizes, and their number as world_size."
        )
    return sizes


def _refuse_other_job(model: nn.Module, world_size: int) -> None:
    """Raise ``ConfigError`` where parameters are ``DTensor`` over the ranks of a job of another size."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == world_size:
        return
    name = next((name for name, each in model.named_parameters() if is_dtensor(each)), None)
    if name is not None:
        raise ConfigError(
            f"'{name}' is a DTensor over ranks of a job of {dist.get_world_size()}, and the plan is of {world_size} "
            "ranks. Make the mesh that the model is parallelized over of the sizes that are planned."
        )


def _over(members: Sequence[int], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The dimensions of more than one rank along which ``members``, rank 0 among them, lie; empty for none."""
    found, whole, stride = [], 1, math.prod(sizes.values())
    for name, size in sizes.items():
        stride //= size
        if any(member // stride % size for member in members):
            found.append(name)
            whole *= size
    # Of a mesh that is another's, a group may lie across.
    return tuple(found) if whole == len(members) else ()
