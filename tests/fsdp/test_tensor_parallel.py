"""FSDP over what tensor parallelism has cut, with numbers: four ranks, two of each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import pytest
import torch
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import subtests
from parity import chain
from polyshard.errors import ConfigError, UnsupportedError
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy, StateDictType
from polyshard_fsdp.wrap import ModuleWrapPolicy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """A plain norm, and two layers between which tensor parallelism cuts: 7 features, unevenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", x + self.down(torch.tanh(self.up(self.norm(x)))))


@functools.cache
def meshes(device_type: str) -> DeviceMesh:
    """One replica of two data ranks of two."""
    return init_device_mesh(device_type, (1, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))


def net(ranks: Ranks, seed: int = 0, width: int = 7) -> Any:
    """The same on all ranks, in fp64."""
    torch.manual_seed(seed)
    blocks = nn.Sequential(Block(width), Block(width))
    return chain(blocks=blocks, head=nn.Linear(6, 4)).double().to(ranks.device)


def parallel(ranks: Ranks, model: Any) -> Any:
    """``model`` cut over the ranks of ``tp``."""
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    for index in range(len(model.blocks)):
        # Between the two a DTensor: a local tensor would not tell that the cut is uneven.
        plan[f"blocks.{index}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"blocks.{index}.down"] = RowwiseParallel()
    mesh = meshes(ranks.device.type)["tp"]
    parallelize_module(model, mesh, plan)
    # Each rank norms some of the rows: gradients of weight and bias are partial sums.
    distribute_module(
        cast("Block", model.blocks[0]).norm,
        mesh,
        input_fn=lambda _, args, mesh: DTensor.from_local(args[0], mesh, [Replicate()]).redistribute(mesh, [Shard(0)]),
        output_fn=lambda _, output, mesh: output.redistribute(mesh, [Replicate()]).to_local(),
    )
    return model


def sharded(ranks: Ranks, model: Any, use_orig_params: bool, strategy: ShardingStrategy) -> FSDP:
    """``model``, which tensor parallelism has cut, with each block a unit."""
    mesh = meshes(ranks.device.type)
    over = mesh["replicate", "dp"] if strategy is ShardingStrategy.HYBRID_SHARD else mesh["dp"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        return FSDP(
            parallel(ranks, model),
            device_mesh=over,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=use_orig_params,
            sharding_strategy=strategy,
        )


def batches(ranks: Ranks, step: int) -> list[torch.Tensor]:
    """Those of both data ranks."""
    torch.manual_seed(step)
    return list(torch.randn(2, 3, 6, dtype=torch.float64, device=ranks.device))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which others have parts, or that is whole already."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(mine: Mapping[str, torch.Tensor], model: nn.Module, values: Callable[[Any], Any]) -> None:
    """Each of ``mine`` is, put together, that of the unsharded ``model``."""
    theirs = {name: values(parameter) for name, parameter in model.named_parameters()}
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        torch.testing.assert_close(whole(tensor), theirs[name], rtol=1e-12, atol=1e-12, msg=f"{name}: {{}}".format)


def steps(ranks: Ranks, reference: nn.Module, model: FSDP, optimizers: list[torch.optim.Optimizer]) -> None:
    """Two steps of both, each of a microbatch under ``no_sync`` and one outside; the last one's gradients stay."""
    own = meshes(ranks.device.type)["dp"].get_local_rank()
    for step in range(2):
        for each in optimizers:
            each.zero_grad()
        for part in range(2):
            expected = [reference(batch).square().mean() for batch in batches(ranks, 2 * step + part)]
            (sum(expected) / 2).backward()
            with model.no_sync() if part == 0 else nullcontext():
                loss = model(batches(ranks, 2 * step + part)[own]).square().mean()
                loss.backward()
            torch.testing.assert_close(loss, expected[own], rtol=1e-12, atol=1e-12)
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        torch.testing.assert_close(model.clip_grad_norm_(0.1), norm, rtol=1e-12, atol=1e-12)
        for each in optimizers:
            each.step()


PARITY = [
    (ShardingStrategy.FULL_SHARD, False),
    (ShardingStrategy.FULL_SHARD, True),
    (ShardingStrategy.NO_SHARD, True),
    (ShardingStrategy.HYBRID_SHARD, False),
]


@across(4)
@subtests(case=PARITY)
def test_parity_with_unsharded(ranks: Ranks, case: tuple[ShardingStrategy, bool]) -> None:
    """Losses, gradients, norms and parameters are the unsharded one's, at 1e-12; parameters are plain tensors."""
    strategy, use_orig_params = case
    reference, model = net(ranks), sharded(ranks, net(ranks), use_orig_params, strategy)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    steps(ranks, reference, model, optimizers)
    with FSDP.summon_full_params(model, with_grads=use_orig_params):
        shown = dict(model.named_parameters())
        up = shown["blocks.1.up.weight"]
        assert isinstance(up, DTensor)
        assert up.shape == (7, 6)
        assert_same({name: each.detach() for name, each in shown.items()}, reference, torch.Tensor.detach)
        if use_orig_params:
            gradients = {name: each.grad for name, each in shown.items() if each.grad is not None}
            assert_same(gradients, reference, lambda parameter: parameter.grad)
        with torch.no_grad():
            up.mul_(2)
    with FSDP.summon_full_params(model):
        twice = dict(reference.named_parameters())["blocks.1.up.weight"] * 2
        written = dict(model.named_parameters())["blocks.1.up.weight"]
        torch.testing.assert_close(whole(written.detach()), twice.detach(), rtol=1e-12, atol=1e-12)


@contextmanager
def state_dict_type(model: FSDP, kind: StateDictType) -> Iterator[None]:
    with warnings.catch_warnings():
        # Deprecated, and so are torch's classes of tensors.
        warnings.simplefilter("ignore")
        with FSDP.state_dict_type(model, kind):
            yield


@across(4)
@subtests(kind=[StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], use_orig_params=[True, False])
def test_state_dicts(ranks: Ranks, kind: StateDictType, use_orig_params: bool) -> None:
    """State dicts of model and optimizer are, put together, the unsharded ones, and a fresh model goes on from them."""
    # Torch's functions for optimizers know even cuts alone.
    strategy = ShardingStrategy.FULL_SHARD
    reference, model = net(ranks, width=8), sharded(ranks, net(ranks, width=8), use_orig_params, strategy)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    steps(ranks, reference, model, optimizers)
    with state_dict_type(model, kind):
        values = model.state_dict()
        states = FSDP.optim_state_dict(model, optimizers[1])
    assert_same(values, reference, torch.Tensor.detach)
    assert_same(
        {name: each["exp_avg"] for name, each in states["state"].items()},
        reference,
        lambda parameter: optimizers[0].state[parameter]["exp_avg"],
    )
    up = values["blocks.0.up.weight"]
    assert isinstance(up, DTensor)
    if kind is StateDictType.SHARDED_STATE_DICT:
        assert up.placements == (Replicate(), Shard(0), Shard(0))
        assert up.device_mesh == meshes(ranks.device.type)
    elif use_orig_params:
        # Those of the unsharded model are taken, too.
        values = {name: whole(value) for name, value in values.items()}
    fresh = sharded(ranks, net(ranks, seed=1, width=8), use_orig_params, strategy)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    with state_dict_type(fresh, kind):
        fresh.load_state_dict(values)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(fresh, optimizer, states))
    steps(ranks, reference, fresh, [optimizers[0], optimizer])
    with state_dict_type(fresh, StateDictType.FULL_STATE_DICT):
        assert_same(fresh.state_dict(), reference, torch.Tensor.detach)


@across(4)
@subtests(use_orig_params=[False, True])
def test_sync_module_states(ranks: Ranks, use_orig_params: bool) -> None:
    """``sync_module_states`` makes the parts of one place equal, and leaves other places their own."""
    mesh = meshes(ranks.device.type)
    place = mesh["tp"].get_local_rank()

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            own = torch.full((2, 3), float(ranks.rank), device=ranks.device)
            self.weight = nn.Parameter(DTensor.from_local(own, mesh["tp"], [Shard(0)], run_check=False))
            self.register_buffer("scale", DTensor.from_local(own, mesh["tp"], [Shard(0)], run_check=False))

    model = FSDP(Placed(), device_mesh=mesh["dp"], sync_module_states=True, use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        for tensor in (model.weight, model.scale):
            assert cast("DTensor", tensor).to_local().tolist() == [[float(place)] * 3] * 2


@across(4)
def test_refusals(ranks: Ranks) -> None:
    """What would be wrong is refused by name: optimizers of replaced parameters, and state dicts without a mesh."""
    mesh = meshes(ranks.device.type)
    model = parallel(ranks, net(ranks))
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = FSDP(model, process_group=mesh["dp"].get_group(), use_orig_params=True)
    wrapped(batches(ranks, 0)[0]).sum().backward()
    with pytest.raises(ConfigError, match=r"SGD holds 'blocks.0.norm.weight', which a plain parameter over"):
        early.step()
    with (
        state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT),
        pytest.raises(UnsupportedError, match=r"'blocks.0.norm.weight' is a DTensor on .* needs one mesh for both"),
    ):
        wrapped.state_dict()
