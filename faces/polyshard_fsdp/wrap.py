"""Modules to wrap: torch's policies, and wrapping by hand inside ``enable_wrap``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from polyshard.errors import ConfigAssertionError, UnsupportedError
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from ._torch_private import _or_policy as _or_policy
from ._torch_private import _Policy as _Policy
from ._torch_private import _wrap_module_cls_individually as _wrap_module_cls_individually

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

#: Attribute with arguments that win over all others when the module is wrapped.
WRAP_OVERRIDES = "_wrap_overrides"
#: Called as ``policy(module=..., recurse=..., nonwrapped_numel=...)``: with ``recurse=True`` on the way down, whether
#: to look at the module's children; with ``recurse=False`` on the way up, whether to wrap the module.
FunctionPolicy = Callable[..., bool]
#: The arguments that ``enable_wrap`` was given. A context variable (torch's is a class attribute), so that ranks that
#: are threads of one process do not see each other's.
_context: ContextVar[dict[str, Any] | None] = ContextVar("polyshard_fsdp.enable_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which ``wrap`` wraps with ``wrapper_cls(module, **wrapper_kwargs)``.

    Raises ``UnsupportedError`` (a ``NotImplementedError``) inside another such context.
    """
    if _context.get() is not None:
        raise UnsupportedError(
            "You are already within an autowrap context and we currently do not supported nested autowrap. Leave the "
            "outer enable_wrap() first, or pass other arguments to wrap() inside it."
        )
    token = _context.set({"wrapper_cls": wrapper_cls, **wrapper_kwargs})
    try:
        yield
    finally:
        _context.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped as the surrounding ``enable_wrap`` says, where ``wrap_overrides`` win; outside, itself."""
    context = _context.get()
    return module if context is None else _wrap(module, **{**context, **wrap_overrides})


def _wrap(module: nn.Module, wrapper_cls: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """``wrapper_cls(module, **kwargs)``, where the module's own ``_wrap_overrides`` win."""
    return wrapper_cls(module, **{**kwargs, **getattr(module, WRAP_OVERRIDES, {})})


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` once for every module inside ``root_module``, children first; its result takes the module's place.

    None leaves the module where it is. A module with several places is replaced in all of them: reached through a place
    that kept it, it would compute with parameters that nothing gathers.
    """
    seen = {root_module}
    replaced: dict[nn.Module, nn.Module] = {}

    def visit(parent: nn.Module) -> None:
        # Not `named_children`, which gives a module that a parent holds twice one name alone.
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in seen:
                seen.add(child)
                visit(child)
                replacement: object = fn(child)
                if isinstance(replacement, nn.Module):
                    replaced[child] = replacement
                elif replacement is not None:
                    raise ConfigAssertionError(
                        f"The wrapper of {name!r} in {type(parent).__name__} must return an nn.Module but returned "
                        f"{replacement}."
                    )
            if child in replaced:
                setattr(parent, name, replaced[child])

    visit(root_module)
