"""An ``Accelerator`` that leaves the model to polyshard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..api import clip_grad_norm_, no_sync
from ..trainers.sharded import is_sharded
from ._private import prepared_optimizers


class ShardedAccelerator(Accelerator):  # type: ignore[misc]
    """Prepares data and optimizers as ever; of models it knows one, which is sharded.

    Never made: ``Trainer`` makes an ``Accelerator``, which then becomes one of these (``adopt``).
    """

    #: The model; None until it is prepared.
    sharded: nn.Module | None = None

    @classmethod
    def adopt(cls, accelerator: Accelerator, *, scales_loss: bool) -> None:
        """Let ``accelerator`` be one of these. ``scales_loss``: gradients may underflow, so the loss is scaled."""
        accelerator.__class__ = cls
        if scales_loss:
            accelerator.scaler = torch.amp.GradScaler(accelerator.device.type)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """``model`` itself: neither wrapped for data parallelism, nor moved, nor under autocast.

        One that is not sharded, such as a reference that a trainer compares with, is theirs to place.
        """
        if not is_sharded(model):
            placed: nn.Module = super().prepare_model(model, *args, **kwargs)
            return placed
        self.sharded = model
        return model

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """As ``polyshard.no_sync``."""
        with no_sync(model):
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Scale ``loss`` where that is asked for, in fp32: a scaled fp16 number would be infinite."""
        super().backward(loss if self.scaler is None else loss.float(), **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss's scale, of all optimizers that were prepared where none is given."""
        if self.scaler is None:
            return
        for each in prepared_optimizers(self) if optimizer is None else [optimizer]:
            self.scaler.unscale_(each)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """The norm over all ranks, which is what ``torch.nn.utils.clip_grad_norm_`` computes of sharded parameters."""
        self.unscale_gradients()
        given = list(parameters)
        if self.sharded is not None and _same(given, self.sharded.parameters()):
            return clip_grad_norm_(self.sharded, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)


def _same(given: Iterable[nn.Parameter], own: Iterable[nn.Parameter]) -> bool:
    return all(each is other for each, other in zip_longest(given, own))
