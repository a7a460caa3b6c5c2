"""What ``fully_shard`` makes of modules, meta models among them, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    OURS,
    PACKAGES,
    WIDTH,
    Block,
    Words,
    alike,
    batches,
    beside_torch,
    copied,
    cpu_mesh,
    inputs,
    loss_of,
    make,
    parallel,
    seen,
    shard_all,
    square_of,
    train,
    wholes,
)
from polyshard.errors import AlreadyShardedError
from polyshard_fsdp import FullyShardedDataParallel
from polyshard_fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def modules_become_subclasses(package: ModuleType) -> Any:
    model = make()
    assert package.fully_shard(model.blocks[0], mesh=cpu_mesh()) is model.blocks[0]
    shard = model.blocks[0]
    # Torch's own class, for those who ask for that one: pipelines and trainers.
    assert isinstance(shard, package.FSDPModule)
    assert isinstance(shard, PACKAGES[0].FSDPModule)
    assert isinstance(shard, Block)
    assert not isinstance(model.blocks[1], package.FSDPModule)
    package.fully_shard(model.blocks[1])
    assert type(model.blocks[1]) is type(shard)
    assert package.fully_shard.state(shard) is not package.fully_shard.state(model.blocks[1])
    sequence = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    package.fully_shard(sequence, mesh=cpu_mesh())
    assert type(sequence[:2]) is nn.Sequential
    assert len(sequence[:2]) == 2
    nothing = package.fully_shard(nn.ReLU(), mesh=cpu_mesh())
    assert isinstance(nothing, package.FSDPModule)
    return type(shard).__name__, type(nothing).__name__, nothing(torch.ones(1))


def refusals(package: ModuleType) -> None:
    """Of the type and in the words that torch's own tests match. Ours leaves the model as it was."""
    mesh, shard = cpu_mesh(), package.fully_shard
    odd = {"scalar": torch.tensor(1.0), "turned": torch.randn(3, 4).t()}

    def along(module: nn.Module, place: Callable[[nn.Parameter], Shard]) -> None:
        shard(module, mesh=mesh, shard_placement_fn=place)

    def over(module: nn.Module, *shape: int) -> None:
        shard(module, mesh=init_device_mesh("cpu", shape))

    def cast_to(module: nn.Module, dtype: object) -> None:
        policy = package.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=lambda _: dtype)
        shard(module, mesh=mesh, mp_policy=policy)

    cases: list[tuple[type[Exception], str, Callable[[Any], object]]] = [
        (ValueError, "does not support containers that do not implement forward", lambda m: shard(m.blocks)),
        (ValueError, "expects a 1D or 2D DeviceMesh", lambda m: over(m, 1, 1, 2)),
        (AssertionError, "Please init the 2D mesh .* mesh_dim_names", lambda m: over(m, 1, 2)),
        (ValueError, "should be a bool or an int", lambda m: shard(m, mesh=mesh, reshard_after_forward="yes")),
        (ValueError, "should be a factor of 2, not 3", lambda m: shard(m, mesh=mesh, reshard_after_forward=3)),
        (ValueError, "Change scalar to a 1D tensor with numel equal to 1", lambda m: shard(m, mesh=mesh)),
        (NotImplementedError, "does not support non-contiguous parameters: turned", lambda m: shard(m, mesh=mesh)),
        (NotImplementedError, "uneven sharding on dim 1", lambda m: along(m, lambda p: Shard(p.ndim - 1))),
        (AssertionError, "Shard dim 1 is invalid for 1D", lambda m: along(m, lambda _: Shard(1))),
    ]
    if "param_dtype_override_fn" in signature(package.MixedPrecisionPolicy).parameters:
        # Of torch 2.15.
        cases += [
            (ValueError, "must return a torch.dtype or None but got", lambda m: cast_to(m, "bf16")),
            (ValueError, "or the parameter's original dtype but got torch.float16", lambda m: cast_to(m, torch.half)),
        ]
    for kind, words, call in cases:
        model = make()
        for name, value in odd.items():
            if name in words:
                setattr(model, name, nn.Parameter(value))
        with pytest.raises(kind, match=words.removesuffix(": turned")):
            call(model)
        if package is PACKAGES[0]:
            continue
        assert type(model) is Words
        for name in odd:
            model._parameters.pop(name, None)
        alike(copied(dict(model.named_parameters())), copied(dict(make().named_parameters())))
        shard_all(package, model)
    model = shard_all(package, make())
    before = loss_of(model, next(batches(1))).item()
    for again in (model, model.blocks[0]):
        with pytest.raises(AssertionError, match="composable distributed API can only be applied to a module once"):
            shard(again, mesh=mesh)
    assert loss_of(model, next(batches(1))).item() == before
    model.reshard()
    train(model, 1)


