"""Frozen parameters of classes of their own: bytes whose meaning stands in attributes, as in quantized bases."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import draw, on_ranks, seed_all, threaded, units_of
from polyshard import checkpoint
from polyshard.errors import ConfigError, ParameterChangedError, ParameterError, ParameterMovedError
from polyshard.state import StateForm, StateOptions, get_model_state_dict, set_model_state_dict
from polyshard_backends.threaded import ThreadedWorld
from processes import run_processes
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

WHOLE = StateOptions(form=StateForm.FULL)


class State:
    """What the bytes of a ``Coded`` mean."""

    def __init__(self, table: torch.Tensor, scale: torch.Tensor) -> None:
        self.table, self.scale = table, scale

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return self.table[codes.reshape(-1).view(torch.uint8).long()] * self.scale


class Coded(nn.Parameter):
    """Bytes, each an index into a table, kept as numbers of some dtype."""

    quant_state: State | None

    def __new__(cls, data: torch.Tensor, quant_state: State | None) -> Coded:
        made: Coded = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state = quant_state
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Coded:
        return Coded(self.data.clone(), copy.deepcopy(self.quant_state, memo))


class CodedLinear(nn.Module):
    """A frozen linear layer of codes."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.shape = (outer, inner)
        codes = torch.randint(0, 256, (outer * inner, 1), dtype=torch.uint8)
        state = State(torch.randn(256, dtype=torch.float64) / inner**0.5, torch.tensor(1.5, dtype=torch.float64))
        self.weight = Coded(codes, state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight) is Coded
        assert self.weight.quant_state is not None
        return linear(x, self.weight.quant_state.values(self.weight).view(self.shape).to(x.dtype))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state
        if state is not None:
            destination[f"{prefix}weight.table"] = state.table
            # Settings are made anew for each state dict.
            destination[f"{prefix}weight.about"] = (state.scale * 10).to(torch.uint8)


