"""The wrapper: PyTorch's ``FullyShardedDataParallel`` on polyshard's engine."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from polyshard.errors import ConfigAssertionError, ConfigError, StateError
from polyshard.functions.norms import clip_grad_norm
from torch import nn

from . import _optim_legacy, _optim_utils, _state_dict_utils, _unshard_param_utils
from ._common_utils import FLAT_PARAM as FLAT_PARAM
from ._common_utils import FSDP_PREFIX, FSDP_WRAPPED_MODULE, TrainingState, _assert_in_training_states
from ._construct import Arguments, construct
from ._gradients import CommHook
from ._groups import HYBRID_SHARDING_STRATEGIES
from ._state import FSDPInstance
from ._torch_settings import TorchNamed, is_torchs, own
from ._traversal_utils import _get_fsdp_states
from .api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class OptimStateKeyType(TorchNamed):
    """By what an optimizer state dict names its parameters."""

    PARAM_NAME = enum.auto()
    """Fully-qualified names."""
    PARAM_ID = enum.auto()
    """Positions in the optimizer's parameter groups."""


class _UnshardHandle:
    """A gather that was issued ahead of its forward."""

    def __init__(self, instance: FSDPInstance) -> None:
        self._instance = instance

    def wait(self) -> None:
        """Order compute after it; nothing to do the second time."""
        unit = self._instance._flat_unit
        if unit is not None:
            unit.wait()


def _noted(error: ConfigAssertionError, note: str) -> ConfigAssertionError:
    # Programs written for FSDP match these messages whole: where and what to do go beside them.
    error.add_note(note)
    return error


