"""The door of the engine for the faces: packages with a wrapper of their own on it, ``polyshard_fsdp`` and its like.

They import the runtime from here alone, which import-linter holds. To subclass, since a face overrides what its users
can see and leaves the rest to the engine: ``Unit`` (parameters gathered together), ``ModuleState`` (the state of a module),
``Forward`` and ``Root`` (hooks, begin and end of a step), ``ExecutionOrder`` (prefetching), ``Gradients`` and
``ReductionInput`` (which gradients are reduced), ``RankGrid`` (how they are reduced), ``Bindings`` and ``MasterViews``
(what modules and optimizers hold). The other names are called or held. None is a promise to plugins, whose contracts
are in ``polyshard.interfaces``.
"""

from __future__ import annotations

from polyshard._torch_private import in_backward, on_gradient
from polyshard.events import Events
from polyshard.functions.lookup import live_roots
from polyshard.functions.norms import clip_grad_norm
from polyshard.functions.whole import gather_whole, own_part, write_back
from polyshard.nested import distinct_tensors, iter_hidden_tensors, iter_tensors, map_tensors
from polyshard.planning.groups import RankGrid
from polyshard.planning.layout import FlatLayout, Slot, contiguous_stride, dense_stride, product
from polyshard.planning.plan import ManagedParameter, refuse_unshardable
from polyshard.runtime.bindings import Bindings, ShardedParameter, Shown, Swap
from polyshard.runtime.gather import FlatBuffer, view_of
from polyshard.runtime.gradients import Gradients
from polyshard.runtime.hooks import Forward, output_hook, pass_through_in
from polyshard.runtime.parameters import MasterViews, Originals, Recipient, become
from polyshard.runtime.reduce import Copies, Reducer, ReductionInput
from polyshard.runtime.root import Root, root_of
from polyshard.runtime.step import Phase
from polyshard.runtime.unit import Reshard, Unit, UnitState, refuse_escape, unshard_due
from polyshard.setup.materialize import is_meta

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
