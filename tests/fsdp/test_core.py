"""What PyTorch's core FSDP tests assert: parity with DDP, hooks, and what autograd sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.mixed_models import CastReference, assert_near, whole_parameters
from fsdp_parity.models import (
    CUDAInitMode,
    DummyDDP,
    FSDPInitMode,
    MixtureOfExperts,
    NestedWrappedModuleWithDelay,
    ParityModel,
    TransformerWithSharedParams,
    expected_warnings,
    group_of_own,
    wrap_fsdp,
)
from fsdp_parity.ranks import Pools, Ranks, across
from fsdp_parity.subtests import pairs, run_subtests, subtests
from fsdp_parity.training import (
    LEARNING_RATE,
    assert_same_parameters,
    ddp,
    fsdp_parity,
    full_parameters,
    plain_transformer,
    train_for_several_steps,
    train_reference,
)
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, _runtime_utils
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._flat_param import FlatParamHandle
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

#: No strategy means FULL_SHARD.
AXES: Mapping[str, Sequence[Any]] = {
    "cpu_offload": (CPUOffload(offload_params=True), CPUOffload(offload_params=False)),
    "strategy": (None, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD),
}
FP16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
LINEARS = 5


def delay(ranks: Ranks) -> int:
    """Milliseconds that a stream is held up: far longer than a step on a GPU; the CPU has no streams to overtake."""
    return 2 if ranks.on_cpu else 250


def init_modes(ranks: Ranks, cpu_offload: CPUOffload) -> list[CUDAInitMode]:
    """When the model may move to the device. A model left on the CPU cannot be gathered by NCCL unless it offloads."""
    if ranks.on_cpu:
        return [CUDAInitMode.CUDA_BEFORE]
    modes = [CUDAInitMode.CUDA_AFTER, CUDAInitMode.CUDA_BEFORE]
    return [*modes, CUDAInitMode.CUDA_NEVER] if cpu_offload.offload_params else modes


def _axes(ranks: Ranks, cpu_offload: CPUOffload) -> dict[str, list[Any]]:
    return {
        "cuda_init_mode": init_modes(ranks, cpu_offload),
        "backward_prefetch": [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
        "forward_prefetch": [False, True],
        "use_orig_params": [False, True],
    }


def _parity(
    ranks: Ranks,
    model_class: type[ParityModel],
    cpu_offload: CPUOffload,
    sharding_strategy: ShardingStrategy | None,
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    check: Callable[[Any], None] | None = None,
    ref_init_fn: Callable[[nn.Module], nn.Module] | None = None,
    num_iters: int = 2,
    mixed_precision: MixedPrecision | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Every case against one training of the reference, which no axis changes.

    ``check`` looks at the wrapped model after each training that was not refused.
    """
    reference = train_reference(ranks, model_class, num_iters, mixed_precision, ref_init_fn)

    def case(cuda_init_mode: CUDAInitMode, **settings: Any) -> None:
        model = fsdp_parity(
            ranks,
            model_class,
            reference,
            cuda_init_mode,
            num_iters,
            cpu_offload,
            mixed_precision,
            init_kwargs or {},
            sharding_strategy=sharding_strategy,
            **settings,
        )
        refused = cpu_offload.offload_params and cuda_init_mode is CUDAInitMode.CUDA_AFTER
        if check is not None and not refused:
            check(model.module)

    run_subtests(axes or _axes(ranks, cpu_offload), case)


def transformer(ranks: Ranks, cpu_offload: CPUOffload, strategy: ShardingStrategy | None) -> None:
    _parity(ranks, TransformerWithSharedParams, cpu_offload, strategy)


def delayed_optim_step(ranks: Ranks, cpu_offload: CPUOffload, strategy: ShardingStrategy | None) -> None:
    """The next forward's gathers wait for the optimizer's step, however late it comes."""
    _parity(
        ranks, NestedWrappedModuleWithDelay, cpu_offload, strategy, init_kwargs={"delay_after_loss_ms": delay(ranks)}
    )


