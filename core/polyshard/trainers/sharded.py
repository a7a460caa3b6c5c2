"""The module that polyshard has sharded, in what a user holds of it."""

from __future__ import annotations

from torch import nn

from ..planning.plan import MODULE_STATE_ATTRIBUTE
from ..runtime.module_state import ModuleState


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` itself was given to ``polyshard.shard`` or ``fully_shard``, not one around or inside it."""
    # Those of the drop-ins' own kind have no root before their first forward, and are not served.
    return type(module.__dict__.get(MODULE_STATE_ATTRIBUTE)) is ModuleState


def sharded_in(module: nn.Module) -> nn.Module | None:
    """The sharded module that ``module`` is, by itself or in polyshard's wrapper; None where it is none."""
    inner = module._modules.get("module")
    return next((each for each in (module, inner) if each is not None and is_sharded(each)), None)