class Block(nn.Module):
    """Coded layers, one with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = CodedLinear(6, 10), CodedLinear(10, 6)
        self.a, self.b = nn.Linear(6, 3, bias=False), nn.Linear(3, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x) + self.b(self.a(x))))


def make() -> nn.Sequential:
    seed_all(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 2)).double()


def held_as(weight: Coded, dtype: torch.dtype) -> Coded:
    return Coded(weight.data.view(-1).view(dtype).view(-1, 1), weight.quant_state)


def stored(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """In floating-point numbers, NaNs of all payloads among them: ``double()`` would cast these."""
    model = make()
    for each in coded_in(model):
        each.weight = held_as(each.weight, dtype)
    return model


def coded_in(model: nn.Module) -> list[CodedLinear]:
    return [each for each in model.modules() if isinstance(each, CodedLinear)]


def steps(model: nn.Module, inputs: list[list[torch.Tensor]]) -> list[list[float]]:
    """Losses of SGD with momentum, each step over the mean of its inputs."""
    optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1, momentum=0.9)
    found = []
    for batch in inputs:
        losses = [model(x).square().mean() for x in batch]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def bytes_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.weight.detach().clone().view(torch.uint8) for each in coded_in(model)]


def shard(model: nn.Module, rank: int, world: ThreadedWorld, **settings: Any) -> nn.Module:
    return polyshard.shard(model, threaded(world, rank, policy=units_of(Block), **settings))


@pytest.mark.parametrize(("ranks", "storage"), [(2, torch.uint8), (3, torch.bfloat16)], ids=str)
def test_losses_are_the_unsharded_models_over_bytes_that_stay_as_they_are(ranks: int, storage: torch.dtype) -> None:
    start = make() if storage is torch.uint8 else stored(storage)
    inputs = [[draw(4, 6, turn=turn, rank=rank) for rank in range(ranks)] for turn in range(6)]
    plain = copy.deepcopy(start)
    wanted, packed = steps(plain, inputs), bytes_of(plain)

    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        with world.lock:
            model = copy.deepcopy(start)
        shard(model, rank, world)
        losses = steps(model, [[batch[rank]] for batch in inputs])
        report = polyshard.report(model)
        # Two layers of 60 bytes a block, cut evenly but for what makes slices equal.
        assert 4 * 60 / ranks <= report.packed_nbytes <= 4 * 60 / ranks + 2 * 16
        assert report.beside_nbytes == 4 * 257 * 8
        # AdamW's two states are of what is trained.
        assert report.optimizer_nbytes(2) == 2 * (report.master_nbytes - report.packed_nbytes)
        assert all(isinstance(each.weight, DTensor) and each.weight.quant_state for each in coded_in(model))
        with polyshard.unsharded(model):
            assert all(type(each.weight) is Coded and each.weight.quant_state for each in coded_in(model))
            assert all(map(torch.equal, bytes_of(model), packed))
        return [loss for (loss,) in losses]

    for rank, losses in enumerate(on_ranks(ranks, on_rank)):
        assert losses == pytest.approx([step[rank] for step in wanted], rel=1e-12)


def test_a_precision_plugin_casts_none_of_it() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        with world.lock:
            model, plain = stored(torch.float16), stored(torch.float16)
        shard(model, rank, world, precision="bf16")
        coded = coded_in(model)[0]
        seen = []
        coded.register_forward_hook(lambda module, args, out: seen.append(module.weight.clone()))
        model(draw(4, 6)).float().sum().backward()
        assert seen[0].dtype is torch.float16
        assert torch.equal(seen[0].view(torch.uint8), coded_in(plain)[0].weight.view(torch.uint8))
        return seen[0]

    on_ranks(2, on_rank)


@pytest.mark.slow
def test_state_dicts_and_checkpoints_have_what_the_bytes_mean(tmp_path: Path) -> None:
    start = make()
    wanted = {name: value.clone() for name, value in start.state_dict().items()}

    def save(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        with world.lock:
            model = copy.deepcopy(start)
        shard(model, rank, world)
        checkpoint.save(tmp_path, 1, model)
        streamed = {}
        for names, tensors in polyshard.stream(model, dtype=torch.float32):
            streamed |= {name: tensor.clone() for name, tensor in zip(names, tensors, strict=True)}
        assert streamed["0.up.weight.table"].dtype is torch.float64
        assert streamed["0.a.weight"].dtype is torch.float32
        assert torch.equal(streamed["0.up.weight"], wanted["0.up.weight"])
        return get_model_state_dict(model, WHOLE)

    for found in on_ranks(2, save):
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())

    def load(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model, other = copy.deepcopy(start), copy.deepcopy(start)
        for each in coded_in(model):
            each.weight.data.zero_()
            assert each.weight.quant_state is not None
            each.weight.quant_state.table.zero_()
        quantized = coded_in(other)[0].weight.quant_state
        assert quantized is not None
        quantized.scale += 1
        shard(model, rank, world)
        checkpoint.load(checkpoint.latest(tmp_path), model)
        found = get_model_state_dict(model, WHOLE)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        shard(other, rank, world)
        for attempt in (
            lambda: checkpoint.load(checkpoint.latest(tmp_path), other),
            lambda: set_model_state_dict(other, wanted),
            lambda: polyshard.load_stream(other, wanted.items()),
        ):
            with pytest.raises(ConfigError, match=r"'0\.up\.weight\.about'.*quantized"):
                attempt()
        assert quantized.scale == 2.5
        # Its adapters alone.
        checkpoint.save(tmp_path / "adapters", 1, other, frozen=False)
        named = checkpoint.read(checkpoint.latest(tmp_path / "adapters"))["model"]
        assert sorted(named) == sorted(name for name in wanted if name[2] in "abwi" and ".up." not in name)

    on_ranks(3, load)


def test_another_table_on_a_rank_is_noticed_or_sent() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = make()
        state = coded_in(model)[1].weight.quant_state
        assert state is not None
        if rank:
            state.table += 1
        with pytest.raises(polyshard.errors.RankMismatchError, match=r"'0\.down\.weight' is the first parameter"):
            shard(model, rank, world)
        shard(model, rank, world, sync_module_states=True)
        with world.lock:
            wanted = coded_in(make())[1].weight.quant_state
        assert wanted is not None
        assert torch.equal(state.table, wanted.table)

    on_ranks(2, on_rank)


def test_whole_ones_may_be_replaced_by_others_of_their_class() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model, plain = make(), make()
        shard(model, rank, world)
        for each in (model, plain):
            first = coded_in(each)[0]
            state = State(torch.arange(256, dtype=torch.float64) / 256, torch.tensor(0.5, dtype=torch.float64))
            if each is plain:
                first.weight = Coded(255 - first.weight.data, state)
                continue
            with polyshard.unsharded(model):
                first.weight = Coded(255 - first.weight.data, state)
            told = r"'0\.up\.weight', a Coded, .* a Parameter that does not say"
            with pytest.raises(ParameterChangedError, match=told), polyshard.unsharded(model, writeback=True):
                first.weight = nn.Parameter(first.weight.data, requires_grad=False)
            x = draw(4, 6)
            assert torch.equal(model(x), plain(x))
            with polyshard.unsharded(model, writeback=True):
                first.weight = Coded(255 - first.weight.data, state)
            # State dicts of its module read it there.
            assert first.weight.quant_state is state
        assert torch.equal(model(draw(4, 6)), plain(draw(4, 6)))

    on_ranks(2, on_rank)


def of_fully_shard(rank: int, floating: bool) -> tuple[float, list[str]]:
    from polyshard_fsdp2 import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model, plain = (stored(), stored()) if floating else (make(), make())
    mesh = init_device_mesh("cpu", (2,))
    for each in model:
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = [[draw(4, 6, turn=turn, rank=each) for each in range(2)] for turn in range(4)]
    losses = steps(model, [[batch[rank]] for batch in inputs])
    wanted = steps(plain, inputs)
    weight: Any = coded_in(model)[0].weight
    assert tuple(weight.to_local().shape) == (30 if not floating else 15, 1)
    assert torch.equal(weight.full_tensor().view(torch.uint8), coded_in(plain)[0].weight.view(torch.uint8))
    names = set(plain.state_dict()) ^ set(model.state_dict())
    refused = ""
    if floating:
        with pytest.raises(ParameterChangedError) as caught:
            model.float()
        refused = str(caught.value)
    off = max(abs(ours[0] - each[rank]) for ours, each in zip(losses, wanted, strict=True))
    return off, [refused, *names]


@pytest.mark.slow
def test_fully_shard_computes_the_same() -> None:
    for floating in (False, True):
        for off, (refused, *names) in run_processes(2, of_fully_shard, floating):
            assert off < 1e-12
            assert not names
            assert ("'0.up.weight' is a Coded of bytes" in refused) == floating


def lost(model: nn.Module) -> None:
    coded_in(model)[0].weight.quant_state = None


def unquantized(model: nn.Module) -> None:
    first = coded_in(model)[0]
    first.weight = Coded(torch.randn(10, 6), None)
    first.weight.bnb_quantized = False  # type: ignore[attr-defined]


def trained_bytes(model: nn.Module) -> None:
    first = coded_in(model)[0]
    first.weight = held_as(first.weight, torch.bfloat16)
    first.weight.requires_grad_(True)


def copied(model: nn.Module) -> None:
    first = coded_in(model)[0]
    first.weight.codes = first.weight.data  # type: ignore[attr-defined]


def copied_in_its_module(model: nn.Module) -> None:
    first = coded_in(model)[0]
    first.state = {"codes": [first.weight.data]}  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lost, r"'0\.up\.weight' on rank 0 is a Coded, without a quant_state.*module\.quant_state"),
        (unquantized, r"'0\.up\.weight' on rank 0 is a Coded, not quantized yet.*model\.to\(device\) before"),
        (trained_bytes, r"'0\.up\.weight' on rank 0 is a trained Coded.*\(quant_state\).*requires_grad_\(False\)"),
        (copied, r"'0\.up\.weight' on rank 0 is a Coded, with all of its values once more in its attribute 'codes'"),
        (copied_in_its_module, r"'0\.up\.weight' .* once more in 'state' of its CodedLinear"),
    ],
)
def test_what_cannot_be_sharded_is_named_and_left_as_it_is(spoil: Any, told: str) -> None:
    model = make()
    before = [id(each) for each in model.parameters()]
    sound = copy.deepcopy(coded_in(model)[0])
    spoil(model)
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2, "rank": 0})
    with pytest.raises(ParameterError, match=told):
        polyshard.shard(model, config)
    model[0].up = sound  # type: ignore[union-attr]
    assert model(draw(4, 6)).isfinite().all()
    assert [id(each) for each in model.parameters()][2:] == before[2:]


def test_bytes_without_values_are_refused() -> None:
    model = make()
    first = coded_in(model)[0]
    first.weight = Coded(first.weight.data.to("meta"), first.weight.quant_state)
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2, "rank": 0})
    with pytest.raises(ParameterError, match=r"'0\.up\.weight'.*a Coded, has no values on the meta device"):
        polyshard.shard(model, config, initializer=lambda module: None)


def test_training_them_later_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = stored()
        shard(model, rank, world)
        model(draw(4, 6))
        coded_in(model)[0].weight.requires_grad_(True)
        with pytest.raises(ParameterError, match=r"are Coded, and are to be trained now"):
            model(draw(4, 6))
        coded_in(model)[0].weight.requires_grad_(False)
        assert model(draw(4, 6)).isfinite().all()

    on_ranks(2, on_rank)


class Unpacks(CodedLinear):
    """Gives its parameter other memory in eval mode, as kernels do that want another order of bytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            assert self.weight.quant_state is not None
            self.weight.quant_state.table = self.weight.quant_state.table.flip(0)
            self.weight.data = 255 - self.weight.data
        return super().forward(x)


def test_a_forward_that_gives_them_other_memory_is_refused() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = make()
        for each in coded_in(model):
            each.__class__ = Unpacks
        shard(model, rank, world)
        x = draw(4, 6)
        before = model(x)
        model.eval()
        with pytest.raises(ParameterMovedError, match=r"of a Unpacks gave '0\.up\.weight' memory of its own"):
            model(x)
        model.train()
        assert torch.equal(model(x), before)

    on_ranks(2, on_rank)