class FullyShardedDataParallel(nn.Module, FSDPInstance):
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
        """Shard ``module`` in place.

        Args:
            module: Its parameters become shards; ignored ones and those of inner instances stay as they are.
            process_group: The ranks; a (shard, replicate) pair for hybrid strategies; anything with ``rank()`` and
                ``size()`` for a stand-in that never communicates. None for the default group.
            sharding_strategy: None for ``FULL_SHARD``.
            cpu_offload: Whether shards live in host memory.
            auto_wrap_policy: Which modules inside become instances of their own, with these same arguments.
            backward_prefetch: When the next gather of a backward is issued; None for when it is needed.
            mixed_precision: In which dtypes parameters compute, gradients are reduced, and buffers are kept.
            ignored_modules: Left alone, with everything inside.
            param_init_fn: Called on modules that hold meta tensors, in the place of ``reset_parameters()``.
            device_id: Where a module on the CPU is moved first.
            sync_module_states: Take every rank's values from rank 0.
            forward_prefetch: Issue the next gather of a forward before its unit runs; for static graphs.
            limit_all_gathers: Accepted. Memory is bounded by events on the device; the host never waits.
            use_orig_params: Keep the parameters themselves, as views of shards; else one flat parameter stands for all.
            ignored_states: Parameters, or modules, that are left alone.
            device_mesh: One-dimensional, or two-dimensional (replicate, shard) for hybrid strategies.

        Raises:
            ConfigError, ParameterError, DeviceError, AlreadyShardedError: before anything is changed or sent.
        """
        nn.Module.__init__(self)
        arguments = Arguments(
            process_group=process_group,
            sharding_strategy=own(sharding_strategy, ShardingStrategy, "sharding_strategy"),
            cpu_offload=own(cpu_offload, CPUOffload, "cpu_offload"),
            auto_wrap_policy=auto_wrap_policy,
            backward_prefetch=own(backward_prefetch, BackwardPrefetch, "backward_prefetch"),
            mixed_precision=own(mixed_precision, MixedPrecision, "mixed_precision"),
            ignored_modules=ignored_modules,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            ignored_states=ignored_states,
            device_mesh=device_mesh,
        )
        construct(self, module, self, arguments, FullyShardedDataParallel, arguments.inside())
        self._fsdp_wrapped_module = module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def training_state(self) -> TrainingState:
        """Where this instance is in its step."""
        return self._training_state()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with whole parameters."""
        args, kwargs = self._forward.pre_forward(self, args, kwargs)
        try:
            output = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            self._forward.post_forward(self, args, kwargs, None)
            raise
        return self._forward.post_forward(self, args, kwargs, output)

    def check_is_root(self) -> bool:
        """Whether this is the outermost instance."""
        self._become_root()
        return bool(self._is_root)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Every instance in ``module``, itself included; ``root_only``: those that are outermost."""
        found = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
        return [each for each in found if each.check_is_root()] if root_only else found

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """``nn.Module.apply``, with this instance's parameters whole while ``fn`` runs; what it writes is kept."""
        uninitialized = self._is_root is None
        self._assert_state(TrainingState.IDLE)
        with _unshard_param_utils._unshard_params(self, False, True, False, False, False):
            applied = super().apply(fn)
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

        Args:
            module: An instance, or a module with some inside.
            recurse: Take inner instances too.
            writeback: Keep what was changed; else it is dropped, but with ``NO_SHARD``, where nothing is copied.
            rank0_only: Only rank 0 sees whole parameters.
            offload_to_cpu: They are in host memory.
            with_grads: Gradients are whole too.

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
        self._become_root()
        if not self._is_root or self._root is None:
            raise StateError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module. "
                f"This one is '{self._stage.name}' (rank {self.rank})."
            )
        self._assert_state(TrainingState.IDLE)
        root = self._root
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
        self._become_root()
        if not self._is_root or self._root is None:
            raise StateError(
                "`clip_grad_norm_()` should only be called on the root FSDP instance, and this one is "
                f"'{self._stage.name}' (rank {self.rank})."
            )
        self._assert_state(TrainingState.IDLE)
        total = clip_grad_norm(self._root, self, float(max_norm), float(norm_type))
        parameters = {each for unit in self._root.units for each in unit.originals.tensors} | set(self.parameters())
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

        Args:
            state: Given to ``hook`` first.
            hook: ``hook(state, gradient)`` reduces a whole gradient in place, with ``NO_SHARD``;
                ``hook(state, gradient, shard)`` writes this rank's part of the sum into ``shard``.

        Raises:
            AssertionError: this is not the outermost instance, the strategy is hybrid, or there is a hook already.
            ValueError: ``hook`` cannot be called.
        """
        if not self.check_is_root():
            raise _noted(
                ConfigAssertionError("register_comm_hook can only be called on a root instance."),
                f"This one is '{self._stage.name}' (rank {self.rank}). Call it on the outermost.",
            )
        if not callable(hook):
            raise ConfigError(f"The communication hook must be callable but got {hook} (rank {self.rank}).")
        instances: list[FSDPInstance] = _get_fsdp_states(self)
        for each in instances:
            if each.sharding_strategy in HYBRID_SHARDING_STRATEGIES:
                raise ConfigAssertionError(
                    f"Communication hook is not supported for hybrid strategies: {each.sharding_strategy} "
                    f"(rank {self.rank})."
                )
            if each._comm_hook is not None:
                raise _noted(
                    ConfigAssertionError("A communication hook is already registered"),
                    f"On '{each._stage.name or '(root)'}' (rank {self.rank}). Construct the model anew to change it.",
                )
        for each in instances:
            each._comm_hook, each._comm_hook_state = hook, state
            if each._flat_unit is not None:
                each._flat_unit.comm_hook = CommHook(state, hook)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set what ``state_dict`` of every instance in ``module`` makes; returns the settings before."""
        return _state_dict_utils._set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings that all instances in ``module`` share."""
        return _state_dict_utils._get_state_dict_type(module)

    @staticmethod
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> AbstractContextManager[None]:
        """``set_state_dict_type`` for the time of a context."""
        return _state_dict_utils._state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The state of ``optim``, by parameter names, in the form that the state dict type says."""
        return _optim_utils.optim_state_dict(model, optim, optim_state_dict, group)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """What ``optim_state_dict`` returned, as ``optim.load_state_dict`` takes it on this rank."""
        return _optim_utils.optim_state_dict_to_load(
            model, optim, optim_state_dict, is_named_optimizer, load_directly, group
        )

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: _optim_legacy.OptimInput = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """The whole state of ``optim`` by parameter names; deprecated for ``optim_state_dict``."""
        return _optim_legacy.full_optim_state_dict(model, optim, optim_input, rank0_only, group)

    @staticmethod
    def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
        """The state of ``optim`` as distributed tensors; deprecated for ``optim_state_dict``."""
        return _optim_legacy.sharded_optim_state_dict(model, optim, group)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: _optim_legacy.OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """This rank's part of a whole state dict; deprecated for ``optim_state_dict_to_load``."""
        return _optim_legacy.shard_full_optim_state_dict(full_optim_state_dict, model, optim_input, optim)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """This rank's part of a distributed state dict; deprecated for ``optim_state_dict_to_load``."""
        return _optim_legacy.flatten_sharded_optim_state_dict(sharded_optim_state_dict, model, optim)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: _optim_legacy.OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """This rank's part of rank 0's whole state dict; deprecated for ``optim_state_dict_to_load``."""
        return _optim_legacy.scatter_full_optim_state_dict(full_optim_state_dict, model, optim_input, optim, group)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: _optim_legacy.OptimInput = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """``optim_state_dict`` keyed by parameter names, or by positions in the optimizer of ``model``.

        Raises:
            ValueError: some of its keys are names and others positions.
            KeyError: one of them stands for no parameter of the optimizer.
            AssertionError: no ``OptimStateKeyType``.
        """
        if is_torchs(optim_state_key_type, "OptimStateKeyType"):
            optim_state_key_type = OptimStateKeyType[optim_state_key_type.name]
        if not isinstance(optim_state_key_type, OptimStateKeyType):
            raise _optim_legacy.refuse_key_type(optim_state_key_type)
        to_names = optim_state_key_type is OptimStateKeyType.PARAM_NAME
        return _optim_legacy.rekey_optim_state_dict(optim_state_dict, to_names, model, optim_input, optim)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; inside ``summon_full_params`` the names are the module's own."""
        clean = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (name.replace(FSDP_PREFIX, "") if clean else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module; inside ``summon_full_params`` the names are the module's own."""
        clean = self.training_state is TrainingState.SUMMON_FULL_PARAMS
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (name.replace(FSDP_PREFIX, "") if clean else name), buffer

    def _unshard(self, async_op: bool = False) -> _UnshardHandle | None:
        """Gather the parameters ahead of the forward; returns what waits for them, unless it has waited already."""
        self._become_root()
        if self._flat_unit is not None:
            self._flat_unit.gather_ahead()
        handle = _UnshardHandle(self)
        if async_op:
            return handle
        handle.wait()
        return None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Order the current stream after every gather so far."""
        self._become_root()
        assert self._root is not None
        self._root.streams.follow()

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        """Raises ``ValueError`` unless this instance is in that state, or in one of those."""
        _assert_in_training_states(self, [state] if isinstance(state, TrainingState) else state)

    def _apply(self, fn: Any, recurse: bool = True) -> FullyShardedDataParallel:
        instances: list[FSDPInstance] = _get_fsdp_states(self)
        for unit in (each._flat_unit for each in instances if each._flat_unit is not None):
            # Asked of all before any is changed, and without their memory.
            unit.refuse_unreduced(fn(torch.empty(0, dtype=unit.master.dtype, device=unit.master.device)))
        # `to`, `half`, `cuda` act on the flat parameter: applied to shards that view it, they would tear it apart.
        with self._as_flat_parameters():
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]
