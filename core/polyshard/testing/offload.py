"""The conformance suite for offload managers."""

from __future__ import annotations

import pytest
import torch

from polyshard.interfaces import OffloadManager, UnitSpec


class OffloadSuite:
    """Subclass it, name the class ``Test…``, and override ``make``; override ``device`` to test on another one."""

    device: torch.device = torch.device("cpu")
    """Where units compute."""

    def make(self) -> OffloadManager:
        """A newly constructed manager."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def unit(self, shard_numel: int, master_dtype: torch.dtype = torch.float32, name: str = "layers.0") -> UnitSpec:
        """A unit of its own ``name`` with shards of ``shard_numel`` elements."""
        return UnitSpec(
            name=name,
            module_class=torch.nn.Linear,
            parameter_names=(f"{name}.weight",),
            numel=2 * shard_numel,
            shard_numel=shard_numel,
            master_dtype=master_dtype,
            device=self.device,
            is_root=False,
        )

    def _numbers(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.arange(numel, dtype=dtype, device=self.device) - 2.5

    def test_parked_units_are_some_of_those_given(self) -> None:
        manager = self.make()
        units = tuple(self.unit(6, name=name) for name in ("layers.0", "layers.1", "layers.2"))
        parked = list(manager.units_to_park(units))
        assert set(parked) <= set(units)
        assert len(set(parked)) == len(parked)
        assert list(manager.units_to_park(units)) == parked, "another answer to the same question: ranks must agree"

    @pytest.mark.parametrize("numel", [0, 1, 1000])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_placed_master_keeps_values_shape_and_dtype(self, numel: int, dtype: torch.dtype) -> None:
        manager = self.make()
        shard = self._numbers(numel, dtype)
        master = manager.place(self.unit(numel, dtype), shard.clone())
        _assert_usable(master, numel, dtype)
        assert master.tolist() == shard.tolist()
        if not manager.capabilities.parks:
            assert master.device == shard.device

    @pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_fetch_casts_what_the_optimizer_wrote(self, compute: torch.dtype) -> None:
        manager, unit = self.make(), self.unit(6)
        master = manager.place(unit, self._numbers(6))
        own_slice = torch.zeros(6, dtype=compute, device=self.device)
        for _ in range(2):
            master.mul_(2.0)
            expected = master.to(compute).tolist()
            manager.begin_forward()
            manager.fetch(unit, master, own_slice)
            self._synchronize()
            assert own_slice.tolist() == expected

    def test_fetch_of_an_empty_shard(self) -> None:
        manager, unit = self.make(), self.unit(0)
        master = manager.place(unit, self._numbers(0))
        manager.fetch(unit, master, torch.zeros(0, device=self.device))

    def test_stored_gradient_lies_beside_the_master(self) -> None:
        manager, unit = self.make(), self.unit(6)
        master = manager.place(unit, self._numbers(6))
        gradient = self._numbers(6) * 3.0
        expected = gradient.tolist()
        stored = manager.store_grad(unit, gradient, None)
        manager.sync_for_step()
        assert stored.device == master.device
        _assert_usable(stored, 6, torch.float32)
        assert stored.tolist() == expected

    def test_gradients_of_microbatches_add_up(self) -> None:
        manager, unit = self.make(), self.unit(6)
        manager.place(unit, self._numbers(6))
        expected = (self._numbers(6) * 7.0).tolist()
        stored = manager.store_grad(unit, self._numbers(6) * 3.0, None)
        manager.sync_for_step()
        total = manager.store_grad(unit, self._numbers(6) * 4.0, stored)
        manager.sync_for_step()
        assert total.tolist() == expected

    def test_a_second_step_starts_afresh(self) -> None:
        manager, unit = self.make(), self.unit(6)
        manager.place(unit, self._numbers(6))
        for factor in (2.0, 5.0):
            gradient = self._numbers(6) * factor
            expected = gradient.tolist()
            stored = manager.store_grad(unit, gradient, None)
            manager.sync_for_step()
            assert stored.tolist() == expected

    def test_units_do_not_share_memory(self) -> None:
        manager = self.make()
        units = self.unit(6), self.unit(4, name="layers.1")
        masters = [manager.place(unit, self._numbers(unit.shard_numel)) for unit in units]
        masters[0].fill_(7.0)
        slices = [torch.zeros(unit.shard_numel, device=self.device) for unit in units]
        for unit, master, own_slice in zip(units, masters, slices, strict=True):
            manager.fetch(unit, master, own_slice)
        self._synchronize()
        assert slices[0].tolist() == [7.0] * 6
        assert slices[1].tolist() == self._numbers(4).tolist()
        stored = [
            manager.store_grad(unit, torch.full((unit.shard_numel,), value, device=self.device), None)
            for unit, value in zip(units, (1.0, 2.0), strict=True)
        ]
        manager.sync_for_step()
        assert stored[0].tolist() == [1.0] * 6
        assert stored[1].tolist() == [2.0] * 4

    def test_an_optimizer_updates_the_master_in_place(self) -> None:
        manager, unit = self.make(), self.unit(6)
        weight = torch.nn.Parameter(manager.place(unit, self._numbers(6)))
        weight.grad = manager.store_grad(unit, self._numbers(6) * 2.0, None)
        manager.sync_for_step()
        torch.optim.SGD([weight], lr=0.25).step()
        own_slice = torch.zeros(6, device=self.device)
        manager.fetch(unit, weight.data, own_slice)
        self._synchronize()
        assert own_slice.tolist() == (self._numbers(6) * 0.5).tolist()

    def test_a_unit_is_placed_again_after_an_attempt_that_failed(self) -> None:
        manager, unit = self.make(), self.unit(6)
        manager.place(unit, self._numbers(6))
        master = manager.place(unit, self._numbers(6) * 3.0)
        assert master.tolist() == (self._numbers(6) * 3.0).tolist()
        own_slice = torch.zeros(6, device=self.device)
        manager.fetch(unit, master, own_slice)
        self._synchronize()
        assert own_slice.tolist() == (self._numbers(6) * 3.0).tolist()

    def test_nothing_stored_is_nothing_to_wait_for(self) -> None:
        manager = self.make()
        manager.sync_for_step()
        manager.sync_for_step()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _assert_usable(tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    """Parameters and ``.grad`` view it, by strides of their own."""
    assert tensor.layout is torch.strided
    assert tensor.shape == (numel,)
    assert tensor.dtype is dtype
    assert tensor.is_contiguous(), f"strides {tensor.stride()}: return a contiguous tensor"
    assert not tensor.is_meta
    assert not tensor.is_inference(), "made in inference mode: it cannot be trained"
