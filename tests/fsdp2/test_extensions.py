"""Parameters of a tensor subclass that says itself how it is gathered (``fsdp_pre_all_gather``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import polyshard
import polyshard.checkpoint
import pytest
import torch
import torch.distributed as dist
from extended_models import IN, OUT, Layer, Net, Pair, Reference, Rounded
from fsdp2_models import OURS, alike, beside_torch, cpu_mesh
from parity import seed_all
from polyshard.errors import ParameterError, UnsupportedError
from polyshard_backends.gloo import GlooCollectives
from polyshard_fsdp2 import CPUOffloadPolicy
from processes import KeptRanks
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard


def sharded(package: ModuleType, model: Net, *shape: int, **settings: Any) -> Net:
    mesh = cpu_mesh(*shape)
    package.fully_shard(model.layer, mesh=mesh, **settings)
    package.fully_shard(model, mesh=mesh, **settings)
    return model


def trained(model: nn.Module, steps: int = 2) -> list[float]:
    """Losses; each rank has batches of its own, and a reference the mean over those of all ranks."""
    alone = isinstance(model, Reference)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, foreach=True)
    found = []
    for step in range(steps):
        random = [torch.Generator().manual_seed(10 * step + rank) for rank in range(dist.get_world_size())]
        inputs = [torch.randn(2, IN, dtype=torch.float64, generator=each) for each in random]
        losses = [model(x).square().mean() for x in (inputs if alone else [inputs[dist.get_rank()]])]
        torch.stack(losses).mean().backward()
        found.append(losses[dist.get_rank() if alone else 0].item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def inside(tensor: Any) -> Any:
    """A parameter, its local tensor taken apart."""
    local = tensor.to_local()
    names = local.__tensor_flatten__()[0] if hasattr(local, "__tensor_flatten__") else []
    parts = {name: getattr(local, name).clone() for name in names} or local.detach().clone()
    place = tensor.shape, tensor.placements, tensor.device_mesh, tensor.dtype, tensor.requires_grad
    return *place, type(local), isinstance(tensor, nn.Parameter), parts


def shown(model: nn.Module) -> dict[str, Any]:
    return {name: inside(parameter) for name, parameter in model.named_parameters()}


def trains_as_unsharded(package: ModuleType, *shape: int, **settings: Any) -> Any:
    """Uneven rows, several dtypes, a frozen and a trained class, and plain parameters in each group."""
    model = Net()
    reference = Reference(copy.deepcopy(model))
    found = shown(sharded(package, model, *shape, **settings))
    losses = trained(model)
    torch.testing.assert_close(losses, trained(reference), rtol=1e-12, atol=0.0)
    model(torch.ones(1, IN, dtype=torch.float64)).sum().backward()
    gradients = {name: inside(each.grad) for name, each in model.named_parameters() if each.grad is not None}
    return found, losses, gradients, shown(model)


def keeps_whole(package: ModuleType) -> Any:
    return trains_as_unsharded(package, reshard_after_forward=False)


def over_replicas(package: ModuleType) -> Any:
    return trains_as_unsharded(package, 2, 2)


def state_dicts_keep_the_class(package: ModuleType) -> Any:
    model = sharded(package, Net())
    trained(model)
    state = model.state_dict()
    found = {name: inside(value) for name, value in state.items()}
    seed_all(1)
    other = sharded(package, Net())
    answer = other.load_state_dict(state)
    assert (answer.missing_keys, answer.unexpected_keys) == ([], [])
    alike(shown(other), shown(model))
    for each in (other, sharded(package, Net())):
        each.load_state_dict(state, assign=True)
        alike(shown(each), shown(model))
    return found, trained(other)


def torch_checkpoints(package: ModuleType) -> Any:
    """Those of ``torch.distributed.checkpoint``, which reads classes that the program names."""
    model = sharded(package, Net())
    trained(model)
    seed_all(1)
    other = sharded(package, Net())
    with TemporaryDirectory() as folder, torch.serialization.safe_globals([Pair, Rounded, getattr]):
        given = [folder]
        dist.broadcast_object_list(given)
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=given[0])
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=given[0])
        other.load_state_dict(state["model"])
        dist.barrier()
    alike(shown(other), shown(model))
    return shown(other)


def meta_models(package: ModuleType) -> Any:
    with torch.device("meta"):
        model = Net()
    sharded(package, model)
    found = [shown(model)]
    model.to_empty(device="cpu")
    source = sharded(package, Net())
    model.load_state_dict(source.state_dict())
    return found, trained(model), shown(model)


def calls_of_the_methods(package: ModuleType) -> Any:
    """Each gather asks once, and gives the parameter back that the first one made."""
    model = sharded(package, Net(), mp_policy=package.MixedPrecisionPolicy(param_dtype=torch.float32))
    asked, told = [], []
    pre, post = Pair.fsdp_pre_all_gather, Pair.fsdp_post_all_gather

    def ask(self: Pair, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        asked.append((type(self), self.shape))
        return pre(self, mesh, size, stride, module, policy)

    def tell(self: Pair, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        told.append((tuple(each.shape for each in outputs), dtype, out))
        return post(self, outputs, metadata, dtype, out=out)

    with patch.object(Pair, "fsdp_pre_all_gather", ask), patch.object(Pair, "fsdp_post_all_gather", tell):
        for _ in range(3):
            model(torch.ones(2, IN, dtype=torch.float64)).sum().backward()
    outs = [out for *_, out in told]
    assert len(asked) == len(told) == 6
    assert outs[0] is None
    assert all(out is outs[1] and isinstance(out, nn.Parameter) for out in outs[1:])
    return asked, [each[:2] for each in told]


class Packed(nn.Module):
    """A frozen weight of a dtype that means something by its bits, and a trained vector."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.arange(OUT * IN).to(torch.uint8).view(OUT, IN)
        self.weight = nn.Parameter(
            numbers.view(dtype) if dtype.itemsize == 1 else numbers.to(dtype), requires_grad=False
        )
        self.bias = nn.Parameter(torch.ones(OUT))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.detach().clone())
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[ModuleType], object], int] = {
    trains_as_unsharded: 2,
    keeps_whole: 2,
    over_replicas: 4,
    state_dicts_keep_the_class: 2,
    torch_checkpoints: 2,
    meta_models: 2,
    calls_of_the_methods: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BODIES[body], beside_torch, body)


