"""The strategy for ``lightning.Trainer``, and the callback that ends ``fit`` with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from polyshard.api import no_sync, register_forward_method
from polyshard.checkpoint import load
from polyshard.checkpoint.contents import require_saveable
from polyshard.checkpoint.encoding import Encoder
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.preemption import Preemption, random_states, restore_random_states
from polyshard_trainers.models import plain_optimizer, refuse_strangers
from torch import nn

from . import checkpoints
from .common import Strategy, init_context, is_sharded, refuse_module, with_precision

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_PRECISIONS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
#: The entry of a checkpoint beside Lightning's own.
_OWN = "polyshard"


class _InFolder(dict[str, Any]):
    """Stands in a checkpoint for state that is not in it, but in the files that each rank writes and reads."""


class PolyshardStrategy(Strategy, DDPStrategy):  # type: ignore[misc]
    """Shards the ``LightningModule`` as ``polyshard.shard`` does: ``Trainer(strategy=PolyshardStrategy(config))``.

    The module stays sharded after ``fit``, for the next call of this Trainer or of another one with an equal strategy.
    ``polyshard.close(module)`` releases it.
    """

    default_state_dict_type = "full"
    #: Lightning gives each rank its part of the data.
    is_distributed = True
    #: Each rank takes its part, which it knows once the module is sharded.
    restore_checkpoint_after_setup = True

    @property
    def precision_plugin(self) -> Any:
        return Precision() if self._precision_plugin is None else self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            self._precise = with_precision(self._config, plugin, _PRECISIONS)
        self._precision_plugin = plugin

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, then let it make its optimizers.

        Raises ConfigError, UnsupportedError, PolyshardError: as ``polyshard.shard``, before anything changes; an
        optimizer holds other parameters; a callback copies the model, or would fail to save it.
        """
        module = self.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        _refuse_copies(trainer.callbacks)
        refuse_module(module, self.global_rank)
        self.accelerator.setup(trainer)
        if not is_sharded(module):
            if fits and self._layer_sync is not None:
                module = self._layer_sync.apply(module)
            module = self.precision_plugin.convert_module(module)
        self.model = self._setup_model(module)
        self.barrier()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits and not trainer.fast_dev_run:
            self._require_saveable(trainer.callbacks)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        manual = isinstance(model, LightningModule) and not model.automatic_optimization
        new = not is_sharded(model)
        self.shard(model, calls_children=manual)
        for name in _STEPS if new else ():
            # Its optimizers step inside, where a forward around them would go on with parameters from before.
            if not (manual and name == "training_step") and callable(getattr(model, name, None)):
                register_forward_method(model, name)
        return model

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the module's optimizers and schedulers.

        Raises ConfigError: one holds a parameter that is not the module's.
        """
        DDPStrategy.setup_optimizers(self, trainer)
        for optimizer in self.optimizers:
            refuse_strangers(
                optimizer,
                [self.lightning_module],
                self.global_rank,
                "Make the optimizer in configure_optimizers, from the module's parameters.",
            )

    def _require_saveable(self, callbacks: list[Callback]) -> None:
        saving = [each for each in callbacks if isinstance(each, (Checkpoint, PreemptionCallback))]
        if not saving:
            return
        whole = [each for each in saving if not getattr(each, "save_weights_only", False)]
        require_saveable(
            self.lightning_module,
            self.optimizers if whole and self.optimizers else None,
            "Checkpoints without optimizers are written by ModelCheckpoint(save_weights_only=True), none by "
            "Trainer(enable_checkpointing=False).",
            writes=self._saves_folders,
            also=self._require_values,
        )

    def _require_values(self) -> None:
        """Refuse what Lightning would add to a directory, and it could not hold."""
        if not self._saves_folders:
            return
        module = self.lightning_module
        Encoder().encode(dict(module.hparams), "extra['hyper_parameters']")
        for callback in module.trainer.callbacks:
            Encoder().encode(callback.state_dict(), f"extra['callbacks'][{callback.state_key!r}]")

    def model_to_device(self) -> None:
        """Sharding does."""

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Where tensors of ``configure_model`` are made: in host memory, or on the meta device for ``empty_init``."""
        return init_context(self.precision_plugin.tensor_init_context(), empty_init)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients on this rank, for the next one outside."""
        with no_sync(self.lightning_module):
            yield

    def teardown(self) -> None:
        """End what belongs to one call of the Trainer. The module stays sharded, and can be used and saved."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's whole parameters and buffers on rank 0, nothing on others; what a file has."""
        module = self.lightning_module
        if not is_sharded(module):
            state: dict[str, Any] = module.state_dict()
            return state
        if self._saves_folders:
            return _InFolder()
        return checkpoints.whole_model_state(module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of the unsharded model's optimizer on rank 0, nothing on others."""
        if self._saves_folders:
            return _InFolder()
        return checkpoints.whole_optimizer_state(self.lightning_module, plain_optimizer(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a file, or a directory where ``state_dict_type`` says so; it replaces an earlier one.

        Raises:
            UnsupportedError: a directory is to be written with ``storage_options``, or a hook changed its tensors.
            ConfigError: a file is to be written where there is a directory of something else.
            PolyshardError, OSError: writing failed.
        """
        path = self.broadcast(filepath)
        saves_optimizers = "optimizer_states" in checkpoint
        if saves_optimizers:
            checkpoint[_OWN] = {"random_states": random_states(self.lightning_module)}
        if not self._saves_folders:
            self.make_room(path)
            DDPStrategy.save_checkpoint(self, checkpoint, path, storage_options)
            return
        state = checkpoint.pop("state_dict")
        optimizer_states = checkpoint.pop("optimizer_states", [])
        if not isinstance(state, _InFolder) or state or any(optimizer_states):
            raise UnsupportedError(
                "on_save_checkpoint changed state_dict or optimizer_states of a sharded checkpoint, whose tensors are "
                "not in there. Set state_dict_type='full' to change them."
            )
        step, optimizers = checkpoint.get("global_step", 0), self.optimizers if saves_optimizers else ()
        self.save_folder(path, step, self.lightning_module, optimizers, checkpoint, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The saved checkpoint; tensors of a directory go into module and optimizers at once.

        Raises:
            ConfigError: there is neither a file nor such a directory, or it is of another model.
            StateError: the directory is damaged.
        """
        path = self.broadcast(checkpoint_path)
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if checkpoints.is_folder(path):
            loads_optimizers = fits and checkpoints.has_optimizers(path)
            optimizers = self.optimizers if loads_optimizers else ()
            extra = load(Path(path), self.lightning_module, list(optimizers) or None)
            checkpoint = {**extra, "state_dict": _InFolder()}
            if loads_optimizers:
                checkpoint["optimizer_states"] = _InFolder()
        else:
            checkpoints.require_file(path)
            checkpoint = dict(DDPStrategy.load_checkpoint(self, path, weights_only))
        own = checkpoint.pop(_OWN, None)
        if own is not None and fits:
            # Those of other ranks cannot be shared out.
            with suppress(ConfigError):
                restore_random_states(self.lightning_module, own["random_states"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Let each rank take its part of a file's whole tensors. Raises ConfigError: they are another model's."""
        state = checkpoint["state_dict"]
        if not isinstance(state, _InFolder):
            checkpoints.load_whole_model_state(self.lightning_module, state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """As ``load_model_state_dict``, of optimizers. Raises ConfigError: they are other optimizers."""
        states = checkpoint["optimizer_states"]
        if isinstance(states, _InFolder):
            return
        if len(states) != len(self.optimizers):
            raise ConfigError(
                f"The checkpoint has {len(states)} optimizers, and configure_optimizers made {len(self.optimizers)} "
                f"(rank {self.global_rank}). Make them as they were when it was saved."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            checkpoints.load_whole_optimizer_state(self.lightning_module, optimizer, state)


def _refuse_copies(callbacks: list[Callback]) -> None:
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise UnsupportedError(
                f"{type(callback).__name__} averages a second, whole model beside the one that is trained, whose "
                "parameters are sharded. Leave it out, and update polyshard.optim.AveragedWeights in a callback of "
                "your own."
            )


class PreemptionCallback(Callback):  # type: ignore[misc]
    """Lets a signal that one rank got alone end ``fit`` on all ranks, behind the same step, with a checkpoint::

        trainer = Trainer(strategy=PolyshardStrategy(config), callbacks=[PreemptionCallback("checkpoints")])
        trainer.fit(module, data, ckpt_path=PreemptionCallback.newest("checkpoints"))

    ``fit`` writes ``preempted-step=<step>.ckpt`` and raises ``SystemExit(75)``: the process ends with that code where
    nobody catches it. Validation runs before only where the step is the last of an epoch. From its first batch, of
    training or of the validation ahead of it, to the end of ``fit`` this callback takes the signals in place of
    Lightning, which broadcasts inside of its handler: where one rank alone was signalled, it would wait there for the
    others. A second signal goes to who took them before ``fit``, and so ends the process where nobody did.
    """

    exit_code: ClassVar[int] = Preemption.exit_code
    """Of a program that was ended so and can be resumed."""

    def __init__(
        self, folder: str | Path, signals: Iterable[signal.Signals] = (signal.SIGTERM,), *, every: int = 1
    ) -> None:
        """As ``polyshard.Preemption``.

        Args:
            folder: Where the checkpoint is written; made where missing, and seen by all ranks.
            signals: What asks for an end.
            every: Ranks exchange their requests at every so many steps of optimizers, 1 or more.
        """
        self._folder = Path(folder)
        self._signals = tuple(signals)
        self._every = every
        self._running: Preemption | None = None
        self._step = 0
        # Of each signal, before Lightning has taken it.
        self._former: dict[signal.Signals, Any] = {}

    @staticmethod
    def newest(folder: str | Path) -> str | None:
        """The ``ckpt_path`` for ``fit``: the checkpoint of the latest step in ``folder``; None without one."""
        found = sorted(Path(folder).glob("preempted-step=*.ckpt"))
        return str(found[-1]) if found else None

    def request(self) -> None:
        """Ask for an end without a signal, while ``fit`` trains. One rank is enough."""
        if self._running is not None:
            self._running.request()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Look who takes the signals: Lightning does next."""
        if stage == "fit":
            self._former = {each: signal.getsignal(each) for each in self._signals}

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals; a request is followed behind the first step."""
        self._enter(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step
        self._enter(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a checkpoint and raise, where a rank was asked to end.

        Raises SystemExit: on every rank, with ``exit_code``.
        """
        # A loader that goes on behind its last batch has none for the next epoch: Lightning would leave that one out.
        if not trainer.is_last_batch:
            self._end_if_requested(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As ``on_train_batch_end``, behind the last batch of an epoch.

        Raises SystemExit: on every rank, with ``exit_code``.
        """
        self._end_if_requested(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back who took the signals before."""
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(exception)

    def _enter(self, module: LightningModule) -> None:
        if self._running is not None:
            return
        preemption = Preemption(module, self._signals, every=self._every)
        if threading.current_thread() is threading.main_thread():
            # Else a second signal would go to Lightning. At the end of fit it puts back all that it found.
            for number, former in self._former.items():
                if former is not None:
                    signal.signal(number, former)
        self._running = preemption.__enter__()

    def _end_if_requested(self, trainer: Trainer) -> None:
        # Between batches whose gradients are accumulated there is nothing that a checkpoint could go on from.
        if self._running is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if self._running.requested():
            trainer.save_checkpoint(self._folder / f"preempted-step={self._step:08d}.ckpt")
            raise SystemExit(self.exit_code)

    def _leave(self, error: BaseException | None) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.__exit__(None if error is None else type(error), error, None)
