"""Exceptions of a training program that other ranks should hear of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .state.resting import resting_root


@contextmanager
def tell_failures(model: nn.Module) -> Iterator[None]:
    """Let other ranks know of an exception that leaves the block: around the whole loop of training, say.

    Ranks that wait for this one then raise ``PeerFailedError`` with its words and traceback instead of an error that
    says only that it did not come. An exception in the model's forward or backward is told without this; one of a data
    loader, of an optimizer or of a save is not. ``KeyboardInterrupt`` and ``SystemExit`` are not told, and over NCCL no
    rank raises: the words are in the report that ``docs/reliability.md`` describes.

    Args:
        model: The outermost sharded module. No rank waits for another here, and each may enter it by itself.

    Raises:
        StateError: inside of a step, or ``model`` is not the outermost sharded module.
    """
    recorder = resting_root(model, "tell_failures()").recorder
    try:
        yield
    except Exception as error:
        recorder.tell(error)
        raise
