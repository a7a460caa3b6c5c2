"""``partial``: some units live in host memory, the others stay on the device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import Group, OffloadCapabilities, OffloadManager, PluginContext, UnitSpec, bytes_of

from .kept_slices import KeptSlices
from .parking import ByBudget, ByPattern, ParkingRule

#: Tensors of a master's size that AdamW keeps.
_ADAMW_STATES = 2.0
_KEEPS = {"nothing": False, "compute": True}


class PartialOffload(OffloadManager):
    """``partial``: parks some units with another manager; the engine serves the others as if there were none.

    With ``keep = "compute"`` the device keeps what a parked unit's rank sends, in the dtype of compute, from a forward
    to the end of its backward: the master crosses the link once instead of twice. See ``begin_forward`` of the contract
    for why not longer.
    """

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        units: str | Iterable[str] = (),
        device_bytes: int | str | None = None,
        state_factor: float | None = None,
        keep: str = "nothing",
        inner: Any = "cpu",
    ) -> None:
        """Options. One of ``units`` and ``device_bytes`` says which units are parked.

        ``units``: shell patterns of the names of modules whose units are parked; see ``ByPattern``.
        ``device_bytes``: what the units that stay may take of each rank's device, as an int or text such as
        ``"4 GiB"``: masters, gradients and the optimizer's state. The rest is parked; see ``ByBudget``. Counted anew in
        each call of ``shard`` and ``fully_shard``.
        ``state_factor``: bytes of the optimizer's state for each byte of master, for ``device_bytes``: 2 (AdamW) where
        it is left out.
        ``keep``: ``"nothing"`` or ``"compute"``.
        ``inner``: the manager that parks: a name, or a table of a name and options.

        Raises ``ConfigError`` for values that these cannot take.
        """
        where = f"offload {context.name!r}"
        if keep not in _KEEPS:
            raise ConfigError(f"keep of {where} is {keep!r}. Choose from: {', '.join(_KEEPS)}.")
        self._rule = _rule(units, device_bytes, state_factor, where)
        self._kept = KeptSlices() if _KEEPS[keep] else None
        self._inner = context.construct(Group.OFFLOAD, inner)
        if not self._inner.capabilities.parks:
            raise ConfigError(f"inner of {where} is {inner!r}, which parks nothing. Name a manager that does: 'cpu'.")

    @property
    def capabilities(self) -> OffloadCapabilities:
        return OffloadCapabilities(parks=True)

    def units_to_park(self, units: Sequence[UnitSpec]) -> Collection[UnitSpec]:
        return self._inner.units_to_park(self._rule.parked(units))

    def place(self, unit: UnitSpec, shard: torch.Tensor) -> torch.Tensor:
        return self._inner.place(unit, shard)

    @torch.no_grad()
    def fetch(self, unit: UnitSpec, master: torch.Tensor, own_slice: torch.Tensor) -> None:
        if self._kept is None:
            self._inner.fetch(unit, master, own_slice)
        elif not self._kept.serve(master, own_slice):
            self._inner.fetch(unit, master, own_slice)
            self._kept.keep(master, own_slice)

    def store_grad(self, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        return self._inner.store_grad(unit, grad, into)

    def begin_forward(self) -> None:
        if self._kept is not None:
            self._kept.expire()
        self._inner.begin_forward()

    def sync_for_step(self) -> None:
        self._inner.sync_for_step()


def _rule(
    units: str | Iterable[str], device_bytes: int | str | None, state_factor: float | None, where: str
) -> ParkingRule:
    patterns = _patterns(units, where)
    if patterns and device_bytes is not None:
        raise ConfigError(
            f"{where} has both units and device_bytes, which may mean different units. Give the patterns of what is "
            "parked, or the bytes that stay."
        )
    if device_bytes is not None:
        return ByBudget(_nbytes(device_bytes, where), _state_factor(state_factor, where))
    if not patterns:
        raise ConfigError(
            f"{where} does not say what is parked. Give units = ['blocks.*'], patterns of the names of modules, or "
            "device_bytes = '4 GiB', what may stay on the device. To park everything, choose 'cpu'."
        )
    if state_factor is not None:
        raise ConfigError(
            f"state_factor of {where} is {state_factor!r}, which changes nothing where units says what is parked. "
            "Leave it out."
        )
    return ByPattern(patterns, f"units of {where}")


def _patterns(units: str | Iterable[str], where: str) -> tuple[str, ...]:
    patterns = (units,) if isinstance(units, str) else units
    listed = tuple(patterns) if isinstance(patterns, Iterable) else (patterns,)
    if not all(isinstance(pattern, str) and pattern for pattern in listed):
        raise ConfigError(f"units of {where} takes patterns of names, such as ['blocks.[0-9]'], not {units!r}.")
    return listed


def _nbytes(value: int | str, where: str) -> int:
    nbytes = bytes_of(value)
    if nbytes is None or nbytes < 0:
        raise ConfigError(
            f"device_bytes of {where} must be bytes, 0 or more, a number or text such as '4 GiB', not {value!r}."
        )
    return nbytes


def _state_factor(value: float | None, where: str) -> float:
    if value is None:
        return _ADAMW_STATES
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(
            f"state_factor of {where} is {value!r}. Give bytes of optimizer state for each byte of master, 0 or more: "
            "2 for AdamW, 1 for SGD with momentum, 0 for SGD."
        )
    return float(value)
