"""Plans a training step before anything is trained: memory, bytes between ranks, time.

`plan` runs one step of the model on the meta device, through the engine as it is; `plan_pipeline` one of its stages.
"""

from __future__ import annotations

from .pipeline import Order, Pipeline, PipelinePlan, PipelineTime, RankPlan, plan_pipeline
from .plan import Plan, Traffic, UnitGroup, largest_fitting, plan
from .recording import Kind, MemoryTimeline, Moment, Operation, Span
from .timing import (
    DEVICES,
    LINKS,
    Device,
    Link,
    LinkModel,
    StepTime,
    find_device,
    find_links,
    fitted,
    read_links,
    timed,
)
from .trace import TracedModel, TracedStep
from .workload import (
    OPTIMIZERS,
    Batch,
    BatchMaker,
    FusedAdamW,
    NoOptimizer,
    OptimizerModel,
    RunOptimizer,
    ShapedBatches,
    batches_of,
    find_optimizer,
)

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
    "Order",
    "Pipeline",
    "PipelinePlan",
    "PipelineTime",
    "Plan",
    "RankPlan",
    "RunOptimizer",
    "ShapedBatches",
    "Span",
    "StepTime",
    "TracedModel",
    "TracedStep",
    "Traffic",
    "UnitGroup",
    "batches_of",
    "find_device",
    "find_links",
    "find_optimizer",
    "fitted",
    "largest_fitting",
    "plan",
    "plan_pipeline",
    "read_links",
    "timed",
]
