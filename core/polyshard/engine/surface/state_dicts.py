"""What ``state_dict`` and ``load_state_dict`` mean for a module with sharded parameters: whole ones, or an error.

This rank's pieces under the names of whole parameters look like a model to whoever saves them. They are given to those
alone who ask for pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import StateError
from ..step.root import Root
from ..step.unit import Unit

_of_pieces: ContextVar[bool] = ContextVar("polyshard_state_dicts_of_pieces", default=False)


@contextmanager
def state_dicts_of_pieces() -> Iterator[None]:
    """Inside, on this thread, state dicts of sharded modules are of this rank's pieces."""
    token = _of_pieces.set(True)
    try:
        yield
    finally:
        _of_pieces.reset(token)


def guard_state_dicts(units: Iterable[Unit]) -> None:
    """Let state dicts of the modules that hold parameters of ``units`` be whole, or refused."""
    for unit in units:
        slots: dict[nn.Module, dict[str, int]] = {}
        for index, parameter in enumerate(unit.parameters):
            for module, key in parameter.sites:
                slots.setdefault(module, {})[key] = index
        for module, held in slots.items():
            guard = _Guard(unit, held)
            module.register_state_dict_pre_hook(guard.before_state_dict)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(guard.before_load)  # type: ignore[no-untyped-call]


@dataclass(eq=False, slots=True)
class _Guard:
    """Hooks of one module, for its parameters of one unit."""

    unit: Unit
    slots: Mapping[str, int]

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self._shows_pieces:
            first = self._parameter(next(iter(self.slots.values())))
            raise StateError(
                f"state_dict() found '{first}' sharded (rank {self._rank}): it would hold this rank's pieces under the "
                "names of whole parameters. Save with polyshard.checkpoint.save, or with polyshard.huggingface.save as "
                "save_pretrained would; call polyshard.state.get_model_state_dict, or this inside of 'with "
                "polyshard.unsharded(model)', for whole parameters, or polyshard.local_state_dict(model) for the "
                "pieces of this rank."
            )

    def before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Leave this rank's piece of each whole parameter in ``state_dict``, which is ``load_state_dict``'s own."""
        if self._is_left_alone:
            return
        pieces = {piece.slot: piece for piece in self.unit.pieces}
        for key, index in self.slots.items():
            value: Any = state_dict.get(prefix + key)
            slot, piece = self.unit.layout.slots[index], pieces.get(index)
            gathers = _is_dtensor(value)
            # Whatever else there is will not fit, and torch says so.
            if not gathers and (type(value) is not torch.Tensor and type(value) is not nn.Parameter):
                continue
            if not self._shows_pieces:
                if gathers:
                    state_dict[prefix + key] = value.detach().full_tensor()
                continue
            if tuple(value.shape) != slot.shape:
                raise StateError(
                    f"load_state_dict() got '{self._parameter(index)}' in shape {tuple(value.shape)}, "
                    f"and the whole parameter has {slot.shape} (rank {self._rank}). Give whole parameters, which each "
                    "rank takes its part of, or load what polyshard.local_state_dict returned with "
                    "polyshard.load_local_state_dict."
                )
            # Of any mesh, cut otherwise than the parameter. All ranks come by here.
            whole = value.detach().full_tensor() if gathers else value.detach()
            if whole.stride() != slot.stride:
                whole = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device=value.device).copy_(
                    whole
                )
            start, stop = (piece.start, piece.stop) if piece is not None else (0, 0)
            own = whole.as_strided(*slot.shown(stop - start), whole.storage_offset() + start)
            # What was gathered is nobody else's, and would be kept alive by a piece that is assigned.
            state_dict[prefix + key] = own.clone() if gathers else own

    # A module that is copied or pickled by itself holds pieces as before, and may not drag the model along.
    def __deepcopy__(self, memo: dict[int, Any]) -> _Guard:
        return self

    def __reduce__(self) -> tuple[type[_NoGuard], tuple[()]]:
        return _NoGuard, ()

    @property
    def _shows_pieces(self) -> bool:
        root = self.unit.step
        assert isinstance(root, Root)
        return not (self.unit.grid.shard is None or root.unsharded or self._is_left_alone)

    @property
    def _is_left_alone(self) -> bool:
        root = self.unit.step
        assert isinstance(root, Root)
        return root.answers_state_dicts or _of_pieces.get()

    def _parameter(self, index: int) -> str:
        return self.unit.parameters[index].names[0]

    @property
    def _rank(self) -> int:
        return self.unit.grid.world.rank


def _is_dtensor(value: object) -> bool:
    # Where nobody has imported them, which takes long, there are none.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


class _NoGuard:
    """Stands for a ``_Guard`` where its module was pickled by itself."""

    def before_state_dict(self, *_: Any) -> None:
        """Let every state dict through."""

    before_load = before_state_dict
