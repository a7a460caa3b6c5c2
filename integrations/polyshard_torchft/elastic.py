"""Steps of several jobs together: who takes part, whether a step counts, and what a job that comes back takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from polyshard.errors import ConfigError, StateError
from polyshard.inspect import ShardedModel, idle_model
from polyshard.interfaces import Collectives, CollectivesDecorator
from torch import nn

from .collectives import Torchft
from .link import Link
from .state import LocalState, Stateful


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun, the same on all ranks of a job."""

    number: int
    """Of the steps that count, from 1."""
    batch: int
    """Of all batches that jobs train on, from 0: this job's. A void step's are given out again."""
    rank: int
    """Which of the jobs this is, from 0: the first may save."""
    size: int
    """Jobs that take part, of which the gradient is the mean."""
    _commit: Callable[[], bool] = field(repr=False, compare=False)

    def commits(self) -> bool:
        """Whether the optimizer may step; asked once, behind the last backward, on every rank of the job.

        False voids the step for the job: parameters, optimizer and counts stay, and gradients are dropped.

        Raises:
            StateError: it was asked before; or jobs averaged different numbers of gradients.
            CollectiveTimeoutError: a rank of this job did not ask.
        """
        return self._commit()


class Elastic:
    """Trains ``model`` together with other jobs, as many as there are.

    Every rank of a job makes it, with the model's optimizers, and trains inside of ``step`` alone. A job that begins
    behind others, or missed a step that they count, takes over their state at the next ``step``: rank k from rank k of
    another job, in memory.

    Args:
        model: the outermost module, sharded with collectives ``torchft``.
        optimizers: one or several; made after ``shard``.
        state: what else a job that comes back takes over, by name: a scheduler, a data loader, ``AveragedWeights``.
            Each has ``state_dict`` and ``load_state_dict``. Random states travel by themselves.

    Raises:
        ConfigError: the model has other collectives.
        StateError: ``model`` is not the outermost sharded module, or has an ``Elastic``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        state: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._model = model
        self._optimizers = (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)
        self._sharded = idle_model(model, "Elastic()")
        self._link = _link_of(self._sharded)
        self._state = LocalState(model, self._optimizers, state or {})
        self._counts = False
        self._size = 0
        for each in self._optimizers:
            each.register_step_pre_hook(self._require_commit)
        self._link.open(self._take, self._give)

    @property
    def steps(self) -> int:
        """Steps that counted."""
        return self._link.progress[0]

    @property
    def batches(self) -> int:
        """Batches of all jobs in these."""
        return self._link.progress[1]

    def state_dict(self) -> dict[str, int]:
        """How far the jobs are: for ``extra`` of ``polyshard.checkpoint.save``."""
        steps, batches = self._link.progress
        return {"steps": steps, "batches": batches, "lineage": self._link.lineage}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a checkpoint, before the first step.

        Of jobs that load different ones, all take over from one that has the most steps.
        """
        self._link.go_on(state_dict["steps"], state_dict["batches"], state_dict["lineage"])

    @contextmanager
    def step(self) -> Iterator[Step]:
        """A step: find out who is there; inside, forward, backward and ``Step.commits``. Every rank enters it.

        Gradients are None behind it.

        Raises:
            StateError: ``commits`` was not asked; ranks of this job are behind different steps: start it again.
            CollectiveTimeoutError: enough jobs, or the lighthouse, did not come for ``ShardConfig.timeout_s``.
            ConfigError: another job trains another model.
        """
        # Nothing more, as in each step: what was changed by hand is taken over where a state is sent or arrives.
        self._sharded.refuse_inside_step("Elastic.step()")
        link = self._link
        quorum = link.begin()
        before, self._size = self._size, quorum.size

        def commit() -> bool:
            if not link.open_step:
                raise StateError(f"Step.commits() of step {quorum.steps + 1} was asked twice. Ask once.")
            self._counts = link.commit()
            if not self._counts:
                self._drop_gradients()
            return self._counts

        batch = quorum.batches + quorum.rank
        try:
            if before != quorum.size:
                self._sharded.notify_replicas(self._model, before, quorum.size)
            yield Step(quorum.steps + 1, batch, quorum.rank, quorum.size, commit)
            if link.open_step:
                raise StateError(
                    f"Elastic.step() ended without Step.commits() in step {quorum.steps + 1}. Ask it behind backward, "
                    "and let the optimizer step where it is true."
                )
        except BaseException:
            if self._counts:
                link.give_up()
            raise
        finally:
            self._counts = False
            link.leave()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for each in self._optimizers:
            each.zero_grad()

    def _require_commit(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._counts:
            raise StateError(
                f"{type(optimizer).__name__}.step() was called for a step of several jobs that does not count, or is "
                "not known to. Call it inside of Elastic.step(), where Step.commits() is true."
            )

    def _take(self) -> dict[str, Any]:
        return {**self._state.take(), "lineage": self._link.lineage}

    def _give(self, state: dict[str, Any]) -> None:
        self._state.give(state)
        self._link.lineage = state["lineage"]


def _link_of(sharded: ShardedModel) -> Link:
    found: Collectives = sharded.collectives
    while not isinstance(found, Torchft):
        if not isinstance(found, CollectivesDecorator):
            raise ConfigError(
                f"Elastic() was given a model over {type(sharded.collectives).__name__} (rank {sharded.rank}). Shard "
                'it with collectives={"name": "torchft", "lighthouse": "http://host:29510"}.'
            )
        found = found.inner
    return found.link
