"""The wrapper: PyTorch's ``FullyShardedDataParallel`` on polyshard's engine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from polyshard.errors import ConfigAssertionError, ConfigError, ConfigTypeError, StateError, TrainingStateError
from polyshard.extension import clip_grad_norm, refuse_torch_sharded, uncompiled_alone
from polyshard.interfaces import COMPLETED, Work
from torch import nn

from . import _init_utils, _optim_utils, _state_dict_utils, _unshard_param_utils, api
from ._common_utils import FLAT_PARAM as FLAT_PARAM
from ._common_utils import TrainingState, _get_fsdp_states, warn
from ._gradients import HookedRanks
from ._runtime import FSDPRoot
from ._shard_utils import PartExtension
from ._state import FSDPInstance, refuse_parts_elsewhere
from ._torch_private import check_single_device
from ._wrap_utils import _auto_wrap
from .api import *  # noqa: F403
from .api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

__all__ = ["FullyShardedDataParallel"]
__all__ += api.__all__

#: What is not here is as there, and so are isinstance checks of torch's functions and of trainers.
TorchFSDP: Any = torch.distributed.fsdp.FullyShardedDataParallel


def _require(value: object, kind: type, argument: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigTypeError(f"`{argument}` should be a {kind.__name__} but got {value!r} of {type(value)}.")


def _noted(error: ConfigAssertionError, note: str) -> ConfigAssertionError:
    # Programs written for FSDP match these messages whole: where and what to do go beside them.
    error.add_note(note)
    return error


class FullyShardedDataParallel(FSDPInstance, TorchFSDP):  # type: ignore[misc]
    """Shards the parameters of ``module`` over ranks, and gathers them for its forward and backward.

    Instances may stand inside one another; each holds the parameters that no inner one has. The outermost is found
    when it is first used. Attributes and items that the wrapper lacks are the module's.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        """Shard ``module`` in place. Arguments mean what they mean to torch's wrapper, but for these:

        Args:
            process_group: The ranks; a (shard, replicate) pair for hybrid strategies; a ``Collectives``; or anything
                with ``rank()`` and ``size()``, with which the model can be wrapped and not run.
            limit_all_gathers: Accepted. Memory is bounded by events on the device; the host never waits.
            device_mesh: One-dimensional, or two-dimensional (replicate, shard) for hybrid strategies.

        Raises:
            ConfigError, ParameterError, DeviceError, AlreadyShardedError: before anything is changed or sent.
        """
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module
        _require(sharding_strategy, ShardingStrategy, "sharding_strategy")
        _require(cpu_offload, CPUOffload, "cpu_offload")
        _require(backward_prefetch, BackwardPrefetch, "backward_prefetch")
        _require(mixed_precision, MixedPrecision, "mixed_precision")
        # What instances inside take over as it is.
        given: dict[str, Any] = {
            "sharding_strategy": sharding_strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "device_mesh": device_mesh,
        }
        init = _init_utils
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            # It has no forward in which its parameters could be gathered.
            warn(f"FSDP will not all-gather parameters for containers that do not implement forward: {module}")
        refuse_torch_sharded(module, but=FSDPInstance)
        managed = init.find_managed(self, module, ignored_modules, ignored_states)
        device_type = init.device_type_of(managed, device_id)
        groups = init.resolve_groups(sharding_strategy, process_group, device_mesh, auto_wrap_policy, device_type)
        device = init.explicit_device(device_id, groups.rank)
        init.check_parameters(managed, device, groups.rank, param_init_fn)
        if auto_wrap_policy is not None:
            ignored = set(managed.ignored_modules), set(managed.ignored_parameters)
            inside = {**given, "ignored_states": managed.ignored_parameters}
            if device_mesh is None:
                # Instances of one model share their groups, also where a hybrid strategy made them here.
                pair = groups.process_group, groups.replicate_group
                inside["process_group"] = pair if groups.replicate_group is not None else groups.process_group
            _auto_wrap(module, auto_wrap_policy, *ignored, inside, FullyShardedDataParallel)
        strategy = init.effective_strategy(sharding_strategy, groups.world_size)
        check_single_device(module, self._ignored_params, device)
        init.materialize(managed, param_init_fn, device or init.current_device(device_type))
        init.move_to(managed, device, device_type)
        computes_on = init.compute_device(managed, device, device_type, groups.rank)
        if sync_module_states:
            init.sync_module_states(managed, groups, computes_on)
        self._configure(given, strategy, groups, managed, computes_on)
        self._flatten()
        self._fsdp_extension = PartExtension(self) if device_mesh is not None else None
        _state_dict_utils._register_all_state_dict_hooks(self)

    @uncompiled_alone
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with whole parameters."""
        args, kwargs = self._forward.pre_forward(self, args, kwargs)
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            self._forward.post_forward(self, args, kwargs, None)
            raise
        return self._forward.post_forward(self, args, kwargs, output)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """``nn.Module.apply``, with this instance's parameters whole while ``fn`` runs; what it writes is kept."""
        uninitialized = self._root is None
        self._assert_state(TrainingState.IDLE)
        with _unshard_param_utils._unshard_params(self, False, True, False, False, False):
            applied = nn.Module.apply(self, fn)
        if uninitialized and self._is_root:
            self._forget_root()
        return applied

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """A context in which the parameters of all instances in ``module`` are whole, in their original dtype.

        With ``writeback=False`` changes are dropped, but with ``NO_SHARD``, where nothing is copied.

        Raises:
            NotImplementedError: a combination that is not served.
            AssertionError: inside a forward, a backward, or another such context.
        """
        with _unshard_param_utils._unshard_params(module, recurse, writeback, rank0_only, offload_to_cpu, with_grads):
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank, whole; the next one outside reduces the sum.

        Raises:
            RuntimeError: this is not the outermost instance.
        """
        root = self._require_root(
            "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module."
        )
        before, root.synchronises = root.synchronises, False
        try:
            yield
        finally:
            root.synchronises = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``; returns the norm before.

        It is computed in fp32 (fp64 for fp64 gradients), and returned in the dtype to which those of this rank's
        gradients promote, on the compute device. Warns where this rank has none.

        Raises:
            RuntimeError: this is not the outermost instance.
        """
        root = self._require_root("`clip_grad_norm_()` should only be called on the root FSDP instance.")
        refuse_parts_elsewhere(root.units)
        total = clip_grad_norm(root, self, float(max_norm), float(norm_type))
        parameters = {each for unit in root.units for each in unit.held.tensors} | set(self.parameters())
        dtypes = [parameter.grad.dtype for parameter in parameters if parameter.grad is not None]
        if not dtypes:
            warnings.warn(
                f"Called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning the total norm in "
                f"the default dtype {torch.float32}",
                stacklevel=3,
            )
        return total.to(functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients by ``hook`` from now on.

        ``hook(state, gradient)`` reduces a whole gradient in place, with ``NO_SHARD``; ``hook(state, gradient, shard)``
        writes this rank's part of the sum into ``shard``.

        Raises:
            AssertionError: this is not the outermost instance, the strategy is hybrid, or there is a hook already.
            ValueError: ``hook`` cannot be called.
        """
        if not self.check_is_root():
            raise _noted(
                ConfigAssertionError("register_comm_hook can only be called on a root instance."),
                f"This one is '{self._module_state.name}' (rank {self.rank}). Call it on the outermost.",
            )
        if not callable(hook):
            raise ConfigError(f"The communication hook must be callable but got {hook} (rank {self.rank}).")
        instances: list[FSDPInstance] = _get_fsdp_states(self)
        for each in instances:
            if each.sharding_strategy in _init_utils.HYBRID_SHARDING_STRATEGIES:
                raise ConfigAssertionError(
                    f"Communication hook is not supported for hybrid strategies: {each.sharding_strategy} "
                    f"(rank {self.rank})."
                )
            if each._comm_hook is not None:
                raise _noted(
                    ConfigAssertionError("A communication hook is already registered"),
                    f"On {each._where}. Construct the model anew to change it.",
                )
        for each in instances:
            each._comm_hook, each._comm_hook_state = hook, state
            if (unit := each._flat_unit) is not None:
                ranks = unit.ranks
                unit.ranks = HookedRanks.over(ranks.world, ranks.owner, ranks.replicate, hook=hook, state=state)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The state of ``optim`` by parameter names, in the form that the state dict type says, as copies."""
        _optim_utils.refuse_groups(model)
        found = TorchFSDP.optim_state_dict(model, optim, optim_state_dict, group)
        settings = TorchFSDP.get_state_dict_type(model)
        whole = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        given = list(optim.state.values()) if optim_state_dict is None else optim_state_dict["state"]
        on_host = settings.optim_state_dict_config.offload_to_cpu
        return _optim_utils.apart(found, given, whole=whole, on_host=on_host)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """The result of ``optim_state_dict``, as ``optim.load_state_dict`` takes it on this rank."""
        _optim_utils.refuse_groups(model)
        config = TorchFSDP.get_state_dict_type(model).optim_state_dict_config
        first = getattr(config, "rank0_only", False)
        with _optim_utils.laid_out(model, optim_state_dict, rank0_only=first) as given:
            loaded = TorchFSDP.optim_state_dict_to_load(model, optim, given, is_named_optimizer, False, group)
        loaded = _optim_utils.apart(loaded, optim_state_dict)
        if load_directly:
            optim.load_state_dict(loaded)
        return loaded

    def _unshard(self, async_op: bool = False) -> Work | None:
        """Gather the parameters ahead of the forward; returns what waits for them, unless it has waited already."""
        self._become_root()
        unit = self._flat_unit
        if unit is not None:
            unit.gathered.gather_ahead()
        work: Work = COMPLETED if unit is None else unit.gathered
        if async_op:
            return work
        work.wait()
        return None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Order the current stream after every gather so far."""
        self._become_root()
        assert self._root is not None
        self._root.streams.follow()

    def _require_root(self, message: str) -> FSDPRoot:
        """The root of the model. Raises ``StateError`` with ``message`` where this is not the outermost instance."""
        self._become_root()
        if not self._is_root or self._root is None:
            raise StateError(f"{message} This one is '{self._module_state.name}' (rank {self.rank}).")
        self._assert_state(TrainingState.IDLE)
        return self._root

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raises ``TrainingStateError`` (a ``ValueError``) unless this instance is in that state, or in one of those.

        Rank 0 prints it as well: raised inside a backward hook, the exception may reach nobody.
        """
        wanted = [state] if isinstance(state, TrainingState) else state
        if self.training_state in wanted:
            return
        message = (
            f"expected to be in states {wanted} but current state is {self.training_state}, on rank {self.rank}. "
            "Finish what the current state stands for (a backward, or summon_full_params) before this call."
        )
        if self.rank == 0:
            print(f"Asserting FSDP instance is: {self}\nERROR: {message}")
        raise TrainingStateError(message)

    def _apply(self, fn: Any, recurse: bool = True) -> FullyShardedDataParallel:
        instances: list[FSDPInstance] = _get_fsdp_states(self)
        for unit in (each._flat_unit for each in instances if each._flat_unit is not None):
            # Asked of all before any is changed, and without their memory.
            unit.refuse_unreduced(fn(torch.empty(0, dtype=unit.master.dtype, device=unit.master.device)))
        # `to`, `half`, `cuda` act on the flat parameter: applied to shards that view it, they would tear it apart.
        with self._as_flat_parameters():
            return nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
