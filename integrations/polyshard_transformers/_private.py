"""Private names of Transformers, and nothing else: the mixin knows what they are for.

Written against transformers 5.23.0. ``Trainer`` has no public place for an engine, but these
methods are those that its own engines go through; a version that lacks one is refused (``refuse_other_trainers``):

- ``_build_accelerator_args``: what the ``Accelerator`` is made with;
- ``_move_model_to_device``, ``_prepare_for_training``, ``_wrap_model``: where a model is placed and wrapped;
- ``_save``, ``_save_optimizer_and_scheduler``: what a checkpoint's folder gets;
- ``_load_from_checkpoint``, ``_load_optimizer_and_scheduler``, ``_load_best_model``: the reads of it;
- ``PreTrainedModel._init_weights``: how a module's own parameters begin;
- ``_precompute_ref_logps`` of TRL 1.16.0's ``DPOTrainer`` and ``KTOTrainer``: computes with the model while the trainer
  is made. A version without it is none that does so.
"""

from __future__ import annotations

from collections.abc import Callable

import transformers
from polyshard.errors import UnsupportedError
from torch import nn

#: Of ``Trainer``, overridden by the mixin.
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
)


def refuse_other_trainers(trainer: object, mixin: type) -> None:
    """Raise ``UnsupportedError`` where the version is too old, or the class behind ``mixin`` has not all of the
    methods: its own would wrap the model unseen.
    """
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        raise UnsupportedError(
            f"transformers {transformers.__version__} saves a model on one rank alone, and the others would wait: "
            f"{type(trainer).__name__} needs 5.23 or newer."
        )
    order = type(trainer).__mro__
    behind = order[order.index(mixin) + 1 :]
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
