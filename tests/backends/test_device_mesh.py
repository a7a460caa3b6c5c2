"""DTensors over collectives that are behind no process group: what torch's functions do with them, rank by rank."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from polyshard.errors import CollectiveError
from polyshard.interfaces import Collectives, CollectivesCapabilities, CollectivesDecorator, PluginContext
from polyshard.planning.device_mesh import mesh_over
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives
from polyshard_backends.threaded_world import ThreadedWorld
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

CPU = PluginContext("threaded", torch.device("cpu"))
RANKS = 3
#: Seven rows over three ranks: three, three and one.
WHOLE = torch.arange(28.0).view(7, 4).sin()


class WithoutExchanges(CollectivesDecorator):
    """A stranger's, with what every backend must have and no more."""

    api_version = 1

    def around(self, inner: Collectives) -> Collectives:
        return WithoutExchanges(inner)

    @property
    def capabilities(self) -> CollectivesCapabilities:
        return replace(super().capabilities, exchanges=False)

    def all_to_all(self, *args: Any) -> Any:
        raise AssertionError("nobody may call it")


def on_ranks(use: Callable[[Collectives, int], Any], around: Callable[[Collectives], Collectives]) -> list[Any]:
    def one(rank: int, world: ThreadedWorld) -> Any:
        return use(around(ThreadedCollectives(CPU, world, rank)), rank)

    return ThreadedWorld(RANKS, timeout=10.0).run(one)


def placed(mesh: Any, dim: int = 0) -> DTensor:
    # Each rank has the whole, and takes its part.
    return distribute_tensor(WHOLE, mesh, [Shard(dim)], src_data_rank=None)


@pytest.mark.parametrize("around", [lambda each: each, WithoutExchanges], ids=["threads", "a stranger's"])
def test_a_dtensor_computes_over_them_as_the_whole_does(around: Callable[[Collectives], Collectives]) -> None:
    def use(collectives: Collectives, rank: int) -> None:
        mesh = mesh_over(collectives, "cpu")
        assert mesh_over(collectives, "cpu") is mesh
        assert (mesh.size(), mesh.get_local_rank()) == (RANKS, rank)
        assert (mesh.get_group().rank(), mesh.get_group().size()) == (rank, RANKS)
        part = placed(mesh)
        assert part.to_local().shape == ([3, 3, 1][rank], 4)
        assert torch.equal(part.full_tensor(), WHOLE)
        assert torch.equal(part.redistribute(mesh, [Replicate()]).to_local(), WHOLE)
        for name in ("sum", "mean", "max", "norm"):
            torch.testing.assert_close(getattr(part, name)().full_tensor(), getattr(WHOLE, name)())
        # A sum over ranks, each of which has a part of the inner dimension, back to rows.
        square = placed(mesh, 1).t() @ placed(mesh, 1)
        torch.testing.assert_close(square.redistribute(mesh, [Shard(0)]).full_tensor(), WHOLE.t() @ WHOLE)
        # Four columns: the last rank has none. On the CPU torch goes by a gather.
        columns = part.redistribute(mesh, [Shard(1)])
        assert columns.to_local().shape == (7, [2, 2, 0][rank])
        assert torch.equal(columns.full_tensor(), WHOLE)
        # As it does on a GPU.
        group, received = mesh.get_group(), torch.zeros(RANKS)
        if around is WithoutExchanges:
            with pytest.raises(CollectiveError, match=r"no all_to_all, which a DTensor needs .* Go by Replicate"):
                group.alltoall_base(received, 10 * rank + torch.arange(3.0), [], [])
            return
        group.alltoall_base(received, 10 * rank + torch.arange(3.0), [], [])
        assert received.tolist() == [rank, 10 + rank, 20 + rank]

    on_ranks(use, around)


def test_torchs_functions_treat_it_as_an_unsharded_parameter() -> None:
    reference = nn.Parameter(WHOLE.clone())

    def step(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        optimizer, scaler = torch.optim.AdamW([parameter], lr=0.1, fused=True), torch.amp.GradScaler("cpu", 8.0)
        parameter.grad = scaler.scale(gradient)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_([parameter], 0.5)
        scaler.step(optimizer)
        return norm

    expected = step(reference, WHOLE.cos())

    def use(collectives: Collectives, rank: int) -> None:
        mesh = mesh_over(collectives, "cpu")
        module = nn.Module()
        module.weight = parameter = nn.Parameter(placed(mesh))
        norm = step(parameter, distribute_tensor(WHOLE.cos(), mesh, [Shard(0)], src_data_rank=None))
        torch.testing.assert_close(norm.full_tensor(), expected)
        torch.testing.assert_close(parameter.full_tensor(), reference)
        whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))["weight"]
        torch.testing.assert_close(whole, reference.detach())
        with torch.no_grad():
            parameter.zero_()
        set_model_state_dict(module, {"weight": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)})
        torch.testing.assert_close(parameter.full_tensor(), reference)

    on_ranks(use, lambda each: each)


def test_pretended_ranks_have_dtensors_without_torch_distributed(tmp_path: Any) -> None:
    assert not dist.is_initialized()
    mesh = mesh_over(FakeCollectives(PluginContext("fake", torch.device("cpu")), 1, 4), "cpu")
    part = placed(mesh)
    assert torch.equal(part.to_local(), WHOLE[2:4])
    # All ranks are pretended to have what this one has.
    torch.testing.assert_close(part.norm().full_tensor(), 2 * WHOLE[2:4].norm())
    loaded = {"weight": torch.zeros_like(part)}
    with pytest.warns(UserWarning, match="assuming the intent is to save"):
        dcp.save({"weight": part}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(UserWarning, match="assuming the intent is to load"):
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"].to_local(), WHOLE[2:4])


def test_one_rank_alone_has_a_mesh() -> None:
    mesh = mesh_over(None, "cpu")
    part = placed(mesh)
    torch.testing.assert_close(part.norm().full_tensor(), WHOLE.norm())
    assert torch.equal(part.full_tensor(), WHOLE)


def test_a_failure_is_the_collectives_own_and_a_mesh_goes_with_its_last_user() -> None:
    class Fails(FakeCollectives):
        def all_reduce(self, tensor: torch.Tensor, *, op: Any) -> Any:
            raise CollectiveError("told to")

    collectives = Fails(PluginContext("fake", torch.device("cpu")), 0, 2)
    part = placed(mesh_over(collectives, "cpu"))
    with pytest.raises(CollectiveError, match="told to"):
        part.norm().full_tensor()
    assert torch.equal(part.to_local(), WHOLE[:4])
    mesh = mesh_over(FakeCollectives(PluginContext("fake", torch.device("cpu")), 0, 2), "cpu")
    gone = ref(mesh.get_group())
    del mesh
    gc.collect()
    assert gone() is None
