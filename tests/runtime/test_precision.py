"""What precision plugins do to a step: dtypes seen, exact reductions, units of others, full precision in eval."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import polyshard
import pytest
import torch
from encodings_of_gathers import Int8Encoding
from parity import (
    Block,
    Net,
    chain,
    draw,
    fake,
    local,
    on_ranks,
    one_by_one,
    root_of,
    seeded,
    sharded_copy,
    units_of,
    whole_of,
)
from polyshard.errors import ConfigError, RankMismatchError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def net() -> nn.Module:
    return seeded(Net).float()


def faked(model: nn.Module, **settings: Any) -> nn.Module:
    return polyshard.shard(model, polyshard.ShardConfig(collectives=fake(), **settings))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def inputs(turn: int, rank: int) -> torch.Tensor:
    return draw(8, 3, turn=turn, rank=rank).float()


def cast_gradients(model: nn.Module, dtype: torch.dtype, turn: int, rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one rank computed in ``dtype`` from a cast copy of the weights, by plain torch."""
    cast = {name: p.detach().to(dtype).requires_grad_(True) for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, cast, (inputs(turn, rank).to(dtype),))
    loss = loss_of(output)
    gradients = torch.autograd.grad(loss, list(cast.values()))
    assert all(gradient.dtype == dtype for gradient in gradients)
    return loss.item(), dict(zip(cast, gradients, strict=True))


def mean_in_fp32(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ranks' values, widened, added in rank order, and divided."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total / len(parts)


def on_each_rank(
    model: nn.Module, world_size: int, step: Callable[[nn.Module, int], None], **settings: Any
) -> dict[str, torch.Tensor]:
    """The whole gradients after ``step(model, rank)`` on every rank."""

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, **settings)
        step(mine, rank)
        return {name: local(cast("torch.Tensor", p.grad)) for name, p in mine.named_parameters()}

    ranks = on_ranks(world_size, on_rank)
    return {name: whole_of(p, [rank[name] for rank in ranks]) for name, p in model.named_parameters()}


# The reduction.


@one_by_one(
    "precision, world_size",
    [("fp16", 4), ("bf16", 2), ("bf16", 3)],
    "settings",
    [
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "offload": "cpu"},
        {"strategy": "shard_grad_op"},
        {"strategy": "no_shard"},
        {"strategy": "hybrid_shard", "shard_size": 2},
    ],
)
def test_gradients_of_narrow_compute_are_averaged_in_fp32(
    precision: str, world_size: int, settings: dict[str, Any]
) -> None:
    model = net()
    by_rank = [cast_gradients(model, HALF[precision], 0, rank)[1] for rank in range(world_size)]

    def step(mine: nn.Module, rank: int) -> None:
        loss_of(mine(inputs(0, rank))).backward()

    got = on_each_rank(model, world_size, step, precision=precision, **settings, **BLOCKS)
    rounded_differently = 0
    for name in got:
        assert got[name].dtype == torch.float32
        assert torch.equal(got[name], mean_in_fp32([rank[name] for rank in by_rank])), name
        narrow = torch.stack([rank[name] for rank in by_rank]).mean(0)
        rounded_differently += int((narrow.float() != got[name]).sum())
    # An average in the narrow dtype would have been another one.
    assert rounded_differently > 10


def test_gradients_travel_in_the_narrow_dtype() -> None:
    collectives = fake()
    model = polyshard.shard(net(), polyshard.ShardConfig(collectives=collectives, precision="bf16", **BLOCKS))
    loss_of(model(inputs(0, 0))).backward()
    assert {(call.operation, call.dtype) for call in collectives.calls} == {
        ("all_gather", torch.bfloat16),
        ("reduce_scatter", torch.bfloat16),
    }


@pytest.mark.parametrize("communication", ["bf16", "fp32"])
def test_waiting_gradients_are_added_and_travel_in_the_reduction_dtype(communication: str) -> None:
    model, turns = net(), 6
    by_rank = []
    for rank in range(2):
        microbatches = [cast_gradients(model, torch.bfloat16, turn, rank)[1] for turn in range(turns)]
        sums = {}
        for name in microbatches[0]:
            total = microbatches[0][name].float()
            for each in microbatches[1:]:
                total = total + each[name].float()
            sums[name] = total
        by_rank.append(sums)

    def step(mine: nn.Module, rank: int) -> None:
        for turn in range(turns - 1):
            with polyshard.no_sync(mine):
                loss_of(mine(inputs(turn, rank))).backward()
        loss_of(mine(inputs(turns - 1, rank))).backward()

    precision = {"name": "mixed", "param": "bf16", "reduce": "fp32", "communication": communication}
    got = on_each_rank(model, 2, step, precision=precision, **BLOCKS)
    for name in got:
        assert torch.equal(got[name], mean_in_fp32([rank[name] for rank in by_rank])), name


