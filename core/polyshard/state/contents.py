"""The state of a sharded model and its optimizers as objects, under the names that the unsharded model has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ConfigTypeError, UnsupportedError
from ..inspect import (
    Blocks,
    Insides,
    ShardedModel,
    ShardedParameter,
    blocks_of,
    copy_to_step,
    is_dtensor,
    local_of,
    placed_as,
    role_of,
    saved_buffers,
    saved_name,
    saved_parameters,
    taken_apart,
    without_wrappers,
)
from .blocks import entry_of
from .initial import exchanges, stepping_quickly, steps_others
from .sharded import Holding, holdings, of_parameter, parameters_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
#: The class of an optimizer, or of each of several.
Kind = Mapping[str, str] | Sequence[Mapping[str, str]]
#: Optimizers that keep something else of large parameters do so from 4,096 elements on.
_MOST = 1 << 16


class Joint:
    """Optimizers as one: their parameter groups one after the other, each parameter's state with its own optimizer."""

    def __init__(self, given: Optimizers) -> None:
        """``given``: in the same order at each save and load.

        Raises ConfigTypeError: there is something else among them, or nothing.
        """
        self.members = (given,) if isinstance(given, torch.optim.Optimizer) else tuple(given)
        other = next((each for each in self.members if not isinstance(each, torch.optim.Optimizer)), None)
        if other is not None or not self.members:
            raise ConfigTypeError(
                f"A checkpoint got {type(other).__name__ if self.members else 'an empty sequence'} for an optimizer. "
                "Give an optimizer of PyTorch, a sequence of them, or None."
            )
        self.groups: list[dict[str, Any]] = [group for each in self.members for group in each.param_groups]
        self._in_blocks: dict[tuple[int, torch.dtype, torch.device], Mapping[str, Any]] = {}
        self._optimizer_of = {
            parameter: each for each in self.members for group in each.param_groups for parameter in group["params"]
        }

    @property
    def kind(self) -> Kind:
        """The class of each optimizer, for a checkpoint."""
        kinds = [kind_of(each) for each in self.members]
        return kinds if len(kinds) > 1 else kinds[0]

    @property
    def signature(self) -> str:
        """For ranks to compare: the classes, and how many groups each has."""
        return ", ".join(f"{type(each).__qualname__} of {len(each.param_groups)} group(s)" for each in self.members)

    def settings(self) -> dict[str, object]:
        """For ranks to compare: the settings of each group that are numbers, words, None and tuples of these.

        Each rank steps its own pieces by its own settings: a learning rate that drifted apart on a rank's own loss
        makes the model a mixture.
        """
        return {
            f"{name} of the optimizer's group {index}": value
            for index, group in enumerate(self.groups)
            # Two ranks' may stand in different orders.
            for name, value in sorted(group.items())
            if _is_plain(value)
        }

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """What its optimizer has for ``parameter``: of a ``DTensor``, this rank's elements."""
        found = self.given_state_of(parameter)
        local: torch.Tensor = parameter
        if is_dtensor(parameter):
            local = local_of(parameter)
            found = {key: local_of(value) if is_dtensor(value) else value for key, value in found.items()}
        kind = type(local)
        if kind in (nn.Parameter, torch.Tensor):
            return found
        return {key: _plain_inside(value) if type(value) is kind else value for key, value in found.items()}

    def given_state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._optimizer_of[parameter].state.get(parameter, {})
        return found

    def optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return self._optimizer_of[parameter]

    def blocks_of(self, parameter: nn.Parameter) -> Blocks | None:
        """How its optimizer divides ``parameter``; None where it treats all elements alike."""
        return blocks_of(self._optimizer_of[parameter])

    def like_in_blocks(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """State in blocks of a tensor that stands for ``parameter`` of ``group``, as its optimizer would make it."""
        optimizer, blocks = self._optimizer_of[parameter], self.blocks_of(parameter)
        assert blocks is not None
        alike = (id(group), parameter.dtype, parameter.device)
        if alike not in self._in_blocks:
            numel = blocks.size * max(1, -(-blocks.smallest // blocks.size))
            self._in_blocks[alike] = _state_after_a_step(optimizer, group, _zeros((numel,), parameter))
        return self._in_blocks[alike]

    def replace_state(self, parameter: nn.Parameter, state: dict[str, Any] | None, numbers: Collection[str]) -> None:
        """Let its optimizer have ``state`` for ``parameter``; None or nothing in it for none.

        ``numbers``: what in it is one number for each parameter, a scalar one too.
        """
        if state and is_dtensor(parameter):
            # What has this rank's elements, or all of something.
            placed: Any = parameter
            shape, is_whole = local_of(parameter).shape, all(each.is_replicate() for each in placed.placements)
            state = {
                key: placed_as(parameter, each)
                if isinstance(each, torch.Tensor)
                and ((each.shape == shape and key not in numbers) or (is_whole and each.ndim))
                else each
                for key, each in state.items()
            }
        own = self._optimizer_of[parameter].state
        own.pop(parameter, None)
        if state:
            own[parameter] = state


def kind_of(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Its class, and how many elements a block of its states has, where they are in blocks."""
    blocks = blocks_of(optimizer)
    kind = {"module": type(optimizer).__module__, "class": type(optimizer).__qualname__}
    return kind if blocks is None else {**kind, "block": str(blocks.size)}


def _plain_inside(value: torch.Tensor) -> torch.Tensor:
    """The one tensor that ``value`` of a class of its own is made of, of its shape and dtype; or ``value`` itself."""
    flatten: Any = getattr(value, "__tensor_flatten__", None)
    names: Sequence[str] = [] if flatten is None else flatten()[0]
    inner: torch.Tensor = getattr(value, names[0]) if len(names) == 1 else value
    return inner if inner.shape == value.shape and inner.dtype == value.dtype else value


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def model_state(
    sharded: ShardedModel, form: Callable[[ShardedParameter, torch.Tensor], torch.Tensor] = of_parameter
) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, over this rank's memory: what is written changes them.

    Names are paths without what wrappers add. What units hold is in ``form``: ``CheckpointTensor`` of the whole's
    shape, or ``as_dtensor``. Parameters that are not sharded, and buffers, are plain tensors. A tensor with several
    names is there once, under the first of ``named_parameters()`` or ``named_buffers()``. Of a parameter that gathers
    itself there are the tensors that it is made of.
    """
    return {each.name: form(each, each.tensor) for each in parameters_of(sharded, stored=True)} | outside_units(sharded)


def outside_units(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """What ``model_state`` has beside the parameters of units: those that are not sharded, and persistent buffers."""
    module = sharded.module
    state: dict[str, torch.Tensor] = {}
    managed = {id(parameter) for unit in sharded.units for parameter in unit.tensors}
    for name, parameter in saved_parameters(module):
        if id(parameter) not in managed:
            state[name] = parameter.detach()
    if buffers := dict(saved_buffers(module)):
        # Only a whole state dict tells which are persistent: a millisecond or more.
        persistent = saved_names(module)
        state.update((name, buffer.detach()) for name, buffer in buffers.items() if name in persistent)
    return state | packed_entries(sharded)


def packed_entries(sharded: ShardedModel) -> dict[str, torch.Tensor]:
    """What the modules' state dicts have of the attributes of packed parameters: scales, tables, settings as bytes.

    Under the name of the parameter and what follows it, as bitsandbytes has them: ``up.weight.absmax``.
    """
    names = {name for unit in sharded.units if unit.packed for each in unit.parameters for name in each.names}
    if not names:
        return {}
    module = sharded.module
    state = {saved_name(module, name): value for name, value in module.state_dict().items()}
    return {
        name: value.detach()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and _owner_of(name, names) is not None
    }


def compared_entries(sharded: ShardedModel) -> set[str]:
    """Those of ``packed_entries`` that no attribute shares memory with, as settings: they are compared, not loaded."""
    entries = packed_entries(sharded)
    held = {each.untyped_storage().data_ptr() for unit in sharded.units for each in unit.attribute_tensors}
    return {name for name, value in entries.items() if value.untyped_storage().data_ptr() not in held}


def _owner_of(entry: str, names: Collection[str]) -> str | None:
    stop = entry.rfind(".")
    while stop > 0:
        if entry[:stop] in names:
            return entry[:stop]
        stop = entry.rfind(".", 0, stop)
    return None


def optimizer_state(sharded: ShardedModel, joint: Joint, *, dtensors: bool = False) -> dict[str, Any]:
    """The optimizer's state by parameter name: ``{"state": {name: {key: value}}, "param_groups": [...]}``.

    The form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, of this rank's parts: tensors of
    the parameter's local shape are ``CheckpointTensor`` of the whole parameter's; scalars are as they are. In
    ``param_groups``, ``params`` are names. A parameter of ``polyshard.flat_parameters`` appears as the parameters that
    it stands for: its tensors are cut into theirs, its scalars are each one's. Several optimizers appear as one, with
    their groups in order.

    ``dtensors``: as torch's function has it: tensors of elements are ``DTensor``s over the same memory, those in blocks
    of the optimizer's class.

    Raises ConfigError: the optimizer holds a parameter that is not the model's, a unit's flat parameter and its own
    ones together, or state that no other number of ranks could take over; UnsupportedError: it keeps something of
    whole tensors on the ranks that own them.
    """
    held = holdings(sharded, joint.groups)
    for each in joint.members:
        if getattr(each, "keeps_at_owners", False):
            raise UnsupportedError(
                f"{type(each).__name__} keeps something of whole tensors on the ranks that own them (rank "
                f"{sharded.rank}), which a checkpoint cannot hold yet. Save the model alone, and let the optimizer "
                "start anew."
            )
        # Of several replicas one keeps the state of a piece, where they share the work.
        getattr(each, "drop_outdated_state", bool)()
    state: dict[str, dict[str, Any]] = {}
    for parameter, holding in held.items():
        own = joint.state_of(parameter)
        require_state(holding, own, sharded.rank)
        found = _entries(holding, own, joint.blocks_of(parameter))
        if dtensors and holding.unit is None:
            found = iter([(holding.names[0], joint.given_state_of(parameter))] if own else ())
        elif dtensors:
            found = _dtensors(holding, own)
        for name, shown in found:
            state.setdefault(name, {}).update(shown)
    groups = []
    for group in joint.groups:
        names = [name for parameter in group["params"] for name in held[parameter].names]
        also = {"param_names": list(names)} if "param_names" in group else {}
        groups.append({**group, "params": names, **also})
    return {"state": state, "param_groups": groups}


def _dtensors(holding: Holding, state: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The ``state`` of a flat parameter as that of each parameter that it stands for."""
    for each in holding.stands_for if state else ():
        yield (
            each.name,
            {
                key: as_dtensor(each, each.within_shard(value)) if holding.has_elements(value) else value
                for key, value in state.items()
            },
        )


def as_dtensor(parameter: ShardedParameter, local: torch.Tensor) -> torch.Tensor:
    """A ``DTensor`` over ``local``, of the local shape of ``parameter``; a plain tensor where every rank has all.

    Raises UnsupportedError: it is an inner tensor whose rows are no ``DTensor``'s.
    """
    local, like, inner = local.detach(), parameter.shown, parameter.inner
    if not is_dtensor(like) or (inner is not None and not parameter.sharded):
        return local
    placed: Any = placed_as(like, local, None if inner is None else inner.shape)
    if inner and [each.sizes for each in placed.__create_chunk_list__()] != [local.shape]:
        raise UnsupportedError(
            f"'{parameter.name}' of shape {inner.shape} is cut in proportion to the parameter that it is inside of: no "
            f"DTensor has its rows (rank {placed.device_mesh.get_rank()}). Ask for form='full', or save by "
            "polyshard.checkpoint."
        )
    return placed  # type: ignore[no-any-return]


def in_order(module: nn.Module, names: Mapping[str, Sequence[str]], state: dict[str, Any]) -> dict[str, Any]:
    """What ``model_state`` gave, under all of its ``names`` in ``module``, as ``module.state_dict()`` orders them."""
    named = {name: value for first, value in state.items() for name in names[first]}
    order = {name: place for place, name in enumerate(saved_names(module))}
    # Inner tensors stand where their parameter does.
    places = {name: order.get(name, order.get(name.rpartition(".")[0], len(order))) for name in named}
    return {name: named[name] for name in sorted(named, key=places.__getitem__)}


def names_within(
    sharded: ShardedModel, module: nn.Module | None = None, *, inside: bool = True
) -> dict[str, tuple[str, ...]]:
    """All names in ``module`` of each parameter and buffer there, by the one under which ``model_state`` has it.

    ``module``: inside the model; None for all of it. ``inside``: whether of parameters that are saved as the tensors
    inside of them it has the names of these.
    """
    outermost = sharded.module
    # Not by its truth, for which wrappers ask the module inside how long it is.
    module = outermost if module is None else module
    named = (*saved_parameters(outermost), *saved_buffers(outermost))
    first_of = {id(tensor): name for name, tensor in named}
    for unit in sharded.units:
        first_of |= {id(tensor): each.name for each, tensor in zip(unit.parameters, unit.tensors, strict=True)}
    found: dict[str, list[str]] = {}
    for name, tensor in (*saved_parameters(module, every=True), *saved_buffers(module, every=True)):
        if id(tensor) in first_of:
            found.setdefault(first_of[id(tensor)], []).append(name)
    if module is outermost:
        # The names of when it was sharded stay, wherever modules moved since.
        for first in first_of.values():
            names = found.get(first, [])
            found[first] = [first, *(name for name in names if name != first and first in names)]
    for first, insides in _made_of_others(sharded).items() if inside else ():
        names = found.pop(first, [])
        if names:
            found.update({f"{first}.{each.name}": [f"{name}.{each.name}" for name in names] for each in insides.inner})
    packed = {
        name: each.names[0] for unit in sharded.units if unit.packed for each in unit.parameters for name in each.names
    }
    for entry in packed_entries(sharded):
        owner = _owner_of(entry, packed)
        assert owner is not None
        if owner == packed[owner] and owner in found:
            found[entry] = [f"{name}{entry[len(owner) :]}" for name in found[owner]]
    return {first: tuple(names) for first, names in found.items()}


def _made_of_others(sharded: ShardedModel) -> dict[str, Insides]:
    """By first name of each parameter that is saved as the tensors inside of it, what these are."""
    return {name: insides for unit in sharded.units for name, insides in unit.insides.items()}


def first_names(sharded: ShardedModel) -> dict[str, str]:
    """The name under which ``model_state`` has each parameter and buffer, by each of its names."""
    return {name: first for first, names in names_within(sharded).items() for name in names}


def known_names(sharded: ShardedModel) -> dict[str, str]:
    """The name in state dicts of each parameter and buffer, by this and by all that it had where wrappers counted."""
    module, found = sharded.module, {}
    # Of modules that moved since, names of when it was sharded are known, too.
    saved = [name for names in names_within(sharded).values() for name in names]
    for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        found[name] = found[without_wrappers(name)] = saved_name(module, name)
    return found | {name: name for name in saved}


def put_inside(sharded: ShardedModel, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``state``, whole tensors by first name, with parameters of classes of their own for what is inside of these."""
    found = dict(state)
    for name, insides in _made_of_others(sharded).items():
        inner = {each.attribute: found.pop(f"{name}.{each.name}", None) for each in insides.inner}
        if all(each is not None for each in inner.values()):
            found[name] = insides.whole({key: each for key, each in inner.items() if each is not None})
    return found


def frozen_names(sharded: ShardedModel) -> set[str]:
    """First names of the parameters that need no gradient, of what is inside of them, and of what is saved beside."""
    found = {name for name, parameter in saved_parameters(sharded.module) if not parameter.requires_grad}
    others = _made_of_others(sharded).items()
    inside = {f"{name}.{each.name}" for name, insides in others if name in found for each in insides.inner}
    return found | inside | packed_entries(sharded).keys()


def saved_names(module: nn.Module) -> Collection[str]:
    """All names of parameters and persistent buffers, in the order of ``module.state_dict()``."""
    return {saved_name(module, name): None for name in module.state_dict()}.keys()


def _entries(
    holding: Holding, state: Mapping[str, Any], blocks: Blocks | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The ``state`` of each parameter that ``holding`` stands for: names, and values by key."""
    for key, value in taken_apart(state).items():
        by_element = holding.has_elements(value)
        if role_of(key) is not None or (by_element and blocks is not None and holding.unit is None):
            # Other ranks may have blocks of their pieces.
            yield from ((each.name, dict([entry_of(each, key, value)])) for each in holding.here)
        elif by_element:
            yield from ((name, {key: shown}) for name, shown in holding.parts(value).items())
        else:
            shown = value.detach() if isinstance(value, torch.Tensor) else value
            yield from ((each.name, {key: shown}) for each in holding.here)


def require_state(holding: Holding, state: Mapping[str, Any], rank: int) -> None:
    """Refuse state of a parameter that no other number of ranks could take over.

    Raises ConfigError: naming a state, and the parameter that ``holding`` is about.
    """
    for key, value in taken_apart(state).items():
        if role_of(key) is None:
            _require_entry(holding, key, value, rank)
        elif holding.unit is not None:
            raise ConfigError(
                f"The optimizer's state '{key}' of {holding.label} is in blocks (rank {rank}), which know nothing "
                "of the parameters that it stands for. Give the optimizer model.parameters()."
            )


def _require_entry(holding: Holding, key: str, value: Any, rank: int) -> None:
    if isinstance(value, (dict, list, tuple)):
        raise ConfigError(
            f"The optimizer's state '{key}' of {holding.label} is a {type(value).__name__} (rank {rank}), whose "
            "sharding is not known. Use an optimizer whose state is tensors and numbers."
        )
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise ConfigError(
                f"The optimizer's state '{key}' of {holding.label} is a {type(value).__name__} (rank {rank}), and "
                "where its elements lie is not known. Save the model without this optimizer, and the optimizer's "
                "state_dict() of each rank beside it."
            )
        if holding.partial and value.numel() != 1 and value.shape != holding.parameter.shape:
            raise ConfigError(
                f"The optimizer's state '{key}' of {holding.label} has shape {tuple(value.shape)} on rank {rank}: "
                f"neither a scalar nor the shard's shape {tuple(holding.parameter.shape)}, so it means nothing to "
                "other ranks. Use an optimizer whose state has the parameter's shape, or save the model without it, "
                "and the optimizer's state_dict() of each rank beside it."
            )


def expected_state(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, nn.Parameter, Mapping[str, Any]]]:
    """What ``optimizer`` would keep: a parameter of its own, what stood for it in a step, and the state after that.

    Of each group the largest parameter of each number of dimensions, cut to 65,536 elements. Nothing of torch's own
    optimizers, whose state is known to be of parameters' shapes, and nothing of those that cannot step so: what was
    wrong with these they say in their first step. Neither ``optimizer`` nor random states change.
    """
    # Of those that exchange parameters, and of those that let others step, a copy would not step by itself.
    if type(optimizer).__module__.startswith("torch.optim.") or exchanges(optimizer) or steps_others(optimizer):
        return
    for group in optimizer.param_groups:
        largest: dict[int, nn.Parameter] = {}
        for parameter in group["params"]:
            known = largest.get(parameter.ndim)
            if parameter.requires_grad and (known is None or parameter.numel() > known.numel()):
                largest[parameter.ndim] = parameter
        for parameter in largest.values():
            if parameter.numel() and not parameter.is_meta and not optimizer.state.get(parameter):
                stand_in = _stand_in(parameter)
                yield parameter, stand_in, _state_after_a_step(optimizer, group, stand_in)


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    shape = list(parameter.shape)
    while shape and torch.Size(shape).numel() > _MOST:
        longest = shape.index(max(shape))
        shape[longest] = max(1, shape[longest] * _MOST // torch.Size(shape).numel())
    return _zeros(shape, parameter)


def _zeros(shape: Sequence[int], parameter: nn.Parameter) -> nn.Parameter:
    """A parameter of zeros with a gradient of zeros, of the dtype and on the device of ``parameter``."""
    with torch.inference_mode(False):
        stand_in = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
        stand_in.grad = torch.zeros_like(stand_in)
    return stand_in


def _state_after_a_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], stand_in: nn.Parameter
) -> Mapping[str, Any]:
    own = {key: value for key, value in group.items() if key != "param_names"} | {"params": [stand_in]}
    copied = copy_to_step(optimizer, defaultdict(dict), [own])
    try:
        with stepping_quickly(copied):
            copied.step()
    except Exception:
        return {}
    found: Mapping[str, Any] = copied.state.get(stand_in, {})
    return found