def meta_model_in_a_forward(package: ModuleType) -> None:
    with torch.device("meta"):
        model = shard_all(package, Words().double())
    names = [name for name, _ in model.named_parameters() if name.startswith(("norm", "head"))]
    with pytest.raises(RuntimeError, match=re.escape(f"still on meta device: {names}")):
        model(torch.zeros(1, 1, dtype=torch.long))


def _meta(package: ModuleType, mesh: tuple[int, ...]) -> Any:
    """Placements before there is memory; ``to_empty``; values by methods, by loops, by hand; training."""
    with torch.device("meta"):
        model = parallel(package, *mesh)
    found = [[each.is_meta, each.shape, each.to_local().shape, each.placements] for each in model.parameters()]
    found += [model.to_empty(device="cpu") is model]
    for module in model.modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
    found += [seen(model)]
    for parameter in model.blocks[0].parameters():
        nn.init.normal_(parameter, std=0.02)
    nn.init.trunc_normal_(model.blocks[1].up.weight)
    nn.init.zeros_(model.head.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found += [seen(model)]
    for x in inputs(model):
        square_of(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, seen(model, optimizer)]


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.nightly) for mesh in ((3,), (2, 2))), (0, 2, 2)]
)
def test_meta_models_get_memory_and_values(ranks: KeptRanks, mesh: tuple[int, ...]) -> None:
    ranks.run(3 if mesh == (3,) else 4, beside_torch, _meta, mesh)


def meta_model_takes_what_is_assigned(package: ModuleType) -> Any:
    """In two parts, as ``DTensor``; buffers last."""
    whole = dict(make().state_dict())
    with torch.device("meta"):
        model = shard_all(package, Words().double())
    given = {
        name: nn.Parameter(distribute_tensor(whole[name], value.device_mesh, value.placements))
        for name, value in model.state_dict().items()
        if name != "scale"
    }
    first = {name: value for name, value in given.items() if name.startswith("blocks")}
    rest = {name: value for name, value in given.items() if name not in first}
    found = []
    for part in (first, rest):
        answer = model.load_state_dict(part, strict=False, assign=True)
        found += [sorted(answer.missing_keys), answer.unexpected_keys]
        found += [[name, value.is_meta] for name, value in (*model.named_parameters(), *model.named_buffers())]
    model.scale = whole["scale"].clone()
    found += [wholes(model), copied(dict(model.named_parameters()))]
    return [*found, train(model, 2), seen(model)]


def values_on_the_first_rank_alone(package: ModuleType) -> Any:
    """As trainers load large models: rank 0 from a file, the others behind ``fully_shard``, from there."""
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    with torch.device("cpu" if first else "meta"):
        # Behind those of ``make``, so that nothing is right by chance.
        model = Words().double() and Words().double()
    whole = dict(model.state_dict()) if first else {}
    # Trained by all ranks, and made by each.
    adapter = model.blocks[0].adapter = nn.Linear(WIDTH, 1).double()
    nn.init.ones_(adapter.weight)
    shard_all(package, model, offload_policy=None)
    model.to("cpu") if first else model.to_empty(device="cpu")
    nn.init.zeros_(adapter.weight)
    nn.init.zeros_(adapter.bias)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, whole, options=options)
    return wholes(model), train(model, 2), seen(model)


def given(model: nn.Module) -> set[str]:
    """Names of what is sharded."""
    return {name for name, value in model.named_parameters() if hasattr(value, "placements")}


def pieces_along_another_dimension(package: ModuleType) -> Any:
    """``Shard(n)`` of the largest dimension that is even, the last one, and None."""

    def largest(parameter: nn.Parameter) -> Shard | None:
        sizes = [size if size % dist.get_world_size() == 0 else 0 for size in parameter.shape]
        return Shard(sizes.index(max(sizes))) if max(sizes) else None

    found = []
    for place in (largest, lambda parameter: Shard(-1) if parameter.shape[-1] == WIDTH else None):
        model = shard_all(package, make(), shard_placement_fn=place)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found += [seen(model)]
        loss_of(model, next(batches(1))).backward()
        assert all(each.grad.to_local().is_contiguous() for each in model.parameters())
        found += [seen(model)]
        optimizer.zero_grad()
        found += [train(model, 2, optimizer), seen(model, optimizer)]
    return found


