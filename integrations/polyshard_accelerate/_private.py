"""Names of Accelerate that it does not promise, read and set here alone. Seen in 1.15.0.

``Accelerator._models`` and ``_optimizers`` are what it saves and loads; there is no other way to leave some of them out
of that. ``_save_model_state_pre_hook`` and ``_load_model_state_pre_hook`` are the ordered dicts of its hooks, where
ours must be first. ``_dataloaders`` and ``_schedulers`` are set back where ``prepare`` fails. ``native_amp`` says
whether ``prepare_model`` and ``autocast`` put autocast around compute; ``scaler_handler`` has the scaler's settings.
``_clip_grad_norm_dtensor_aware`` clips by the norm of gradients over several meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from polyshard import GradScaler
from torch import nn
from torch.distributed.tensor import DTensor

_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders")


def models_of(accelerator: Any) -> list[nn.Module]:
    """The prepared models, in that order; not wrapped by ``torch.compile``."""
    return list(accelerator._models)


def optimizers_of(accelerator: Any) -> list[Any]:
    """The prepared optimizers, as ``AcceleratedOptimizer``, in that order."""
    return list(accelerator._optimizers)


def give_scaler(accelerator: Any) -> None:
    """Let fp16 have a gradient scaler over every mesh, on every device. Theirs computes in fp32 on a CPU instead."""
    handler = accelerator.scaler_handler
    options = {} if handler is None else handler.to_kwargs()
    accelerator.scaler = GradScaler(accelerator.device.type, **options)
    accelerator.native_amp = True


def clip_by_mesh(accelerator: Any, parameters: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Theirs, for some of a model's parameters or those of several, without unscaling; the norm as a plain tensor."""
    norm: torch.Tensor = accelerator._clip_grad_norm_dtensor_aware(parameters, max_norm, norm_type=norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@contextmanager
def forgotten_on_failure(accelerator: Any) -> Iterator[None]:
    """Forget all that was prepared inside, where that raises."""
    before = {name: list(getattr(accelerator, name)) for name in _LISTS}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(accelerator, name, value)
        raise


@contextmanager
def without_autocast(accelerator: Any) -> Iterator[None]:
    """``prepare_model`` inside leaves the forward as it is."""
    before, accelerator.native_amp = accelerator.native_amp, False
    try:
        yield
    finally:
        accelerator.native_amp = before


@contextmanager
def saves_only(
    accelerator: Any, models: list[nn.Module], optimizers: list[Any], instead: Callable[[str], None]
) -> Iterator[None]:
    """``save_state`` and ``load_state`` inside serve ``models`` and ``optimizers`` alone.

    ``instead`` is called with the folder, before any hook of the user's, which see everything.
    """
    whole = accelerator._models, accelerator._optimizers

    def hook(*arguments: Any) -> None:
        accelerator._models, accelerator._optimizers = whole
        # Saving hooks get models, weights and the folder, loading hooks models and the folder.
        instead(arguments[-1])

    handles = []
    for register, hooks in (
        (accelerator.register_save_state_pre_hook, accelerator._save_model_state_pre_hook),
        (accelerator.register_load_state_pre_hook, accelerator._load_model_state_pre_hook),
    ):
        handles.append(register(hook))
        hooks.move_to_end(handles[-1].id, last=False)
    accelerator._models, accelerator._optimizers = models, optimizers
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = whole
        for handle in handles:
            handle.remove()
