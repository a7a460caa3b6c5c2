"""The contracts that plugins implement, and all that a plugin may import beside ``polyshard.errors``.

=====================  ==========================  ==============================================
entry-point group      contract                    decides
=====================  ==========================  ==============================================
polyshard.collectives  ``Collectives``             how bytes move between ranks
polyshard.precision    ``PrecisionPlugin``         which dtypes compute, travel and accumulate
polyshard.offload      ``OffloadManager``          where shards live between uses
polyshard.policies     ``WrapPolicy``              which modules become units
polyshard.plugins      hooks of ``hookspecs``      nothing: listeners watch
=====================  ==========================  ==============================================

Every plugin is a callable ``(context: PluginContext, **options) -> instance`` with a class attribute ``api_version``.
"""

from .collectives import (
    COMPLETED,
    MOST_RANKS,
    BufferRole,
    Collectives,
    CollectivesCapabilities,
    CollectivesDecorator,
    ReduceOp,
    Work,
)
from .context import CURRENT_API, OLDEST_API, Constructor, Group, PluginContext, RankAndSize
from .listener import Clock, Listener, Observer, StreamClock, UnitEvent, UnitOperation
from .offload import OffloadCapabilities, OffloadManager
from .options import bytes_of, resolve_callable, resolve_class, resolve_classes, resolve_object
from .precision import (
    FormedWeights,
    GatherEncoding,
    InputCast,
    LinearForm,
    OutputCast,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    WeightPiece,
)
from .units import (
    PARAMETER_ALIGNMENT_BYTES,
    SLICE_ALIGNMENT_BYTES,
    UNIT_OVERRIDES,
    PolicyContext,
    UnitPlan,
    UnitSpec,
    WrapPolicy,
)

__all__ = [
    "COMPLETED",
    "CURRENT_API",
    "MOST_RANKS",
    "OLDEST_API",
    "PARAMETER_ALIGNMENT_BYTES",
    "SLICE_ALIGNMENT_BYTES",
    "UNIT_OVERRIDES",
    "BufferRole",
    "Clock",
    "Collectives",
    "CollectivesCapabilities",
    "CollectivesDecorator",
    "Constructor",
    "FormedWeights",
    "GatherEncoding",
    "Group",
    "InputCast",
    "LinearForm",
    "Listener",
    "Observer",
    "OffloadCapabilities",
    "OffloadManager",
    "OutputCast",
    "PluginContext",
    "PolicyContext",
    "PrecisionCapabilities",
    "PrecisionPlugin",
    "RankAndSize",
    "ReduceOp",
    "StreamClock",
    "UnitDtypes",
    "UnitEvent",
    "UnitOperation",
    "UnitPlan",
    "UnitSpec",
    "WeightPiece",
    "Work",
    "WrapPolicy",
    "bytes_of",
    "resolve_callable",
    "resolve_class",
    "resolve_classes",
    "resolve_object",
]
