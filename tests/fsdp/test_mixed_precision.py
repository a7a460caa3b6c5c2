"""Mixed precision, as PyTorch's FSDP tests of that name assert it, and with the numbers of an unsharded reference."""

from __future__ import annotations

import itertools
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
    Buffered,
    CastReference,
    assert_all_near,
    assert_near,
    checked_reduce_scatter,
    is_sharded,
    joined,
    nested_model,
    whole_gradients,
    whole_parameters,
)
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from parity import chain, seed_all
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import clean_tensor_name
from torch import nn


@pytest.mark.parametrize("world_size", [2, 1])
@across()
@subtests(
    mixed_precision=(MP_ALL, MP_ONLY_REDUCE, MP_ONLY_PARAM_AND_BUFFER, MP_NONE, MP_ALL_DIFFERENT),
    strategy=(ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP),
    offload=(True, False),
    full_dtype=(torch.float32, torch.float64),
    prefetch=list(
        itertools.product((False, True), (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST))
    ),
)
def test_mixed_precision(
    ranks: Ranks,
    mixed_precision: MixedPrecision,
    strategy: ShardingStrategy,
    offload: bool,
    full_dtype: torch.dtype,
    prefetch: tuple[bool, BackwardPrefetch | None],
) -> None:
    """Dtypes of what computes, is reduced and is kept in two units, and the numbers of a model cast by hand."""
    seed_all(0)
    layers = [Buffered(full_dtype, f"buffer{index}") for index in range(2)]
    reference = CastReference(nn.Sequential(*layers).to(ranks.device), mixed_precision)
    model: Any = nested_model(
        layers,
        ranks.device,
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(offload_params=offload),
        mixed_precision=mixed_precision,
        forward_prefetch=prefetch[0],
        backward_prefetch=prefetch[1],
    )
    compute_dtype = mixed_precision.param_dtype or full_dtype
    reduce_dtype = mixed_precision.reduce_dtype or compute_dtype
    coarsest = max(compute_dtype, reduce_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    computed_with: list[torch.dtype] = []

    def look(module: Buffered, args: tuple[torch.Tensor]) -> None:
        assert module.lin.weight.shape == (10, 10)
        computed_with.extend((args[0].dtype, module.lin.weight.dtype, getattr(module, module.buffer_name).dtype))

    for layer in layers:
        layer.register_forward_pre_hook(look)
    with checked_reduce_scatter(mixed_precision, full_dtype) as log:
        for step in range(2):
            generator = torch.Generator().manual_seed(100 * step + ranks.rank)
            x = torch.randn(3, 10, generator=generator, dtype=full_dtype).to(ranks.device).requires_grad_()
            y = x.detach().clone().requires_grad_()
            output, expected = model(x), reference(y)
            assert output.dtype == compute_dtype
            assert_near(output, expected, compute_dtype, f"output of step {step}")
            output.sum().backward()
            expected.sum().backward()
            assert x.grad is not None
            assert y.grad is not None
            assert x.grad.dtype == full_dtype
            assert_near(x.grad, y.grad, compute_dtype, f"gradient of the input of step {step}")
            for parameter in model.parameters():
                assert parameter.dtype == full_dtype
                assert parameter.grad is None or parameter.grad.dtype == full_dtype
            for unit in FSDP.fsdp_modules(model):
                (flat,) = unit.params
                # Of what was cast nothing stays between steps.
                assert mixed_precision.param_dtype is None or flat._mp_shard.untyped_storage().size() == 0
            assert_all_near(whole_gradients(model), reference.gradients(ranks), coarsest, f"gradients of step {step}")
            reference.load(whole_parameters(model))
            model.zero_grad()
    units = FSDP.fsdp_modules(model)
    assert log.calls == (2 * len(units) if any(map(is_sharded, units)) else 0)
    buffer_dtype = mixed_precision.buffer_dtype or BUFFER_DTYPE
    assert computed_with == [compute_dtype, compute_dtype, buffer_dtype] * 4
    for name, buffer in model.named_buffers():
        assert (buffer.dtype, buffer.device) == (buffer_dtype, ranks.device), name


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
