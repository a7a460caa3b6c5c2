"""What an optimizer's keys stand for: parameters of the model under their own names, flat or not."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from polyshard.errors import ConfigAssertionError, ConfigError, ConfigTypeError
from polyshard.planning.layout import FlatLayout
from torch import nn

from ._common_utils import _get_param_to_fqns, clean_tensor_name
from ._flat_param import FlatParamHandle
from ._state import FSDPInstance
from ._traversal_utils import _get_fsdp_states_with_modules
from ._unit import FlatUnit

#: What an optimizer's state dict names a parameter by: a position, or a name in optimizers that are keyed by names.
Key = int | str
#: In the place of a parameter's index: the flat parameter, which stands for all of them.
WHOLE_FLAT = -1


class OptimStateKeyError(ConfigError, KeyError):
    """A parameter that an optimizer, a state dict and a model do not agree on."""

    def __str__(self) -> str:
        # KeyError would show the message quoted, with its line breaks escaped.
        return str(self.args[0])


@dataclass(frozen=True, eq=False, slots=True)
class Flattened:
    """One flat parameter of the model, under the names that the unwrapped model has."""

    instance: FSDPInstance
    handle: FlatParamHandle
    names: tuple[str, ...]
    """Of each parameter inside, the first fully-qualified name."""
    aliases: tuple[tuple[str, ...], ...]
    """Of each parameter inside, every fully-qualified name."""

    @property
    def unit(self) -> FlatUnit:
        """The engine's unit."""
        assert self.instance._flat_unit is not None
        return self.instance._flat_unit

    @property
    def layout(self) -> FlatLayout:
        """Where each parameter lies."""
        return self.handle.layout

    @property
    def is_cut(self) -> bool:
        """Whether each rank holds a part only."""
        return self.unit.grid.shard is not None

    @property
    def device(self) -> torch.device:
        """Where collectives on it run."""
        return self.unit.spec.device

    def owners(self, slot: int) -> list[int]:
        """The ranks whose shard has elements of a parameter; all ranks for a parameter without elements."""
        layout, here = self.layout, self.layout.slots[slot]
        if not here.numel:
            return list(range(layout.world_size))
        return list(range(here.offset // layout.shard_numel, (here.end - 1) // layout.shard_numel + 1))


class ModelNames:
    """The parameters of ``model`` by name: those in flat parameters, and those that FSDP leaves alone."""

    def __init__(self, model: nn.Module) -> None:
        places = {module: name for name, module in model.named_modules()}
        self.flattened: list[Flattened] = []
        #: Of a flat parameter (``WHOLE_FLAT``), or of a parameter that views one, where it belongs.
        self.managed: dict[nn.Parameter, tuple[Flattened, int]] = {}
        #: The names that stand for a parameter: all that a flat parameter holds, or its own.
        self.names: dict[nn.Parameter, tuple[str, ...]] = {}
        #: Every name of a parameter, to the first of them.
        self.first: dict[str, str] = {}
        for instance, module in zip(*_get_fsdp_states_with_modules(model), strict=True):
            if instance._handle is not None:
                self._add_handle(instance, instance._handle, places[module])
        #: The parameters that FSDP does not manage.
        self.plain: dict[str, nn.Parameter] = {}
        for parameter, names in _get_param_to_fqns(model, dedup_shared_params=False).items():
            if parameter not in self.names and names[0] not in self.first:
                self.plain[names[0]] = parameter
                self.names[parameter] = (names[0],)
                self.first.update(dict.fromkeys(names, names[0]))
        #: The name under which the model itself shows a parameter, wrappers' prefixes included.
        self.registered = {parameter: name for name, parameter in model.named_parameters()}

    @property
    def device(self) -> torch.device:
        """Where objects that describe state travel through."""
        return self.flattened[0].instance.compute_device if self.flattened else torch.device("cpu")

    @property
    def rank(self) -> int:
        """This process's rank, for messages."""
        return self.flattened[0].instance.rank if self.flattened else 0

    def _add_handle(self, instance: FSDPInstance, handle: FlatParamHandle, place: str) -> None:
        prefix = f"{place}." if place else ""
        aliases = tuple(
            tuple(dict.fromkeys(clean_tensor_name(f"{prefix}{name}") for name in each.names))
            for each in handle.parameters
        )
        found = Flattened(instance, handle, tuple(names[0] for names in aliases), aliases)
        self.flattened.append(found)
        for names in aliases:
            self.first.update(dict.fromkeys(names, names[0]))
        if handle.use_orig_params:
            for index, each in enumerate(handle.parameters):
                self.managed[each.original] = found, index
                self.names[each.original] = (found.names[index],)
        else:
            self.managed[handle.flat_param] = found, WHOLE_FLAT
            self.names[handle.flat_param] = found.names

    def names_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The names that ``parameter`` stands for.

        Raises:
            OptimStateKeyError: the model does not have it.
        """
        names = self.names.get(parameter)
        if names is None:
            raise OptimStateKeyError(
                f"Can't find a parameter of shape {tuple(parameter.shape)} from {list(self.first)}: the optimizer has "
                f"it, and the model has not (rank {self.rank}). Construct the optimizer after the model was wrapped, "
                "or wrap with use_orig_params=True."
            )
        return names


def keys_of(optim: torch.optim.Optimizer, names: ModelNames, *, named: bool) -> dict[Key, nn.Parameter]:
    """The keys of ``optim``'s state dict: positions, or with ``named`` the names under which the model shows them.

    Raises:
        OptimStateKeyError: the model does not have one of the parameters.
    """
    parameters = [parameter for group in optim.param_groups for parameter in group["params"]]
    for parameter in parameters:
        names.names_of(parameter)
    if not named:
        return dict(enumerate(parameters))
    keys: dict[Key, nn.Parameter] = {}
    for parameter in parameters:
        key = names.registered.get(parameter)
        if key is None:
            raise OptimStateKeyError(
                f"Can't find {names.names_of(parameter)[0]} from {list(names.registered.values())} (rank "
                f"{names.rank}). Leave summon_full_params before the optimizer's state is read."
            )
        keys[key] = parameter
    return keys


def keys_of_input(
    model: nn.Module, optim_input: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]] | None
) -> dict[Key, nn.Parameter]:
    """The keys that an optimizer gives to ``optim_input``, what it was constructed with; None: ``model.parameters()``.

    Raises:
        ConfigTypeError: (a ``TypeError``) neither an iterable of tensors nor one of dicts.
        ConfigError: (a ``ValueError``) nothing in it.
        ConfigAssertionError: (an ``AssertionError``) a group without parameters.
    """
    if optim_input is None:
        return dict(enumerate(model.parameters()))
    try:
        given: list[Any] = list(optim_input)
    except TypeError as error:
        raise ConfigTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}. Pass what the "
            "optimizer was constructed with, or leave it out and pass optim."
        ) from error
    if not given:
        raise ConfigError(
            "Optimizer input should not be empty. Pass what the optimizer was constructed with, or leave it out and "
            "pass optim."
        )
    if all(isinstance(each, torch.Tensor) for each in given):
        return dict(enumerate(given))
    if not all(isinstance(each, dict) for each in given):
        raise ConfigTypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, and of one of the two: got "
            f"{sorted({type(each).__name__ for each in given})}."
        )
    for index, each in enumerate(given):
        if "params" not in each:
            raise ConfigAssertionError(
                'A parameter group should map "params" to a list of the parameters in the group, and group '
                f"{index} has {list(each)}."
            )
    return dict(enumerate(parameter for each in given for parameter in each["params"]))


def is_keyed_by_name(optim_state_dict: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer is keyed by names: none that torch has, but some of other packages."""
    key = next(iter(optim_state_dict.get("state", ())), None)
    return isinstance(key, str)


def ordered_groups(
    saved: Sequence[Mapping[str, Any]], keys: Sequence[Sequence[Key]], optim: torch.optim.Optimizer | None
) -> list[tuple[Mapping[str, Any], Sequence[Key]]]:
    """Saved parameter groups with the keys in each, in the order in which ``optim`` has groups of the same parameters.

    ``load_state_dict`` matches groups, and parameters inside them, by position alone.
    """
    pairs = list(zip(saved, keys, strict=True))
    if optim is None:
        return pairs
    start, wanted = 0, []
    for group in optim.param_groups:
        stop = start + len(group["params"])
        wanted.append(frozenset[Hashable](range(start, stop)))
        start = stop
    found = {frozenset[Hashable](each): (group, each) for group, each in pairs}
    if len(found) != len(pairs) or set(found) != set(wanted):
        return pairs
    return [found[each] for each in wanted]
