"""Training by polyshard_accelerate on gloo processes, against the unsharded model in plain torch."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import (
    DataLoaderConfiguration,
    GradScalerKwargs,
    find_executable_batch_size,
)
from accelerate_ranks import Critic, loader_of, on_ranks, pair_loss, pairs, same, same_gradients
from parity import Block, Net, seeded, units_of, whole
from polyshard import ShardConfig
from polyshard.errors import ConfigError, StateError, UnsupportedError
from polyshard_accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

BLOCKS = ShardConfig(policy=units_of(Block))

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


# Steps of two epochs.
def train_two_epochs(rank: int, split_batches: bool, strategy: str) -> None:
    loaders = DataLoaderConfiguration(split_batches=split_batches)
    config = ShardConfig(policy=units_of(Block), strategy=strategy)
    accelerator = Accelerator(shard=config, cpu=True, gradient_accumulation_steps=2, dataloader_config=loaders)
    model, reference = seeded(Net), seeded(Net)
    optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference))
    schedulers = [LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, plain)]
    # 7 batches of 6 or 12 an epoch: the last one of an epoch is a step of its own.
    size = 6 * (dist.get_world_size() if split_batches else 1)
    loader = loader_of(pairs(7 * 6 * dist.get_world_size()), size, shuffle=True)
    scheduler, loader, optimizer, model = accelerator.prepare(schedulers[0], loader, optimizer, model)
    steps = 0
    while steps < 8:
        for index, (x, y) in enumerate(loader):
            synchronises = index % 2 == 1 or index == 6
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                assert accelerator.sync_gradients == synchronises
                if synchronises:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            all_x, all_y = accelerator.gather((x, y))
            expected = mse_loss(reference(all_x), all_y)
            (expected / 2).backward()
            torch.testing.assert_close(accelerator.gather(loss.detach()).mean(), expected.detach(), **EXACT)
            if synchronises:
                plain_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                torch.testing.assert_close(norm, plain_norm, **EXACT)
                plain.step()
                plain.zero_grad()
                for _ in range(1 if split_batches else dist.get_world_size()):
                    schedulers[1].step()
                steps += 1
            assert scheduler.get_last_lr() == schedulers[1].get_last_lr()
    same(model, reference)
    accelerator.free_memory()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "split_batches", "strategy"),
    [
        (2, True, "full_shard"),
        (2, False, "no_shard"),
        pytest.param(3, False, "shard_grad_op", marks=pytest.mark.nightly),
    ],
)
def test_steps_are_those_of_the_unsharded_model(world_size: int, split_batches: bool, strategy: str) -> None:
    on_ranks(world_size, train_two_epochs, split_batches, strategy)


# Accumulation.
def gradients_wait_inside_no_sync(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    model, reference = seeded(Net), seeded(Net)
    model, loader = accelerator.prepare(model, loader_of(pairs()))
    x, y = next(iter(loader))
    all_x, all_y = accelerator.gather((x, y))
    for turn in range(3):
        mse_loss(reference(all_x), all_y).backward()
        if turn % 2 == 0:
            with accelerator.no_sync(model):
                accelerator.backward(mse_loss(model(x), y))
            continue
        accelerator.backward(mse_loss(model(x), y))
        same_gradients(model, reference)
    accelerator.backward(mse_loss(model(x), y))
    mse_loss(reference(all_x), all_y).backward()
    same_gradients(model, reference)

    # Several forwards, then their backwards, of which the last reduces.
    model.zero_grad()
    reference.zero_grad()
    losses = [mse_loss(model(x), y) for _ in range(3)]
    with accelerator.no_sync(model):
        for number, loss in enumerate(reversed(losses)):
            mse_loss(reference(all_x), all_y).backward()
            if number < 2:
                accelerator.backward(loss)
                assert all(parameter.grad is None for parameter in model.parameters())
                continue
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(loss)
    same_gradients(model, reference)
    accelerator.free_memory()


# Clipping.
def clipping_is_that_of_the_unsharded_model_and_refused_while_gradients_wait(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True, gradient_accumulation_steps=2)
    model, reference = seeded(Net), seeded(Net)
    model, loader = accelerator.prepare(model, loader_of(pairs()))
    batches = iter(loader)
    x, y = next(batches)
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(x), y))
        for call in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
            with pytest.raises(StateError, match="wait for the last backward of an accumulation"):
                call(model.parameters(), 0.1)
    (mse_loss(reference(accelerator.gather(x)), accelerator.gather(y)) / 2).backward()
    x, y = next(batches)
    with accelerator.accumulate(model):
        accelerator.backward(mse_loss(model(x), y))
        accelerator.clip_grad_value_(model.parameters(), 0.02)
    (mse_loss(reference(accelerator.gather(x)), accelerator.gather(y)) / 2).backward()
    nn.utils.clip_grad_value_(reference.parameters(), 0.02)
    for order in (2.0, 1.0, math.inf):
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.01, norm_type=order)
        expected_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type=order)
        torch.testing.assert_close(norm, expected_norm, **EXACT)
    # A part of the model, which one rank may hold nothing of.
    norm = accelerator.clip_grad_norm_(model.last.parameters(), 0.001)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.last.parameters(), 0.001), **EXACT)
    same_gradients(model, reference)
    accelerator.free_memory()


def an_optimizer_over_flat_parameters(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    reference = seeded(Net)
    model, loader = accelerator.prepare(seeded(Net), loader_of(pairs()))
    flat = polyshard.flat_parameters(model)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    optimizer = accelerator.prepare(torch.optim.AdamW(flat, lr=1e-2))
    for x, y in loader:
        accelerator.backward(mse_loss(model(x), y))
        mse_loss(reference(accelerator.gather(x)), accelerator.gather(y)).backward()
        # Either form: gradients of parameters are views of those of flat ones.
        accelerator.clip_grad_value_(model.parameters(), 0.03)
        accelerator.clip_grad_value_(flat, 0.02)
        nn.utils.clip_grad_value_(reference.parameters(), 0.02)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.05)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.05), **EXACT)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    same(model, reference)
    accelerator.free_memory()


# Several models, several calls.
def two_models_with_optimizers_of_their_own(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    models = [seeded(Net), seeded(Critic)]
    references = copy.deepcopy(models)
    optimizers, plain = (
        [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in both] for both in (models, references)
    )
    # One after the other, then again. What is sharded has other parameters than an optimizer that was left out.
    net, of_net = accelerator.prepare(models[0], optimizers[0])
    late = torch.optim.AdamW(models[1].parameters())
    critic, loader, of_critic = accelerator.prepare(models[1], loader_of(pairs()), optimizers[1])
    with pytest.raises(ConfigError, match=r"is not among the parameters of Net or Critic.*together with it"):
        accelerator.prepare(late)
    assert accelerator.prepare(net, of_net) == (net, of_net)
    assert accelerator.unwrap_model(net) is models[0]
    for x, y in loader:
        all_x, all_y = accelerator.gather((x, y))
        for step in range(2):
            accelerator.backward(pair_loss(net, critic, x, y, step))
            pair_loss(*references, all_x, all_y, step).backward()
            for mine, theirs in ((of_net, plain[0]), (of_critic, plain[1]))[step : step + 1]:
                mine.step()
                theirs.step()
            for each in (of_net, of_critic, *plain):
                each.zero_grad()
    same(net, references[0])
    same(critic, references[1])
    accelerator.free_memory()


def an_optimizer_that_took_steps_with_the_whole_model(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    model, reference = seeded(Net), seeded(Net)
    optimizer, plain = (torch.optim.AdamW(each.parameters()) for each in (model, reference))
    x = torch.ones(2, 3).double()
    for turn in range(3):
        for each, stepper in ((model, optimizer), (reference, plain)):
            each(x).sum().backward()
            stepper.step()
            stepper.zero_grad()
        if not turn:
            model, optimizer = accelerator.prepare(model, optimizer)
    same(model, reference)
    # It may come again.
    assert accelerator.prepare(optimizer) is optimizer
    accelerator.free_memory()


def evaluation_only(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    reference = seeded(Net)
    left_whole = accelerator.prepare_model(seeded(Net), evaluation_mode=True)
    if rank == 0:
        # Nobody else takes part.
        torch.testing.assert_close(left_whole(torch.ones(2, 3).double()), reference(torch.ones(2, 3).double()))
    assert left_whole.first.weight.shape == (5, 3)
    # 22 examples: the last batch is filled up with the first ones.
    data = pairs(22)
    model, loader = accelerator.prepare(seeded(Net), loader_of(data))
    model.eval()
    gathered = []
    with torch.no_grad():
        for x, y in loader:
            gathered.append(accelerator.gather_for_metrics((model(x), y)))
    outputs, targets = (torch.cat(each) for each in zip(*gathered, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(outputs, reference(data.tensors[0]), **EXACT)
    assert torch.equal(targets, data.tensors[1])
    with (
        pytest.raises(UnsupportedError, match="every rank must run a sharded model equally often"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    with accelerator.join_uneven_inputs([model]):
        model(torch.ones(1, 3).double())
    accelerator.free_memory()


def a_smaller_batch_starts_with_a_new_model(rank: int) -> None:
    accelerator = Accelerator(shard=BLOCKS, cpu=True)
    sizes, models = [], []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 4)
    def train(batch_size: int) -> torch.Tensor:
        sizes.append(batch_size)
        accelerator.free_memory()
        for former in models:
            with pytest.raises(StateError, match=r"came after polyshard\.close"):
                former(torch.ones(1, 3).double())
        model = seeded(Net)
        models.append(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(pairs(), batch_size))
        for x, y in loader:
            output = model(x)
            if batch_size > 4:
                output.register_hook(out_of_memory)
            accelerator.backward(mse_loss(output, y))
            optimizer.step()
            optimizer.zero_grad()
        return next(iter(whole(model).values()))

    train()
    assert sizes == [8, 4]
    with pytest.raises(StateError, match=r"prepare\(\) came after polyshard\.close"):
        accelerator.prepare(models[0])
    accelerator.clear()


def out_of_memory(_: torch.Tensor) -> None:
    raise RuntimeError("CUDA out of memory.")


def a_compiled_model(rank: int) -> None:
    with warnings.catch_warnings():
        # Dynamo looks at them in what it traces.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        accelerator = Accelerator(shard=BLOCKS, cpu=True, dynamo_backend="eager")
        model, reference = seeded(Net), seeded(Net)
        optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, reference))
        compiled, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(pairs()))
        assert accelerator.unwrap_model(compiled, keep_torch_compile=False) is model
        for index, (x, y) in enumerate(loader):
            if index % 2 == 0:
                with accelerator.no_sync(compiled):
                    accelerator.backward(mse_loss(compiled(x), y))
                    assert all(parameter.grad is None for parameter in model.parameters())
            else:
                accelerator.backward(mse_loss(compiled(x), y))
            mse_loss(reference(accelerator.gather(x)), accelerator.gather(y)).backward()
            if index % 2 == 1:
                for each in (optimizer, plain):
                    each.step()
                    each.zero_grad()
        same(model, reference)
        accelerator.free_memory()


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


def all_ranks_skip_where_one_overflows(rank: int) -> None:
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


def clipping_one_of_two_models_leaves_the_others_gradients_scaled(rank: int) -> None:
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


@pytest.mark.parametrize(
    "body",
    [
        gradients_wait_inside_no_sync,
        clipping_is_that_of_the_unsharded_model_and_refused_while_gradients_wait,
        an_optimizer_over_flat_parameters,
        pytest.param(two_models_with_optimizers_of_their_own, marks=pytest.mark.slow),
        an_optimizer_that_took_steps_with_the_whole_model,
        evaluation_only,
        a_smaller_batch_starts_with_a_new_model,
        pytest.param(a_compiled_model, marks=pytest.mark.slow),
        pytest.param(all_ranks_skip_where_one_overflows, marks=pytest.mark.slow),
        pytest.param(clipping_one_of_two_models_leaves_the_others_gradients_scaled, marks=pytest.mark.slow),
    ],
    ids=lambda body: body.__name__,
)
def test_on_ranks(body: Callable[[int], object]) -> None:
    on_ranks(2, body)
