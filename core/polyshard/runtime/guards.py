"""Guards against uses of modules that would take shards of parameters for whole ones, or train what nobody reduces.

``RegistrationGuard``: parameters registered after the model was sharded. Nobody reduces their gradients: each rank
would train its own, and a checkpoint would keep rank 0's. Torch calls hooks where a module gets a parameter or another
module, so that a step pays one look at a flag. Writing into a module's dicts directly calls no hook; so reads and
writes of a model's state look at all modules. The next forward sorts the new parameters, since many are harmless:
modules that moved, modules without parameters, new values under an old name, modules that were taken out again, frozen
parameters. State keeps the names of when the model was sharded, so it refuses moved modules where a name would be
another parameter's.

The others refuse backwards whose gradients nobody would reduce, or of other values than the parameters'.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from .. import _torch_private
from ..errors import (
    AlreadyShardedError,
    ParameterChangedError,
    RankMismatchError,
    StateError,
)
from ..planning.plan import MODULE_STATE_ATTRIBUTE, ManagedParameter
from .module_state import ModuleState
from .peers import refuse_different_batches
from .states import Phase, UnitState
from .unit import Unit

if TYPE_CHECKING:
    from .root import Root


class RegistrationGuard:
    """Remembers the parameters that a model had when it was sharded, and finds others."""

    def __init__(
        self,
        root: Root,
        module_states: Sequence[ModuleState],
        ignored_modules: Collection[nn.Module],
        inner: Iterable[RegistrationGuard],
    ) -> None:
        """``ignored_modules``: the user's own, with all inside them. ``inner``: of models that this one takes over."""
        self._root = ref(root)
        self._rank = root.rank
        self._outermost = module_states[0].module
        self._stages = frozenset(module_states)
        self._units = [unit for module_state in module_states for unit in module_state.units]
        self._alone = root.collectives.world_size == 1
        self._ignored = WeakSet(ignored_modules)
        # Names of the parameters that modules had when they were sharded.
        self._had: WeakKeyDictionary[nn.Module, list[str]] = WeakKeyDictionary()
        # New parameters by name, found when all modules were looked at last.
        self._new: dict[str, nn.Parameter] = {}
        self._changed = False
        for each in inner:
            self._ignored.update(each._ignored)
            self._had.update(each._had)
            self._changed |= each._changed or bool(each._new)
        _install()
        myself = ref(self)
        for _, module in self._modules():
            _guards[module] = myself
            if module not in self._had:
                self._had[module] = [key for key, parameter in module._parameters.items() if parameter is not None]
        if self._changed:
            self.note()

    @cached_property
    def _managed(self) -> dict[int, ManagedParameter]:
        # Made at first use: sharding a model is then as fast as it can be.
        return {id(each.original): each for unit in self._units for each in unit.parameters}

    @cached_property
    def _sites(self) -> dict[tuple[nn.Module, str], ManagedParameter]:
        return {site: each for each in self._managed.values() for site in each.sites}

    def parameters_replaced(self) -> None:
        """Other objects are the parameters of units now."""
        for known in ("_managed", "_sites"):
            self.__dict__.pop(known, None)

    def note(self) -> None:
        """Note that something was registered in one of the modules."""
        self._changed = True
        root = self._root()
        if root is not None:
            root.registered = True

    def refuse_ddp(self) -> None:
        """Raise AlreadyShardedError where ranks share the model: ``DistributedDataParallel`` compares and broadcasts
        whole parameters, and would wait for ranks whose shards have other sizes.
        """
        if not self._alone:
            raise AlreadyShardedError(
                f"DistributedDataParallel got a module that is sharded (a {type(self._outermost).__name__}, rank "
                f"{self._rank}), whose gradients are averaged over ranks already. Leave it out; strategy='no_shard' "
                "does what it does."
            )

    def refuse_ties(self) -> None:
        """Raise for sharded parameters that were tied to others. Called before changed values are taken over.

        Raises ParameterChangedError: naming both.
        """
        # Whole ones are other objects, each in the places of one parameter.
        known = dict(self._managed)
        for (module, key), parameter in self._sites.items():
            held = module._parameters.get(key)
            if held is not None and known.setdefault(id(held), parameter) is not parameter:
                self._refuse_tie(parameter.names[0], known[id(held)])

    def refuse_new(self, *, trains: bool, anew: bool = False) -> None:
        """Raise for new parameters that are trained. ``anew``: look at all modules, registered or not.

        A parameter with a hook behind its gradient's accumulation is the program's, which averages the gradient there.
        ``trains``: whether gradients may follow; new parameters stay noted where not.

        Raises ParameterChangedError: naming them.
        """
        trained = trains and any(parameter.requires_grad for parameter in self._new.values())
        # Removing a parameter or a module calls no hook.
        if self._changed or anew or trained:
            self._new = dict(self._find_new())
            self._changed = False
        root = self._root()
        if root is not None:
            root.registered = bool(self._new)
        names = [name for name, parameter in self._new.items() if parameter.requires_grad] if trains else []
        if names:
            # There may be thousands.
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            listed = ", ".join(f"'{name}'" for name in names[:4])
            raise ParameterChangedError(
                f"{listed}{more} came into the model after it was sharded (rank {self._rank}): gradients there would "
                "be each rank's own, and a checkpoint would keep rank 0's values. Add and replace modules before "
                "sharding; give new values to parameters that are there (load_state_dict); or give all ranks the same "
                "values of what came, and freeze it, with requires_grad_(False), or let a hook average each gradient "
                "over ranks (register_post_accumulate_grad_hook)."
            )

    def refuse_moved(self) -> None:
        """Raise for parameters under names that others had when the model was sharded, which are the names in state.

        Raises ParameterChangedError: naming one.
        """
        names = {name: parameter for parameter in self._managed.values() for name in parameter.names}
        for prefix, module in self._modules():
            for key in module._parameters:
                parameter = self._sites.get((module, key))
                name = _joined(prefix, key)
                if parameter is not None and names.get(name, parameter) is not parameter:
                    raise ParameterChangedError(
                        f"'{name}' is what '{parameter.names[0]}' was when the model was sharded (rank {self._rank}): "
                        "in a state dict or a checkpoint one would stand under the other's name. Move and remove "
                        "modules before sharding, or put them back before state is read or written."
                    )

    def _find_new(self) -> Iterator[tuple[str, nn.Parameter]]:
        myself = ref(self)
        for prefix, module in self._modules():
            # A new module without parameters may get some later.
            _guards[module] = myself
            had = self._had.get(module, ())
            for key, parameter in module._parameters.items():
                if parameter is None or (module, key) in self._sites or key in had:
                    continue
                name = _joined(prefix, key)
                managed = self._managed.get(id(parameter))
                if managed is not None:
                    self._refuse_tie(name, managed)
                if managed is None and not self._alone and not _torch_private.post_accumulate_grad_hooks(parameter):
                    yield name, parameter

    def _refuse_tie(self, name: str, other: ManagedParameter) -> None:
        raise ParameterChangedError(
            f"'{name}' is '{other.names[0]}' now (rank {self._rank}), which is sharded under its own names alone: the "
            "two would go apart. Tie parameters before sharding."
        )

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules, once, by name."""
        seen = set(self._ignored)
        waiting = [("", self._outermost)]
        while waiting:
            prefix, module = waiting.pop()
            module_state = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
            # A module that was sharded by itself has a guard of its own.
            if module in seen or (module_state is not None and module_state not in self._stages):
                continue
            seen.add(module)
            yield prefix, module
            for key, child in reversed(module._modules.items()):
                # An empty container is false.
                if child is not None:
                    waiting.append((_joined(prefix, key), child))


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


# Weak on both sides: the latter leads to the former.
_guards: WeakKeyDictionary[nn.Module, ref[RegistrationGuard]] = WeakKeyDictionary()
_installing = threading.Lock()
_installed: list[RemovableHandle] = []


def _install() -> None:
    """Register hooks on torch's registrations, once in a process, and never by an import."""
    with _installing:
        if not _installed:
            _installed.append(register_module_parameter_registration_hook(_registered))
            _installed.append(register_module_module_registration_hook(_registered))


