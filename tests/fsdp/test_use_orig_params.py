"""What PyTorch's tests of ``use_orig_params=True`` assert."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from fsdp_parity.training import ddp, full_parameters
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import MixedPrecision, ShardingStrategy, StateDictType
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp._flat_param import _FSDP_USE_FULL_PREC_IN_EVAL
from polyshard_fsdp._init_utils import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from polyshard_fsdp.wrap import ModuleWrapPolicy, always_wrap_policy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)


class _TwoLinears(nn.Module):
    """Each layer a unit, over two ranks, in float32, with parameters aligned to 16 bytes.

    ``lin1``: 25 elements, padded to 26, 13 a rank. ``lin2``: 35, one of alignment, 7; 43, padded to 44, 22 a rank:
    22 of the weight on rank 0; 13 of the weight and the bias on rank 1.
    """

    SHARDS: Mapping[str, tuple[slice, slice]] = {
        "lin1.weight": (slice(0, 13), slice(13, 25)),
        "lin2.weight": (slice(0, 22), slice(22, 35)),
        "lin2.bias": (slice(0, 0), slice(0, 7)),
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.lin1 = nn.Linear(5, 5, bias=False)
        self.lin2 = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lin2(torch.relu(self.lin1(x)))
        return output


@across(2)
@subtests(strategy=STRATEGIES)
def test_access_params_after_forward(ranks: Ranks, strategy: ShardingStrategy) -> None:
    """Between forward and backward a parameter is this rank's shard, or whole where nothing was resharded."""
    plain = _TwoLinears().to(ranks.device)
    reference = ddp(ranks, plain)
    model = wrap_fsdp(
        _TwoLinears().to(ranks.device),
        sharding_strategy=strategy,
        auto_wrap_policy=always_wrap_policy,
        use_orig_params=True,
    )
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]

    def assert_shards(between_forward_and_backward: bool) -> None:
        whole = strategy is ShardingStrategy.NO_SHARD or (
            between_forward_and_backward and strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
        )
        for (name, mine), (plain_name, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert clean_tensor_name(name) == plain_name
            expected = theirs if whole else theirs.flatten()[_TwoLinears.SHARDS[plain_name][ranks.rank]]
            torch.testing.assert_close(mine, expected)

    torch.manual_seed(1 + ranks.rank)
    for _ in range(2):
        x = torch.randn((2, 5)).to(ranks.device)
        outputs = [reference(x), model(x)]
        torch.testing.assert_close(outputs[0], outputs[1])
        assert_shards(True)
        for output in outputs:
            output.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert_shards(False)


@across(2)
def test_named_parameters_in_forward(ranks: Ranks) -> None:
    """Inside forward names and shapes are those of the model before wrapping."""
    seen: list[tuple[str, torch.Size, torch.Tensor]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.extend((clean_tensor_name(name), p.shape, p.detach().clone()) for name, p in self.named_parameters())
            output: torch.Tensor = self.lin(x)
            return output

    torch.manual_seed(0)
    plain = Model().to(ranks.device)
    values = {name: p.detach().clone() for name, p in plain.named_parameters()}
    wrap_fsdp(plain, use_orig_params=True)(torch.randn((2, 5)).to(ranks.device))
    assert [name for name, _, _ in seen] == ["lin.weight", "lin.bias"]
    assert [shape for _, shape, _ in seen] == [(5, 5), (5,)]
    for name, _, value in seen:
        torch.testing.assert_close(value, values[name])


@across(2)
@subtests(strategy=STRATEGIES)
def test_no_sync_mixed_precision(ranks: Ranks, strategy: ShardingStrategy) -> None:
    """Gradients accumulate in the compute dtype inside ``no_sync()``, and come out in the parameters' dtype."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 3).to(ranks.device)
    model = wrap_fsdp(
        copy.deepcopy(plain),
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        use_orig_params=True,
    )
    torch.manual_seed(1 + ranks.rank)
    x = torch.randn((2, 3)).to(ranks.device)

    def backward(dtype: torch.dtype) -> None:
        model(x).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {dtype}

    with model.no_sync():
        backward(torch.float16)
        backward(torch.float16)
        assert all(parameter.grad is not None for parameter in model.parameters())
    backward(torch.float32)
    assert any(p.grad is not None for p in model.parameters())
    # Three backwards of the same loss, averaged over the ranks.
    for _ in range(3):
        plain(x).sum().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.sub_(parameter.grad, alpha=1 / ranks.world_size)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for mine, theirs in zip(full_parameters(model).values(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=2e-3, atol=1e-2)


class Model(nn.Module):
    """Two linear layers with biases, the same on every rank."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(42)
        self.lin1 = nn.Linear(5, 5).to(device)
        self.lin2 = nn.Linear(5, 7).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lin2(torch.relu(self.lin1(x)))
        return output

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.randn((2, 5)).to(device),)


def _pair(ranks: Ranks) -> tuple[DistributedDataParallel, FSDP]:
    """DDP and one FSDP unit of the same model. Inputs drawn afterwards differ from rank to rank."""
    pair = ddp(ranks, Model(ranks.device)), wrap_fsdp(Model(ranks.device), use_orig_params=True)
    torch.manual_seed(1 + ranks.rank)
    return pair


def _twos(like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like.detach()) * 2


def _assert_same_parameters(reference: DistributedDataParallel, model: FSDP) -> None:
    """Inside ``summon_full_params`` no name shows a wrapper. Entering it takes over what the user changed."""
    with FSDP.summon_full_params(model):
        for (theirs_name, theirs), (name, mine) in zip(
            reference.module.named_parameters(), model.named_parameters(), strict=True
        ):
            assert name == theirs_name
            torch.testing.assert_close(mine, theirs)


def _backward(pair: tuple[DistributedDataParallel, FSDP], device: torch.device) -> None:
    model_input = pair[1].get_input(device)
    outputs = [each(*model_input) for each in pair]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        output.sum().backward()


@across(2)
@subtests(change_first_weight=[True, False], change_data=[True, False])
def test_param_writeback(ranks: Ranks, change_first_weight: bool, change_data: bool) -> None:
    """A parameter's values, or the parameter itself, changed between wrapping and the next use."""
    reference, model = _pair(ranks)
    modules: list[Any] = [reference.module, model.module]
    for module in modules:
        layer = module.lin1 if change_first_weight else module.lin2
        if change_data:
            layer.weight.data = _twos(layer.weight)
        else:
            layer.weight = nn.Parameter(_twos(layer.weight))
    _assert_same_parameters(reference, model)
    changed = "lin1.weight" if change_first_weight else "lin2.weight"
    assert {value.item() for value in full_parameters(model)[changed].flatten()} == {2.0}
    # And the next forward computes with it.
    model_input = model.get_input(ranks.device)
    torch.testing.assert_close(model(*model_input), reference.module(*model_input))


@across(2)
@subtests(change_first_weight_grad=[False, True], change_data=[False, True], set_to_none=[False, True])
def test_grad_writeback(ranks: Ranks, change_first_weight_grad: bool, change_data: bool, set_to_none: bool) -> None:
    """A gradient's values, or the gradient itself, changed before the optimizer's step, and added to after it."""
    if change_data and set_to_none:
        # The data of a gradient cannot be None.
        return
    pair = reference, model = _pair(ranks)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in pair]
    _backward(pair, ranks.device)
    modules: list[Any] = [reference.module, model.module]
    for module in modules:
        weight = (module.lin1 if change_first_weight_grad else module.lin2).weight
        if not change_data:
            weight.grad = None if set_to_none else _twos(weight)
        elif weight.grad is not None:
            weight.grad.data = _twos(weight)
    for optimizer in optimizers:
        optimizer.step()
    _assert_same_parameters(*pair)
    # Without zeroing: the next backward adds to what was written.
    _backward(pair, ranks.device)
    for optimizer in optimizers:
        optimizer.step()
    _assert_same_parameters(*pair)


