"""What PyTorch's core FSDP tests assert: parity with DDP, hooks, and what autograd sees."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.mixed_models import CastReference, assert_near, whole_parameters
from fsdp_parity.models import (
    CUDAInitMode,
    FSDPInitMode,
    TransformerWithSharedParams,
    expected_warnings,
    wrap_fsdp,
)
from fsdp_parity.ranks import Pools, Ranks, across
from fsdp_parity.subtests import subtests
from fsdp_parity.training import assert_same_parameters, ddp, full_parameters, plain_transformer
from polyshard_fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, _runtime_utils
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import TrainingState
from polyshard_fsdp._flat_param import FlatParamHandle
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer
from torch.nn.modules.batchnorm import _BatchNorm

FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
CUT = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
LINEARS = 5
LEARNING_RATE = 1e-2
#: That `torch.cuda._sleep` spins for 250 ms on a GPU of 2 GHz: far longer than a step.
CYCLES = 500_000_000


def held_up(ranks: Ranks) -> None:
    """Hold up the device's current stream; the CPU has no streams to overtake."""
    if not ranks.on_cpu:
        torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]


@across(2)
@subtests(late=["step", "reductions", "releases"], strategy=CUT, use_orig_params=[False, True])
def test_what_comes_late_is_waited_for(
    ranks: Ranks, late: str, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    """A device that is held up behind the loss, before each reduction or each release: parameters are DDP's."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(LINEARS))).to(ranks.device)
    policy = ModuleWrapPolicy({nn.Linear})
    settings: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model, reference = wrap_fsdp(copy.deepcopy(plain), auto_wrap_policy=policy, **settings), ddp(ranks, plain)
    holder, name = (dist, "reduce_scatter_tensor") if late == "reductions" else (_runtime_utils, "_reshard")
    original, calls = getattr(holder, name), []

    def delayed(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        held_up(ranks)
        with warnings.catch_warnings():
            # torch 2.13 has another name for it; a model written before that patches this one.
            warnings.filterwarnings("ignore", "`torch.distributed.reduce_scatter_tensor`", FutureWarning)
            return original(*args, **kwargs)

    optimizers = [torch.optim.SGD(each.parameters(), lr=LEARNING_RATE, momentum=0.9) for each in (model, reference)]
    generator = torch.Generator().manual_seed(ranks.rank)
    with mock.patch.object(holder, name, delayed) if late != "step" else nullcontext():
        for _ in range(2):
            x = torch.randn(4, 8, generator=generator).to(ranks.device)
            for each, optimizer in zip((model, reference), optimizers, strict=True):
                loss = each(x).square().sum()
                if late == "step":
                    held_up(ranks)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert late != "reductions" or len(calls) == 2 * LINEARS
    assert late != "releases" or len(calls) >= 2 * LINEARS
    assert_same_parameters(full_parameters(model), dict(plain.named_parameters()))


def _transformer(ranks: Ranks, settings: dict[str, Any], deterministic: bool = False) -> Any:
    return TransformerWithSharedParams.init(
        ranks.group, FSDPInitMode.RECURSIVE, CUDAInitMode.CUDA_AFTER, settings, deterministic, device=ranks.device
    )


def _trained(ranks: Ranks, model: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model_input = model.module.get_input(ranks.device)
        model.module.get_loss(model_input, model(*model_input)).backward()
        optimizer.step()
    model._assert_state(TrainingState.IDLE)


def param_change_after_init(ranks: Ranks, mixed_precision: bool) -> None:
    """New values written into a parameter's ``.data`` after wrapping are what the next forward computes with."""
    settings = {"mixed_precision": MixedPrecision()} if mixed_precision else {}
    unchanged = _transformer(ranks, settings, deterministic=True)
    model_input = unchanged.module.get_input(ranks.device)
    reference = unchanged(*model_input)
    changed = _transformer(ranks, settings, deterministic=True)
    nn.init.normal_(next(changed.parameters()).data)
    output = changed(*model_input)
    assert not torch.allclose(reference, output), "the output does not show the change to a parameter after wrapping"
    # What the changed shards amount to, in a model that was never sharded.
    plain = plain_transformer(ranks)
    torch.testing.assert_close(plain(*model_input), reference)
    with torch.no_grad():
        for parameter, value in zip(plain.parameters(), full_parameters(changed).values(), strict=True):
            parameter.copy_(value)
    torch.testing.assert_close(plain(*model_input), output)


@across(2)
def test_pre_backward_hook_registration_after_state_dict(ranks: Ranks) -> None:
    model = _transformer(ranks, {})
    _trained(ranks, model, 2)
    with expected_warnings():
        model.load_state_dict(model.state_dict())
    _assert_one_hook(ranks, model)


def _assert_one_hook(ranks: Ranks, model: Any) -> None:
    """The output carries one backward hook, and keeps it; by it the backward finds whole parameters and trains them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.zero_grad()
    before = full_parameters(model)
    model_input = model.module.get_input(ranks.device)
    output = model(*model_input)
    assert len(output._backward_hooks) == 1
    loss = model.module.get_loss(model_input, output).to(ranks.device)
    loss.backward()
    assert len(output._backward_hooks) == 1
    optimizer.step()
    assert len(output._backward_hooks) == 1
    after = full_parameters(model)
    same = [name for name, value in after.items() if torch.equal(value, before[name])]
    assert not same, f"backward and the step left {same} as they were"


@across(2)
def test_register_functions_called(ranks: Ranks) -> None:
    """Forward registers its hooks through functions found at call time; training then goes on as DDP's."""
    model = _transformer(ranks, {}, deterministic=True)
    model_input = model.module.get_input(ranks.device)
    original: Callable[..., Any] = _runtime_utils._register_pre_backward_hooks
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    with (
        mock.patch("polyshard_fsdp._runtime_utils._register_pre_backward_hooks", counted),
        mock.patch("polyshard_fsdp._runtime_utils._register_post_backward_hook") as post_backward,
    ):
        assert calls == 0
        assert not post_backward.called
        output = model(*model_input)
        assert calls > 0
        assert post_backward.called
    plain = plain_transformer(ranks)
    torch.testing.assert_close(output, plain(*model_input))
    del output
    reference = ddp(ranks, plain)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=LEARNING_RATE)
        each.module.get_loss(model_input, each(*model_input)).backward()
        optimizer.step()
    assert_same_parameters(full_parameters(model), dict(plain.named_parameters()))


