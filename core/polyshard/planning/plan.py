"""Which parameters form which units. Reads the model, changes nothing.

[Note: split modules]
Modules that no policy chose stay with the module around them: in a language model the embedding before the blocks, the
norm and the head behind them. As one unit all of that would be gathered before the first block computes, when nothing
hides it, held until the end of the step, and reduced behind the last gradient, when again nothing hides it. So a large
module on either side is split off: compute waits for the embedding alone, the head is gathered beside the blocks, and
each is released like any unit.

Nobody asked for a split module, so it may not change what a forward may do. Where its parameters are used outside of
its own forward (``F.linear(x, self.head.weight)``) its units go back to its parent for good, which
``runtime/parameters.py`` notices. A module that some ranks run and others do not cannot be undone so: the others never
gather it. Several large modules on one side, such as heads for several tasks, make that likely, and none is split off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .. import _torch_private
from ..errors import (
    AlreadyShardedError,
    ConfigError,
    ConfigTypeError,
    DeviceError,
    EmptyUnitError,
    ParameterError,
    PluginContractError,
    did_you_mean,
    told,
)
from ..interfaces import UNIT_OVERRIDES, UnitPlan
from . import thresholds
from .answers import is_packed
from .extensions import Insides, gathers_itself, protocol_fault
from .meshes import refuse_wrong_overrides
from .packed import PackedClass, is_of_packed_class, packed_fault
from .parts import LeafForm, ParameterPlace, TensorPart, is_dtensor, local_of, plain_parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Attribute under which a sharded module holds its module state.
MODULE_STATE_ATTRIBUTE = "_polyshard_module_state"


class GroupedModules(nn.ModuleList):
    """Modules whose parameters are gathered together. Stands for them while they are sharded, and is in no model."""


def modules_called(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules whose forwards gather what ``module`` owns: itself, or those that it groups."""
    return tuple(module) if isinstance(module, GroupedModules) else (module,)


@dataclass(eq=False, slots=True)
class ManagedParameter:
    """A parameter of the user's model, and every place that refers to it.

    One object for whoever knows the parameter: ``names`` change where its model becomes part of a larger one.
    """

    original: nn.Parameter
    """The user's own object, of a ``DTensor`` a plain parameter of the local shape, until the model is built: then the
    ``DTensor`` in its place, or the object itself in the drop-in of FSDP1, where it views the master shard."""
    names: tuple[str, ...]
    """Every fully-qualified name; more than one for a shared parameter."""
    sites: tuple[tuple[nn.Module, str], ...]
    """Every (module, attribute) that holds it."""
    part: TensorPart | None = None
    """The part of a whole tensor that it is, by tensor or expert parallelism; None for a whole parameter."""
    leaf: LeafForm | None = None
    """What modules compute with where that is not the plain view: ``part``, unless a drop-in says otherwise."""
    mesh: DeviceMesh | None = None
    """Over which its unit is cut, where that is not the mesh of the module."""
    extended: bool = False
    """Whether it gathers itself, by methods of its class."""
    formed: bool = False
    """Whether its linear layer computes with the bytes of a gather, as its precision plugin says."""
    keeps_dtype: bool = False
    """Whether it computes in its own dtype beside others that do not, as its precision plugin says."""
    insides: Insides | None = None
    """What it is made of, where it gathers itself: known before the model changes."""
    rows: torch.Tensor | None = None
    """This rank's rows of one that gathers itself and was initialised from the meta device, until its unit has them."""
    replicated: bool = False
    """Whether all ranks have the whole of it, as of what has no dimensions."""
    packed: PackedClass | None = None
    """The class of what computes, and its attributes, where it is frozen and of a class of its own."""
    dim: int = 0
    """Along which ranks cut it, evenly where that is not 0."""

    def names_behind(self, prefix: str) -> tuple[str, ...]:
        """Its names where the module that they are relative to is called ``prefix``; empty for the outermost."""
        return tuple(f"{prefix}.{name}" if prefix else name for name in self.names)


