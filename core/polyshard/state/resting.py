"""A model between steps: when its state may be read and changed."""

from __future__ import annotations

from torch import nn

from ..errors import StateError
from ..planning.plan import MODULE_STATE_ATTRIBUTE
from ..runtime.root import Root
from ..runtime.step import Phase
from ..setup.build import refuse_broken


def resting_root(model: nn.Module, call: str) -> Root:
    """What the units of ``model`` share, with changes that the user made to parameters taken up.

    Raises:
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
    """
    refuse_broken(model, call)
    module = model
    # The wrapper holds the sharded module.
    if MODULE_STATE_ATTRIBUTE not in module.__dict__ and isinstance(model._modules.get("module"), nn.Module):
        module = model.get_submodule("module")
    stage = module.__dict__.get(MODULE_STATE_ATTRIBUTE)
    if stage is None:
        raise StateError(
            f"{call} needs a sharded model, but this {type(model).__name__} is not sharded. "
            "Pass the module that was given to polyshard.shard or fully_shard."
        )
    root: Root = stage.step
    if root.module_states[0] is not stage:
        raise StateError(
            f"{call} needs the outermost sharded module, but '{stage.name}' lies inside "
            f"{type(root.module_states[0].module).__name__} (rank {root.rank}). Pass that."
        )
    root.leave_failed_backward()
    root.refuse_ended(call)
    if root.phase is not Phase.IDLE:
        raise StateError(
            f"{call} was called inside a {root.phase.value} of the model (rank {root.rank}). Call it between steps."
        )
    if root.unsharded:
        raise StateError(f"{call} was called inside polyshard.unsharded() (rank {root.rank}). Leave the context first.")
    # Nobody may take one rank's values for the model's.
    root.take_up_changes(trains=True, all_modules=True)
    return root
