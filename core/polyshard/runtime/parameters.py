"""What modules and optimizers hold of a unit.

``HeldParameters``: views of its master, outside of compute. Users move, cast, replace and freeze them between steps.
``FlatParameter``: one over the whole master, for optimizers. ``Bindings``: which tensors stand under the parameters'
names, these or the whole ones.
"""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import ParameterError, StateError
from ..planning.answers import is_packed
from ..planning.layout import Piece, Slot, product
from ..planning.plan import ManagedParameter
from .buffers import view_of

if TYPE_CHECKING:
    from .unit import Unit


@dataclass(frozen=True, slots=True)
class GradientTarget:
    """A parameter whose ``.grad`` is a range of the reduced gradient."""

    parameter: nn.Parameter
    offset: int
    """First element within this rank's shard."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    index: int | None = None
    """Which parameter of the layout it is; None where it stands for all of them."""

    @property
    def numel(self) -> int:
        return product(self.shape)


class HeldParameters(ABC):
    """What modules and optimizers hold of one unit outside of compute, over its master."""

    tensors: list[nn.Parameter]
    """Every such parameter, once."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        #: Stands for all parameters in an optimizer; None where nobody asked for it.
        self.flat: FlatParameter | None = None

    @property
    @abstractmethod
    def gradient_targets(self) -> list[GradientTarget]:
        """The parameters that receive this rank's gradient, in order of offset."""

    @property
    @abstractmethod
    def trained(self) -> list[bool]:
        """Whether each parameter of the layout is trained."""

    @property
    def versions(self) -> Sequence[int]:
        """Numbers that change where a program writes to a parameter. Not seen is what ``.data`` hides."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self._unit.master.nbytes

    @property
    def receivers(self) -> Sequence[nn.Parameter]:
        """The parameters whose ``.grad`` the reduced gradient arrives in."""
        return self.tensors if self.flat is None else (self.flat.parameter,)

    def slots_of_receivers(self) -> Iterator[tuple[int | None, nn.Parameter]]:
        """``receivers``, each with its index in the layout; None of a flat one, which stands for all parameters."""
        receivers, slots = self.receivers, range(len(self._unit.parameters))
        return zip(slots if len(receivers) == len(slots) else (None,), receivers, strict=True)

    def placed(self, index: int | None, local: torch.Tensor) -> torch.Tensor:
        """What the parameter at ``index`` is, of which ``local`` is this rank's part; None: a flat one."""
        return local

    def local(self, slot: int) -> nn.Parameter:
        """The elements that this rank has of the parameter at ``slot``, as a plain parameter over their memory."""
        return self._unit.parameters[slot].original

    def flatten(self) -> list[nn.Parameter]:
        """What an optimizer may have that treats all elements alike."""
        return list(self.tensors)

    @abstractmethod
    def expose(self) -> None:
        """Make them views of the master."""

    @abstractmethod
    def adopt_changes(self) -> None:
        """Take over changes that the user made since the last forward."""

    @abstractmethod
    def refuse_changes(self) -> None:
        """Refuse parameters replaced or written to between forward and backward; take over ``requires_grad``."""

    @abstractmethod
    def retrained(self) -> bool:
        """Whether any ``requires_grad`` changed since the last call."""

    def take_trained(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Take over ``requires_grad`` from those of ``leaves``, whole parameters, on which the user changed it.

        Returns whether there are any. For parameters that modules hold outside of compute.
        """
        return False

    def use_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        """``leaves`` compute in the place of the parameters from now on."""
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Let what computes be trained as the parameters are, which the user may have changed.

        Raises ParameterError: the unit can have no gradients.
        """
        unit, leaves = self._unit, self._unit.gathered.leaves
        if (unit.packed or is_packed(unit.spec.master_dtype)) and any(self.trained):
            kind = unit.packed[0].cls.__name__ if unit.packed else str(unit.spec.master_dtype)
            raise ParameterError(
                f"Parameters of {unit.name} are {kind}, and are to be trained now (rank {unit.ranks.world.rank}). "
                "Freeze them with requires_grad_(False), or shard them in a wider dtype."
            )
        if self.flat is not None:
            self.flat.follow_requires_grad()
        for trained, leaf in zip(self.trained, leaves, strict=True):
            leaf.requires_grad_(trained)
        unit.trainable = any(leaf.requires_grad for leaf in leaves)


def part_of_master(master: torch.Tensor, slot: Slot, piece: Piece | None, *, whole: bool) -> torch.Tensor:
    """This rank's ``piece`` of the parameter at ``slot``, over the memory of ``master``.

    ``piece``: None where this rank has no element. ``whole``: the master is the whole unit.
    """
    if whole:
        return view_of(master, slot.shape, slot.stride, slot.offset)
    if piece is None:
        shape, _ = slot.shown(0)
        return torch.empty(shape, dtype=master.dtype, device=master.device)
    return view_of(master, *slot.shown(piece.numel), piece.shard_offset)


def become(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give ``parameter`` other data, of any shape and device, without changing which object it is."""
    if not parameter.is_meta:
        parameter.data = data
        return
    # A meta tensor refuses data of another device; swapping the two objects' insides does not.
    replacement = nn.Parameter(data, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    _torch_private.swap_tensors(parameter, replacement)


class FlatParameter:
    """A ``DTensor`` of one dimension over the masters of all ranks, in the place of a unit's parameters.

    A step of the optimizer costs one tensor a unit. Padding stays zero, since its gradient is zero. The parameters'
    ``.grad`` are views of its gradient, made where somebody reads them.
    """

    def __init__(
        self,
        held: HeldParameters,
        master: torch.Tensor,
        spec: Any,
        placed: Callable[[int | None, torch.Tensor], torch.Tensor],
        name_of: Callable[[int | None], str],
    ) -> None:
        """Stand for ``held``, over ``master``.

        Args:
            spec: How it lies, ``[shards * shard_numel]``.
            placed: What makes a part of a parameter, which it is told by index, the whole.
            name_of: In messages: the parameter at an index, the unit and the rank; of None the unit and the rank.

        Raises StateError: a parameter has a gradient already, or only some of them are trained.
        """
        self._held, self.spec = held, spec
        self._placed, self._name_of = placed, name_of
        if any(parameter.grad is not None for parameter in held.tensors):
            raise StateError(
                f"A parameter of {name_of(None)} has a gradient already, which its flat parameter would not get. "
                "Call flat_parameters() before the first backward, or after zero_grad()."
            )
        with torch.inference_mode(False):
            #: This rank's elements, in the same memory.
            self.local = nn.Parameter(view_of(master, (master.numel(),), (1,), 0), requires_grad=False)
            own = _torch_private.over_own_storage(self.local.detach())
            self.parameter = _torch_private.dtensor_parameter(own, spec, requires_grad=False)
        self.follow_requires_grad()
        self.show_gradients()

    @property
    def gradient_target(self) -> GradientTarget:
        """The flat parameter, which receives all of this rank's gradient."""
        return GradientTarget(self.parameter, 0, (self.local.numel(),), (1,))

    def follow_requires_grad(self) -> None:
        """Train it where the parameters are trained.

        Raises StateError: only some of them are: weight decay and momentum would move the others.
        """
        trained = set(self._held.trained)
        self._mixed = len(trained) > 1
        if self._mixed:
            raise StateError(
                f"Only some parameters of {self._name_of(None)} are trained, but its flat parameter is updated as one. "
                "Freeze all of them, freeze them before sharding, or give model.parameters() to the optimizer."
            )
        self.parameter.requires_grad_(trained == {True})
        self.local.requires_grad_(trained == {True})

    def adopt_changes(self) -> None:
        """Raise StateError as ``follow_requires_grad``, until the user changed that."""
        if self._mixed:
            self.follow_requires_grad()

    def show_gradients(self) -> None:
        """Let ``.grad`` of the parameters be views of the flat gradient."""
        kind = _viewing()
        for target in self._held.gradient_targets:
            target.parameter.__class__ = kind
            target.parameter._polyshard_gradient = _Gradient(self, target)  # type: ignore[attr-defined]


class _Gradient:
    """The gradient of one parameter, in that of its unit's flat parameter."""

    __slots__ = ("_flat", "_target")

    def __init__(self, flat: FlatParameter, target: GradientTarget) -> None:
        self._flat, self._target = flat, target

    def read(self) -> torch.Tensor | None:
        whole = self._flat.parameter.grad
        if whole is None:
            return None
        local, target = _torch_private.local_tensor(whole), self._target
        part = local.as_strided(target.shape, target.stride, local.storage_offset() + target.offset)
        return self._flat._placed(target.index, part)

    def write(self, value: torch.Tensor | None) -> None:
        """Raises StateError: ``value`` is another gradient, and no change in place."""
        if value is None:
            # As ``zero_grad`` does, for all parameters.
            self._flat.parameter.grad = None
            return
        raise StateError(
            f".grad of {self._flat._name_of(self._target.index)} was set, which is a view of the gradient of its "
            "unit's flat parameter. Change it in place, or do without polyshard.flat_parameters."
        )

    # A parameter that is copied by itself takes no model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    @override
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()


def _nothing() -> None:
    return None


@cache
def _viewing() -> type[nn.Parameter]:
    """The class of parameters whose gradients are views of flat ones. Nothing else tells that one is read."""
    from torch.distributed.tensor import DTensor

    class FlatDTensor(DTensor):
        _polyshard_gradient: _Gradient

        @property  # type: ignore[explicit-override]  # mypy sees no override of a property that has a setter
        def grad(self) -> torch.Tensor | None:
            return self._polyshard_gradient.read()

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            self._polyshard_gradient.write(value)

        @override
        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            spec: Any = self._spec
            local = copy.deepcopy(_torch_private.local_tensor(self).detach(), memo)
            return _torch_private.dtensor_parameter(local, spec, requires_grad=self.requires_grad)

    return cast("type[nn.Parameter]", FlatDTensor)


class Shown(enum.Enum):
    """The tensors that modules see under their parameters' names."""

    ORIGINALS = "originals"
    """The user's own parameters: shards, outside of compute."""
    VIEWS = "views"
    """Whole parameters in compute dtype, during the unit's own compute."""
    GUARDS = "guards"
    """While another unit's forward runs: stand-ins that refuse to compute or, of a split module, the user's own, which
    are gathered where a module's attribute is read (``LazyParameters``)."""

    # Several look-ups a unit in each step; that of ``Enum`` is in Python.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Swap:
    """The tensors of one module's names, for each state."""

    target: dict[str, Any]
    """The dict in which the module looks names up."""
    of: dict[Shown, dict[str, Any]]


class Bindings:
    """Puts a unit's views in the place of its parameters, and the parameters back.

    Plain assignments to the modules' dicts: ``nn.Module.__setattr__`` would cost a microsecond a parameter and refuse
    tensors that are no ``nn.Parameter``, and an update a module costs more than an assignment a parameter.
    """

    def __init__(
        self,
        parameters: Sequence[ManagedParameter],
        leaves: Sequence[torch.Tensor],
        *,
        elsewhere: Shown,
        beside: Sequence[Swap] = (),
    ) -> None:
        """``elsewhere``: what other modules' forwards see; ``beside``: what else modules find in each state."""
        self.shown = Shown.ORIGINALS
        self.elsewhere = elsewhere
        self._beside = beside
        self._parameters = tuple(parameters)
        self._swaps = self._collect(leaves)
        self._updates: dict[Shown, list[tuple[dict[str, Any], str, Any]]] = {}

    def _collect(self, leaves: Sequence[torch.Tensor]) -> dict[nn.Module, Swap]:
        swaps: dict[nn.Module, Swap] = {}
        for parameter, leaf in zip(self._parameters, leaves, strict=True):
            if leaf is parameter.original:
                continue
            for module, attribute in parameter.sites:
                swap = swaps.setdefault(module, Swap(module._parameters, {shown: {} for shown in Shown}))
                swap.of[Shown.ORIGINALS][attribute] = swap.of[Shown.GUARDS][attribute] = parameter.original
                swap.of[Shown.VIEWS][attribute] = leaf
        return swaps

    def show(self, shown: Shown) -> None:
        """Let modules see ``shown``. Views must be attached by then."""
        if self.shown is not shown:
            if not self._updates:
                self._prepare()
            for target, name, tensor in self._updates[shown]:
                target[name] = tensor
            self.shown = shown

    def _prepare(self) -> None:
        # At first use, which is in the first forward: sharding a model is then as fast as it can be.
        swaps = [*self._swaps.values(), *self._beside]
        for module, swap in self._swaps.items():
            if isinstance(module, nn.RNNBase):
                weights = {shown: _torch_private.rnn_weights(module, values) for shown, values in swap.of.items()}
                swaps.append(Swap(module.__dict__, weights))
        self._updates = {
            shown: [(swap.target, name, value) for swap in swaps for name, value in swap.of[shown].items()]
            for shown in Shown
        }


class LazyParameters(dict[str, Any]):
    """``_parameters`` of a module in a split module: reading an attribute in another module's forward gathers it."""

    #: Lets modules see whole parameters, called with the name of the one that is read; None where they do or need not.
    gather: Callable[[str], None] | None = None

    @override
    def __getitem__(self, name: str) -> Any:
        if self.gather is not None:
            # The compiler may trace this call, or run it and compile its callees: it sees collectives in neither case.
            (_uncompiled if _torch_private.may_compile() else _call)(self.gather, name)
        return super().__getitem__(name)


def lazily(modules: Iterable[nn.Module], gather: Callable[[nn.Module, str], None]) -> list[Swap]:
    """What lets ``modules``, which are in a split module, call ``gather`` where others read their parameters."""
    return [
        Swap(
            vars(module._parameters),
            {shown: {"gather": partial(gather, module) if shown is Shown.GUARDS else None} for shown in Shown},
        )
        for module in dict.fromkeys(modules)
    ]


def _call(gather: Callable[[str], None], name: str) -> None:
    gather(name)


_uncompiled = _torch_private.hidden_from_compile(_call)
