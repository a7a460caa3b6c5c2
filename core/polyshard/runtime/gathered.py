"""One unit's whole parameters: the memory that gathers fill, the tensors over it, and their way through a step.

[Note: stale reads]
Autograd notes the version of each tensor that it saves, and refuses a backward that reads another one. The views of a
gather buffer have one version counter. A gather sets it to the number of optimizers' steps over the master, so that a
backward may read what a gather made of the same values; ``FlatBuffer.release`` sets it to ``RELEASED``. So a backward
raises that comes to a unit past its hooks, or after a step: "has been modified by an inplace operation", by torch. So
it does behind an in-place change in the forward, which the gather for backward undid. Not seen are reads of what was
saved past autograd: attributes of a ``ctx``, tensors packed by ``saved_tensors_hooks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from .. import _torch_private
from ..errors import CollectiveError, ParameterChangedError, ParameterMovedError, UnshardedUseError
from ..interfaces import Collectives, UnitEvent, UnitOperation
from ..nested import iter_hidden_tensors, iter_tensors
from ..planning.launches import alike
from ..planning.plan import ManagedParameter
from .buffers import FlatBuffer, SecondaryShard, shard_in, slices_of
from .direct import write_directly
from .formed import FormBuffer, compute_with_forms
from .gather import Masters, Source
from .parameters import Bindings, Shown, Swap, lazily
from .peers import Audit
from .states import Fresh, Phase, UnitState

if TYPE_CHECKING:
    from .module_state import ModuleState
    from .unit import Unit

gradient_of = attrgetter("grad")
_units_of = attrgetter("units")
_is_due = attrgetter("gathered.fresh.due")
_address_of = torch.Tensor.data_ptr

_RELEASED = (UnitState.SHARDED, UnitState.SHARDED_POST_FORWARD)


class GatheredParameters:
    """The whole parameters of one unit: the buffers that gathers fill, and what modules see of them.

    ``state`` says where they are, and ``fresh`` whether they have the master's values; both carry their transitions in
    their docstrings. When they are released is the ``Retention``'s to say.
    """

    buffer: FlatBuffer
    #: What the next gather is made from: the shards of all ranks, or what neighbours keep behind a forward.
    source: Source
    #: The former of these.
    shards: Source
    bindings: Bindings

    def __init__(self, unit: Unit, *, keeps_buffer: bool = False) -> None:
        """``keeps_buffer``: as of ``keep_buffer``."""
        self.unit = unit
        self.state = UnitState.UNSHARDED if unit.permanent else UnitState.SHARDED
        self.fresh = Fresh.NOW if unit.permanent else Fresh.NOT
        #: Whether there are ``buffer`` and what is made over it: not before the first forward.
        self.prepared = False
        #: What computes, one a parameter.
        self.leaves: list[torch.Tensor] = []
        #: What ``leaves`` have as gradients where none has any.
        self.no_gradients: list[None] = []
        #: Where they were used since their gather, as ``CommStreams.here`` says: one place, but for models that compute
        #: on several streams.
        self.places: list[object] = []
        #: Whether gather buffers hold their memory where they are released.
        self.keeps_buffer = keeps_buffer
        self.training_buffer: FlatBuffer | None = None
        self.eval_buffer: FlatBuffer | None = None
        #: Whether the precision plugin wants another dtype in eval mode.
        self.follows_mode = unit.precision.full_precision_in_eval(unit.spec)
        self._full_precision_in_eval = (
            self.follows_mode
            and not unit.permanent
            and unit.dtypes.compute != unit.spec.master_dtype
            and unit.encoding is None
            and not (unit.extended or unit.forms)
        )
        # Parameters that modules see in another form than the plain view, as ``DTensor``.
        self._leaf_forms = [(index, each.leaf) for index, each in enumerate(unit.parameters) if each.leaf is not None]
        # Their gradients are redistributed by name: uneven ones may lie in another order on other ranks of their mesh.
        self._leaf_forms.sort(key=lambda pair: unit.parameters[pair[0]].names)
        #: The versions of whole parameters that modules hold outside of compute; None where they hold none.
        self.held_versions: Sequence[int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the gather buffer while it has memory; 0 where the master serves compute."""
        unit = self.unit
        if unit.forms:
            return unit.layout.world_size * sum(nbytes for form in unit.forms for nbytes in form.lanes)
        return 0 if unit.permanent else unit.layout.padded_numel * unit.dtypes.compute.itemsize

    @property
    def secondary_nbytes(self) -> int:
        """Bytes that this rank keeps of the gather buffer where that is released."""
        among = self._secondary_ranks
        return 0 if among is None else self.nbytes // among.world_size

    @property
    def description(self) -> str:
        """What ranks compare of a gather: its name, elements and dtype of its result, bytes where the unit is encoded.

        Where other ranks have other parts of the unit: the elements by which launches are planned.
        """
        unit = self.unit
        numel, dtype, among = unit.launch_numel, self.buffer.dtype, ""
        if self.state is UnitState.SHARDED_POST_FORWARD and unit.post_forward_ranks is not None:
            among = f" among {unit.post_forward_ranks.world_size} ranks"
        elif unit.forms:
            numel, dtype = self.nbytes, torch.uint8
        elif unit.encoding is not None:
            dtype = torch.uint8
            if unit.ranks.number == unit.ranks.world.world_size:
                numel = unit.encoding.nbytes_per_rank * unit.ranks.shard_size
        return f"{unit.name} ({numel} elements of {dtype}{among})"

    def prepare(self) -> None:
        """Make the gather buffer and its views: before the first forward, not while the model is being cut."""
        unit = self.unit
        self.training_buffer = self._make_buffer(unit.dtypes.compute)
        self.bind(self.training_buffer)
        if not unit.forms:
            direct = unit.writes_gradients_directly and not unit.gradients.widens
            write_directly(unit.parameters, unit.layout, self.claim_gradient if direct else None)
        self.prepared = True

    def _make_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        unit = self.unit
        layout, gather, rank, device = unit.layout, unit.ranks.gather, unit.ranks.shard_rank, unit.spec.device
        if unit.permanent:
            return FlatBuffer.over(unit.master, layout)
        if unit.forms:
            return FormBuffer(layout, dtype, device, unit.forms, shards=layout.world_size, rank=rank)
        if gather is not None and gather.capabilities.fixed_addresses:
            return FlatBuffer.lease(layout, dtype, gather)
        return FlatBuffer.allocate(
            layout, dtype, device, rank=rank, gathers=True, secondary_ranks=self._secondary_ranks
        )

    def find_sources(self) -> None:
        """Tell what gathers are made from. Before ``prepare`` there is nothing to gather."""
        if self.training_buffer is None:
            return
        unit, buffer, part = self.unit, self.buffer, self.buffer.secondary
        if part is not None and unit.ranks.route is not None:
            self._gather_from(part, Masters(unit.ranks.route, part, unit.master, unit.offload_manager))
            self.shards = self.source
            return
        slices = [] if unit.extended or unit.forms else slices_of(unit.master, unit.layout)
        self.source = self.shards = Source(
            unit.ranks.gather, unit.master, unit.offload_manager, unit.encoding, slices, buffer.pairs, buffer.owns
        )
        if part is not None and self.state is UnitState.SHARDED_POST_FORWARD:
            self._gather_from(part)

    def _gather_from(self, part: SecondaryShard, masters: Masters | None = None) -> None:
        # What is kept computes as it is: there is nothing to cast, to decode or to fetch.
        self.source = Source(
            self._secondary_ranks, part.memory, None, None, part.slices, part.pairs, part.owns, masters
        )

    @property
    def _secondary_ranks(self) -> Collectives | None:
        """The ranks that gather from secondary shards; None where nobody does."""
        return self.unit.post_forward_ranks if self.unit.ranks.route is None else self.unit.ranks.gather

    def keep_buffer(self, keeps: bool) -> None:
        """Whether whole parameters keep their memory, and so their addresses, where they are released."""
        self.keeps_buffer = keeps
        for buffer in (self.training_buffer, self.eval_buffer):
            if buffer is not None:
                buffer.keep(keeps)

    def bind(self, buffer: FlatBuffer) -> None:
        """Compute with views of ``buffer`` from now on."""
        unit = self.unit
        self.buffer = buffer
        buffer.keeps = self.keeps_buffer
        self.find_sources()
        self.leaves = self._leaves_over(buffer.views)
        for index, form in self._leaf_forms:
            self.leaves[index] = form.as_leaf(buffer.views[index])
        if unit.packed:
            self.leaves = [packed.over(view) for packed, view in zip(unit.packed, buffer.views, strict=True)]
        self.no_gradients = [None] * len(self.leaves)
        if not unit.permanent:
            buffer.follow_versions(self._with_versions())
            for leaf, parameter in zip(self.leaves, unit.parameters, strict=True):
                leaf.set_ = partial(_set_to_itself, ref(leaf), parameter)  # type: ignore[method-assign]
        self.bindings = self._make_bindings()
        unit.held.use_leaves(self.leaves)

    def _leaves_over(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What computes and collects gradients: parameters, as programs that look at them in a forward expect."""
        for view in views:
            # As a parameter is told. Operations on its class itself take longer.
            view._is_param = True
        return list(views)

    def _with_versions(self) -> list[torch.Tensor]:
        """``versioned`` of its buffer."""
        return [self.buffer.flat, *(self.leaves[index] for index, _ in self._leaf_forms)]

    def _make_bindings(self) -> Bindings:
        unit = self.unit
        beside: Sequence[Swap] = ()
        if isinstance(self.buffer, FormBuffer):
            direct = unit.writes_gradients_directly and not unit.gradients.widens
            beside = compute_with_forms(unit.parameters, self.buffer, self.claim_gradient if direct else None)
        # Memory that is never released is shown everywhere: the leaf collects the gradient that is reduced. With other
        # originals and plain tensors torch refuses to compute.
        elsewhere = Shown.VIEWS if unit.permanent else Shown.ORIGINALS
        if unit.on_lazy_use is not None and not unit.permanent:
            elsewhere = Shown.GUARDS
            sites = (module for each in unit.parameters for module, _ in each.sites)
            beside = [*beside, *lazily(sites, partial(unit.on_lazy_use, unit))]
        return Bindings(unit.parameters, self.leaves, elsewhere=elsewhere, beside=beside)

    def choose_buffer(self, training: bool) -> None:
        """Compute in the master dtype while the module is in eval mode, where the precision plugin wants that."""
        if not self._full_precision_in_eval:
            return
        if not training and self.eval_buffer is None:
            self.eval_buffer = self._make_buffer(self.unit.spec.master_dtype)
        wanted = self.training_buffer if training else self.eval_buffer
        if wanted is not None and wanted is not self.buffer:
            self.reshard()
            self.bind(wanted)

    @property
    def pending(self) -> bool:
        """Whether a leaf has a gradient that was not taken yet."""
        if self.unit.packed:
            return False
        # Compared as lists, at C speed: asked of every unit at the end of every backward.
        return list(map(gradient_of, self.leaves)) != self.no_gradients

    def take_gradients(self) -> list[torch.Tensor | None]:
        """The leaves' gradients, which they give up."""
        computed_at = self.unit.gradients.places
        for place in self.places:
            if place not in computed_at:
                computed_at.append(place)
        gradients = list(map(gradient_of, self.leaves))
        for leaf in self.leaves:
            leaf.grad = None
        # There are no leaves before the first gather.
        for index, form in self._leaf_forms if gradients else ():
            gradient = gradients[index]
            if gradient is not None:
                gradients[index] = form.own(gradient)
        return gradients

    def claim_gradient(self, index: int) -> torch.Tensor | None:
        """Where the gradient of leaf ``index`` may be written in the backward that runs; None for memory of its own."""
        unit, root = self.unit, self.unit.root
        synchronises = root.synchronises and unit.module_state.synchronises
        if not (synchronises and root.backward.accumulates and self.buffer is self.training_buffer):
            return None
        return unit.gradients.claim(index, root.reducer)

    def keep_memory(self) -> None:
        """Keep memory alive that a gather which did not end may still write."""
        if self.prepared and self.buffer.attached:
            self.buffer.pin()

    def unshard(self) -> None:
        """Issue the gather, unless the parameters are there or on their way."""
        if self.fresh.due:
            self.issue_gather()

    def issue_gather(self) -> None:
        """Issue the gather, which is due, by itself."""
        unshard_together((self,))

    def wait(self) -> None:
        """Order compute after the gather. To be called wherever the unit is used."""
        unit = self.unit
        root, streams = unit.root, unit.root.streams
        if self.state is UnitState.GATHERING:
            for observer in unit.observers:
                observer(UnitEvent(UnitOperation.WAIT, unit.spec))
            streams.arrive(self)
            if root.audit.compares:
                self._compare(root.audit)
            for observer in unit.observers:
                observer(UnitEvent(UnitOperation.WAIT, unit.spec, begins=False))
            versioned = self.buffer.versioned
            _torch_private.set_versions(versioned, [unit.steps] * len(versioned))
            self.state = UnitState.UNSHARDED
        here = streams.current()
        if here not in self.places:
            if self.places and not unit.permanent:
                streams.follow()
            self.places.append(here)

    def _compare(self, audit: Audit) -> None:
        unit, root = self.unit, self.unit.root
        among = unit.ranks.gather
        if audit.done or among is None or unit.name not in audit.due:
            return
        audit.due.remove(unit.name)
        with root.recorder.during("comparison of a gather", (unit.spec,), root.phase is Phase.BACKWARD):
            audit.compare_gathered(among, unit.name, *self._arrived())

    def _arrived(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a gather brought, this rank's part of it, and what that must be; None where nobody knows."""
        unit = self.unit
        if unit.forms:
            whole = torch.cat(self.buffer.parts)
            return whole, torch.cat([own for _, own in self.buffer.pairs]), None
        own = shard_in(self.buffer.flat, unit.layout, unit.ranks.shard_rank)
        # Nothing arrives between segments.
        whole = torch.cat(self.buffer.parts) if unit.layout.segments else self.buffer.flat
        return whole, own, None if unit.offloaded or unit.encoding is not None else unit.master

    def show(self) -> None:
        """Let modules see whole parameters."""
        self.bindings.show(Shown.VIEWS)

    def hold(self) -> None:
        """Let modules hold whole parameters outside of compute, too: nothing may be written to them there."""
        self.show()
        self.held_versions = self.buffer.versions

    def hide(self) -> None:
        """``conceal``, unless the parameters stay whole until backward and modules hold them so."""
        if self.unit.keeps_whole and self._is_kept_whole:
            self.hold()
        else:
            self.conceal()

    def refuse_lost_writes(self) -> None:
        """Raise where a program wrote to whole parameters that modules hold: the next gather would not have it.

        Raises:
            ParameterChangedError: once; what was written is dropped.
        """
        if self.held_versions is not None and self.held_versions != self.buffer.versions:
            self.reshard()
            raise ParameterChangedError(
                f"Whole parameters of '{self.unit.name}' were written to outside of its forward (rank "
                f"{self.unit.ranks.world.rank}). They are copies, and the parameters keep their values. Call reshard() "
                "before you write, or write inside of polyshard.unsharded()."
            )

    @property
    def _is_kept_whole(self) -> bool:
        shown = self.prepared and self.bindings.shown is Shown.VIEWS
        return shown and self.state is UnitState.UNSHARDED and not self.fresh.due

    def conceal(self) -> None:
        """Let modules see the originals again; during a forward, what ``Bindings.elsewhere`` says."""
        if self.prepared:
            unit, bindings, root = self.unit, self.bindings, self.unit.root
            shown = bindings.elsewhere if root is not None and root.phase is Phase.FORWARD else Shown.ORIGINALS
            if bindings.shown is not shown:
                kept = unit.keeps_whole and bindings.shown is Shown.VIEWS
                if kept and unit.held.take_trained(self.leaves):
                    unit.held.follow_requires_grad()
                self.held_versions = None
                bindings.show(shown)

    def reshard(self) -> None:
        """Release the gather buffer, and what is kept of it behind a forward."""
        unit = self.unit
        if self.prepared and self.bindings.shown is not Shown.ORIGINALS:
            self.conceal()
        if unit.permanent or self.state is UnitState.SHARDED:
            return
        self.fresh = Fresh.NOT
        if self.state is UnitState.SHARDED_POST_FORWARD:
            self.drop_secondary()
            return
        unit.root.streams.release(self)
        self.places.clear()
        self.state = UnitState.SHARDED
        for observer in unit.observers:
            observer(UnitEvent(UnitOperation.RELEASE, unit.spec))

    def reshard_post_forward(self) -> None:
        """Release the gather buffer, but for the part of it that the next gather is made from, among neighbours."""
        unit, part = self.unit, self.buffer.secondary
        if part is None or self.state in _RELEASED:
            self.reshard()
            return
        self.conceal()
        unit.root.streams.keep(self, part)
        self.places.clear()
        self._gather_from(part)
        self.state, self.fresh = UnitState.SHARDED_POST_FORWARD, Fresh.NOT
        for observer in unit.observers:
            observer(UnitEvent(UnitOperation.RELEASE, unit.spec))

    def drop_secondary(self) -> None:
        """Release what is kept of the gather buffer behind a forward."""
        assert self.buffer.secondary is not None
        self.buffer.secondary.release()
        self.source = self.shards
        self.state = UnitState.SHARDED

    def refuse_moved_views(self) -> None:
        """Raise ParameterMovedError where a forward gave a leaf memory of its own, which later gathers would not reach.

        The parameter is as it was before then. For leaves of packed classes.
        """
        unit, leaves, views = self.unit, self.leaves, self.buffer.views
        if not self.buffer.attached:
            return
        with _torch_private.without_torch_function():
            addresses, wanted = list(map(_address_of, leaves)), list(map(_address_of, views))
            if addresses == wanted:
                return
            moved = [index for index, address in enumerate(addresses) if address != wanted[index]]
            for index in moved:
                leaves[index].data = views[index].data
                unit.packed[index].restore()
        parameter = unit.parameters[moved[0]]
        raise ParameterMovedError(
            f"The forward of a {type(parameter.sites[0][0]).__name__} gave '{parameter.names[0]}' memory of its own "
            f"(rank {unit.ranks.world.rank}), which would stay whole on this rank. Let it compute with the parameter "
            "as it is. Linear4bit of bitsandbytes does this in eval mode on CPUs with AVX512-BF16: set "
            "support_avx512bf16_for_cpu = False on each."
        )

    def give_up_gather(self) -> None:
        """Release the memory of a gather that could not be issued."""
        if self.state in _RELEASED:
            self.buffer.release()
        if self.state is not UnitState.SHARDED:
            self.reshard()


def _set_to_itself(leaf: ref[torch.Tensor], parameter: ManagedParameter, source: torch.Tensor) -> torch.Tensor:
    """``set_`` of a gathered parameter, which ``torch.nn.utils.parametrize`` calls: to the parameter itself, no change.

    Raises ParameterMovedError: ``source`` is another tensor.
    """
    if source is not leaf():
        raise ParameterMovedError(
            f"A forward gave '{parameter.names[0]}' other memory by set_() while it is gathered: no later gather would "
            "reach that. Register parametrizations with a right_inverse before sharding."
        )
    return source


def show_whole(units: Sequence[Unit], training: bool, *, recomputes: bool, kept: bool = False) -> None:
    """Gather ``units``, order compute behind the gather, and let modules see whole parameters.

    ``kept``: units that were kept for this recomputation are whole; other ranks do not gather them now.
    """
    for unit in units:
        if unit.gathered.follows_mode:
            unit.gathered.choose_buffer(training)
    if kept or any(map(_is_due, units)):
        unshard_due([unit for unit in units if unit.gathered.fresh is not Fresh.ALONE] if kept else units)
    for unit in units:
        unit.gathered.wait()
        unit.gathered.show()
        for observer in unit.observers:
            observer(UnitEvent(UnitOperation.COMPUTE, unit.spec, backward=recomputes))


def unshard_ahead(batches: Sequence[Sequence[ModuleState]]) -> None:
    """Issue the gathers of ``batches``, each as one communication."""
    for batch in batches:
        # Most batches are on their way already.
        for unit in batch[0].units:
            if unit.gathered.fresh.due:
                break
        else:
            continue
        if len(batch) == 1:
            unshard_due(batch[0].units)
        else:
            # A module state may come up twice in a batch.
            units = dict.fromkeys(chain.from_iterable(map(_units_of, batch)))
            unshard_together([unit.gathered for unit in units if unit.gathered.fresh.due])


def unshard_due(units: Sequence[Unit]) -> None:
    """Issue the gathers of those of ``units``, of one module state, that are due, as one communication."""
    due = [unit.gathered for unit in units if unit.gathered.fresh.due]
    if len(due) == 1:
        due[0].issue_gather()
    elif due:
        unshard_together(due)


def unshard_together(due: Sequence[GatheredParameters]) -> None:
    """Issue gathers that are ``due``, of units of one root, as one communication."""
    root = due[0].unit.root
    entry = root.recorder.issue("all_gather", [each.unit.spec for each in due], root.phase is Phase.BACKWARD)
    try:
        if root.audit.compares or root.audit.announces:
            # Among those that gather: replicas may evaluate apart.
            for same in alike(due, [id(each.source.group) for each in due]) if len(due) > 1 else (due,):
                among = same[0].source.group
                if among is not None:
                    names = [each.description if root.audit.compares else each.unit.spec.label for each in same]
                    root.streams.meet(among.announce, "all_gather of " + ", ".join(names))
        root.streams.gather(due)
    except BaseException as error:
        if isinstance(error, CollectiveError):
            root.recorder.fail(error, entry)
        for each in due:
            each.give_up_gather()
        if isinstance(error, CollectiveError):
            root.recorder.refuse(error, entry)
        raise
    for each in due:
        if each.state is UnitState.SHARDED_POST_FORWARD:
            # Read where its memory returns to, on the stream that gathers.
            each.drop_secondary()
        each.places.clear()
        each.state, each.fresh = UnitState.GATHERING, Fresh.NOW
    if root.audit.compares:
        root.audit.expect({each.unit.name for each in due})


def refuse_escape(units: Iterable[Unit], output: Any, module: str) -> None:
    """Raise if ``output`` lies in memory of ``units`` that is about to be released: reading it then is a crash.

    Raises UnshardedUseError: naming the parameter.
    """
    tensors: Sequence[torch.Tensor] | None = None
    for unit in units:
        gathered = unit.gathered
        if unit.permanent or gathered.state is not UnitState.UNSHARDED:
            continue
        if tensors is None:
            plain = isinstance(output, torch.Tensor)
            tensors = (output,) if plain else (*iter_tensors(output), *iter_hidden_tensors(output))
            if _torch_private.transforms_active():
                tensors = [part for tensor in tensors for part in _torch_private.transformed_parts(tensor)]
        for tensor in tensors:
            if gathered.buffer.holds(tensor) and tensor.numel() and tensor.device == gathered.buffer.device:
                raise UnshardedUseError(
                    f"The forward of '{module or '(root)'}' returned memory of the parameter "
                    f"'{_owner(gathered, tensor)}' on rank {unit.ranks.world.rank}, which is released when the forward "
                    "ends. Return a clone, or compute with it inside the forward."
                )


def _owner(gathered: GatheredParameters, tensor: torch.Tensor) -> str:
    unit, buffer = gathered.unit, gathered.buffer
    offset = (tensor.data_ptr() - buffer.address) // buffer.flat.element_size()
    for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
        if slot.offset <= offset < slot.end:
            return parameter.names[0]
    return unit.name
