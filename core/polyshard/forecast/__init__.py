"""What training would take, before anything is trained: memory, bytes between ranks, time.

`plan` runs one step of the model on the meta device, through the engine as it is.
"""

from __future__ import annotations

from .batch import Batch, BatchMaker, ShapedBatches, batches_of
from .device import DEVICES, Device, find_device
from .links import Link, LinkModel, Operation, Span, fitted, read_links
from .memory import Kind, MemoryTimeline, Moment
from .named_links import LINKS, find_links
from .optimizers import OPTIMIZERS, FusedAdamW, NoOptimizer, OptimizerModel, RunOptimizer, find_optimizer
from .plan import Plan, largest_fitting, plan
from .timeline import StepTime, timed
from .trace import TracedModel, TracedStep
from .wire import Wire

__all__ = [
    "DEVICES",
    "LINKS",
    "OPTIMIZERS",
    "Batch",
    "BatchMaker",
    "Device",
    "FusedAdamW",
    "Kind",
    "Link",
    "LinkModel",
    "MemoryTimeline",
    "Moment",
    "NoOptimizer",
    "Operation",
    "OptimizerModel",
    "Plan",
    "RunOptimizer",
    "ShapedBatches",
    "Span",
    "StepTime",
    "TracedModel",
    "TracedStep",
    "Wire",
    "batches_of",
    "find_device",
    "find_links",
    "find_optimizer",
    "fitted",
    "largest_fitting",
    "plan",
    "read_links",
    "timed",
]