# What a forward sees.


class Probe(nn.Module):
    """Notes what its forward is given."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.linear.weight
        self.seen = {
            "is parameter": isinstance(weight, nn.Parameter),
            "weight": weight.dtype,
            "shape": tuple(weight.shape),
            "input": x.dtype,
            "index": None if index is None else index.dtype,
            "values": weight.detach().clone(),
        }
        return torch.nn.functional.linear(x.to(weight.dtype), weight, self.linear.bias)


@pytest.mark.parametrize(
    ("precision", "master", "compute"),
    [
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
        ("fp32", torch.float64, torch.float32),
        ("none", torch.float64, torch.float64),
        ({"name": "mixed", "param": "bf16", "reduce": "fp32"}, torch.float64, torch.bfloat16),
        ({"name": "mixed", "reduce": "fp32"}, torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_forward_sees_whole_parameters_and_the_optimizer_masters(
    precision: Any, master: torch.dtype, compute: torch.dtype, strategy: str
) -> None:
    probe = Probe().to(master)
    expected = probe.linear.weight.detach().to(compute)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        mine = sharded_copy(probe, rank, world, precision=precision, strategy=strategy)
        mine(torch.randn(2, 4, dtype=master)).float().sum().backward()
        assert all(p.dtype == master for p in mine.parameters())
        assert all(p.grad.dtype == master for p in mine.parameters() if p.numel() and p.grad is not None)
        assert isinstance(mine, Probe)
        assert isinstance(mine.linear.weight, nn.Parameter)
        return mine.seen

    for seen in on_ranks(2, on_rank):
        assert seen["is parameter"]
        assert seen["weight"] == seen["input"] == compute
        assert seen["shape"] == (4, 4)
        assert torch.equal(seen["values"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_inputs_come_back_in_the_inputs_dtype(dtype: torch.dtype) -> None:
    model = faked(net(), precision="bf16", **BLOCKS)
    x = draw(4, 3).to(dtype).requires_grad_(True)
    loss_of(model(x)).backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
    assert x.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_integer_inputs_are_never_cast(dtype: torch.dtype) -> None:
    probe = Probe()
    model = faked(probe, precision="bf16")
    index = torch.tensor([1, 0, 1]).to(dtype)
    model(torch.randn(2, 4), index)
    assert probe.seen["index"] == dtype
    model(torch.randn(2, 4), index=index)
    assert probe.seen["index"] == dtype


def faked_alone(model: nn.Module, **settings: Any) -> nn.Module:
    """``model``, sharded over one rank: every number is its own."""
    config = polyshard.ShardConfig(collectives=fake(0, 1), strategy="no_shard", **settings)
    return polyshard.shard(model, config)


def test_outputs_are_in_the_compute_dtype_or_the_one_asked_for() -> None:
    assert faked(net(), precision="bf16", **BLOCKS)(inputs(0, 0)).dtype == torch.bfloat16
    assert faked(net(), precision="fp16", **BLOCKS)(inputs(0, 0)).dtype == torch.float16
    mixed = {"name": "mixed", "param": "bf16", "reduce": "fp32", "overrides": {"": {"output": "fp32"}}}
    assert faked(net(), precision=mixed, **BLOCKS)(inputs(0, 0)).dtype == torch.float32


def test_inputs_are_left_alone_where_asked() -> None:
    probe = Probe()
    faked(probe, precision={"name": "bf16", "cast_inputs": False})(torch.randn(2, 4))
    assert probe.seen["input"] == torch.float32
    assert probe.seen["weight"] == torch.bfloat16


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Probe()
        self.register_buffer("scale", torch.tensor([1.5, 2.5, 3.5, 257.0]))
        self.register_buffer("count", torch.tensor(257))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.scale = self.scale
        return self.inner(x) * self.scale


@pytest.mark.parametrize(("buffer", "dtype"), [("bf16", torch.bfloat16), (None, torch.float32)])
def test_floating_point_buffers_are_cast_where_asked(buffer: str | None, dtype: torch.dtype) -> None:
    model = Buffered()
    faked(model, precision={"name": "mixed", "param": "bf16", "reduce": "fp32", "buffer": buffer})
    assert model.scale.dtype == dtype
    assert model.count.dtype == torch.int64
    assert model.count == 257
    torch.testing.assert_close(model.scale.float(), torch.tensor([1.5, 2.5, 3.5, 257.0]).to(dtype).float())


def test_low_precision_gradients_are_kept_where_asked() -> None:
    model = net()
    by_rank = [cast_gradients(model, torch.bfloat16, 0, rank)[1] for rank in range(2)]
    precision = {"name": "mixed", "param": "bf16", "reduce": "bf16", "keep_low_precision_grads": True}

    def step(mine: nn.Module, rank: int) -> None:
        loss_of(mine(inputs(0, rank))).backward()
        torch.optim.SGD(mine.parameters(), lr=0.1).step()
        assert all(p.dtype == torch.float32 for p in mine.parameters())

    got = on_each_rank(model, 2, step, precision=precision, **BLOCKS)
    for name, gradient in got.items():
        assert gradient.dtype == torch.bfloat16
        expected = mean_in_fp32([rank[name] for rank in by_rank])
        # Half of a unit in the last of eight digits, twice: the sum and the mean are each rounded.
        torch.testing.assert_close(gradient.float(), expected, rtol=2**-7, atol=1e-6)


# Units of other precision than the model's.


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Conv1d(3, 2, 1)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        self.dtypes = [x.dtype, self.norm.weight.dtype]
        x = self.norm(x)
        self.dtypes.append(x.dtype)
        return self.last(x)


def test_batch_norms_left_alone_keep_full_precision_in_a_unit_of_their_own() -> None:
    model = Convolved()
    plain = copy.deepcopy(model)
    leave = {"name": "bf16", "leave_alone": [nn.BatchNorm1d]}
    within: list[torch.dtype] = []
    faked_rank = polyshard.shard(model, polyshard.ShardConfig(collectives=fake(0, 2), precision=leave))
    assert [unit.name for unit in root_of(model).units] == ["(root)", "norm"]
    model.norm.register_forward_hook(lambda module, args, output: within.extend((args[0].dtype, module.weight.dtype)))
    x = torch.randn(4, 2, 7)
    loss_of(faked_rank(x)).backward()
    assert within == [torch.float32, torch.float32]
    assert model.dtypes[0] == model.dtypes[2] == torch.bfloat16
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype == torch.float32
    assert model.norm.weight.dtype == torch.float32

    alone = faked_alone(copy.deepcopy(plain), precision=leave)
    got = alone(x)
    hidden = plain.norm(
        nn.functional.conv1d(x.bfloat16(), plain.conv.weight.bfloat16(), plain.conv.bias.bfloat16()).float()
    )
    expected = nn.functional.conv1d(hidden.bfloat16(), plain.last.weight.bfloat16(), plain.last.bias.bfloat16())
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_batch_norms_whose_statistics_stay_are_refused_by_name() -> None:
    model = Convolved()
    words = r"'norm.weight' would .*bfloat16 .*BatchNorm1d .* leave_alone=\['torch.nn.modules.batchnorm:BatchNorm1d'\]"
    for precision in ("bf16", {"name": "mixed", "param": "bf16"}):
        with pytest.raises(ConfigError, match=words):
            polyshard.shard(model, polyshard.ShardConfig(collectives=fake(0, 2), precision=precision))
    plain = copy.deepcopy(model)
    x = torch.randn(4, 2, 7)
    # Torch serves both in one dtype.
    alone = faked_alone(model, precision={"name": "mixed", "param": "bf16", "buffer": "bf16"})
    torch.testing.assert_close(alone(x), plain.bfloat16()(x.bfloat16()), rtol=0, atol=0)


def test_a_policy_gives_units_other_precision() -> None:
    model = chain(first=Probe(), second=Probe(), third=Probe())
    chosen = {model.first: {"precision": "bf16"}, model.second: {"precision": {"name": "mixed", "param": "fp16"}}}
    policy = {"name": "custom", "fn": lambda module: chosen.get(module, isinstance(module, Probe))}
    sharded = faked(model, policy=policy, precision="none")
    loss_of(sharded(torch.randn(2, 4))).backward()
    assert [probe.seen["weight"] for probe in (model.first, model.second, model.third)] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


# Full precision in eval mode.

EVAL = {"name": "mixed", "param": "bf16", "reduce": "fp32", "full_precision_in_eval": True}


@pytest.mark.parametrize("policy", [BLOCKS["policy"], units_of(Block, nn.Linear)])
def test_eval_computes_in_full_precision_where_asked(policy: Any) -> None:
    model = net()
    x = inputs(0, 0)
    exact = model(x).detach()
    cast = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
    narrow = torch.func.functional_call(model, cast, (x.bfloat16(),)).detach()
    assert (exact - narrow.float()).abs().max() > 1e-3

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, ...]:
        mine = sharded_copy(model, rank, world, precision=EVAL, policy=policy)
        with torch.no_grad():
            first = mine.eval()(x)
            return first, mine.train()(x), mine.eval()(x)

    for first, training, again in on_ranks(2, on_rank):
        assert first.dtype == again.dtype == torch.float32
        torch.testing.assert_close(first, exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(again, exact, rtol=1e-5, atol=1e-6)
        assert torch.equal(training, narrow)


def test_an_eval_between_microbatches_loses_no_gradient() -> None:
    model, turns = net(), 3
    by_turn = [cast_gradients(model, torch.bfloat16, turn, 0)[1] for turn in range(turns)]

    def step(mine: nn.Module, rank: int) -> None:
        for turn in range(turns - 1):
            with polyshard.no_sync(mine):
                loss_of(mine(inputs(turn, 0))).backward()
            with torch.no_grad():
                mine.eval()(inputs(9, 0))
            mine.train()
        loss_of(mine(inputs(turns - 1, 0))).backward()

    got = on_each_rank(model, 2, step, precision=EVAL, **BLOCKS)
    for name, gradient in got.items():
        expected = sum(each[name].float() for each in by_turn)
        # The sum travels in bf16.
        torch.testing.assert_close(gradient, expected, rtol=2**-8, atol=1e-6)


# A gather whose bytes are no dtype: a precision plugin that sends parameters as int8 with scales.


def quantised(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """What 8 bits with one scale a shard make of ``flat``."""
    shards = torch.zeros(ranks * -(-flat.numel() // ranks))
    shards[: flat.numel()] = flat
    rows = shards.view(ranks, -1)
    scales = rows.abs().amax(1, keepdim=True) / 127.0
    return ((rows / scales).round() * scales).reshape(-1)[: flat.numel()]


def test_an_encoded_gather_is_decoded_into_what_computes() -> None:
    # One parameter of 256 elements: its shards are equal parts of it.
    model = nn.Linear(16, 16, bias=False)
    weight = model.weight.detach().clone()
    expected = quantised(weight.flatten(), 4).view(16, 16)
    assert (expected - weight).abs().max() > 0
    x = torch.randn(8, 16)
    plugins = [Int8Encoding() for _ in range(4)]

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, torch.Tensor]:
        mine = sharded_copy(model, rank, world, precision=plugins[rank])
        output = mine(x)
        output.square().mean().backward()
        mine(x)
        assert mine.weight.grad is not None
        return output.detach(), mine.weight.grad

    ranks = on_ranks(4, on_rank)
    reference = expected.clone().requires_grad_(True)
    wanted = x @ reference.T
    wanted.square().mean().backward()
    assert reference.grad is not None
    for output, _ in ranks:
        torch.testing.assert_close(output, wanted.detach(), rtol=1e-5, atol=1e-6)
    gradient = whole_of(weight, [each for _, each in ranks])
    torch.testing.assert_close(gradient, reference.grad, rtol=1e-5, atol=1e-6)
    # Once when the model is sharded, and once a step, on every rank.
    assert [plugin.prepared for plugin in plugins] == [[("",), ("",), ("",)]] * 4


def test_an_encoded_gather_moves_a_quarter_of_the_bytes() -> None:
    moved = {}
    for name, precision in (("fp32", "none"), ("int8", Int8Encoding())):
        collectives = fake()
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        polyshard.shard(
            model, polyshard.ShardConfig(collectives=collectives, precision=precision, policy=units_of(nn.Linear))
        )
        model(torch.randn(2, 64)).sum().backward()
        moved[name] = [call.numel * call.dtype.itemsize for call in collectives.calls if call.operation == "all_gather"]
    # A unit's 64 * 64 and 64 parameters over 4 ranks: 1024 and 16 elements a rank, in fp32, or in int8 behind 16 bytes.
    assert moved["fp32"] == [4 * 1024 * 4, 4 * 16 * 4] * 4
    assert moved["int8"] == [4 * (1024 + 16 + 16)] * 4


def test_ranks_that_part_in_the_first_step_are_told_what_would_travel() -> None:
    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 64)])

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.ways[way](x).sum()

    model = TwoWays()

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        mine = sharded_copy(model, rank, world, precision=Int8Encoding(), policy=units_of(nn.Linear))
        with pytest.raises(RankMismatchError) as caught:
            mine(torch.ones(2, 16), rank)
        return str(caught.value)

    for text in on_ranks(2, on_rank):
        # Half of 16 * 16 + 16 and of 16 * 64 + 64 parameters, padded to 16 bytes, behind a header of 16 bytes.
        assert "rank 0: all_gather of ways.0 (320 elements of torch.uint8)" in text
        assert "rank 1: all_gather of ways.1 (1120 elements of torch.uint8)" in text
