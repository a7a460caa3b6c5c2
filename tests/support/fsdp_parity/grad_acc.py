"""Gradients over several backwards, with and without ``no_sync``, beside DDP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from polyshard_fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch import nn

from fsdp_parity.models import CUDAInitMode, FSDPInitMode, TransformerWithSharedParams, wrap_fsdp
from fsdp_parity.ranks import Ranks
from fsdp_parity.subtests import pairs, run_subtests
from fsdp_parity.training import assert_on_cpu, assert_same_parameters, ddp, full_parameters

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


def accumulated(ranks: Ranks, use_orig_params: bool, turns: Sequence[tuple[bool, int]], offload: bool) -> None:
    """Two rounds of backwards and a step, the last backward of a round always synchronising; the transformer comes to
    DDP's losses and parameters. ``turns``: (whether under ``no_sync``, how many), in order.
    """
    prefetches = (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
    # Prefetching is for what is gathered again, and that are parameters of FULL_SHARD alone.
    first, *others = STRATEGIES
    cases: list[dict[str, Sequence[Any]]] = [
        {"backward_prefetch": prefetches, "sharding_strategy": [first]},
        {"backward_prefetch": prefetches[1:2], "sharding_strategy": others},
    ]
    settings = {"use_orig_params": use_orig_params, "cpu_offload": CPUOffload(offload_params=offload)}
    # The same for every case: torch's DDP knows none of the settings.
    plain = _transformer(ranks, FSDPInitMode.NO_FSDP)
    reference = ddp(ranks, plain)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9)
    wanted = []
    for round_ in range(2):
        losses = _round(reference, plain, ranks, turns, round_)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append((losses, {name: p.detach().clone() for name, p in plain.named_parameters()}))
    for axes in cases:
        run_subtests(axes, _accumulated, ranks, turns, wanted, **settings)


def _transformer(ranks: Ranks, mode: FSDPInitMode, settings: dict[str, Any] | None = None) -> Any:
    return TransformerWithSharedParams.init(
        ranks.group,
        mode,
        CUDAInitMode.CUDA_BEFORE,
        settings,
        deterministic=True,
        add_bn=False,
        device=ranks.device,
    )


def _accumulated(
    ranks: Ranks,
    turns: Sequence[tuple[bool, int]],
    wanted: Sequence[tuple[list[torch.Tensor], dict[str, torch.Tensor]]],
    **settings: Any,
) -> None:
    model = _transformer(ranks, FSDPInitMode.RECURSIVE, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for round_, (losses, parameters) in enumerate(wanted):
        got = _round(model, model.module, ranks, turns, round_)
        torch.testing.assert_close(got, losses)
        for parameter in model.parameters():
            # As the optimizer needs them: this rank's part, where the parameter is.
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                assert parameter.grad.device == parameter.device
        optimizer.step()
        optimizer.zero_grad()
        if settings["cpu_offload"].offload_params:
            assert_on_cpu(model, "after a step")
        assert_same_parameters(full_parameters(model), parameters)


def _round(
    model: Any, module: TransformerWithSharedParams, ranks: Ranks, turns: Sequence[tuple[bool, int]], round_: int
) -> list[torch.Tensor]:
    without_sync = [each for each, count in turns for _ in range(count)]
    without_sync[-1] = False
    losses = []
    generator = torch.Generator().manual_seed(100 * round_ + ranks.rank)
    for quiet in without_sync:
        batch = module.get_input(ranks.device)
        order = torch.randperm(batch[0].numel(), generator=generator).to(ranks.device)
        batch = (batch[0].view(-1)[order].view_as(batch[0]), batch[1])
        with model.no_sync() if quiet else nullcontext():
            loss = module.get_loss(batch, model(*batch))
            loss.backward()
        losses.append(loss.detach())
    return losses


def unreduced_with_offload(ranks: Ranks, use_orig_params: bool) -> None:
    """Under ``no_sync`` and offloading, ``.grad`` is where the model computes, and the sum of this rank's own."""
    for case in pairs({"sharding_strategy": STRATEGIES}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(ranks.device)
        model: FSDP = wrap_fsdp(
            copy.deepcopy(plain),
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=True),
            **case,
        )
        generator = torch.Generator().manual_seed(ranks.rank)
        for _ in range(2):
            x = torch.randn(5, 3, generator=generator).to(ranks.device)
            plain(x).square().sum().backward()
            with model.no_sync():
                model(x).square().sum().backward()
            own = [p.grad for p in plain.parameters() if p.grad is not None]
            assert_on_cpu(model, "under no_sync")
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert parameter.grad.device == ranks.device
            shown = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            expected = torch.cat([each.flatten() for each in own])
            torch.testing.assert_close(shown[: expected.numel()], expected)
