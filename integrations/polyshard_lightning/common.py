"""Shared by the strategies for the Trainer and for Fabric: settings, processes, precision, sharding, directories."""

from __future__ import annotations

import atexit
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from polyshard import checkpoint, inspect
from polyshard.api import close, fully_shard, shard
from polyshard.config import PluginChoice, ShardConfig, did_you_mean
from polyshard.errors import AlreadyShardedError, ConfigError, ParameterError, PolyshardError, UnsupportedError
from polyshard.interfaces import WrapPolicy
from polyshard_trainers import models as trainers
from polyshard_trainers.config import (
    compute_dtype,
    leaves_dtype,
    needs_scaler,
    on_device,
    refuse_other_ranks,
)
from polyshard_trainers.models import refuse_wrapped
from torch import nn
from torchmetrics import Metric

from .checkpoints import is_folder, is_remote

#: Attribute of a module that a strategy sharded: the configuration.
_SETTINGS = "_polyshard_lightning_settings"
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_TRUE = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
_FULL = "32-true"
_SERVED = (_FULL, *_MIXED, *_TRUE)
# Mean and variance of a batch are of no use in 16 bits, and kernels want weights and running statistics in one dtype.
_BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]


#: The forms of a checkpoint: one file of whole tensors, or a directory of ``polyshard.checkpoint``.
StateDictType = Literal["full", "sharded"]


