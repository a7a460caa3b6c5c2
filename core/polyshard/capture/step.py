"""A whole training step as one CUDA graph."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from ..errors import CaptureError, ConfigError, ConfigTypeError, PolyshardError
from ..inspect import RecordedModel, ShardedModel, outermost_model
from ..nested import map_tensors
from .graph import Capturer, Recording
from .static import (
    OptimizerWatch,
    RateWatch,
    StaticInputs,
    make_capturable,
    optimizer_obstacle,
    rates_of,
    to_device,
)

__all__ = ["CaptureFallback", "CaptureMode", "CapturedStep"]
_LOGGER = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class CaptureMode(enum.Enum):
    """How a ``CapturedStep`` runs its calls.

    ===========  ===========  ==========================================================
    from         to           by
    ===========  ===========  ==========================================================
    WARMING_UP   CAPTURED     the first call after the warm-up
    WARMING_UP   EAGER        the same, where the step cannot be captured (fallback only)
    CAPTURED     WARMING_UP   a change that outdates the graph (fallback only)
    CAPTURED     EAGER        the same, where graphs did not last (fallback only)
    any          WARMING_UP   ``reset``
    ===========  ===========  ==========================================================
    """

    WARMING_UP = "warming_up"
    """Eagerly, on a side stream; the graph is still to come."""
    CAPTURED = "captured"
    """By replaying the graph."""
    EAGER = "eager"
    """Eagerly, for good; ``reason`` says why."""


class CaptureFallback(enum.Enum):
    """What to do where a step cannot be captured or replayed."""

    REFUSE = "refuse"
    """Raise ``CaptureError``."""
    EAGER = "eager"
    """Run it eagerly; ``reason`` says why."""


#: Calls in a row that a graph does not serve, behind which another one is recorded.
_MISSES = 10
#: Replays behind which a recording has paid. Of so many that did not, one behind the other, no further one is made.
_PAYS, _UNPAID = 10, 3


@dataclass(frozen=True)
class _Graph(Generic[T]):
    recording: Recording[T]
    inputs: StaticInputs
    model: RecordedModel
    optimizers: tuple[OptimizerWatch, ...]

    def obstacle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bool] | None:
        for optimizer in self.optimizers:
            changed = optimizer.changed()
            if changed is not None:
                return changed, True
        mismatch = self.inputs.mismatch(args, kwargs)
        if mismatch is not None:
            return f"{mismatch[0].upper()}{mismatch[1:]}. Call with what was captured, or call reset().", False
        return self.model.obstacle()


class CapturedStep(Generic[P, T]):
    """``train_step``, which after a warm-up runs as one CUDA graph: one launch instead of thousands.

    ``step = CapturedStep(model, optimizer, train_step)``, then ``loss = step(ids, targets)``. Every call trains on the
    inputs that it is given:

    - the first ``warmup`` calls run ``train_step`` eagerly, on a side stream. There are more of them while
      ``reshard_after_forward="auto"`` has not decided which units to keep;
    - the next call captures, which executes nothing, and replays once;
    - later calls copy their inputs into the static tensors that the graph reads, and replay;
    - a call that the graph does not serve, such as a smaller last batch, runs eagerly. Where ten in a row do so, or the
      model or an optimizer was changed, the step is captured anew. Where that does not last either, or the step
      cannot be captured, all calls run eagerly: ``reason`` and one line of the log say why.

    **Inputs.** Tensors, on the CPU (best pinned) or on the model's device, and tuples, lists, dicts and dataclasses of
    them; ``train_step`` always gets them on the device. Their structure, shapes and dtypes must stay those of the
    captured call, what was one tensor at several places must be one again, and other values (numbers, strings, None)
    must be equal to those.

    **Outputs.** Tensors are detached. Those of a replay are the same memory each time, overwritten by the next call:
    clone to keep. Other values are constants of the captured call.

    **What ``train_step`` may do.** Forward, backward, ``polyshard.clip_grad_norm_``, ``optimizer.step()`` and
    ``optimizer.zero_grad()``, several microbatches and ``no_sync`` inside; each call must drop the gradients of the one
    before. Nothing may wait for the device or read from it (``item()``, ``print`` of a tensor, ``if`` on one). Its
    Python, hooks included, runs in the warm-up and in the capture and not in a replay: a scheduler is stepped outside.

    **After a call** parameters, buffers and optimizer state are those of the finished step: evaluation,
    ``polyshard.unsharded``, checkpoints and eager training work as after an eager step. ``.grad`` is not defined.

    Every rank calls it alike. Drop it, or call ``reset``, before ``destroy_process_group``.

    Args:
        model: The outermost sharded module.
        optimizer: The optimizers that ``train_step`` steps: one, or several. PyTorch's get the option ``capturable``. A
            learning rate may change between calls; with AdamW and others that have this option, or ``fused``, a replay
            reads it in 32 bits, and others are captured anew.
        train_step: Does one step, and returns what the caller wants of it.
        warmup: Eager steps before the capture, at least 2: the first records the order of units, and the optimizer
            makes its state in it.
        fallback: Whether to run a step eagerly that cannot be captured or replayed, or to raise.

    Raises:
        CaptureError: the model cannot be captured, with ``fallback="refuse"``; before any collective. See ``reason``
            for the other fallback.
        StateError: ``model`` is not the outermost sharded module.
        ConfigError: ``warmup`` or ``fallback`` is no possible value.
        ConfigTypeError: ``optimizer`` is no optimizer, or ``train_step`` cannot be called.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        train_step: Callable[P, T],
        *,
        warmup: int = 3,
        fallback: CaptureFallback | str = CaptureFallback.EAGER,
    ) -> None:
        self._sharded: ShardedModel = outermost_model(model, "CapturedStep()")
        self._model = model
        self._optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        self._train_step = train_step
        self._warmup = warmup
        self._fallback = _fallback(fallback)
        self._check_arguments()
        self._device = self._sharded.collectives.device
        self._capturer = self._make_capturer()
        self._graph: _Graph[T] | None = None
        self._first_rates = [rates_of(each) for each in self._optimizers]
        # Rates that changed once are expected to go on changing.
        self._varies = False
        self.reset()

    @property
    def mode(self) -> CaptureMode:
        """How calls run now."""
        return self._mode

    @property
    def reason(self) -> str | None:
        """Why the last call ran eagerly, or all will; None in the warm-up and after a replay."""
        return self._reason

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Train on these inputs; returns what ``train_step`` returns, see the class.

        Raises:
            CaptureError: the step cannot be captured, or not replayed with these arguments; nothing was trained.
            StateError: inside a forward, a backward or ``polyshard.unsharded``.
        """
        self._sharded.refuse_inside_step("A CapturedStep")
        self._sharded.refuse_replaced_values("A CapturedStep")
        if self._mode is CaptureMode.EAGER or self._capturer is None:
            return self._run(*to_device(args, kwargs, self._device))
        if self._graph is None and (self._warm < self._warmup or self._sharded.warming_up):
            return self._warm_up(self._capturer, *to_device(args, kwargs, self._device))
        graph = self._replayable(self._capturer, args, kwargs)
        if graph is None:
            return self._run(*to_device(args, kwargs, self._device))
        self._replays += 1
        graph.inputs.load(args, kwargs)
        for optimizer in graph.optimizers:
            optimizer.load()
        # Of eager forwards: what they left gathered, where a replay may write, and what they issued and nobody used.
        if graph.model.released:
            self._sharded.wait_for_communication()
        else:
            self._sharded.release_buffers()
        outputs = graph.recording.replay()
        # The next gather may be that of a backward, which no forward orders after this.
        self._sharded.begin_gathers()
        return outputs

    def reset(self) -> None:
        """Drop the graph and its memory; the next calls warm up and capture anew.

        To be called on all ranks alike: where a graph is not wanted for a while, or ``fallback="refuse"`` asks for it.

        Raises:
            CaptureError: the model cannot be captured at all, with ``fallback="refuse"``.
        """
        self._begin()
        self._unpaid = 0
        # Whether ranks agree on whether the next step can be captured.
        self._together = True
        obstacle = self._sharded.capture_obstacle()
        if self._capturer is None:
            kind = self._device.type
            obstacle = f"The model computes on {kind}, and only CUDA devices record graphs. Move it to a CUDA device."
        if obstacle is not None:
            self._give_up(obstacle)

    def _begin(self) -> None:
        """Warm up from now on."""
        self._drop_graph()
        self._warm = self._replays = self._misses = 0
        self._mode = CaptureMode.WARMING_UP
        self._reason: str | None = None
        self._writes_rates = False

    def _make_capturer(self) -> Capturer | None:
        """None where the device records no graphs."""
        return Capturer(self._device, self._sharded.groups) if self._device.type == "cuda" else None

    def _check_arguments(self) -> None:
        rank = self._sharded.rank
        for each in self._optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                raise ConfigTypeError(
                    f"CapturedStep got a {type(each).__name__} as an optimizer (rank {rank}). Give a "
                    "torch.optim.Optimizer."
                )
        if not callable(self._train_step):
            raise ConfigTypeError(
                f"CapturedStep got a {type(self._train_step).__name__} as train_step (rank {rank}). Give a function "
                "that does one step."
            )
        if isinstance(self._warmup, bool) or not isinstance(self._warmup, int) or self._warmup < 2:
            raise ConfigError(
                f"CapturedStep got warmup={self._warmup!r} (rank {rank}): the order of units and the optimizer's state "
                "come from eager steps. Give an integer of at least 2."
            )

    def _warm_up(self, capturer: Capturer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        for optimizer in self._optimizers:
            make_capturable(optimizer, self._device)
        self._varies |= [rates_of(optimizer) for optimizer in self._optimizers] != self._first_rates
        with ExitStack() as inside:
            watches = [inside.enter_context(RateWatch(optimizer)) for optimizer in self._optimizers]
            outputs = capturer.warm_up(lambda: self._run(args, kwargs))
        self._writes_rates |= any(watch.written for watch in watches)
        self._warm += 1
        self._reason = None
        return outputs

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        outputs = self._train_step(*args, **kwargs)
        # What a caller keeps of a step must not keep its graph, whose nodes are bound to the stream that made them.
        return map_tensors(torch.Tensor.detach, outputs)

    def _replayable(self, capturer: Capturer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Graph[T] | None:
        """The graph, where it serves these arguments; None where they are to be run eagerly."""
        if self._graph is None:
            self._graph = self._capture(capturer, args, kwargs)
            return self._graph
        obstacle = self._graph.obstacle(args, kwargs)
        if obstacle is None:
            self._reason, self._misses = None, 0
            return self._graph
        reason, outdated = obstacle
        if self._fallback is CaptureFallback.REFUSE:
            self._give_up(reason)
        self._misses += 1
        self._reason = reason
        if outdated or self._misses == _MISSES:
            self._capture_anew(reason)
        return None

    def _capture_anew(self, reason: str) -> None:
        """Warm up again, for as long as recordings pay."""
        self._unpaid = self._unpaid + 1 if self._replays < _PAYS else 0
        if self._unpaid == _UNPAID:
            self._give_up(f"{_UNPAID} graphs served fewer than {_PAYS} steps each, the last one as follows. {reason}")
            return
        self._begin()
        self._reason = reason
        # A rank whose rate or inputs changed alone captures alone: what it sends in a step stays the same.
        self._together = False

    def _capture(self, capturer: Capturer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Graph[T] | None:
        obstacle = self._agreed(self._obstacle())
        if obstacle is not None:
            self._give_up(obstacle)
            return None
        before = self._sharded.prepare_recording()
        gradients = [(parameter, parameter.grad) for parameter in self._receivers()]
        self._varies |= [rates_of(each) for each in self._optimizers] != self._first_rates
        optimizers = tuple(OptimizerWatch(each, self._device, varies=self._varies) for each in self._optimizers)
        graph: _Graph[T] | None = None
        cause: Exception | None = None
        try:
            inputs = StaticInputs(args, kwargs, self._device)
            with ExitStack() as rates:
                for optimizer in optimizers:
                    rates.enter_context(optimizer.recording())
                recording = capturer.record(lambda: self._recorded(inputs))
            graph = _Graph(recording, inputs, before, optimizers)
            obstacle = _left_behind(gradients, optimizers)
        except Exception as error:
            cause, obstacle = error, _explained(error)
        except BaseException:
            self._undo(gradients, optimizers)
            raise
        obstacle = self._agreed(obstacle)
        if obstacle is None:
            self._mode = CaptureMode.CAPTURED
            return graph
        if graph is not None:
            graph.recording.close()
        self._undo(gradients, optimizers)
        try:
            self._give_up(obstacle, cause)
        finally:
            # The error knows this frame, and this frame the gradients: without a cycle they go at once.
            cause = None
        return None

    def _obstacle(self) -> str | None:
        """Why this rank cannot capture its next step, as far as it can be known before."""
        if self._writes_rates:
            return (
                "train_step sets learning rates, or steps a scheduler, which a replay would not: it runs no Python. Do "
                "so before or behind the call."
            )
        obstacles = (optimizer_obstacle(optimizer, self._device) for optimizer in self._optimizers)
        return next(filter(None, obstacles), None) or self._sharded.step_obstacle()

    def _recorded(self, inputs: StaticInputs) -> T:
        outputs = self._run(inputs.args, inputs.kwargs)
        self._sharded.release_buffers()
        return outputs

    def _undo(
        self, gradients: list[tuple[torch.Tensor, torch.Tensor | None]], optimizers: tuple[OptimizerWatch, ...]
    ) -> None:
        self._sharded.recover_from_recording()
        for optimizer in optimizers:
            optimizer.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def _receivers(self) -> list[torch.Tensor]:
        found: dict[torch.Tensor, None] = dict.fromkeys(self._model.parameters())
        for unit in self._sharded.units:
            found.update(dict.fromkeys(unit.receivers))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found.update(dict.fromkeys(group["params"]))
        return list(found)

    def _agreed(self, obstacle: str | None) -> str | None:
        """What keeps any rank from capturing, so that all raise, or run alike."""
        collectives = self._sharded.collectives
        meets = self._together and collectives.capabilities.can_communicate
        everyone = collectives.all_gather_object(obstacle) if meets else [obstacle]
        ranks: dict[str, list[int]] = {}
        for rank, other in enumerate(everyone):
            if other is not None:
                ranks.setdefault(other, []).append(rank)
        if not ranks:
            return None
        if list(ranks.values()) == [list(range(len(everyone)))]:
            return next(iter(ranks))
        return " ".join(f"On rank {', '.join(map(str, where))}: {text}" for text, where in ranks.items())

    def _give_up(self, reason: str, cause: Exception | None = None) -> None:
        if self._fallback is CaptureFallback.REFUSE:
            verb = "captured" if self._graph is None else "replayed"
            raise CaptureError(
                f"The step cannot be {verb} (rank {self._sharded.rank}). {reason} To run it eagerly where that "
                "happens, leave fallback='refuse' out."
            ) from cause
        self._drop_graph()
        self._mode = CaptureMode.EAGER
        self._reason = reason
        # What all ranks found alike is said once.
        if self._capturer is not None and (self._sharded.rank == 0 or not self._together):
            _LOGGER.warning("Steps run eagerly (rank %d): %s", self._sharded.rank, reason)

    def _drop_graph(self) -> None:
        if self._graph is not None:
            self._graph.recording.close()
            self._graph = None


def _fallback(given: CaptureFallback | str) -> CaptureFallback:
    try:
        return CaptureFallback(given)
    except ValueError:
        options = ", ".join(repr(each.value) for each in CaptureFallback)
        raise ConfigError(f"CapturedStep got fallback={given!r}. Give one of {options}.") from None


def _left_behind(
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]], optimizers: tuple[OptimizerWatch, ...]
) -> str | None:
    for parameter, before in gradients:
        if before is not None and parameter.grad is before:
            return (
                "train_step adds to the gradients of the call before, whose memory is not the graph's. Call "
                "optimizer.zero_grad(), with set_to_none as it is by default, in train_step."
            )
    for optimizer in optimizers:
        replaced = optimizer.replaced()
        if replaced is not None:
            return replaced
    return None


def _explained(error: Exception) -> str:
    """What an error in the capture means, and what to do."""
    if isinstance(error, PolyshardError):
        return str(error)
    lines = str(error).strip().splitlines()
    said = f"train_step raised {type(error).__name__}: {lines[0] if lines else ''}."
    if "CUDAGeneratorImpl" in said:
        return (
            f"{said} The state of a random generator cannot be read in a capture: give preserve_rng_state=False to "
            "torch.utils.checkpoint."
        )
    if "captur" in said:
        return (
            f"{said} Something in train_step waits for the device or reads from it: item(), tolist(), cpu(), print, an "
            "'if' on a tensor; or it uses a stream that is not ordered after the current one. Return tensors, and read "
            "them after the call."
        )
    return said
