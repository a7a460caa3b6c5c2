"""Trains an unsharded copy beside the sharded model, on the same batches, and measures how far they part."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import polyshard
import torch
from data import Batches, Corpus
from model import build_model
from progress import Progress
from ranks import Ranks
from settings import Settings, plugin_name
from training import backward, global_batch, make_optimizer, set_rate, update

#: Some parameter must move at least so far: equal models that stand still prove nothing.
LEAST_MOVEMENT = 1e-2


@dataclass(frozen=True)
class Bounds:
    """What may part the two models at most; None where it is only shown."""

    loss: float | None = None
    """Absolute difference in loss, nats a byte."""
    relative_loss: float | None = None
    """Difference in loss as a part of the loss."""
    parameters: float | None = None
    """Absolute difference of a parameter's element."""


def bounds_for(settings: Settings) -> Bounds:
    """What the dtypes in ``settings`` allow."""
    precision = plugin_name(settings.shard.precision)
    if precision == "none" and settings.run.dtype == "fp64":
        return Bounds(parameters=1e-10)
    if precision in ("none", "fp32"):
        return Bounds(loss=1e-5)
    return Bounds(relative_loss=0.02)


@dataclass(frozen=True)
class Comparison:
    """How two models trained side by side."""

    steps: int
    loss: float
    """Largest difference in loss at any step."""
    relative_loss: float
    """The same, as a part of the unsharded loss."""
    parameters: float
    """Largest difference of any parameter's element after the last step."""
    movement: float
    """How far the element that moved most has moved in the unsharded model."""

    def failures(self, bounds: Bounds) -> list[str]:
        """What lies outside ``bounds``, or moved too little; not a number counts as outside."""
        found = []
        for name in ("loss", "relative_loss", "parameters"):
            bound, value = getattr(bounds, name), getattr(self, name)
            if bound is not None and not value <= bound:
                found.append(f"{name} differs by {value:.3g}, more than {bound:g}")
        if not self.movement >= LEAST_MOVEMENT:
            found.append(f"no parameter moved by {LEAST_MOVEMENT:g}: the most is {self.movement:.3g}")
        return found


def compare(settings: Settings, ranks: Ranks, corpus: Corpus) -> Comparison:
    """Train both for ``settings.run.steps`` steps. Every rank calls it, and learns the largest difference of all."""
    run, device = settings.run, ranks.device
    alone = Ranks(0, 1, device, communicates=False)
    batches = Batches(corpus.train, run.context, global_batch(run, ranks), run.seed)
    whole = build_model(run).to(device)
    start = [parameter.detach().clone() for parameter in whole.parameters()]
    sharded = polyshard.shard(copy.deepcopy(whole), dataclasses.replace(settings.shard, device=device))
    whole_optimizer, sharded_optimizer = make_optimizer(whole, run), make_optimizer(sharded, run)
    expected: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    for step in range(run.steps):
        for optimizer in (whole_optimizer, sharded_optimizer):
            set_rate(optimizer, step, run)
        expected.append(backward(whole, batches, step, alone))
        torch.nn.utils.clip_grad_norm_(whole.parameters(), run.clip)
        update(whole_optimizer)
        found.append(backward(sharded, batches, step, ranks))
        polyshard.clip_grad_norm_(sharded, run.clip)
        update(sharded_optimizer)
    pairs = list(zip(alone.average(expected), ranks.average(found), strict=True))
    with polyshard.unsharded(sharded):
        apart = _apart(whole.parameters(), sharded.parameters())
    measured = (
        _largest(abs(a - b) for a, b in pairs),
        _largest(abs(a - b) / abs(a) for a, b in pairs),
        apart,
        _apart(whole.parameters(), start),
    )
    return Comparison(run.steps, *ranks.largest(measured))


def _apart(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> float:
    return _largest(float((a.detach() - b.detach()).abs().max()) for a, b in zip(one, other, strict=True))


def _largest(values: Iterable[float]) -> float:
    # max() would pass over what is not a number, which here is the worst of all.
    return max(math.inf if math.isnan(value) else value for value in values)


def verify(settings: Settings, ranks: Ranks, corpus: Corpus, progress: Progress) -> bool:
    """Compare, say on the first rank what was measured against which bound, and whether all of it held."""
    bounds = bounds_for(settings)
    comparison = compare(settings, ranks, corpus)
    progress.note(
        f"sharded against unsharded: {comparison.steps} AdamW steps on {ranks.world_size} rank(s), "
        f"{settings.run.dtype} parameters, precision {plugin_name(settings.shard.precision)}, "
        f"{settings.shard.strategy.value}, offload {plugin_name(settings.shard.offload)}"
    )
    progress.note(f"  largest difference in loss        {comparison.loss:.3e}{_against(bounds.loss)}")
    progress.note(f"  the same, as a part of the loss   {comparison.relative_loss:.3e}{_against(bounds.relative_loss)}")
    progress.note(f"  largest difference in parameters  {comparison.parameters:.3e}{_against(bounds.parameters)}")
    progress.note(f"  largest movement of a parameter   {comparison.movement:.3e}   (at least {LEAST_MOVEMENT:g})")
    failures = comparison.failures(bounds)
    for failure in failures:
        progress.note(f"FAIL: {failure}")
    if not failures:
        progress.note("PASS")
    return not failures


def _against(bound: float | None) -> str:
    return "" if bound is None else f"   (at most {bound:g})"
