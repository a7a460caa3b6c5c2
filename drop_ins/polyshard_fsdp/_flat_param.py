"""The parameters of one FSDP instance as one flat parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from polyshard.errors import ParameterChangedError, ParameterError, UnsupportedError
from polyshard.extension import (
    FlatLayout,
    ManagedParameter,
    Slot,
    TensorPart,
    become,
    contiguous_stride,
    dense_stride,
    plain_parameter,
    product,
    view_of,
)
from polyshard.interfaces import PARAMETER_ALIGNMENT_BYTES
from torch import nn

from . import _torch_private
from ._collectives import rank_and_size
from ._common_utils import FLAT_PARAM, FSDP_FLATTENED, HandleTrainingState
from ._torch_private import _FSDP_SKIP_WRITEBACK_CHECK as _FSDP_SKIP_WRITEBACK_CHECK
from ._torch_private import _FSDP_USE_FULL_PREC_IN_EVAL as _FSDP_USE_FULL_PREC_IN_EVAL
from ._torch_private import _FSDP_USE_UNSAFE_SETATTR as _FSDP_USE_UNSAFE_SETATTR
from ._torch_private import FlatParamShardMetadata as FlatParamShardMetadata
from .api import ShardingStrategy

#: The strategy of one flat parameter.
HandleShardingStrategy = ShardingStrategy

#: The descriptor behind ``Tensor.grad``.
_tensor_grad: Any = torch.Tensor.grad


class FlatParameter(nn.Parameter):
    """A flat parameter: this rank's shard outside of compute, the whole of it in compute dtype inside."""

    _is_flat_param = True
    """What torch's functions tell one by."""
    _fqns: tuple[str, ...]
    _num_params: int
    _shapes: tuple[torch.Size, ...]
    _padded_unsharded_size: torch.Size
    _shard_numel_padded: int
    _unpadded_unsharded_size: torch.Size
    _sharded_size: torch.Size
    _shard_param_infos: tuple[Any, ...]
    _params: list[nn.Parameter] | None
    """With ``use_orig_params=True``, the parameters that it is made of; else None."""
    _numels_with_padding: tuple[int, ...]
    """Elements of every range of the whole flat parameter, those between and after parameters included, in order."""
    _is_padding_mask: tuple[bool, ...]
    """Which of these ranges belong to no parameter."""
    _local_shard: torch.Tensor
    _full_param_padded: torch.Tensor
    _mp_shard: torch.Tensor
    """Empty for good: the low-precision shard is a slice of the gather buffer and needs no memory of its own."""
    _handle: FlatParamHandle

    @property  # type: ignore[explicit-override]  # mypy sees no override of a property that has a setter
    def grad(self) -> torch.Tensor | None:
        """The gradient of this rank's shard, where the parameters have their own too; None where nothing has one."""
        if getattr(self, "_params", None) is None:
            own: torch.Tensor | None = _tensor_grad.__get__(self)
            return own
        return self._handle.sharded_grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _tensor_grad.__set__(self, gradient)


