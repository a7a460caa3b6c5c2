"""``Trainer`` over a sharded model, its ``Accelerator``, and the callback that ends training with a checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import accelerate
import torch
import transformers
from polyshard import GradScaler
from polyshard.api import close, shard, unsharded
from polyshard.checkpoint import load, save
from polyshard.checkpoint.contents import require_saveable
from polyshard.config import ShardConfig
from polyshard.preemption import Preemption
from polyshard_accelerate import Accelerator
from polyshard_huggingface import saving
from polyshard_trainers.config import (
    keeps_whole,
    on_device,
    refuse_engines,
    refuse_other_ranks,
    with_ranks,
)
from polyshard_trainers.models import is_sharded, plain_optimizer
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import SaveStrategy
from typing_extensions import override

from . import refusals
from ._private import refuse_other_trainers
from .checkpoints import SCHEDULER, STATE, require_state, write_whole
from .models import initializer_of, register_generate

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


class PolyshardMixin(_Trainer):  # type: ignore[misc]
    """Lets a ``Trainer`` behind it shard its model: ``class Mine(PolyshardMixin, SFTTrainer)``.

    Before it trains or evaluates for the first time, the model is sharded in place, unit by unit, onto this rank's
    device. A ``ref_model`` of TRL's is sharded alike. ``trainer.model`` is the model that was given. Each ``train()``
    asks a ``model_init`` for a new one, and closes the one before.
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
        refuse_other_trainers(self, PolyshardMixin)
        for each in (*args, *kwargs.values()):
            if isinstance(each, transformers.TrainingArguments):
                # Trainers may wrap the model before they come to this class.
                refusals.refuse_arguments(each)
        self.shard_config = shard
        self._save_frozen = save_frozen
        self._prepared: nn.Module | None = None
        super().__init__(*args, **kwargs)
        if self.model is not self._prepared:
            refusals.refuse_model(self.model, shard, self.args.process_index)
        if is_sharded(self.model):
            refusals.refuse_other_precision(self.model, self.args.mixed_precision)
        refusals.refuse_optimizer(self.optimizer, self.model, self.args.process_index, whole=self._keeps_whole())
        if not self._keeps_whole():
            refusals.refuse_whole_optimizers(self.args.optim)

    def create_accelerator_and_postprocess(self) -> None:
        refusals.refuse_arguments(self.args)
        refuse_engines(os.environ, "PolyshardTrainer")
        config = refusals.with_precision(
            self.shard_config or ShardConfig(policy="transformers"), self.args.mixed_precision
        )
        refuse_other_ranks(config, "Trainer", self.args.world_size)
        config = with_ranks(on_device(config, self.args.device, "Trainer", self.args.process_index))
        super().create_accelerator_and_postprocess()
        scales_loss = self.args.mixed_precision == "fp16"
        TrainerAccelerator.adopt(self.accelerator, config, scales_loss=scales_loss, before=self._shard_reference)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``, and a callback puts signals back where training fails."""
        try:
            return super().train(*args, **kwargs)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, PreemptionCallback):
                    callback.leave(error)
            raise

    def end(self) -> None:
        """As ``Trainer``, which ends the process group; the model, which holds it, is closed before."""
        for model in (self._prepared, getattr(self, "ref_model", None)):
            if model is not None and is_sharded(model):
                close(model)
        super().end()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        made_with: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        # Units compute in their precision's dtype: autocast would cast again.
        return {**made_with, "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # Sharding moves unit by unit: no device needs to hold the whole model.
        pass

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # Before the optimizer is made: fused ones ask on which device parameters are.
        self._ensure_sharded(training=True)
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._require_saveable()
        return prepared

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self._ensure_sharded(training=False)
        sharded: nn.Module = self.model
        return sharded

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``. With an ``evaluator``, which Sentence Transformers run on other numbers of batches a rank,
        the model is whole on each rank meanwhile.
        """
        if getattr(self, "evaluator", None) is None:
            return super().evaluation_loop(*args, **kwargs)
        self._ensure_sharded(training=False)
        with unsharded(self.model):
            return super().evaluation_loop(*args, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # Nothing has moved the model to its device yet.
        self._ensure_sharded(training=False)
        return super()._precompute_ref_logps(*args, **kwargs)

    def _ensure_sharded(self, *, training: bool) -> None:
        """Shard ``self.model``, unless it was prepared already. ``training``: whether that is next."""
        model = self.model
        if training:
            refusals.refuse_dropped_layers(model)
        if model is self._prepared:
            return
        if self._prepared is not None:
            # A model_init made another one.
            close(self._prepared)
            self._prepared = None
        if not is_sharded(model):
            refusals.refuse_model(model, self.shard_config, self.args.process_index)
            with self._seeded_alike(model):
                made_before = [] if self.optimizer is None else [plain_optimizer(self.optimizer)]
                shard(
                    model,
                    self.accelerator.shard_config,
                    initializer=initializer_of(model),
                    optimizers=made_before,
                )
        if hasattr(model, "generate") and "generate" not in model.__dict__:
            register_generate(model)
        self._prepared = model

    def _shard_reference(self, model: nn.Module) -> None:
        """Shard ``model`` as the one that is trained, where it is the ``ref_model`` of a trainer of TRL's."""
        if model is not getattr(self, "ref_model", None):
            return
        if not is_sharded(model):
            refusals.refuse_model(model, None, self.args.process_index)
            shard(model, self.accelerator.shard_config)

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
        return keeps_whole(self.shard_config or ShardConfig(), self.args.world_size)

    def _require_saveable(self) -> None:
        """Raise where the first checkpoint would fail.

        Raises ConfigError, UnsupportedError, RankMismatchError: as ``polyshard.checkpoint.save`` and
        ``polyshard_huggingface.save``, before a step.
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
            also=lambda: saving.require_saveable(self.model) if self._writes_parts() else None,
        )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Called on all ranks: a model for ``from_pretrained``, tokenizer and arguments.
        if state_dict is not None or not is_sharded(self.model):
            super()._save(output_dir, state_dict=state_dict)
            return
        folder, writes = Path(output_dir or self.args.output_dir), self.args.should_save
        if not self._writes_parts():
            write = partial(super()._save, str(folder)) if writes else None
            write_whole(self.model, folder, write, one_folder=not self.args.save_on_each_node)
            return
        saving.save(self.model, folder)
        if writes:
            beside = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if beside is not None:
                beside.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _writes_parts(self) -> bool:
        """Whether each rank writes what it holds of the model. Else the ``Trainer`` behind does, of a whole one: the
        files of an adapter, of a module, on each node, and those that only that ``Trainer`` knows.
        """
        known = super()._save.__func__ is transformers.Trainer._save
        return known and isinstance(self.model, transformers.PreTrainedModel) and not self.args.save_on_each_node

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        if self.is_world_process_zero():
            # Left by an earlier run at the same step: ``Trainer`` writes over its other files, too. No rank writes
            # before this one has reached the save.
            shutil.rmtree(folder / STATE, ignore_errors=True)
        optimizer = plain_optimizer(self.optimizer)
        save(folder / STATE, self.state.global_step, self.model, optimizer, frozen=self._save_frozen)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Model and optimizer are read together, once there is an optimizer.
        require_state(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder, optimizer = Path(checkpoint), plain_optimizer(self.optimizer)
            load(require_state(folder), self.model, optimizer, frozen=self._save_frozen)
            # Plain numbers: nothing in it needs code to be read.
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None:
            load(require_state(Path(best)), self.model, frozen=self._save_frozen)


class PolyshardTrainer(PolyshardMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` over a sharded model: ``PolyshardTrainer(model=..., args=..., shard=ShardConfig())``."""


class PolyshardSeq2SeqTrainer(PolyshardMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` over a sharded model."""


class PreemptionCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Lets a signal that one rank got alone end training on all ranks, behind the same step, with a checkpoint::

        preemption = PreemptionCallback()
        trainer = PolyshardTrainer(..., callbacks=[preemption])
        trainer.train()
        if preemption.preempted:
            sys.exit(preemption.exit_code)

    The checkpoint is the trainer's own, ``checkpoint-<step>`` in ``args.output_dir``, whatever ``save_strategy`` is:
    ``train(resume_from_checkpoint=True)`` goes on from it. Signals are taken from the first step of training to the end
    of ``train``, as ``polyshard.Preemption`` takes them.

    An evaluation that is due behind the same step runs before: the run that goes on has its result, and does not repeat
    it. None runs because of the end, and no best model is loaded.
    """

    exit_code: ClassVar[int] = Preemption.exit_code
    """The exit code for a program that was ended so and can be resumed."""

    def __init__(self, signals: Iterable[signal.Signals] = (signal.SIGTERM,), *, every: int = 1) -> None:
        """As ``polyshard.Preemption``: the signals, and at every how many steps ranks exchange their requests.

        Raises ConfigError: ``every`` is below 1; when training begins.
        """
        self._signals = tuple(signals)
        self._every = every
        self._running: Preemption | None = None
        self._saved = -1
        self._best: str | None = None
        self.preempted = False
        """Whether the last ``train`` was ended so."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.preempted = False
        self._saved = -1
        self._best = None
        self._running = Preemption(model, self._signals, every=self._every).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask for a checkpoint and the end, where a rank was asked to end."""
        if self._running is not None and self._running.requested():
            self.preempted = True
            control.should_training_stop = True
            # Behind an epoch there may be an evaluation, whose random numbers and result belong into the checkpoint.
            control.should_save = not _ends_epoch(state)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask for a checkpoint where none was written; inside of an epoch, for nothing that belongs to its end."""
        if not self.preempted:
            return control
        if not _ends_epoch(state):
            control.should_evaluate = False
        elif control.should_evaluate and args.save_strategy == SaveStrategy.BEST:
            # The evaluation decides whether there is a checkpoint. Behind the next step one can be had.
            self.preempted = False
            control.should_training_stop = state.global_step >= state.max_steps
            return control
        # Once: a second one would be written over the first, and for a while there would be none.
        control.should_save = self._saved != state.global_step
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the checkpoint that the end is behind."""
        self._saved = state.global_step
        if self.preempted and state.best_model_checkpoint is not None:
            # At its end Trainer loads the best model, and with save_total_limit=1 removes all checkpoints but the best
            # one: right for a run that is over, and not for one that goes on from its last.
            self._best, state.best_model_checkpoint = state.best_model_checkpoint, None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back who took the signals before."""
        if self._best is not None:
            state.best_model_checkpoint = self._best
        self.leave(None)

    def request(self) -> None:
        """Ask for an end without a signal, between the begin and the end of ``train``. One rank is enough."""
        if self._running is not None:
            self._running.request()

    def leave(self, error: BaseException | None) -> None:
        """Put back who took the signals before. ``error``: what ended training, where it did not end by itself."""
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None if error is None else type(error), error, None)


def _ends_epoch(state: Any) -> bool:
    return float(state.epoch).is_integer()


class TrainerAccelerator(Accelerator):
    """``polyshard_accelerate.Accelerator`` of a ``Trainer``, which shards its models, and says what is saved.

    Never made: ``Trainer`` makes an ``accelerate.Accelerator``, which then becomes one of these (``adopt``).
    """

    _before: Callable[[nn.Module], None]

    @classmethod
    def adopt(
        cls,
        made: accelerate.Accelerator,
        shard: ShardConfig,
        *,
        scales_loss: bool,
        before: Callable[[nn.Module], None],
    ) -> None:
        """Let ``made`` be one of these.

        ``scales_loss``: gradients may underflow, so the loss is scaled. ``before``: called with each model that is to
        be prepared, and may shard it.
        """
        made.__class__ = cls
        made._config = shard
        made._before = before
        if scales_loss:
            made.scaler = GradScaler(made.device.type)

    @override
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As the base class. The ``Trainer`` may shard ``model`` first."""
        self._before(model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    @override
    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, and close nothing: ``train()`` begins with this, and ``end()`` closes the model."""
        return accelerate.Accelerator.free_memory(self, *objects)

    @override
    def _foresee_save(self, optimizer: torch.optim.Optimizer) -> None:
        # Trainer has its own checkpoints, and looks at them before the first step.
        pass
