"""The one way to extend the engine: what drop-ins such as ``polyshard_fsdp`` subclass, call and hold.

A drop-in has a wrapper and an API of its own over the engine. It subclasses ``Unit`` (parameters gathered together),
``ModuleState`` and ``ForwardHooks`` (a module in a step), ``Root`` (begin and end of a step), ``ExecutionOrder``
(prefetching), ``Gradients`` and ``ReductionInput`` (which gradients are reduced), ``UnitRanks`` (how they are reduced),
``Bindings`` and ``HeldParameters`` (what modules and optimizers hold), ``GatheredParameters`` (whole parameters), and
leaves the rest to the engine. None of this is a promise to plugins, whose contracts are in ``polyshard.interfaces``.
"""

from __future__ import annotations

from ._torch_private import (
    dtensor_spec,
    in_backward,
    in_functional_call,
    joined_mesh,
    uncompiled_alone,
    without_torch_function,
)
from .events import Events
from .functions.norms import clip_grad_norm
from .functions.whole import gather_whole, own_part, write_back
from .nested import map_tensors
from .planning.extensions import ExtensionArguments, gathers_itself, inner_tensors, rows_of
from .planning.groups import ThenAllReduce, UnitRanks
from .planning.layout import FlatLayout, Piece, Slot, contiguous_stride, dense_stride, product
from .planning.parts import LeafForm, ParameterPlace, TensorPart, dtensor_leaf, is_dtensor, local_of, plain_parameter
from .planning.placements import Placing
from .planning.plan import (
    MODULE_STATE_ATTRIBUTE,
    GroupedModules,
    ManagedParameter,
    parameters_to_shard,
    refuse_embedding,
)
from .planning.values import send_from_first
from .runtime.boundary import watch_output
from .runtime.buffers import Copies, FlatBuffer, piece_in, view_of
from .runtime.gathered import GatheredParameters, refuse_escape, unshard_due
from .runtime.gradients import Gradients
from .runtime.hooks import ForwardHooks, output_hook
from .runtime.module_state import ModuleState
from .runtime.order import ExecutionOrder
from .runtime.parameters import Bindings, GradientTarget, HeldParameters, Shown, Swap, become, part_of_master
from .runtime.placed import PlacedUnit
from .runtime.reduce import Contribution, ReductionInput
from .runtime.replaced import replaced_parameters
from .runtime.root import Root, root_of
from .runtime.states import Fresh, Phase, Reshard, UnitState
from .runtime.streams import CommStreams, streams_for
from .runtime.unit import Unit
from .setup.materialize import is_meta
from .setup.request import Request, refuse_torch_sharded
from .setup.shard import shard_module
