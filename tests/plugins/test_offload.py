"""Offload managers where the compute device is the CPU: plain copies, separate memory."""

from __future__ import annotations

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import OffloadManager, PluginContext, UnitSpec
from polyshard_plugins.offload import CpuOffload, NoOffload
from torch import nn

CPU = torch.device("cpu")


def context() -> PluginContext:
    return PluginContext(name="cpu", device=CPU)


def unit(*parameter_names: str, master: torch.dtype = torch.float32) -> UnitSpec:
    return UnitSpec(
        name="layers.0",
        module_class=nn.Linear,
        parameter_names=parameter_names or ("layers.0.weight",),
        numel=8,
        shard_numel=4,
        master_dtype=master,
        device=CPU,
        is_root=False,
    )


def managers() -> list[OffloadManager]:
    return [NoOffload(context()), CpuOffload(context())]


def test_only_cpu_offload_parks() -> None:
    assert [manager.capabilities.parks for manager in managers()] == [False, True]


def test_none_leaves_the_shard_where_it_is() -> None:
    shard = torch.arange(4.0)
    assert NoOffload(context()).place(unit(), shard) is shard


def test_cpu_gives_masters_memory_of_their_own() -> None:
    shard = torch.arange(4.0)
    master = CpuOffload(context()).place(unit(), shard)
    shard.zero_()
    assert master.device == CPU
    assert master.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("manager", managers(), ids=lambda manager: type(manager).__name__)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float64])
def test_fetch_casts_the_current_master_into_its_slice_alone(manager: OffloadManager, compute: torch.dtype) -> None:
    gathered = torch.full((12,), -1.0, dtype=compute)
    master = manager.place(unit(), torch.tensor([1.0, 1.0 + 2**-12, 3.0, 4.0]))
    manager.fetch(unit(), master, gathered[4:8])
    # 1 + 2**-12 lies between 1 and bf16's next value 1 + 2**-7, nearer to 1.
    second = 1.0 if compute == torch.bfloat16 else 1.0 + 2**-12
    assert gathered.tolist() == [-1.0] * 4 + [1.0, second, 3.0, 4.0] + [-1.0] * 4
    master.mul_(2)
    manager.fetch(unit(), master, gathered[4:8])
    assert gathered[6:8].tolist() == [6.0, 8.0]


@pytest.mark.parametrize("manager", managers(), ids=lambda manager: type(manager).__name__)
def test_gradients_of_three_microbatches_add_up(manager: OffloadManager) -> None:
    stored = manager.store_grad(unit(), torch.tensor([1.0, 2.0, 3.0, 4.0]), None)
    for _ in range(2):
        assert manager.store_grad(unit(), torch.full((4,), 10.0), stored) is stored
    manager.sync_for_step()
    assert stored.tolist() == [21.0, 22.0, 23.0, 24.0]
    manager.sync_for_step()
    assert stored.tolist() == [21.0, 22.0, 23.0, 24.0]


def test_a_stored_gradient_outlives_the_reduction_buffer_and_the_next_step() -> None:
    manager = CpuOffload(context())
    reduced = torch.ones(4)
    first = manager.store_grad(unit(), reduced, None)
    reduced.fill_(5.0)
    second = manager.store_grad(unit(), reduced, None)
    manager.sync_for_step()
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [5.0] * 4


def test_units_of_one_module_with_two_dtypes_do_not_mix() -> None:
    manager = CpuOffload(context())
    wide, narrow = unit("layers.0.a", master=torch.float64), unit("layers.0.b", master=torch.float32)
    masters = [manager.place(wide, torch.ones(4, dtype=torch.float64)), manager.place(narrow, torch.zeros(4))]
    assert [master.dtype for master in masters] == [torch.float64, torch.float32]
    slices = [torch.empty(4, dtype=torch.bfloat16) for _ in masters]
    for spec, master, own_slice in zip((wide, narrow), masters, slices, strict=True):
        manager.fetch(spec, master, own_slice)
    assert [own_slice.tolist() for own_slice in slices] == [[1.0] * 4, [0.0] * 4]


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


def test_sgd_on_parked_masters_follows_sgd_on_plain_parameters() -> None:
    torch.manual_seed(0)
    start, inputs = torch.randn(4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    plain = nn.Parameter(start.clone())
    manager, spec = CpuOffload(context()), unit(master=torch.float64)
    parked = nn.Parameter(manager.place(spec, start))
    optimizers = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in (plain, parked)]
    for x in inputs:
        ((plain * x).sum() ** 2).backward()
        gathered = torch.empty(4, dtype=torch.float64)
        manager.fetch(spec, parked.data, gathered)
        gathered.requires_grad_()
        ((gathered * x).sum() ** 2).backward()
        assert gathered.grad is not None
        parked.grad = manager.store_grad(spec, gathered.grad, None)
        manager.sync_for_step()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (plain - start).abs().max() > 0.1
    torch.testing.assert_close(parked, plain, rtol=0, atol=1e-14)


def test_pin_memory_takes_a_bool_alone() -> None:
    with pytest.raises(ConfigError, match=r"'no' is neither true nor false, in pin_memory of offload 'cpu'"):
        CpuOffload(context(), pin_memory="no")  # type: ignore[arg-type]
