"""The strategy for ``lightning.Fabric``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from lightning.fabric.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.fabric.plugins.precision import HalfPrecision
from lightning.fabric.strategies import DDPStrategy
from polyshard import checkpoint
from polyshard.api import no_sync
from polyshard.errors import ConfigError, StateError
from polyshard_trainers.models import held_by, parameters_of, refuse_strangers, warn_unsaveable
from torch import nn
from typing_extensions import override

from . import checkpoints
from ._private import BackwardSyncControl
from .common import Strategy, init_context, is_sharded, with_precision

_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
Filter = Callable[[str, Any], bool]


class ShardedModule(nn.Module):
    """Stands around a sharded module, so that Fabric sends calls of marked methods through its forward.

    Fabric lets ``forward`` of the module inside be the other method for one call, and calls this one: the method then
    runs where parameters are whole.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._own_forward = module.__dict__.get("forward")

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stands_in = self.module.__dict__.get("forward")
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            # Fabric puts the module's own forward back when it is reached, which an error on the way prevents.
            left = self.module.__dict__.get("forward")
            if left is stands_in and left is not self._own_forward and isinstance(left, FunctionType):
                del self.module.__dict__["forward"]
                if self._own_forward is not None:
                    self.module.__dict__["forward"] = self._own_forward
            raise


class _NoBackwardSync(BackwardSyncControl):  # type: ignore[misc]
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, ShardedModule):
            raise StateError(
                f"no_backward_sync() got a {type(module).__name__} that is not sharded. Pass what fabric.setup() "
                "returned."
            )
        return no_sync(module.module)


