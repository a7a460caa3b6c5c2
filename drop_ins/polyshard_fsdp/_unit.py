"""The engine's unit with FSDP's flat parameter, and what modules and optimizers hold in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from polyshard.errors import DeviceError, ParameterChangedError, ParameterMovedError, StateError
from polyshard.extension import (
    Bindings,
    FlatBuffer,
    Fresh,
    GatheredParameters,
    Phase,
    Reshard,
    Shown,
    Unit,
    UnitRanks,
    UnitState,
    become,
    local_of,
    view_of,
)
from polyshard.interfaces import OffloadManager, PrecisionPlugin, UnitDtypes, UnitSpec
from torch import nn
from typing_extensions import override

from . import _runtime_utils
from ._common_utils import HandleTrainingState
from ._flat_param import FlatParamHandle
from ._gradients import FlatGradients
from ._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from ._originals import FlatBindings, FlatOriginal, GuardedBindings, InstanceParameters, Originals
from .api import MixedPrecision


class FlatUnit(Unit):
    """The unit of one FSDP instance.

    Differs from the engine's own in what a user can see of it:

    - ``flat_param.data`` is the master outside of compute and the whole buffer inside; where a user moved or cast it,
      the new data become the master.
    - Strategies that keep parameters after forward let modules go on seeing them whole until backward.
    - Gathers and releases go through ``_runtime_utils``, where tests stand in between.
    """

    held: InstanceParameters
    gathered: FlatGathered
    gradients: FlatGradients

    #: Hooks, and what users read under ``no_sync``, see each gradient as autograd made it.
    writes_gradients_directly = False

    def __init__(
        self,
        instance: Any,
        handle: FlatParamHandle,
        spec: UnitSpec,
        ranks: UnitRanks,
        dtypes: UnitDtypes,
        precision: PrecisionPlugin,
        offload: OffloadManager,
        *,
        reshard: Reshard,
        checks_writeback: bool,
    ) -> None:
        self.instance = instance
        self.handle = handle
        self.flat_param = handle.flat_param
        self.checks_writeback = checks_writeback
        #: What the user sees in the place of the parameters: ``[padded_numel]``, in the original dtype.
        self.whole_for_user: torch.Tensor | None = None
        handle.unit = self
        super().__init__(
            spec,
            handle.layout,
            # The handle's have the names inside of its instance, whatever the instance becomes part of.
            [dataclasses.replace(each) for each in handle.parameters],
            ranks,
            _offloaded(offload, spec, handle.keep_own_shard()),
            dtypes,
            precision,
            offload,
            reshard=reshard,
            offloaded=offload.capabilities.offloads,
        )
        if any(each.leaf is not None for each in self.parameters):
            # Other ranks have parts of other sizes where tensor parallelism does not cut evenly.
            self.launch_numel = sum(
                slot.numel if each.part is None else each.part.largest_numel
                for each, slot in zip(self.parameters, self.layout.slots, strict=True)
            )
        if not handle._use_orig_params:
            # Takes the whole views, which flattening left in the modules, out of them.
            self.gathered.prepare()

    @override
    def use_master(self, master: torch.Tensor) -> None:
        super().use_master(master)
        self.flat_param.data = self.master
        self.flat_param._local_shard = self.master
        # Of one rank, the master before.
        vars(self.flat_param).pop("_full_param_padded", None)
        if self.dtypes.compute != self.spec.master_dtype:
            # Casts go straight into the slice of the gather buffer that is sent.
            self.flat_param._mp_shard = torch.empty(0, dtype=self.dtypes.compute, device=self.spec.device)
        if self.dtypes.grad != self.spec.master_dtype:
            self.flat_param.grad_dtype = self.dtypes.grad

    @override
    def _make_held(self) -> InstanceParameters:
        return Originals(self) if self.handle._use_orig_params else FlatOriginal(self)

    @override
    def _make_gathered(self, keeps_buffer: bool) -> FlatGathered:
        return FlatGathered(self, keeps_buffer=keeps_buffer)

    @override
    def _make_gradients(self) -> FlatGradients:
        return FlatGradients(self)

    @property
    def misplaced(self) -> bool:
        """Whether a user moved offloaded parameters out of host memory."""
        return self.offloaded and self.flat_param.device.type != "cpu"

    def take_up_home(self, *, refuse_offload: bool = True) -> None:
        """Make the flat parameter's data the master, where a user moved or cast it.

        Raises:
            DeviceError: it left host memory although it is offloaded, or is not where the unit computes.
            ParameterChangedError: it has another number of elements.
            StateError: gradients wait for a backward that synchronises.
        """
        if self.whole_for_user is not None:
            return
        data = self.flat_param.data
        if data.data_ptr() == self.master.data_ptr() and data.dtype == self.master.dtype:
            return
        if data.shape != self.master.shape:
            raise ParameterChangedError(
                f"Cannot writeback when the parameter shape changes\nExpects {self.master.shape} but got {data.shape} "
                f"in '{self.name}' on rank {self.ranks.world.rank}. Give the flat parameter data of its own shape."
            )
        if self.misplaced:
            if refuse_offload:
                raise misplaced_offload(data.device, self.name, self.ranks.world.rank)
            # Left where the user put it: the next use says what is wrong with that.
            return
        self.refuse_unreduced(data)
        self.rehome(data)

    def refuse_unreduced(self, data: torch.Tensor) -> None:
        """Refuse a master of another dtype or device, that of ``data``, while gradients wait to be reduced.

        Raises:
            StateError: they do.
        """
        self.gradients.drop_unreduced_if_cleared()
        moves = data.dtype != self.master.dtype or data.device != self.master.device
        if moves and self.gradients.unreduced:
            raise StateError(
                f"The parameters of '{self.name}' on rank {self.ranks.world.rank} cannot become {data.dtype} on "
                f"{data.device} while gradients of backwards under no_sync() wait to be reduced. Move or cast the "
                "model after a backward outside of no_sync(), or after zero_grad(set_to_none=True)."
            )

    def rehome(self, master: torch.Tensor) -> None:
        """Let ``master`` (``[shard_numel]``), of whatever dtype and device, be the master from now on."""
        held = [(parameter, parameter.grad) for parameter in self.held.tensors]
        self.spec = dataclasses.replace(self.spec, master_dtype=master.dtype)
        self.dtypes = self.precision.dtypes(self.spec)
        for parameter, _ in held:
            parameter.grad = None
        self.use_master(_offloaded(self.offload, self.spec, master.detach()))
        if not self.handle._use_orig_params:
            self.gathered.prepare()
        for parameter, gradient in held:
            if gradient is not None:
                parameter.grad = gradient.to(dtype=self.dtypes.grad, device=parameter.device)

    @contextmanager
    def without_originals(self) -> Iterator[None]:
        """A context in which modules do not hold the parameters."""
        sites = [site for parameter in self.parameters for site in parameter.sites]
        held = {module: dict(module._parameters) for module, _ in sites}
        for module, key in sites:
            del module._parameters[key]
        try:
            yield
        finally:
            for module, before in held.items():
                now = {**before, **module._parameters}
                module._parameters.clear()
                module._parameters.update(now)

    def unreduced_gradients(self, whole: torch.Tensor) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        """The trained parameters that the user sees, and their gradients as views that keep ``whole`` alive.

        ``whole``: ``[padded_numel]``.
        """
        if self.handle._use_orig_params:
            pairs = zip(self.held.tensors, self.layout.slots, strict=True)
            return [
                (each, whole.as_strided(slot.shape, slot.stride, whole.storage_offset() + slot.offset))
                for each, slot in pairs
                if each.requires_grad
            ]
        return [(self.flat_param, whole.narrow(0, 0, self.handle.unsharded_numel))]

    def expose_whole(self) -> None:
        """Let the user see whole parameters in the original dtype, over ``whole_for_user``.

        Parts by tensor parallelism are seen as it alone would show them: a ``DTensor`` over this rank's part.
        """
        whole = self.whole_for_user
        assert whole is not None
        self.flat_param.data = whole.narrow(0, 0, self.handle.unsharded_numel)
        keeps = self.handle._use_orig_params
        for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
            view, part = view_of(whole, slot.shape, slot.stride, slot.offset), parameter.part
            if keeps:
                become(parameter.original, view)
                if part is None:
                    continue
            trained = (parameter.original if keeps else self.flat_param).requires_grad
            shown = nn.Parameter(view if part is None else part.as_leaf(view), requires_grad=trained)
            for module, attribute in parameter.sites:
                module.__dict__.pop(attribute, None)
                module._parameters[attribute] = shown
        if not keeps:
            self.handle.deregister_flat_param()

    def take_up_whole(self) -> None:
        """Let the user see the whole flat parameter that is there now: it was moved or cast inside of the context."""
        data, whole = self.flat_param.data, self.whole_for_user
        assert whole is not None
        if data.data_ptr() != whole.data_ptr():
            self.whole_for_user = whole.to(data, copy=True)
            self.whole_for_user[: len(data)].copy_(data)
        self.expose_whole()

    def withdraw_whole(self) -> None:
        self.whole_for_user = None
        self.flat_param.data = self.master
        keeps = self.handle._use_orig_params
        for parameter in self.parameters:
            for module, key in parameter.sites:
                if keeps:
                    module._parameters[key] = parameter.original
                else:
                    module._parameters.pop(key, None)
        if not keeps:
            self.handle.register_flat_param()
            self.gathered.bindings.shown = Shown.VIEWS
            self.gathered.bindings.show(Shown.ORIGINALS)
        self.held.expose()


class FlatGathered(GatheredParameters):
    """The whole flat parameter of one FSDP instance, and views of it."""

    unit: FlatUnit

    def __init__(self, unit: FlatUnit, *, keeps_buffer: bool) -> None:
        super().__init__(unit, keeps_buffer=keeps_buffer)
        # The whole flat parameter; None until it is shown.
        self._whole: torch.Tensor | None = None
        # Where whole parameters lie that modules hold behind forward; empty where they hold none.
        self._shown_addresses: list[int] = []

    @override
    def bind(self, buffer: FlatBuffer) -> None:
        super().bind(buffer)
        self.unit.flat_param._full_param_padded = buffer.flat
        self._whole = None

    @override
    def _make_bindings(self) -> Bindings:
        if self.unit.handle._use_orig_params:
            elsewhere = Shown.VIEWS if self.unit.permanent else Shown.GUARDS
            return GuardedBindings(self.unit.parameters, self.leaves, elsewhere=elsewhere)
        return FlatBindings(self.unit.parameters, self.leaves, guarded=not self.unit.permanent)

    @override
    def _leaves_over(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # FSDP's are plain.
        return list(views)

    @override
    def choose_buffer(self, training: bool) -> None:
        super().choose_buffer(training)
        if self.follows_mode:
            self.unit.gradients.choose(full_precision=not training)

    @override
    def show(self) -> None:
        self.unit.handle._use_unsharded_views(as_params=False)

    def show_views(self) -> None:
        """Let modules see whole parameters; the flat parameter is whole too."""
        if self.bindings.shown is Shown.VIEWS:
            return
        super().show()
        if not self.unit.permanent:
            if self._whole is None:
                # Now, because a released buffer cannot be viewed.
                self._whole = self.buffer.flat.narrow(0, 0, self.unit.handle.unsharded_numel)
            self.unit.flat_param.data = self._whole

    @override
    def hide(self) -> None:
        if not self._stays_shown:
            self.conceal()
        elif not self._shown_addresses:
            self._shown_addresses = self._addresses()

    @override
    def conceal(self) -> None:
        """Let modules see what they see outside of compute."""
        self._shown_addresses = []
        super().conceal()
        if not self.unit.permanent and self.unit.whole_for_user is None:
            self.unit.flat_param.data = self.unit.master

    @property
    def _stays_shown(self) -> bool:
        return (
            self.prepared
            and self.unit.handle._use_orig_params
            and self.bindings.shown is Shown.VIEWS
            and self.state is UnitState.UNSHARDED
            and not self.unit.permanent
            and self.unit.handle.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
            and torch.is_grad_enabled()
        )

    @override
    def issue_gather(self) -> None:
        _runtime_utils._unshard(self.unit.instance, self.unit.handle)

    def gather(self) -> None:
        # Nobody counts the steps of an optimizer here. Its changes of parameters are as good.
        self.unit.steps = sum(each._version for each in self.unit.held.tensors) % FlatBuffer.RELEASED
        super().issue_gather()

    @override
    def reshard(self) -> None:
        if (
            self.unit.handle._training_state is HandleTrainingState.BACKWARD_POST
            and self.unit.instance._module_state.ends_by_hook
        ):
            _runtime_utils._post_backward_reshard(self.unit.instance, self.unit.handle)
        else:
            self.let_go()

    def let_go(self) -> None:
        """Let modules see shards again, and release the gather buffer if there is one."""
        if self.unit.permanent or self.state is UnitState.SHARDED:
            self.conceal()
            return
        stays = self._stays_whole_without_sync
        if stays and not self.fresh.due:
            self.fresh = Fresh.AHEAD
        _runtime_utils._reshard(self.unit.instance, self.unit.handle, not stays)

    @property
    def _stays_whole_without_sync(self) -> bool:
        # Under ``no_sync`` nothing updates parameters before the next forward. What this depends on is alike on all
        # ranks, as it must be: the next forward issues no gather.
        root = self.unit.root
        return (
            root is not None
            and root.phase is Phase.BACKWARD
            and not root.synchronises
            and self.state is UnitState.UNSHARDED
            and self.unit.handle.sharding_strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
        )

    def release(self) -> None:
        self.conceal()
        super().reshard()

    def refuse_changed_views(self) -> None:
        """Raise ParameterMovedError where whole parameters that modules hold behind forward were replaced or moved."""
        if self._shown_addresses and not self._views_are_untouched():
            # Nothing may stand under the names whose memory is about to be released.
            self.conceal()
            # The views' memory is no longer the buffer's: make new ones before the next forward.
            self.prepared = False
            raise ParameterMovedError(
                "FSDP does not support changing the parameters between forward and backward for "
                f"{self.unit.handle.sharding_strategy}: unit '{self.unit.name}' on rank {self.unit.ranks.world.rank}. "
                "Change them before the forward or after the backward."
            )

    def _addresses(self) -> list[int]:
        return [
            (leaf if parameter.part is None else local_of(leaf)).data_ptr()
            for parameter, leaf in zip(self.unit.parameters, self.leaves, strict=True)
        ]

    def _views_are_untouched(self) -> bool:
        if self._addresses() != self._shown_addresses:
            return False
        return all(
            module._parameters.get(attribute) is leaf
            for parameter, leaf in zip(self.unit.parameters, self.leaves, strict=True)
            for module, attribute in parameter.sites
        )

    def order_gathers_after_writes(self) -> None:
        """Let no later gather read the master before what was written to it on the current stream."""
        if self.fresh is Fresh.AHEAD:
            self.fresh = Fresh.NOW
        if self.unit.root is not None:
            # Also within a step, when the start of the next forward, which orders the two, is still far.
            self.unit.root.streams.drain()
            self.unit.root.streams.begin_forward()

    def gather_ahead(self) -> None:
        """Issue the gather for the forward that comes next, or for the one that runs."""
        if self.unit.permanent or self.state is not UnitState.SHARDED:
            return
        if self.unit.root.phase is Phase.IDLE:
            self.unit.held.adopt_changes()
            if not self.prepared:
                self.prepare()
            self.order_gathers_after_writes()
            self.unshard()
            self.fresh = Fresh.AHEAD
        else:
            self.unshard()


def misplaced_offload(device: torch.device, name: str, rank: int) -> DeviceError:
    """The error for offloaded parameters that a user moved off the CPU."""
    return DeviceError(
        f"An FSDP-managed module with parameter CPU offloading enabled has parameters on {device}. Make sure to not "
        f"move the module from CPU when offloading parameters. The first of them is '{name}' (rank {rank})."
    )


def _offloaded(offload: OffloadManager, spec: UnitSpec, master: torch.Tensor) -> torch.Tensor:
    return offload.place(spec, master) if offload.capabilities.offloads else master


class FSDPPrecision(PrecisionPlugin):
    """The dtypes of one FSDP instance. Inputs and buffers are cast by the instance, whose root has its own rules."""

    def __init__(self, mixed_precision: MixedPrecision, full_precision_in_eval: bool) -> None:
        self._settings = mixed_precision
        self._full_precision_in_eval = full_precision_in_eval

    @override
    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        """Gradients travel in the dtype in which they are reduced, as FSDP's do."""
        master = unit.master_dtype
        compute = self._settings.param_dtype or master
        reduce = self._settings.reduce_dtype or compute
        grad = reduce if self._settings.keep_low_precision_grads else master
        return UnitDtypes(compute=compute, communication=reduce, reduce=reduce, grad=grad)

    @override
    def full_precision_in_eval(self, unit: UnitSpec) -> bool:
        return self._full_precision_in_eval