class FlatParamHandle:
    """Flattens ``params`` of ``module``, and knows where each of them lies.

    On construction the parameters become views of one flat tensor on their own device. ``shard`` (called by the FSDP
    constructor) then keeps this rank's part of it.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        module: nn.Module,
        device: torch.device,
        sharding_strategy: ShardingStrategy,
        offload_params: bool,
        mp_param_dtype: torch.dtype | None,
        mp_reduce_dtype: torch.dtype | None,
        keep_low_precision_grads: bool,
        process_group: Any,
        use_orig_params: bool,
        *,
        fsdp_extension: Any | None = None,
    ) -> None:
        """Flatten in place, and leave this rank's part of a ``DTensor`` in its place; the signature is torch's.

        Args:
            params: Parameters of ``module``, of one dtype and on one device; each at most once.
            device: Where the flat parameter computes.
            mp_param_dtype: Compute dtype, from which alignment follows; None for the parameters' own.
            process_group: A ``Collectives``, or anything with ``rank()`` and ``size()``.
            use_orig_params: Keep the parameters themselves, as views; else modules hold plain tensors.

        Raises:
            ParameterError: ``params`` cannot be flattened together.
            UnsupportedError: an ``fsdp_extension`` was given.
        """
        params = list(params)
        self.rank, self.world_size = rank_and_size(process_group)
        if fsdp_extension is not None:
            raise UnsupportedError(
                f"FSDP extensions are not served (rank {self.rank}). Write a polyshard.interfaces plugin instead."
            )
        if not params:
            raise ParameterError(
                f"Cannot construct a {type(self).__name__} with an empty parameter list (rank {self.rank}). "
                "Pass the parameters that should be flattened together."
            )
        found = _find(params, module, self.rank)
        _refuse_unflattenable(found, use_orig_params, self.rank)
        self.device = device
        self.process_group = process_group
        self.sharding_strategy = sharding_strategy
        self._offload_params = offload_params
        self.keep_low_precision_grads = keep_low_precision_grads
        self._use_orig_params = use_orig_params
        self.module = module
        #: Whether values of an optimizer's state come as ``laid_out`` makes them.
        self.takes_odd = False
        #: The engine's ``FlatUnit`` over these parameters.
        self.unit: Any = None
        self._training_state = HandleTrainingState.IDLE
        first = params[0]
        self.orig_dtype = first.dtype
        self.param_dtype = mp_param_dtype or first.dtype
        self.reduce_dtype = mp_reduce_dtype or self.param_dtype
        self.layout = flat_layout(
            [each.original for each in found],
            shards=self.world_size if self.uses_sharded_strategy else 1,
            itemsize=self.param_dtype.itemsize,
            # Parameters that are shown one by one must each be readable by wide loads; without that they lie densely.
            aligned=use_orig_params,
        )
        self.flat_param, self.parameters = self._flatten(found)

    @property
    def uses_sharded_strategy(self) -> bool:
        """Whether each rank keeps a part only."""
        return self.sharding_strategy is not ShardingStrategy.NO_SHARD

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the shard that an optimizer updates."""
        return self.orig_dtype if self.unit is None else self.unit.spec.master_dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        # Set by trainers that keep shards in another dtype than the model came in, once they have cast the flat
        # parameter's data.
        if self.unit is not None:
            self.unit.take_up_home(refuse_offload=False)
        if self._orig_param_dtype != dtype:
            raise ParameterChangedError(
                f"The flat parameter of '{self.flat_param._fqns[0]}' on rank {self.rank} is in "
                f"{self._orig_param_dtype}, and cannot be told to be in {dtype}. Give it data of that dtype first: "
                "flat_param.data = flat_param.data.to(dtype)."
            )

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        """The dtype that modules compute with in training."""
        return self.param_dtype if self.unit is None else self.unit.dtypes.compute

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self.reduce_dtype if self.unit is None else self.unit.dtypes.reduce

    @property
    def sharded_grad(self) -> torch.Tensor | None:
        """This rank's reduced gradient of the flat parameter (``[shard_numel]``); None where nothing has one."""
        return None if self.unit is None else self.unit.gradients.reduced_shard()

    @property
    def unsharded_numel(self) -> int:
        """Elements of the whole flat parameter, as users count them: padding only where parameters are aligned."""
        return self.layout.padded_numel if self._use_orig_params else self.layout.numel

    def shard_metadata(self) -> FlatParamShardMetadata:
        infos = self.flat_param._shard_param_infos
        found = [(index, self.layout.slots[index], info) for index, info in enumerate(infos) if info[0]]
        # Lists, as programs compare it with.
        made: Any = FlatParamShardMetadata
        return made(  # type: ignore[no-any-return]
            [self.flat_param._fqns[index] for index, _, _ in found],
            [torch.Size(slot.shape) for _, slot, _ in found],
            [slot.stride for _, slot, _ in found],
            [slot.stride == contiguous_stride(slot.shape) for _, slot, _ in found],
            [slot.numel for _, slot, _ in found],
            [(info.intra_param_start_idx, info.intra_param_end_idx) for _, _, info in found],
        )

    def _get_shard_metadata(self, unsharded_start_idx: int, unsharded_end_idx: int) -> tuple[Any, ...]:
        """The pieces of parameters in these elements of the flat parameter, padding counted; ends are inclusive."""
        start, end = unsharded_start_idx, unsharded_end_idx + 1
        found = []
        for index, slot in enumerate(self.layout.slots):
            low, high = max(slot.offset, start), min(slot.end, end)
            check = partial(self._refuse_odd, index) if self.is_odd(index) else None
            found.append(_torch_private.shard_param_info(low - start, low - slot.offset, high - low, check))
        return tuple(found)

    def is_odd(self, index: int) -> bool:
        """Whether torch's function would load other elements of an optimizer's state than the parameter's own."""
        part, slot = self.parameters[index].part, self.layout.slots[index]
        return part is not None or (self._use_orig_params and slot.stride != contiguous_stride(slot.shape))

    def _refuse_odd(self, index: int) -> None:
        if not self.takes_odd:
            raise UnsupportedError(
                f"The optimizer state of '{self.flat_param._fqns[index]}' (rank {self.rank}), which is a part by "
                "tensor parallelism or has strides of its own, is loaded by polyshard_fsdp's "
                "FullyShardedDataParallel.optim_state_dict_to_load alone. Call that."
            )

    # What torch's functions for optimizers' state dicts, and for the order of forwards, read and call.

    _aligned_numel = 0
    _handle_index: int

    def _reset_flat_param_grad_info_if_needed(self) -> None:
        return None

    def _get_unflat_views(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Whole parameters in ``tensor`` (``[unsharded_numel]``), as copies: the next state is gathered into it."""
        for slot, each in zip(self.layout.slots, self.parameters, strict=True):
            whole = view_of(tensor, slot.shape, slot.stride, slot.offset).clone()
            yield whole if each.part is None else each.part.as_leaf(whole)

    def _get_unflat_views_aligned(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(self._get_unflat_views(tensor))

    def flatten_tensors(self, tensors: Sequence[torch.Tensor], aligned_numel: int) -> torch.Tensor:
        """A flat tensor (``[unsharded_numel]``) of the parameters' rows, each flattened."""
        flat = tensors[0].new_zeros(self.unsharded_numel)
        for slot, each in zip(self.layout.slots, tensors, strict=True):
            view_of(flat, slot.shape, slot.stride, slot.offset).copy_(each.view(slot.shape))
        return flat

    def _use_unsharded_views(self, as_params: bool) -> None:
        """Let modules see whole parameters: plain tensors for compute, ``nn.Parameter`` for ``summon_full_params``."""
        assert self.unit is not None
        if as_params:
            self.unit.expose_whole()
        else:
            self.unit.gathered.show_views()

    def register_flat_param(self) -> None:
        """Let the module hold the flat parameter under its own name."""
        self.module._parameters[FLAT_PARAM] = self.flat_param

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Let modules see shards again, and release the gathered flat parameter where that is asked for."""
        if free_unsharded_flat_param:
            self.unit.gathered.release()
        else:
            self.unit.gathered.conceal()

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """``flat_param.to(...)`` in place: trainers offload models to host memory between phases."""
        self.unit.held.adopt_changes()
        self.flat_param.data = self.flat_param.data.to(*args, **kwargs)
        self.unit.take_up_home(refuse_offload=False)

    def deregister_flat_param(self) -> None:
        self.module._parameters.pop(FLAT_PARAM, None)

    def keep_own_shard(self) -> torch.Tensor:
        """This rank's part of the flat tensor, the only part that is kept from now on."""
        layout = self.layout
        with torch.inference_mode(False), torch.no_grad():
            flat = self._whole
            del self._whole
            start = (self.rank if self.uses_sharded_strategy else 0) * layout.shard_numel
            own = flat if layout.world_size == 1 else flat.narrow(0, start, layout.shard_numel).clone()
        self.flat_param._shard_param_infos = self._get_shard_metadata(start, start + layout.shard_numel - 1)
        self.flat_param._sharded_size = own.size()
        return own

    def _flatten(self, found: Sequence[ManagedParameter]) -> tuple[FlatParameter, tuple[ManagedParameter, ...]]:
        layout = self.layout
        first = found[0].original
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.zeros(layout.padded_numel, dtype=first.dtype, device=first.device)
            views = [view_of(flat, slot.shape, slot.stride, slot.offset) for slot in layout.slots]
            for view, each in zip(views, found, strict=True):
                view.copy_(each.original)
        self._whole = flat
        if self._use_orig_params:
            for view, each in zip(views, found, strict=True):
                become(each.original, view)
                setattr(each.original, FSDP_FLATTENED, True)
                if each.part is not None:
                    for holder, attribute in each.sites:
                        holder._parameters[attribute] = each.original
            managed = tuple(found)
        else:
            managed = tuple(_stand_in(each) for each in found)
            for view, each in zip(views, found, strict=True):
                for holder, attribute in each.sites:
                    del holder._parameters[attribute]
                    holder.__dict__[attribute] = view
        trained = any(each.original.requires_grad for each in managed)
        flat_param = FlatParameter(flat.narrow(0, 0, self.unsharded_numel), requires_grad=trained)
        _describe(flat_param, managed, layout)
        flat_param._handle = self
        flat_param._params = [each.original for each in managed] if self._use_orig_params else None
        return flat_param, managed


def _find(params: Sequence[nn.Parameter], module: nn.Module, rank: int) -> list[ManagedParameter]:
    wanted = set(params)
    sites: dict[nn.Parameter, dict[tuple[nn.Module, str], None]] = {}
    names: dict[nn.Parameter, list[str]] = {}
    # Shared modules at each of their places: every name of a parameter counts.
    for prefix, holder in module.named_modules(remove_duplicate=False):
        for key, parameter in holder._parameters.items():
            if parameter is not None and parameter in wanted:
                sites.setdefault(parameter, {})[holder, key] = None
                names.setdefault(parameter, []).append(f"{prefix}.{key}" if prefix else key)
    found = []
    for each, places in sites.items():
        part = TensorPart.of(each, names[each][0], rank)
        original = each if part is None else plain_parameter(each)
        found.append(ManagedParameter(original, tuple(names[each]), tuple(places), part, part))
    return found


def _refuse_unflattenable(found: Sequence[ManagedParameter], use_orig_params: bool, rank: int) -> None:
    first = found[0].original
    for each in found:
        parameter, where = each.original, f"'{each.names[0]}' (rank {rank})"
        if not (parameter.dtype.is_floating_point or parameter.dtype.is_complex):
            raise ParameterError(
                f"Cannot flatten integer dtype tensors: {where} has {parameter.dtype}. Register it as a buffer, or "
                "pass it in ignored_states."
            )
        if parameter.dtype != first.dtype:
            raise ParameterError(
                f"Must flatten tensors with uniform dtype but got {first.dtype} and {parameter.dtype}: {where}. Wrap "
                "modules of another dtype by themselves."
            )
        if not use_orig_params and parameter.requires_grad != first.requires_grad:
            raise ParameterError(
                f"Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`: {where}. Wrap frozen "
                "modules by themselves, or pass use_orig_params=True."
            )


def _stand_in(each: ManagedParameter) -> ManagedParameter:
    # Keeps shape and dtype, and not the memory: the user's parameter object may go.
    original = each.original
    hollow = torch.empty_strided(original.shape, original.stride(), dtype=original.dtype, device="meta")
    return replace(each, original=nn.Parameter(hollow, requires_grad=original.requires_grad))


def _describe(flat_param: FlatParameter, parameters: Sequence[ManagedParameter], layout: FlatLayout) -> None:
    flat_param._fqns = tuple(each.names[0] for each in parameters)
    flat_param._num_params = len(parameters)
    flat_param._shapes = tuple(torch.Size(slot.shape) for slot in layout.slots)
    flat_param._padded_unsharded_size = torch.Size([layout.padded_numel])
    flat_param._shard_numel_padded = 0
    ranges = sorted([(s.offset, s.numel, False) for s in layout.slots] + [(*gap, True) for gap in layout.gaps()])
    ranges = [each for each in ranges if each[0] < flat_param.numel()]
    flat_param._numels_with_padding = tuple(numel for _, numel, _ in ranges)
    flat_param._is_padding_mask = tuple(is_padding for _, _, is_padding in ranges)
    flat_param._unpadded_unsharded_size = flat_param.size()
    setattr(flat_param, FSDP_FLATTENED, True)


def flat_layout(parameters: Sequence[nn.Parameter], *, shards: int, itemsize: int, aligned: bool) -> FlatLayout:
    """The layout of ``parameters`` in slices of ``ceil(total / shards)`` elements of ``itemsize`` bytes.

    ``aligned``: each begins at a multiple of 16 bytes. Otherwise they lie back to back.
    """
    alignment = max(1, PARAMETER_ALIGNMENT_BYTES // itemsize) if aligned else 1
    slots, cursor = [], 0
    for parameter in parameters:
        shape = tuple(parameter.shape)
        offset = -(-cursor // alignment) * alignment
        slots.append(Slot(offset, product(shape), shape, dense_stride(shape, parameter.stride()), by_rows=False))
        cursor = slots[-1].end
    return FlatLayout(tuple(slots), cursor, -(-cursor // shards), shards)
