"""What PyTorch's FSDP tests ask of the hybrid strategies, with numbers at world size 4."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from fsdp_parity.training import ddp, full_parameters
from parity import chain
from polyshard.errors import UnsupportedError
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy
from polyshard_fsdp._init_utils import _init_intra_and_inter_node_groups
from torch import nn


@functools.cache
def pair_of_groups(world_size: int) -> tuple[Any, Any]:
    """Two ranks a shard group. Made once a process: every pair costs connections."""
    group = dist.group.WORLD
    assert group is not None
    assert group.size() == world_size
    return _init_intra_and_inter_node_groups(group, 2)


def net(ranks: Ranks) -> Any:
    """Three layers, of sizes that no number of ranks divides; the same on all ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)]
    names = ("lin1", "tanh1", "lin2", "tanh2", "lin3")
    return chain(**dict(zip(names, layers, strict=True))).to(ranks.device)


def batch(ranks: Ranks, step: int) -> torch.Tensor:
    """Another on every rank."""
    torch.manual_seed(100 * step + ranks.rank)
    return torch.randn(4, 7, device=ranks.device)


@across(4)
def test_other_groups_are_refused(ranks: Ranks) -> None:
    """The first forward refuses instances with other groups than the first one's, before anything is communicated."""
    shard, replicate = pair_of_groups(ranks.world_size)
    other = dist.new_group()
    cases = [((other, replicate), "intra-node process groups do not match"), ((shard, other), "inter-node process gr")]
    for groups, words in cases:
        model = net(ranks)
        wrap = functools.partial(FSDP, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        model.lin1 = wrap(model.lin1, process_group=groups)
        outer = wrap(model, process_group=(shard, replicate))
        with pytest.raises(ValueError, match=words):
            outer(batch(ranks, 0))


@across(4)
@subtests(hybrid_outside=[False, True], use_orig_params=[False, True])
def test_a_mixture(ranks: Ranks, hybrid_outside: bool, use_orig_params: bool) -> None:
    """A hybrid instance beside others over the same ranks, whichever is the outer one: DDP's norms and parameters."""
    pair: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "process_group": pair_of_groups(ranks.world_size),
    }
    plain: dict[str, Any] = {"sharding_strategy": ShardingStrategy.FULL_SHARD}
    inner, outer = (plain, pair) if hybrid_outside else (pair, plain)
    reference, model = ddp(ranks, net(ranks)), net(ranks)
    model.lin1 = FSDP(model.lin1, use_orig_params=use_orig_params, **inner)  # type: ignore[assignment]
    wrapped = FSDP(model, use_orig_params=use_orig_params, **outer)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, wrapped)]
    for step in range(3):
        losses = []
        for each in (reference, wrapped):
            loss = each(batch(ranks, step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        norms = [nn.utils.clip_grad_norm_(reference.parameters(), 0.1), wrapped.clip_grad_norm_(0.1)]
        for each in optimizers:
            each.step()
            each.zero_grad()
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(norms[1], norms[0])
    for (name, mine), theirs in zip(full_parameters(wrapped).items(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), msg=f"{name}: {{}}".format)


@across(4)
def test_a_mixture_over_fewer_ranks_is_refused(ranks: Ranks) -> None:
    """An instance over other ranks than a hybrid one reaches, in one model: by name, with nothing changed."""
    groups = pair_of_groups(ranks.world_size)
    model = net(ranks)
    model.lin1 = FSDP(  # type: ignore[assignment]
        model.lin1, use_orig_params=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=groups
    )
    wrapped = FSDP(model, use_orig_params=True, process_group=groups[0])
    before = [parameter.detach().clone() for parameter in wrapped.parameters()]
    words = "'lin1' has ShardingStrategy.HYBRID_SHARD over 4 ranks and '.root.' has ShardingStrategy.FULL_SHARD over 2"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=words):
            wrapped(batch(ranks, 0))
    torch.testing.assert_close([parameter.detach() for parameter in wrapped.parameters()], before, rtol=0, atol=0)
