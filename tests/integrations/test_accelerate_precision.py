"""Mixed precision and loss scaling by polyshard_accelerate, against fp32 and on ranks of which one overflows."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate.utils import GradScalerKwargs
from accelerate_ranks import Critic, loader_of, on_ranks, pair_loss, pairs, same, whole
from parity import Block, Net, seeded, units_of
from polyshard import ShardConfig
from polyshard_accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

BLOCKS = ShardConfig(policy=units_of(Block))


def train_in(rank: int, precision: str) -> None:
    # The default scale overflows in the first steps, as it is meant to.
    scaling = GradScalerKwargs(init_scale=64.0)
    accelerator = Accelerator(shard=BLOCKS, cpu=True, mixed_precision=precision, kwargs_handlers=[scaling])
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model, reference = seeded(Net).float(), seeded(Net).float()
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference))
    seen: list[torch.dtype] = []
    model.blocks[0].down.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(pairs()))
    assert accelerator.mixed_precision == precision
    for x, y in loader:
        x, y = x.float(), y.float()
        output = model(x)
        assert output.dtype is torch.float32
        loss = mse_loss(output, y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        all_x, all_y = accelerator.gather((x, y))
        expected = mse_loss(reference(all_x), all_y)
        expected.backward()
        within = {"rtol": 16 * torch.finfo(dtype).eps, "atol": 1e-3}
        torch.testing.assert_close(accelerator.gather(loss.detach()).mean(), expected.detach(), **within)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 1.0), **within)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    assert set(seen) == {dtype}
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    expected_values = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(whole(model), expected_values, rtol=0.0, atol=16 * torch.finfo(dtype).eps)
    accelerator.free_memory()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_what_the_model_computes_in(precision: str) -> None:
    on_ranks(2, train_in, precision)


def overflow(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True, mixed_precision="fp16")
    model = seeded(Net).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = whole(model)
    scale = accelerator.scaler.get_scale()
    # One rank's loss alone is too large for fp16.
    loss = model(torch.ones(2, 3)).square().mean() * (1e30 if rank == 1 else 1.0)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.scaler.get_scale() == scale / 2
    assert scheduler.get_last_lr() == [0.1]
    torch.testing.assert_close(whole(model), before, rtol=0.0, atol=0.0)
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    assert not torch.equal(whole(model)["last.weight"], before["last.weight"])
    accelerator.free_memory()


def test_all_ranks_skip_where_one_overflows() -> None:
    on_ranks(2, overflow)


def scale_a_pair(rank: int) -> None:
    scaling = GradScalerKwargs(init_scale=64.0)
    accelerator = Accelerator(shard=BLOCKS, cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling])
    models = [seeded(Net).float(), seeded(Critic).float()]
    references = copy.deepcopy(models)
    net, critic = accelerator.prepare(*models)
    of_net, of_critic = accelerator.prepare(*(torch.optim.SGD(each.parameters(), lr=0.1) for each in models))
    plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in references]
    x, y = (each[:8].float() for each in pairs().tensors)
    for step, (mine, theirs) in enumerate(zip((of_net, of_critic), plain, strict=True)):
        for each in (of_net, of_critic, *plain):
            each.zero_grad()
        accelerator.backward(pair_loss(net, critic, x, y, step))
        pair_loss(*references, x, y, step).backward()
        # Of one model, while the other's optimizer has still to get its gradients.
        norm = accelerator.clip_grad_norm_((net, critic)[step].parameters(), 0.1)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(references[step].parameters(), 0.1), rtol=1e-2, atol=1e-3
        )
        mine.step()
        theirs.step()
    same(net, references[0], rtol=0.0, atol=1e-3)
    same(critic, references[1], rtol=0.0, atol=1e-3)
    accelerator.free_memory()


def test_clipping_one_of_two_models_leaves_the_others_gradients_scaled() -> None:
    on_ranks(2, scale_a_pair)
