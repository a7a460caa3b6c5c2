"""The functions that shard a model in place and use it, and the wrapper that has them as methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from .config import ShardConfig, config_of
from .errors import ConfigError, StateError
from .functions.memory import MemoryReport, memory_report
from .functions.norms import clip_grad_norm, norm_dtype
from .functions.whole import unsharded_parameters
from .interfaces import ReduceOp
from .planning.plan import MODULE_STATE_ATTRIBUTE
from .registry import UsedPlugin
from .runtime.grouped import hooks_of
from .runtime.hooks import ForwardHooks
from .runtime.live_roots import live_roots
from .runtime.module_state import ModuleState
from .runtime.root import Root, root_of
from .runtime.skipped import agree_on_use as agree
from .runtime.skipped import skip as pass_by
from .setup.build import refuse_broken
from .setup.request import Initializer, Request
from .setup.shard import plugins_of, shard_module

M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    config: ShardConfig | None = None,
    *,
    initializer: Initializer | None = None,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    optimizers: Collection[torch.optim.Optimizer] = (),
) -> M:
    """Shard ``model`` in place, the units chosen by ``config.policy``; returns ``model``.

    ``model.parameters()`` are ``DTensor`` from now on, of which each rank has its rows: optimizers are made after, or
    given as ``optimizers``. Meta parameters are materialised unit by unit.

    Args:
        model: Any module; its forward, or any forward inside it, starts a step.
        config: What to use; ``ShardConfig()`` where None.
        initializer: Initialises the parameters and buffers that the module given to it holds directly, after they were
            materialised from the meta device; ``module.reset_parameters()`` where None.
        ignored_modules: Modules that stay as they are, with all inside them.
        ignored_parameters: Parameters that stay as they are. A mapping says of each whether all ranks train one
            (``"replicated"``, as without a mapping) or each has one of its own, such as an expert (``"local"``): norms
            then count those of all ranks.
        optimizers: Made before, of ``model.parameters()``: they hold the new parameters behind it, and of state that
            they have each rank keeps its rows.

    Raises:
        ConfigError, PluginError: the configuration cannot be resolved, or an optimizer cannot be taken over.
        ShardingError: the model cannot be sharded so.
        RankMismatchError: another rank failed, or does something else.

    On an error the model is as it was, on every rank. One that comes when parameters are cut already (out of memory, a
    listener's ``after_shard``) leaves a model whose every use is refused with a ``StateError``.
    """
    config = config_of(config, "shard(model, config)")
    shard_module(Request(model, config, initializer, ignored_modules, ignored_parameters, optimizers=optimizers))
    return model


def fully_shard(
    module: M,
    config: ShardConfig | None = None,
    *,
    initializer: Initializer | None = None,
    ignored_modules: Collection[nn.Module] = (),
    ignored_parameters: Collection[nn.Parameter] = (),
    optimizers: Collection[torch.optim.Optimizer] = (),
) -> M:
    """Make one unit of what in ``module`` is not sharded yet, in place; returns ``module``.

    Where some of it is, a large module before that and one behind it are units of their own, unless
    ``config.split_root`` is False.

    Called from the inside out: ``for block in model.blocks: fully_shard(block)``, then ``fully_shard(model)``.
    Arguments and errors as in ``shard``.

    Raises:
        ConfigError: ``config`` names a policy; here the caller chooses.
        AlreadyShardedError: ``module`` is sharded, or shares a parameter with a module that is.
    """
    config = config_of(config, "fully_shard(module, config)")
    if config.policy != "never":
        raise ConfigError(
            f"fully_shard makes one unit of {type(module).__name__}, so policy={config.policy!r} has no meaning. "
            "Leave policy out, or call polyshard.shard."
        )
    request = Request(
        module, config, initializer, ignored_modules, ignored_parameters, composes=True, optimizers=optimizers
    )
    shard_module(request)
    return module


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside keep their gradients on this rank; the next one outside reduces the sum.

    Parameters are still gathered and released as usual. The waiting gradients take a whole unit's memory each, in the
    reduction dtype; ``.grad`` does not show them. With ``shard_gradients`` it is ``no_all_reduce`` instead.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
    """
    root = outermost_root(model, "no_sync()")
    if root.shards_gradients:
        with no_all_reduce(model):
            yield
        return
    before, root.synchronises = root.synchronises, False
    try:
        yield
    finally:
        root.synchronises = before


@contextmanager
def no_all_reduce(model: nn.Module) -> Iterator[None]:
    """Backwards inside reduce gradients among near ranks alone; the next one outside adds them up over all others.

    For accumulation with ``hfsdp`` or a hybrid strategy: groups and replicas send each other one sum a step, not one a
    microbatch. What waits takes a rank's part in the reduction dtype, where ``no_sync`` keeps the whole of each unit;
    ``.grad`` does not show it. Units without replicas or groups are reduced as outside, and those that nothing shards
    (``no_shard``) wait as in ``no_sync``. Every rank enters and leaves it alike.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
    """
    root = outermost_root(model, "no_all_reduce()")
    before = [each.all_reduces for each in root.module_states]
    try:
        for each in root.module_states:
            each.all_reduces = False
        yield
    finally:
        for each, all_reduces in zip(root.module_states, before, strict=True):
            each.all_reduces = all_reduces


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all ranks is at most ``max_norm``; returns the norm before.

    ``torch.nn.utils.clip_grad_norm_``, given parameters instead of the module, does the same over one mesh. This serves
    several, gradients in host memory, and parameters outside of units.

    Args:
        model: The outermost sharded module.
        max_norm: Largest norm that is let through.
        norm_type: Order of the norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: Whether a norm that is infinite or not a number is an error. True makes the host wait for
            the device, and every rank must give the same.

    Returns:
        The norm, a 0-dim tensor on the compute device, the same on every rank.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
        ConfigError: ``norm_type`` is not positive.
        NonFiniteError: ``error_if_nonfinite``, and the norm is not finite. Raised on all ranks, with gradients as they
            were; names the first unit, in module order, whose gradient is not finite, and the ranks where it is not.
    """
    root = outermost_root(model, "clip_grad_norm_()")
    return clip_grad_norm(root, model, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)


def token_divisor(model: nn.Module, count: int | torch.Tensor) -> torch.Tensor:
    """What each rank divides its sum of token losses by, so that a step has the gradient of the mean over all tokens.

    Ranks rarely have as many tokens, and their gradients are averaged: a mean of ranks' means would weigh the tokens of
    a rank with few of them more. The divisor is the number of tokens of all ranks, by the number of ranks that
    gradients are averaged over. Ranks along tensor-parallel dimensions give the count of the batch that they share.

    Every rank calls it once a step: one all-reduce of a number, for which the host does not wait.

    Args:
        model: The outermost sharded module.
        count: This rank's tokens with a loss in all microbatches of the step; an ``int``, or a tensor of no dimensions.

    Returns:
        A 0-dim tensor on the compute device, the same on every rank: fp64 where gradients are, else fp32. Where no rank
        has a token it is that of one, so that a loss of 0 stays 0.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
        ConfigError: ``count`` has dimensions.
    """
    root = outermost_root(model, "token_divisor()")
    device, dtype = root.collectives.device, norm_dtype(root.units)
    if isinstance(count, torch.Tensor):
        if count.ndim:
            raise ConfigError(
                f"token_divisor() got counts of shape {tuple(count.shape)} (rank {root.rank}). Give the number of this "
                "rank's tokens in the whole step: count.sum()."
            )
        total = count.detach().to(device, dtype, copy=True)
    else:
        # Not from the host's memory, for which the host would wait.
        total = torch.full((), count, dtype=dtype, device=device)
    everyone = root.units[0].ranks.everyone if root.units else (root.collectives,)
    with root.meeting("number of tokens", everyone):
        for group in everyone:
            group.all_reduce(total, op=ReduceOp.SUM).wait()
    # Ranks that share a batch have counted it as often as they are many, and are among those divided by.
    return total.clamp_(min=1).div_(math.prod(group.world_size for group in everyone))


def agree_on_use(model: nn.Module, uses: Mapping[nn.Module, bool]) -> None:
    """Say which of these modules this rank uses in the forward that follows, where ranks may use other ones.

    A gather needs all ranks: one that says False calls ``polyshard.skip(module)`` where its forward would call the
    module. Parameters of what no rank uses have no gradient.

    Every rank calls it before each forward in which its answers may differ, with the same modules: one exchange of
    objects, for which the host waits.

    Args:
        model: The outermost sharded module.
        uses: Modules inside, with or without units of their own: a vision tower, branches of a router.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or its forward or backward runs.
        ConfigError: a module is not inside ``model``. Other ranks are told.
        UnsupportedError: ``polyshard_fsdp`` wrapped a module.
        RankMismatchError: ranks gave other modules; on all ranks.
    """
    agree(outermost_root(model, "agree_on_use()"), model, uses)


def skip(module: nn.Module) -> None:
    """Take part in the gathers and reductions of ``module``, which this rank's forward leaves out and another's calls.

    To be called in its place, in the same grad mode. Nothing is computed, and this rank's gradient counts as zeros.
    Where no rank uses the module, or its parameters are in units around it, nothing happens.

    Raises:
        StateError: there was no ``agree_on_use``, or it was told that this rank uses the module. Other ranks are told.
    """
    pass_by(module)


def flat_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What to give to an optimizer that treats all elements alike: one 1-D ``DTensor`` a unit, over all of its shards.

    An optimizer then handles one tensor a unit instead of one a parameter: fewer launches, and less Python. Gradients
    arrive in these parameters' ``.grad`` from now on, of which ``.grad`` of ``model.parameters()`` are views. Not for
    optimizers that look at a parameter's shape, nor for settings that differ inside a unit (weight decay for some
    parameters only): give those ``model.parameters()``. The optimizer's step raises ``UnsupportedError`` where no rank
    had a gradient of some of a unit's parameters, which it would move all the same.

    Parameters outside of units come last, as they are. So do those of a unit that a single rank holds without casts,
    which stay one by one. Calling it again returns the same objects.

    Raises:
        StateError: ``model`` is not the outermost sharded module, a parameter has a gradient already, or a unit holds
            trained and frozen parameters.
        UnsupportedError: a parameter gathers itself.
    """
    root = outermost_root(model, "flat_parameters()")
    for unit in root.units:
        unit.refuse_extended("flat_parameters()")
    root.adopt_changes()
    flat = [parameter for unit in root.units for parameter in unit.held.flatten()]
    managed = {original for unit in root.units for original in unit.held.tensors}
    return flat + [parameter for parameter in model.parameters() if parameter not in managed]


def unsharded(model: nn.Module, *, writeback: bool = False) -> AbstractContextManager[None]:
    """A context in which every parameter is whole, in its original shape and dtype, on every rank.

    Takes the memory of the whole model; of a module inside one, that of the units with a parameter in it, which are
    whole then with all of theirs. Changes are dropped on leaving unless ``writeback``; then each rank keeps its own
    part. Modules that are called inside compute with these parameters, without casts or collectives, and one whose
    parameters are not whole raises ``UnshardedUseError``; a backward through such a call raises ``StateError``, inside
    and after leaving. Every rank calls it, for the same module.

    Args:
        model: A sharded model, or any module inside one.
        writeback: Whether to keep changes.

    Raises:
        StateError: inside a forward, a backward or another such context, or ``model`` is neither.
    """
    root, module = root_around(model, "unsharded()")
    return unsharded_parameters(root, module, writeback=writeback)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let ``module.name(...)`` see whole parameters, as ``module.forward`` does: ``generate``, ``encode``.

    Raises:
        StateError: ``module`` is no unit.
        ConfigError: it has no such method.
    """
    module_state = _module_state(module, "register_forward_method()")
    method = getattr(module, name, None)
    if not callable(method):
        raise ConfigError(
            f"{type(module)} does not have a method {name} ('{module_state.label}'). Name a method that computes."
        )
    # Its methods may compute with an embedding's weight.
    module_state.reads_in_backward = True
    setattr(module, name, _computing(hooks_of(module_state, module), module, method))


def close(model: nn.Module) -> None:
    """Release what sharding holds beside parameters: gather buffers, communicators, connections, their threads.

    Every rank calls it, at the same point of the program: ending communicators may meet the other ranks. For jobs that
    make many models, or that end one before the process does; a model that is dropped without it leaves its
    communicators to the next model over the same ranks. Process groups and collectives that the user made stay open.
    Parameters and gradients stay as they are, and with them the process groups of their mesh. To be called behind the
    last checkpoint, and once no captured step of the model is left. A save that goes on in the background is waited
    for. Does nothing the second time.

    Raises:
        StateError: inside a forward, a backward or ``unsharded``, or ``model`` is not the outermost sharded module.
        BackgroundSaveError: the last save in the background failed, on any rank. The model is closed all the same.
    """
    outermost_root(model, "close()", ended=True).close()


def report(model: nn.Module) -> MemoryReport:
    """What memory this rank needs, read off the layout.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
    """
    return memory_report(outermost_root(model, "report()"))


def plugins(model: nn.Module) -> tuple[UsedPlugin, ...]:
    """The plugins that a sharded model was given: collectives, precision, offload, policy and listeners.

    Those that the policy named for single units follow, and those of inner modules that were sharded by themselves;
    ``module`` tells which they serve.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
    """
    outermost_root(model, "plugins()")
    return plugins_of(model)


def _computing(hooks: ForwardHooks, module: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def computes(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.pre_forward(module, args, kwargs)
        try:
            output = method(*args, **kwargs)
        except BaseException:
            hooks.post_forward(module, args, kwargs, None)
            raise
        return hooks.post_forward(module, args, kwargs, output)

    return computes


def _module_state(module: nn.Module, call: str) -> ModuleState:
    refuse_broken(module, call)
    module_state: ModuleState | None = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
    if module_state is None:
        raise StateError(
            f"{call} needs a sharded module, but this {type(module).__name__} is not sharded. "
            "Pass the module that was given to polyshard.shard or fully_shard."
        )
    return module_state


def outermost_root(model: nn.Module, call: str, *, ended: bool = False) -> Root:
    """The root of ``model``, whose outermost module it is; ``call`` begins the message of an error.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or was closed, unless ``ended``.
    """
    module_state = _module_state(_unwrapped(model), call)
    root = root_of(module_state)
    if root.module_states[0] is not module_state:
        raise StateError(
            f"{call} needs the outermost sharded module, but was given the inner one '{module_state.name}' (rank "
            f"{root.rank}). Pass the module that was sharded last, around all others."
        )
    if not ended:
        root.refuse_ended(call)
    return root


def root_around(module: nn.Module, call: str) -> tuple[Root, nn.Module]:
    """The root of the model that ``module`` is or is inside of, and the module without a wrapper; ``call`` begins the
    message of an error.

    Raises:
        StateError: ``module`` is in no sharded model, or the model was closed.
    """
    module = _unwrapped(module)
    models = [root for root in live_roots.roots() if module in set(root.module_states[0].module.modules())]
    if MODULE_STATE_ATTRIBUTE in module.__dict__ or not models:
        root = root_of(_module_state(module, call))
    else:
        # Of models that are ignored modules of others, the inner one.
        root = min(models, key=lambda root: sum(1 for _ in root.module_states[0].module.modules()))
        refuse_broken(module, call)
    root.refuse_ended(call)
    outermost = root.module_states[0]
    # One call may have sharded several modules together.
    return root, outermost.module if module.__dict__.get(MODULE_STATE_ATTRIBUTE) is outermost else module


def _unwrapped(model: nn.Module) -> nn.Module:
    # The wrapper holds the sharded module. What is no module is refused by whoever looks inside.
    inner: nn.Module | None = getattr(model, "_modules", {}).get("module")
    wraps = inner is not None and MODULE_STATE_ATTRIBUTE not in model.__dict__
    return inner if inner is not None and wraps and MODULE_STATE_ATTRIBUTE in inner.__dict__ else model


class FullyShardedDataParallel(nn.Module):
    """``polyshard.shard(module, config)``, with the operations as methods.

    ``module`` is sharded in place and stays reachable as ``.module``; attributes and items that the wrapper lacks are
    the module's. Parameters, buffers and state dicts keep the module's own names.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ShardConfig | None = None,
        *,
        initializer: Initializer | None = None,
        ignored_modules: Collection[nn.Module] = (),
        ignored_parameters: Collection[nn.Parameter] = (),
        optimizers: Collection[torch.optim.Optimizer] = (),
    ) -> None:
        super().__init__()
        self.module = shard(
            module,
            config,
            initializer=initializer,
            ignored_modules=ignored_modules,
            ignored_parameters=ignored_parameters,
            optimizers=optimizers,
        )
        # state_dict() leaves ".module" out, also inside a larger model's.
        self.register_load_state_dict_pre_hook(_under_module)  # type: ignore[no-untyped-call]

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """See ``polyshard.no_sync``."""
        return no_sync(self.module)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """See ``polyshard.clip_grad_norm_``."""
        return clip_grad_norm_(self.module, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def unsharded(self, *, writeback: bool = False) -> AbstractContextManager[None]:
        """See ``polyshard.unsharded``."""
        return unsharded(self.module, writeback=writeback)

    def close(self) -> None:
        """See ``polyshard.close``."""
        close(self.module)

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's named parameters."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's named buffers."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under the module's own names."""
        return self.module.state_dict(*args, **kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]


def _under_module(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
