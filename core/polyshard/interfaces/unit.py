"""What plugins are told about each unit that they serve."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit as plugins see it: parameters that are gathered together, in one flat buffer."""

    name: str
    """Unique in the model: the fully-qualified name of the unit's module in the root, empty for the root itself. Behind
    that ``suffix``, which the second and later units of one module have. Where a model that is sharded becomes part of
    a larger one, all later calls bring the name that it has there: what a plugin keeps for a unit's life belongs to
    the unit's master, and not to its name."""
    module_class: type[torch.nn.Module]
    """Class of the unit's module; where a module was split off the outermost one, the outermost one's class."""
    parameter_names: tuple[str, ...]
    """Fully-qualified names of its parameters, in layout order."""
    numel: int
    """Elements of the whole unit, padding included."""
    shard_numel: int
    """Elements of one rank's shard."""
    master_dtype: torch.dtype
    """Dtype of the parameters as the user made them, which the optimizer updates."""
    device: torch.device
    """Where the unit computes."""
    is_root: bool
    """Whether the unit's module is the outermost one, or was split off it."""
    suffix: str = ""
    """What ``name`` ends in where other parameters of the same module form a unit before this one: what tells this one
    from them, ``"[float64]"`` or ``"[float32, frozen]"``. Otherwise empty."""
    trained: bool = True
    """Whether its parameters had ``requires_grad`` when the model was sharded: all of them, or none."""

    @property
    def module_name(self) -> str:
        """Fully-qualified name of the unit's module in the root; empty for the root itself. Several units may share it:
        for settings by name, where ``name`` is for state."""
        return self.name.removesuffix(self.suffix)

    @property
    def label(self) -> str:
        """``name`` for people to read, with ``(root)`` for the outermost module."""
        return f"{self.module_name or '(root)'}{self.suffix}"
