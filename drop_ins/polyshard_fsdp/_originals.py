"""What modules and optimizers hold of one FSDP instance: pieces of parameters, or the flat parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from polyshard.errors import ParameterChangedError, ParameterMovedError, UnshardedUseError, UnsupportedError
from polyshard.extension import (
    Bindings,
    FlatLayout,
    Fresh,
    GradientTarget,
    HeldParameters,
    ManagedParameter,
    Piece,
    Shown,
    Swap,
    become,
    in_functional_call,
    is_dtensor,
    part_of_master,
    piece_in,
    without_torch_function,
)
from torch import nn
from typing_extensions import override

from ._flat_param import FlatParameter

_address_of = torch.Tensor.data_ptr
_is_trained = attrgetter("requires_grad")
_dtype_of = attrgetter("dtype")
#: Behind what is compared: a dict that became shorter brings its value forward, where something else is expected.
_END: dict[str, Any] = {"": object()}
#: Functions of torch that read no values.
_HARMLESS = frozenset(
    {
        "__format__",
        "__hash__",
        "__len__",
        "__repr__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "ndimension",
        "nelement",
        "numel",
        "size",
        "stride",
    }
)
#: Attributes that read values.
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class InstanceParameters(HeldParameters):
    """What modules and optimizers hold of one FSDP instance."""

    # A ``FlatUnit``, which is made of these.
    _unit: Any

    @abstractmethod
    def write_back(self) -> bool:
        """Take over changes since the last forward; returns whether any ``requires_grad`` changed.

        Called while modules hold the originals.
        """

    @abstractmethod
    def refuse_replaced(self, *, held: bool) -> None:
        """Raise for parameters replaced between forward and backward: autograd has saved the old ones.

        ``held``: modules hold the originals now, and not the views that compute.

        Raises ParameterMovedError: naming the parameter.
        """

    @override
    def adopt_changes(self) -> None:
        unit = self._unit
        gathered = unit.gathered
        if gathered.prepared and gathered.bindings.shown is not Shown.ORIGINALS:
            gathered.conceal()
            gathered.bindings.show(Shown.ORIGINALS)
        unit.gradients.drop_unreduced_if_cleared()
        unit.take_up_home()
        # Others, where the flat parameter was moved or cast.
        held, gathered = unit.held, unit.gathered
        if not unit.checks_writeback and unit.handle._use_orig_params:
            changed = held.retrained()
        else:
            if gathered.fresh is Fresh.AHEAD:
                # Modules may hold views, which are no changes.
                gathered.conceal()
            changed = held.write_back()
        if changed and gathered.prepared:
            held.follow_requires_grad()

    @override
    def refuse_changes(self) -> None:
        unit, gathered = self._unit, self._unit.gathered
        gathered.refuse_changed_views()
        if unit.checks_writeback:
            gathered.refuse_lost_writes()
            try:
                self.refuse_replaced(held=gathered.bindings.shown is Shown.ORIGINALS)
            except ParameterMovedError as error:
                # FSDP's own sentence, which scripts look for.
                words = "FSDP does not support changing the parameters between forward and backward"
                raise ParameterMovedError(f"{words}: {error}") from None
        # Autograd asks a leaf whether it wants its gradient when that arrives.
        if self.retrained():
            self.follow_requires_grad()


class Originals(InstanceParameters):
    """Keeps the originals of one unit views of its master.

    Users replace parameters, their data or their ``requires_grad`` between steps. Comparing lists that are made at C
    speed finds a change: 0.1 µs a parameter instead of 0.5 for a loop.
    """

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        self._parameters: Sequence[ManagedParameter] = unit.parameters
        self._layout: FlatLayout = unit.layout
        self._pieces: dict[int, Piece] = {piece.slot: piece for piece in unit.pieces}
        self._master: torch.Tensor = unit.master
        self._whole = unit.ranks.owner is None
        self._rank = unit.ranks.world.rank
        self.tensors = [parameter.original for parameter in self._parameters]
        # What holds the originals, each dict once.
        sites = [(module, key) for each in self._parameters for module, key in each.sites]
        modules = dict.fromkeys(module for module, _ in sites)
        self._holders: list[dict[str, Any]] = [*(module._parameters for module in modules), _END]
        self.expose()

    @property
    @override
    def gradient_targets(self) -> list[GradientTarget]:
        found = []
        for index, piece in self._pieces.items():
            slot = self._layout.slots[index]
            if self._whole:
                found.append(GradientTarget(self.tensors[index], slot.offset, slot.shape, slot.stride, index))
            else:
                found.append(GradientTarget(self.tensors[index], piece.shard_offset, *slot.shown(piece.numel), index))
        return found

    @property
    @override
    def trained(self) -> list[bool]:
        return list(map(_is_trained, self.tensors))

    @override
    def expose(self) -> None:
        with torch.inference_mode(False):
            for index, original in enumerate(self.tensors):
                become(original, self._shard_of(index))
        self._remember()

    def _remember(self) -> None:
        self._addresses = list(map(_address_of, self.tensors))
        self._empty = [original for original in self.tensors if not original.numel()]
        self._empty_dtypes = [self._master.dtype] * len(self._empty)
        self._trained = list(map(_is_trained, self.tensors))
        # Another unit's parameters, and those that are ignored, are compared too: a loop tells them apart.
        own = {(id(module._parameters), key): each.original for each in self._parameters for module, key in each.sites}
        self._held = [own.pop((id(dict_), key), value) for dict_ in self._holders for key, value in dict_.items()]
        if own:
            # Removed while nobody looked: equal to nothing until it is back.
            self._held = [_END]

    def _shard_of(self, index: int) -> torch.Tensor:
        return part_of_master(self._master, self._layout.slots[index], self._pieces.get(index), whole=self._whole)

    @override
    def write_back(self) -> bool:
        """As of ``InstanceParameters``.

        Raises ParameterChangedError: a parameter was removed, or replaced by one of another shape, dtype or device.
        """
        before = self._trained
        # An empty tensor has no address: on a rank without a piece, only its dtype shows that it was replaced.
        if (
            list(map(_address_of, self.tensors)) != self._addresses
            or list(map(_dtype_of, self._empty)) != self._empty_dtypes
            or self._replaced()
        ):
            for index, parameter in enumerate(self._parameters):
                self._take(index, parameter)
            self._remember()
        else:
            self._trained = list(map(_is_trained, self.tensors))
        return before != self._trained

    @override
    def retrained(self) -> bool:
        before, self._trained = self._trained, list(map(_is_trained, self.tensors))
        return before != self._trained

    @override
    def refuse_replaced(self, *, held: bool) -> None:
        if list(map(_address_of, self.tensors)) == self._addresses and not (held and self._replaced()):
            return
        for parameter, address in zip(self._parameters, self._addresses, strict=True):
            replaced = held and any(
                module._parameters.get(key) is not parameter.original for module, key in parameter.sites
            )
            if replaced or parameter.original.data_ptr() != address:
                raise ParameterMovedError(
                    "Parameters cannot be changed between forward and backward: "
                    f"'{parameter.names[0]}' was replaced on rank {self._rank}. "
                    "Replace it before the forward or after the backward."
                )

    def _replaced(self) -> bool:
        return not all(map(is_, chain.from_iterable(map(dict.values, self._holders)), self._held))

    def _take(self, index: int, parameter: ManagedParameter) -> None:
        original = parameter.original
        held = [module._parameters.get(key) for module, key in parameter.sites]
        replacements = [tensor for tensor in held if tensor is not original]
        same = original.data_ptr() == self._addresses[index] and original.dtype == self._master.dtype
        if not replacements and same:
            return
        where = f"'{parameter.names[0]}' on rank {self._rank}"
        if replacements and in_functional_call():
            raise UnsupportedError(
                f"torch.func.functional_call put a tensor in the place of {where}, which is sharded: it would be taken "
                "for a new value, and kept. Call it inside of 'with polyshard.unsharded(model)', with torch.no_grad() "
                "or torch.func around it, or on a model that is not sharded."
            )
        source = replacements[0] if replacements else original
        if source is None:
            raise ParameterChangedError(
                f"The parameter {where} was removed from its module. Put it back before the next forward; pruning and "
                "parametrizations, which remove it, come before sharding."
            )
        shard = self._shard_of(index)
        value = source.detach()
        if parameter.part is not None and is_dtensor(value):
            value = parameter.part.own(value)
        if value.dtype != shard.dtype or value.device != shard.device:
            raise ParameterChangedError(
                f"The parameter {where} was changed to {value.dtype} on {value.device}; its unit holds "
                f"{shard.dtype} on {shard.device}. Call to(), half() or cuda() before sharding."
            )
        slot = self._layout.slots[index]
        if value.shape != shard.shape and tuple(value.shape) == slot.shape:
            piece = self._pieces.get(index)
            start, stop = (piece.start, piece.stop) if piece is not None else (0, 0)
            value = piece_in(value, slot, start, stop)
        if value.shape != shard.shape:
            raise ParameterChangedError(
                f"Cannot writeback when the parameter shape changes\nExpects {shard.shape} but got {value.shape} for "
                f"{where}. Replace it by a tensor of the shard's shape, or of the whole parameter's."
            )
        if parameter.packed is not None and not parameter.packed.adopt(source):
            raise ParameterChangedError(
                f"The parameter {where}, a {parameter.packed.cls.__name__}, was replaced by a {type(source).__name__} "
                "that does not say what its bytes mean. Replace it by a quantized one of the same class."
            )
        shard.copy_(value)
        if source is not original:
            original.requires_grad_(source.requires_grad)
        original.data = shard
        for module, key in parameter.sites:
            module._parameters[key] = original


class FlatOriginal(InstanceParameters):
    """The flat parameter, in the place of all others."""

    def __init__(self, unit: Any) -> None:
        super().__init__(unit)
        self._flat_param: FlatParameter = unit.flat_param
        self._layout = unit.layout
        self._master: torch.Tensor = unit.master
        self.tensors = [self._flat_param]
        self._trained: bool = self._flat_param.requires_grad
        self.expose()

    @property
    @override
    def gradient_targets(self) -> list[GradientTarget]:
        return [GradientTarget(self._flat_param, 0, tuple(self._master.shape), (1,))]

    @property
    @override
    def trained(self) -> list[bool]:
        return [self._flat_param.requires_grad] * len(self._layout.slots)

    @override
    def expose(self) -> None:
        self._flat_param.data = self._master

    @override
    def write_back(self) -> bool:
        return self.retrained()

    @override
    def retrained(self) -> bool:
        before, self._trained = self._trained, self._flat_param.requires_grad
        return before != self._trained

    @override
    def refuse_replaced(self, *, held: bool) -> None:
        """Nothing: no parameter is within the user's reach."""