def two_models_over_other_ranks(package: ModuleType) -> Any:
    """One over the first two ranks, another over the rest, as pipelines have them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))["shard"]
    model = shard_all(package, make(), mesh)
    return train(model), seen(model)


def settings_of_torch_are_taken(package: ModuleType) -> Any:
    theirs = PACKAGES[0]
    model = make()
    package.fully_shard(
        model.blocks[0],
        mp_policy=theirs.MixedPrecisionPolicy(param_dtype=torch.float32),
        offload_policy=theirs.CPUOffloadPolicy(pin_memory=False),
        shard_placement_fn=lambda _: Shard(0),
    )
    out = model.blocks[0](torch.randn(2, WIDTH))
    out.sum().backward()
    return out, seen(model.blocks[0])


def embeddings_that_no_piece_serves(rank: int) -> None:
    """FSDP2 fails in the first backward, and loses what the forward scaled."""
    for kind, words in (
        ({"sparse": True}, "makes sparse gradients"),
        ({"max_norm": 1.5}, "to max_norm=1.5 in forward"),
    ):
        model = make()
        model.embedding = nn.Embedding(17, 12, dtype=torch.float64, **kind)
        for module in (model, model.embedding):
            with pytest.raises(ValueError, match=f"{words}.* ignored_params"):
                OURS.fully_shard(module, mesh=cpu_mesh())
        OURS.fully_shard(model, mesh=cpu_mesh(), ignored_params={model.embedding.weight})
        loss_of(model, next(batches(1))).backward()
        assert model.embedding.weight.grad is not None
        assert model.embedding.weight.grad.is_sparse is ("sparse" in kind)


def values_that_differ(rank: int) -> None:
    """In FSDP2 ranks train a mixture."""
    torch.manual_seed(rank)
    model = Words().double()
    differs = r"Rank 1 holds other values than rank 0.* set_model_state_dict with broadcast_from_rank0=True"
    with pytest.raises(RuntimeError, match=differs):
        OURS.fully_shard(model, mesh=cpu_mesh())
    model.load_state_dict(make().state_dict())
    # Nor among those ranks that have values.
    with torch.device("meta" if rank == 2 else "cpu"):
        torch.manual_seed(rank)
        other = Words()
    with pytest.raises(RuntimeError, match=differs):
        OURS.fully_shard(other, mesh=cpu_mesh())
    train(shard_all(OURS, model), 1)


def test_values_that_differ(ranks: KeptRanks) -> None:
    ranks.run(3, values_that_differ)


def test_embeddings_that_no_piece_serves(ranks: KeptRanks) -> None:
    ranks.run(2, embeddings_that_no_piece_serves)


def test_settings_have_the_fields_of_torch() -> None:
    for ours, theirs in (
        (MixedPrecisionPolicy(), PACKAGES[0].MixedPrecisionPolicy()),
        (CPUOffloadPolicy(), PACKAGES[0].CPUOffloadPolicy()),
        (OffloadPolicy(), PACKAGES[0].OffloadPolicy()),
    ):
        # Torch 2.15 has one more.
        assert {"param_dtype_override_fn": None} | vars(theirs) == {"param_dtype_override_fn": None} | vars(ours)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[ModuleType], object], int] = {
    modules_become_subclasses: 2,
    refusals: 2,
    meta_model_in_a_forward: 2,
    meta_model_takes_what_is_assigned: 2,
    values_on_the_first_rank_alone: 3,
    pieces_along_another_dimension: 2,
    two_models_over_other_ranks: 4,
    settings_of_torch_are_taken: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_beside_torch(ranks: KeptRanks, body: Callable[[ModuleType], object]) -> None:
    ranks.run(BODIES[body], beside_torch, body)


def refused_behind_torch(rank: int) -> None:
    theirs, ours = PACKAGES
    config = polyshard.ShardConfig(collectives="gloo")

    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        theirs.fully_shard(model[1], mesh=cpu_mesh())
        return model

    calls: list[Callable[[nn.Module], object]] = [
        lambda model: ours.fully_shard(model, mesh=cpu_mesh()),
        lambda model: ours.fully_shard([model, nn.Linear(4, 4)], mesh=cpu_mesh()),
        lambda model: polyshard.fully_shard(model, config),
        lambda model: polyshard.shard(model, config),
        FullyShardedDataParallel,
    ]
    words = r"^'1' was sharded by torch\.distributed\.fsdp's {0} \(rank {1}\): import {0} from polyshard_{2} for all"
    for call in calls:
        with pytest.raises(AlreadyShardedError, match=words.format("fully_shard", rank, "fsdp2")):
            call(build())
    # Not as the file is read: what took the name from torch keeps a drop-in from its place (test_install.py).
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    wrapped = nn.Sequential(nn.Linear(4, 4), TorchFSDP(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(AlreadyShardedError, match=words.format("FullyShardedDataParallel", rank, "fsdp")):
        FullyShardedDataParallel(wrapped)


def test_modules_that_torchs_fully_shard_had_are_named(ranks: KeptRanks) -> None:
    ranks.run(2, refused_behind_torch)
