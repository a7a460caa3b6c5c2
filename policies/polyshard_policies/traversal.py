"""Walking over a model the way policies do: without what is ignored, and each shared module once."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from polyshard.interfaces import PolicyContext
from torch import nn

#: Containers without a forward: their gather would never be issued, so their parameters belong to what holds them.
UNCALLED: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def candidates(root: nn.Module, context: PolicyContext) -> Iterator[tuple[str, nn.Module]]:
    """Fully-qualified name and module of all below ``root`` that may be chosen, in the order of ``root.modules()``."""
    ignored = all_ignored(context)
    for name, module in root.named_modules():
        if module is not root and module not in ignored:
            yield name, module


def all_ignored(context: PolicyContext) -> frozenset[nn.Module]:
    """The ignored modules and everything inside them."""
    return frozenset(inner for module in context.ignored_modules for inner in module.modules())


def counted_parameters(module: nn.Module, context: PolicyContext) -> dict[nn.Parameter, int]:
    """The parameters in ``module`` that are not ignored, each with its number of elements; shared ones once."""
    left_out = set(context.ignored_parameters)
    for ignored in context.ignored_modules:
        left_out.update(ignored.parameters())
    return {parameter: parameter.numel() for parameter in module.parameters() if parameter not in left_out}


def separable(root: nn.Module, chosen: Collection[nn.Module], context: PolicyContext) -> list[nn.Module]:
    """The outermost modules below ``root`` that could be units beside the ``chosen`` ones.

    Each is called as a whole, holds parameters that are not ignored, holds and is held by none of ``chosen``, and
    shares no parameter with anything outside of it.
    """
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, set()).add(module)
    ignored, taken = all_ignored(context), set(chosen)
    found: list[nn.Module] = []
    waiting = list(root.children())[::-1]
    while waiting:
        module = waiting.pop()
        if module in ignored or module in taken or module in found:
            continue
        inside = set(module.modules())
        if isinstance(module, UNCALLED) or inside & taken:
            waiting += list(module.children())[::-1]
            continue
        parameters = counted_parameters(module, context)
        if parameters and all(holders[parameter] <= inside for parameter in parameters):
            found.append(module)
    return found
