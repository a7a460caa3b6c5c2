"""State dicts of modules: sharded parameters as ``DTensor``, over this rank's piece, without communication."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from polyshard.extension import Unit
from torch import nn

from ._initialising import WatchedParameters
from ._placed import as_dtensor, is_whole_now, piece_of


def answer_state_dicts(units: Iterable[Unit]) -> None:
    """Let ``state_dict`` and ``load_state_dict`` of the modules that hold parameters of ``units`` speak of wholes."""
    held: dict[nn.Module, dict[str, Unit]] = {}
    for unit in units:
        for parameter in unit.parameters:
            for module, key in parameter.sites:
                held.setdefault(module, {})[key] = unit
    for module, by_key in held.items():
        answers = _Answers(by_key)
        module.register_state_dict_pre_hook(answers.before_save)  # type: ignore[no-untyped-call]
        # Torch leaves a mark on the hook, which a method takes none of.
        module.register_state_dict_post_hook(partial(answers.after_save))  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(answers.before_load)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(answers.after_load)  # type: ignore[no-untyped-call]


class _Answers:
    """Hooks of one module."""

    def __init__(self, units: dict[str, Unit]) -> None:
        self._units = units

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for unit in self._units.values():
            if unit.ahead:
                unit.reshard()

    def after_save(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
        for key, unit in self._units.items():
            value = state_dict.get(prefix + key)
            if value is None or is_whole_now(unit):
                continue
            if value.shape != unit.originals.tensors[0].shape:
                # What the user put there, which the next forward takes up.
                value = piece_of(unit, value, f"state_dict(): '{unit.parameters[0].names[0]}'")
            state_dict[prefix + key] = as_dtensor(unit, value)

    def before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        if isinstance(module._parameters, WatchedParameters):
            module._parameters.hand_out()
        # A copy that is load_state_dict's own.
        for key, unit in self._units.items():
            value = state_dict.get(prefix + key)
            if value is None or is_whole_now(unit):
                continue
            if unit.ahead:
                unit.reshard()
            state_dict[prefix + key] = piece_of(unit, value, f"load_state_dict(): '{unit.parameters[0].names[0]}'")

    def after_load(self, module: nn.Module, incompatible_keys: object) -> None:
        # What assign=True put there goes into the parameters that were there before: an optimizer that is made next
        # would hold others.
        for unit in self._units.values():
            if not is_whole_now(unit):
                unit.adopt_changes()