def transformer_no_grad(ranks: Ranks, mixed_precision: bool) -> None:
    """After a step of training, eval's output is the one under ``no_grad``, and a plain model's."""
    precision = FP16 if mixed_precision else None
    model = _transformer(ranks, {"mixed_precision": precision})
    _trained(ranks, model, 1)
    model_input = model.module.get_input(ranks.device)
    model.eval()
    output = model(*model_input)
    with torch.no_grad():
        without_grad = model(*model_input)
    torch.testing.assert_close(output, without_grad)
    if precision is None:
        plain = plain_transformer(ranks)
        with torch.no_grad():
            for parameter, value in zip(plain.parameters(), full_parameters(model).values(), strict=True):
                parameter.copy_(value)
            for buffer, value in zip(plain.buffers(), model.buffers(), strict=True):
                buffer.copy_(value)
            torch.testing.assert_close(plain(*model_input), without_grad)
        return
    reference = CastReference(plain_transformer(ranks), precision, kept=(_BatchNorm,))
    reference.load(whole_parameters(model))
    with torch.no_grad():
        for buffer, value in zip(reference.module.buffers(), model.buffers(), strict=True):
            buffer.copy_(value)
        assert_near(without_grad, reference(*model_input), torch.float16, "output under no_grad")


@across(2)
@subtests(
    sharding_strategy=CUT,
    use_orig_params=[False, True],
    forward_prefetch=[False, True],
    backward_prefetch=[BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST, None],
)
def test_unshard_params_as_tensors(ranks: Ranks, **settings: Any) -> None:
    """In forward and in backward modules compute with plain tensors, whatever is prefetched; and as DDP does."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(LINEARS))).to(ranks.device)
    reference = ddp(ranks, plain)
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).to(ranks.device) for _ in range(LINEARS)]
    model = wrap_fsdp(nn.Sequential(*layers), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **settings)
    assert len(list(FSDP.fsdp_modules(model))) == LINEARS + 1
    computed_with: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: computed_with.append(module.weight))
    asked: list[bool] = []
    original = FlatParamHandle._use_unsharded_views

    def noted(self: FlatParamHandle, as_params: bool) -> None:
        asked.append(as_params)
        original(self, as_params)

    torch.manual_seed(1 + ranks.rank)
    with mock.patch.object(FlatParamHandle, "_use_unsharded_views", noted):
        for _ in range(3):
            x = torch.randn((2, 3)).to(ranks.device)
            losses = [each(x).sum() for each in (model, reference)]
            torch.testing.assert_close(losses[0], losses[1])
            for loss in losses:
                loss.backward()
    assert len(asked) >= 3 * LINEARS
    assert not any(asked), "parameters were put in place of tensor views"
    assert len(computed_with) == 3 * LINEARS
    assert all(type(weight) is torch.Tensor and weight.requires_grad for weight in computed_with)
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=LEARNING_RATE).step()
    assert_same_parameters(full_parameters(model), dict(plain.named_parameters()))


@pytest.mark.parametrize(
    ("body", "mixed_precision"), [(param_change_after_init, True), *((transformer_no_grad, on) for on in (False, True))]
)
def test_parameters_and_no_grad(ranks: Pools, body: Callable[..., Any], mixed_precision: bool) -> None:
    ranks.run(2, body, mixed_precision)


def compile_around(ranks: Ranks, backend: str, strategy: ShardingStrategy, skip_fsdp_guards: bool) -> None:
    """A compiled FSDP model has the losses of an eager one, and of DDP, whether dynamo guards its modules or not."""
    with warnings.catch_warnings():
        # What the compiler imports warns about the rest of torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    layers = ModuleWrapPolicy({TransformerEncoderLayer, TransformerDecoderLayer})
    settings: dict[str, Any] = {"auto_wrap_policy": layers, "sharding_strategy": strategy, "use_orig_params": True}
    base = plain_transformer(ranks)
    eager = wrap_fsdp(copy.deepcopy(base), ranks.group, **settings)
    wrapped = wrap_fsdp(copy.deepcopy(base), ranks.group, **settings)
    models: list[Any] = [eager, torch.compile(wrapped, backend=backend), ddp(ranks, base)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in models]
    with warnings.catch_warnings(), torch._dynamo.config.patch(skip_fsdp_guards=skip_fsdp_guards):
        # The compiler looks at .grad of the tensors that a frame takes in, and does not silence this in every version.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # Inductor advises to use TensorFloat32, which would be other numbers than the eager model's.
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        warnings.simplefilter("ignore", DeprecationWarning)
        for turn in range(2):
            model_input = eager.get_input(ranks.device)
            losses = []
            for each, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = each(*model_input).sum()
                losses.append(loss.detach())
                loss.backward()
                optimizer.step()
            for other in losses[1:]:
                torch.testing.assert_close(other, losses[0], msg=f"turn {turn}: {{}}".format)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_fsdp_compile(ranks: Pools) -> None:
    # Inductor needs a compiler for C++ on the CPU; what FSDP meets is dynamo.
    backend = "eager" if ranks.device_type == "cpu" else "inductor"
    ranks.run(2, compile_around, backend, ShardingStrategy.FULL_SHARD, True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("strategy", "skip_fsdp_guards"),
    [(ShardingStrategy.FULL_SHARD, False), (ShardingStrategy.SHARD_GRAD_OP, True), (ShardingStrategy.NO_SHARD, False)],
)
def test_fsdp_compile_otherwise(ranks: Pools, strategy: ShardingStrategy, skip_fsdp_guards: bool) -> None:
    backend = "aot_eager" if ranks.device_type == "cpu" else "inductor"
    ranks.run(2, compile_around, backend, strategy, skip_fsdp_guards)
