"""Walking over a model the way policies do: without what is ignored, and each shared module once."""

from __future__ import annotations

from collections.abc import Iterator

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
