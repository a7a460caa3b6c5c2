"""``size``: units by their number of parameters."""

from __future__ import annotations

from collections.abc import Iterable

from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, UnitPlan, WrapPolicy, resolve_classes
from torch import nn

from .recursive import RecursivePolicy
from .traversal import UNCALLED


class Size(WrapPolicy):
    """``size``: from the leaves up, a module becomes a unit when enough parameters in it are in no unit yet.

    A parameter counts by its elements. Ignored parameters do not count; a shared one counts where it comes first.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        min_num_params: int = 100_000_000,
        force_leaf: type | str | Iterable[type | str] = (nn.MultiheadAttention,),
        exclude: type | str | Iterable[type | str] = UNCALLED,
    ) -> None:
        """Options, all of which may be left out.

        ``min_num_params``: elements that make a unit; with 0, every module that can be reached becomes one.
        ``force_leaf``: classes of modules that stay in one piece: neither they nor what is inside them becomes a unit.
        ``exclude``: classes of modules that do not become units themselves; what is inside them may. Classes are given
        as such or as ``"package.module:Name"``. Raises ``ConfigError`` for values that these cannot take.
        """
        where = f"policy {context.name!r}"
        if not isinstance(min_num_params, int) or isinstance(min_num_params, bool) or min_num_params < 0:
            raise ConfigError(f"min_num_params of {where} is {min_num_params!r}. Give a number of elements, 0 or more.")
        self._min_num_params = min_num_params
        self._force_leaf = resolve_classes(force_leaf, f"force_leaf of {where}")
        self._exclude = resolve_classes(exclude, f"exclude of {where}")

        self._recursive = RecursivePolicy(self._decide)

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        return self._recursive.plan(root, context)

    def reason(self, module: nn.Module, name: str) -> str:
        own = self._recursive.own_numel(module)
        return f"{own:,} parameters of its own, min_num_params is {self._min_num_params:,}"

    def _decide(self, *, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        kept_out = self._force_leaf if recurse else self._exclude
        return nonwrapped_numel >= self._min_num_params and not isinstance(module, kept_out)
