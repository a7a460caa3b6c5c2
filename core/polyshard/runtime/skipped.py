"""Modules that a forward leaves out on some ranks: a vision tower without an image, a branch that no token takes.

[Note: skipped modules]
A gather needs all ranks, so that ranks must know of each other's use of a module before a forward: they agree on it.
Where none uses the module, none does anything. Where some do, the others *pass it by* at the same place of their
forward: they enter and leave its module states as its forward does, compute nothing, and so have the same execution
order and the same record. Backward follows the record on all ranks ([Note: backward order]), and reduces zeros of those
that have no gradient.

Which of the module states inside a forward enters, and in which order, nobody knows before: those that pass by take the
order of the modules. Where ranks come to share a module for the first time, they compare their collectives in this step
as in their first one, and other orders are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from .. import _torch_private
from ..errors import ConfigError, PolyshardError, RankMismatchError, StateError
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from .hooks import ForwardHooks
from .module_state import ModuleState
from .root import Root, root_of
from .step import Phase


class Use(NamedTuple):
    """Who uses a module in the forward that follows."""

    here: bool
    """Whether this rank does."""
    anywhere: bool
    everywhere: bool


def agree_on_use(root: Root, model: nn.Module, uses: Mapping[nn.Module, bool]) -> None:
    """Let ranks know who uses which module in forwards of ``model`` from here on.

    Raises:
        StateError: not between steps.
        ConfigError: a module is not in ``model``.
        RankMismatchError: ranks gave other modules.
    """
    names = {module: name for name, module in model.named_modules()}
    try:
        if root.phase is not Phase.IDLE:
            raise StateError(
                f"agree_on_use() came inside a {root.phase.value} of the model (rank {root.rank}). Call it before the "
                "forward, on every rank."
            )
        for module in uses:
            if module not in names:
                raise ConfigError(
                    f"agree_on_use() got a {type(module).__name__} that is not inside the {type(model).__name__} (rank "
                    f"{root.rank}). Give modules of the model: {{model.vision: images is not None}}."
                )
    except PolyshardError as error:
        root.recorder.post_error(error)
        raise
    mine = {names[module]: bool(used) for module, used in uses.items()}
    anywhere, everywhere = mine, mine
    groups = root.units[0].ranks.everyone if root.units else ()
    with root.meeting("agreement on the use of modules", groups):
        for group in groups:
            answers = group.all_gather_object((root.rank, anywhere, everywhere))
            for rank, theirs, _ in answers:
                if theirs.keys() != mine.keys():
                    raise RankMismatchError(
                        f"agree_on_use() got {list(mine)} on rank {root.rank} and {list(theirs)} on rank {rank}. Give "
                        "the same modules on every rank, those that no rank uses too."
                    )
            anywhere = {name: any(theirs[name] for _, theirs, _ in answers) for name in mine}
            everywhere = {name: all(theirs[name] for _, _, theirs in answers) for name in mine}
    root.uses = {
        module: Use(mine[names[module]], anywhere[names[module]], everywhere[names[module]]) for module in uses
    }
    shared = [module for module, use in root.uses.items() if use.anywhere and not use.everywhere]
    root.share([each for module in shared for each in _states_in(module)])


def skip(module: nn.Module) -> None:
    """Pass ``module`` by, where the forward that runs would call it on other ranks.

    Raises:
        StateError: ranks have not agreed on its use, or this rank said that it uses it.
    """
    states = _states_in(module)
    # A recomputation enters nothing: backward follows the record.
    if not states or _torch_private.in_backward():
        return
    root = root_of(states[0])
    if root.unsharded:
        return
    use = root.uses.get(module)
    where = f"skip() of the {type(module).__name__} around '{states[0].label}' (rank {root.rank})"
    if use is None:
        raise StateError(
            f"{where}: ranks have not agreed on its use. Call polyshard.agree_on_use(model, {{module: used}}) before "
            "the forward, on every rank."
        )
    if use.here:
        raise StateError(
            f"{where}: agree_on_use() was told that this rank uses it. Call the module, or say False before the forward."
        )
    if not root.runs_here:
        raise StateError(f"{where} came outside of a forward. Call it where the forward would call the module.")
    if use.anywhere:
        _pass_by(module, root)


def _pass_by(module: nn.Module, root: Root) -> None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    hooks = [owner for owner in owners if isinstance(owner, ForwardHooks)]
    for each in hooks:
        each.enter_for_others()
    for child in module.children():
        use = root.uses.get(child)
        if use is None or use.anywhere:
            _pass_by(child, root)
    for each in reversed(hooks):
        each.leave_for_others()


def _states_in(module: nn.Module) -> list[ModuleState]:
    found = (each.__dict__.get(MODULE_STATE_ATTRIBUTE) for each in module.modules())
    return list(dict.fromkeys(each for each in found if each is not None))
