"""What PyTorch's core FSDP tests assert: parity with DDP where something comes late, and compiled code."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import DummyProcessGroup, wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks, across
from fsdp_parity.subtests import subtests
from fsdp_parity.training import assert_same_parameters, ddp, full_parameters, plain_transformer
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy, _runtime_utils
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer

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


def test_a_module_without_parameters_computes() -> None:
    model = FSDP(nn.Tanh(), DummyProcessGroup(0, 2))
    assert (list(model.parameters()), model._flat_param) == ([], None)
    assert torch.equal(model(torch.ones(3)), torch.ones(3).tanh())


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
