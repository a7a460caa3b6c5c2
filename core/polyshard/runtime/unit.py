"""Parameters that are gathered together: what was planned of them, and the parts that do the work."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from ..errors import UnsupportedError
from ..interfaces import (
    Collectives,
    GatherEncoding,
    LinearForm,
    Observer,
    OffloadManager,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
)
from ..planning.groups import UnitRanks
from ..planning.layout import FlatLayout
from ..planning.plan import ManagedParameter
from . import direct, formed
from .gathered import GatheredParameters
from .gradients import Gradients
from .parameters import HeldParameters
from .states import Reshard, Retention

if TYPE_CHECKING:
    from .module_state import ModuleState
    from .root import Root


class Unit(ABC):
    """Parameters that are gathered together: what was planned of them, and four parts with a job each.

    ``held`` is what modules and optimizers hold, ``gathered`` the whole parameters that compute, ``gradients`` what
    becomes of theirs; ``retention`` says when whole parameters are released.

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
        precision: PrecisionPlugin,
        offload: OffloadManager,
        *,
        reshard: Reshard,
        offloaded: bool,
        encoding: GatherEncoding | None = None,
        forms: Sequence[LinearForm] = (),
        post_forward_ranks: Collectives | None = None,
        launch_numel: int | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        """Make what a unit knows before its first forward.

        Args:
            spec, ranks, dtypes, precision, offload, offloaded, encoding, forms: As planned.
            layout, parameters: Where its parameters lie, and these in the same order.
            master: Where it lives, offloaded already if ``offloaded``.
            reshard: Whether it is released after forward.
            post_forward_ranks: Ranks among which it is gathered for backward under ``Reshard.PARTLY``; None under no
                other.
            launch_numel: See there; None for all of its elements.
            observers: Told of gathers, compute and reductions.
        """
        self.spec = spec
        self.layout = layout
        self.parameters = tuple(parameters)
        self.ranks = ranks
        self.dtypes = dtypes
        self.precision = precision
        self.offload = offload
        #: Whether ``offload`` keeps the master and the gradient.
        self.offloaded = offloaded
        #: How the unit travels where its precision plugin encodes it; None for as it computes.
        self.encoding = encoding
        #: How its linear layers compute with the bytes of a gather; empty where they compute in a dtype.
        self.forms = tuple(forms)
        self.post_forward_ranks = post_forward_ranks
        self.observers = observers
        #: Elements by which launches of communication are planned: the same on all ranks of the world, whichever part
        #: of the unit they hold.
        self.launch_numel = layout.padded_numel if launch_numel is None else launch_numel
        self.pieces = layout.pieces(ranks.shard_rank)
        #: The classes of all parameters, or of none.
        self.packed = [each.packed for each in parameters if each.packed is not None]
        for packed in self.packed:
            packed.move(spec.device)
        #: Whether any of its parameters is trained.
        self.trainable = any(parameter.original.requires_grad for parameter in parameters)
        #: How often an optimizer stepped over the master.
        self.steps = 0
        #: Of a split module: called with a module and the attribute of it that another module's forward reads.
        self.on_lazy_use: Callable[[Unit, nn.Module, str], None] | None = None
        self.retention = Retention(self, reshard)
        self.use_master(master)
        if self.forms:
            formed.take_forwards(self.parameters)
        elif self.writes_gradients_directly:
            direct.take_forwards(self.parameters, layout)

    def use_master(self, master: torch.Tensor) -> None:
        """Let ``master`` be the master from now on, and make the parts over it."""
        #: This rank's shard (``[shard_numel]``), where it is offloaded if it is.
        self.master = master
        #: One shard and no cast: the master itself serves compute, and nothing is ever gathered.
        self.permanent = (
            self.ranks.owner is None
            and self.dtypes.compute == master.dtype
            and not (self.offloaded or self.extended or self.forms)
        )
        self.held = self._make_held()
        self.gradients = self._make_gradients()
        self.take_gradient_dtype(self.held.tensors)
        before: GatheredParameters | None = self.__dict__.pop("gathered", None)
        keeps = before is not None and before.keeps_buffer
        # It would keep the memory of the master before, which is elsewhere now to make room.
        del before
        self.gathered = self._make_gathered(keeps)

    @abstractmethod
    def _make_held(self) -> HeldParameters:
        """What modules and optimizers hold, over the master."""

    def _make_gathered(self, keeps_buffer: bool) -> GatheredParameters:
        return GatheredParameters(self, keeps_buffer=keeps_buffer)

    def _make_gradients(self) -> Gradients:
        targets, placed = self.held.gradient_targets, self.held.placed
        gradients = Gradients(self, self.layout, self.dtypes, targets, self.offload_manager, placed)
        before: Gradients | None = getattr(self, "gradients", None)
        if before is not None:
            # What the user set, before parameters had memory or another dtype.
            gradients.scale, gradients.fills_unused = before.scale, before.fills_unused
            gradients.reduced = before.reduced
        return gradients

    def take_gradient_dtype(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let ``parameters`` have gradients in the dtype of the unit's."""
        if self.dtypes.grad != self.spec.master_dtype:
            # Autograd refuses a gradient of another dtype than its parameter's unless the parameter says so.
            for parameter in parameters:
                parameter.grad_dtype = self.dtypes.grad

    @property
    def name(self) -> str:
        """Its name in messages: that of its module, ``(root)`` for the outermost, and what sets it apart there."""
        return self.spec.label

    @property
    def offload_manager(self) -> OffloadManager | None:
        """The manager that offloads the unit; None where it is not."""
        return self.offload if self.offloaded else None

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """How many ranks of the model hold the same elements: for each parameter, or one number for all of them."""
        if not any(each.part for each in self.parameters):
            return (self.ranks.copies(),)
        found = tuple(self.ranks.copies(each.part) for each in self.parameters)
        return found if len(set(found)) > 1 else found[:1]

    def refuse_extended(self, call: str) -> None:
        """Raise UnsupportedError where the unit has no flat master, which ``call`` needs."""
        if self.extended:
            parameter = self.parameters[0]
            raise UnsupportedError(
                f"{call}: '{parameter.names[0]}' gathers itself (fsdp_pre_all_gather), and lies in no flat buffer "
                f"(rank {self.ranks.world.rank}). Give model.parameters() to an optimizer of torch; "
                "polyshard.checkpoint, polyshard.state and polyshard.stream have its values."
            )

    def use_ranks(self, ranks: UnitRanks) -> None:
        """Communicate over ``ranks`` from now on, whose sizes are those of the ranks before."""
        self.ranks = ranks
        self.__dict__.pop("copies", None)
        self.gathered.find_sources()

    def use_post_forward_ranks(self, post_forward_ranks: Collectives) -> None:
        """Gather for backward among ``post_forward_ranks``, the same ranks as before, from now on."""
        self.post_forward_ranks = post_forward_ranks
        self.gathered.find_sources()

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

    def keep_memory(self) -> None:
        """Keep memory alive that a communication which did not end may still read and write."""
        self.gathered.keep_memory()
        self.gradients.keep_memory()

    def discard_gradients(self) -> None:
        """Drop gradients of a backward that failed."""
        self.gathered.take_gradients()
        self.gradients.discard()
