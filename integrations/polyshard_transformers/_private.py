"""Private names of Transformers and Accelerate, and nothing else: the mixin knows what they are for.

Written against transformers 5.23.0 and accelerate 1.15.0. ``Trainer`` has no public place for an engine, but these
methods are those that its own engines go through; a version that lacks one is refused (``refuse_other_trainers``):

- ``_build_accelerator_args``: what the ``Accelerator`` is made with;
- ``_move_model_to_device``, ``_prepare_for_training``, ``_wrap_model``: where a model is placed and wrapped;
- ``_save``, ``_save_optimizer_and_scheduler``: what a checkpoint's folder gets;
- ``_load_from_checkpoint``, ``_load_optimizer_and_scheduler``, ``_load_best_model``: the reads of it;
- ``PreTrainedModel._init_weights``: how a module's own parameters begin;
- ``Accelerator._optimizers``: the optimizers that it prepared;
- ``_precompute_ref_logps`` of TRL 1.16.0's ``DPOTrainer`` and ``KTOTrainer``: computes with the model while the trainer
  is made. A version without it is none that does so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import Accelerator
from polyshard.errors import UnsupportedError
from polyshard_trainers.models import plain_optimizer
from torch import nn

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object


#: Of ``Trainer``, overridden here and in the mixin.
OVERRIDDEN = (
    "_build_accelerator_args",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_move_model_to_device",
    "_prepare_for_training",
    "_save",
    "_save_optimizer_and_scheduler",
    "_wrap_model",
    "create_accelerator_and_postprocess",
    "floating_point_ops",
)


class TrainerHooks(_Trainer):  # type: ignore[misc]
    """Leads each of ``Trainer``'s private methods to one of ``PolyshardMixin``. To stand before ``Trainer``."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        made_with: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        # Units compute in their precision's dtype: autocast would cast again.
        return {**made_with, "mixed_precision": "no"}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        # Sharding moves unit by unit: no device needs to hold the whole model.
        pass

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        # Before the optimizer is made: fused ones ask on which device parameters are.
        self.ensure_sharded(training=True)
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.require_saveable()
        return prepared

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        self.ensure_sharded(training=False)
        sharded: nn.Module = self.model
        return sharded

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # Nothing has moved the model to its device yet.
        self.ensure_sharded(training=False)
        return super()._precompute_ref_logps(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # Called on all ranks.
        if state_dict is not None or not self.save_whole(Path(output_dir or self.args.output_dir)):
            super()._save(output_dir, state_dict=state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.save_training(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # Model and optimizer are read together, once there is an optimizer.
        self.require_checkpoint(Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.load_training(Path(checkpoint))

    def _load_best_model(self) -> None:
        if self.state.best_model_checkpoint is not None:
            self.load_best(Path(self.state.best_model_checkpoint))


def refuse_other_trainers(trainer: TrainerHooks) -> None:
    """Raise ``UnsupportedError`` where the version is too old, or the class behind ``TrainerHooks`` has not all of the
    methods: its own would wrap the model unseen.
    """
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        raise UnsupportedError(
            f"transformers {transformers.__version__} saves a model on one rank alone, and the others would wait: "
            f"{type(trainer).__name__} needs 5.23 or newer."
        )
    order = type(trainer).__mro__
    behind = order[order.index(TrainerHooks) + 1 :]
    missing = [name for name in OVERRIDDEN if not any(name in vars(each) for each in behind)]
    if missing:
        raise UnsupportedError(
            f"{type(trainer).__name__} has no {', '.join(missing)} of its own to override (transformers "
            f"{transformers.__version__}). PolyshardMixin stands before a Trainer of transformers 5.23: "
            "class Mine(PolyshardMixin, Trainer)."
        )


def init_weights_of(module: nn.Module) -> Callable[[nn.Module], None] | None:
    """The initializer of a model of Transformers for modules inside of it; None where ``module`` is no such model."""
    initialize = getattr(module, "_init_weights", None)
    return initialize if callable(initialize) else None


def prepared_optimizers(accelerator: Accelerator) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that ``accelerator`` wrapped, without its wrappers."""
    return [plain_optimizer(each) for each in accelerator._optimizers]