def find_split_modules(
    parent: nn.Module,
    inner: Collection[nn.Module],
    owned: Mapping[nn.Parameter, Sequence[tuple[nn.Module, str]]],
) -> list[nn.Module]:
    """The modules to split off ``parent``: at most one before and one behind all of ``inner``.

    Each is the only one on its side that can be called, contains none of ``inner``, holds ``SMALLEST_SPLIT`` elements
    of the parent's, and shares none of them with a module outside of it. Sides are those of ``parent.modules()``. See
    [Note: split modules]. ``owned``: the parameters of ``parent``, with every (module, attribute) that holds them.
    """
    found: list[nn.Module] = []
    seen: set[nn.Module] = set(inner)
    waiting = list(parent.children())[::-1]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        inside = set(module.modules())
        # A container such as ModuleList has no forward, and so no moment at which its parameters could be gathered.
        if type(module).forward is nn.Module.forward or not inside.isdisjoint(inner):
            waiting += list(module.children())[::-1]
            continue
        held = {p for each in inside for p in each._parameters.values() if p is not None and p in owned}
        if any(is_dtensor(each) or gathers_itself(each) or is_of_packed_class(each) for each in held):
            # What other modules would find in its place outside of its forward is plain.
            continue
        large = sum(parameter.numel() for parameter in held) >= thresholds.SMALLEST_SPLIT
        if large and all(user in inside for parameter in held for user, _ in owned[parameter]):
            found.append(module)
    place = {module: index for index, module in enumerate(parent.modules())}
    begin, end = min(place[module] for module in inner), max(place[module] for module in inner)
    sides = (
        [module for module in found if place[module] < begin],
        [module for module in found if place[module] > end],
    )
    return [side[0] for side in sides if len(side) == 1]


@dataclass(frozen=True, slots=True)
class ModuleParameters:
    """A module that will own units, and the parameters that are its own."""

    name: str
    """Fully-qualified name; empty for the root."""
    module: nn.Module
    modules: tuple[nn.Module, ...]
    """``module``, and the modules inside it that are inside of no other one of these."""
    groups: tuple[tuple[ManagedParameter, ...], ...]
    """Parameters of one dtype and over one mesh each, all trained or all frozen, that gather themselves or not."""
    overrides: Mapping[str, Any]
    """Settings that differ from the model's."""
    dtype: torch.dtype
    """In which it computes: of its own parameters that are not packed or, without any, of those split off it; torch's
    default where there are neither."""
    parent: nn.Module | None
    """The module that this one was split off; None where it was chosen."""

    @property
    def parameters(self) -> Iterator[ManagedParameter]:
        """Those of all ``groups``."""
        return itertools.chain.from_iterable(self.groups)

    @property
    def governing(self) -> nn.Module:
        """The module whose mode and dtypes count: those of a split module are its parent's."""
        return self.module if self.parent is None else self.parent


class _Use(NamedTuple):
    name: str
    parameter: nn.Parameter
    module: nn.Module
    key: str
    chain: tuple[nn.Module, ...]
    """The chosen modules around it, the innermost last."""

    @staticmethod
    def owner(uses: Sequence[_Use]) -> nn.Module:
        """The innermost of the chosen modules that contain all of ``uses``."""
        first, *others = uses
        return next(each for each in reversed(first.chain) if all(each in other.chain for other in others))


_PLAIN = ParameterPlace()


