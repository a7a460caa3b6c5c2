"""Offload managers on the CPU: rules that the conformance suite, which both pass as well, does not have."""

from __future__ import annotations

import torch
from polyshard.interfaces import OffloadManager, PluginContext, UnitSpec
from polyshard_plugins.offload import CpuOffload, NoOffload
from torch import nn

CPU = torch.device("cpu")


def context() -> PluginContext:
    return PluginContext(name="cpu", device=CPU)


def unit() -> UnitSpec:
    return UnitSpec("layers.0", nn.Linear, ("layers.0.weight",), 8, 4, torch.float32, CPU, is_root=False)


def managers() -> list[OffloadManager]:
    return [NoOffload(context()), CpuOffload(context())]


def test_a_stored_gradient_outlives_the_reduction_buffer_and_the_next_step() -> None:
    manager = CpuOffload(context())
    reduced = torch.ones(4)
    first = manager.store_grad(unit(), reduced, None)
    reduced.fill_(5.0)
    second = manager.store_grad(unit(), reduced, None)
    manager.sync_for_step()
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [5.0] * 4


def test_tensors_made_in_inference_mode_train_afterwards() -> None:
    manager = CpuOffload(context())
    with torch.inference_mode():
        master = manager.place(unit(), torch.ones(4))
        stored = manager.store_grad(unit(), torch.ones(4), None)
    weight = nn.Parameter(master)
    weight.grad = stored
    torch.optim.SGD([weight], lr=0.25).step()
    assert master.tolist() == [0.75] * 4


def test_masters_that_require_gradients_are_copied_without_a_graph() -> None:
    for manager in managers():
        own_slice = torch.empty(4, dtype=torch.bfloat16)
        manager.fetch(unit(), nn.Parameter(torch.ones(4)), own_slice)
        assert not own_slice.requires_grad
        assert own_slice.tolist() == [1.0] * 4
