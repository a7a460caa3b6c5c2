"""What gradients call: where they reach a stage's outputs, and where its inputs have theirs.

[Note: one stage's backward]
``come_back`` is called before the first of the stage's nodes runs. It lets the root begin its backward and do what the
forward's itinerary says comes before, and the stage gather. ``inputs_done`` is called once everything on the way to the
stage's inputs has its gradient: the root does what is left behind it, and the stage finishes. A stage without an input
that needs a gradient is finished by the root, when the backward comes to the stage before it, or ends.

Forwards inside a backward, which activation checkpointing runs again, are on the itinerary of the forward where
``torch.utils.checkpoint`` called them first (``checkpointed.py``). Those of another function are on none: no forward
that other ranks know of called them. What tells that all of their gradients have come is that the inputs of each have
theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch

from ...errors import StateError
from .itinerary import Itinerary, Mark
from .root import root_of
from .stage import Holds, Stage


class Recomputation:
    """A forward inside a backward; alive as long as its graph, which holds what is called behind it."""


def output_hook(stage: Stage) -> Callable[..., None]:
    """What a gradient calls that reaches an output of the forward of ``stage`` that runs."""
    if root_of(stage).unsharded:
        return partial(_refuse, stage)
    if stage.holds is Holds.GIVEN_BACK:
        assert stage.host is not None
        return output_hook(stage.host)
    if not stage.full_precision_in_eval:
        return partial(come_back, stage, stage.itinerary, stage.finishes_at)
    return partial(_come_back_as, stage, stage.governing.training, stage.itinerary, stage.finishes_at)


def input_hook(stage: Stage) -> Callable[[], None]:
    """What is called when the inputs of the forward of ``stage`` that begins have their gradients."""
    if stage.itinerary is not None:
        return partial(inputs_done, stage, stage.itinerary, stage.finishes_at)
    call = Recomputation()
    stage.recomputations.add(call)
    return partial(_recomputation_done, stage, call)


def come_back(stage: Stage, itinerary: Itinerary[Stage] | None, finish: Mark[Stage], *_: Any) -> None:
    """A gradient reached an output of the forward that was on ``itinerary``; None for a recomputation's.

    ``finish``: where the stage is finished on it.
    """
    if torch.is_grad_enabled():
        raise StateError(
            f"polyshard does not support gradients of gradients: backward(create_graph=True) reached "
            f"'{stage.label}' on rank {stage.rank}. Differentiate twice outside of sharded modules."
        )
    root = root_of(stage)
    root.enter_backward()
    if itinerary is None:
        # On no way that other ranks would know of: they must recompute, too.
        stage.owes = True
    elif finish is not stage.entry:
        # Gathered where the checkpoint entered it again, on all ranks alike.
        stage.pre_backward(prefetches=False)
        return
    elif not root.arrive(itinerary, stage.exit):
        # Passed by already, on the way to a stage inside of it whose output is its own: what comes next is on its way.
        stage.pre_backward(prefetches=False)
        return
    stage.pre_backward()


def inputs_done(stage: Stage, itinerary: Itinerary[Stage], finish: Mark[Stage]) -> None:
    """The gradients of the inputs of its first forward on ``itinerary`` are there, and so are all others."""
    if not stage.in_backward:
        stage.refuse_back_door()
    if root_of(stage).arrive(itinerary, finish) or stage.in_backward:
        stage.finish()


def _recomputation_done(stage: Stage, call: Recomputation) -> None:
    if not stage.in_backward:
        stage.refuse_back_door()
    stage.recomputations.discard(call)
    if not stage.recomputations:
        stage.finish()


def _come_back_as(
    stage: Stage, training: bool, itinerary: Itinerary[Stage] | None, finish: Mark[Stage], *_: Any
) -> None:
    # Autograd saved views of the buffer that this forward computed with; the mode may have changed since.
    if stage.in_backward and training is not stage.trained_in_forward:
        raise StateError(
            f"One backward reached '{stage.label}' through a forward in training mode and one in eval "
            f"mode, which compute in different dtypes (rank {stage.rank}). Run a backward for each."
        )
    stage.trained_in_forward = training
    for unit in stage.units:
        unit.choose_buffer(training)
    come_back(stage, itinerary, finish)


def _refuse(stage: Stage, *_: Any) -> NoReturn:
    raise StateError(
        f"A backward reached an output of '{stage.label}' whose forward ran inside unsharded() on rank "
        f"{stage.rank}: its gradients would be whole and this rank's alone. Run that forward outside of "
        "unsharded(), or inside torch.no_grad()."
    )
