"""What a plugin may not change of a model, noted before it is asked and compared afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModuleState:
    """Attributes of modules, by all their names; parameters and buffers by theirs.

    Modes, hooks and children are attributes of modules, too.
    """

    attributes: dict[str, dict[str, Any]]
    trained: dict[str, bool]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, root: nn.Module, values: bool = True) -> ModuleState:
        """As it is now; ``values``: those of parameters and buffers too, which cannot be read inside a step."""
        modules = root.named_modules(remove_duplicate=False)
        attributes = {name: {key: _held(value) for key, value in vars(module).items()} for name, module in modules}
        tensors = dict([*root.named_parameters(), *root.named_buffers()])
        trained = {name: each.requires_grad for name, each in tensors.items()}
        return cls(attributes, trained, {name: each.detach().clone() for name, each in tensors.items() if values})

    def check(self, root: nn.Module, by: str = "it", *, may_hook: bool = False) -> None:
        """Compare it with what it is now.

        ``by``: who may have changed it. ``may_hook``: it may have added forward hooks.
        """
        now = ModuleState.of(root, values=bool(self.values))
        assert now.attributes.keys() == self.attributes.keys(), f"{by} changed which modules there are"
        for name, before in self.attributes.items():
            after = now.attributes[name]
            changed = [
                key
                for key in before.keys() | after.keys()
                if not _same(before.get(key), after.get(key))
                and not (may_hook and key in _HOOKS and _extends(before[key], after[key]))
            ]
            assert not changed, f"{by} changed {', '.join(sorted(changed))} of module {name!r}"
        for name, trained in self.trained.items():
            assert now.trained[name] is trained, f"{by} changed requires_grad of {name}"
        for name, value in self.values.items():
            assert torch.equal(now.values[name], value), f"{by} changed values of {name}"


#: Where modules keep forward hooks.
_HOOKS = frozenset(
    {
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)


def _extends(before: Mapping[int, Any], after: Mapping[int, Any]) -> bool:
    return all(key in after and after[key] is hook for key, hook in before.items())


def _held(value: Any) -> Any:
    """Containers by what they hold: they are changed in place."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set) else value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return list(before) == list(after) and all(before[key] is after[key] for key in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))
    return before is after