@across(2)
def test_writeback_shape_mismatch(ranks: Ranks) -> None:
    """A parameter and gradient of another shape are refused, on each rank that did it, before anything is gathered."""
    model = wrap_fsdp(Model(ranks.device), use_orig_params=True)
    # The first weight lies on rank 0; of the second, a part lies on rank 1.
    layer: Any = model.module.lin1 if ranks.rank == 0 else model.module.lin2
    larger = [size + 1 for size in layer.weight.shape]
    layer.weight = nn.Parameter(torch.randn(larger, device=ranks.device))
    layer.weight.grad = torch.randn(larger, device=ranks.device)
    with pytest.raises(RuntimeError, match="Cannot writeback") as caught, FSDP.summon_full_params(model):
        pass
    assert f"lin{ranks.rank + 1}.weight" in str(caught.value)


@across(2)
@subtests(change_data=[True, False])
def test_writeback_between_forward_and_backward(ranks: Ranks, change_data: bool) -> None:
    """Where forward left parameters whole, changing one before backward is refused; the next step is a plain one's."""
    model = wrap_fsdp(
        Model(ranks.device),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    loss = model(*model.get_input(ranks.device)).sum()
    if change_data:
        model.lin1.weight.data = model.lin1.weight.clone()
    else:
        model.lin1._fsdp_wrapped_module.weight = nn.Parameter(model.lin1.weight.clone())
    words = "FSDP does not support changing the parameters between forward and backward"
    with pytest.raises(AssertionError, match=words):
        loss.backward()
    # As in PyTorch, a backward that failed has left what it had reduced before: on CUDA devices that is at once.
    model.zero_grad()
    plain = Model(ranks.device)
    model_input = model.get_input(ranks.device)
    losses = [each(*model_input).square().sum() for each in (model, plain)]
    torch.testing.assert_close(losses[0], losses[1])
    for each in losses:
        each.backward()
    for parameter in plain.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks.world_size
    with FSDP.summon_full_params(model, with_grads=True):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(mine.grad, theirs.grad)


@across(2)
@subtests(use_full_prec_in_eval=[False, True])
def test_no_reshard_and_mixed_precision(ranks: Ranks, use_full_prec_in_eval: bool) -> None:
    """Views in another dtype, which the engine itself leaves in place, are not taken for the user's changes."""
    setting = {_FSDP_USE_FULL_PREC_IN_EVAL: "1" if use_full_prec_in_eval else "0"}
    with mock.patch.dict(os.environ, setting):
        model = wrap_fsdp(
            Model(ranks.device),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(param_dtype=torch.float16),
            use_orig_params=True,
        )
        plain = Model(ranks.device)
        torch.manual_seed(1 + ranks.rank)
        model_input = model.get_input(ranks.device)

        def forward(training: bool) -> Any:
            model.train(training)
            output = model(*model_input)
            full_precision = use_full_prec_in_eval and not training
            assert output.dtype == (torch.float32 if full_precision else torch.float16)
            tolerance: dict[str, Any] = {} if full_precision else {"rtol": 1e-2, "atol": 5e-3}
            torch.testing.assert_close(output, plain(*model_input).detach(), check_dtype=False, **tolerance)
            return output

        # Training, whole parameters in full precision, training.
        forward(training=True)
        with FSDP.summon_full_params(model):
            pass
        forward(training=True)
        # Training, then eval.
        forward(training=False)
        # Training with backward, eval, a checkpoint; and then backward in eval.
        forward(training=True).sum().backward()
        forward(training=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                model.load_state_dict(model.state_dict())
        forward(training=False).sum().backward()
        for (name, mine), theirs in zip(full_parameters(model).items(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs.detach()), f"{name} changed without a step"
