"""Checks of optimizers before their first step: updates that cannot be right on shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

from .. import _torch_private
from ..errors import ConfigError, StateError, UnsupportedError, warn_once
from ..runtime.backward_step import steps_a_part
from ..runtime.guards import refuse_unseen_gradients
from ..runtime.live_roots import LiveRoots, ParameterLocation
from ..runtime.root import Root
from ..runtime.unit import Unit
from .block_states import refuse_plain_kernels, warn_of_cut_blocks
from .norms import make_scales_readable
from .scaler import refuse_torch_scaler

#: States of torch's optimizers that are one number for a parameter, whatever its shape.
NOT_BY_ELEMENT = frozenset({"step", "eta", "mu", "mu_product"})


class OptimizerCheck:
    """Checks each optimizer once, before its first step after a model was sharded or it got another group.

    What all ranks know alike decides.
    """

    def __init__(self, live: LiveRoots) -> None:
        self._live = live
        # With the number of their parameter groups.
        self._passed: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        # Whose parameters each updates.
        self._units: WeakKeyDictionary[torch.optim.Optimizer, Sequence[ref[Unit]]] = WeakKeyDictionary()
        self._warned: WeakSet[torch.optim.Optimizer] = WeakSet()

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called before each step of each optimizer.

        Raises:
            UnsupportedError: it cannot step ``DTensor``s, one of these has a hook that never fires, or a flat
                parameter stands for some that no rank had a gradient of.
            ConfigError: its parameters get no gradients.
            StateError: its model holds other values for a while.
        """
        if torch.compiler.is_compiling():
            _hidden_look_at(self, optimizer)
            return
        if steps_a_part(optimizer):
            # That of the whole optimizer is looked at.
            return
        if self._passed.get(optimizer) != len(optimizer.param_groups):
            self._look_at(optimizer)
        make_scales_readable(optimizer)
        units = [unit for held in self._units.get(optimizer, ()) if (unit := held()) is not None]
        # Of its own models alone: ranks may be threads, and each is to be told.
        for each in {unit.root for unit in units}:
            refuse_unseen_gradients(each)
            each.stepped = True
        for reference in self._live.references:
            root = reference()
            if root is not None and root.unfilled:
                self._refuse_unfilled(optimizer)
            if root is not None and root.active is not None and root.runs_here:
                root.end_inner_backward()
                # Parameters that forwards have gathered are older than the masters from now on.
                for stepped in {each.root for each in self._found(optimizer) if not each.unit.permanent}:
                    if stepped.runs_here:
                        stepped.outdated = True
                        # Whichever of its units the optimizer has on this rank.
                        stepped.outdate()
            if root is not None and root.awaits_optimizer:
                # A closure's backward is still to come.
                self._prepare(optimizer, root, reduced=len(args) == 1 and kwargs.get("closure") is None)
        for unit in units:
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
            for found in self._live.find(group["params"]):
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

    def _found(self, optimizer: torch.optim.Optimizer) -> Iterator[ParameterLocation]:
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
        found = list(self._found(optimizer))
        refuse_plain_kernels(optimizer, found)
        scaler = _torch_private.stepping_scaler()
        if scaler is not None:
            refuse_torch_scaler(scaler, optimizer, found)
        # A drop-in is as silent as torch is.
        own = [each for each in found if not each.unit.answers_state_dicts]
        _refuse_dead_hooks(own)
        first_look = optimizer not in self._warned
        self._warned.add(optimizer)
        if first_look:
            _warn_of_underflow(optimizer, own)
        cut = [each for each in found if each.unit.ranks.owner is not None]
        if cut:
            _refuse_adafactor(optimizer, cut[0])
            _refuse_replaced(optimizer, cut)
            if first_look:
                warn_of_cut_blocks(optimizer, cut)
        self._units[optimizer] = list(map(ref, {each.unit for each in found}))
        self._passed[optimizer] = len(optimizer.param_groups)


@_torch_private.hidden_from_compile
def _hidden_look_at(check: OptimizerCheck, optimizer: torch.optim.Optimizer) -> None:
    check._look_at(optimizer)
    check._refuse_unfilled(optimizer)


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
        if each.slot is None or each.unit in each.root.unsharded:
            continue
        original = each.unit.parameters[each.slot].original
        if _torch_private.tensor_hooks(original):
            raise UnsupportedError(
                f"'{each.name}' has a hook from register_hook (rank {each.root.rank}), which a backward never calls: "
                "autograd sees the gathered parameter. Remove it, and use register_post_accumulate_grad_hook, which "
                "is called with the reduced gradient, a DTensor."
            )


def _warn_of_underflow(optimizer: torch.optim.Optimizer, found: Iterable[ParameterLocation]) -> None:
    scaled = [
        each
        for each in found
        # Rank 0 alone warns.
        if each.root.rank == 0 and each.unit.trainable and each.unit.precision.capabilities.loss_scaling
    ]
    if scaled and _torch_private.stepping_scaler() is None:
        dtypes = ((each, each.unit.dtypes) for each in scaled)
        first = next(
            (each for each, of in dtypes if torch.float16 in (of.compute, of.communication, of.reduce)), scaled[0]
        )
        warn_once(
            f"{type(optimizer).__name__} steps without a torch.amp.GradScaler, and gradients of '{first.name}' pass "
            "through a dtype in which small ones become zero. Scale the loss, and step by "
            "scaler.step(optimizer); where the loss is scaled by something else, filter this warning.",
            rank=0,
        )


def _refuse_adafactor(optimizer: torch.optim.Optimizer, first: ParameterLocation) -> None:
    if isinstance(optimizer, torch.optim.Adafactor):
        raise UnsupportedError(
            f"torch.optim.Adafactor cannot step the DTensor '{first.name}' (rank {first.root.rank}): torch has no way "
            "to change the norm of one in place. Use another optimizer, such as a subclass of "
            "polyshard.optim.WholeTensorOptimizer (docs/optimizers.md has Adafactor), or strategy='no_shard'."
        )


def _refuse_replaced(optimizer: torch.optim.Optimizer, found: Iterable[ParameterLocation]) -> None:
    for each in found:
        if each.slot is not None and each.unit.held.flat is not None and each.unit.trainable:
            raise ConfigError(
                f"{type(optimizer).__name__} holds '{each.name}', whose gradient arrives in the flat parameter "
                f"of unit '{each.unit.name}' (rank {each.root.rank}): it would never be updated. Give the "
                "optimizer what polyshard.flat_parameters returned."
            )
