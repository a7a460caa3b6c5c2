"""What ``fully_shard`` makes of modules, meta models among them, and what it refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    FACES,
    OURS,
    WIDTH,
    Block,
    Words,
    batches,
    both,
    cpu_mesh,
    loss_of,
    make,
    same,
    shard_all,
    train,
    wholes,
)
from polyshard_fsdp2 import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from processes import KeptRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def modules_become_subclasses(rank: int) -> None:
    for face in FACES:
        model = make()
        assert face.fully_shard(model.blocks[0], mesh=cpu_mesh()) is model.blocks[0]
        shard = model.blocks[0]
        assert type(shard).__name__ == "FSDPBlock"
        assert isinstance(shard, face.FSDPModule)
        assert isinstance(shard, Block)
        assert not isinstance(model.blocks[1], face.FSDPModule)
        face.fully_shard(model.blocks[1])
        assert type(model.blocks[1]) is type(shard)
        sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        face.fully_shard(sequence, mesh=cpu_mesh())
        assert type(sequence[:2]) is nn.Sequential
        assert len(sequence[:2]) == 2
        nothing = nn.ReLU()
        face.fully_shard(nothing, mesh=cpu_mesh())
        assert isinstance(nothing, face.FSDPModule)
        same(nothing(torch.ones(1)), torch.ones(1))


def pieces_are_those_of_shard_0(rank: int) -> None:
    plain, model = make(), shard_all(OURS, make())
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        theirs = distribute_tensor(whole.detach(), cpu_mesh(), [Shard(0)])
        same(parameter.detach(), theirs.to_local())
        assert polyshard.placement(parameter).shape == tuple(whole.shape)
        if whole.shape[0] % 3 == 0 and len(polyshard.placement(parameter).pieces) == 3:
            same(polyshard.as_dtensor(parameter).full_tensor(), whole.detach())


class _Odd(nn.Module):
    """Slices of more than 64 KiB that no alignment fits, a tensor of more dimensions, one row, and none."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(301, 173))
        self.deep = nn.Parameter(torch.randn(7, 3, 2))
        self.empty = nn.Parameter(torch.randn(rows, 3))
        self.row = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.wide).sum() + (self.deep**2).sum() + self.empty.sum() + (self.row**3).sum()


def odd_shapes(rank: int) -> None:
    def run(face: Any, rows: int = 1) -> Any:
        torch.manual_seed(0)
        model = _Odd(rows)
        face.fully_shard(model, mesh=cpu_mesh())
        model(torch.randn(2, 301)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return [], wholes(model)

    both(run, rtol=1e-5, atol=1e-5)
    # Torch raises in its backward.
    assert run(OURS, rows=0)[1]["empty"].shape == (0, 3)


def refusals_leave_the_model_alone(rank: int) -> None:
    mesh = cpu_mesh()
    cases: list[tuple[type[Exception], str, Callable[[nn.Module], object]]] = [
        (ValueError, "containers that do not implement forward", lambda m: OURS.fully_shard(m.blocks)),
        (TypeError, "expects a module", lambda m: OURS.fully_shard(list(m.parameters()))),
        (ValueError, "empty list", lambda m: OURS.fully_shard([])),
        (ValueError, "already been applied", lambda m: OURS.fully_shard([m, m])),
        (TypeError, "DeviceMesh", lambda m: OURS.fully_shard(m, mesh=2)),
        (ValueError, "1D or 2D", lambda m: OURS.fully_shard(m, mesh=init_device_mesh("cpu", (1, 1, 2)))),
        (AssertionError, "mesh_dim_names", lambda m: OURS.fully_shard(m, mesh=init_device_mesh("cpu", (1, 2)))),
        (ValueError, "bool or an int", lambda m: OURS.fully_shard(m, mesh=mesh, reshard_after_forward="yes")),
        (ValueError, "a factor of 2", lambda m: OURS.fully_shard(m, mesh=mesh, reshard_after_forward=3)),
        (TypeError, "MixedPrecisionPolicy", lambda m: OURS.fully_shard(m, mesh=mesh, mp_policy=torch.bfloat16)),
        (TypeError, "OffloadPolicy", lambda m: OURS.fully_shard(m, mesh=mesh, offload_policy="cpu")),
        (NotImplementedError, "offload policy _Tier", lambda m: OURS.fully_shard(m, mesh=mesh, offload_policy=_Tier())),
        (NotImplementedError, "dp_mesh_dims", lambda m: OURS.fully_shard(m, dp_mesh_dims=DataParallelMeshDims("dp"))),
        (NotImplementedError, "Shard", lambda m: OURS.fully_shard(m, mesh=mesh, shard_placement_fn=lambda _: Shard(1))),
        (TypeError, "answered 0", lambda m: OURS.fully_shard(m, mesh=mesh, shard_placement_fn=lambda _: 0)),
        (ValueError, "scalar parameters", _scalar),
        (NotImplementedError, "non-contiguous", _transposed),
        (ValueError, "the DTensor 'parallel'.* with polyshard.shard", _parallel),
        (ValueError, "_Quantized, not a plain tensor", _quantized),
    ]
    for kind, words, call in cases:
        model = make()
        with pytest.raises(kind, match=words):
            call(model)
        # As it was, and to be sharded all the same.
        assert type(model) is Words
        for name in ("scalar", "turned", "parallel", "quantized"):
            model._parameters.pop(name, None)
        shard_all(OURS, model)
    loss_of(model, next(batches(1))).backward()
    with pytest.raises(ValueError, match="already been applied"):
        OURS.fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="deep-copied"):
        copy.deepcopy(model)
    tied = make(tied=True)
    OURS.fully_shard(tied.embedding, mesh=mesh)
    with pytest.raises(ValueError, match="shared with a module that is sharded already"):
        OURS.fully_shard(tied.head, mesh=mesh)


