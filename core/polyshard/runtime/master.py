"""This rank's part of a unit: the master, the parameters that view it, and where their gradients arrive."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from ..errors import UnsupportedError
from ..interfaces import LinearForm, Observer, OffloadManager, PrecisionCaster, UnitDtypes, UnitSpec
from ..planning.groups import UnitRanks
from ..planning.layout import FlatLayout
from ..planning.plan import ManagedParameter
from .flat import FlatParameter
from .gradients import Gradients
from .parameters import MasterViews


class UnitMaster(ABC):
    """The master of one unit, who holds the others, and who reads and trains it. ``Unit`` gathers it."""

    observers: tuple[Observer, ...]
    #: Whether a drop-in makes state dicts of its modules and of optimizers.
    answers_state_dicts = False
    #: Whether its parameters gather themselves. Its master is on the meta device then.
    extended = False

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        parameters: Sequence[ManagedParameter],
        ranks: UnitRanks,
        dtypes: UnitDtypes,
        caster: PrecisionCaster,
        offload: OffloadManager,
        *,
        parks: bool,
        forms: Sequence[LinearForm],
    ) -> None:
        """Arguments as of ``Unit``. ``_use_master`` follows."""
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
        self.launch_numel = layout.padded_numel
        #: Whether ``offload`` keeps the master and the gradient.
        self.parks = parks
        #: Stands for all parameters in an optimizer; None where nobody asked for it.
        self.flat: FlatParameter | None = None
        #: How often an optimizer stepped over the master.
        self.steps = 0
        self.pieces = layout.pieces(ranks.shard_rank)
        #: How its linear layers compute with the bytes of a gather; empty where they compute in a dtype.
        self.forms = tuple(forms)

    def _use_master(self, master: torch.Tensor) -> None:
        """Build what depends on the master: its dtype, its place, and the parameters that view it."""
        self.master = master
        # One shard and no cast: the master itself serves compute, and nothing is ever gathered.
        same = self.ranks.owner is None and self.dtypes.compute == self.master.dtype
        self.permanent = same and not (self.parks or self.extended or self.forms)
        self.originals = self._make_originals()
        before: Gradients | None = getattr(self, "gradients", None)
        self.gradients = self._make_gradients()
        if before is not None:
            before.let_go()
        self._take_gradient_dtype(self.originals.tensors)

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

    def use_ranks(self, ranks: UnitRanks) -> None:
        """Communicate over ``ranks`` from now on, whose sizes are those of the ranks before."""
        self.ranks = ranks
        self.__dict__.pop("copies", None)

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
