"""Torch's own functions: which of them ``shard()`` exchanges, and how a process gets them back."""

from __future__ import annotations

import polyshard
import torch
from polyshard import ShardConfig
from torch import nn
from torch.optim import optimizer as optimizers

EXCHANGED = {
    "torch.amp.grad_scaler.GradScaler._unscale_grads_",
    "torch.autograd.backward",
    "torch.nn.init.normal_",
    "torch.nn.utils.clip_grad.clip_grad_norm_",
    "torch.nn.utils.clip_grad._get_total_norm",
    "torch.nn.utils.convert_parameters.parameters_to_vector",
    "torch.nn.utils.parametrize.register_parametrization",
    "torch.utils.checkpoint.checkpoint",
}


def sharded() -> nn.Module:
    return polyshard.shard(nn.Linear(4, 2), ShardConfig(collectives={"name": "fake", "rank": 0, "world_size": 2}))


def test_torch_gets_its_functions_back() -> None:
    polyshard.restore_torch()
    assert polyshard.exchanged_functions() == ()
    hooks = len(optimizers._global_optimizer_pre_hooks)  # type: ignore[attr-defined]
    initialise, backward = nn.init.normal_.__code__, torch.autograd.backward.__code__
    unscale = torch.amp.GradScaler._unscale_grads_
    piece = next(sharded().parameters())
    assert set(polyshard.exchanged_functions()) >= EXCHANGED
    assert nn.init.normal_.__code__ is not initialise
    polyshard.restore_torch()
    assert polyshard.exchanged_functions() == ()
    assert nn.init.normal_.__code__ is initialise
    assert torch.autograd.backward.__code__ is backward
    assert torch.amp.GradScaler._unscale_grads_ is unscale
    assert len(optimizers._global_optimizer_pre_hooks) == hooks  # type: ignore[attr-defined]
    # Torch's own again, which takes a piece for a parameter.
    nn.init.normal_(piece, std=0.0)
    assert piece.detach().eq(0).all()


def test_the_next_shard_exchanges_them_again() -> None:
    polyshard.restore_torch()
    model = sharded()
    first = set(polyshard.exchanged_functions())
    polyshard.restore_torch()
    sharded()
    assert set(polyshard.exchanged_functions()) == first >= EXCHANGED
    assert model(torch.ones(1, 4)).shape == (1, 2)
