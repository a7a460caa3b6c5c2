"""Collectives around others, which count the bytes that gathers bring and send everything as those do."""

from __future__ import annotations

import copy
from typing import Any

import torch
from polyshard.interfaces import Collectives, CollectivesDecorator, Group, PluginContext, Work


class Metered(CollectivesDecorator):
    """Passes everything on to ``inner``; ``received`` counts the bytes that this rank's gathers brought."""

    api_version = 1

    def __init__(self, context: PluginContext, inner: Any = "auto") -> None:
        super().__init__(context.construct(Group.COLLECTIVES, inner))
        self._received = [0]  # in a list, which the parts of the group share

    @property
    def received(self) -> int:
        return self._received[0]

    def around(self, inner: Collectives) -> Metered:
        part = copy.copy(self)
        part.inner = inner
        return part

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        self._received[0] += out.nbytes - shard.nbytes
        return super().all_gather(out, shard)
