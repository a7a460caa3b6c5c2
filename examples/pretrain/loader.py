"""Batches of token sequences for one rank, and where in the text it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from polyshard.errors import ConfigError
from settings import Settings
from tokens import TokenFile, Tokens
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader


class Sequences(Dataset[torch.Tensor]):
    """A text cut into sequences of ``context`` tokens, documents packed one behind the other.

    Each comes with the token behind it, as the last one's target. What is left at the end of the text is not used.
    """

    def __init__(self, file: TokenFile, context: int, name: str) -> None:
        self._file = file
        self._context = context
        self._tokens: np.memmap[Any, np.dtype[Any]] | None = file.map()
        self._count = (len(self._tokens) - 1) // context
        if not self._count:
            raise ConfigError(
                f"the text of {name} has {len(self._tokens)} tokens, fewer than one sequence of training.context "
                f"{context} and its last target. Give more text, or shorten training.context."
            )

    def __getstate__(self) -> dict[str, Any]:
        # Mapped tokens would travel to a worker process as a copy of all.
        return {**self.__dict__, "_tokens": None}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        """int64 ``[context + 1]``."""
        if self._tokens is None:
            self._tokens = self._file.map()
        begin = index * self._context
        return torch.from_numpy(self._tokens[begin : begin + self._context + 1].astype(np.int64))


@dataclass(frozen=True)
class Share:
    """Which sequences of an endless order one rank computes, microbatch by microbatch.

    The order is drawn from ``seed`` anew for each pass over the text, and is that of all ranks: microbatch ``n`` of all
    of them is the next ``microbatch * world_size`` sequences, of which ranks take equal parts in the order of their
    numbers. So what a step is trained on does not depend on how many ranks there are.
    """

    sequences: int
    """In the text."""
    microbatch: int
    rank: int
    world_size: int
    seed: int
    start: int = 0
    """Sequences of all ranks that were trained on before."""

    def __iter__(self) -> Place:
        return Place(self, self.start)


@dataclass
class Place:
    """Where in its share a rank is; what the data loader saves and restores."""

    share: Share
    done: int
    """Sequences of all ranks, from the beginning of the order."""
    _pass: int = field(default=-1, repr=False)
    _order: torch.Tensor = field(default_factory=lambda: torch.empty(0), repr=False)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        """Indices of the next microbatch."""
        share = self.share
        begin = self.done + share.rank * share.microbatch
        self.done += share.world_size * share.microbatch
        return [self._at(begin + index) for index in range(share.microbatch)]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def _at(self, position: int) -> int:
        which, offset = divmod(position, self.share.sequences)
        if which != self._pass:
            generator = torch.Generator().manual_seed(self.share.seed * 1_000_003 + which)
            self._pass, self._order = which, torch.randperm(self.share.sequences, generator=generator)
        return int(self._order[offset])


def make_loader(
    tokens: Tokens, settings: Settings, *, rank: int, world_size: int, start: int, pinned: bool
) -> StatefulDataLoader:
    """Endless microbatches of ``rank``, int64 ``[microbatch, context + 1]`` each, behind the first ``start`` sequences.

    ``pinned``: in memory from which a GPU copies without waiting. Raises ``ConfigError`` where text is too short.
    """
    text = Sequences(tokens.train, settings.training.context, "data.files")
    share = Share(len(text), settings.training.microbatch, rank, world_size, settings.training.seed, start)
    return StatefulDataLoader(
        text,
        batch_sampler=share,
        num_workers=settings.data.workers,
        pin_memory=pinned,
    )


class Turns:
    """Microbatches of one rank from any place of the order, for jobs that take batches in turn."""

    def __init__(self, tokens: Tokens, settings: Settings, *, rank: int, world_size: int) -> None:
        """Raises ``ConfigError`` where text is too short."""
        self._text = Sequences(tokens.train, settings.training.context, "data.files")
        share = Share(len(self._text), settings.training.microbatch, rank, world_size, settings.training.seed)
        self._place = iter(share)

    def go_to(self, sequences: int) -> None:
        """Continue behind the first ``sequences`` of the order."""
        self._place.done = sequences

    def __next__(self) -> torch.Tensor:
        """int64 ``[microbatch, context + 1]``."""
        return torch.stack([self._text[index] for index in next(self._place)])


def held_out_batch(text: Sequences, batch: int, settings: Settings, *, rank: int, world_size: int) -> torch.Tensor:
    """The sequences of ``rank`` in batch ``batch`` of all ranks, int64 ``[sequences, context + 1]``.

    Empty where the held-out text has no more of them.
    """
    microbatch = settings.training.microbatch
    begin = (batch * world_size + rank) * microbatch
    found = [text[index] for index in range(begin, min(begin + microbatch, len(text)))]
    return torch.stack(found) if found else torch.empty(0, settings.training.context + 1, dtype=torch.int64)