class ShardedParameter(torch.Tensor):
    """A sharded parameter inside another unit's forward: reading its shape is fine, computing with it raises.

    The parameter itself is a 1-D piece there. A tied head that computes with it would fail on its shape or, worse,
    compute something else.
    """

    _parameter: ManagedParameter

    @classmethod
    def of(cls, parameter: ManagedParameter) -> ShardedParameter:
        original = parameter.original
        with without_torch_function():
            shown = original.detach()
            if parameter.extended:
                # What is of a class of its own becomes no other.
                shown = torch.empty((), dtype=original.dtype, device=original.device).expand(original.shape)
            guard = shown.as_subclass(cls)
            guard.requires_grad_(original.requires_grad)
        guard._parameter = parameter
        return guard

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run functions that read no values; raise for all others."""
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
        if is_attribute or name in _HARMLESS:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        used = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)), None)
        which = f"'{used._parameter.names[0]}'" if used is not None else "of a unit"
        raise UnshardedUseError(
            f"The parameter {which} was used by {name or func} while it is sharded. Compute with it inside its own "
            "module's forward, name the method that does with polyshard.register_forward_method, or let both users "
            "share one unit."
        )


class GuardedBindings(Bindings):
    """Stand-ins that refuse to compute, in other instances' forwards."""

    @override
    def _collect(self, leaves: Sequence[torch.Tensor]) -> dict[nn.Module, Swap]:
        swaps = super()._collect(leaves)
        for parameter in self._parameters if self.elsewhere is Shown.GUARDS else ():
            guard = ShardedParameter.of(parameter)
            for module, attribute in parameter.sites:
                swaps[module].of[Shown.GUARDS][attribute] = guard
        return swaps