def plan_modules(
    root: nn.Module,
    chosen: UnitPlan,
    *,
    names: Mapping[nn.Module, str] | None = None,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    placed: Mapping[nn.Parameter, ParameterPlace] = MappingProxyType({}),
    rank: int = 0,
    divides: bool = False,
    policy: str = "a wrap policy",
) -> list[ModuleParameters]:
    """Assign every parameter of ``root`` to the innermost chosen module that contains all of its uses.

    Args:
        root: The model.
        chosen: What the policy chose, and the settings that differ there.
        names: Those of all modules of ``root``, where the caller has them.
        ignored_modules, ignored_parameters: They stay as they are, with all inside them.
        placed: What a drop-in says of parameters.
        rank: Of this process, for messages.
        divides: Whether large modules before and behind the chosen ones may be split off ``root``.
        policy: Who chose, for messages.

    Returns:
        ``root`` first, with or without parameters of its own; the others in module order, less those without any.

    Raises:
        EmptyUnitError: ``root`` has no parameter at all, sharded ones included.
        DeviceError: parameters are on several devices.
        PluginContractError: ``chosen`` is not a plan for ``root``.
        ConfigError: a setting in ``chosen`` is none that a unit can have.
    """
    names = names or {module: name for name, module in root.named_modules()}
    overrides = _checked(chosen, names, rank, policy)
    uses: dict[nn.Parameter, list[_Use]] = {}
    for use in _uses(root, overrides, ignored_modules, ignored_parameters):
        uses.setdefault(use.parameter, []).append(use)
    if any(each.get("mesh") is not None for each in overrides.values()):
        overrides = _with_meshes_inside(root, overrides, uses, rank)
    inside = [module for module in names if MODULE_STATE_ATTRIBUTE in module.__dict__]
    if not uses and not any(module.__dict__[MODULE_STATE_ATTRIBUTE].units for module in inside):
        raise EmptyUnitError(
            f"There is nothing to shard: {type(root).__name__} has no parameters (rank {rank}). "
            "Pass a module that has some, or leave it as it is."
        )
    devices: dict[str, str] = {}
    for parameter, found in uses.items():
        if not parameter.is_meta:
            devices.setdefault(str(parameter.device), found[0].name)
    if len(devices) > 1:
        listed = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise DeviceError(
            f"polyshard only supports single device modules but got params on several: {listed} (rank {rank}). "
            "Move the model to one device first."
        )
    owner_of = {parameter: _Use.owner(found) for parameter, found in uses.items()}
    inner = {module for module in (*inside, *owner_of.values()) if module is not root}
    owned = {
        parameter: [(use.module, use.key) for use in found]
        for parameter, found in uses.items()
        if owner_of[parameter] is root
    }
    split = find_split_modules(root, inner, owned) if divides and inner else []
    for module in split:
        held = {parameter for user in module.modules() for parameter in user._parameters.values()}
        owner_of.update((parameter, module) for parameter in owned if parameter in held)
    groups: dict[nn.Module, dict[tuple[Any, ...], list[ManagedParameter]]] = {}
    for parameter, found in uses.items():
        managed = _managed(found, placed[parameter] if placed and parameter in placed else _PLAIN, rank)
        packed = managed.packed is not None
        kind = (parameter.dtype, parameter.requires_grad, managed.extended, packed, managed.mesh, managed.replicated)
        groups.setdefault(owner_of[parameter], {}).setdefault(kind, []).append(managed)
    owners = {module for module in names if module is root or module in groups}
    outside = owners | set(ignored_modules)
    planned = []
    for module, name in names.items():
        if module not in owners:
            continue
        kinds = groups.get(module, {})
        # What is replicated last: a unit of its own, with names of its own.
        ordered = sorted(kinds.items(), key=lambda item: (not item[0][1], item[0][-1]))
        parent = root if module in split else None
        dtypes = [
            dtype
            for dtype, packed in [(kind[0], kind[3]) for kind in kinds]
            or [(each.dtype, is_of_packed_class(each)) for each in owned]
            if not packed and not is_packed(dtype)
        ]
        planned.append(
            ModuleParameters(
                name,
                module,
                _own_modules(module, outside),
                tuple(tuple(group) for _, group in ordered),
                overrides.get(parent or module, {}),
                dtypes[0] if dtypes else torch.get_default_dtype(),
                parent,
            )
        )
    for module, settings in overrides.items():
        if settings.get("placement") is not None:
            own = [each for owner in planned if owner.governing is module for each in owner.parameters]
            _place(own, settings["placement"], names[module], rank)
    return planned


def _managed(uses: Sequence[_Use], place: ParameterPlace, rank: int) -> ManagedParameter:
    parameter, names = uses[0].parameter, tuple(use.name for use in uses)
    sites = tuple(dict.fromkeys((use.module, use.key) for use in uses))
    part, leaf = place.part, place.leaf
    if leaf is None:
        part = leaf = TensorPart.of(parameter, names[0], rank)
    original = parameter if leaf is None else plain_parameter(parameter)
    found = ManagedParameter(original, names, sites, part, leaf, place.mesh, gathers_itself(original), dim=place.dim)
    found.replicated = not original.shape
    found.packed = None if found.extended else PackedClass.of(original)
    return found