class Strategy:
    """Shared by both strategies. Stands before Lightning's ``DDPStrategy``, which gives ranks, devices and messages."""

    strategy_name = "polyshard"
    root_device: torch.device
    global_rank: int
    num_nodes: int
    num_processes: int
    world_size: int
    is_global_zero: bool
    barrier: Callable[[], None]
    broadcast: Callable[[Any], Any]
    _checkpoint_io: CheckpointIO | None

    #: Where ``state_dict_type`` is None.
    default_state_dict_type: ClassVar[StateDictType]
    #: Of Fabric, for ``no_backward_sync``.
    backward_sync_control: ClassVar[object] = None

    def __init__(
        self,
        config: ShardConfig | None = None,
        *,
        state_dict_type: StateDictType | None = None,
        initializer: inspect.Initializer | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        """Settings; nothing is done before Lightning launches its processes.

        Args:
            config: How to shard; ``ShardConfig()`` where None. ``device`` is Lightning's, and ``timeout_s`` is that of
                Lightning's own messages, too.
            state_dict_type: The form of checkpoints. ``"full"``: one file, as Lightning writes it without shards, the
                Trainer's default. ``"sharded"``: a directory to which each rank writes its part, Fabric's default.
            initializer: Of modules on the meta device, as for ``polyshard.shard``.
            process_group_backend: Of Lightning's own messages; by device where None.

        Raises:
            ConfigError: there is no such ``state_dict_type``.
        """
        form = self.default_state_dict_type if state_dict_type is None else state_dict_type
        forms = get_args(StateDictType)
        if form not in forms:
            raise ConfigError(
                f"state_dict_type {form!r} does not exist.{did_you_mean(str(form), forms)} There are: "
                f"{', '.join(forms)}."
            )
        #: As the user gave it, and with Lightning's precision in it.
        self._config = self._precise = config or ShardConfig()
        self._saves_folders = form == "sharded"
        self._initializer = initializer
        #: Modules that were sharded here and are in use.
        self._live: WeakSet[nn.Module] = WeakSet()
        timeout = timedelta(seconds=self._config.timeout_s)
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)  # type: ignore[call-arg]
        # Lightning's base has set its own.
        self._backward_sync_control = self.backward_sync_control

    @property
    def shard_config(self) -> ShardConfig:
        """The configuration, with Lightning's precision in it."""
        return self._precise

    def setup_environment(self) -> None:
        """Form the process group, unless the program has one. Raises ConfigError: it has one of another size."""
        forms = not dist.is_initialized()
        super().setup_environment()  # type: ignore[misc]
        if forms:
            atexit.register(_leave, self._live)
        elif dist.get_world_size() != self.world_size:
            raise ConfigError(
                f"torch.distributed has {dist.get_world_size()} ranks, and Lightning was asked for {self.num_nodes} "
                f"nodes of {self.num_processes} devices (rank {self.global_rank}). Set devices and num_nodes to what "
                "the launcher started."
            )

    def shard(
        self,
        module: nn.Module,
        *,
        calls_children: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Shard ``module`` in place, unless a strategy with equal settings has.

        Args:
            module: Not sharded; or sharded here before; or with modules inside that the user gave to ``fully_shard``.
            calls_children: Whether the module's children are called by themselves, outside of its forward: each of them
                then is a unit of its own.
            optimizers: Made before: they go on with the sharded parameters.

        Raises:
            ConfigError: an optimizer holds others or cannot be taken over, the configuration names another device or
                other ranks than Lightning's, or the module was sharded with other settings, or has parameters of its
                own while its children are called by themselves.
            AlreadyShardedError: something else has wrapped it.
            ShardingError, PluginError, RankMismatchError: as ``polyshard.shard``.
        """
        rank = self.global_rank
        refuse_other_ranks(self._precise, "Lightning", dist.get_world_size())
        config = on_device(self._precise, self.root_device, "Lightning", rank)
        refuse_module(module, rank)
        known: ShardConfig | None = module.__dict__.get(_SETTINGS)
        if known is not None:
            _require_equal(known, config, module, rank)
            self._live.add(module)
            return
        if calls_children:
            _refuse_own_parameters(module, rank)
        for metric in module.modules():
            # Their states are neither parameters nor buffers.
            if isinstance(metric, Metric):
                metric.to(self.root_device)
        if any(map(inspect.is_sharded, module.modules())):
            _compose(module, config, rank, self._initializer, optimizers, calls_children=calls_children)
        else:
            chosen = replace(config, policy=with_children(config.policy, module)) if calls_children else config
            shard(module, chosen, initializer=self._initializer, optimizers=optimizers)
        module.__dict__[_SETTINGS] = config
        self._live.add(module)

    # Checkpoints, in what both strategies have alike.

    def save_folder(
        self,
        path: str | Path,
        step: int,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        extra: Mapping[str, Any],
        **of_files: object,
    ) -> None:
        """Write ``path``, in the place of what it was before, once all is written. Every rank calls it.

        Args:
            path: The same on every rank, on one file system.
            step: Number of the optimizer step, not negative.
            module: The outermost sharded module.
            optimizers: Over its parameters.
            extra: Values that ``polyshard.checkpoint`` takes; rank 0's are kept.
            of_files: What only files know; refused where it is not None.

        Raises:
            UnsupportedError: something of files was asked for, or ``path`` is no path of this host.
            ConfigError: a directory of something else is there; on every rank.
            PolyshardError, OSError: as ``polyshard.checkpoint.save``; the directory from before stays.
        """
        given = [name for name, value in of_files.items() if value is not None]
        given += ["a CheckpointIO"] * (type(self._checkpoint_io) not in (type(None), TorchCheckpointIO))
        if given:
            raise UnsupportedError(
                f"A sharded checkpoint is a directory that polyshard writes, of all that the model has, without "
                f"{' and '.join(given)}. Leave that out, or set state_dict_type='full'."
            )
        if is_remote(path):
            raise UnsupportedError(
                f"A sharded checkpoint is a directory of a file system that all ranks see, and {path} is none. Give a "
                "path, or set state_dict_type='full'."
            )
        path = Path(path)
        if path.is_dir() and not path.is_symlink() and not is_folder(path) and any(path.iterdir()):
            raise ConfigError(
                f"{path} is a directory, and no checkpoint, where one is to be written. Choose another path, or empty "
                "it."
            )
        unfinished = path.parent / f".{path.name}.unfinished"
        if self.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
        self.barrier()
        written = checkpoint.save(unfinished, step, module, list(optimizers) or None, extra=extra)
        if self.is_global_zero:
            before = path.parent / f".{path.name}.before"
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(before, ignore_errors=True)
                path.rename(before)
            else:
                path.unlink(missing_ok=True)
            written.rename(path)
            shutil.rmtree(unfinished)
            shutil.rmtree(before, ignore_errors=True)
        self.barrier()

    def make_room(self, path: str | Path) -> None:
        """Remove a checkpoint's directory where a file is to be written. Every rank calls it, with rank 0's ``path``.

        Raises ConfigError: there is a directory of something else.
        """
        if is_remote(path):
            return
        path = Path(path)
        if self.broadcast(path.is_dir() and not is_folder(path)):
            raise ConfigError(
                f"{path} is a directory, and no checkpoint, where a file is to be written. Choose another path."
            )
        if self.is_global_zero and path.is_dir():
            shutil.rmtree(path)


@contextmanager
def init_context(precision: AbstractContextManager[Any], empty_init: bool | None) -> Iterator[None]:
    """Where tensors are made by ``precision``: in host memory, or on the meta device for ``empty_init``."""
    with torch.device("meta") if empty_init else nullcontext(), precision:
        yield


def _leave(live: WeakSet[nn.Module]) -> None:
    """End what would outlive the interpreter: communicators of models, then the group that they were made of."""
    # After an error other ranks may not arrive, and there is nothing to wait for.
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    for module in list(live):
        with suppress(PolyshardError):
            close(module)
    dist.destroy_process_group()


def with_precision(config: ShardConfig, plugin: object, served: tuple[type, ...]) -> ShardConfig:
    """``config`` with the precision that Lightning's ``plugin`` stands for, where it names none itself.

    Lightning's ``32-true`` looks like no precision at all, and leaves the choice to ``config``.

    Args:
        config: What the user gave to the strategy.
        plugin: Lightning's precision plugin.
        served: The classes of plugins that do nothing beside autocast, casts of inputs and gradient scaling.

    Raises:
        ConfigError: another kind of plugin, or ``config.precision`` says something else.
    """
    name = getattr(plugin, "precision", None)
    if type(plugin) not in served or name not in _SERVED:
        raise ConfigError(
            f"Lightning's precision plugin {type(plugin).__name__} (precision={name!r}) is not served by polyshard. "
            f"Choose one of {', '.join(map(repr, _SERVED))}, or leave Lightning's precision out and set "
            "ShardConfig(precision=...)."
        )
    if name == _FULL:
        if needs_scaler(config):
            raise ConfigError(
                f"ShardConfig(precision={config.precision!r}) computes in fp16, whose gradients underflow without a "
                "gradient scaler, and Lightning makes one for precision='16-mixed' alone. Give that to Lightning, too, "
                "or choose 'bf16'."
            )
        return config
    if name in _TRUE:
        _require(config, name, compute_dtype(config, _TRUE[name]), _TRUE[name])
        return config
    if leaves_dtype(config):
        # The model's inputs stay as they are, as in Lightning without shards: targets, too, are among them.
        outermost = {"cast_inputs": False, "cast_root_inputs": False}
        mixed = {"name": "mixed", "param": _MIXED[name], "reduce": torch.float32, "leave_alone": _BATCH_NORMS}
        return replace(config, precision={**mixed, "overrides": {"": outermost}})
    _require(config, name, compute_dtype(config), _MIXED[name])
    return config


def _require(config: ShardConfig, name: str, found: torch.dtype, wanted: torch.dtype) -> None:
    if found is not wanted:
        raise ConfigError(
            f"Lightning's precision={name!r} computes in {wanted}, but ShardConfig(precision={config.precision!r}) in "
            f"{found}. Say it in one place: leave one of the two out."
        )


def is_sharded(module: nn.Module) -> bool:
    return _SETTINGS in module.__dict__


def refuse_module(module: nn.Module, rank: int) -> None:
    """Raise ``AlreadyShardedError`` where something else divides the parameters of ``module``, or did."""
    refuse_wrapped(module, rank, "Give the model to Lightning as it is: the strategy shards it.")
    if trainers.is_sharded(module) and not is_sharded(module):
        raise AlreadyShardedError(
            f"{type(module).__name__} was sharded before Lightning's strategy saw it (rank {rank}). Leave that to "
            "the strategy: PolyshardStrategy(config), or PolyshardFabricStrategy(config)."
        )


def _require_equal(known: ShardConfig, config: ShardConfig, module: nn.Module, rank: int) -> None:
    different = [each.name for each in fields(config) if getattr(known, each.name) != getattr(config, each.name)]
    if different:
        raise ConfigError(
            f"This {type(module).__name__} was sharded with other settings ({', '.join(different)}) by a strategy "
            f"before (rank {rank}), and stays as it was. Use equal settings, or build the model anew."
        )


def _refuse_own_parameters(module: nn.Module, rank: int) -> None:
    own = next((name for name, parameter in module.named_parameters(recurse=False) if parameter is not None), None)
    if own is not None:
        raise ParameterError(
            f"'{own}' lies directly in {type(module).__name__}, whose training_step optimizes manually and so runs "
            f"where that is a part of the parameter (rank {rank}). Put it into a submodule, and call that."
        )


def _compose(
    module: nn.Module,
    config: ShardConfig,
    rank: int,
    initializer: inspect.Initializer | None,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    calls_children: bool,
) -> None:
    if config.policy != "never":
        raise ConfigError(
            f"Modules inside {type(module).__name__} are sharded by fully_shard already, so policy={config.policy!r} "
            f"has no meaning (rank {rank}). Leave policy out of the strategy's ShardConfig."
        )
    if calls_children:
        raise ConfigError(
            f"{type(module).__name__} optimizes manually, and modules inside it are sharded by fully_shard already "
            f"(rank {rank}). Leave sharding to the strategy: it makes a unit of each child."
        )
    fully_shard(module, config, initializer=initializer, optimizers=optimizers)


_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def with_children(choice: PluginChoice, module: nn.Module) -> PluginChoice:
    """The policy ``choice``, and the children of ``module``, the outermost, which are units as well."""
    if not isinstance(choice, (str, Mapping, WrapPolicy)) and callable(choice):
        choice = {"name": "custom", "fn": choice}
    children = set(_called(module))

    def is_called(module: nn.Module) -> bool:
        return module in children

    return {"name": "polyshard:or", "policies": [is_called, choice]}


def _called(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _NEVER_CALLED):
            yield from _called(child)
        elif any(True for _ in child.parameters()):
            yield child