class _Tier(OffloadPolicy):
    """Of a user."""


def _scalar(model: nn.Module) -> None:
    model.scalar = nn.Parameter(torch.tensor(1.0))
    OURS.fully_shard(model, mesh=cpu_mesh())


def _transposed(model: nn.Module) -> None:
    model.turned = nn.Parameter(torch.randn(3, 4).t())
    OURS.fully_shard(model, mesh=cpu_mesh())


def _parallel(model: nn.Module) -> None:
    model.parallel = nn.Parameter(distribute_tensor(torch.randn(4, 4), cpu_mesh(), [Shard(1)]))
    OURS.fully_shard(model, mesh=cpu_mesh())


class _Quantized(torch.Tensor):
    """A subclass with methods of its own for gathers."""


def _quantized(model: nn.Module) -> None:
    model.quantized = nn.Parameter(torch.randn(4, 4).as_subclass(_Quantized))
    OURS.fully_shard(model, mesh=cpu_mesh())


def some_of_the_ranks(rank: int) -> None:
    with pytest.raises(NotImplementedError, match="groups of 2 of 4 ranks"):
        OURS.fully_shard(make(), mesh=cpu_mesh(), reshard_after_forward=2)
    # One model over the first two ranks, another over the rest, as pipelines have them.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))["shard"]
    told = []
    for face in FACES:
        model = shard_all(face, make(), mesh)
        told.append([train(model), wholes(model)])
    same(*told)


def settings_of_torch_are_taken(rank: int) -> None:
    theirs = FACES[0]
    model = make()
    OURS.fully_shard(
        model.blocks[0],
        mp_policy=theirs.MixedPrecisionPolicy(param_dtype=torch.float32),
        offload_policy=theirs.CPUOffloadPolicy(pin_memory=False),
        shard_placement_fn=lambda _: Shard(0),
    )
    assert model.blocks[0](torch.randn(2, WIDTH)).dtype is torch.float32


def test_settings_have_the_fields_of_torch() -> None:
    for ours, theirs in (
        (MixedPrecisionPolicy(), FACES[0].MixedPrecisionPolicy()),
        (CPUOffloadPolicy(), FACES[0].CPUOffloadPolicy()),
        (OffloadPolicy(), FACES[0].OffloadPolicy()),
    ):
        assert vars(ours) == vars(theirs)


def _meta(rank: int, per_module: bool) -> None:
    torch.manual_seed(3)
    plain = Words().double()
    _initialise(plain, per_module)
    with torch.device("meta"):
        model = Words().double()
    shard_all(OURS, model)
    # torchtitan sets these before there is memory.
    for module in model.modules():
        if isinstance(module, OURS.FSDPModule):
            module.set_gradient_divide_factor(1.0)
    model.blocks[0].set_reshard_after_forward(False)
    with pytest.raises(RuntimeError, match=re.escape("still on meta device: ['embedding.weight'")):
        model(torch.zeros(1, 1, dtype=torch.long))
    theirs = [value for name, value in model.state_dict().items() if name != "scale"]
    for value, whole in zip(theirs, plain.parameters(), strict=True):
        pieces = torch.chunk(whole, dist.get_world_size())
        expected = tuple(pieces[rank].shape) if rank < len(pieces) else (0, *whole.shape[1:])
        assert value.is_meta
        assert (value.placements, value.shape, tuple(value.to_local().shape)) == ((Shard(0),), whole.shape, expected)
    for early in (lambda: model.load_state_dict({}), lambda: model.load_state_dict({}, assign=True), model.unshard):
        with pytest.raises(RuntimeError, match="to_empty"):
            early()
    assert model.to_empty(device="cpu") is model
    torch.manual_seed(3)
    Words()
    _initialise(model, per_module)
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    same(wholes(model), dict(plain.state_dict()), rtol=0, atol=0)
    told = train(model, 2, optimizer)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    for face in FACES[:1]:
        theirs = shard_all(face, plain)
        for module in theirs.modules():
            if isinstance(module, face.FSDPModule):
                module.set_gradient_divide_factor(1.0)
        same(told, train(theirs, 2))
        same(wholes(model), wholes(theirs))


