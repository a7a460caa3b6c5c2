"""Which submodules are wrapped: policies as functions and as objects, and wrapping by hand inside ``enable_wrap``.

A function policy is called as ``policy(module=..., recurse=..., nonwrapped_numel=...)``: with ``recurse=True`` on the
way down, to ask whether to look at the module's children, and with ``recurse=False`` on the way up, to ask whether the
module is wrapped. ``nonwrapped_numel`` counts the elements of its parameters, on the way up less those wrapped below.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from polyshard.errors import ConfigAssertionError, ConfigError, UnsupportedError
from polyshard.interfaces import PolicyContext
from polyshard_policies.functions import RecursivePolicy
from torch import nn

from ._common_utils import WRAP_OVERRIDES
from ._torch_settings import is_torchs

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

#: Called as ``policy(module=..., recurse=..., nonwrapped_numel=...)``.
FunctionPolicy = Callable[..., bool]
#: For each module to wrap, the arguments of its wrapper.
WrapPlan = dict[nn.Module, dict[str, Any]]
#: What wraps: a wrapper class, or a function that shards a module in place and returns it.
WrapFunction = Callable[..., nn.Module]


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Function policy that wraps every submodule."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Function policy that wraps the modules for which ``lambda_fn`` is True; fix ``lambda_fn`` with ``partial``."""
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: set[type[nn.Module]]
) -> bool:
    """Function policy that wraps a transformer's layers, given by their classes.

    What is tied across the model, embedding and head say, is left to the root and so stays in one unit.
    """
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Function policy that wraps a module, from the leaves up, when enough elements in it are in no wrapper yet.

    Args:
        module: The module that is asked about.
        recurse: Whether the question is to look at its children, or to wrap it.
        nonwrapped_numel: Elements that no wrapper holds.
        min_num_params: Elements that make a wrapper of their own.
        force_leaf_modules: Classes whose children are never wrapped; None for ``FORCE_LEAF_MODULES`` of this function.
        exclude_wrap_modules: Classes that are not wrapped themselves; None for ``EXCLUDE_WRAP_MODULES`` of this
            function.
    """
    if recurse:
        kept_out = force_leaf_modules
        if kept_out is None:
            kept_out = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    else:
        kept_out = exclude_wrap_modules
        if kept_out is None:
            kept_out = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(kept_out))


# Attributes, because scripts extend them: `size_based_auto_wrap_policy.FORCE_LEAF_MODULES | {MyLayer}`.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    """Function policy that wraps instances of ``module_classes``."""
    return recurse or isinstance(module, tuple(module_classes))


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """The same with another order of arguments; takes and ignores any others."""
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[FunctionPolicy]) -> bool:
    """Function policy that answers True where any of ``policies`` does."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


class _Policy(ABC):
    """A policy as an object: it plans the whole model at once, and may give each module its own arguments."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """For each module to wrap, the arguments of its wrapper; ``root_kwargs`` are those of the root's."""


def is_policy_object(policy: object) -> bool:
    """Whether ``policy`` plans whole models; torch's own policy objects do it in the same way."""
    return isinstance(policy, _Policy) or is_torchs(policy, "_Policy")


class ModuleWrapPolicy(_Policy):
    """Wraps every instance of the given classes with the root's arguments.

    Also a function policy, so that it can be one of the ``policies`` of ``_or_policy``.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Whether to recurse into ``module``, which is always so, or to wrap it."""
        return _module_wrap_policy(module, recurse, nonwrapped_numel=-1, module_classes=self._module_classes)

    def __repr__(self) -> str:
        return f"{super().__repr__()}({self._module_classes})"


class CustomPolicy(_Policy):
    """Wraps what a function chooses.

    The function takes a module and returns False or an empty dict to leave it, True to wrap it with the root's
    arguments, or a dict of arguments that replace the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Raises ``ConfigError`` (a ``ValueError``) for any other answer."""
        plan: WrapPlan = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer: object = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ConfigError(
                    "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned "
                    f"{answer} for module {name!r} ({type(module).__name__}). Return a bool, or the arguments that "
                    "this module's wrapper should have instead of the root's."
                )
            if answer:
                plan[module] = {**root_kwargs, **answer} if isinstance(answer, dict) else dict(root_kwargs)
        return plan