def delayed_reduce_scatter(ranks: Ranks, cpu_offload: CPUOffload, strategy: ShardingStrategy | None) -> None:
    """The optimizer waits for the reductions; they go through the attribute of ``torch.distributed``."""

    def check(model: NestedWrappedModuleWithDelay) -> None:
        shards = strategy is not ShardingStrategy.NO_SHARD
        # Four units have parameters: three inside, and the root that the layers outside belong to.
        assert model.delayed_reductions == (2 * 4 if shards else 0)

    _parity(
        ranks,
        NestedWrappedModuleWithDelay,
        cpu_offload,
        strategy,
        check=check,
        init_kwargs={"delay_before_reduction_ms": delay(ranks)},
    )


@contextmanager
def _own_group(ranks: Ranks) -> Iterator[dist.ProcessGroup]:
    own = group_of_own(ranks.group)
    yield own
    dist.destroy_process_group(own)


def mixture_of_experts_with_delay_before_free(
    ranks: Ranks, cpu_offload: CPUOffload, strategy: ShardingStrategy | None
) -> None:
    """An expert with a process group of its own. The plain model averages its gradients itself, so DDP must not."""

    def check(model: MixtureOfExperts) -> None:
        if strategy is None:
            assert model.delayed_frees >= 2, "no reshard of the shared layer was held up in the two forwards"

    with _own_group(ranks) as own:
        _parity(
            ranks,
            MixtureOfExperts,
            cpu_offload,
            strategy,
            check=check,
            ref_init_fn=DummyDDP,
            init_kwargs={"expert_group": own, "delay_before_free_ms": delay(ranks)},
        )


def _transformer(ranks: Ranks, mode: CUDAInitMode, settings: Mapping[str, Any], deterministic: bool = False) -> Any:
    return TransformerWithSharedParams.init(
        ranks.group, FSDPInitMode.RECURSIVE, mode, settings, deterministic, device=ranks.device
    )


def param_change_after_init(ranks: Ranks, mixed_precision: bool) -> None:
    """New values written into a parameter's ``.data`` after wrapping are what the next forward computes with."""
    settings = {"mixed_precision": MixedPrecision()} if mixed_precision else {}
    unchanged = _transformer(ranks, CUDAInitMode.CUDA_AFTER, settings, deterministic=True)
    model_input = unchanged.module.get_input(ranks.device)
    reference = unchanged(*model_input)
    changed = _transformer(ranks, CUDAInitMode.CUDA_AFTER, settings, deterministic=True)
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
    model = _transformer(ranks, CUDAInitMode.CUDA_AFTER, {})
    train_for_several_steps(ranks, model, num_steps=2, autocast=False)
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
    model = _transformer(ranks, CUDAInitMode.CUDA_AFTER, {}, deterministic=True)
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
    model = _transformer(ranks, CUDAInitMode.CUDA_AFTER, {"mixed_precision": precision})
    train_for_several_steps(ranks, model, num_steps=1, autocast=False, mixed_precision=precision)
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
    sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
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


PARITY = (transformer, delayed_optim_step, delayed_reduce_scatter, mixture_of_experts_with_delay_before_free)
#: Each body with each offload, and with each strategy, of which one is left to `make test-nightly`.
CASES = [tuple(case.values()) for case in pairs({"body": PARITY, **AXES})]


def _marks(body: Callable[..., Any], strategy: Any) -> Any:
    strategies = AXES["strategy"]
    return pytest.mark.nightly if strategy == strategies[PARITY.index(body) % len(strategies)] else ()


@pytest.mark.parametrize(
    ("body", "cpu_offload", "strategy"),
    [
        pytest.param(
            body,
            offload,
            strategy,
            id=f"{body.__name__}-{offload.offload_params}-{strategy}",
            marks=_marks(body, strategy),
        )
        for body, offload, strategy in CASES
    ],
)
def test_parity_with_ddp(ranks: Pools, body: Callable[..., Any], cpu_offload: Any, strategy: Any) -> None:
    """Losses and parameters after several updates are DDP's."""
    ranks.run(2, body, cpu_offload, strategy)


@pytest.mark.parametrize(
    ("body", "mixed_precision"), [(param_change_after_init, True), *((transformer_no_grad, on) for on in (False, True))]
)
def test_parameters_and_no_grad(ranks: Pools, body: Callable[..., Any], mixed_precision: bool) -> None:
    ranks.run(2, body, mixed_precision)