class Odd(Rounded):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
        return super().fsdp_pre_all_gather(mesh)


def refusals(rank: int) -> None:
    mesh = cpu_mesh()
    cases: list[tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any], type[Exception], str]] = [
        (Odd, {}, ParameterError, "is a Odd, .* takes 2 arguments"),
        (
            Rounded,
            {"reshard_after_forward": 2},
            UnsupportedError,
            "reshard_after_forward=2 for 'down.weight', a Rounded",
        ),
        (Rounded, {"offload_policy": CPUOffloadPolicy()}, UnsupportedError, "would offload 'down.weight', a Rounded"),
        (
            Rounded,
            {"shard_placement_fn": lambda each: Shard(1) if each.ndim == 2 and each.size(1) == 8 else None},
            UnsupportedError,
            "Shard.1. for 'down.weight', a Rounded",
        ),
    ]
    for kind, settings, error, words in cases:
        model = Net()
        model.down.weight = nn.Parameter(kind(torch.ones(8, 8, dtype=torch.float64)))
        before = dict(model.named_parameters())
        with pytest.raises(error, match=words):
            OURS.fully_shard(model, mesh=mesh, **settings)
        after = dict(model.named_parameters())
        assert type(model) is Net
        assert all(after[name] is each for name, each in before.items())


def test_what_cannot_be_gathered_is_refused(ranks: KeptRanks) -> None:
    ranks.run(4, refusals)


def failures(rank: int) -> None:
    """What one rank's parameter does wrong is an error on all of them, before anything is sent."""

    def fails(self: Rounded, mesh: Any) -> Any:
        if mesh.get_local_rank() == 1:
            raise ValueError("no scale")
        return (self.whole,), None

    def differs(self: Rounded, mesh: Any) -> Any:
        return (self.whole.to(torch.float32 if mesh.get_local_rank() else torch.float64),), None

    for method, words in (
        (fails, r"of 'down.weight' \(rank \d\) failed on ranks \[1\] of its unit: ValueError: no scale"),
        (differs, r"of 'down.weight' .* answered \[\[\(3, 7\), 'torch.float32'\]\] on rank 1 of its unit and"),
    ):
        model = sharded(OURS, Net())
        with patch.object(Rounded, "fsdp_pre_all_gather", method), pytest.raises(ParameterError, match=words):
            model(torch.ones(1, IN, dtype=torch.float64))
        # The next forward gathers anew, and so does the one behind a failure of a later gather.
        assert model(torch.ones(1, IN, dtype=torch.float64)).isfinite().all()
        with (
            patch.object(Rounded, "fsdp_pre_all_gather", lambda _, mesh: ((torch.ones(2),), None)),
            pytest.raises(ParameterError, match=r"'down\.weight' .* answered .* before"),
        ):
            model(torch.ones(1, IN, dtype=torch.float64))
        assert model(torch.ones(1, IN, dtype=torch.float64)).isfinite().all()


def test_a_failure_of_one_rank_is_told_on_all(ranks: KeptRanks) -> None:
    ranks.run(2, failures)


