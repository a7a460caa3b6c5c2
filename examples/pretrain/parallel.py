"""The mesh of a job's ranks, and what they divide along it beside polyshard: ``tp``, ``ep``, and sequences, ``cp``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experts import Experts
from model import Model
from settings import Parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from transformers import AttentionInterface, MixtralConfig


def make_mesh(parallel: Parallel, world_size: int, device: torch.device) -> DeviceMesh:
    """All ranks. Every rank calls it. Raises ``ConfigError`` where settings do not fit.

    Ranks along ``dp_replicate`` have copies, along ``edp`` other shards, along ``ep`` other experts and other shards of
    the rest, along ``cp`` other parts of the same sequences and other shards, along ``tp`` other parts of matrices.
    Those along ``pp`` have other stages, and the same sequences. ``edp`` and ``ep`` together are ``parallel.dp_shard``.
    """
    sizes = parallel.sizes(world_size)
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def mesh_of_stage(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that have this rank's stage; all of them without a pipeline."""
    names = mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in names if name != "pp")] if "pp" in names else mesh


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """Make the parameters that ranks along ``tp`` and ``ep`` divide ``DTensor``, in place; attend along ``cp``."""
    experts = isinstance(model.config, MixtralConfig)
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], _tensor_parallel(experts))
        if model.config.tie_word_embeddings:
            # The plan has made two parameters of one.
            model.lm_head.weight = model.model.embed_tokens.weight
    if experts and mesh["ep"].size() > 1:
        for block in model.model.layers:
            _share_experts(block.mlp.experts, mesh["ep"])
    if mesh["cp"].size() > 1:
        AttentionInterface.register("context_parallel", partial(_attend, mesh["cp"]))
        model.set_attn_implementation("context_parallel")


def _attend(
    cp: DeviceMesh,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of this rank's part of each sequence to all parts before it."""
    key, value = (_whole(each, cp).repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    places = torch.arange(key.size(2), device=key.device)
    seen = places.chunk(cp.size())[cp.get_local_rank()][:, None] >= places
    made = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropout, scale=scaling)
    return made.transpose(1, 2).contiguous(), None


def _whole(part: torch.Tensor, cp: DeviceMesh) -> torch.Tensor:
    """Keys or values of whole sequences, ``[sequences, heads, context, features]``; gradients of ranks are added up."""
    placed = DTensor.from_local(part, cp, [Shard(2)]).redistribute(placements=[Replicate()])
    return placed.to_local(grad_placements=[Partial()])


def _tensor_parallel(experts: bool) -> dict[str, Any]:
    """The plan for ``parallelize_module``. Between blocks, activations are whole on all ranks."""
    block: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
    }
    if experts:
        # Tokens are divided instead of matrices: to experts, ranks along tp are ranks with other data.
        block["mlp.experts"] = PrepareModuleInputOutput(
            input_layouts=(Replicate(),) * 3,
            desired_input_layouts=(Shard(0),) * 3,
            use_local_input=True,
            output_layouts=(Shard(0),),
            desired_output_layouts=(Replicate(),),
        )
    else:
        block |= {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.{name}": style for name, style in block.items()},
    }


def _share_experts(experts: Experts, ep: DeviceMesh) -> None:
    """Leave each rank its experts: as ``Shard(0)`` cuts them, the last ranks have fewer, or none."""
    number, each = experts.bounds[-1], -(-experts.bounds[-1] // ep.size())
    experts.bounds = [min(rank * each, number) for rank in range(ep.size() + 1)]
    experts.group = ep.get_group()
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(parameter.data, ep, [Shard(0)])))