def _registered(module: nn.Module, name: str, value: object) -> None:
    if torch.compiler.is_compiling():
        return
    if isinstance(module, nn.parallel.DistributedDataParallel) and isinstance(value, nn.Module):
        for each in value.modules():
            if each in _guards and (inside := _guards[each]()) is not None:
                inside.refuse_ddp()
        return
    found = _guards.get(module)
    guard = None if found is None else found()
    if guard is not None:
        guard.note()


def compare_batch(root: Root, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Compare the arguments of the outermost forward among the ranks that must see the same, in the first step.

    Raises RankMismatchError: they differ; on all of these ranks. Others are told.
    """
    group, root.same_batch = root.same_batch, None
    if group is None or not root.audit.compares or root.audit.done or root.phase is not Phase.IDLE:
        return
    with root.meeting("comparison of the batch", (group,)):
        try:
            refuse_different_batches(group, root.rank, type(module).__name__, args, kwargs)
        except RankMismatchError as error:
            root.recorder.post_error(error)
            # Compared again, where the program goes on with another one.
            root.same_batch = group
            raise


def refuse_inner_gradients(root: Root, pending: Sequence[Unit]) -> None:
    """Raise for gradients of ``pending`` that came inside of a forward, and that nobody may reduce. They are dropped.

    Raises StateError: they are gradients of averages or of outdated values, or are to be differentiated again.
    """
    try:
        refuse_replaced(root)
        if root.outdated:
            refuse_outdated(root)
        for unit in pending:
            for leaf, parameter in zip(unit.gathered.leaves, unit.parameters, strict=True):
                if leaf.grad is not None and leaf.grad.requires_grad:
                    raise gradients_without_graph(parameter.names[0], unit.ranks.world.rank)
    except StateError:
        for unit in pending:
            unit.discard_gradients()
        raise


def gradients_without_graph(name: str, rank: int) -> StateError:
    """The error for a backward that would give sharded parameters gradients with a graph; it came to ``name``."""
    return StateError(
        f"backward(create_graph=True) reached '{name}' on rank {rank}: gradients of sharded parameters are reduced, "
        "and have no graph. Differentiate by torch.autograd.grad(outputs, inputs, create_graph=True), and call "
        "backward() on what you compute of that."
    )


def refuse_unseen_gradients(root: Root) -> None:
    """Raise for gradients of a backward that passed no output of the last forward: nobody reduced them.

    Looks where no other backward came since. The gradients are dropped. Those that wait for a later reduction may
    be of an earlier forward: schedules of pipelines compute gradients of weights behind those of activations.

    Raises StateError: naming a unit.
    """
    looks = root.unfollowed and root.synchronises
    pending = [unit for unit in root.units if unit.module_state.synchronises and unit.gathered.pending] if looks else ()
    root.unfollowed = False
    for unit in pending:
        unit.discard_gradients()
    if pending:
        raise StateError(
            f"A backward gave '{pending[0].name}' and {len(pending) - 1} other units gradients without passing an "
            f"output of the model (rank {root.rank}), so nobody reduced them. Return what is differentiated from "
            "the model's forward."
        )


def refuse_replaced(root: Root) -> None:
    """Raise StateError for a backward where masters hold other values than the trained ones."""
    if root.replaced is not None:
        context, values = root.replaced
        raise StateError(
            f"A backward inside of {context} would give the parameters gradients of their {values} (rank "
            f"{root.rank}). Train outside of it; torch.autograd.grad of inputs is served."
        )


def refuse_released(root: Root) -> None:
    """Raise StateError where gradients of inputs come first, and those of weights that are not there later."""
    if torch.is_grad_enabled() or _torch_private.may_recompute_reentrantly():
        return
    for module_state in root.module_states:
        waits = module_state.awaits_backward and not (module_state.synchronises or module_state.releases_after_backward)
        if waits and any(
            unit.trainable and unit.gathered.state is not UnitState.UNSHARDED for unit in module_state.units
        ):
            raise StateError(
                f"A backward computes gradients of inputs alone, as schedules of pipelines do before those of "
                f"weights, and '{module_state.label}' was released after its forward (rank {root.rank}): its "
                "weights would get none. Give it reshard_after_forward=False, or another schedule."
            )


def refuse_outdated(root: Root) -> NoReturn:
    """Raise StateError: what is gathered has the values from before a step inside of this forward."""
    label = "(root)" if root.active is None else root.active.label
    raise StateError(
        f"A backward came behind an optimizer's step inside of one forward of '{label}' (rank "
        f"{root.rank}): what is gathered there has the values from before the step. Let each step be a call of its "
        "own: name the method that makes one step with polyshard.register_forward_method, and not a loop over them."
    )
