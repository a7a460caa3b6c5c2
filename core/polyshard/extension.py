"""The door of the engine for the faces: packages with a wrapper of their own on it, ``polyshard_fsdp`` and its like.

They import the runtime from here alone, which import-linter holds. To subclass, since a face overrides what its users
can see and leaves the rest to the engine: ``Unit`` (parameters gathered together), ``Stage`` (the state of a module),
``Forward`` and ``Root`` (hooks, begin and end of a step), ``Schedule`` (prefetching), ``Gradients`` and
``ReductionInput`` (which gradients are reduced), ``RankGrid`` (how they are reduced), ``Bindings`` and ``MasterViews``
(what modules and optimizers hold). The other names are called or held. None is a promise to plugins, whose contracts
are in ``polyshard.interfaces``.
"""

from __future__ import annotations

from polyshard.engine._torch_private import in_backward, on_gradient
from polyshard.engine.cutting.build import is_meta
from polyshard.engine.gradients.gradients import Gradients
from polyshard.engine.gradients.reducer import Reducer
from polyshard.engine.gradients.reduction_input import Copies, ReductionInput
from polyshard.engine.parameters.bindings import Bindings, ShardedParameter, Shown, Swap
from polyshard.engine.parameters.originals import MasterViews, Originals, Recipient, become
from polyshard.engine.planning.layout import FlatLayout, Slot, contiguous_stride, dense_stride, product
from polyshard.engine.planning.managed_parameter import ManagedParameter
from polyshard.engine.planning.plan import STAGE_ATTRIBUTE, refuse_unshardable
from polyshard.engine.planning.ranks import RankGrid
from polyshard.engine.step.backward import output_hook
from polyshard.engine.step.boundary import pass_through_in
from polyshard.engine.step.forward import Forward
from polyshard.engine.step.root import Root, root_of
from polyshard.engine.step.schedule import Schedule
from polyshard.engine.step.stage import Stage
from polyshard.engine.step.step import Phase
from polyshard.engine.step.unit import Reshard, Unit, UnitState, refuse_escape, unshard_due
from polyshard.engine.surface.gathered import gather_whole, own_part, write_back
from polyshard.engine.surface.live_roots import live_roots
from polyshard.engine.surface.norms import clip_grad_norm
from polyshard.engine.tensors import distinct_tensors, iter_hidden_tensors, iter_tensors, map_tensors
from polyshard.engine.transport.buffer import FlatBuffer, view_of
from polyshard.engine.transport.lanes import Lanes, lanes_for
from polyshard.events import Events

__all__ = [
    "STAGE_ATTRIBUTE",
    "Bindings",
    "Copies",
    "Events",
    "FlatBuffer",
    "FlatLayout",
    "Forward",
    "Gradients",
    "Lanes",
    "ManagedParameter",
    "MasterViews",
    "Originals",
    "Phase",
    "RankGrid",
    "Recipient",
    "Reducer",
    "ReductionInput",
    "Reshard",
    "Root",
    "Schedule",
    "ShardedParameter",
    "Shown",
    "Slot",
    "Stage",
    "Swap",
    "Unit",
    "UnitState",
    "become",
    "clip_grad_norm",
    "contiguous_stride",
    "dense_stride",
    "distinct_tensors",
    "gather_whole",
    "in_backward",
    "is_meta",
    "iter_hidden_tensors",
    "iter_tensors",
    "lanes_for",
    "live_roots",
    "map_tensors",
    "on_gradient",
    "output_hook",
    "own_part",
    "pass_through_in",
    "product",
    "refuse_escape",
    "refuse_unshardable",
    "root_of",
    "unshard_due",
    "view_of",
    "write_back",
]
