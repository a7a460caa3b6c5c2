"""A sharded model as state, optimizers and tools see it: its units, its ranks, and what may be done between steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import nn
from typing_extensions import override

from ..errors import CollectiveError, PolyshardError, StateError, UnsupportedError
from ..functions.torch_functions import replacing_values
from ..functions.whole import WholeGather, gather_inner, whole_on_this_rank
from ..io.progress import reporting_progress
from ..runtime import graph
from ..runtime.extended import ExtendedUnit
from ..runtime.states import Phase, Reshard
from ..runtime.streams import CudaStreams, Waits

if TYPE_CHECKING:
    from pathlib import Path

    from ..interfaces import Collectives
    from ..runtime.root import Root

from .unit import ShardedParameter, ShardedUnit


class ShardedModel:
    """A model, seen at its outermost sharded module. Handles of one model are equal."""

    __slots__ = ("_root", "_units")

    def __init__(self, root: Root) -> None:
        self._root = root
        self._units: tuple[ShardedUnit, ...] = ()

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardedModel) and other._root is self._root

    @override
    def __hash__(self) -> int:
        return hash(self._root)

    @property
    def units(self) -> tuple[ShardedUnit, ...]:
        """Every unit, in module order."""
        self._units = self._units or tuple(map(ShardedUnit, self._root.units))
        return self._units

    @property
    def module(self) -> nn.Module:
        """The outermost sharded module."""
        return self._root.module_states[0].module

    def name_of(self, module: nn.Module) -> str:
        """Of a module inside it, for ranks to compare; empty for the outermost."""
        return next((name for name, each in self.module.named_modules() if each is module), "")

    @property
    def collectives(self) -> Collectives:
        """All ranks that share the model."""
        return self._root.collectives

    @property
    def topology(self) -> str:
        """The groups of its units, in words, where ranks hold different parts of the model; empty elsewhere."""
        ranks = {unit.ranks for unit in self._root.units}
        if all(each.world.world_size <= each.number for each in ranks):
            return ""
        return ", ".join(sorted({f"{each.number} of {each.world.world_size} over {each.label}" for each in ranks}))

    @property
    def rank(self) -> int:
        """This process's rank among them."""
        return self._root.rank

    @property
    def phase(self) -> Phase:
        """Where the model stands in a step."""
        return self._root.phase

    @property
    def timeout_s(self) -> float:
        """Seconds that ranks wait for each other, by the configuration."""
        return self._root.timeout_s

    def reference(self) -> Callable[[], ShardedModel | None]:
        """A call that gives this handle anew as long as the model lives, and does not keep it alive."""
        reference = weakref.ref(self._root)

        def model() -> ShardedModel | None:
            root = reference()
            return None if root is None else ShardedModel(root)

        return model

    def attached(self, make: Callable[[], A]) -> A:
        """What ``make`` gave for this model at the first call. It lives with the model and is closed before it."""
        if self._root.attached is None:
            made = make()
            self._root.attached = made, lambda root: made.close(ShardedModel(root))
        found: A = self._root.attached[0]
        return found

    def refuse_inside_step(self, call: str) -> None:
        """Give up a backward that raised. Raise StateError unless the model is between steps, open, and not whole."""
        root = self._root
        root.leave_failed_backward()
        root.refuse_ended(call)
        root.refuse_open_stream(call)
        if root.phase is not Phase.IDLE:
            raise StateError(
                f"{call} was called inside a {root.phase.value} of the model (rank {root.rank}). Call it between steps."
            )
        if root.unsharded:
            raise StateError(
                f"{call} was called inside polyshard.unsharded() (rank {root.rank}). Leave the context first."
            )
        if root.backward_step is not None:
            root.backward_step.before_use(call)

    def refuse_ended(self, call: str) -> None:
        """Raise StateError if the model was closed or a communication failed; ``call`` begins the message."""
        self._root.refuse_ended(call)

    def refuse_unnamed(self, call: str) -> None:
        """Raise where ranks have other parameters under the same names, and nothing says which part of what each is.

        Raises UnsupportedError: naming a parameter; ``call`` begins the message.
        """
        here = self._root.collectives.world_size
        # Ranks that compute with other samples, and share no gradients of a parameter, have another one each.
        most = self._root.data_ranks
        for unit in self._root.units:
            ranks = unit.ranks
            for each in unit.parameters:
                if each.part is not None and here < ranks.number * each.part.number:
                    what = f"has parts on other ranks than the {here} of the model"
                    remedy = "Shard the model over a mesh that has them too"
                elif each.part is None and (ranks.ep_degree > 1 or ranks.number < most):
                    what = f"belongs to {ranks.number} of {here} ranks, and others have another one of its name"
                    remedy = (
                        "Say before shard() which part of the whole each rank has, by DTensor.from_local(parameter, "
                        "mesh['ep'], [Shard(0)])"
                    )
                else:
                    continue
                raise UnsupportedError(
                    f"{call}: '{each.names[0]}' {what} (rank {ranks.world.rank}). {remedy}, or save "
                    "model.state_dict() on each rank, for the same mesh."
                )

    def adopt_changes(self, *, trains: bool | None = None, all_modules: bool = False) -> None:
        """Take over what the user did to parameters since the last forward; see ``Root.adopt_changes``.

        Raises:
            ParameterChangedError: a parameter was removed, replaced by an unlike one, tied, or came later and trains.
        """
        self._root.adopt_changes(trains=trains, all_modules=all_modules)
        # Whoever asks between steps may write to masters.
        self._root.outdate()

    def refuse_cut_rows(self, call: str) -> None:
        """Raise where ranks cut parameters between any elements, as the drop-in for FSDP1 does.

        Raises UnsupportedError: naming one; ``call`` begins the message.
        """
        for unit in self._root.units:
            if not unit.layout.slots[0].by_rows:
                raise UnsupportedError(
                    f"{call} does not serve FullyShardedDataParallel of polyshard_fsdp, whose ranks may cut "
                    f"'{unit.parameters[0].names[0]}' inside of its rows (rank {self.rank}). Use the wrapper's own "
                    "state_dict, optim_state_dict and summon_full_params, with torch.distributed.checkpoint, or shard "
                    "the model by polyshard.shard or fully_shard."
                )

    def refuse_moved(self) -> None:
        """Raise ParameterChangedError where modules moved, so that a name is another parameter's now."""
        registrations = self._root.registrations
        if registrations is not None:
            try:
                registrations.refuse_moved()
            except PolyshardError as error:
                self.tell_failure(error)
                raise

    def meeting(
        self, operation: str, groups: Iterable[Collectives | None], detail: str = ""
    ) -> AbstractContextManager[None]:
        """A context for communications between steps over ``groups``, which ranks compare where they can.

        ``operation`` names them in errors; ``detail``: what else must be alike on all ranks.
        """
        return self._root.meeting(operation, groups, detail)

    def tell_failure(self, error: Exception) -> None:
        """Let the other ranks know of an exception of this rank's program."""
        self._root.recorder.post_error(error)

    def fail(self, error: CollectiveError) -> None:
        """Let every later use be refused: a communication did not end, and ranks stand at different places."""
        self._root.recorder.fail(error)

    def wait_for_communication(self) -> None:
        """Order compute on the current stream after every gather and reduction that was issued."""
        self._root.streams.drain()

    def gathers_of(self, unit: ShardedUnit) -> tuple[Collectives, ...]:
        """Among whom a forward and a backward gather ``unit``: twice where it is released in between."""
        inner = unit._unit
        if unit.shard is None or inner.permanent:
            return ()
        gather = inner.ranks.gather or unit.shard
        # The backward of the outermost module follows its forward at once.
        if not inner.retention.policy.releases[inner in self._root.module_states[0].units]:
            return (gather,)
        among = inner.post_forward_ranks if inner.retention.policy is Reshard.PARTLY else None
        return gather, among or gather

    def pretend_streams(self, cuda: object) -> None:
        """Order communication from now on as on CUDA. ``cuda`` stands for ``torch.cuda``, its streams for CUDA's."""
        self._root.use_streams(CudaStreams(torch.device("cuda", 0), cuda))

    def measure_waits(self) -> Waits:
        """Measure from now on how long steps wait for other ranks."""
        return Waits(self._root.streams)

    def refuse_replaced_values(self, call: str) -> None:
        """Raise StateError inside ``replacing_values``; ``call`` begins the message."""
        if self._root.replaced:
            raise StateError(
                f"{call} was called inside of {self._root.replaced[0]} (rank {self.rank}). Leave the context first."
            )

    def replacing_values(self, context: str, values: str) -> AbstractContextManager[None]:
        """Inside, masters hold other values than the trained ones: optimizers and backwards refuse the model."""
        return replacing_values(self._root, context, values)

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Inside, whole weights are handed out: nothing may change masters or begin a step.

        Raises StateError: as ``refuse_inside_step``.
        """
        root = self._root
        self.refuse_inside_step("stream()")
        root.phase = Phase.STREAM
        try:
            with replacing_values(root, "polyshard.stream()", "weights unchanged until all are handed out"):
                yield
        finally:
            root.phase = Phase.IDLE if root.recorder.failure is None else Phase.FAILED

    def gather_together(self, units: Sequence[tuple[ShardedUnit, torch.dtype, Collectives | None]]) -> WholeFlats:
        """Issue gathers of whole masters: one communication for all units that have the same ranks.

        ``units``: at least one, each with the dtype in which it travels, and its ``shard`` or ``ToSome`` of
        that. Every rank of a unit calls it. What arrives is memory of its own.
        """
        names = ", ".join(f"'{unit.name}'" for unit, *_ in units)
        with self.meeting(f"gather of whole {names}", dict.fromkeys(among for *_, among in units)):
            return WholeGather([(unit._unit, unit.master, dtype, among) for unit, dtype, among in units])

    def gather_stored(self, unit: ShardedUnit, wanted: Sequence[ShardedParameter]) -> list[torch.Tensor]:
        """Whole tensors of ``wanted``, of ``unit.stored``, in memory of their own. Every rank of the unit calls it."""
        inner = unit._unit
        assert isinstance(inner, ExtendedUnit)
        with self.meeting(f"gather of whole '{unit.name}'", (unit.shard,)):
            return [gather_inner(inner, each.slot.segment, each.inner) for each in wanted if each.inner is not None]

    def copy_into_masters(self, values: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
        """Copy ``values`` into ``places``, masters or parameters, behind everything that still reads these."""
        root = self._root
        # A gather that no forward waited for may still read, and the host writes what is offloaded beside the device.
        root.streams.drain()
        if root.streams.current() is not None and any(unit.offloaded for unit in root.units):
            torch.cuda.synchronize(root.collectives.device)
        with torch.no_grad():
            for value, place in zip(values, places, strict=True):
                place.copy_(value)

    def step_in_backward(self, optimizer: torch.optim.Optimizer | None, *, keeps_former: bool = False) -> None:
        """Step ``optimizer`` over offloaded units in backwards, and no other one from now on; None for none."""
        self._root.step_in_backward(optimizer, keeps_former=keeps_former)

    @contextmanager
    def synchronising(self, synchronises: bool) -> Iterator[None]:
        """Inside, backwards reduce gradients, over all ranks, or keep them on this rank."""
        root = self._root
        before = root.synchronises, [each.all_reduces for each in root.module_states]
        root.synchronises = synchronises
        for each in root.module_states:
            each.all_reduces |= synchronises
        try:
            yield
        finally:
            root.synchronises = before[0]
            for each, all_reduces in zip(root.module_states, before[1], strict=True):
                each.all_reduces = all_reduces

    @contextmanager
    def kept_unsharded(self) -> Iterator[None]:
        """Inside, units stay gathered behind their forward, as for many forwards without a backward."""
        units = self._root.units
        before = [unit.retention.policy for unit in units]
        try:
            for unit in units:
                unit.retention.policy = Reshard.NEVER
            yield
        finally:
            for unit, policy in zip(units, before, strict=True):
                unit.retention.policy = policy

    def whole_on_this_rank(self, values: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Inside, every parameter is whole on this rank, with ``values`` by first name; nothing is communicated."""
        by_path = {
            managed.names[0]: values[each.name]
            for unit in self.units
            for managed, each in zip(unit._unit.parameters, unit.parameters, strict=True)
        }
        return whole_on_this_rank(self._root, by_path)

    @property
    def groups(self) -> Iterable[Collectives]:
        """All groups of ranks that it communicates over, each once."""
        return graph.groups_of(self._root)

    @property
    def warming_up(self) -> bool:
        """Whether the first steps still decide: which units stay gathered, and whether ranks issue the same."""
        return self._root.budget_pending

    def capture_obstacle(self) -> str | None:
        """Why no step can be recorded in a CUDA graph, alike on all ranks; None where steps can be."""
        return graph.capture_obstacle(self._root)

    def step_obstacle(self) -> str | None:
        """Why the next step cannot be recorded or replayed; None where it can."""
        if self._root.audit.compares:
            return "No warm-up step ran the model forward and backward. Let train_step do both."
        return graph.step_obstacle(self._root)

    def prepare_recording(self) -> RecordedModel:
        """Do everything that a forward does before its first operation, and release all gather buffers.

        Raises ParameterChangedError: a parameter was removed, or replaced by one of another shape, dtype or device.
        """
        graph.prepare_recording(self._root)
        return graph.RecordedState(self._root)

    def release_buffers(self) -> None:
        """Take all gather buffers' memory, and order the current stream after everything that was issued."""
        graph.release_buffers(self._root)

    def recover_from_recording(self) -> None:
        """Back to the state between steps, behind a recording that failed."""
        graph.recover_from_recording(self._root)

    def begin_gathers(self) -> None:
        """Order the next gathers behind the current stream."""
        self._root.streams.begin_forward()

    def reporting_progress(self, model: nn.Module, work: str) -> AbstractContextManager[None]:
        """Inside, what this thread tells of its progress (``io.progress``) is for the listeners' ``on_progress``."""
        events = self._root.events
        return reporting_progress(partial(events.on_progress, model, work)) if events.active else nullcontext()

    def notify_saved(self, model: nn.Module, path: Path | str) -> None:
        """Call the listeners' ``on_save``."""
        self._root.events.on_save(model, path)

    def notify_loaded(self, model: nn.Module, path: Path | str) -> None:
        self._root.events.on_load(model, path)

    def notify_replicas(self, model: nn.Module, before: int, now: int) -> None:
        self._root.events.on_replicas(model, before, now)


class WholeFlats(Protocol):
    """Whole units on their way."""

    def wait(self) -> list[torch.Tensor]:
        """Order the current stream behind them; each unit whole (``[padded_numel]``). Called once."""


class RecordedModel(Protocol):
    """The model as it was when a step was recorded in a CUDA graph."""

    @property
    def released(self) -> bool:
        """Whether no gather buffer has got memory since."""

    def obstacle(self) -> tuple[str, bool] | None:
        """Why the recording cannot be replayed, and whether that lasts until it is recorded anew; None where it can."""


class EndsWithModel(Protocol):
    """What is kept with a model, and ends before the model's communicators do."""

    def close(self, model: ShardedModel) -> None:
        """The model is closed. Every rank calls it."""


A = TypeVar("A", bound=EndsWithModel)
