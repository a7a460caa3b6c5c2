"""From a request to a sharded model: nothing changes before every rank agreed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import registry
from .._torch_private import post_accumulate_grad_hooks
from .._version import __version__
from ..config import Strategy
from ..errors import (
    AlreadyShardedError,
    ConfigError,
    ParameterError,
    PluginContractError,
    PolyshardError,
    RankMismatchError,
    warn_once,
    words,
)
from ..functions.torch_functions import follow, prepare
from ..interfaces import Collectives, Group, PolicyContext
from ..planning.answers import refuse_unable, yes_or_no
from ..planning.groups import ModelRanks
from ..planning.meshes import UnitLists
from ..planning.plan import (
    MODULE_STATE_ATTRIBUTE,
    ManagedParameter,
    ModuleParameters,
    modules_called,
    modules_in,
    parameters_to_shard,
    plan_modules,
    refuse_sharded,
    refuse_unshardable,
)
from ..planning.units import ChosenPlugins, plan_units
from ..planning.values import buffers_to_compare, values_to_compare
from ..runtime.live_roots import live_roots
from ..runtime.replaced import replaced_parameters
from ..runtime.root import Root
from .agree import EVERYONE, Agreement, Report
from .build import Build, ShardPlan, refuse_broken
from .differences import kind_of, rows_of
from .materialize import refuse_uninitializable, remember
from .optimizers import held_of, refuse_unknown, take_over
from .plugins import choose_plugins
from .request import Request, refuse_torch_sharded

_LOGGER = logging.getLogger(__name__)

#: The settings that ranks compare as they are; the others show in what they lead to.
_COMPARED = (
    "shard_parameters",
    "shard_gradients",
    "reshard_after_forward",
    "forward_prefetch",
    "backward_prefetch",
    "batch_nbytes",
    "split_root",
    "sync_module_states",
)
#: Attribute under which a module that was sharded holds the plugins that serve it.
_PLUGINS_ATTRIBUTE = "_polyshard_plugins"


def shard_module(request: Request) -> Root:
    """Shard ``request.module`` in place. Each phase ends alike on all ranks: with an error on every one, or on none.

    =========  =====================================================  ==============================================
    phase      may fail with                                          leaves the model, where it fails
    =========  =====================================================  ==============================================
    plan       ConfigError, PluginError, ShardingError; on the other  as it was
               ranks RankMismatchError, and so where ranks differ
    prepare    errors of initializers, offload managers, memory       as it was, but for values sent from rank 0
    build      out of memory, a listener's ``after_shard``            in pieces where any was cut: each use is refused
    =========  =====================================================  ==============================================
    """
    agreement = Agreement(request.config)
    with agreement.phase() as report:
        prepare()
        request.refuse_types()
        refuse_torch_sharded(request.module)
        plugins = choose_plugins(request, agreement)
        plan = plan_shards(request, plugins)
        optimizers = list(request.optimizers)
        refuse_unknown(request.module, optimizers, plugins.collectives.rank)
        held = held_of(plan.modules) if optimizers else {}
        _fill_in(report, plan, agreement)
    _log(plan)
    with ExitStack() as unfinished:
        with ExitStack() as undo:
            with agreement.phase():
                build = Build(plan)
                if request.config.check_ranks:
                    # All ranks fail alike then, and so close alike.
                    unfinished.callback(build.close)
                undo.callback(remember(plan.modules, plugins.context.device))
                build.prepare()
            # Every rank could keep its model until here: nothing was let go of.
            undo.pop_all()
        try:
            with agreement.phase():
                root = build.finish()
        except RankMismatchError as mismatch:
            build.give_up(str(mismatch))
            raise
        unfinished.pop_all()
    used = [registry.used(each) for each in plugins.used]
    used += [registry.used(own, each.name) for each in plan.modules for own in each.named.values()]
    modules_called(request.module)[0].__dict__[_PLUGINS_ATTRIBUTE] = tuple(used)
    take_over(root, optimizers, held)
    follow(root)
    return root


def plan_shards(request: Request, plugins: ChosenPlugins) -> ShardPlan:
    """Everything about the sharded model that is known before it changes. Reads the model, takes no memory.

    Raises:
        ConfigError, PluginError, ShardingError: what sharding raises before ranks speak to each other.
    """
    config, collectives, device = request.config, plugins.collectives, plugins.context.device
    ranks = ModelRanks.of(config, collectives.world_size, plugins.mesh)
    owners = _choose_modules(request, plugins, ranks)
    chooses = config.reshard_after_forward == "auto" and ranks.strategy is not Strategy.NO_SHARD
    if chooses and config.memory_budget is None and device.type != "cuda":
        raise ConfigError(
            f"reshard_after_forward='auto' needs memory_budget on {device.type}, whose free memory is not measured "
            f"(rank {collectives.rank}). Give it in bytes or as text such as '70 GiB', or leave reshard_after_forward "
            "out."
        )
    _warn_of_ignored(request, owners, collectives)
    if plugins.events.active:
        with _unchanged(request.module, "before_shard of a listener", collectives.rank):
            plugins.events.before_shard(request.module, config)
    return ShardPlan(request, plugins, ranks, plan_units(owners, plugins, ranks))


def plugins_of(model: nn.Module) -> tuple[registry.UsedPlugin, ...]:
    """The plugins that ``model`` and the modules inside it, where they were sharded by themselves, were given."""
    found: list[registry.UsedPlugin] = []
    for name, inner in model.named_modules():
        for each in inner.__dict__.get(_PLUGINS_ATTRIBUTE, ()):
            found.append(replace(each, module=".".join(filter(None, (name, each.module)))))
    return tuple(found)


def _choose_modules(request: Request, plugins: ChosenPlugins, ranks: ModelRanks) -> list[ModuleParameters]:
    """The modules that own units, the root first: as the policy chose, less what cannot be sharded."""
    module, rank, device = request.module, plugins.collectives.rank, plugins.context.device
    shards = len(ranks.lists.shard[0])
    ignored: dict[str, Any] = {
        "ignored_modules": request.ignored_modules,
        "ignored_parameters": request.ignored_parameters,
    }
    refuse_broken(module, "shard()")
    if not request.composes or any(MODULE_STATE_ATTRIBUTE in each.__dict__ for each in modules_called(module)):
        refuse_sharded(module, rank)
    _refuse_shared(module, parameters_to_shard(module, **ignored), rank)
    refuse_unshardable(module, rank=rank, **ignored)
    refuse_unable(plugins.precision, rank)
    context = PolicyContext(**ignored, shards=shards, device=device, warn=partial(warn_once, rank=rank))
    label = next(each.resolved.label for each in plugins.used if each.resolved.group is Group.POLICIES)
    asked = f"plan() of {label}"
    with _unchanged(module, asked, rank):
        try:
            chosen = plugins.policy.plan(module, context)
        except (PolyshardError, KeyboardInterrupt):
            raise
        # SystemExit too: one rank would end in silence, and the others wait for it.
        except BaseException as error:
            what = f"{asked} failed for this {type(module).__name__} (rank {rank})"
            raise PluginContractError(f"{what}: {words(error)}. Mend the policy, or what it is given.") from error
    names = {inner: name for name, inner in module.named_modules()}
    if isinstance(chosen, Mapping):
        precision = plugins.precision
        others = ((inner, name) for inner, name in names.items() if inner not in chosen and inner is not module)
        alone = (
            inner
            for inner, name in others
            if yes_or_no(precision, "leaves_alone", precision.leaves_alone(inner), f"'{name}'", rank)
        )
        chosen = {**chosen, **{inner: {} for inner in alone}}
    # Where nothing is gathered, one unit around the others costs nothing.
    divides = request.config.split_root and shards > 1
    owners = plan_modules(
        module, chosen, names=names, placed=request.placed, rank=rank, divides=divides, policy=label, **ignored
    )
    for each in itertools.chain(*(owner.parameters for owner in owners)):
        _refuse_unserved(each, plugins.collectives, device)
    if not request.stays_on_meta and request.initializer is None:
        refuse_uninitializable(owners, names, rank)
    return owners


@contextmanager
def _unchanged(model: nn.Module, asked: str, rank: int) -> Iterator[None]:
    """Raise PluginContractError where ``model`` has other modules, parameters or buffers behind the body than before.

    ``asked``: what the body calls.
    """
    before = _held_in(model)
    yield
    after = _held_in(model)
    # Tensors compare their values.
    if after.keys() == before.keys() and all(value is after[place] for place, value in before.items()):
        return
    names = {module: name for name, module in model.named_modules()}
    changed = [
        f"{names[module]}.{key}" if names[module] else key
        for module, key in before | after
        if module in names and before.get((module, key), model) is not after.get((module, key), model)
    ]
    raise PluginContractError(
        f"{asked} changed the model (rank {rank}): {', '.join(map(repr, changed[:8]))}, {len(changed)} in all, are "
        "gone, new or replaced. It is asked how to shard the model; let the program change it before that."
    )


def _held_in(model: nn.Module) -> dict[tuple[nn.Module, str], object]:
    """The modules, parameters and buffers of each module inside ``model``, by their names in it."""
    return {
        (module, key): value
        for module in modules_in(model)
        for held in (module._modules, module._parameters, module._buffers)
        for key, value in held.items()
    }


def _refuse_unserved(parameter: ManagedParameter, collectives: Collectives, device: torch.device) -> None:
    """Raise ParameterError for a parameter that is packed and has no values, or whose gradients cannot be reduced."""
    packed, name, rank = parameter.packed, parameter.names[0], f"(rank {collectives.rank})"
    held = () if packed is None or device.type == "meta" else (parameter.original, *packed.tensors)
    if packed is not None and any(tensor.is_meta for tensor in held):
        raise ParameterError(
            f"The parameter '{name}' {rank}, a {packed.cls.__name__}, has no values on the meta device, and nor has "
            "what its bytes mean. Build and quantize it on another device before it is sharded."
        )
    dtype = parameter.original.dtype
    trained = parameter.original.requires_grad and collectives.world_size > 1
    if trained and dtype.is_complex and dtype not in collectives.capabilities.dtypes:
        raise ParameterError(
            f"The collectives do not reduce {dtype}, which '{name}' has {rank}. Keep real and imaginary parts as real "
            "parameters, or pass it in ignored_parameters."
        )


def _fill_in(report: Report, plan: ShardPlan, agreement: Agreement) -> None:
    """Put into the report what ranks compare: what they resolved and planned, and checksums of values."""
    config, plugins, collectives = plan.request.config, plan.plugins, plan.plugins.collectives
    # Asked for where nobody compares them, too, so that a plugin that cannot answer shows everywhere.
    overridden = [[registry.fingerprint(own) for own in each.named.values()] for each in plan.modules]
    compares = config.check_ranks and collectives.capabilities.can_communicate and collectives.world_size > 1
    rows = report[EVERYONE]
    rows += [
        *registry.Permission.read().rows(),
        *(row for used in plugins.used for row in registry.fingerprint(used)),
        ["collectives", *kind_of(collectives)],
        ["strategy", plan.ranks.strategy.value, plan.ranks.lists.shard, plan.ranks.lists.replicate],
        *([] if plan.ranks.lists.near is None else [["groups", plan.ranks.lists.near]]),
        *([name, getattr(config, name)] for name in _COMPARED),
    ]
    if not agreement.alone:
        others: list[UnitLists] = []
        for lists in (unit.ranks.lists for each in plan.modules for unit in each.units):
            if lists not in (plan.ranks.lists, *others):
                others.append(lists)
        # Some thirty lists a unit.
        for each, fingerprints in zip(plan.modules, overridden, strict=True):
            releases = ["reshard_after_forward", each.overrides.get("reshard_after_forward")]
            rows += rows_of(each, [releases, *fingerprints])
        rows += [["ranks", own.label, own.shard, own.replicate] for own in others]
    if compares:
        rows.append(["polyshard", __version__, registry.engine_digest()])
        values = values_to_compare(plan.modules, compare=not config.sync_module_states)
        among = ""
        if plan.request.stays_on_meta:
            # Where rank 0 alone has values, the program sends them later.
            on_meta = [str(name) for rows in values.values() for _, name, _, value in rows if value == "meta"]
            among = f"ranks with {', '.join(on_meta) or 'no parameter'} on the meta device"
        for scope, its in values.items():
            report.setdefault(", ".join(filter(None, (among, scope))), []).extend(its)
        if config.sync_module_states:
            own = {inner for each in plan.modules for inner in each.modules}
            rows += buffers_to_compare(named for named in plan.request.module.named_modules() if named[1] in own)


def _log(plan: ShardPlan) -> None:
    configured, collectives = plan.request.config.strategy, plan.plugins.collectives
    if plan.ranks.strategy is not configured:
        warn_once(
            f"polyshard is switching to use `NO_SHARD` instead of {configured} since the world size is 1.",
            rank=collectives.rank,
        )
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info(
            "rank %d of %d shards %s with %s",
            collectives.rank,
            collectives.world_size,
            type(plan.request.module).__name__,
            plan.plugins.summary(),
        )


def _refuse_shared(module: nn.Module, named: Mapping[nn.Parameter, str], rank: int) -> None:
    """Raise if another call has sharded a parameter of ``module`` already, or put another into its place."""
    for (parameter, name), found in zip(named.items(), live_roots.find(list(named)), strict=True):
        before = replaced_parameters.name_of(parameter) if found is None else found.name
        if before is None:
            continue
        holder = None if found is None else found.root.module_states[0].modules[0]
        if holder is not None and module in set(holder.modules()):
            where = f"of {type(holder).__name__}, which contains this module"
            instead = "Leave this call out, or compose the model from the inside out with fully_shard"
        else:
            where = "of a module that shares it"
            instead = (
                "Shard neither by itself: call polyshard.shard or fully_shard on the module that contains both, or "
                "give both as one list to a fully_shard that takes lists"
            )
        raise AlreadyShardedError(
            f"Parameter '{name}' of this {type(module).__name__} is sharded already, as '{before}' {where} (rank "
            f"{rank}). {instead}."
        )


def _warn_of_ignored(request: Request, owners: Sequence[ModuleParameters], collectives: Collectives) -> None:
    """Warn, on one rank, of parameters that are trained and ignored: each rank would train a copy of its own."""
    owned = request.owned_locally
    # Composed from the inside out, the call around this one may take it.
    if request.composes or not (request.ignored_modules or request.ignored_parameters):
        return
    if collectives.rank > 0 or collectives.world_size == 1 or not collectives.capabilities.can_communicate:
        return
    managed = {each.original for owner in owners for each in owner.parameters}
    names = [
        name
        for name, parameter in request.module.named_parameters()
        if parameter.requires_grad
        and parameter not in managed
        and parameter not in owned
        and not post_accumulate_grad_hooks(parameter)
    ]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warn_once(
            f"Nothing averages the gradients of {', '.join(map(repr, names[:3]))}{more} over ranks: they are trained, "
            "and ignored by shard(), so that each rank trains copies of its own. Let them be sharded (scalars are, "
            "too), freeze them with requires_grad_(False), or give each a hook that averages its gradient "
            "(register_post_accumulate_grad_hook) before shard(). Where it is meant so, say it: "
            "ignored_parameters={parameter: 'local'}.",
            rank=collectives.rank,
        )
