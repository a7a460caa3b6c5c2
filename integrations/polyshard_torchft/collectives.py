"""``torchft``: collectives of one job whose gradients are averaged over other jobs as well, as many as are there."""

from __future__ import annotations

import copy
import importlib.util
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
from polyshard.errors import ConfigError, StateError
from polyshard.interfaces import (
    Collectives,
    CollectivesCapabilities,
    CollectivesDecorator,
    Group,
    PluginContext,
    ReduceOp,
    Work,
)
from typing_extensions import override

from .link import Link, LinkSettings


class Torchft(CollectivesDecorator):
    """The ranks of one job, by ``inner``; behind them other jobs that train the same model: its replicas.

    Each job is started by itself, with as many ranks as the others. Rank k of a job speaks to rank k of the others,
    over torchft. Gradients can be reduced inside of ``Elastic.step`` alone, which finds out who is there.

    Args:
        context: makes the inner collectives; its ``timeout`` limits the wait for enough jobs.
        lighthouse: address of torchft's server that knows the jobs, ``"http://host:29510"``; None for that of the
            variable ``TORCHFT_LIGHTHOUSE``.
        min_replicas: with fewer jobs no step counts.
        timeout_s: seconds that a job waits in a step for others, from 1 on; who comes later is left out.
        inner: collectives between the ranks of this job: a name, or a table of a name and options.

    Raises:
        ConfigError: torchft is not installed, or an option has a value that it cannot take.
    """

    api_version: ClassVar[int] = 1

    def __init__(
        self,
        context: PluginContext,
        *,
        lighthouse: str | None = None,
        min_replicas: int = 1,
        timeout_s: float = 30.0,
        inner: Any = "auto",
    ) -> None:
        where = f"of collectives {context.name!r}"
        if importlib.util.find_spec("torchft") is None:
            raise ConfigError(f"collectives {context.name!r} need torchft: pip install 'polyshard[torchft]'.")
        if lighthouse is None:
            lighthouse = os.environ.get("TORCHFT_LIGHTHOUSE", "")
        if not isinstance(lighthouse, str) or "://" not in lighthouse:
            raise ConfigError(f"lighthouse {where} is {lighthouse!r}. Give an address such as 'http://host0:29510'.")
        if isinstance(min_replicas, bool) or not isinstance(min_replicas, int) or min_replicas < 1:
            raise ConfigError(f"min_replicas {where} is {min_replicas!r}. Give a number of jobs, 1 or more.")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 1 <= timeout_s <= 86400:
            raise ConfigError(f"timeout_s {where} is {timeout_s!r}. Give seconds, from 1 to a day.")
        super().__init__(context.construct(Group.COLLECTIVES, inner))
        settings = LinkSettings(lighthouse, min_replicas, timedelta(seconds=timeout_s), context.timeout)
        self.link = Link(settings, self.inner)
        """This rank's connection to the other jobs."""
        self._replicas = OtherJobs(self.link, self.inner)

    @property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        return replace(self.inner.capabilities, capturable=False)

    @property
    @override
    def replicas(self) -> Collectives:
        return self._replicas

    @property
    @override
    def reason(self) -> str:
        own = self.inner.reason
        return f"{self.link.described}; {own}" if own else self.link.described

    @override
    def around(self, inner: Collectives) -> Collectives:
        part = copy.copy(self)
        part.inner = inner
        return part

    @override
    def close(self) -> None:
        # A part of the ranks is closed before them, and has the same link.
        if self.inner is self._replicas.inner:
            self.link.close()
        self.inner.close()


class OtherJobs(CollectivesDecorator):
    """Rank k of all jobs that are there, as a group of one to which means alone are of use."""

    api_version: ClassVar[int] = 1
    rank = 0
    world_size = 1

    def __init__(self, link: Link, inner: Collectives) -> None:
        super().__init__(inner)
        self._link = link

    @property
    @override
    def capabilities(self) -> CollectivesCapabilities:
        return replace(self.inner.capabilities, capturable=False, reduce_ops=frozenset({ReduceOp.MEAN}))

    @override
    def all_reduce(self, tensor: torch.Tensor, *, op: ReduceOp) -> Work:
        return self._link.average(tensor) if op is ReduceOp.MEAN else self._refuse()

    @override
    def announce(self, what: str) -> None:
        return None

    @override
    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    @override
    def barrier(self) -> None:
        return None

    @override
    def close(self) -> None:
        return None

    def _refuse(self, *operands: Any, **options: Any) -> Any:
        raise StateError(
            f"Something else than a mean was asked of other jobs (rank {self.inner.rank}): who is there changes, so "
            "that a mean is all that can be. Ask the ranks of this job."
        )

    around = all_gather = reduce_scatter = broadcast = all_to_all = partition = _refuse
