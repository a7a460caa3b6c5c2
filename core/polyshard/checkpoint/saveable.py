"""What a save would refuse, found before training: nobody learns of it at the first checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ..errors import ConfigError, ConfigTypeError, UnsupportedError
from ..runtime.root import Root
from ..state.agreement import together
from ..state.contents import optimizer_state, require_entry
from ..state.expected import expected_state
from ..state.optimizers import Joint, Optimizers
from ..state.places import OPTIMIZER, holdings
from ..state.resting import resting_root
from .casters import caster_states
from .dtypes import NAMES
from .encoding import Encoder
from .store import state_of
from .writing import Document, offered


def require_saveable(
    model: nn.Module,
    optimizer: Optimizers | None,
    remedy: str,
    *,
    frozen: bool = True,
    writes: bool = True,
    also: Callable[[], object] = lambda: None,
) -> None:
    """Raise if ``save`` would refuse what is there now, or state that the optimizers will make. Every rank calls it.

    Args:
        model: The outermost sharded module.
        optimizer: What will be saved with it.
        remedy: What to do, as sentences.
        frozen: As for ``save``.
        writes: Whether the files will be this package's; without, state is put together, and written by others.
        also: What is to be looked at beside, which raises where it finds something.

    Raises:
        ConfigError, UnsupportedError: as ``save``, on the ranks whose state it is.
        RankMismatchError: on the others.
    """
    owner = resting_root(model, "training")
    what = "Looking at what checkpoints will hold"
    with owner.meeting(what, (owner.collectives,)), together(owner.collectives, what):
        try:
            also()
            if writes:
                state = state_of(owner, model, optimizer, frozen=frozen)
                offered(state, Document.of(state, {}, None, caster_states(owner), {}).tensors)
            elif optimizer is not None:
                optimizer_state(model, optimizer)
            if optimizer is not None:
                _require_expected(owner, Joint(optimizer), writes=writes)
        except (ConfigError, UnsupportedError) as error:
            raise type(error)(f"Checkpoints of this run would fail. {error} {remedy}".rstrip()) from error


def _require_expected(owner: Root, joint: Joint, *, writes: bool) -> None:
    held = holdings(owner, joint.groups)
    for each in joint.members:
        for parameter, stand_in, state in expected_state(each):
            holding = replace(held[parameter], parameter=stand_in)
            for key, value in state.items():
                require_entry(holding, key, value, owner.rank)
                where = f"{OPTIMIZER}.state[{holding.names[0]!r}][{key!r}]"
                if not writes:
                    continue
                if not isinstance(value, torch.Tensor):
                    Encoder().encode(value, where)
                elif value.dtype not in NAMES:
                    raise ConfigTypeError(f"{where} is of {value.dtype}, which no checkpoint holds.")
