"""One all-gather unit: a flat master shard, the gather buffer, and the parameters that view them.

[Note: stale reads]
Autograd notes the version of each tensor that it saves, and refuses a backward that reads another one. The views of a
gather buffer have one version counter. A gather sets it to the number of optimizers' steps over the master, so that a
backward may read what a gather made of the same values; ``FlatBuffer.release`` sets it to ``RELEASED``. So a backward
raises that comes to a unit past its hooks, or after a step: "has been modified by an inplace operation", by torch. So
it does behind an in-place change in the forward, which the gather for backward undid. Not seen are reads of what was
saved past autograd: attributes of a ``ctx``, tensors packed by ``saved_tensors_hooks``.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, cast
from weakref import ref

import torch
from torch import nn

from .. import _torch_private
from ..errors import CollectiveError, ParameterChangedError, ParameterError, ParameterMovedError, UnsupportedError
from ..interfaces import (
    Collectives,
    LinearForm,
    Observer,
    OffloadManager,
    PrecisionCaster,
    UnitDtypes,
    UnitEvent,
    UnitOperation,
    UnitSpec,
    WireSpec,
)
from ..planning.answers import is_packed
from ..planning.groups import UnitRanks
from ..planning.launches import alike
from ..planning.layout import FlatLayout
from ..planning.plan import ManagedParameter
from .bindings import Bindings, Shown, Swap, lazily
from .buffers import FlatBuffer, SecondaryShard, shard_in, slices_of
from .direct import write_directly
from .flat import FlatParameter
from .formed import FormBuffer, compute_with_forms
from .gather import Masters, Source
from .gradients import Gradients
from .parameters import MasterViews
from .peers import Audit
from .states import Fresh, Phase, Reshard, UnitState

if TYPE_CHECKING:
    from .module_state import ModuleState
    from .root import Root

gradient_of = attrgetter("grad")


_RELEASED = (UnitState.SHARDED, UnitState.SHARDED_POST_FORWARD)


class Unit(ABC):
    """Parameters that are gathered together.

    Three tensors carry a parameter's values:

    - the *original* ``nn.Parameter`` that the user made, from now on a view of the *master* shard (this rank's elements
      only, 1-D or ``(rows, ...)``; the whole parameter where there is one shard); what optimizers update. In the place
      of a ``DTensor`` stands a plain parameter over this rank's elements of its local tensor;
    - the *master*: this rank's slice of the flat unit, in the original dtype;
    - the *view* of the gather buffer, a leaf in compute dtype, which modules see during compute: for a ``DTensor``, one
      over the view.
    """

    #: That of its model; None before a drop-in has composed the model.
    root: Root = cast("Root", None)
    #: That of the module whose forward gathers it.
    module_state: ModuleState
    #: Whether large linear layers write their weight gradients into the reduction's input.
    writes_gradients_directly = True
    #: Whether a drop-in makes state dicts of its modules and of optimizers.
    answers_state_dicts = False
    #: Whether modules hold whole parameters where these stay behind forward, until backward or ``reshard``.
    keeps_whole = False
    #: Whether its parameters gather themselves. Its master is on the meta device then.
    extended = False

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        parameters: Sequence[ManagedParameter],
        ranks: UnitRanks,
        master: torch.Tensor,
        dtypes: UnitDtypes,
        caster: PrecisionCaster,
        offload: OffloadManager,
        *,
        reshard: Reshard,
        parks: bool,
        wire: WireSpec | None = None,
        forms: Sequence[LinearForm] = (),
        neighbours: Collectives | None = None,
        launch_numel: int | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        """Make what a unit knows before its first forward.

        Args:
            spec, ranks, dtypes, caster, offload, parks, wire, forms: As planned.
            layout, parameters: Where its parameters lie, and these in the same order.
            master: Where it lives, parked already if ``parks``.
            reshard: Whether it is released after forward.
            neighbours: Ranks among which it is gathered for backward under ``Reshard.PARTLY``; None under no other.
            launch_numel: See there; None for all of its elements.
            observers: Told of gathers, compute and reductions.
        """
        self.spec = spec
        self.layout = layout
        self.parameters = tuple(parameters)
        self.ranks = ranks
        self.dtypes = dtypes
        self.caster = caster
        self.offload = offload
        self.trainable = any(parameter.original.requires_grad for parameter in parameters)
        # Parameters that modules see in another form than the plain view, as ``DTensor``.
        self._leaf_forms = [(index, each.leaf) for index, each in enumerate(parameters) if each.leaf is not None]
        # Their gradients are redistributed by name: uneven ones may lie in another order on other ranks of their mesh.
        self._leaf_forms.sort(key=lambda pair: parameters[pair[0]].names)
        #: The classes of all parameters, or of none.
        self.packed = [each.packed for each in parameters if each.packed is not None]
        for packed in self.packed:
            packed.move(spec.device)
        #: Elements by which launches of communication are planned: the same on all ranks of the world, whichever part
        #: of the unit they hold.
        self.launch_numel = layout.padded_numel if launch_numel is None else launch_numel
        #: Whether ``offload`` keeps the master and the gradient.
        self.parks = parks
        #: Stands for all parameters in an optimizer; None where nobody asked for it.
        self.flat: FlatParameter | None = None
        #: How often an optimizer stepped over the master.
        self.steps = 0
        self.pieces = layout.pieces(ranks.shard_rank)
        #: How its linear layers compute with the bytes of a gather; empty where they compute in a dtype.
        self.forms = tuple(forms)
        #: How the unit travels where its caster encodes it; None for as it computes.
        self.wire = wire
        self.reshard_policy = reshard
        self.neighbours = neighbours
        self.observers = observers
        self.buffer: FlatBuffer
        #: What the next gather is made from: the shards of all ranks, or what neighbours keep behind a forward.
        self.source: Source
        self._shards: Source
        self.bindings: Bindings
        #: Reduced in the backward that runs.
        self.reduced = False
        #: Of a split module: called with a module and the attribute of it that another module's forward reads.
        self.on_lazy_use: Callable[[Unit, nn.Module, str], None] | None = None
        #: Where it was used since its gather, as ``CommStreams.here`` says: one place, but for models that compute on
        #: several streams.
        self.places: list[object] = []
        #: Whether gather buffers hold their memory where they are released.
        self.keeps_buffer = False
        # Whether no optimizer stepped behind the last backward; the versions of parameters when a forward began last.
        self._outlives = False
        self._versions: Sequence[int] = ()
        # The versions of whole parameters that modules hold between forward and backward; None where they hold none.
        self._held: Sequence[int] | None = None
        self._use_master(master)

    def _use_master(self, master: torch.Tensor) -> None:
        """Build what depends on the master: its dtype, its place, and the parameters that view it."""
        self.master = master
        # One shard and no cast: the master itself serves compute, and nothing is ever gathered.
        same = self.ranks.owner is None and self.dtypes.compute == self.master.dtype
        self.permanent = same and not (self.parks or self.extended or self.forms)
        self.originals = self._make_originals()
        self.gradients = self._make_gradients()
        self._take_gradient_dtype(self.originals.tensors)
        self.fresh = Fresh.NOW if self.permanent else Fresh.NOT
        self.prepared = False
        self.leaves: list[torch.Tensor] = []
        #: What ``leaves`` have as gradients where none has any.
        self.no_gradients: list[None] = []
        for name in ("buffer", "bindings", "source", "_shards"):
            # They would keep the memory of the master before, which is elsewhere now to make room.
            self.__dict__.pop(name, None)
        self._training_buffer: FlatBuffer | None = None
        self._eval_buffer: FlatBuffer | None = None
        #: Whether the caster wants another dtype in eval mode.
        self.follows_mode = self.caster.full_precision_in_eval(self.spec)
        self._full_precision_in_eval = (
            self.follows_mode
            and not self.permanent
            and self.dtypes.compute != self.spec.master_dtype
            and self.wire is None
            and not (self.extended or self.forms)
        )
        self.state = UnitState.UNSHARDED if self.permanent else UnitState.SHARDED

    def _make_bindings(self) -> Bindings:
        beside: Sequence[Swap] = ()
        if isinstance(self.buffer, FormBuffer):
            direct = self.writes_gradients_directly and not self.gradients.widens
            beside = compute_with_forms(self.parameters, self.buffer, self.claim_gradient if direct else None)
        # Memory that is never released is shown everywhere: the leaf collects the gradient that is reduced. With other
        # originals and plain tensors torch refuses to compute.
        elsewhere = Shown.VIEWS if self.permanent else Shown.ORIGINALS
        if self.on_lazy_use is not None and not self.permanent:
            elsewhere = Shown.GUARDS
            sites = (module for each in self.parameters for module, _ in each.sites)
            beside = [*beside, *lazily(sites, partial(self.on_lazy_use, self))]
        return Bindings(self.parameters, self.leaves, elsewhere=elsewhere, beside=beside)

    def _take_gradient_dtype(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if self.dtypes.grad != self.spec.master_dtype:
            # Autograd refuses a gradient of another dtype than its parameter's unless the parameter says so.
            for parameter in parameters:
                parameter.grad_dtype = self.dtypes.grad

    @abstractmethod
    def _make_originals(self) -> MasterViews:
        """What modules and optimizers hold, over the master."""

    def _make_gradients(self) -> Gradients:
        return Gradients(self, self.layout, self.dtypes, self.originals.gradient_targets, self.keeper)

    @property
    def name(self) -> str:
        """Its name in messages: that of its module, ``(root)`` for the outermost, and what sets it apart there."""
        return self.spec.label

    @property
    def keeper(self) -> OffloadManager | None:
        """The manager that the unit is parked with; None where it is not."""
        return self.offload if self.parks else None

    def flatten(self) -> list[torch.nn.Parameter]:
        """What an optimizer may have that treats all elements alike."""
        return list(self.originals.tensors)

    @property
    def receivers(self) -> Sequence[torch.nn.Parameter]:
        """The parameters whose ``.grad`` the reduced gradient arrives in."""
        return self.originals.tensors if self.flat is None else (self.flat.parameter,)

    def local(self, slot: int) -> torch.nn.Parameter:
        """The elements that this rank has of the parameter at ``slot``, as a plain parameter over their memory."""
        return self.parameters[slot].original

    def slots_of_receivers(self) -> Iterator[tuple[int | None, torch.nn.Parameter]]:
        """``receivers``, each with its index in the layout; None of a flat one, which stands for all parameters."""
        receivers = self.receivers
        return zip(range(len(receivers)) if len(receivers) == len(self.parameters) else (None,), receivers, strict=True)

    def refuse_extended(self, call: str) -> None:
        """Raise UnsupportedError where the unit has no flat master, which ``call`` needs."""
        if self.extended:
            parameter = self.parameters[0]
            raise UnsupportedError(
                f"{call}: '{parameter.names[0]}' gathers itself (fsdp_pre_all_gather), and lies in no flat buffer "
                f"(rank {self.ranks.world.rank}). Give model.parameters() to an optimizer of torch; "
                "polyshard.checkpoint, polyshard.state and polyshard.stream have its values."
            )

    @property
    def own_nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.master.nbytes

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """How many ranks of the model hold the same elements: for each parameter, or one number for all of them."""
        if not any(each.part for each in self.parameters):
            return (self.ranks.copies(),)
        found = tuple(self.ranks.copies(each.part) for each in self.parameters)
        return found if len(set(found)) > 1 else found[:1]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the gather buffer while it has memory; 0 where the master serves compute."""
        if self.forms:
            return self.layout.world_size * sum(nbytes for form in self.forms for nbytes in form.lanes)
        return 0 if self.permanent else self.layout.padded_numel * self.dtypes.compute.itemsize

    @property
    def secondary_nbytes(self) -> int:
        """Bytes that this rank keeps of the gather buffer where that is released."""
        among = self._gatherers
        return 0 if among is None else self.gathered_nbytes // among.world_size

    def prepare(self) -> None:
        """Make the gather buffer and its views: before the first forward, not while the model is being cut."""
        self._training_buffer = self._make_buffer(self.dtypes.compute)
        self._bind(self._training_buffer)
        if self.writes_gradients_directly and not self.forms and not self.gradients.widens:
            write_directly(self.parameters, self.layout, self.claim_gradient)
        self.prepared = True

    def _make_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        if self.permanent:
            return FlatBuffer.over(self.master, self.layout)
        if self.forms:
            shards, own = self.layout.world_size, self.ranks.shard_rank
            return FormBuffer(self.layout, dtype, self.spec.device, self.forms, shards=shards, rank=own)
        gather = self.ranks.gather
        if gather is not None and gather.capabilities.fixed_addresses:
            return FlatBuffer.lease(self.layout, dtype, gather)
        rank, neighbours = self.ranks.shard_rank, self._gatherers
        return FlatBuffer.allocate(self.layout, dtype, self.spec.device, rank=rank, gathers=True, neighbours=neighbours)

    def _find_sources(self) -> None:
        """Tell what gathers are made from. Before ``prepare`` there is nothing to gather."""
        if self._training_buffer is None:
            return
        gather, buffer, part, route = self.ranks.gather, self.buffer, self.buffer.secondary, self.ranks.route
        if part is not None and route is not None:
            self._gather_from(part, Masters(route, part, self.master, self.keeper))
            self._shards = self.source
            return
        slices = [] if self.extended or self.forms else slices_of(self.master, self.layout)
        self._shards = Source(gather, self.master, self.keeper, self.wire, slices, buffer.pairs, buffer.owns)
        self.source = self._shards
        if part is not None and self.state is UnitState.SHARDED_POST_FORWARD:
            self._gather_from(part)

    def _gather_from(self, part: SecondaryShard, masters: Masters | None = None) -> None:
        # What is kept computes as it is: there is nothing to cast, to decode or to fetch.
        self.source = Source(self._gatherers, part.memory, None, None, part.slices, part.pairs, part.owns, masters)

    @property
    def _gatherers(self) -> Collectives | None:
        """The ranks that gather it from secondary shards; None where nobody does."""
        return self.neighbours if self.ranks.route is None else self.ranks.gather

    def keep_buffer(self, keeps: bool) -> None:
        """Whether whole parameters keep their memory, and so their addresses, where they are released."""
        self.keeps_buffer = keeps
        for buffer in (self._training_buffer, self._eval_buffer):
            if buffer is not None:
                buffer.keep(keeps)

    def _bind(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        buffer.keeps = self.keeps_buffer
        self._find_sources()
        self.leaves = self._leaves_over(buffer.views)
        for index, form in self._leaf_forms:
            self.leaves[index] = form.as_leaf(buffer.views[index])
        if self.packed:
            self.leaves = [packed.over(view) for packed, view in zip(self.packed, buffer.views, strict=True)]
        self.no_gradients = [None] * len(self.leaves)
        if not self.permanent:
            buffer.follow_versions(self._with_versions())
            for leaf, parameter in zip(self.leaves, self.parameters, strict=True):
                leaf.set_ = partial(_set_to_itself, ref(leaf), parameter)  # type: ignore[method-assign]
        self.bindings = self._make_bindings()
        self.follow_requires_grad()

    def _leaves_over(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What computes and collects gradients: parameters, as programs that look at them in a forward expect."""
        for view in views:
            # As a parameter is told. Operations on its class itself take longer.
            view._is_param = True
        return list(views)

    def _with_versions(self) -> list[torch.Tensor]:
        """``versioned`` of its buffer."""
        return [self.buffer.flat, *(self.leaves[index] for index, _ in self._leaf_forms)]

    def use_ranks(self, ranks: UnitRanks) -> None:
        """Communicate over ``ranks`` from now on, whose sizes are those of the ranks before."""
        self.ranks = ranks
        self.__dict__.pop("copies", None)
        self._find_sources()

    def use_neighbours(self, neighbours: Collectives) -> None:
        """Gather for backward among ``neighbours``, the same ranks as before, from now on."""
        self.neighbours = neighbours
        self._find_sources()

    def join(
        self,
        module_name: str,
        names_of: Callable[[ManagedParameter], tuple[str, ...]],
        ranks_of: Callable[[UnitRanks], UnitRanks] | None,
    ) -> None:
        """Become a unit of a larger model, of its module ``module_name``, with the ranks that ``ranks_of`` tells.

        Nobody else keeps ``spec`` or ``ranks``: they change here.
        """
        if ranks_of is not None:
            self.use_ranks(ranks_of(self.ranks))
        for each in self.parameters:
            each.names = names_of(each)
        self.spec = dataclasses.replace(
            self.spec,
            name=f"{module_name}{self.spec.suffix}",
            parameter_names=tuple(each.names[0] for each in self.parameters),
            is_root=False,
        )
        self._find_sources()

    @property
    def pending(self) -> bool:
        """Whether a view has a gradient that was not taken yet."""
        if self.packed:
            return False
        # Compared as lists, at C speed: asked of every unit at the end of every backward.
        return list(map(gradient_of, self.leaves)) != self.no_gradients

    def take_gradients(self) -> list[torch.Tensor | None]:
        """The views' gradients, which they give up."""
        computed_at = self.gradients.places
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
        """Where the gradient of view ``index`` may be written in the backward that runs; None for memory of its own."""
        root = self.root
        if (
            not (root.synchronises and self.module_state.synchronises and root.backward.accumulates)
            or self.buffer is not self._training_buffer
            or self.leaves[index].grad is not None
        ):
            return None
        return self.gradients.claim(index, root.reducer)

    def keep_memory(self) -> None:
        """Keep memory alive that a communication which did not end may still read and write."""
        if self.prepared and self.buffer.attached:
            self.buffer.pin()
        self.gradients.keep_memory()

    def discard_gradients(self) -> None:
        """Drop gradients of a backward that failed."""
        self.take_gradients()
        self.gradients.discard()

    def follow_requires_grad(self) -> None:
        """Take over a ``requires_grad`` that the user changed on an original, unless the unit can have no gradients."""
        if (self.packed or is_packed(self.spec.master_dtype)) and any(self.originals.trained):
            kind = self.packed[0].cls.__name__ if self.packed else str(self.spec.master_dtype)
            raise ParameterError(
                f"Parameters of {self.name} are {kind}, and are to be trained now (rank {self.ranks.world.rank}). "
                "Freeze them with requires_grad_(False), or shard them in a wider dtype."
            )
        if self.flat is not None:
            self.flat.follow_requires_grad()
        for trained, leaf in zip(self.originals.trained, self.leaves, strict=True):
            leaf.requires_grad_(trained)
        self.trainable = any(leaf.requires_grad for leaf in self.leaves)

    def choose_buffer(self, training: bool) -> None:
        """Compute in the master dtype while the module is in eval mode, where the caster wants that."""
        if not self._full_precision_in_eval:
            return
        if not training and self._eval_buffer is None:
            self._eval_buffer = self._make_buffer(self.spec.master_dtype)
        wanted = self._training_buffer if training else self._eval_buffer
        if wanted is not None and wanted is not self.buffer:
            self.reshard()
            self._bind(wanted)

    @property
    def gathered(self) -> str:
        """What ranks compare of a gather: its name, elements and dtype of its result, bytes where the unit is encoded.

        Where other ranks have other parts of the unit: the elements by which launches are planned.
        """
        numel, dtype, among = self.launch_numel, self.buffer.dtype, ""
        if self.state is UnitState.SHARDED_POST_FORWARD and self.neighbours is not None:
            among = f" among {self.neighbours.world_size} ranks"
        elif self.forms:
            numel, dtype = self.gathered_nbytes, torch.uint8
        elif self.wire is not None:
            dtype = torch.uint8
            if self.ranks.number == self.ranks.world.world_size:
                numel = self.wire.nbytes_per_rank * self.ranks.shard_size
        return f"{self.name} ({numel} elements of {dtype}{among})"

    def unshard(self) -> None:
        """Issue the gather, unless the parameters are there or on their way."""
        if self.fresh.due:
            self.issue_gather()

    def issue_gather(self) -> None:
        """Issue the gather, which is due, by itself."""
        unshard_together((self,))

    def wait(self) -> None:
        """Order compute after the gather. To be called wherever the unit is used."""
        streams = self.root.streams
        if self.state is UnitState.GATHERING:
            for observer in self.observers:
                observer(UnitEvent(UnitOperation.WAIT, self.spec))
            streams.arrive(self)
            if self.root.audit is not None:
                self._compare_gathered(self.root.audit)
            for observer in self.observers:
                observer(UnitEvent(UnitOperation.WAIT, self.spec, begins=False))
            versioned = self.buffer.versioned
            _torch_private.set_versions(versioned, [self.steps] * len(versioned))
            self.state = UnitState.UNSHARDED
        here = streams.here()
        if here not in self.places:
            if self.places and not self.permanent:
                streams.follow()
            self.places.append(here)

    def _compare_gathered(self, audit: Audit) -> None:
        among = self.ranks.gather
        if audit.done or among is None or self.name in audit.gathered:
            return
        audit.gathered.add(self.name)
        with self.root.recorder.during("comparison of a gather", (self.spec,), self.root.phase is Phase.BACKWARD):
            audit.compare_gathered(among, self.name, *self._arrived())

    def _arrived(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a gather brought, this rank's part of it, and what that must be; None where nobody knows."""
        if self.forms:
            whole = torch.cat(self.buffer.parts)
            return whole, torch.cat([own for _, own in self.buffer.pairs]), None
        own = shard_in(self.buffer.flat, self.layout, self.ranks.shard_rank)
        # Nothing arrives between segments.
        whole = torch.cat(self.buffer.parts) if self.layout.segments else self.buffer.flat
        return whole, own, None if self.parks or self.wire is not None else self.master

    def show(self) -> None:
        """Let modules see whole parameters."""
        self.bindings.show(Shown.VIEWS)

    def hold(self) -> None:
        """Let modules hold whole parameters outside of compute, too: nothing may be written to them there."""
        self.show()
        self._held = self.buffer.versions

    def hide(self) -> None:
        """``conceal``, unless the parameters stay whole until backward and modules hold them so."""
        if self.keeps_whole and self._is_kept_whole:
            self.hold()
        else:
            self.conceal()

    def refuse_lost_writes(self) -> None:
        """Raise where a program wrote to whole parameters that modules hold: the next gather would not have it.

        Raises:
            ParameterChangedError: once; what was written is dropped.
        """
        if self._held is not None and self._held != self.buffer.versions:
            self.reshard()
            raise ParameterChangedError(
                f"Whole parameters of '{self.name}' were written to outside of its forward (rank "
                f"{self.ranks.world.rank}). They are copies, and the parameters keep their values. Call reshard() "
                "before you write, or write inside of polyshard.unsharded()."
            )

    @property
    def _is_kept_whole(self) -> bool:
        shown = self.prepared and self.bindings.shown is Shown.VIEWS
        return shown and self.state is UnitState.UNSHARDED and not self.fresh.due

    def conceal(self) -> None:
        """Let modules see the originals again; during a forward, what ``Bindings.elsewhere`` says."""
        if self.prepared:
            bindings, root = self.bindings, self.root
            shown = bindings.elsewhere if root is not None and root.phase is Phase.FORWARD else Shown.ORIGINALS
            if bindings.shown is not shown:
                kept = self.keeps_whole and bindings.shown is Shown.VIEWS
                if kept and self.originals.take_trained(self.leaves):
                    self.follow_requires_grad()
                self._held = None
                bindings.show(shown)

    def reshard(self) -> None:
        """Release the gather buffer, and what is kept of it behind a forward."""
        self.conceal()
        if self.permanent or self.state is UnitState.SHARDED:
            return
        self.fresh = Fresh.NOT
        if self.state is UnitState.SHARDED_POST_FORWARD:
            self._drop_post_forward()
            return
        self.root.streams.release(self)
        self.places.clear()
        self.state = UnitState.SHARDED
        for observer in self.observers:
            observer(UnitEvent(UnitOperation.RELEASE, self.spec))

    def reshard_post_forward(self) -> None:
        """Release the gather buffer, but for the part of it that the next gather is made from, among neighbours."""
        part = self.buffer.secondary
        if part is None or self.state in _RELEASED:
            self.reshard()
            return
        self.conceal()
        self.root.streams.keep(self, part)
        self.places.clear()
        self._gather_from(part)
        self.state, self.fresh = UnitState.SHARDED_POST_FORWARD, Fresh.NOT
        for observer in self.observers:
            observer(UnitEvent(UnitOperation.RELEASE, self.spec))

    def _drop_post_forward(self) -> None:
        assert self.buffer.secondary is not None
        self.buffer.secondary.release()
        self.source = self._shards
        self.state = UnitState.SHARDED

    def _hide_whole(self) -> bool:
        """Hide, and keep no part; returns whether there are gathered parameters."""
        self.hide()
        if self.state is UnitState.SHARDED_POST_FORWARD:
            self._drop_post_forward()
        return not (self.permanent or self.state is UnitState.SHARDED)

    def keep(self) -> None:
        """Keep the parameters for this rank's recomputation, where the ranks' common order releases them."""
        if self._hide_whole():
            self.wait()
            self.fresh = Fresh.ALONE

    def retain(self) -> None:
        """Keep the parameters whole for later forwards, until an optimizer steps."""
        if self._hide_whole():
            self.root.awaits_optimizer = True
            if not self.fresh.due:
                self.fresh = Fresh.RETAINED

    def outlive(self) -> None:
        """A backward ended: what is left of its parameters serves the next forward too, unless an optimizer steps."""
        self._outlives = self.root.awaits_optimizer = True

    def outdate(self) -> None:
        """The master gets other values: parameters that are retained, or kept in part, are gathered again at their next
        use."""
        if self.prepared and self._shards.masters is not None:
            self._shards.masters.current = False
        if self.fresh is Fresh.RETAINED:
            self.refuse_lost_writes()
            self.fresh = Fresh.NOT
            self.conceal()
        elif self.state is UnitState.SHARDED_POST_FORWARD:
            self._drop_post_forward()

    def expire(self) -> None:
        """A new step begins: parameters that stayed gathered may be older than the master, and are gathered again."""
        module_state = self.module_state
        chosen = self._shards.masters is not None or not module_state.releases_by_default
        if chosen or not module_state.releases_after_backward:
            # What programs write to parameters between backwards is seen by the counters of these. Not by them is seen
            # what ``.data`` hides, as in updates that are written by hand: these have no optimizer, or no backward.
            before, self._versions = self._versions, self.originals.versions
            # An optimizer in the backward steps over what has gradients on this rank, and other ranks may gather.
            lasts = self._outlives and self.root.stepped and self.root.backward_step is None
            self._outlives = False
            if before != self._versions or (chosen and not lasts):
                self.outdate()
        if self.permanent:
            self.places.clear()
        elif self.fresh is Fresh.AHEAD:
            self.fresh = Fresh.NOW
        elif self.fresh is not Fresh.RETAINED:
            if self.state is UnitState.SHARDED_POST_FORWARD:
                self._drop_post_forward()
            self.fresh = Fresh.NOT
        gradients = self.gradients
        if gradients.places or gradients.input.claimed:
            gradients.drop_unreduced()

    def releases(self, turns: bool) -> bool:
        """Whether the unit is released after a forward; ``turns``: its backward is expected to follow at once."""
        policy = self.reshard_policy
        return policy is Reshard.ALWAYS or policy is Reshard.PARTLY or (policy is Reshard.UNLESS_TURNING and not turns)

    def adopt_changes(self) -> None:
        """Take over changes that the user made to the originals since the last forward. As of ``MasterViews``."""
        if self.fresh is Fresh.AHEAD:
            # Modules may hold views, which are no changes.
            self.conceal()
        if self.flat is not None:
            self.flat.adopt_changes()
        if self.originals.adopt_changes() and self.prepared:
            self.follow_requires_grad()

    def refuse_changes(self) -> None:
        """Refuse parameters replaced or written to between forward and backward; take over ``requires_grad``."""
        self.refuse_lost_writes()
        self.originals.refuse_changes(held=self.bindings.shown is Shown.ORIGINALS)
        # Autograd asks a leaf whether it wants its gradient when that arrives.
        if self.originals.retrained():
            self.follow_requires_grad()

    def give_up_gather(self) -> None:
        """Release the memory of a gather that could not be issued."""
        if self.state in _RELEASED:
            self.buffer.release()
        if self.state is not UnitState.SHARDED:
            self.reshard()

    def _issued(self) -> None:
        if self.state is UnitState.SHARDED_POST_FORWARD:
            # Read where its memory returns to, on the stream that gathers.
            self._drop_post_forward()
        self.state = UnitState.GATHERING
        self.places.clear()
        self.fresh = Fresh.NOW


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


def unshard_due(units: Sequence[Unit]) -> None:
    """Issue the gathers of those of ``units``, of one module state, that are due, as one communication."""
    due = [unit for unit in units if unit.fresh.due]
    if len(due) == 1:
        due[0].issue_gather()
    elif due:
        unshard_together(due)


def unshard_together(units: Sequence[Unit]) -> None:
    """Issue the gathers of ``units`` of one root, all of them due, as one communication."""
    root = units[0].root
    entry = root.recorder.issue("all_gather", [unit.spec for unit in units], root.phase is Phase.BACKWARD)
    try:
        if root.audit is not None or root.announce is not None:
            # Among those that gather: replicas may evaluate apart.
            for same in alike(units, [id(unit.source.group) for unit in units]) if len(units) > 1 else (units,):
                among = same[0].source.group
                if among is not None:
                    names = [unit.name if root.audit is None else unit.gathered for unit in same]
                    root.streams.meet(among.announce, "all_gather of " + ", ".join(names))
        root.streams.gather(units)
    except BaseException as error:
        if isinstance(error, CollectiveError):
            root.recorder.fail(error, entry)
        for unit in units:
            unit.give_up_gather()
        if isinstance(error, CollectiveError):
            root.recorder.refuse(error, entry)
        raise
    for unit in units:
        unit._issued()