def _initialise(model: nn.Module, per_module: bool) -> None:
    if not per_module:
        assert isinstance(model, Words)
        model.init_weights()
        return
    for module in model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    for name, buffer in model.named_buffers():
        assert name == "scale"
        buffer.fill_(1.0)


@pytest.mark.parametrize(("world_size", "per_module"), [(3, False), (2, True), (1, False)])
def test_meta_model_is_initialised_as_the_whole_is(ranks: KeptRanks, world_size: int, per_module: bool) -> None:
    ranks.run(world_size, _meta, per_module)


def meta_model_is_loaded(rank: int) -> None:
    whole = dict(make().state_dict())
    with torch.device("meta"):
        model = Words().double()
    ignored = {model.norm.weight}
    shard_all(OURS, model, cpu_mesh(2, 2), ignored_params=ignored, offload_policy=CPUOffloadPolicy(pin_memory=False))
    model.to_empty(device="cpu")
    model.load_state_dict(whole)
    # Reading shows them, and drops nothing; so does writing to pieces.
    same(model.head.weight.detach(), whole["head.weight"])
    with torch.no_grad():
        dict(model.named_parameters())["head.weight"].mul_(2.0)
        same(model.head.weight.detach(), 2 * whole["head.weight"])
        model.head.weight.mul_(0.5)
        model.norm.bias = nn.Parameter(torch.full_like(model.norm.bias, 3.0))
    whole["norm.bias"] = torch.full((WIDTH,), 3.0, dtype=torch.float64)
    same(wholes(model), whole)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loss_of(model, next(batches(1))).backward()


def meta_model_takes_tensors_that_are_assigned(rank: int) -> None:
    """As Accelerate does: all from one rank, through what the state dict says of the placement."""
    whole = dict(make().state_dict())
    with torch.device("meta"):
        model = Words().double()
    shard_all(OURS, model)
    given = {
        name: distribute_tensor(whole[name], value.device_mesh, value.placements)
        for name, value in model.state_dict().items()
        if name != "scale"
    }
    before = list(model.parameters())
    model.load_state_dict(given, strict=False, assign=True)
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert model.scale.is_meta
    model.scale = torch.ones(1, dtype=torch.float64)
    same(wholes(model), whole)
    loss_of(model, next(batches(1))).backward()


def moving_a_sharded_model(rank: int) -> None:
    model = shard_all(OURS, make())
    before = wholes(model)
    model.to("cpu").train()
    model.to(torch.float64)
    same(wholes(model), before)
    loss_of(model, next(batches(1))).backward()
    model.zero_grad()
    model.to(torch.float32)
    with pytest.raises(RuntimeError, match="before sharding"):
        model(next(batches(1)))


def functions_of_polyshard_work_on_it(rank: int) -> None:
    model = shard_all(OURS, make())
    with polyshard.unsharded(model, writeback=True):
        same(dict(model.state_dict()), dict(make().state_dict()))
        with torch.no_grad():
            model.head.weight.fill_(2.0)
    same(model.state_dict()["head.weight"].full_tensor(), torch.full((17, WIDTH), 2.0, dtype=torch.float64))
    assert polyshard.report(model).world_size == dist.get_world_size()
    assert model.state_dict()["head.weight"].placements == (Shard(0),)
    hybrid = shard_all(OURS, make(), cpu_mesh(1, 2))
    assert hybrid.state_dict()["head.weight"].placements == (Replicate(), Shard(0))
    polyshard.close(model)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    modules_become_subclasses: 2,
    pieces_are_those_of_shard_0: 3,
    odd_shapes: 3,
    refusals_leave_the_model_alone: 2,
    some_of_the_ranks: 4,
    settings_of_torch_are_taken: 2,
    meta_model_is_loaded: 4,
    meta_model_takes_tensors_that_are_assigned: 3,
    moving_a_sharded_model: 2,
    functions_of_polyshard_work_on_it: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
