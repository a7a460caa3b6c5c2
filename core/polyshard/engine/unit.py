"""One all-gather unit: a flat master shard, the gather buffer, and the parameters that view them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..errors import ParameterChangedError, StateError
from ..interfaces import (
    COMPLETED,
    BufferRole,
    Observer,
    OffloadManager,
    PrecisionCaster,
    UnitDtypes,
    UnitSpec,
    Work,
)
from . import _torch_private
from .bindings import Bindings, Shown
from .buffer import FlatBuffer, view_of
from .layout import FlatLayout
from .phase import Phase
from .ranks import RankGrid
from .reduction import Gradients
from .wire import EncodedGather

if TYPE_CHECKING:
    from .root import Root


class UnitState(enum.Enum):
    """Where a unit's whole parameters are.

    ==========  ===========  =======================================
    from        to           by
    ==========  ===========  =======================================
    SHARDED     GATHERING    ``unshard``
    GATHERING   UNSHARDED    ``wait``
    GATHERING   SHARDED      ``reshard`` (a prefetch nobody used)
    UNSHARDED   GATHERING    ``unshard`` after ``expire``
    UNSHARDED   SHARDED      ``reshard``
    ==========  ===========  =======================================
    """

    SHARDED = "sharded"
    """Nowhere: the gather buffer has no memory, and reading a view of it would be a crash."""
    GATHERING = "gathering"
    """On their way; compute must wait before it reads them."""
    UNSHARDED = "unsharded"
    """In the gather buffer, and compute is ordered after the gather."""


class Reshard(enum.Enum):
    """Whether a unit is released after forward."""

    ALWAYS = "always"
    """Released, and gathered again for backward."""
    UNLESS_OUTERMOST = "unless_outermost"
    """Released, but for the outermost module: its backward follows its forward at once."""
    NEVER = "never"
    """Kept until the end of its backward."""


@dataclass(frozen=True, slots=True)
class ManagedParameter:
    """A parameter of the user's model, and every place that refers to it."""

    original: nn.Parameter
    """The user's own object, which outside compute views the master shard."""
    names: tuple[str, ...]
    """Every fully-qualified name; more than one for a shared parameter."""
    sites: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute) that holds it."""


class Unit:
    """Parameters that are gathered together.

    Three tensors carry a parameter's values:

    - the *original* ``nn.Parameter`` that the user made, from now on a view of the *master* shard (1-D, this rank's
      elements only; the whole parameter where there is one shard); what optimizers update;
    - the *master*: this rank's slice of the flat unit, in the original dtype;
    - the *view* of the gather buffer, a leaf in compute dtype, which modules see during compute.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        parameters: Sequence[ManagedParameter],
        grid: RankGrid,
        master: torch.Tensor,
        dtypes: UnitDtypes,
        caster: PrecisionCaster,
        offload: OffloadManager,
        *,
        reshard: Reshard,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.parameters = tuple(parameters)
        self.grid = grid
        self.dtypes = dtypes
        self.caster = caster
        self.offload = offload
        self.reshard_policy = reshard
        self.observers: tuple[Observer, ...] = ()
        self.root: Root | None = None
        self.state = UnitState.SHARDED
        self.trainable = parameters[0].original.requires_grad
        self.parks = offload.capabilities.parks
        self.master = offload.place(spec, master) if self.parks else master
        self.pieces = layout.pieces(grid.shard_rank)
        self._expired = False
        wire = caster.wire(spec) if grid.shard is not None and caster.capabilities.encodes else None
        self._encoded = EncodedGather(self, wire) if wire is not None else None
        # One shard, nothing to cast: the master itself serves compute, and nothing is ever gathered.
        self.permanent = grid.shard is None and dtypes.compute == self.master.dtype and not self.parks
        self.expose_shards()
        self.buffer = self._make_buffer(dtypes.compute)
        self._training_buffer = self.buffer
        self._eval_buffer: FlatBuffer | None = None
        self._full_precision_in_eval = (
            not self.permanent
            and dtypes.compute != self.spec.master_dtype
            and self._encoded is None
            and caster.full_precision_in_eval(spec)
        )
        self.leaves: list[torch.Tensor]
        self.bindings: Bindings
        self._bind(self.buffer)
        self.gradients = Gradients(self)
        if self.permanent:
            self.state = UnitState.UNSHARDED

    @property
    def name(self) -> str:
        """Fully-qualified name of the unit's module; ``(root)`` for the outermost."""
        return self.spec.name or "(root)"

    @property
    def resident(self) -> bool:
        """Whether the originals themselves compute and collect gradients: a single rank, and nothing to cast."""
        return self.permanent and self.grid.alone

    @property
    def in_full_precision(self) -> bool:
        """Whether the unit computes in its master dtype now because its module is in eval mode."""
        return self._eval_buffer is not None and self.buffer is self._eval_buffer

    @property
    def allocation(self) -> AbstractContextManager[Any]:
        """The backend's memory for gathers."""
        return (self.grid.shard or self.grid.world).allocation(BufferRole.GATHER)

    def _make_buffer(self, dtype: torch.dtype) -> FlatBuffer:
        if self.permanent:
            return FlatBuffer.over(self.master, self.layout)
        shard = self.grid.shard
        if shard is not None and shard.capabilities.fixed_addresses:
            return FlatBuffer.lease(self.layout, dtype, shard)
        return FlatBuffer.allocate(self.layout, dtype, self.spec.device, rank=self.grid.shard_rank, leaves=True)

    def _bind(self, buffer: FlatBuffer) -> None:
        self.buffer = buffer
        originals: list[torch.Tensor] = [parameter.original for parameter in self.parameters]
        self.leaves = originals if self.resident else buffer.views
        self.bindings = Bindings(self.parameters, self.leaves, guarded=not self.permanent)
        self.follow_requires_grad()

    def expose_shards(self) -> None:
        """Make every original a view of this rank's part of the master."""
        pieces = {piece.slot: piece for piece in self.pieces}
        with torch.inference_mode(False):
            for index, (parameter, slot) in enumerate(zip(self.parameters, self.layout.slots, strict=True)):
                piece = pieces.get(index)
                if self.grid.shard is None:
                    data = view_of(self.master, slot.shape, slot.stride, slot.offset)
                elif piece is not None:
                    data = view_of(self.master, (piece.numel,), (1,), piece.shard_offset)
                else:
                    data = torch.empty(0, dtype=self.master.dtype, device=self.master.device)
                become(parameter.original, data)
        self._addresses = [parameter.original.data_ptr() for parameter in self.parameters]
        self._shapes = [parameter.original.shape for parameter in self.parameters]

    def follow_requires_grad(self) -> None:
        """Take up a ``requires_grad`` that the user changed on an original."""
        for parameter, leaf in zip(self.parameters, self.leaves, strict=True):
            leaf.requires_grad_(parameter.original.requires_grad)
        self.trainable = any(leaf.requires_grad for leaf in self.leaves)

    def choose_buffer(self, training: bool) -> None:
        """Compute in the master dtype while the module is in eval mode, where the caster wants that."""
        if not self._full_precision_in_eval:
            return
        if training:
            wanted = self._training_buffer
        else:
            if self._eval_buffer is None:
                self._eval_buffer = self._make_buffer(self.spec.master_dtype)
            wanted = self._eval_buffer
        if wanted is not self.buffer:
            self.reshard()
            self._bind(wanted)
            self.gradients = Gradients(self)

    def fill(self) -> Work:
        """Write the own slice and start the gather. Called by lanes, with the gather stream current."""
        if self._encoded is not None:
            return self._encoded.start()
        if self.parks:
            self.offload.fetch(self.spec, self.master, self.buffer.own)
        else:
            # The cast is the copy-in: master dtype to compute dtype, straight into the slice that is sent.
            self.buffer.own.copy_(self.master)
        shard = self.grid.shard
        return COMPLETED if shard is None else shard.all_gather(self.buffer.flat, self.buffer.own)

    def unshard(self) -> None:
        """Issue the gather, unless the parameters are there or on their way."""
        if self.permanent or (self.state is not UnitState.SHARDED and not self._expired):
            return
        root = self.root
        assert root is not None
        if root.audit is not None:
            root.audit.agree(self, "all_gather", self.buffer.flat)
        root.lanes.gather(self)
        self.state = UnitState.GATHERING
        self._expired = False
        for observer in self.observers:
            observer.unshard(self.spec)

    def wait(self) -> None:
        """Order compute after the gather."""
        if self.state is UnitState.GATHERING:
            assert self.root is not None
            self.root.lanes.arrive(self)
            self.state = UnitState.UNSHARDED

    def show(self) -> None:
        """Let modules see whole parameters."""
        self.bindings.show(Shown.VIEWS)

    def hide(self) -> None:
        """Let modules see the originals again; while a forward runs, stand-ins that refuse to compute."""
        computing = self.root is not None and self.root.phase is Phase.FORWARD
        self.bindings.show(Shown.GUARDS if computing else Shown.ORIGINALS)

    def reshard(self) -> None:
        """Release the gather buffer."""
        self.hide()
        if self.permanent or self.state is UnitState.SHARDED:
            return
        assert self.root is not None
        self.root.lanes.release(self)
        self.state = UnitState.SHARDED
        self._expired = False
        for observer in self.observers:
            observer.reshard(self.spec)

    def expire(self) -> None:
        """Parameters left unsharded by an earlier forward may be older than the master: gather again before use."""
        self._expired = self.state is not UnitState.SHARDED

    def releases(self, outermost: bool) -> bool:
        """Whether the unit is released after a forward."""
        return self.reshard_policy is Reshard.ALWAYS or (
            self.reshard_policy is Reshard.UNLESS_OUTERMOST and not outermost
        )

    def take_up_changes(self) -> None:
        """Honour what the user did to the originals since the last forward.

        Raises:
            ParameterChangedError: a parameter was deleted, or replaced by one of another shape, dtype or device.
        """
        changed_flag = False
        for index, (target, key, original) in enumerate(self.bindings.watched):
            if target.get(key) is not original or original.data_ptr() != self._addresses[index]:
                self._write_back(index, target.get(key))
            if original.requires_grad is not self.leaves[index].requires_grad:
                changed_flag = True
        if changed_flag:
            self.follow_requires_grad()

    def refuse_changes(self) -> None:
        """Refuse parameters replaced between forward and backward: autograd has saved the old ones.

        Raises:
            ParameterChangedError: naming the parameter.
        """
        for index, (target, key, original) in enumerate(self.bindings.watched):
            if self.bindings.shown is not Shown.ORIGINALS:
                moved = original.data_ptr() != self._addresses[index]
            else:
                moved = target.get(key) is not original or original.data_ptr() != self._addresses[index]
            if moved:
                raise ParameterChangedError(
                    "FSDP does not support changing the parameters between forward and backward: "
                    f"'{self.parameters[index].names[0]}' was replaced on rank {self.grid.world.rank}. "
                    "Replace it before the forward or after the backward."
                )

    def _write_back(self, index: int, current: Any) -> None:
        parameter = self.parameters[index]
        original, shape = parameter.original, self._shapes[index]
        where = f"'{parameter.names[0]}' on rank {self.grid.world.rank}"
        source = original if current is original else current
        if not isinstance(source, torch.Tensor):
            raise ParameterChangedError(
                f"The parameter {where} was removed from its module. Put it back before the next forward."
            )
        value = source.detach()
        if value.dtype != self.master.dtype or value.device != self.master.device:
            raise ParameterChangedError(
                f"The parameter {where} was changed to {value.dtype} on {value.device}; its unit holds "
                f"{self.master.dtype} on {self.master.device}. Call to(), half() or cuda() before sharding."
            )
        slot = self.layout.slots[index]
        if value.shape != shape and tuple(value.shape) == slot.shape:
            whole = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(value)
            flat = whole.as_strided((slot.numel,), (1,))
            piece = next((piece for piece in self.pieces if piece.slot == index), None)
            value = flat[piece.start : piece.stop] if piece is not None else flat[:0]
        if value.shape != shape:
            raise ParameterChangedError(
                f"Cannot writeback when the parameter shape changes\nExpects {shape} but got {value.shape} for "
                f"{where}. Replace it by a tensor of the shard's shape, or of the whole parameter's."
            )
        piece = next((piece for piece in self.pieces if piece.slot == index), None)
        if self.grid.shard is None:
            data = view_of(self.master, slot.shape, slot.stride, slot.offset)
        elif piece is not None:
            data = view_of(self.master, (piece.numel,), (1,), piece.shard_offset)
        else:
            data = torch.empty(0, dtype=self.master.dtype, device=self.master.device)
        data.copy_(value)
        if source is not original:
            original.requires_grad_(source.requires_grad)
        original.data = data
        self._addresses[index] = original.data_ptr()
        for module, key in parameter.sites:
            module._parameters[key] = original

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise StateError(
            f"A sharded module cannot be deep-copied (unit '{self.name}', rank {self.grid.world.rank}). "
            "Copy the model before sharding it, or exchange values through a state dict."
        )

    def __reduce__(self) -> NoReturn:
        raise StateError(
            f"A sharded module cannot be pickled (unit '{self.name}', rank {self.grid.world.rank}). "
            "Save a state dict instead."
        )


def become(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give ``parameter`` other data, of any shape and device, without changing which object it is."""
    if not parameter.is_meta:
        parameter.data = data
        return
    # A meta tensor refuses data of another device; swapping the two objects' insides does not.
    replacement = nn.Parameter(data, requires_grad=parameter.requires_grad)
    replacement.__dict__.update(parameter.__dict__)
    _torch_private.swap_tensors(parameter, replacement)
