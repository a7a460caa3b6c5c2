"""Parameters that have memory and no values yet: what initialises them sees each of them whole.

[Note: initialising]
A model from the meta device is sharded, given memory by ``to_empty``, and initialised by methods of its own. These look
at shapes (fans) and draw random numbers, so over pieces they would be wrong in silence. From ``to_empty`` to the first
forward, reading a parameter as an attribute of its module therefore gives a whole tensor. All of one ``fully_shard``
call's are kept, until one of another is read; then this rank keeps its own rows. The first time nothing is there to
gather. A parameter that may have values, since it was let go of, loaded, assigned or handed out as a piece, is gathered
when it is read, which every rank must do alike.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, ValuesView
from typing import Any

import torch
from polyshard.extension import ModuleState, Unit, gather_whole, own_part, view_of
from torch import nn
from torch.utils.hooks import RemovableHandle


class WatchedParameters(dict[str, Any]):
    """A module's ``_parameters``, of which reading one shows the whole while ``watcher`` is there."""

    watcher: Initialising | None = None

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return value if self.watcher is None else self.watcher.whole(value)

    def __setitem__(self, key: str, value: Any) -> None:
        if self.watcher is not None and key in self:
            self.watcher.forget(super().__getitem__(key))
        super().__setitem__(key, value)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self.hand_out()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.hand_out()
        return super().values()

    def hand_out(self) -> None:
        """Whoever is given the pieces may write to them."""
        if self.watcher is not None:
            self.watcher.let_go()
            for value in super().values():
                self.watcher.forget(value)


class _Settled(dict[str, Any]):
    """What it becomes: the engine refers to the object, and reading costs nothing more."""

    watcher: Initialising | None = None


def watch(modules: Iterable[nn.Module]) -> list[WatchedParameters]:
    """Let the ``_parameters`` of ``modules`` be watched. To be called before these are sharded."""
    watched = []
    for module in modules:
        if module._parameters:
            watched.append(WatchedParameters(module._parameters))
            module.__dict__["_parameters"] = watched[-1]
    return watched


class Initialising:
    """Shows whole parameters of ``module_states`` until the first forward of any of their modules."""

    def __init__(self, module_states: Iterable[ModuleState], watched: Iterable[WatchedParameters]) -> None:
        self._stages = tuple(module_states)
        self._watched = tuple(watched)
        self._places: dict[torch.Tensor, tuple[ModuleState, Unit]] = {
            unit.parameters[0].original: (module_state, unit)
            for module_state in self._stages
            for unit in module_state.units
            # Where nothing is cut, what is there is whole.
            if unit.ranks.owner is not None
        }
        self._shown: dict[torch.Tensor, tuple[Unit, torch.Tensor, nn.Parameter]] = {}
        self._stage: ModuleState | None = None
        self._filled: set[Unit] = set()
        self._hooks: list[RemovableHandle] = [
            module_state.module.register_forward_pre_hook(self._before_forward, prepend=True)
            for module_state in self._stages
        ]
        for each in self._watched:
            each.watcher = self

    def whole(self, original: torch.Tensor) -> torch.Tensor:
        """What stands for ``original`` now; itself where it is no piece."""
        place = self._places.get(original)
        if place is None:
            return original
        module_state, unit = place
        if module_state is not self._stage:
            self.let_go()
            self._stage = module_state
        if original not in self._shown:
            if unit in self._filled:
                flat = gather_whole(unit, unit.master)
            else:
                flat = torch.zeros(unit.layout.padded_numel, dtype=unit.master.dtype, device=unit.spec.device)
            slot = unit.layout.slots[0]
            whole = nn.Parameter(view_of(flat, slot.shape, slot.stride, slot.offset), original.requires_grad)
            self._shown[original] = (unit, flat, whole)
        return self._shown[original][2]

    def let_go(self) -> None:
        """Keep this rank's rows of what is shown."""
        with torch.no_grad():
            for unit, flat, whole in self._shown.values():
                slot = unit.layout.slots[0]
                view = view_of(flat, slot.shape, slot.stride, slot.offset)
                if whole.data_ptr() != view.data_ptr():
                    view.copy_(whole)
                unit.master.copy_(own_part(unit, flat))
                self._filled.add(unit)
        self._shown.clear()
        self._stage = None

    def forget(self, original: torch.Tensor) -> None:
        """Drop what is shown for ``original``: its piece gets values in another way."""
        self._shown.pop(original, None)
        place = self._places.get(original)
        if place is not None:
            self._filled.add(place[1])

    def end(self) -> None:
        """From now on modules hold pieces."""
        self.let_go()
        for hook in self._hooks:
            hook.remove()
        for each in self._watched:
            each.watcher = None
            each.__class__ = _Settled  # type: ignore[assignment]

    def _before_forward(self, module: nn.Module, args: object) -> None:
        self.end()
