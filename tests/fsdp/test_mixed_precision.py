"""Mixed precision, as PyTorch's FSDP tests of that name assert it, and with the numbers of an unsharded reference."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from fsdp_parity.mixed_models import (
    BUFFER_DTYPE,
    MP_ALL,
    MP_ALL_DIFFERENT,
    MP_NONE,
    MP_ONLY_PARAM_AND_BUFFER,
    MP_ONLY_REDUCE,
    BatchNormNet,
    CastReference,
    ForwardChecks,
    LinearMixedPrecision,
    assert_all_near,
    assert_near,
    checked_reduce_scatter,
    is_sharded,
    joined,
    nested_model,
    simple_model,
    whole_gradients,
    whole_parameters,
)
from fsdp_parity.models import CUDAInitMode, FSDPInitMode, TransformerWithSharedParams, wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks, across
from fsdp_parity.subtests import subtests
from parity import chain, seed_all
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp.sharded_grad_scaler import ShardedGradScaler
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_STEPS = 2
#: Enough for the default loss scale, which is infinite in fp16, to be halved until a step is taken.
_STEPS_WITH_SCALER = 6
_LEARNING_RATE = 1e-3


@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD])
@across()
def test_mixed_precision(ranks: Ranks, strategy: ShardingStrategy) -> None:
    """``end_to_end`` in the case where all dtypes differ."""
    _end_to_end(ranks, MP_ALL_DIFFERENT, True, torch.float64, False, (False, None), 2, strategy)


@subtests(
    mixed_precision=(MP_ALL, MP_ONLY_REDUCE, MP_ONLY_PARAM_AND_BUFFER, MP_NONE, MP_ALL_DIFFERENT),
    offload=(True, False),
    full_dtype=(torch.float32, torch.float64),
    with_scaler=(True, False),
    prefetch=list(
        itertools.product((False, True), (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST))
    ),
    layers=(1, 2),
)
def end_to_end(ranks: Ranks, **case: Any) -> None:
    """Dtypes and values of inputs, parameters, buffers, gradients and state dicts while a model trains."""
    _end_to_end(ranks, **case)


def _end_to_end(
    ranks: Ranks,
    mixed_precision: MixedPrecision,
    offload: bool,
    full_dtype: torch.dtype,
    with_scaler: bool,
    prefetch: tuple[bool, BackwardPrefetch | None],
    layers: int,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
) -> None:
    settings = {
        "sharding_strategy": strategy,
        "cpu_offload": CPUOffload(offload_params=offload),
        "mixed_precision": mixed_precision,
        "forward_prefetch": prefetch[0],
        "backward_prefetch": prefetch[1],
    }
    _EndToEnd(ranks, mixed_precision, full_dtype, layers, settings).train(with_scaler)


class _EndToEnd:
    """One model, trained beside its reference."""

    def __init__(
        self,
        ranks: Ranks,
        mixed_precision: MixedPrecision,
        full_dtype: torch.dtype,
        layers: int,
        settings: dict[str, Any],
    ) -> None:
        seed_all(0)
        linears = [LinearMixedPrecision(full_dtype, f"buffer{index}") for index in range(layers)]
        self.ranks = ranks
        self.mixed_precision = mixed_precision
        self.full_dtype = full_dtype
        self.compute_dtype = mixed_precision.param_dtype or full_dtype
        reduce_dtype = mixed_precision.reduce_dtype or self.compute_dtype
        self.coarsest = max(self.compute_dtype, reduce_dtype, key=lambda dtype: torch.finfo(dtype).eps)
        self.buffers = {linear.buffer_name: getattr(linear, linear.buffer_name).clone() for linear in linears}
        plain = nn.Sequential(*(copy.deepcopy(linear.lin) for linear in linears)).to(ranks.device)
        self.reference = CastReference(plain, mixed_precision)
        self.checks = ForwardChecks(ranks.world_size)
        self.model: Any = (
            simple_model(linears[0], ranks.device, **settings)
            if layers == 1
            else nested_model(linears, ranks.device, **settings)
        )
        if not settings["cpu_offload"].offload_params:
            self.model.to(ranks.device)
        self.units = FSDP.fsdp_modules(self.model)
        assert len(self.units) == layers

    def train(self, with_scaler: bool) -> None:
        """Steps of Adam; the reference takes the same ones, and leaves out the same ones."""
        scaler = ShardedGradScaler(device=self.ranks.device.type, enabled=with_scaler)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=_LEARNING_RATE)
        reference_optimizer = torch.optim.Adam(self.reference.module.parameters(), lr=_LEARNING_RATE)
        scale = scaler.get_scale() if with_scaler else 1.0
        steps = _STEPS_WITH_SCALER if with_scaler else _STEPS
        taken = 0
        with checked_reduce_scatter(self.mixed_precision, self.full_dtype) as log:
            for step in range(steps):
                optimizer.zero_grad()
                gradients = self._forward_backward(step, scaler, scale)
                finite = all(bool(value.isfinite().all()) for value in gradients.values())
                if finite:
                    self._check_gradients(gradients)
                    self.reference.give({name: value / scale for name, value in gradients.items()})
                    reference_optimizer.step()
                    taken += 1
                else:
                    scale /= 2
                scaler.step(optimizer)
                scaler.update()
                assert not with_scaler or scaler.get_scale() == scale
                self._check_between_steps(finite)
            assert log.calls == (steps * len(self.units) if any(map(is_sharded, self.units)) else 0)
        assert taken >= 1, "the scale never became small enough for a step"
        assert with_scaler or taken == steps
        assert self.checks.forwards == steps * len(self.units)

    def _forward_backward(self, step: int, scaler: ShardedGradScaler, scale: float) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 * step + self.ranks.rank)
        x = torch.randn(3, 10, generator=generator, dtype=self.full_dtype).to(self.ranks.device)
        output, *_ = self.model((x, self.checks, self.model, self.mixed_precision, self.full_dtype))
        self._check_buffers()
        self._check_low_precision_shards()
        expected = self.reference(x)
        assert output.dtype == expected.dtype
        assert_near(output, expected, self.compute_dtype, f"output of step {step}")
        loss = scaler.scale(output.sum())
        assert loss.dtype == self.compute_dtype, f"the loss is {loss.dtype}"
        loss.backward()
        self._check_buffers()
        self._check_low_precision_shards()
        for parameter in self.model.parameters():
            assert parameter.dtype == self.full_dtype
            if parameter.grad is not None:
                assert parameter.grad.dtype == self.full_dtype
        # A 0-D fp16 loss times a 0-D fp32 scale is fp32, and goes back to fp16: there the default scale is infinite.
        factor = torch.tensor(scale, device=self.ranks.device)
        (expected.sum() * factor).to(expected.dtype).backward()
        return self.reference.gradients(self.ranks)

    def _check_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        # One weight a unit, in the order of the layers; the root, which owns the last one, comes first.
        units = [*self.units[1:], self.units[0]]
        for unit, (name, expected) in zip(units, gradients.items(), strict=True):
            (flat,) = unit.params
            whole = joined(flat.grad, expected, self.ranks, cut=is_sharded(unit))
            assert_near(whole, expected.flatten(), self.coarsest, f"gradient of layer {name}")

    def _check_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            assert buffer.dtype == (self.mixed_precision.buffer_dtype or BUFFER_DTYPE), f"{name} is {buffer.dtype}"
            assert buffer.device == self.ranks.device, f"{name} is on {buffer.device}"

    def _check_low_precision_shards(self) -> None:
        for unit in self.units:
            for flat in unit.params:
                if self.mixed_precision.param_dtype is None:
                    assert not hasattr(flat, "_mp_shard")
                else:
                    assert flat._mp_shard.untyped_storage().size() == 0

    def _check_between_steps(self, stepped: bool) -> None:
        expected = dict(zip(self._weights(), self.reference.module.parameters(), strict=True))
        # Adam divides a gradient by its size, so the smaller it is, the more of a step its rounding is worth.
        eps = torch.finfo(self.coarsest).eps
        allowed = stepped * min(0.1, 16_000 * eps) * _LEARNING_RATE + 16 * torch.finfo(self.full_dtype).eps
        with FSDP.summon_full_params(self.model):
            self._check_low_precision_shards()
            parameters = {clean_tensor_name(name): value for name, value in self.model.named_parameters()}
            assert set(parameters) == set(expected)
            for name, value in expected.items():
                assert parameters[name].dtype == self.full_dtype
                torch.testing.assert_close(parameters[name].to(value.device), value, rtol=0.0, atol=allowed)
            shown = {name: value.detach().clone() for name, value in parameters.items()}
            # Nothing but a state dict gives buffers their own dtype back.
            self._check_buffers()
            buffers = {clean_tensor_name(name) for name, _ in self.model.named_buffers()}
        with warnings.catch_warnings():
            # Said of a model that is not cut at all, as it is on one rank.
            warnings.filterwarnings("ignore", message=".*full_state_dict will be returned")
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
        assert set(state) == set(expected) | buffers
        stored_as = self.mixed_precision.buffer_dtype or BUFFER_DTYPE
        for name, value in state.items():
            if name in buffers:
                original = self.buffers[name.rpartition(".")[2]]
                assert value.dtype == BUFFER_DTYPE, f"{name} is {value.dtype} in the state dict"
                assert_near(value, original, stored_as, name, ulps=1)
            else:
                assert value.dtype == self.full_dtype, f"{name} is {value.dtype} in the state dict"
                assert torch.equal(value.cpu(), shown[name].cpu())
        self._check_buffers()
        # The next step starts from what this one really left, so that no rounding adds up.
        masters = self.reference.module.named_parameters()
        self.reference.load({key: shown[name] for (key, _), name in zip(masters, self._weights(), strict=True)})

    def _weights(self) -> list[str]:
        return ["lin.weight"] if len(self.units) == 1 else ["0.lin.weight", "1.lin.weight"]


@pytest.mark.parametrize(
    "mixed_precision",
    [MP_ALL, MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16)],
    ids=["all", "params_and_reduce_differ"],
)
@across(2)
def test_embedding(ranks: Ranks, mixed_precision: MixedPrecision) -> None:
    """Integer inputs stay integers, and every step does to the parameters what an unsharded step does."""
    compute_dtype = mixed_precision.param_dtype or torch.float32
    seed_all(0)
    model = TransformerWithSharedParams.init(
        ranks.group,
        FSDPInitMode.NO_FSDP,
        CUDAInitMode.CUDA_BEFORE,
        {"mixed_precision": mixed_precision},
        device=ranks.device,
    )
    reference = CastReference(model, mixed_precision)
    with checked_reduce_scatter(mixed_precision, compute_dtype) as log:
        sharded: Any = wrap_fsdp(model, mixed_precision=mixed_precision)
        before = whole_parameters(sharded)
        assert_all_near(before, dict(reference.module.named_parameters()), torch.float32, "start", ulps=0)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = sharded.module.get_input(ranks.device)
            seed_all(step)
            loss = sharded.module.get_loss(x, sharded(*x))
            assert loss.dtype == compute_dtype
            assert loss.device == ranks.device
            # The same dropout, and the parameters that the steps so far have really left.
            seed_all(step)
            reference.load(before)
            expected = model.get_loss(x, reference(*x))
            assert_near(loss, expected, compute_dtype, f"loss of step {step}")
            sharded.module.run_backward(loss)
            expected.backward()
            optimizer.step()
            after = whole_parameters(sharded)
            seen = {name: (before[name].double() - after[name].double()) / 0.1 for name in before}
            gradients = reference.gradients(ranks)
            assert_all_near(seen, gradients, torch.float16, f"gradients of step {step}")
            before = after
        assert log.calls == 3


def _synchronised(network: nn.Module) -> nn.Module:
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    converted: nn.Module = convert(network)
    return converted


@pytest.mark.parametrize("convert_sync_bn", [True, False])
@across(2)
def test_mp_batchnorm(ranks: Ranks, convert_sync_bn: bool) -> None:
    """Ignored classes become units without mixed precision, with a warning, and the model runs.

    A synchronised batch norm refuses CPU tensors in training, so there that case runs in eval mode.
    """
    seed_all(0)
    network: nn.Module = BatchNormNet().to(ranks.device)
    if convert_sync_bn:
        network = _synchronised(network)
    if convert_sync_bn and ranks.on_cpu:
        network.eval()
    mixed_precision = MixedPrecision(
        param_dtype=torch.float16,
        reduce_dtype=torch.float16,
        buffer_dtype=torch.float16,
        _module_classes_to_ignore=[_BatchNorm, nn.LayerNorm],
    )
    reference = CastReference(network, mixed_precision, kept=(_BatchNorm, nn.LayerNorm))
    with pytest.warns(UserWarning, match="These modules will be wrapped as separate FSDP"):
        sharded = FSDP(network, mixed_precision=mixed_precision, auto_wrap_policy=lambda *args, **kwargs: False)
    for module in (sharded.ln, sharded.bn):
        assert isinstance(module, FSDP)
        assert module.mixed_precision == MixedPrecision()
    assert isinstance(sharded.bn.module, nn.SyncBatchNorm if convert_sync_bn else nn.BatchNorm1d)
    for module in (sharded.fc1, sharded.fc2, sharded.fc3):
        assert not isinstance(module, FSDP)
    assert sharded.mixed_precision == mixed_precision
    x = torch.randn((1, 2), generator=torch.Generator().manual_seed(1 + ranks.rank)).to(ranks.device)
    sharded(x).sum().backward()
    reference(x)
    sharded.zero_grad()
    # The sum of a softmax does not depend on anything; a weighted one does.
    weights = torch.arange(4.0, device=ranks.device)
    output, expected = sharded(x), reference(x)
    assert output.dtype == torch.float16
    assert_near(output, expected, torch.float16, "output")
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = reference.gradients(ranks)
    assert_all_near(whole_gradients(sharded), gradients, torch.float16, "gradients", ulps=32)


@pytest.mark.parametrize("world_size", [2, 1])
@across()
@subtests(offload_params=(False, True), use_orig_params=(False, True))
def test_grads_reduced_precision(ranks: Ranks, offload_params: bool, use_orig_params: bool) -> None:
    """With ``keep_low_precision_grads``, gradients that add up over six backwards are fp16, and right."""
    mixed_precision = MixedPrecision(
        param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16, keep_low_precision_grads=True
    )
    seed_all(0)
    model: Any = chain(lin1=nn.Linear(10, 10), lin2=nn.Linear(10, 10)).to(ranks.device)
    reference = CastReference(model, mixed_precision)
    settings: dict[str, Any] = {
        "mixed_precision": mixed_precision,
        "cpu_offload": CPUOffload(offload_params=offload_params),
        "use_orig_params": use_orig_params,
    }
    model.lin1 = wrap_fsdp(model.lin1, **settings)
    model = wrap_fsdp(model, **settings)
    # The input lies on the CPU: the root moves it.
    x = torch.ones(1, 10)
    for done in range(1, 7):
        model(x).sum().backward()
        reference(x.to(ranks.device)).sum().backward()
        gradients = {name: done * value for name, value in reference.gradients(ranks).items()}
        seen = 0
        for parameter in model.parameters():
            if parameter.grad is not None:
                assert parameter.grad.dtype == torch.float16
                assert parameter.grad.device.type == ("cpu" if offload_params else ranks.device.type)
                seen += 1
        assert seen > 0 or use_orig_params
    whole = _whole_low_gradients(model, gradients, ranks, use_orig_params)
    assert_all_near(whole, gradients, torch.float16, "gradients")


def _whole_low_gradients(
    model: FSDP, like: dict[str, torch.Tensor], ranks: Ranks, use_orig_params: bool
) -> dict[str, torch.Tensor]:
    cut = is_sharded(model)
    if use_orig_params:
        return {
            (clean := clean_tensor_name(name)): joined(p.grad, like[clean], ranks, cut=cut).view(like[clean].shape)
            for name, p in model.named_parameters()
        }
    found = {}
    for unit, prefix in zip(FSDP.fsdp_modules(model), ("lin2.", "lin1."), strict=True):
        (flat,) = unit.params
        expected = {name: value for name, value in like.items() if name.startswith(prefix)}
        every = torch.cat([value.flatten() for value in expected.values()])
        parts = torch.split(joined(flat.grad, every, ranks, cut=cut), [value.numel() for value in expected.values()])
        found.update({name: part.view(like[name].shape) for name, part in zip(expected, parts, strict=True)})
    return {name: found[name] for name in like}


@across(2)
@subtests(
    strategy=(ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD),
    use_orig_params=(False, True),
)
def test_gradients_of_inputs(ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """An fp32 input that is cast to fp16 for the parameters still gets its gradient, in fp32."""
    seed_all(0)
    linear = nn.Linear(1024, 1024, bias=False)
    mixed_precision = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    reference = CastReference(linear.to(ranks.device), mixed_precision)
    sharded = wrap_fsdp(
        linear.cpu(),
        sharding_strategy=strategy,
        mixed_precision=mixed_precision,
        device_id=ranks.device.index,
        use_orig_params=use_orig_params,
    )
    seed_all(1 + ranks.rank)
    x = torch.randn((32, 1024), device=ranks.device, requires_grad=True)
    sharded(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    y = x.detach().requires_grad_()
    reference(y).sum().backward()
    assert y.grad is not None
    assert_near(x.grad, y.grad, torch.float16, "gradient of the input")
    gradients = reference.gradients(ranks)
    assert_all_near(whole_gradients(sharded), gradients, torch.float16, "gradients")


def test_mixed_precision_e2e_full_shard(ranks: Pools) -> None:
    ranks.run(2, end_to_end)