def rows_without_padding(rank: int) -> None:
    """What ranks send may be shorter behind the last rows, and of other shapes than the parameter: padded here."""
    shape = (OUT, IN)
    weight = torch.arange(OUT * IN, dtype=torch.float64).view(shape)

    def ask(self: Rounded, mesh: Any) -> Any:
        return (self.whole.to(torch.int16), self.whole.amax(1).to(torch.float8_e4m3fn)), None

    def tell(self: Rounded, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        numbers, largest = outputs
        assert torch.equal(numbers[:OUT], weight.to(torch.int16))
        assert not numbers[OUT:].any()
        assert torch.equal(largest[:OUT].view(torch.uint8), weight.amax(1).to(torch.float8_e4m3fn).view(torch.uint8))
        if out is not None:
            return None
        whole = numbers[:OUT].to(dtype)
        return whole, ()

    layer = nn.Linear(IN, OUT, bias=False).double()
    layer.weight = nn.Parameter(Rounded(weight), requires_grad=False)
    OURS.fully_shard(layer, mesh=cpu_mesh())
    with patch.object(Rounded, "fsdp_pre_all_gather", ask), patch.object(Rounded, "fsdp_post_all_gather", tell):
        for _ in range(2):
            assert torch.equal(layer(torch.eye(IN, dtype=torch.float64)).T, weight)


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.nightly) for number in (1, 3, 5))])
def test_rows_are_padded_for_those_that_do_not(ranks: KeptRanks, number: int) -> None:
    ranks.run(number, rows_without_padding)


def memory_and_launches(rank: int) -> None:
    """One communication for all that a group gathers; what was gathered is there in compute alone."""
    model = sharded(OURS, Net())
    many, one = GlooCollectives.all_gather_many, GlooCollectives.all_gather
    launches: list[int] = []

    def gather_many(self: Any, pairs: Any) -> Any:
        launches.append(len(pairs))
        return many(self, pairs)

    def gather_one(self: Any, out: Any, own: Any) -> Any:
        launches.append(1)
        return one(self, out, own)

    whole: list[Pair] = []
    decoded = Pair.decoded

    def seen(self: Pair) -> torch.Tensor:
        whole.append(self)
        return decoded(self)

    x = torch.ones(2, IN, dtype=torch.float64)
    model(x).sum().backward()
    with (
        patch.object(Pair, "decoded", seen),
        patch.object(GlooCollectives, "all_gather_many", gather_many),
        patch.object(GlooCollectives, "all_gather", gather_one),
    ):
        model(x).sum().backward()
    # The forward's: two matrices, one of which gathers itself, and two vectors; a vector, and two of the pair.
    assert [number for number in launches if number > 1][:2] == [4, 3]
    assert [each.untyped_storage().nbytes() for each in (whole[0].high, whole[0].low)] == [0, 0]
    bare = Layer()
    bare.bias = None  # type: ignore[assignment]
    OURS.fully_shard(bare, mesh=cpu_mesh())
    # int8 and fp16.
    assert polyshard.report(bare).master_nbytes == (4, 3)[rank] * IN * 3
    with pytest.raises(UnsupportedError, match=r"'down\.weight' gathers itself"):
        polyshard.flat_parameters(model)


def test_memory_and_launches(ranks: KeptRanks) -> None:
    ranks.run(2, memory_and_launches)


def beside_tensor_parallelism(rank: int) -> None:
    """A local tensor of a class of its own in a ``DTensor``, cut once more: over (2, 2) ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parts, rows = mesh["tensor"], 2 * OUT
    whole = torch.arange(rows * IN, dtype=torch.float64).view(rows, IN)
    layer = nn.Linear(IN, rows, bias=False).double()
    own = Rounded(whole.chunk(2)[parts.get_local_rank()].clone())
    layer.weight = nn.Parameter(DTensor.from_local(own, parts, [Shard(0)]))
    OURS.fully_shard(layer, mesh=mesh["shard"])
    x = DTensor.from_local(torch.eye(IN, dtype=torch.float64), parts, [Replicate()])
    out: Any = layer(x)
    assert torch.equal(out.to_local(), whole.chunk(2)[parts.get_local_rank()].T)
    out.to_local().sum().backward()
    # Each rank's mean over the data of what the identity gives: one.
    gradient: Any = layer.weight.grad
    assert (type(gradient.to_local()), tuple(gradient.shape)) == (torch.Tensor, (rows, IN))
    assert torch.equal(gradient.to_local(), torch.ones_like(gradient.to_local()))
    assert inside(layer.weight)[5] is Rounded


def test_beside_tensor_parallelism(ranks: KeptRanks) -> None:
    ranks.run(4, beside_tensor_parallelism)


def eight_bit_floats(rank: int) -> None:
    model = Packed(torch.float8_e4m3fn)
    bits = model.weight.detach().view(torch.uint8)
    OURS.fully_shard(model, mesh=cpu_mesh(), mp_policy=OURS.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.ones(2, IN)).sum().backward()
    assert model.seen[0].dtype == torch.float8_e4m3fn
    assert torch.equal(model.seen[0].view(torch.uint8), bits)


def test_frozen_eight_bit_floats_are_not_cast(ranks: KeptRanks) -> None:
    ranks.run(2, eight_bit_floats)
