"""Modules that a forward leaves out on some ranks: a vision tower without an image, a branch that no token takes.

[Note: skipped modules]
A gather needs all ranks, so they agree before a forward who uses a module. Where none does, none does anything. Where
some do, the others pass it by at the same place of their forward: they enter and leave its module states, and compute
nothing. So all have the same execution order and the same record. Backward follows the record on every rank ([Note:
backward order]), with zeros from those that have no gradient.

Ranks that pass a module by do not know in which order its forward enters the module states inside, and take that of the
modules. Where some pass it by for the first time, ranks compare collectives as in their first step: another order is an
error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from .. import _torch_private
from ..errors import ConfigError, PolyshardError, RankMismatchError, StateError, UnsupportedError
from ..interfaces import Collectives
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from .activation_checkpoint import running
from .hooks import ForwardHooks
from .module_state import ModuleState, ModuleUse
from .root import Root, root_of
from .states import Phase


def agree_on_use(root: Root, model: nn.Module, uses: Mapping[nn.Module, bool]) -> None:
    """Let ranks know which of them use which modules, in forwards of ``model`` from here on.

    Raises:
        StateError: a forward or backward runs.
        ConfigError: a module is not in ``model``.
        UnsupportedError: a wrapper of ``polyshard_fsdp`` is inside of one.
        RankMismatchError: ranks gave other modules.
    """
    root.leave_failed_backward()
    try:
        if root.phase is not Phase.IDLE:
            raise StateError(
                f"agree_on_use() was called inside a {root.phase.value} of the model (rank {root.rank}). Call it "
                "before the forward, on every rank."
            )
        if root.uses.keys() != uses.keys():
            root.uses = dict(zip(uses, _described(root, model, uses), strict=True))
    except PolyshardError as error:
        root.recorder.post_error(error)
        raise
    for module, here in uses.items():
        use = root.uses[module]
        use.here = use.anywhere = use.everywhere = bool(here)
    groups = root.units[0].ranks.everyone if root.units else ()
    with root.meeting("agreement on the use of modules", groups):
        for group in groups:
            _exchange(group, root.rank, list(root.uses.values()))
    shared = {state for use in root.uses.values() if use.anywhere and not use.everywhere for state in use.states}
    if any(not state.was_shared for state in shared):
        root.audit.begin()
    for state in root.module_states:
        state.shared = state in shared
        state.was_shared |= state.shared


def _described(root: Root, model: nn.Module, modules: Iterable[nn.Module]) -> Iterator[ModuleUse]:
    names = {module: name for name, module in model.named_modules()}
    for module in modules:
        if module not in names:
            raise ConfigError(
                f"agree_on_use() got a {type(module).__name__} that is not inside of the {type(model).__name__} (rank "
                f"{root.rank}). Give modules of the model: {{model.vision: images is not None}}."
            )
        for inside in module.modules():
            if MODULE_STATE_ATTRIBUTE in inside.__dict__ and not _hooks_of(inside):
                raise UnsupportedError(
                    "agree_on_use() serves models of polyshard.shard and fully_shard, and "
                    f"'{names[inside] or '(root)'}' is in a wrapper of its own (rank {root.rank}). Shard by one of "
                    "these."
                )
        yield ModuleUse(names[module], tuple(dict.fromkeys(_states_in(module))))


def _exchange(group: Collectives, rank: int, uses: Sequence[ModuleUse]) -> None:
    mine = {use.name: (use.anywhere, use.everywhere) for use in uses}
    answers: list[tuple[int, dict[str, tuple[bool, bool]]]] = group.all_gather_object((rank, mine))
    for other, theirs in answers:
        if theirs.keys() != mine.keys():
            raise RankMismatchError(
                f"agree_on_use() got {list(mine)} on rank {rank}, and {list(theirs)} on rank {other}. Give the same "
                "modules on every rank, those that it does not use too."
            )
    for use in uses:
        use.anywhere = any(theirs[use.name][0] for _, theirs in answers)
        use.everywhere = all(theirs[use.name][1] for _, theirs in answers)


def skip(module: nn.Module) -> None:
    """Pass ``module`` by, where the forward that runs calls it on other ranks.

    Raises StateError: outside of a forward, without an agreement, or where this rank said that it uses the module.
    """
    state = next(_states_in(module), None)
    if state is None:
        return
    if _torch_private.in_backward():
        # A recomputation enters nothing, as backward follows the record. Checkpoints around it are counted.
        running()
        return
    root = root_of(state)
    if root.unsharded:
        return
    use = root.uses.get(module)
    if use is None or use.here or not root.runs_here:
        what = f"skip() of the {type(module).__name__} around '{state.label}'" if use is None else f"skip('{use.name}')"
        if not root.runs_here:
            wrong = "came outside of a forward. Call it in the module's place"
        elif use is None:
            wrong = "came without an agreement. Call polyshard.agree_on_use before the forward, on every rank"
        else:
            wrong = "came where agree_on_use() was told that this rank uses it. Call the module, or say False"
        raise StateError(f"{what} {wrong} (rank {root.rank}).")
    running(records=root.forward_record.records)
    if use.anywhere:
        _pass_by(module, root)


def _pass_by(module: nn.Module, root: Root) -> None:
    hooks = _hooks_of(module)
    for each in hooks:
        each.enter_for_others()
    for child in module.children():
        use = root.uses.get(child)
        if use is None or use.anywhere:
            _pass_by(child, root)
    for each in reversed(hooks):
        each.leave_for_others()


def _hooks_of(module: nn.Module) -> list[ForwardHooks]:
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, ForwardHooks)]


def _states_in(module: nn.Module) -> Iterator[ModuleState]:
    for each in module.modules():
        state = each.__dict__.get(MODULE_STATE_ATTRIBUTE)
        if state is not None:
            yield state