def _place(own: Sequence[ManagedParameter], placement: int | Mapping[str, int], module: str, rank: int) -> None:
    """Let the parameters ``own`` of the unit of ``module`` be cut as a policy's ``placement`` says.

    Raises ConfigError: ``placement`` names what is not there, or another dimension than 0 of what is cut along that.
    """
    prefix = f"{module}." if module else ""
    named = {name.removeprefix(prefix): each for each in own for name in each.names if name.startswith(prefix)}
    if isinstance(placement, int):
        # What has no element has no dimension that ranks could divide.
        having = (name for name, each in named.items() if placement < each.original.ndim and each.original.numel())
        placement = dict.fromkeys(having, placement)
    where = f"A wrap policy overrides placement for '{module}' (rank {rank}) by {{!r}}: {{}}"
    for name, dim in placement.items():
        each = named.get(name)
        if each is None:
            known = ", ".join(named) or "none"
            fault = f"its unit has no such parameter.{did_you_mean(name, named)} It has: {known}."
        elif dim and dim >= each.original.ndim:
            fault = f"it has the shape {tuple(each.original.shape)}. Give one of its dimensions, from 0."
        elif dim and each.extended:
            kind = type(each.original).__name__
            fault = f"a {kind} gathers itself, and is cut along dimension 0 alone. Give a mapping without it."
        else:
            each.dim = dim
            continue
        raise ConfigError(where.format({name: dim}, fault))


def _with_meshes_inside(
    root: nn.Module,
    overrides: Mapping[nn.Module, Mapping[str, Any]],
    uses: Mapping[nn.Parameter, Sequence[_Use]],
    rank: int,
) -> dict[nn.Module, Mapping[str, Any]]:
    """``overrides``, where modules have the mesh of the nearest one around them: parts of experts belong to these.

    Raises ParameterError: a parameter would belong to units over two meshes, or to none of the meshes of its modules.
    """

    def around(chain: Sequence[nn.Module]) -> Mapping[str, Any]:
        """The settings of the nearest module with a mesh of its own."""
        known = (overrides.get(each, {}) for each in reversed(chain))
        return next((settings for settings in known if settings.get("mesh") is not None), {})

    result = dict(overrides)
    for _, module, chain in _walk(root, overrides, ()):
        if module in overrides and (settings := around(chain)) is not overrides[module]:
            inside = {key: settings[key] for key in ("mesh", "gradient_divisor") if key in settings}
            result[module] = inside | {key: value for key, value in overrides[module].items() if key != "mesh"}
    for found in uses.values():
        mesh = result.get(_Use.owner(found), {}).get("mesh")
        meshes = [around(use.chain).get("mesh") for use in found]
        if any(each != mesh for each in meshes):
            listed = [
                f"'{use.name}' over {'the model' if each is None else repr(each)}"
                for use, each in zip(found, meshes, strict=True)
            ]
            raise ParameterError(
                f"A parameter is shared by units over meshes of their own, and can be of one mesh alone (rank {rank}): "
                f"{', '.join(listed)}. Override the mesh of one module that contains all of these."
            )
    return result


def _own_modules(module: nn.Module, others: Collection[nn.Module]) -> tuple[nn.Module, ...]:
    own, waiting = [], [module]
    while waiting:
        inner = waiting.pop()
        own.append(inner)
        waiting += [
            child for child in inner.children() if child not in others and MODULE_STATE_ATTRIBUTE not in child.__dict__
        ]
    return tuple(own)


def parameters_to_shard(
    root: nn.Module,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
) -> dict[nn.Parameter, str]:
    """What would be sharded, under its first name: all of ``root`` but what is ignored or inside of a module state."""
    found: dict[nn.Parameter, str] = {}
    for use in _uses(root, {}, ignored_modules, ignored_parameters):
        found.setdefault(use.parameter, use.name)
    return found


def refuse_unshardable(
    root: nn.Module,
    *,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    rank: int = 0,
) -> None:
    """Raise ParameterError for a parameter that cannot be sharded."""
    seen = set()
    for name, parameter, module, key, _ in _uses(root, {}, ignored_modules, ignored_parameters):
        refuse_embedding(name.removesuffix(key).removesuffix("."), module, (), rank)
        if parameter not in seen:
            seen.add(parameter)
            _check_parameter(name, parameter, module, rank)


