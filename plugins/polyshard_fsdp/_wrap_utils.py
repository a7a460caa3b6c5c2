"""Carrying out an ``auto_wrap_policy`` below the root, which the constructor wraps itself."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection
from functools import partial
from typing import Any, cast

from polyshard.errors import AlreadyShardedError, ConfigError
from torch import nn

from ._common_utils import _get_module_fsdp_state, _override_module_mixed_precision
from .wrap import (
    FunctionPolicy,
    WrapFunction,
    _construct_wrap_fn,
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    _run_mixed_precision_override_policy,
    _wrap_module_cls_individually,
    is_policy_object,
)


def _auto_wrap(
    root_module: nn.Module,
    policy: FunctionPolicy | _Policy,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
    fsdp_fn: WrapFunction,
) -> None:
    """Call ``fsdp_fn(module, **kwargs)`` for what ``policy`` chooses in ``root_module``, children first.

    What it returns takes the module's place.

    Args:
        root_module: Not wrapped itself, even where the policy chooses it.
        policy: A function policy (see ``wrap``) or a policy object.
        ignored_modules: With everything inside them.
        ignored_params: With those of the ignored modules; they do not count towards sizes.
        root_kwargs: All arguments of the root's wrapper but the module and the policy. ``mixed_precision`` must be
            there; where it is not None, modules of its ``_module_classes_to_ignore`` are wrapped apart without it.
        fsdp_fn: The wrapper class, or a function that shards in place and returns the module.

    Raises:
        AlreadyShardedError: (a ``ValueError``) something in ``root_module`` is an FSDP instance.
        ConfigError: (a ``ValueError``) a policy object chose a module with frozen and trainable parameters, and
            ``use_orig_params`` is False.
    """
    _check_nested_wrapping(root_module)
    mixed_precision = root_kwargs["mixed_precision"]
    apart: tuple[type[nn.Module], ...] = ()
    if mixed_precision is not None:
        apart = tuple(mixed_precision._module_classes_to_ignore)

    if not is_policy_object(policy):
        policy = cast("FunctionPolicy", policy)
        if mixed_precision is not None:
            policy = partial(
                _or_policy, policies=[policy, partial(_wrap_module_cls_individually, module_classes=apart)]
            )
            _warn_on_overridden_mixed_precision(_override_module_mixed_precision(root_module, apart))
        _recursive_wrap(
            root_module, policy, fsdp_fn, ignored_modules, ignored_params, only_wrap_children=True, **root_kwargs
        )
        return

    # A policy object plans the whole tree at once: the wrappers inside must not plan theirs again.
    root_kwargs = {**root_kwargs, "auto_wrap_policy" if inspect.isclass(fsdp_fn) else "policy": None}
    plan = cast("_Policy", policy)._run_policy(root_module, ignored_modules, root_kwargs)
    if mixed_precision is not None:
        plan = _run_mixed_precision_override_policy(root_module, apart, ignored_modules, root_kwargs, plan)
    _validate_frozen_params(root_module, set(plan), ignored_params, root_kwargs.get("use_orig_params", False))
    if mixed_precision is not None:
        _warn_on_overridden_mixed_precision(_override_module_mixed_precision(root_module, apart))
    _post_order_apply(root_module, _construct_wrap_fn(root_module, plan, fsdp_fn))


def _check_nested_wrapping(root_module: nn.Module) -> None:
    for module_name, module in root_module.named_modules():
        if _get_module_fsdp_state(module) is not None:
            raise AlreadyShardedError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {module_name} in\n"
                f"{root_module}\nLet the policy choose {module_name} too, or wrap by hand all the way up."
            )


def _warn_on_overridden_mixed_precision(overridden_module_classes: set[type[nn.Module]]) -> None:
    if overridden_module_classes:
        # "instacnes" is how torch.distributed.fsdp spells it, and what filters match.
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
            f"submodules of type:\n{overridden_module_classes}\nThese modules will be wrapped as separate FSDP "
            "instacnes with mixed precision disabled.",
            stacklevel=2,
        )


def _validate_frozen_params(
    root_module: nn.Module,
    modules_to_wrap: set[nn.Module],
    ignored_params: set[nn.Parameter],
    use_orig_params: bool,
) -> None:
    """Check that no wrapper would hold frozen and trainable parameters together.

    The first module, children before parents, that would raises ``ConfigError`` (a ``ValueError``) with
    ``use_orig_params=False``: its one flat parameter needs one ``requires_grad``. Otherwise each is a ``UserWarning``:
    its gradient buffer has room for the frozen parameters as well.
    """
    seen = {root_module}

    def held_by_outer(name: str, module: nn.Module) -> dict[nn.Parameter, str]:
        """Parameters in ``module`` that are left to a wrapper outside it, each with its name from the root."""
        prefix = f"{name}." if name else ""
        left = {
            parameter: prefix + own_name
            for own_name, parameter in module.named_parameters(recurse=False)
            if parameter not in ignored_params
        }
        for child_name, child in module.named_children():
            if child not in seen:
                seen.add(child)
                left.update(held_by_outer(prefix + child_name, child))
        if module not in modules_to_wrap:
            return left
        _check_uniformly_frozen(name, left, use_orig_params)
        return {}

    held_by_outer("", root_module)


def _check_uniformly_frozen(module_name: str, names: dict[nn.Parameter, str], use_orig_params: bool) -> None:
    trainable = [parameter for parameter in names if parameter.requires_grad]
    frozen = [parameter for parameter in names if not parameter.requires_grad]
    if not trainable or not frozen:
        return
    if use_orig_params:
        consequence = (
            "We do not recommend wrapping such modules since the gradient memory usage will be higher than expected "
            f"({_numel(names)} numel instead of {_numel(trainable)} numel before sharding via reduce-scatter)."
        )
    else:
        consequence = "FSDP does not support wrapping such modules when use_orig_params=False."
    message = (
        f"{module_name} has both parameters with requires_grad=True and False. {consequence} "
        "If possible, wrap the frozen parameters with FSDP separately.\n"
        f"The following parameters have requires_grad=True:\n{[names[parameter] for parameter in trainable]}\n"
        f"The following parameters have requires_grad=False:\n{[names[parameter] for parameter in frozen]}"
    )
    if not use_orig_params:
        raise ConfigError(message)
    warnings.warn(message, stacklevel=2)


def _numel(parameters: Collection[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
