"""``fully_shard`` of ``polyshard_fsdp2`` on a GPU: what only a device beside the host shows."""

from __future__ import annotations

import copy
import importlib
import warnings
from functools import partial
from typing import Any

import polyshard_fsdp
import polyshard_fsdp2
import pytest
import torch
import torch.distributed.fsdp
from polyshard.errors import DeviceError
from polyshard_fsdp import CPUOffload
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp.wrap import ModuleWrapPolicy
from polyshard_fsdp2 import CPUOffloadPolicy, fully_shard
from processes import KeptRanks, device_of, gpu_ranks, settle_on_device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()
RANKS = KeptRanks("nccl")
run = partial(RANKS.run, WORLD_SIZE)


def of_the_host(rank: int) -> float:
    """How far the outputs of inputs in host memory are off."""
    device = settle_on_device(rank)
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double().to(device)
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = torch.randn(4, 6, dtype=torch.float64)
    return (model(x) - plain(x.to(device))).abs().max().item()


def test_inputs_of_the_outermost_module_come_to_the_device() -> None:
    assert all(off < 1e-12 for off in run(of_the_host))


class Sum(nn.Module):
    """Has no parameters."""

    def forward(self, x: torch.Tensor, more: tuple[torch.Tensor, ...]) -> torch.Tensor:
        assert all(tensor.is_cuda for tensor in (x, *more))
        return x + sum(more)


class Outer(nn.Module):
    """Gives what is in host memory to a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = Sum()
        self.linear = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.sum(x.cpu(), (x.cpu(),))
        return out


def without_parameters(rank: int) -> str:
    """What becomes of inputs of a module without parameters: by itself, then in another that is sharded, too."""
    torch.cuda.set_device(device_of(rank))
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    alone = fully_shard(Sum(), mesh=mesh)
    assert alone(torch.ones(3), (torch.ones(3), torch.ones(3))).tolist() == [3.0] * 3
    outer = Outer()
    fully_shard(outer.sum, mesh=mesh)
    fully_shard(outer, mesh=mesh)
    try:
        outer(torch.ones(3))
    except AssertionError:
        return "left where they were"
    return "moved"


def test_modules_without_parameters_move_inputs_where_they_are_outermost() -> None:
    assert set(run(without_parameters)) == {"left where they were"}


def loaded_elsewhere(rank: int) -> str:
    """The refusal of parameters that were loaded onto the device where the policy wants them in host memory."""
    device = settle_on_device(rank)
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    model = nn.Sequential(nn.Linear(6, 8))
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    state = model.state_dict()
    model.load_state_dict({name: value.to(device) for name, value in state.items()}, assign=True)
    try:
        model(torch.randn(4, 6))
    except DeviceError as error:
        refused = str(error)
    model.load_state_dict(state, assign=True)
    assert model(torch.randn(4, 6)).isfinite().all()
    return refused


def test_parameters_on_another_device_are_refused_by_the_next_forward() -> None:
    for refused in run(loaded_elsewhere):
        assert "non-CPU device: [('0.weight'" in refused


def offloaded(rank: int) -> tuple[list[list[float]], int, int]:
    """Losses over torch's ``fully_shard`` and ours, and of ours the bytes that offloading frees, and of parameters.

    As trainers do to make room for another phase.
    """
    device = settle_on_device(rank)
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    told, freed, held = [], 0, 0
    for package in (torch.distributed.fsdp, polyshard_fsdp2):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 3)).double().to(device)
        x = torch.randn(4, 256, dtype=torch.float64).to(device)
        for layer in model:
            package.fully_shard(layer, mesh=mesh)
        package.fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        told.append([])
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told[-1].append(loss.item())
            before = torch.cuda.memory_allocated()
            model.to("cpu", non_blocking=True)
            freed = before - torch.cuda.memory_allocated()
            held = sum(parameter.to_local().nbytes for parameter in model.parameters())
            if package is polyshard_fsdp2:
                with pytest.raises(DeviceError, match=r"non-CUDA device: \[\('0.weight'"):
                    model(x)
            model.to(device, non_blocking=True)
    return told, freed, held


def test_parameters_are_in_host_memory_between_steps() -> None:
    for (theirs, ours), freed, held in run(offloaded):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert freed >= held


# The drop-in's parameters where they must not be when training begins; CPU twin: ``tests/fsdp/test_fsdp_init.py``.


def refused(rank: int, use_orig_params: bool, offload: bool) -> tuple[str, bool]:
    """What the first forward says of a model on the wrong side, and whether it trains when it has been moved back."""
    device = torch.device("cuda", torch.cuda.current_device())
    with warnings.catch_warnings():
        # Wrapped on the CPU; with one GPU, not sharded.
        warnings.simplefilter("ignore")
        model = FSDP(
            nn.Linear(3, 2),
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offload),
        )
    x = torch.ones(4, 3, device=device)
    if offload:
        model.to(device)
    with pytest.raises(RuntimeError) as error:
        model(x)
    model.to("cpu" if offload else device)
    model(x).sum().backward()
    # A rank without a part of a parameter has no gradient of it.
    held = [p for p in model.parameters() if p.numel()]
    return str(error.value), all(p.grad is not None and p.grad.device == p.device for p in held)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_on_the_wrong_side_are_refused_and_train_when_moved(use_orig_params: bool, offload: bool) -> None:
    for rank, (said, trained) in enumerate(RANKS.run(WORLD_SIZE, refused, use_orig_params, offload)):
        if offload:
            told = (
                "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                f"{device_of(rank)}. Make sure to not move the module from CPU when offloading parameters."
            )
        else:
            told = (
                "An FSDP-managed module unexpectedly has parameters on cpu. Make sure to move the module to "
                f"{device_of(rank)} before training."
            )
        assert said.startswith(told)
        assert trained


def offloaded_fsdp1(rank: int, use_orig_params: bool) -> tuple[list[list[float]], int, int]:
    """Losses of torch's wrapper and ours, and of ours the bytes that offloading frees, and those of flat parameters."""
    device = torch.device("cuda", torch.cuda.current_device())
    told, freed, held = [], 0, 0
    for package in (torch.distributed.fsdp, polyshard_fsdp):
        utilities = importlib.import_module(f"{package.__name__}._runtime_utils")
        # Ours finds its root where it is asked.
        lazy_init = getattr(utilities, "_lazy_init", lambda model, _: model._is_root)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            # With one GPU, not sharded.
            warnings.simplefilter("ignore")
            model = package.FullyShardedDataParallel(
                nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 3)).double(),
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_id=device,
                use_orig_params=use_orig_params,
            )
        x = torch.randn(4, 256, dtype=torch.float64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        told.append([])
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told[-1].append(loss.item())
            lazy_init(model, model)
            before = torch.cuda.memory_allocated()
            for where in (torch.device("cpu"), device):
                for handle in model._all_handles:
                    handle.flat_param_to(where, non_blocking=True)
                    handle.flat_param._local_shard = handle.flat_param.data
                if where is not device:
                    freed = before - torch.cuda.memory_allocated()
                    held = sum(handle.flat_param.nbytes for handle in model._all_handles)
    return told, freed, held


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_in_host_memory_between_steps(use_orig_params: bool) -> None:
    for (theirs, ours), freed, held in RANKS.run(WORLD_SIZE, offloaded_fsdp1, use_orig_params):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert freed >= held
