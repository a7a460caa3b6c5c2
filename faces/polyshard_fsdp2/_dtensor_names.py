"""What programs ask of a ``DTensor``, asked of a parameter: an error that says what to write instead.

Pieces are plain parameters, for torch's foreach and fused optimizers take no others. The class ``nn.Parameter`` gets
the names, and whoever asks a parameter for one is the only one to pay for it; ``hasattr`` says no, as before. A
``DTensor`` has these names itself.
"""

from __future__ import annotations

import threading
from typing import NoReturn

from polyshard.extension import live_roots
from torch import nn

from ._placed import is_placed, is_whole_now

_IN_STATE_DICT = "Write model.state_dict()['{name}'].{asked}"
_LOCAL = "Use the parameter itself"
_INSTEAD = {
    "full_tensor": f"{_IN_STATE_DICT}(), on every rank, or read the parameter inside of "
    "'with polyshard.unsharded(model)'",
    "redistribute": f"{_IN_STATE_DICT}(...), on every rank",
    "placements": _IN_STATE_DICT,
    "device_mesh": _IN_STATE_DICT,
    "to_local": _LOCAL,
    "_local_tensor": _LOCAL,
}

_installing = threading.Lock()


def answer_for_dtensors() -> None:
    """Let parameters say what to write, from now on."""
    with _installing:
        for asked, instead in _INSTEAD.items():
            # Not over a name that a later torch may give parameters.
            if not isinstance(vars(nn.Parameter).get(asked), _Absent) and not hasattr(nn.Parameter, asked):
                setattr(nn.Parameter, asked, _Absent(asked, instead))


class _Absent:
    """A name that parameters have not: attributes of an instance go before it."""

    def __init__(self, asked: str, instead: str) -> None:
        self._asked = asked
        self._instead = instead

    def __get__(self, parameter: nn.Parameter | None, kind: type[nn.Parameter]) -> NoReturn:
        if parameter is None:
            raise AttributeError(f"type object '{kind.__name__}' has no attribute '{self._asked}'")
        missing = f"'{kind.__name__}' object has no attribute '{self._asked}'"
        (found,) = live_roots.find((parameter,))
        if found is not None and found.slot is not None and is_placed(found.unit):
            name = found.unit.parameters[found.slot].names[0]
            if is_whole_now(found.unit):
                held, instead = "is whole here", _LOCAL
            else:
                shape = found.unit.layout.slots[found.slot].shape
                held = f"holds this rank's rows, {tuple(parameter.shape)} of {shape}"
                instead = self._instead.format(name=name, asked=self._asked)
            raise AttributeError(
                f"{missing}: '{name}' is no DTensor but a plain parameter, and {held} (rank {found.root.rank}). "
                f"{instead}."
            )
        raise AttributeError(missing)