class _ConfigAutoWrap:
    """The context that ``enable_wrap`` opens: a wrapper class and the arguments that ``wrap`` gives it."""

    # A context variable, so that ranks that are threads of one process do not see each other's context.
    _current: ContextVar[dict[str, Any] | None] = ContextVar("polyshard_fsdp.enable_wrap", default=None)

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    @staticmethod
    def enable_autowrap_context(kwargs: dict[str, Any]) -> None:
        """Open the context.

        Raises ``UnsupportedError`` (a ``NotImplementedError``) inside another one, ``ConfigAssertionError`` (an
        ``AssertionError``) without ``wrapper_cls``.
        """
        if _ConfigAutoWrap._current.get() is not None:
            raise UnsupportedError(
                "You are already within an autowrap context and we currently do not supported nested autowrap. "
                "Leave the outer enable_wrap() first, or pass other arguments to wrap() inside it."
            )
        if "wrapper_cls" not in kwargs:
            raise ConfigAssertionError(
                "Expected to pass in wrapper_cls arg into _ConfigAutoWrap. Give the class that wrap() wraps with."
            )
        _ConfigAutoWrap._current.set(dict(kwargs))

    @staticmethod
    def disable_autowrap_context() -> None:
        """Close the context."""
        _ConfigAutoWrap._current.set(None)

    def __enter__(self) -> None:
        self.enable_autowrap_context(self.kwargs)

    def __exit__(self, *_: object) -> None:
        self.disable_autowrap_context()


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Iterator[None]:
    """A context in which ``wrap`` wraps with ``wrapper_cls(module, **wrapper_kwargs)``.

    Raises ``UnsupportedError`` (a ``NotImplementedError``) inside another such context.
    """
    with _ConfigAutoWrap(wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """``module`` wrapped as the surrounding ``enable_wrap`` says, where ``wrap_overrides`` win; outside, itself."""
    context = _ConfigAutoWrap._current.get()
    return module if context is None else _wrap(module, **{**context, **wrap_overrides})


def _wrap(module: nn.Module, wrapper_cls: WrapFunction, **kwargs: Any) -> nn.Module:
    """``wrapper_cls(module, **kwargs)``, where the module's own ``_wrap_overrides`` win."""
    if wrapper_cls is None:
        raise ConfigAssertionError("Expected wrapper_cls to be set. Give the class or function that wraps.")
    return wrapper_cls(module, **{**kwargs, **getattr(module, WRAP_OVERRIDES, {})})


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: FunctionPolicy,
    wrapper_cls: WrapFunction,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap what a function policy chooses in ``module``, and ``module`` itself unless ``only_wrap_children``.

    Returns ``module`` or its wrapper, and the number of elements in wrappers. Raises ``ConfigAssertionError`` (an
    ``AssertionError``) without a policy or wrapper, and where something is wrapped already.
    """
    if auto_wrap_policy is None:
        raise ConfigAssertionError("Must specify auto_wrap_policy. always_wrap_policy wraps every module.")
    if wrapper_cls is None:
        raise ConfigAssertionError("Must specify wrapper_cls. Give the class or function that wraps.")
    _refuse_wrapped(module, wrapper_cls, ignored_modules)
    # A root is never asked about itself: in a holder, `module` is a child like any other.
    root = module if only_wrap_children else nn.ModuleList([module])

    def ask(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if module is root and not only_wrap_children:
            return True
        return auto_wrap_policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)

    chosen = RecursivePolicy(ask).plan(root, PolicyContext(ignored_modules, ignored_params))
    inside = {parameter for chosen_module in chosen for parameter in chosen_module.parameters()}
    numel = sum(parameter.numel() for parameter in inside - ignored_params)
    _post_order_apply(root, lambda found: _wrap(found, wrapper_cls, **kwargs) if found in chosen else None)
    return (module if root is module else next(root.children())), numel


def _refuse_wrapped(module: nn.Module, wrapper_cls: WrapFunction, ignored_modules: Collection[nn.Module]) -> None:
    if not isinstance(wrapper_cls, type):
        return
    for name, child in module.named_modules():
        if child not in ignored_modules and isinstance(child, wrapper_cls):
            raise ConfigAssertionError(
                f"Child module {child} is already wrapped by {wrapper_cls}, as {name!r}. Leave it to the policy, or "
                "ignore it."
            )


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` once for every module in ``root_module``, children first; what it returns takes the module's place.

    None leaves the module where it is. A module with several places is replaced in all of them: reached through a place
    that kept it, it would compute with parameters that nothing gathers. Raises ``ConfigAssertionError`` (an
    ``AssertionError``) where ``fn`` returns something else, or anything for the root, which has no place.
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
                        f"fn should return None or an nn.Module but got {replacement} for child {name!r} of "
                        f"{type(parent).__name__}."
                    )
            if child in replaced:
                setattr(parent, name, replaced[child])

    visit(root_module)
    if fn(root_module) is not None:
        raise ConfigAssertionError(
            "Non-root modules should have their parent module set but got None: the root "
            f"({type(root_module).__name__}) cannot be replaced. Wrap it in the caller."
        )


def _construct_wrap_fn(
    root_module: nn.Module, target_module_to_kwargs: WrapPlan, fsdp_fn: WrapFunction
) -> Callable[[nn.Module], nn.Module | None]:
    """What ``_post_order_apply`` calls to carry out a plan; it leaves the root, which its caller wraps."""

    def wrap_chosen(module: nn.Module) -> nn.Module | None:
        if module is root_module or module not in target_module_to_kwargs:
            return None
        return fsdp_fn(module, **target_module_to_kwargs[module])

    return wrap_chosen


def _run_mixed_precision_override_policy(
    root_module: nn.Module,
    module_classes: Iterable[type[nn.Module]],
    ignored_modules: set[nn.Module],
    root_kwargs: dict[str, Any],
    target_module_to_kwargs: WrapPlan,
) -> WrapPlan:
    """Add the instances of ``module_classes`` to a plan, and take mixed precision from all of them.

    Changes and returns ``target_module_to_kwargs``.
    """
    classes = tuple(set(module_classes))
    for module in root_module.modules():
        if module not in ignored_modules and isinstance(module, classes):
            kwargs = target_module_to_kwargs.get(module, root_kwargs)
            target_module_to_kwargs[module] = {**kwargs, "mixed_precision": None}
    return target_module_to_kwargs
