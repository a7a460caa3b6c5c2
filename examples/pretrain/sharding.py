"""From a model on the meta device to one that this rank trains its share of."""

from __future__ import annotations

import dataclasses

import polyshard
import torch
from activations import checkpoint_blocks
from model import Config, Initializer, Model, Stage, build_on_meta
from parallel import mesh_of_stage, parallelize
from settings import Settings
from torch.distributed.device_mesh import DeviceMesh


def build_sharded(
    settings: Settings,
    config: Config,
    device: torch.device,
    mesh: DeviceMesh,
    stage: tuple[int, int] = (0, 1),
) -> Model | Stage:
    """Build, prepare and shard the model; each rank keeps its share, in fp32. Every rank of ``mesh`` calls it.

    ``stage``: the number of a stage, and how many there are; without a pipeline the model itself is sharded.

    Other parallelisms come first. The order of the rest matters to none of the three: checkpointing stands inside of a
    block's forward, compiling around that, and polyshard gathers around both.
    """
    model = build_on_meta(config)
    parallelize(model, mesh)
    blocks = model.model.layers
    checkpoint_blocks(blocks, settings.activation_checkpointing)
    if settings.compile.blocks:
        for block in blocks:
            block.compile(backend=settings.compile.backend)
    shard = dataclasses.replace(
        settings.shard,
        device=device,
        mesh=mesh_of_stage(mesh),
        shard=("edp", "ep", "cp"),
        replicate="dp_replicate" if settings.shard.strategy.hybrid else None,
    )
    part: Model | Stage = model if stage == (0, 1) else Stage(model, *stage)
    shared = part.shared if isinstance(part, Stage) else None
    if shared is not None:
        # What two stages have must be a unit of its own in both.
        policies = [shard.policy, lambda module: module is shared]
        shard = dataclasses.replace(shard, policy={"name": "or", "policies": policies})
    polyshard.shard(part, shard, initializer=Initializer(part, settings.training.seed))
    return part


def make_optimizer(model: torch.nn.Module, settings: Settings, device: torch.device) -> torch.optim.AdamW:
    """AdamW over sharded parameters. Matrices decay, embeddings too; vectors do not."""
    wanted = settings.optimizer
    parameters = list(model.parameters())
    matrices, vectors = ([each for each in parameters if (each.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # One kernel for all, where there are kernels.
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.beta1, wanted.beta2), eps=wanted.eps, fused=fused)