class PolyshardFabricStrategy(Strategy, DDPStrategy):  # type: ignore[misc]
    """Shards modules as ``polyshard.shard`` does: ``Fabric(strategy=PolyshardFabricStrategy(config))``.

    ``fabric.setup`` shards in place: optimizers are given to it, too, or made after. A module stays sharded until the
    process ends, or ``polyshard.close(module)``.
    """

    default_state_dict_type = "sharded"
    backward_sync_control = _NoBackwardSync()

    @property
    def precision(self) -> Any:
        return Precision() if self._precision is None else self._precision

    @precision.setter
    def precision(self, precision: Any) -> None:
        if precision is not None:
            self._precise = with_precision(self._config, precision, _PRECISIONS)
        self._precision = precision

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Where modules are made: in host memory, or on the meta device for ``empty_init``."""
        return init_context(self.precision.module_init_context(), empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        """Sharding does."""

    def setup_module(self, module: nn.Module) -> ShardedModule:
        """Shard ``module`` in place.

        Raises ConfigError, AlreadyShardedError, PolyshardError: as ``polyshard.shard``; the module is as it was.
        """
        self.shard(module)
        return ShardedModule(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any | None = None
    ) -> tuple[ShardedModule, list[torch.optim.Optimizer], Any | None]:
        """Shard ``module`` in place; its optimizers go on with the sharded parameters.

        Raises ConfigError: an optimizer holds other parameters, or cannot be taken over; the module is as it was.
        """
        self._refuse_strangers(optimizers, module)
        self.shard(module, optimizers=optimizers)
        for optimizer in optimizers:
            self._look_at_saving(optimizer, module)
        return ShardedModule(module), optimizers, scheduler

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Take an optimizer over parameters of modules that were set up.

        Raises ConfigError: it holds others.
        """
        self._refuse_strangers([optimizer])
        self._look_at_saving(optimizer, self._module_of(optimizer))
        return optimizer

    def _refuse_strangers(self, optimizers: Sequence[torch.optim.Optimizer], *further: nn.Module) -> None:
        for each in optimizers:
            refuse_strangers(
                each,
                [*self._live, *further],
                self.global_rank,
                "Make the optimizer from the parameters of a module that was set up, or give both to "
                "fabric.setup(module, optimizer).",
            )

    def _look_at_saving(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        warn_unsaveable(module, optimizer, "fabric.save()", self.global_rank, writes=self._saves_folders)

    # Checkpoints.

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Filter] | None = None,
    ) -> None:
        """Write a directory or a file, as ``state_dict_type`` says; it replaces an earlier one.

        ``state`` has one sharded module, and what else there is: its optimizers, objects with ``state_dict()``, values.
        Of those rank 0's are kept.

        Raises:
            ConfigError: there is not one sharded module, or an optimizer is not of its parameters; a file is to be
                written where there is a directory of something else.
            UnsupportedError: a directory is to be written with ``storage_options``, a filter or a ``CheckpointIO``.
            PolyshardError, OSError: writing failed.
        """
        path = self.broadcast(path)
        if not self._saves_folders:
            self.make_room(path)
            super().save_checkpoint(path, self._whole(state), storage_options, filter)
            return
        key, module = _only_module(state, "save")
        optimizers = _optimizers_in(state)
        rest = {
            name: value.state_dict() if _is_stateful(value) else value
            for name, value in state.items()
            if name != key and name not in optimizers
        }
        extra = {"module": key, "optimizers": list(optimizers), "rest": rest}
        steps = list(optimizers.values())
        self.save_folder(path, 0, module, steps, extra, storage_options=storage_options, filter=filter)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole state of a sharded module, on rank 0; empty on others."""
        inner = _inner(module)
        return checkpoints.whole_model_state(inner) if is_sharded(inner) else inner.state_dict()

    def load_checkpoint(
        self,
        path: str | Path,
        state: nn.Module | torch.optim.Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read what ``save_checkpoint`` wrote into the objects of ``state``; returns the other entries.

        ``state`` may be a sharded module by itself, for a file or directory with its state.

        Raises:
            ConfigError: there is no checkpoint, or it is of another model or optimizer, or lacks something of ``state``
                while ``strict``.
            StateError: the directory is damaged.
        """
        path = self.broadcast(path)
        if checkpoints.is_folder(path):
            return self._load_folder(path, state, strict)
        checkpoints.require_file(path)
        if isinstance(state, torch.optim.Optimizer):
            saved = super().load_checkpoint(path, None, strict, weights_only)
            _WholeOptimizer(self._module_of(state), state).load_state_dict(saved)
            return {}
        if not isinstance(state, dict):
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return rest
        whole = self._whole(state)
        rest = super().load_checkpoint(path, whole, strict, weights_only)
        state.update({name: value for name, value in whole.items() if not isinstance(value, _WholeOptimizer)})
        return rest

    def _load_folder(self, path: str | Path, state: Any, strict: bool) -> dict[str, Any]:
        if isinstance(state, nn.Module):
            state = {"module": state}
            key, strict = "module", False
        elif isinstance(state, dict):
            key, _ = _only_module(state, "load")
        else:
            raise ConfigError(
                f"The sharded checkpoint {path} is read into a model and its optimizers, and none is given. Call "
                "fabric.load(path, {'model': model, ...})."
            )
        module = _inner(state[key])
        optimizers = _optimizers_in(state)
        if optimizers and not checkpoints.has_optimizers(path):
            raise ConfigError(
                f"The checkpoint {path} has no optimizer, and {', '.join(map(repr, optimizers))} is to be loaded. Load "
                "the model alone."
            )
        extra = checkpoint.load(Path(path), module, list(optimizers.values()) or None)
        rest = dict(extra["rest"])
        others = [name for name in state if name != key and name not in optimizers]
        missing = [name for name in others if name not in rest]
        if strict and missing:
            raise ConfigError(
                f"The checkpoint {path} has no {', '.join(map(repr, missing))}. Leave it out of the state, or load "
                "with strict=False."
            )
        for name in (name for name in others if name in rest):
            if _is_stateful(state[name]):
                state[name].load_state_dict(rest.pop(name))
            else:
                state[name] = rest.pop(name)
        return rest

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Let each rank take its part of whole tensors. Raises ConfigError: they are another model's."""
        checkpoints.load_whole_model_state(_inner(module), state_dict, strict=strict)

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """``state`` with optimizers that save and load as those of unsharded models."""
        own = {name: _WholeOptimizer(self._module_of(each), each) for name, each in _optimizers_in(state).items()}
        return {**state, **own}

    def _module_of(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        held = set(held_by(optimizer))
        for module in self._live:
            if not held.isdisjoint(parameters_of(module)):
                return module
        raise ConfigError(
            f"{type(optimizer).__name__} holds no parameter of a module that was set up (rank {self.global_rank}). "
            "Make it from the parameters of the model, and set that up."
        )


class _WholeOptimizer:
    """What Lightning's files have of an optimizer."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return checkpoints.whole_optimizer_state(self._module, self._optimizer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        checkpoints.load_whole_optimizer_state(self._module, self._optimizer, state)


def _optimizers_in(state: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    return {name: each for name, each in state.items() if isinstance(each, torch.optim.Optimizer)}


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, ShardedModule) else module


def _only_module(state: Mapping[str, Any], call: str) -> tuple[str, nn.Module]:
    """Name of the sharded module in ``state``, and the module itself."""
    found = {
        name: _inner(value)
        for name, value in state.items()
        if isinstance(value, nn.Module) and is_sharded(_inner(value))
    }
    if len(found) != 1:
        raise ConfigError(
            f"fabric.{call}() needs one model that was set up in its state, and found {list(found) or 'none'}. Give "
            f"each model a path of its own: fabric.{call}(path, {{'model': model, ...}})."
        )
    return next(iter(found.items()))


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