def refuse_embedding(name: str, module: nn.Module, ignored: Collection[nn.Parameter], rank: int) -> None:
    """Raise ParameterError for an embedding that cannot compute with a sharded weight. ``ignored``: what is not."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module._parameters.get("weight") in ignored:
        return
    if module.sparse:
        fault, instead = "makes sparse gradients, which cannot be reduced in a flat buffer", "sparse=False"
    elif module.max_norm is not None:
        fault = (
            f"scales rows of its weight to max_norm={module.max_norm} in forward, where they are a copy that is lost"
        )
        instead = "max_norm=None, and scale what polyshard.unsharded(..., writeback=True) shows"
    else:
        return
    raise ParameterError(
        f"'{name or type(module).__name__}' {fault} (rank {rank}). Construct it with {instead}; or ignore its weight, "
        "by ignored_parameters, or by ignored_params or ignored_states of a drop-in."
    )


def _check_parameter(name: str, parameter: nn.Parameter, module: nn.Module, rank: int) -> None:
    where = f"'{name}' on rank {rank}"
    if isinstance(parameter, (UninitializedParameter, UninitializedBuffer)):
        raise ParameterError(f"The parameter {where} is not initialized. Run a forward of the lazy module first.")
    if parameter.layout is not torch.strided:
        raise ParameterError(f"Cannot flatten {parameter.layout} tensors: {where}. Make the parameter dense.")
    data = local_of(parameter) if is_dtensor(parameter) else parameter.data
    extended = gathers_itself(data)
    if is_packed(parameter.dtype) and parameter.requires_grad:
        raise ParameterError(
            f"The parameter {where} is trained, and has dtype {parameter.dtype}, in which gradients and steps are not "
            "computed. Freeze it with requires_grad_(False), or train it in a wider dtype; precision 'fp8' and 'int8' "
            "gather that in eight bits."
        )
    fault = "" if type(data) is torch.Tensor else protocol_fault(data)
    if fault:
        raise ParameterError(
            f"The parameter {where} is a {type(data).__name__}, {fault}. Pass it in ignored_parameters."
        )
    if extended and (not data.ndim or not data.is_contiguous()):
        raise ParameterError(
            f"The parameter {where} is a {type(data).__name__} of shape {tuple(data.shape)} and strides "
            f"{tuple(data.stride())}, and one that gathers itself is cut between contiguous rows. Make it so, or pass "
            "it in ignored_parameters."
        )
    if not extended and is_of_packed_class(parameter):
        fault = packed_fault(parameter, module)
        if fault:
            raise ParameterError(f"The parameter {where} is a {type(parameter).__name__}, {fault}")
    elif not (extended or type(parameter) is nn.Parameter or is_dtensor(parameter)) and (own := vars(parameter)):
        raise ParameterError(
            f"The parameter {where} is a trained {type(parameter).__name__} with state of its own "
            f"({', '.join(list(own)[:4])}), which its optimizer's steps would not follow. Freeze it with "
            "requires_grad_(False), and what computes has that state, too; or pass it in ignored_parameters."
        )
    if _torch_private.tensor_hooks(parameter):
        raise ParameterError(
            f"The parameter {where} has a hook from register_hook, which would never fire on a sharded parameter. "
            "Remove it, and use register_post_accumulate_grad_hook, which runs after the reduction."
        )
    if parameter.grad is not None:
        raise ParameterError(f"The parameter {where} has a gradient already. Call zero_grad(set_to_none=True) first.")


def _walk(
    root: nn.Module, chosen: Mapping[nn.Module, Any], ignored: Collection[nn.Module], *, into_sharded: bool = False
) -> list[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    # Every path to every module, shared ones too: a parameter belongs to a module that contains all of its uses.
    found: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = []

    def visit(prefix: str, module: nn.Module, chain: tuple[nn.Module, ...], above: frozenset[nn.Module]) -> None:
        if module in ignored or module in above:
            return
        if module is not root and not into_sharded and MODULE_STATE_ATTRIBUTE in module.__dict__:
            return
        if module is root or module in chosen:
            chain = (*chain, module)
        found.append((prefix, module, chain))
        if not module._modules:
            return
        around = above | {module}
        for key, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}.{key}" if prefix else key, child, chain, around)

    visit("", root, (), frozenset())
    return found


def _uses(
    root: nn.Module,
    chosen: Mapping[nn.Module, Any],
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
) -> Iterator[_Use]:
    """Every place of every parameter of ``root`` but what is ignored, or inside of a module state."""
    skipped = set(ignored_parameters)
    for prefix, module, chain in _walk(root, chosen, {inner for each in ignored_modules for inner in each.modules()}):
        for key, parameter in module._parameters.items():
            # Hashing a parameter runs Python: models of many are asked about what is empty nearly always.
            if parameter is not None and not (skipped and parameter in skipped):
                yield _Use(f"{prefix}.{key}" if prefix else key, parameter, module, key, chain)


def names_in(root: nn.Module) -> Callable[[ManagedParameter], tuple[str, ...]]:
    """What tells all names that a parameter has in ``root``, in module order, whatever paths lead to its modules."""
    paths: dict[nn.Module, list[tuple[int, str]]] = {}
    for number, (prefix, module, _) in enumerate(_walk(root, {}, (), into_sharded=True)):
        paths.setdefault(module, []).append((number, prefix))

    def names_of(parameter: ManagedParameter) -> tuple[str, ...]:
        found = sorted((*path, key) for module, key in parameter.sites for path in paths.get(module, ()))
        # Of a module that is grouped with one in ``root``, and is outside of it.
        return tuple(f"{path}.{key}" if path else key for _, path, key in found) or parameter.names

    return names_of


def modules_in(root: nn.Module) -> list[nn.Module]:
    """``root`` and all modules inside it, each once, in no order: without names, for a fraction of what these cost.

    Raises ConfigTypeError: ``root`` is no module.
    """
    if not isinstance(root, nn.Module):
        raise ConfigTypeError(f"{type(root).__name__!r} was given as the model. Give a torch.nn.Module.")
    found = {root: None}
    waiting = [root]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def refuse_sharded(root: nn.Module, rank: int) -> None:
    """Raise AlreadyShardedError if ``root`` or anything inside it is sharded already."""
    for name, module in root.named_modules():
        if MODULE_STATE_ATTRIBUTE in module.__dict__:
            raise AlreadyShardedError(
                f"A model can be sharded once, but '{name or '(root)'}' of this {type(root).__name__} is sharded "
                f"already (rank {rank}). Shard the whole model in one call, or compose it from the inside out with "
                "fully_shard."
            )


def _checked(
    chosen: UnitPlan, names: Mapping[nn.Module, str], rank: int, policy: str
) -> dict[nn.Module, Mapping[str, Any]]:
    cure = "Return a mapping of modules to overrides: {module: {}} for each module that becomes a unit."
    if not isinstance(chosen, Mapping):
        raise PluginContractError(f"plan of {policy} returned {told(chosen)} (rank {rank}). {cure}")
    for module, overrides in chosen.items():
        if not isinstance(module, nn.Module) or not isinstance(overrides, Mapping):
            entry = f"{told(module)}: {told(overrides)}"
            raise PluginContractError(f"plan of {policy} has the entry {entry} (rank {rank}). {cure}")
        if module not in names:
            raise PluginContractError(
                f"plan of {policy} has a {type(module).__name__} that is not inside the model (rank {rank}). Choose "
                "from root.modules()."
            )
        unknown = sorted(set(overrides) - set(UNIT_OVERRIDES))
        if unknown:
            raise ConfigError(
                f"plan of {policy} overrides {', '.join(unknown)} for '{names[module]}' (rank {rank}), which no unit "
                f"has. A unit has: {', '.join(UNIT_OVERRIDES)}."
            )
        releases = overrides.get("reshard_after_forward")
        if releases is not None and (not isinstance(releases, int) or releases < 1) and releases is not False:
            raise ConfigError(
                f"plan of {policy} overrides reshard_after_forward for '{names[module]}' by {releases!r} (rank "
                f"{rank}). Give True, False, None, or the number of ranks that keep it whole together."
            )
        placement = overrides.get("placement")
        by_name = placement if isinstance(placement, Mapping) else {"": 0 if placement is None else placement}
        if not all(isinstance(name, str) and type(dim) is int and dim >= 0 for name, dim in by_name.items()):
            raise ConfigError(
                f"plan of {policy} overrides placement for '{names[module]}' by {placement!r} (rank {rank}). Give a "
                "dimension, 0 or more, or a mapping from names of parameters in the module to dimensions."
            )
        refuse_wrong_overrides(overrides, f"'{names[module]}' (rank {rank})")
    return dict(chosen)