class FlatBindings(Bindings):
    """Plain tensors under the parameters' names, in ``module.__dict__``.

    ``_parameters`` would make them the module's own again: in ``named_parameters``, in state dicts, in optimizers.
    """

    def __init__(
        self, parameters: Sequence[ManagedParameter], leaves: Sequence[torch.Tensor], *, guarded: bool
    ) -> None:
        super().__init__(parameters, leaves, elsewhere=Shown.GUARDS if guarded else Shown.VIEWS)
        # Whole views were left there when the parameters were flattened.
        self.shown = Shown.VIEWS
        self.show(Shown.ORIGINALS)

    @override
    def _collect(self, leaves: Sequence[torch.Tensor]) -> dict[nn.Module, Swap]:
        swaps: dict[nn.Module, Swap] = {}
        for parameter, leaf in zip(self._parameters, leaves, strict=True):
            guard = ShardedParameter.of(parameter)
            outside = guard if self.elsewhere is Shown.GUARDS else leaf.detach()
            for module, attribute in parameter.sites:
                swap = swaps.setdefault(module, Swap(module.__dict__, {shown: {} for shown in Shown}))
                swap.of[Shown.VIEWS][attribute] = leaf
                swap.of[Shown.ORIGINALS][attribute] = swap.of[Shown.GUARDS][attribute] = outside
        return swaps
