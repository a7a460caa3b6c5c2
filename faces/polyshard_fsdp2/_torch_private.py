"""Private names of torch that this package needs, with the versions in which they were looked at: 2.11 and 2.13."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

#: Before ``torch.distributed.fsdp`` had FSDP2, it was imported from here; Transformers 5.23 and Lightning 2.6 still do.
_OLDER = "torch.distributed._composable.fsdp"


def places() -> list[ModuleType]:
    """The modules that programs import FSDP2 from, the public one first."""
    names = ["torch.distributed.fsdp"]
    if importlib.util.find_spec(_OLDER) is not None:
        names += [_OLDER, f"{_OLDER}.fully_shard"]
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
    return found
