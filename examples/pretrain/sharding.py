"""From a model on the meta device to one that this rank trains its share of."""

from __future__ import annotations

import dataclasses

import polyshard
import torch
from activations import checkpoint_blocks
from model import Config, Initializer, Model, build_on_meta
from parallel import parallelize
from settings import Settings
from torch.distributed.device_mesh import DeviceMesh


def build_sharded(settings: Settings, config: Config, device: torch.device, mesh: DeviceMesh) -> Model:
    """Build, prepare and shard the model; each rank keeps its share, in fp32. Every rank of ``mesh`` calls it.

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
        mesh=mesh,
        shard=("edp", "ep", "cp"),
        replicate="dp_replicate" if settings.shard.strategy.hybrid else None,
    )
    polyshard.shard(model, shard, initializer=Initializer(model, settings.training.seed))
    return model


def make_optimizer(model: torch.nn.Module, settings: Settings, device: torch.device) -> torch.optim.AdamW:
    """AdamW over this rank's pieces. Matrices decay, embeddings too; vectors do not."""
    wanted = settings.optimizer
    matrices: list[torch.nn.Parameter] = []
    vectors: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        # The whole parameter's shape: a piece of a matrix is a vector.
        whole = len(polyshard.placement(parameter).shape)
        (matrices if whole > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": wanted.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # One kernel for all pieces, where there are kernels.
    fused = device.type == "cuda"
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=(wanted.beta1, wanted.beta2), eps=wanted.eps, fused=fused)
