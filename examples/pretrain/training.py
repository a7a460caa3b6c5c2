"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import polyshard
import torch
from checkpointing import Checkpoints, Progress, keeps_order, keeps_ranks
from loader import Sequences, Turns, held_out_batch, make_loader
from metrics import Clock, Memory, flops_per_token, peak_flops
from model import Model, logits_and_balance, logits_of, model_config, summed_loss
from parallel import make_mesh
from pipeline import Pipeline
from ranks import Ranks
from report import Reporter, Trained
from schedule import make_scheduler
from settings import Settings
from sharding import build_sharded, make_optimizer
from tokens import Tokens

if TYPE_CHECKING:
    from polyshard_torchft import Elastic


class Step(NamedTuple):
    """What a step was, before its update."""

    loss: torch.Tensor
    """This rank's part of the mean cross entropy, which is all ranks' mean: 0 where a pipeline does not end."""
    balance: torch.Tensor
    """Its part of the load-balancing loss, of which all ranks' mean is the whole; 0 without experts."""
    norm: torch.Tensor
    """Of all ranks' gradient, of both losses."""


class Training:
    """A sharded model with what trains it."""

    def __init__(self, settings: Settings, ranks: Ranks, tokens: Tokens) -> None:
        self._settings = settings
        self._ranks = ranks
        self._tokens = tokens
        # Ranks along cp and tp, which are neighbours, have the same sequences, and so have those along pp. Ranks along
        # cp have parts of them.
        parallel = settings.parallel
        length = settings.training.context // parallel.cp
        first = ranks.rank // parallel.tp % parallel.cp * length
        # With the token behind it, which is the last target.
        self._part = slice(first, first + length + 1)
        self._positions = (
            torch.arange(first, first + length, device=ranks.device).unsqueeze(0) if parallel.cp > 1 else None
        )
        self._data_ranks = settings.parallel.data_ranks(ranks.world_size)
        self._data_rank = ranks.rank // (parallel.cp * parallel.tp) % self._data_ranks
        self._accumulation = settings.microbatches(ranks.world_size)
        self._held_out = Sequences(tokens.held_out, settings.training.context, "data.held_out")
        self.config = model_config(settings, tokens.vocabulary, tokens.end_of_text)
        mesh = make_mesh(settings.parallel, ranks.world_size, ranks.device)
        self._loss = (
            torch.compile(summed_loss, backend=settings.compile.backend) if settings.compile.loss else summed_loss
        )
        self._pipeline: Pipeline | None = None
        if settings.parallel.pp > 1:
            self._pipeline = Pipeline(
                settings, self.config, ranks.device, mesh, self._accumulation, self._loss, self._positions
            )
            self.models = self._pipeline.models
        else:
            self.models = [build_sharded(settings, self.config, ranks.device, mesh)]
        """What this rank has a share of: the model, or some of its stages."""
        self.optimizers = [make_optimizer(model, settings, ranks.device) for model in self.models]
        self._take: Callable[..., Step] = self._train_step
        if self._pipeline is None and not settings.elastic:
            # One CUDA graph from the fourth step on, where the device records them.
            self._take = polyshard.CapturedStep(self.models[0], self.optimizers, self._train_step)
        # As the settings have them: a checkpoint brings its own.
        self._numbers = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizers[0].param_groups
        ]
        self.done = 0
        """Steps."""
        self.leads = True
        """Whether this job saves, of those that train the model."""
        self.jobs = 1
        """Of these, how many took part in the last step."""
        self._sequences = 0
        self._elastic: Elastic | None = None
        self._turns: Turns | None = None
        self._begin(None)
        if settings.elastic:
            self._join_jobs()

    def _join_jobs(self) -> None:
        from polyshard_torchft import Elastic

        self._turns = Turns(self._tokens, self._settings, rank=self._data_rank, world_size=self._data_ranks)
        self._elastic = Elastic(self.models[0], self.optimizers, {"schedule": self})

    def state_dict(self) -> dict[str, Any]:
        """Of the schedule, for a job that comes back."""
        return dict(self._schedulers[0].state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over another job's schedule."""
        self._schedulers[0].load_state_dict(state_dict)

    def progress(self) -> Progress:
        """How far it is. Every rank calls it."""
        return Progress(
            step=self.done,
            sequences=self._sequences,
            loaders=self._ranks.each(self._loader.state_dict()),
            settings=self._settings.deciding(),
            digest=self._tokens.digest,
            random=self._random_states(),
            elastic=None if self._elastic is None else self._elastic.state_dict(),
        )

    def _random_states(self) -> list[dict[str, Any]]:
        stage = polyshard.random_states(self.models[0])
        if self._pipeline is None:
            return stage
        # Those that have a stage are neighbours.
        return [state for states in self._ranks.each(stage)[:: len(stage)] for state in states]

    def go_on(self, progress: Progress, changes: dict[str, str]) -> None:
        """Take the run up behind ``progress``, of which model and optimizer have been loaded.

        Without ``changes`` each rank's data loader is restored. With some, the text goes on behind the sequences that
        all ranks have seen, where their order is still the same, and begins anew elsewhere.
        """
        self.done = progress.step
        self._sequences = progress.sequences if keeps_order(changes) else 0
        for optimizer in self.optimizers:
            for group, numbers in zip(optimizer.param_groups, self._numbers, strict=True):
                group.update(numbers)
        self._begin(None if changes else progress.loaders[self._ranks.rank])
        if self._elastic is not None and progress.elastic is not None:
            self._elastic.load_state_dict(progress.elastic)
        # Behind the loader, which draws a seed when it begins.
        if keeps_ranks(changes):
            stage = self._ranks.world_size // self._settings.parallel.pp
            first = self._ranks.rank // stage * stage
            polyshard.restore_random_states(self.models[0], progress.random[first : first + stage])

    def _begin(self, loader: dict[str, Any] | None) -> None:
        settings, ranks = self._settings, self._ranks
        self._loader = make_loader(
            self._tokens,
            settings,
            rank=self._data_rank,
            world_size=self._data_ranks,
            start=self._sequences,
            pinned=ranks.device.type == "cuda",
        )
        if loader is not None:
            self._loader.load_state_dict(loader)
        self._batches = iter(self._loader)
        self._schedulers = [
            make_scheduler(optimizer, settings.optimizer.lr, settings.training.steps, settings.schedule, self.done)
            for optimizer in self.optimizers
        ]

    def step(self) -> Step | None:
        """One step; None where it does not count, as another job was lost in it."""
        batch = self._settings.training.batch
        if self._elastic is None or self._turns is None:
            # A captured step returns the same memory every time.
            found = Step(*(each.clone() for each in self._take(*self._rows())))
            self._schedule()
            self.done += 1
            self._sequences += batch
            return found
        with self._elastic.step() as shared:
            self._turns.go_to(shared.batch * batch)
            found = self._gradients(self._rows())
            counts = shared.commits()
            if counts:
                self._update()
                self._schedule()
        self.leads, self.jobs = shared.rank == 0, shared.size
        self.done, self._sequences = self._elastic.steps, self._elastic.batches * batch
        return found if counts else None

    def _train_step(self, *rows: torch.Tensor) -> Step:
        found = self._gradients(rows)
        self._update()
        return found

    def _gradients(self, rows: Sequence[torch.Tensor]) -> Step:
        largest = self._settings.optimizer.clip
        if self._pipeline is not None:
            loss = self._pipeline.train(torch.cat(list(rows)))
            return Step(loss, torch.zeros_like(loss), self._pipeline.clip(largest))
        loss, balance = self._backward(rows)
        return Step(loss, balance, polyshard.clip_grad_norm_(self.models[0], largest))

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _schedule(self) -> None:
        # Not in a captured step, which runs no Python.
        for scheduler in self._schedulers:
            scheduler.step()

    def _backward(self, batches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the microbatches of a step, without a pipeline; returns the means of its two losses."""
        (model,), coefficient = self.models, self._settings.model.router_aux_loss_coef
        losses, balances = [], []
        for index, rows in enumerate(batches):
            # Gradients travel with the last microbatch alone.
            last = index == self._accumulation - 1
            with nullcontext() if last else polyshard.no_sync(model):
                logits, balance = logits_and_balance(cast(Model, model), rows[:, :-1], self._positions)
                loss = self._mean_loss(logits, rows)
                ((loss + coefficient * balance) / self._accumulation).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            balances.append(balance.detach())
        return torch.stack(losses).mean(), torch.stack(balances).mean()

    def _rows(self) -> list[torch.Tensor]:
        """This rank's part of the microbatches of a step."""
        return [self._next() for _ in range(self._accumulation)]

    def _next(self) -> torch.Tensor:
        """Its part of the next microbatch."""
        rows: torch.Tensor = next(self._batches if self._turns is None else self._turns)
        return rows.to(self._ranks.device, non_blocking=True)[:, self._part]

    def _mean_loss(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        targets = rows[:, 1:]
        return self._loss(logits, targets) / targets.numel()

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss over the first ``evaluation.batches`` batches of held-out text, nats a token."""
        ranks, training = self._ranks, self._settings.training
        available = math.ceil(len(self._held_out) / (training.microbatch * self._data_ranks))
        batches = min(self._settings.evaluation.batches, available)
        # A schedule takes as many batches as a step has.
        together = 1 if self._pipeline is None else self._accumulation
        for model in self.models:
            model.eval()
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        count = 0
        for first in range(0, batches, together):
            rows = torch.cat(
                [
                    held_out_batch(
                        self._held_out, batch, self._settings, rank=self._data_rank, world_size=self._data_ranks
                    )
                    for batch in range(first, min(first + together, batches))
                ]
            ).to(ranks.device)[:, self._part]
            if self._pipeline is not None:
                total += self._pipeline.evaluate(rows)
            elif len(rows):
                logits = logits_of(self.models[0], rows[:, :-1], self._positions)
                total += self._mean_loss(logits, rows).double() * len(rows)
            else:
                # Nothing is left for this rank, but the others need its share of the parameters.
                length = training.context // self._settings.parallel.cp
                nothing = torch.zeros(1, length, dtype=torch.int64, device=ranks.device)
                logits_of(self.models[0], nothing, self._positions)
            count += len(rows)
        for model in self.models:
            model.train()
        summed, sequences = ranks.total([total, count])
        return summed / sequences

    def train(self, last: int, reporter: Reporter, checkpoints: Checkpoints, preemption: polyshard.Preemption) -> None:
        """Steps up to ``last``, with reports, evaluations and checkpoints on the way, and a checkpoint at the end.

        Where ``preemption`` asks for it, the end comes earlier: ``done`` says when.

        Raises ``FloatingPointError`` where a loss is no finite number; no checkpoint is saved of that.
        """
        settings = self._settings
        clock = self._clock()
        waiting: list[Step] = []
        retries = 0
        first = self.done
        while self.done < last:
            rate = float(self._schedulers[0].get_last_lr()[0])
            before, jobs = self.done, self.jobs
            step = self.step()
            if self.jobs != jobs:
                reporter.note(f"step {before + 1}: {self.jobs} job(s), {jobs} before")
            if step is None:
                continue
            if self.done != before + 1:
                # What came before is not what the job that this one took over from has done.
                waiting.clear()
            waiting.append(step)
            if self._ends(preemption):
                last = self.done
            evaluates = self.done % settings.evaluation.every == 0 or self.done == settings.training.steps
            saves = self.done % settings.checkpoint.every == 0 or self.done == last
            # The first step shows that all is well, and is not waited for as long.
            reports = self.done % settings.output.report_every == 0 or self.done == first + 1
            if not (evaluates or saves or reports):
                continue
            now = self._trained(waiting, rate, clock)
            waiting.clear()
            reporter.trained(now)
            if now.memory.retries > retries:
                retries = now.memory.retries
                reporter.note(
                    f"warning: the allocator had to free cached memory and ask again, {retries} times so far, "
                    f"{now.memory.ooms} in vain: steps are slow. Lower training.microbatch, or keep fewer activations."
                )
            if not all(map(math.isfinite, now.losses)):
                raise FloatingPointError(
                    f"the loss is {now.losses[-1]} at step {self.done}. Go on from the last checkpoint with a lower "
                    "optimizer.lr or a longer schedule.warmup (and --accept-changes)."
                )
            if evaluates:
                reporter.evaluated(self.done, self.evaluate())
            if saves and self.leads:
                checkpoints.save(self.models, self.optimizers, self.progress())
            clock.start()
        checkpoints.finish()

    def _ends(self, preemption: polyshard.Preemption) -> bool:
        """Whether all ranks leave behind this step."""
        asked = preemption.requested()
        # Ranks of one stage have agreed; those of another one may not know of it yet.
        return asked if self._pipeline is None else self._ranks.largest([asked])[0] > 0

    def _clock(self) -> Clock:
        peak = peak_flops(self._settings, self._ranks.device)
        return Clock(
            self._settings.training.tokens_per_step,
            flops_per_token(self.config, self._settings.training.context),
            None if peak is None else peak * self._ranks.world_size,
        )

    def _trained(self, waiting: list[Step], rate: float, clock: Clock) -> Trained:
        # Losses are read here only: each reading waits for the device, and for the other ranks.
        totals = self._ranks.total([value for step in waiting for value in (step.loss, step.balance)])
        means = [total / self._ranks.world_size for total in totals]
        losses, balances = (
            means[::2],
            means[1::2] if self._settings.model.num_local_experts and self._pipeline is None else [],
        )
        norms = [step.norm.item() for step in waiting]
        speed = clock.read(len(waiting))
        mine = Memory.look(self._ranks.device)
        peak, retries, ooms = map(int, self._ranks.largest([mine.peak_nbytes, mine.retries, mine.ooms]))
        return Trained(self.done, losses, balances, norms, rate, speed, Memory(peak, retries, ooms))
