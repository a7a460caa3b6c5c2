"""The model of a drawn program, which does in a forward what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from parity import Block
from random_programs import BARE, BLOCKS, Family, Program, Segment, Use, Way
from torch import nn
from torch.utils.checkpoint import checkpoint


class PlannedError(Exception):
    """What a block raises."""


class Extra(nn.Module):
    """What is particular to a family, behind a block's layers."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        if family is Family.SCALAR:
            self.scale = nn.Parameter(torch.tensor(0.7))
        elif family is Family.SLIVERS:
            self.scale, self.none = nn.Parameter(torch.tensor([0.7])), nn.Parameter(torch.empty(0))
        elif family is Family.LOOKUP:
            self.table = nn.Embedding(5, 5)
        elif family is Family.RECURRENT:
            self.memory = nn.GRU(5, 5)
        elif family is Family.EXPERTS:
            self.experts = nn.Parameter(torch.linspace(-0.5, 0.5, 50).view(2, 5, 5))
        elif family is Family.ADAPTED:
            self.base = nn.Linear(5, 5).requires_grad_(False)
            self.down = nn.Parameter(torch.linspace(-1, 1, 10).view(5, 2))
            self.up = nn.Parameter(torch.linspace(1, -1, 10).view(2, 5))
        elif family is Family.RECOMPUTED:
            self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.family is Family.SCALAR:
            return x * self.scale.exp()
        if self.family is Family.SLIVERS:
            return x * self.scale + self.none.sum()
        if self.family is Family.LOOKUP:
            looked_up: torch.Tensor = self.table(x.detach().argmax(-1))
            return x + looked_up
        if self.family is Family.RECURRENT:
            output: torch.Tensor = self.memory(x)[0]
            return x + output
        if self.family is Family.EXPERTS:
            return x + torch.einsum("bi,eij->bj", x, self.experts)
        if self.family is Family.RECOMPUTED:
            return x + _under(False, lambda y: torch.tanh(self.layer(y)), x)
        return torch.tanh(self.base(x) + x @ self.down @ self.up)


class Raising(Block):
    """A block that can be told to raise at its end."""

    def __init__(self, family: Family, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.raises, self.again = False, family is Family.AGAIN
        self.extra = None if family in BARE else Extra(family)
        self.inner = inner
        #: Where a loss of its own goes; None for nowhere.
        self.aside: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        y = super().forward(x)
        if self.again and depth == 0:
            # Its parameters are still needed on the way back up.
            y = super().forward(self(y, 1))
        if self.extra is not None:
            y = self.extra(y)
        if self.inner is not None:
            y = self.inner(y)
        if self.aside is not None:
            self.aside.append(torch.tanh(self.up(torch.tanh(self.down(self.up(x))))).square().mean())
        if self.raises and depth == 0:
            raise PlannedError
        return y


class Routed(nn.Module):
    """Does with each block as it is told."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.again = nn.Linear(3, 5)
        self.again.weight = self.first.weight
        self.blocks = nn.ModuleList(
            Raising(program.family, Raising(Family.DENSE) if program.nested and index == 1 else None)
            for index in range(BLOCKS)
        )
        if program.tied:
            blocks: Any = self.blocks
            blocks[2].down.weight = blocks[0].down.weight
        self.borrows, self.queried = program.family is Family.BORROWED, program.family is Family.QUERIED
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.last = nn.Linear(5, 2)
        self.words: nn.Embedding | None = None
        if program.family is Family.WORDS:
            self.words, self.head = nn.Embedding(3, 5), nn.Linear(5, 3, bias=False)
            self.head.weight = self.words.weight
        self.aside: list[torch.Tensor] = []
        #: What a rank does in place of a block that it passes by.
        self.pass_by: Callable[[nn.Module], object] = id
        if program.frozen is not None:
            self.get_submodule(program.frozen).requires_grad_(False)

    def forward(
        self, x: torch.Tensor, way: Way, rank: int, gated: bool = False, *, inside: bool = False, nested: bool = False
    ) -> torch.Tensor:
        if nested:
            x = x + self(x, way, rank, gated).mean(-1, keepdim=True)
        self.aside = []
        y = self.first(x) + torch.tanh(self.again(x))
        if gated:
            y = y * self.gate
        if self.words is not None:
            y = y + self.words(x.detach().argmax(-1))
        if self.queried:
            y = y + self.blocks[0](self.gate.view(1, 5))
        y = self.along(y, way, rank)
        output: torch.Tensor = sum(self.aside, self.last(y))
        if self.borrows:
            output = output + torch.tanh(y @ self.last.weight.t())
        if self.words is not None:
            output = output + torch.tanh(self.head(y)).mean(-1, keepdim=True)
        if inside:
            output = output.square().mean()
            output.backward()
            return output.detach()
        return output

    def along(self, x: torch.Tensor, way: Way, rank: int) -> torch.Tensor:
        """What the blocks make of ``x``."""
        for segment in way:
            y = self._segment(segment, rank, x)
            x = x if segment.drops[rank] else y
        return x

    def _segment(self, segment: Segment, rank: int, x: torch.Tensor) -> torch.Tensor:
        def run(y: torch.Tensor) -> torch.Tensor:
            for index, use in zip(segment.blocks, segment.uses[rank], strict=True):
                y = _under(segment.each, _using(self.blocks[index], use, self.aside, self.pass_by), y)
            return y

        return _under(segment.around, run, x)


def _under(reentrant: bool | None, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if reentrant is None:
        return function(x)
    # Random states belong to the process, and ranks are threads.
    output: torch.Tensor = checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)
    return output


def _using(
    block: Any, use: Use, aside: list[torch.Tensor], pass_by: Callable[[nn.Module], object]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        if use is Use.PASS:
            pass_by(block)
        if use in (Use.SKIP, Use.PASS):
            return x * 1.0
        if use is Use.NO_GRAD:
            with torch.no_grad():
                y = block(x)
            return x + y
        told = getattr(block, "module", block)
        told.raises, told.aside = use is Use.RAISE, aside if use is Use.ASIDE else None
        try:
            y = block(x)
        except PlannedError:
            return x * 1.0
        finally:
            told.raises, told.aside = False, None
        if use is Use.TWICE:
            return torch.tanh(y) + block(y)
        return x * 1.0 if use is Use.DROP else y

    return run
