"""Checks of optimizers before their first step: updates, groups and states that cannot be right on pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from .. import _torch_private
from ..errors import ConfigError, StateError, UnsupportedError, warn_once
from ..runtime.live_roots import LiveRoots, ParameterLocation
from ..runtime.root import Root
from ..runtime.unit import Unit
from .block_states import refuse_dtensors_in_blocks, warn_of_cut_blocks
from .norms import make_scales_readable

#: States of torch's optimizers that are one number for a parameter, whatever its shape.
NOT_BY_ELEMENT = frozenset({"step", "eta", "mu", "mu_product"})
_ELEMENTWISE = "an optimizer that treats elements alike"
#: Names of ``torch.optim`` whose update of an element depends on other elements, the reason, and what to use instead.
_NOT_ELEMENTWISE = {
    "Muon": ("orthogonalises whole matrices", "polyshard.optim.Muon"),
    "Adafactor": (
        "factors the second moments of whole matrices, and scales by the norm of the whole parameter",
        f"{_ELEMENTWISE}, a subclass of polyshard.optim.WholeTensorOptimizer",
    ),
    "LBFGS": ("takes inner products over all elements", _ELEMENTWISE),
}
_STATE_DICTS = "torch.distributed.checkpoint.state_dict"
_SCALER = "torch.amp.grad_scaler"


class OptimizerCheck:
    """Checks each optimizer once, before its first step after a model was sharded or it got another group.

    Parameter groups and whole shapes alone decide, so that all ranks decide alike.
    """

    def __init__(self, live: LiveRoots) -> None:
        self._live = live
        # With the number of their parameter groups.
        self._passed: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        # Whose parameters each updates.
        self._units: WeakKeyDictionary[torch.optim.Optimizer, Sequence[ref[Unit]]] = WeakKeyDictionary()
        self._guarded: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._warned: WeakSet[torch.optim.Optimizer] = WeakSet()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called before each step of each optimizer.

        Raises:
            UnsupportedError: it computes with whole parameters, one of these has a hook that never fires, or a flat
                parameter stands for some that no rank had a gradient of.
            ConfigError: its parameter groups were split by the shapes of pieces, or its parameters get no gradients.
            StateError: its model holds other values for a while, or its state is of whole parameters.
        """
        if torch.compiler.is_compiling():
            _hidden_look_at(self, optimizer)
            return
        if self._passed.get(optimizer) != len(optimizer.param_groups):
            self._look_at(optimizer)
        make_scales_readable(optimizer)
        for reference in self._live.references:
            root = reference()
            if root is not None:
                root.refuse_unseen_gradients()
            if root is not None and root.unfilled:
                self._refuse_unfilled(optimizer)
            if root is not None and root.active is not None and root.runs_here:
                self._note_outdated(optimizer)
            if root is not None and root.awaits_optimizer:
                # A closure's backward is still to come.
                self._prepare(optimizer, root, reduced=len(args) == 1 and kwargs.get("closure") is None)
        for held in self._units.get(optimizer, ()):
            unit = held()
            if unit is not None:
                unit.steps += 1

    def _refuse_unfilled(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise for a flat parameter that is about to update parameters of which no rank had a gradient.

        By themselves they would have ``.grad`` None, and stay as they are. Here they would decay, go on by their
        momentum, and count a step.
        """
        for group in optimizer.param_groups:
            if type(optimizer) is torch.optim.SGD and not group["momentum"] and not group["weight_decay"]:
                # A gradient of zeros changes as little as none.
                continue
            for found in self._live.find_pieces(group["params"]):
                if found is None or found.slot is not None or found.parameter.grad is None:
                    continue
                unit, unfilled = found.unit, found.unit.gradients.unfilled
                if unfilled:
                    names = [unit.parameters[index].names[0] for index in sorted(unfilled)]
                    listed = ", ".join(f"'{name}'" for name in names[:4])
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} was to update the flat parameter of unit '{unit.name}', but no "
                        f"rank had a gradient of {listed}{' and others' if len(names) > 4 else ''} in it (rank "
                        f"{found.root.rank}): it would move what it leaves alone on an unsharded model. Give it "
                        "model.parameters() instead of polyshard.flat_parameters(model), or freeze what the model "
                        "does not use before sharding."
                    )

    def forget(self) -> None:
        """Check all optimizers again: they may hold parameters of a model that was sharded now."""
        self._passed.clear()

    def _prepare(self, optimizer: torch.optim.Optimizer, root: Root, *, reduced: bool) -> None:
        """Let ``root`` end what its backwards left, where the optimizer has parameters of it.

        ``reduced``: whether these parameters' gradients must be reduced by now.
        """
        # Whether or not they have gradients, or elements on this rank: all ranks decide alike.
        own = [each for each in self._found(optimizer) if each.root is root]
        if own:
            if reduced:
                _refuse_unreduced(optimizer, own)
            root.settle()

    def _note_outdated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that the parameters that forwards have gathered are older than the masters from now on."""
        for root in {each.root for each in self._found(optimizer) if each.root.runs_here and not each.unit.permanent}:
            root.outdated = True
            # Whichever of its units the optimizer has on this rank.
            root.outdate()

    def _found(self, optimizer: torch.optim.Optimizer) -> Iterator[ParameterLocation]:
        """Its parameters of sharded models."""
        located = (each for group in optimizer.param_groups for each in self._live.find(group["params"]))
        return (each for each in located if each is not None)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        for each in self._found(optimizer):
            if each.root.replaced is not None:
                context, values = each.root.replaced
                raise StateError(
                    f"{type(optimizer).__name__} was to update '{each.name}' inside of {context} (rank "
                    f"{each.root.rank}), where the model holds its {values}. Leave it first."
                )
        for group in optimizer.param_groups:
            refuse_dtensors_in_blocks(optimizer, group["params"], self._live.find(group["params"]))
        found = [
            [each for each in self._live.find_pieces(group["params"]) if each is not None]
            for group in optimizer.param_groups
        ]
        _refuse_dead_hooks(each for group in found for each in group)
        first_look = optimizer not in self._warned
        self._warned.add(optimizer)
        if first_look:
            _warn_of_underflow(optimizer, found)
        groups = [[each for each in group if each.unit.ranks.owner is not None] for group in found]
        if any(groups):
            _refuse_whole_matrices(optimizer, groups)
            _refuse_replaced(optimizer, groups)
            _refuse_whole_states(optimizer, groups)
            _refuse_split_of_pieces(optimizer, groups)
            if first_look:
                _warn_of_lost_decay(optimizer, groups)
                warn_of_cut_blocks(optimizer, groups)
            answered = all(each.unit.answers_state_dicts for group in groups for each in group)
            if optimizer not in self._guarded and not answered:
                self._guarded.add(optimizer)
                # That module makes the first step itself, to create a state.
                guard = _StateGuard(fresh=_asked_for_states())
                optimizer.register_state_dict_pre_hook(guard.refuse)
                optimizer.register_load_state_dict_pre_hook(guard.refuse)
        self._units[optimizer] = list(map(ref, {each.unit for each in self._found(optimizer)}))
        self._passed[optimizer] = len(optimizer.param_groups)


@_torch_private.hidden_from_compile
def _hidden_look_at(check: OptimizerCheck, optimizer: torch.optim.Optimizer) -> None:
    check._look_at(optimizer)
    check._refuse_unfilled(optimizer)


class _StateGuard:
    """Refuses ``torch.distributed.checkpoint.state_dict`` the state of one optimizer, which it would take for whole."""

    def __init__(self, fresh: bool) -> None:
        self._fresh = fresh

    def refuse(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called before ``state_dict`` and before ``load_state_dict``. Raises StateError: that module calls it."""
        if not _asked_for_states():
            self._fresh = False
            return
        if self._fresh:
            optimizer.state.clear()
        raise StateError(
            f"{_STATE_DICTS} takes the state of {type(optimizer).__name__} for that of whole parameters, but it is of "
            "pieces of sharded ones. Save and load with polyshard.checkpoint, or optimizer.state_dict() on each rank "
            "for its pieces."
        )


def _asked_for_states() -> bool:
    return _torch_private.called_from(_STATE_DICTS)


def _refuse_unreduced(optimizer: torch.optim.Optimizer, found: Iterable[ParameterLocation]) -> None:
    """Raise where every gradient of a parameter waits for a backward that synchronises: the step would pass it over."""
    for each in found:
        if each.unit.gradients.unreduced and each.parameter.grad is None:
            raise StateError(
                f"{type(optimizer).__name__} was to update '{each.name}' (rank {each.root.rank}), whose gradients were "
                "computed without synchronisation and are not reduced: it would stay as it is. Leave no_sync() for the "
                "last backward before a step."
            )


def _refuse_dead_hooks(found: Iterable[ParameterLocation]) -> None:
    for each in found:
        if each.slot is None or each.unit.resident or each.unit in each.root.unsharded:
            continue
        original = each.unit.parameters[each.slot].original
        if _torch_private.tensor_hooks(original):
            raise UnsupportedError(
                f"'{each.name}' has a hook from register_hook (rank {each.root.rank}), which a backward never calls: "
                "autograd sees the gathered parameter. Remove it, and use register_post_accumulate_grad_hook, which "
                "is called with the gradient of this rank's piece."
            )


def _warn_of_underflow(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterLocation]]) -> None:
    scaled = [
        each
        for group in groups
        for each in group
        # Rank 0 alone warns.
        if each.root.rank == 0 and each.unit.trainable and each.unit.caster.capabilities.loss_scaling
    ]
    if scaled and not _torch_private.called_from(_SCALER):
        dtypes = ((each, each.unit.dtypes) for each in scaled)
        first = next((each for each, of in dtypes if torch.float16 in (of.compute, of.wire, of.reduce)), scaled[0])
        warn_once(
            f"{type(optimizer).__name__} steps without a torch.amp.GradScaler, and gradients of '{first.name}' pass "
            "through a dtype in which small ones become zero. Scale the loss, and step by "
            "scaler.step(optimizer); where the loss is scaled by something else, filter this warning.",
            rank=0,
        )


def _refuse_whole_matrices(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterLocation]]) -> None:
    for name, (does, instead) in _NOT_ELEMENTWISE.items():
        kind = getattr(torch.optim, name, None)
        if kind is not None and isinstance(optimizer, kind):
            first = next(each for group in groups for each in group)
            raise UnsupportedError(
                f"torch.optim.{name} {does}, and of '{first.name}' each rank holds a piece (rank {first.root.rank}). "
                f"Use {instead}, strategy='no_shard', or pass what it trains in ignored_parameters, and average its "
                "gradients over ranks."
            )


def _refuse_replaced(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterLocation]]) -> None:
    for group in groups:
        for each in group:
            if each.slot is not None and each.unit.flat is not None and each.unit.trainable:
                raise ConfigError(
                    f"{type(optimizer).__name__} holds '{each.name}', whose gradient arrives in the flat parameter "
                    f"of unit '{each.unit.name}' (rank {each.root.rank}): it would never be updated. Give the "
                    "optimizer what polyshard.flat_parameters returned."
                )


def _refuse_whole_states(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterLocation]]) -> None:
    if not type(optimizer).__module__.startswith("torch.optim."):
        # Other optimizers may keep state of whole parameters.
        return
    for group in groups:
        for each in group:
            if each.slot is None:
                continue
            original, whole = each.unit.parameters[each.slot].original, each.unit.layout.slots[each.slot].shape
            for name, value in optimizer.state.get(original, {}).items():
                if not whole and name in NOT_BY_ELEMENT:
                    continue
                if isinstance(value, torch.Tensor) and tuple(value.shape) == whole != tuple(original.shape):
                    raise StateError(
                        f"{type(optimizer).__name__} has '{name}' of the whole '{each.name}', {whole}, of which this "
                        f"rank holds a piece (rank {each.root.rank}): it stepped before the model was sharded. Shard "
                        "first, or load its state with polyshard.checkpoint."
                    )


def _refuse_split_of_pieces(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterLocation]]) -> None:
    """Raise for groups that were chosen by ``p.ndim >= 2`` after sharding, when no piece has two dimensions; warn where
    an empty one may be meant so.
    """
    dims = [
        [len(each.unit.layout.slots[each.slot].shape) for each in group if each.slot is not None] for group in groups
    ]
    matrices = [index for index, group in enumerate(dims) if any(ndim >= 2 for ndim in group)]
    if not matrices:
        return
    given = optimizer.param_groups
    mixed = [index for index in matrices if any(ndim < 2 for ndim in dims[index])]
    decays = [bool(group.get("weight_decay", 0)) for group in given]
    for index, group in enumerate(given):
        empty = not group["params"] and not _harmless(group, [given[other] for other in matrices])
        loses_decay = decays[index] and not any(decays[other] for other in matrices)
        if index in matrices or not (mixed or empty) or not (loses_decay or (empty and mixed)):
            continue
        there = (mixed or matrices)[0]
        first = next(
            each
            for each in groups[there]
            if each.slot is not None and len(each.unit.layout.slots[each.slot].shape) >= 2
        )
        assert first.slot is not None
        shapes = (
            f"The parameter groups of {type(optimizer).__name__} look as if they were chosen by the shapes of pieces "
            f"(rank {first.root.rank}): group {index} {'is empty' if empty else 'decays and holds no sharded matrix'}, "
            f"and '{first.name}', of shape {first.unit.layout.slots[first.slot].shape}, is in group {there}. A "
            "sharded parameter may be 1-D: choose by polyshard.placement(parameter).shape, by name, or before "
            "sharding. If it is meant so, leave an empty group out, and give matrices a group of their own."
        )
        if loses_decay:
            raise ConfigError(shapes)
        # A group for what is frozen, or for names that this model has not, is empty too.
        warn_once(shapes, rank=first.root.rank)


def _harmless(empty: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a group without parameters may have been chosen by names or whole shapes: a trainer makes a group that
    decays less for biases and norms, also of a model without any. A group that was meant for matrices, and lost them
    by their pieces' shapes, has a setting of its own, or decays most.
    """
    aside = ("params", "param_names", "weight_decay")
    settings = {key: value for key, value in empty.items() if key not in aside}
    return all(
        settings == {key: value for key, value in other.items() if key not in aside}
        and empty.get("weight_decay", 0) <= other.get("weight_decay", 0)
        for other in others
    )


def _warn_of_lost_decay(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[ParameterLocation]]) -> None:
    """Warn where no group decays, as after ``p.ndim >= 2`` whose empty group was left out or never made."""
    given = optimizer.param_groups
    if not optimizer.defaults.get("weight_decay") or any(group.get("weight_decay") for group in given):
        return
    flattened = next((each for group in groups for each in group if _dims(each) >= 2 > each.parameter.ndim), None)
    alone = len(given) > 2 and all(len(group["params"]) == 1 for group in given)
    mixed = any(len({_dims(each) >= 2 for each in group}) > 1 for group in groups)
    if flattened is not None and (mixed or alone):
        warn_once(
            f"No parameter group of {type(optimizer).__name__} decays, and '{flattened.name}' is a matrix of which "
            f"each rank holds a 1-D piece: were groups chosen by p.ndim? Choose by "
            "polyshard.placement(parameter).shape, by name, or with polyshard.optim.decay_groups. If nothing is to "
            "decay, give the optimizer itself weight_decay=0.",
            rank=flattened.root.rank,
        )


def _dims(found: ParameterLocation) -> int:
    """Dimensions of the whole parameter; 1 of a flat one."""
    return 1 if found.slot is None else len(found.unit.layout.slots[found.slot].shape)
