"""Carrying out an ``auto_wrap_policy`` below the root, which the constructor wraps itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from polyshard.errors import AlreadyShardedError, ConfigError
from polyshard.extension import iter_tensors
from polyshard.interfaces import PolicyContext
from polyshard_plugins.precision import make_input_cast, make_output_cast
from polyshard_policies.functions import RecursivePolicy
from torch import nn

from ._common_utils import _get_module_fsdp_state, warn
from .wrap import (
    WRAP_OVERRIDES,
    FunctionPolicy,
    _or_policy,
    _Policy,
    _post_order_apply,
    _wrap,
    _wrap_module_cls_individually,
)


def _auto_wrap(
    root_module: nn.Module,
    policy: FunctionPolicy | _Policy,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    root_kwargs: dict[str, Any],
    fsdp_fn: Callable[..., nn.Module],
) -> None:
    """Call ``fsdp_fn(module, **kwargs)`` for what ``policy`` chooses in ``root_module``, children first.

    ``root_module`` is not wrapped itself, even where ``policy``, a function or a policy object, chooses it.
    ``root_kwargs`` are the arguments of the root's wrapper but the module and the policy; with ``mixed_precision``,
    modules of its ``_module_classes_to_ignore`` are wrapped apart without it.

    Raises:
        AlreadyShardedError: (a ``ValueError``) something in ``root_module`` is an FSDP instance.
        ConfigError: (a ``ValueError``) a policy object chose a module with frozen and trainable parameters, and
            ``use_orig_params`` is False.
    """
    for module_name, module in root_module.named_modules():
        if _get_module_fsdp_state(module) is not None:
            raise AlreadyShardedError(
                f"FSDP auto wrapping requires modules to not already have FSDP applied but found {module_name} in\n"
                f"{root_module}\nLet the policy choose {module_name} too, or wrap by hand all the way up."
            )
    mixed_precision = root_kwargs["mixed_precision"]
    apart = () if mixed_precision is None else tuple(mixed_precision._module_classes_to_ignore)
    if isinstance(policy, _Policy):
        plan = policy._run_policy(root_module, ignored_modules, root_kwargs)
        for module in root_module.modules():
            if module not in ignored_modules and isinstance(module, apart):
                plan.setdefault(module, root_kwargs)
        _validate_frozen_params(root_module, set(plan), ignored_params, root_kwargs.get("use_orig_params", False))
    else:
        if apart:
            also = partial(_wrap_module_cls_individually, module_classes=apart)
            policy = partial(_or_policy, policies=[policy, also])
        chosen = RecursivePolicy(policy).plan(root_module, PolicyContext(ignored_modules, ignored_params))
        plan = dict.fromkeys(chosen, root_kwargs)
    _compute_in_float32(root_module, apart)
    plan.pop(root_module, None)
    _post_order_apply(root_module, lambda module: _wrap(module, fsdp_fn, **plan[module]) if module in plan else None)


def _compute_in_float32(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Make every module in ``root`` of these classes compute in float32, wrapped without mixed precision.

    Floating-point inputs of their forwards are cast to float32 and outputs back, so that the modules after them see the
    precision that they expect.
    """
    chosen = [module for module in root.modules() if isinstance(module, classes)]
    for module in chosen:
        setattr(module, WRAP_OVERRIDES, {"mixed_precision": None})
        casts = _Float32Casts()
        module.register_forward_pre_hook(casts.before, with_kwargs=True)
        module.register_forward_hook(casts.after)
    if chosen:
        # "instacnes" is how torch.distributed.fsdp spells it, and what filters match.
        warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
            f"submodules of type:\n{ {type(module) for module in chosen} }\nThese modules will be wrapped as separate "
            "FSDP instacnes with mixed precision disabled.",
        )


class _Float32Casts:
    """The casts before and after one module's forward."""

    def __init__(self) -> None:
        self._cast_inputs = make_input_cast(torch.float32)
        # The dtype of the last floating-point input: outputs and inputs need not pair up, and one must be chosen.
        self._outside = torch.float32

    def before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for tensor in iter_tensors((args, kwargs)):
            if tensor.is_floating_point():
                self._outside = tensor.dtype
        return self._cast_inputs(args, kwargs)

    def after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return make_output_cast(self._outside)(output)


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
    seen, taken = {root_module}, set(ignored_params)

    def visit(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if child not in seen:
                seen.add(child)
                visit(f"{prefix}{name}.", child)
        if module in modules_to_wrap:
            held = {each: prefix + name for name, each in module.named_parameters() if each not in taken}
            taken.update(held)
            _check_uniformly_frozen(prefix.removesuffix("."), held, use_orig_params)

    visit("", root_module)


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
    warn(message)


def _numel(parameters: Collection[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)
