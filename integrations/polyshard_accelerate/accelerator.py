"""Accelerate's ``Accelerator``, whose models polyshard shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from polyshard.api import clip_grad_norm_, close, no_sync, shard
from polyshard.checkpoint.contents import require_saveable
from polyshard.config import ShardConfig
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.inspect import outermost_model
from polyshard.state import StateForm, StateOptions, get_model_state_dict
from polyshard_trainers.config import (
    on_device,
    refuse_engines,
    refuse_other_ranks,
    with_ranks,
)
from polyshard_trainers.models import held_by, parameters_of, plain_optimizer, warn_unsaveable
from torch import nn

from . import _private, refusals
from .refusals import refuse_unreduced, sharded_in, uncompiled
from .saved_state import INDEX, Index, TrainingState, finish


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` with polyshard in the place of DDP; everything else is theirs.

    ``prepare`` shards each model in place and returns it, or what ``torch.compile`` made of it. Its optimizers are
    given to the same ``prepare``, or made after. Every rank makes the calls that involve a sharded model.
    """

    #: The optimizers of the ``prepare`` that runs.
    _beside: Sequence[torch.optim.Optimizer] = ()

    def __init__(self, *, shard: ShardConfig | None = None, mixed_precision: str | None = None, **theirs: Any) -> None:
        """Arguments are theirs, by keyword, but for:

        Args:
            shard: How ``prepare`` shards models; ``ShardConfig()`` where None. Its ``device`` is Accelerate's.
            mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``: what ``shard.precision`` computes in, where that is
                set; what it becomes, where it is not. No autocast is put around models.

        Raises:
            ConfigError: another engine is asked for, in the arguments, the environment or by an earlier Accelerator;
                ``mixed_precision`` and ``shard`` do not fit.
            UnsupportedError: fp8, or XLA.
            StateError: ``torch.distributed`` has ranks that Accelerate does not count.
        """
        self._config = ShardConfig() if shard is None else shard
        if not isinstance(self._config, ShardConfig):
            raise ConfigError(f"shard is a {type(shard).__name__}. Give a polyshard.ShardConfig, or None.")
        refusals.refuse_other_engines(theirs)
        refuse_engines(os.environ, "this Accelerator")
        refusals.refuse_handlers(theirs.get("kwargs_handlers") or [])
        super().__init__(mixed_precision=refusals.asked_for(mixed_precision, self._config, os.environ), **theirs)
        refusals.refuse_distributed_type(self.distributed_type.value, self.num_processes)
        # An earlier Accelerator of the process may have set it.
        self._config = refusals.served(self.mixed_precision, self._config)
        if self.mixed_precision == "fp16":
            _private.give_scaler(self)
        refuse_other_ranks(self._config, "Accelerate", self.num_processes)
        self._config = with_ranks(self._config)

    @property
    def shard_config(self) -> ShardConfig:
        """How ``prepare`` shards models, with what ``mixed_precision`` asked for."""
        return self._config

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order; returns them in that order.

        A model that ``polyshard.shard`` has sharded is taken as it is. What is wrong with any of ``args`` is found
        before a model is sharded, but for what only sharding finds.

        Raises:
            ShardingError: a model cannot be sharded, or is wrapped by something else; it is as it was. Those before it
                in ``args`` stay sharded, and may be given to ``prepare`` again.
            ConfigError: an optimizer holds a parameter of no prepared model, or has state that cannot be cut.
            StateError: a model was closed.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigError(
                f"device_placement has {len(device_placement)} elements for {len(args)} objects. Give one for each."
            )
        models = [each for each in args if isinstance(each, nn.Module)]
        refusals.refuse_models(models, self.process_index)
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        self._refuse_optimizers(optimizers, models)
        # Preparations that cannot fail half way are last.
        order = sorted(range(len(args)), key=lambda index: _preparation_rank(args[index]))
        places = None if device_placement is None else [device_placement[index] for index in order]
        self._beside = [plain_optimizer(each) for each in optimizers]
        try:
            with _private.forgotten_on_failure(self):
                prepared = super().prepare(*(args[index] for index in order), device_placement=places)
        finally:
            self._beside = []
        if len(args) == 1:
            return prepared
        found = dict(zip(order, prepared, strict=True))
        return tuple(found[index] for index in range(len(args)))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard ``model`` in place on this rank's device.

        With ``evaluation_mode`` it is left whole on every rank, as theirs does, so that ranks may call it apart.

        Raises ShardingError, StateError: as ``prepare``.
        """
        if evaluation_mode and sharded_in(model) is None:
            whole: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
            return whole
        refusals.refuse_models([model], self.process_index)
        if sharded_in(model) is None:
            places = self.device_placement if device_placement is None else device_placement
            placed = on_device(self._config, self.device, "Accelerate", self.process_index)
            own = set(model.parameters())
            beside = [each for each in self._beside if not own.isdisjoint(held_by(each))]
            shard(uncompiled(model), placed if places else self._config, optimizers=beside)
        with _private.without_autocast(self):
            prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap ``optimizer`` as theirs does. Every rank calls it.

        Of one whose state ``save_state`` would refuse it warns: whether that will be called is not known.

        Raises ConfigError: it holds a parameter of no prepared model; its state cannot be saved, where this Accelerator
        numbers its checkpoints (``automatic_checkpoint_naming``), and so is to save.
        """
        self._refuse_optimizers([optimizer], [])
        self._foresee_save(plain_optimizer(optimizer))
        return super().prepare_optimizer(optimizer, device_placement)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss's scale, of all prepared optimizers where none is given.

        Theirs asks for ``mixed_precision``, which a ``Trainer`` is made without.
        """
        if self.scaler is None:
            return
        given = _private.optimizers_of(self) if optimizer is None else optimizer
        for each in given if isinstance(given, list | tuple) else [given]:
            self.scaler.unscale_(plain_optimizer(each))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backwards of ``model`` inside keep their gradients on this rank: ``polyshard.no_sync``."""
        module = sharded_in(model)
        with super().no_sync(model) if module is None else no_sync(module):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Backwards inside reduce gradients, also inside ``no_sync``."""
        module = sharded_in(model)
        theirs = accelerate.Accelerator.trigger_sync_in_backward
        call = "trigger_sync_in_backward()"
        with theirs(model) if module is None else outermost_model(module, call).synchronising(True):
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Does nothing: ranks have equally many batches, or cannot be served.

        Raises UnsupportedError: ``even_batches`` is False, here or by the configuration of loaders.
        """
        even = self.even_batches if even_batches is None else even_batches
        if self.num_processes > 1 and not even:
            raise UnsupportedError(
                f"join_uneven_inputs() with even_batches=False lets ranks stop at different batches (rank "
                f"{self.process_index}), but every rank must run a sharded model equally often. Leave even_batches at "
                "True, and take what the last batches have twice out of metrics by gather_for_metrics()."
            )
        yield

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip by the norm over all ranks; returns the norm before, the same on every rank.

        Raises StateError: gradients wait for the last backward of an accumulation.
        """
        given = self._unscaled(parameters, "clip_grad_norm_()")
        wanted = set(given)
        for model in self._sharded()[0]:
            flat = set(parameters_of(model)).difference(model.parameters())
            trained = {each for each in model.parameters() if each.requires_grad}
            if wanted <= flat | set(model.parameters()) and (wanted >= trained or (flat and wanted >= flat)):
                # Gradients may be in host memory, of which torch's own functions make no norm over devices.
                return clip_grad_norm_(model, max_norm, norm_type)
        return _private.clip_by_mesh(self, given, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each element of the gradients.

        Raises StateError: gradients wait for the last backward of an accumulation.
        """
        torch.nn.utils.clip_grad_value_(self._unscaled(parameters, "clip_grad_value_()"), clip_value)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> Any:
        """Write everything to ``output_dir``, which all ranks see; returns the folder.

        Sharded models and the optimizers over them go through ``polyshard.checkpoint`` and load at any number of ranks;
        the rest is theirs. A folder that is saved into again holds the new state alone.

        Raises:
            StateError: inside a step.
            ConfigError: an optimizer's state cannot be saved.
            RankMismatchError: another rank failed.
        """
        models, optimizers = self._sharded()
        if not models:
            return super().save_state(output_dir, safe_serialization)
        state = TrainingState(models, [plain_optimizer(each) for each in optimizers])
        written: list[tuple[Path, Index]] = []

        def save_sharded(folder: str) -> None:
            written.append((Path(folder), state.save(Path(folder), self.step, speaks=self.is_main_process)))

        with self._without(models, optimizers, save_sharded):
            location = super().save_state(output_dir, safe_serialization)
        # Behind the files of all ranks.
        self.wait_for_everyone()
        if self.is_main_process:
            for folder, index in written:
                finish(folder, index)
        self.wait_for_everyone()
        return location

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Read what ``save_state`` wrote, with the same models and optimizers prepared, in the same order.

        The number of ranks may be another one, but for random states, which a rank without a file keeps.

        Raises:
            StateError: the folder is not complete, was not written by this class, or this is inside a step.
            ConfigError: it is of other models or optimizers.
            RankMismatchError: another rank failed.
        """
        models, optimizers = self._sharded()
        state = TrainingState(models, [plain_optimizer(each) for each in optimizers])
        steps: list[int] = []

        def load_sharded(folder: str) -> None:
            # One that holds sharded models is not to be passed over where none is prepared.
            if models or (Path(folder) / INDEX).exists():
                steps.append(state.load(Path(folder)))

        with self._without(models, optimizers, load_sharded):
            super().load_state(input_dir, load_kwargs)
        if steps:
            # Theirs leaves it as it was on ranks that have no file of their own.
            self.step = steps[-1]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a sharded ``model``, in host memory, on the main process; empty on the others.

        Every rank calls it. Units are gathered one after the other.

        Raises StateError: inside a step.
        """
        module = sharded_in(model)
        if module is None:
            state: dict[str, Any] = super().get_state_dict(model, unwrap)
            return state
        return get_model_state_dict(module, StateOptions(form=StateForm.FULL_ON_RANK_0))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write ``model`` whole, as ``safetensors`` files; every rank calls it, and may read them afterwards.

        Raises StateError: inside a step.
        """
        # Theirs writes what get_state_dict returns on the main process.
        super().save_model(model, save_directory, max_shard_size, safe_serialization)
        if sharded_in(model) is not None:
            self.wait_for_everyone()

    def free_memory(self, *objects: Any) -> Any:
        """Close the sharded models, and forget what was prepared; every rank calls it.

        Raises StateError: inside a step.
        """
        self._close_models()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Close the sharded models, trackers and the process group; every rank calls it."""
        self._close_models()
        super().end_training()

    def _foresee_save(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise, or warn, where ``save_state`` would refuse the state of ``optimizer``. Every rank calls it."""
        for model, held in TrainingState(self._sharded()[0], [optimizer]).parts():
            if held and self.project_configuration.automatic_checkpoint_naming:
                require_saveable(model, optimizer, "Choose another one, or leave out automatic_checkpoint_naming.")
            elif held:
                warn_unsaveable(model, optimizer, "save_state()", self.process_index)

    def _refuse_optimizers(self, optimizers: Sequence[Any], models: Sequence[nn.Module]) -> None:
        known = [*_private.models_of(self), *(model for model in models if model not in _private.models_of(self))]
        refusals.refuse_optimizers([plain_optimizer(each) for each in optimizers], known, self.process_index)

    def _sharded(self) -> tuple[list[nn.Module], list[Any]]:
        """The prepared models that are sharded, and the optimizers that have parameters of them."""
        models = [found for model in _private.models_of(self) if (found := sharded_in(model)) is not None]
        own = {parameter for model in models for parameter in parameters_of(model)}
        return models, [each for each in _private.optimizers_of(self) if not own.isdisjoint(held_by(each))]

    def _unscaled(self, parameters: Any, call: str) -> list[torch.Tensor]:
        """``parameters``, a tensor or several, once gradients of the optimizers that hold them are unscaled.

        Theirs does so to all optimizers, also to those whose backward has not run.

        Raises StateError, naming ``call``: gradients wait for their reduction.
        """
        given: list[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.sync_gradients:
            refuse_unreduced(given, call)
        if self.scaler is None:
            return given
        wanted = set(given)
        # Gradients of a model's parameters may be those of its flat ones.
        for model in _private.models_of(self):
            own = set(parameters_of(model))
            if own & wanted:
                wanted |= own
        self.unscale_gradients([each for each in _private.optimizers_of(self) if not wanted.isdisjoint(held_by(each))])
        return given

    def _without(self, models: list[nn.Module], optimizers: list[Any], instead: Any) -> Any:
        others = [model for model in _private.models_of(self) if sharded_in(model) not in models]
        rest = [each for each in _private.optimizers_of(self) if not any(each is other for other in optimizers)]
        return _private.saves_only(self, others, rest, instead)

    def _close_models(self) -> None:
        for model in self._sharded()[0]:
            close(model)


def _preparation_rank(obj: object) -> int:
    kinds = (torch.utils.data.DataLoader, nn.Module, torch.optim.Optimizer)
    return next((index for index, kind in enumerate(kinds) if isinstance(obj, kind)), len(kinds))
