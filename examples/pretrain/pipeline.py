"""The model in stages of a pipeline, and the schedule that takes microbatches through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model import Config, Stage
from polyshard.pipelining import PipelineStage, TiedParameter, clip_grad_norm_
from settings import Settings
from sharding import build_sharded
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

_SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
}
#: What cross entropy leaves out.
_NO_TARGET = -100


class Pipeline:
    """This rank's stages of the model, each sharded over the ranks that have it. Every rank of ``mesh`` makes one.

    Ranks along ``pp`` have the same sequences: the first stage reads the tokens, and the last one their targets.
    """

    def __init__(
        self,
        settings: Settings,
        config: Config,
        device: torch.device,
        mesh: DeviceMesh,
        microbatches: int,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        positions: torch.Tensor | None,
    ) -> None:
        """``loss``: of logits and targets, summed over tokens, of which a microbatch's mean is trained on.

        ``positions``: of this rank's tokens, ``[1, context]``, where they are parts of sequences.
        """
        parallel = settings.parallel
        stages = parallel.pp * parallel.pp_stages
        self._ranks = parallel.pp
        self._sequences = microbatches * settings.training.microbatch
        numbers = range(mesh["pp"].get_local_rank(), stages, parallel.pp)
        self.models: list[Stage] = [
            build_sharded(settings, config, device, mesh, stage=(number, stages)) for number in numbers
        ]
        for model in self.models:
            model.positions = positions
        self._stages = [
            PipelineStage(model, number, stages, device, group=mesh["pp"].get_group())
            for model, number in zip(self.models, numbers, strict=True)
        ]
        self._reads, self._scores = 0 in numbers, stages - 1 in numbers
        names = {0: "model.embed_tokens.weight", stages - 1: "lm_head.weight"}
        self._tied = [TiedParameter(self._stages, names)] if config.tie_word_embeddings else []
        self._schedule = _SCHEDULES[parallel.pp_schedule](
            self._stages if parallel.pp_stages > 1 else self._stages[0],
            microbatches,
            loss_fn=lambda logits, targets: loss(logits, targets) / targets.numel(),
        )

    def train(self, rows: torch.Tensor) -> torch.Tensor:
        """Add the gradients of ``rows``, all microbatches of this rank; returns its part of their mean loss.

        The mean of all ranks' parts is the mean loss of all sequences.
        """
        # Torch 2.11 wants the strides of the first batch in all of them.
        losses = self._run(self._schedule.step, rows[:, :-1].contiguous(), rows[:, 1:])
        for each in self._tied:
            each.reduce()
        return losses.mean() * self._ranks

    def clip(self, largest: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all stages is at most ``largest``; returns the norm before."""
        return clip_grad_norm_(self._stages, largest, tied=self._tied)

    def evaluate(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of the loss of ``rows``, as many as are trained on at once or fewer, summed over them.

        The mean over ranks along ``pp`` is the sum of their losses, each the mean of a sequence.
        """
        missing = self._sequences - len(rows)
        inputs = torch.cat([rows[:, :-1], rows.new_zeros(missing, rows.shape[1] - 1)])
        targets = torch.cat([rows[:, 1:], rows.new_full((missing, rows.shape[1] - 1), _NO_TARGET)])
        return self._run(self._schedule.eval, inputs, targets).double().mean() * self._sequences * self._ranks

    def _run(self, call: Callable[..., Any], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The losses of all microbatches where the last stage is; a zero elsewhere."""
        losses: list[torch.Tensor] = []
        # Logits of all microbatches would take most of the memory.
        call(
            *([inputs] if self._reads else []),
            target=targets if self._scores else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack(losses).detach() if losses else torch.zeros(1, device=inputs.device)
