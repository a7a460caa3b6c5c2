"""``Trainer`` over a sharded model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy

from ..api import close, placement, shard
from ..checkpoint.saveable import require_saveable
from ..config import ShardConfig
from ..trainers.device import on_device
from ..trainers.engines import refuse_engines
from ..trainers.ranks import keeps_whole, refuse_other_ranks, with_ranks
from ..trainers.sharded import is_sharded
from ._private import TrainerHooks, plain_optimizer, refuse_other_trainers
from .accelerator import ShardedAccelerator
from .checkpoints import SCHEDULER, load_state, require_state, save_state
from .export import export, require_exportable
from .generation import register_generate
from .initialization import initializer_of
from .precision import with_precision
from .preemption import PreemptionCallback
from .refusals import (
    refuse_arguments,
    refuse_dropped_layers,
    refuse_model,
    refuse_optimizer,
    refuse_other_precision,
    refuse_whole_optimizers,
)


class PolyshardMixin(TrainerHooks):
    """Lets a ``Trainer`` behind it shard its model: ``class Mine(PolyshardMixin, SFTTrainer)``.

    Before it trains or evaluates for the first time, the model is sharded in place, unit by unit, onto this rank's
    device. ``trainer.model`` is the model that was given. Each ``train()`` asks a ``model_init`` for a new one, and
    closes the one before.
    """

    def __init__(self, *args: Any, shard: ShardConfig | None = None, save_frozen: bool = True, **kwargs: Any) -> None:
        """``shard``: how; ``ShardConfig(policy="transformers")`` where None. Not for a model that is sharded already,
        which is taken as it is. Its precision follows ``TrainingArguments``: ``bf16=True`` takes the plugin ``bf16``,
        ``fp16=True`` the plugin ``fp16`` with a gradient scaler. ``save_frozen``: whether the sharded state in
        checkpoints has parameters that need no gradient; without, a run resumes with those of the model that the
        trainer is given, and whether they are the same is not looked at. All else goes to the ``Trainer`` behind this
        class, whichever it is.

        Raises:
            ConfigError: another engine is asked for or has wrapped the model, precision differs between the two
                configurations, an optimizer was made over other parameters, or a setting needs whole parameters.
            UnsupportedError: an optimizer that computes with whole parameters, or another ``Trainer`` than is known.
            AlreadyShardedError: the model is sharded, and ``shard`` is given.
        """
        refuse_other_trainers(self)
        self.shard_config = shard
        self._save_frozen = save_frozen
        self._prepared: nn.Module | None = None
        self._whole_numel = 0
        super().__init__(*args, **kwargs)
        refuse_model(self.model, shard, self.args.process_index)
        if is_sharded(self.model):
            refuse_other_precision(self.model, self.args.mixed_precision)
        refuse_optimizer(self.optimizer, self.model, self.args.process_index, whole=self._keeps_whole())
        if not self._keeps_whole():
            refuse_whole_optimizers(self.args.optim)

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        refuse_engines(os.environ, "PolyshardTrainer")
        if self.shard_config is not None:
            with_precision(self.shard_config, self.args.mixed_precision)
            refuse_other_ranks(self.shard_config, "Trainer", self.args.world_size)
            on_device(self.shard_config, self.args.device, "Trainer", self.args.process_index)
        super().create_accelerator_and_postprocess()
        ShardedAccelerator.adopt(self.accelerator, scales_loss=self.args.mixed_precision == "fp16")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``, whose callbacks are not told where training fails."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, PreemptionCallback):
                    callback.leave(error)
            raise

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As ``Trainer``: six for each number of the main input and parameter, embeddings aside, of the whole model."""
        name = getattr(self.model, "main_input_name", "input_ids")
        # Trainers that generate what they learn from pass lists of samples, which have none.
        if name not in inputs:
            return 0
        main: torch.Tensor = inputs[name]
        return 6 * main.numel() * self._whole_numel

    def end(self) -> None:
        """As ``Trainer``, which ends the process group; the model, which holds it, is closed before."""
        if self._prepared is not None:
            close(self._prepared)
        super().end()

    def ensure_sharded(self, *, training: bool) -> None:
        """Shard ``self.model``, unless it was prepared already. ``training``: whether that comes next."""
        model = self.model
        if training:
            refuse_dropped_layers(model)
        if model is self._prepared:
            return
        if self._prepared is not None:
            # A model_init made another one.
            close(self._prepared)
            self._prepared = None
        if not is_sharded(model):
            refuse_model(model, self.shard_config, self.args.process_index)
            with self._seeded_alike(model):
                shard(model, self._config(), initializer=initializer_of(model))
        if hasattr(model, "generate") and "generate" not in model.__dict__:
            register_generate(model)
        self._whole_numel = _numel_without_embeddings(model)
        self._prepared = model

    @contextmanager
    def _seeded_alike(self, model: nn.Module) -> Iterator[None]:
        """Random numbers of the run's seed, where parameters have no values yet: each rank makes whole units."""
        if not any(parameter.is_meta for parameter in model.parameters()):
            yield
            return
        device = self.args.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.args.seed)
            yield

    def _keeps_whole(self) -> bool:
        """Whether each rank holds whole parameters."""
        return keeps_whole(self.shard_config or ShardConfig(), self.args.world_size)

    def _config(self) -> ShardConfig:
        config = self.shard_config or ShardConfig(policy="transformers")
        config = with_precision(config, self.args.mixed_precision)
        return with_ranks(on_device(config, self.args.device, "Trainer", self.args.process_index))

    def require_saveable(self) -> None:
        """Raise where the first checkpoint would fail.

        Raises:
            ConfigError, UnsupportedError, RankMismatchError: as ``polyshard.checkpoint.save`` and
                ``polyshard.huggingface.save``, before a step.
        """
        preempted = any(isinstance(each, PreemptionCallback) for each in self.callback_handler.callbacks)
        if self.args.save_strategy == SaveStrategy.NO and not preempted:
            return
        require_saveable(
            self.model,
            None if self.args.save_only_model else plain_optimizer(self.optimizer),
            "Checkpoints without optimizer are written with TrainingArguments(save_only_model=True), none with "
            "save_strategy='no'.",
            frozen=self._save_frozen,
            writes=not self.args.save_only_model,
            also=lambda: require_exportable(self.model, one_folder=not self.args.save_on_each_node),
        )

    def save_whole(self, folder: Path) -> bool:
        """Write the model for ``from_pretrained``, tokenizer and arguments; False where it is not sharded."""
        if not is_sharded(self.model):
            return False
        export(self.model, folder, writes=self.args.should_save, one_folder=not self.args.save_on_each_node)
        if self.args.should_save:
            beside = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if beside is not None:
                beside.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)
        return True

    def save_training(self, folder: Path) -> None:
        """Write model, optimizer and schedule into a checkpoint's folder."""
        optimizer = plain_optimizer(self.optimizer)
        save_state(
            folder,
            self.state.global_step,
            self.model,
            optimizer,
            coordinates=self.is_world_process_zero(),
            frozen=self._save_frozen,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def require_checkpoint(self, folder: Path) -> None:
        """Raise ``ConfigError`` if ``folder`` has nothing to resume from."""
        require_state(folder)

    def load_training(self, folder: Path) -> None:
        """Read model, optimizer and schedule from a checkpoint's folder."""
        load_state(folder, self.model, plain_optimizer(self.optimizer), frozen=self._save_frozen)
        # Plain numbers: nothing in it needs code to be read.
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def load_best(self, folder: Path) -> None:
        """Read the model alone."""
        load_state(folder, self.model, frozen=self._save_frozen)


def _numel_without_embeddings(model: nn.Module) -> int:
    """Elements of all whole parameters but those of embeddings."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(math.prod(placement(each).shape) for each in model.parameters() if each not in embeddings)


class PolyshardTrainer(PolyshardMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` over a sharded model: ``PolyshardTrainer(model=..., args=..., shard=ShardConfig())``."""


class PolyshardSeq2SeqTrainer(PolyshardMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` over a sharded model."""
