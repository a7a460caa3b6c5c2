"""Checkpoints: what is in them beside tensors, when one is on disk, and how a run is taken up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polyshard.checkpoint
import torch
from polyshard.errors import ConfigError
from ranks import Ranks
from settings import Settings
from torch import nn

#: Settings that say where the position in the text is; another text decides it, too.
_ORDER = ("training.context", "training.seed")
_TIED = "model.tie_word_embeddings"
#: Changes that leave a step the mean over the same sequences.
_SHARING = ("ranks", "training.microbatch")


@dataclass(frozen=True)
class Progress:
    """How far a run is. Saved in a checkpoint's ``extra``."""

    step: int
    """Steps done."""
    sequences: int
    """Sequences that all ranks together were trained on."""
    loaders: list[dict[str, Any]]
    """State of each rank's data loader, by rank."""
    settings: dict[str, Any]
    """``Settings.deciding``."""
    digest: str
    """Of the tokens."""
    random: list[dict[str, Any]] = field(default_factory=list)
    """Random states of each rank, by rank."""
    elastic: dict[str, int] | None = None
    """How far all jobs are, where there are several."""

    def changes(self, settings: Settings, ranks: Ranks, digest: str) -> dict[str, str]:
        """What is other than it was and changes numbers, by setting, in words."""
        now = settings.deciding()
        found = {
            name: f"{name} was {self.settings.get(name)!r} and is {value!r}"
            for name, value in now.items()
            if self.settings.get(name) != value
        }
        if len(self.loaders) != ranks.world_size:
            found["ranks"] = f"there were {len(self.loaders)} ranks and are {ranks.world_size}"
        if self.digest != digest:
            found["text"] = "the text has other tokens: files of [data] have changed, or their tokenizer"
        return found


def keeps_order(changes: Mapping[str, str]) -> bool:
    """Whether sequences still come in the order of before, so that a run can go on behind those it has seen."""
    return "text" not in changes and not any(name in changes for name in _ORDER)


def keeps_ranks(changes: Mapping[str, str]) -> bool:
    """Whether ranks still share the run in the same way, so that what each had for itself is of use to it."""
    return "ranks" not in changes and not any(name.startswith("parallel.") for name in changes)


class Checkpoints:
    """Those of one run, in a folder of its own; of several jobs, the output folders lie beside each other."""

    def __init__(self, output: Path, settings: Settings) -> None:
        self._folder = output / "checkpoints"
        self._settings = settings.checkpoint
        self._beside = settings.elastic
        self._pending: polyshard.checkpoint.PendingSave[Path] | None = None

    def latest(self, ranks: Ranks) -> Path | None:
        """The newest that is whole; None where there is none. Every rank calls it."""
        folders = self._folder.parent.parent.glob("*/checkpoints") if self._beside else [self._folder]

        def newest() -> Path | None:
            found = (polyshard.checkpoint.latest(each) for each in folders)
            return max((each for each in found if each is not None), key=lambda each: each.name, default=None)

        # One rank decides: what two see in one folder may differ.
        return ranks.from_first(newest)

    def save(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], progress: Progress
    ) -> None:
        """Save what there is now, whatever is trained while it is written. Every rank calls it.

        It waits for the one before, and raises what became of that where it failed.
        """
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if progress.settings[_TIED] else {}
        model = _saved(models, progress.settings["parallel.pp"], tied)
        save = polyshard.checkpoint.async_save if self._settings.asynchronous else polyshard.checkpoint.save
        made = save(self._folder, progress.step, model, optimizers, extra=asdict(progress), keep=self._settings.keep)
        self._pending = made if isinstance(made, polyshard.checkpoint.PendingSave) else None

    def finish(self) -> None:
        """Return when all that was saved is on disk; raise where it could not be written."""
        if self._pending is not None:
            self._pending.result()


def load(
    directory: Path, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], settings: Settings
) -> Progress:
    """Read the checkpoint ``directory``. Every rank calls it. Raises ``ConfigError`` where it is of another model."""
    extra = polyshard.checkpoint.load(directory, _saved(models, settings.parallel.pp, {}), optimizers)
    return Progress(**extra)


def _saved(models: Sequence[nn.Module], pp: int, tied: Mapping[str, str]) -> nn.Module | polyshard.checkpoint.Stages:
    """What a checkpoint is of: the model, or its stages."""
    return polyshard.checkpoint.Stages(models, tied=tied) if pp > 1 else models[0]


def require_same(changes: Mapping[str, str], directory: Path, *, any_ranks: bool = False) -> None:
    """Raise ``ConfigError`` where ``changes`` are any; ``any_ranks``: other ones than how ranks share the batch."""
    refused = [text for name, text in changes.items() if not (any_ranks and name in _SHARING)]
    if refused:
        raise ConfigError(
            f"{directory} cannot be gone on from bit for bit: {'; '.join(refused)}. Make it as it was, name another "
            "output.folder, or accept what comes of it: another number of ranks with checkpoint.any_ranks=true, "
            "everything with --accept-changes."
        )
