"""The conformance suite for offload managers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from polyshard.errors import ConfigError
from polyshard.interfaces import Group, OffloadManager, UnitSpec
from typing_extensions import override

from .plugin import LocalPluginSuite, as_rank
from .training import Training

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Dtypes of a master and of its gradient.
_GRADIENTS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float32),
)


class OffloadSuite(LocalPluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``; override ``device`` to test on another one.

    Every rule of ``polyshard.interfaces.OffloadManager``, of one manager by itself; then a few steps of a small model
    with managers on two ranks, compared with the same steps of the unsharded model.
    """

    group = Group.OFFLOAD

    training_tolerance: float = 1e-5
    """Largest difference from the unsharded model's parameters after three steps in fp32, as a share of the largest
    change: that of the order of sums over two ranks."""

    @override
    def make(self) -> OffloadManager:
        """A newly constructed manager."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def unit(
        self,
        shard_numel: int,
        master_dtype: torch.dtype = torch.float32,
        name: str = "blocks.0",
        suffix: str = "",
    ) -> UnitSpec:
        """A unit of its own ``name``, which ends in ``suffix``, with shards of ``shard_numel`` elements."""
        return self._unit(name, shard_numel, master_dtype, suffix=suffix)

    def test_offloaded_units_are_some_of_those_given(self) -> None:
        units = tuple(self.unit(6, name=name) for name in ("blocks.0", "blocks.1", "blocks.2"))
        with as_rank(0):
            manager = self.make()
            first = self._offloaded(manager, units)
            again = self._offloaded(manager, units)
        with as_rank(1):
            other = self._offloaded(self.make(), units)
        assert first == again
        assert first == other

    def _offloaded(self, manager: OffloadManager, units: Sequence[UnitSpec]) -> list[str]:
        try:
            offloaded = list(manager.units_to_offload(units))
        except ConfigError as error:
            # Options need not fit this model.
            return [str(error)]
        assert set(offloaded) <= set(units)
        assert len(set(offloaded)) == len(offloaded)
        return [unit.name for unit in offloaded]

    @pytest.mark.parametrize("numel", [0, 1, 1000])
    @pytest.mark.parametrize("dtype", _FLOATS, ids=str)
    def test_placed_master_keeps_values_shape_and_dtype(self, numel: int, dtype: torch.dtype) -> None:
        manager = self.make()
        shard = self._numbers(numel, dtype)
        master = manager.place(self.unit(numel, dtype), shard.clone())
        _assert_usable(master, numel, dtype)
        assert master.tolist() == shard.tolist()
        if not manager.capabilities.offloads:
            assert master.device == shard.device

    @pytest.mark.parametrize("compute", _FLOATS, ids=str)
    def test_fetch_casts_what_the_optimizer_wrote(self, compute: torch.dtype) -> None:
        manager, unit, master = self._placed()
        for _ in range(2):
            master.mul_(1.7)
            expected = master.to(compute).tolist()
            assert self._fetched(manager, unit, master, compute) == expected

    def test_fetch_follows_the_dtype_that_is_asked_for(self) -> None:
        # A unit computes in another one while its module is in eval mode; a gather that is encoded has the master's.
        manager, unit, master = self._placed()
        for compute in (torch.bfloat16, torch.float32, torch.bfloat16):
            expected = master.to(compute).tolist()
            assert self._fetched(manager, unit, master, compute) == expected

    def test_a_unit_is_fetched_again_in_the_backward(self) -> None:
        # Its memory was another unit's in the meantime.
        manager, unit, master = self._placed()
        manager.begin_forward()
        for _ in range(2):
            own_slice = torch.zeros(6, device=self.device)
            with self._stream():
                manager.fetch(unit, master, own_slice)
            assert own_slice.tolist() == self._numbers(6).tolist()

    def test_kept_values_are_those_of_the_first_fetch(self) -> None:
        manager, unit, master = self._placed()
        if not manager.capabilities.keeps_values:
            pytest.skip("it does not claim to keep values")
        for factor in (1.0, 2.0):
            manager.begin_forward()
            for _ in range(2):
                # An optimizer steps in the backward, behind the first.
                own_slice = torch.zeros(6, device=self.device)
                with self._stream():
                    manager.fetch(unit, master, own_slice)
                assert own_slice.tolist() == (self._numbers(6) * factor).tolist()
                master.copy_(self._numbers(6) * 2.0)

    def test_an_awaited_gradient_can_be_read_by_another_thread(self) -> None:
        manager = self.make()
        if not manager.capabilities.awaits_gradients:
            pytest.skip("it does not claim to await gradients")
        # Large enough to be on its way for a while.
        units = [self.unit(2**22, name=name) for name in ("blocks.0", "blocks.1")]
        with self._stream():
            gradients = [torch.full((unit.shard_numel,), 1.0 + i, device=self.device) for i, unit in enumerate(units)]
            stored = [manager.store_grad(unit, each, None) for unit, each in zip(units, gradients, strict=True)]

        def read(index: int) -> bool:
            manager.await_grad(units[index], stored[index])
            return bool((stored[index] == 1.0 + index).all())

        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(read, 1).result()
            manager.sync_for_step()
            assert thread.submit(read, 0).result()

    def test_fetch_writes_nothing_but_the_own_slice(self) -> None:
        manager, unit, master = self._placed()
        buffer = torch.full((22,), 7.0, device=self.device)
        manager.begin_forward()
        with self._stream():
            manager.fetch(unit, master, buffer[8:14])
        assert buffer.tolist() == [7.0] * 8 + self._numbers(6).tolist() + [7.0] * 8

    def test_fetch_leaves_the_master_as_it_was(self) -> None:
        manager, unit, master = self._placed()
        self._fetched(manager, unit, master, torch.bfloat16)
        assert master.tolist() == self._numbers(6).tolist()

    def test_an_empty_shard_is_fetched_and_its_gradient_stored(self) -> None:
        manager, unit = self.make(), self.unit(0)
        master = manager.place(unit, self._numbers(0))
        assert self._fetched(manager, unit, master, torch.bfloat16) == []
        stored = None
        for _ in range(2):
            stored = self._stored(manager, unit, self._numbers(0), stored)
            _assert_usable(stored, 0, torch.float32)

    @pytest.mark.parametrize(("dtype", "grad_dtype"), _GRADIENTS, ids=str)
    def test_stored_gradient_lies_beside_the_master_in_its_own_dtype(
        self, dtype: torch.dtype, grad_dtype: torch.dtype
    ) -> None:
        manager, unit, master = self._placed(dtype)
        gradient = self._numbers(6, grad_dtype)
        expected = gradient.tolist()
        stored = self._stored(manager, unit, gradient)
        assert stored.device == master.device
        _assert_usable(stored, 6, grad_dtype)
        assert stored.tolist() == expected

    @pytest.mark.parametrize(("dtype", "grad_dtype"), _GRADIENTS, ids=str)
    def test_gradients_of_microbatches_add_up(self, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
        manager, unit, master = self._placed(dtype)
        total = None
        for factor in (3, 4, -2):
            total = self._stored(manager, unit, self._whole_numbers(grad_dtype) * factor, total)
        assert total is not None
        assert total.device == master.device
        _assert_usable(total, 6, grad_dtype)
        assert total.tolist() == (self._whole_numbers(grad_dtype) * 5).tolist()

    def test_units_do_not_share_memory(self) -> None:
        manager = self.make()
        # Two are of one module, whose parameters differ in what the suffix tells.
        units = self.unit(6), self.unit(6, suffix="[float32, frozen]"), self.unit(4, name="blocks.1")
        masters = [manager.place(unit, self._numbers(unit.shard_numel)) for unit in units]
        masters[0].fill_(7.0)
        masters[2].fill_(9.0)
        fetched = [
            self._fetched(manager, unit, master, torch.float32) for unit, master in zip(units, masters, strict=True)
        ]
        assert fetched == [[7.0] * 6, self._numbers(6).tolist(), [9.0] * 4]
        with self._stream():
            stored = [
                manager.store_grad(unit, torch.full((unit.shard_numel,), value, device=self.device), None)
                for unit, value in zip(units, (1.0, 2.0, 3.0), strict=True)
            ]
        manager.sync_for_step()
        assert [each.tolist() for each in stored] == [[1.0] * 6, [2.0] * 6, [3.0] * 4]

    def test_managers_of_two_models_do_not_share_memory(self) -> None:
        # Units of two models may have the same names.
        managers, unit = [self.make(), self.make()], self.unit(6)
        shards = [self._numbers(6), self._numbers(6) * 2.0]
        masters = [manager.place(unit, shard.clone()) for manager, shard in zip(managers, shards, strict=True)]
        fetched = [
            self._fetched(manager, unit, master, torch.float32)
            for manager, master in zip(managers, masters, strict=True)
        ]
        assert fetched == [shard.tolist() for shard in shards]
        stored = [
            self._stored(manager, unit, torch.full((6,), value, device=self.device))
            for manager, value in zip(managers, (1.0, 2.0), strict=True)
        ]
        assert [each.tolist() for each in stored] == [[1.0] * 6, [2.0] * 6]

    def test_a_unit_is_placed_again_after_an_attempt_that_failed(self) -> None:
        manager, unit = self.make(), self.unit(6)
        manager.place(unit, self._numbers(6))
        master = manager.place(unit, self._numbers(6) * 3.0)
        assert master.tolist() == (self._numbers(6) * 3.0).tolist()
        assert self._fetched(manager, unit, master, torch.float32) == (self._numbers(6) * 3.0).tolist()

    def test_nothing_stored_is_nothing_to_wait_for(self) -> None:
        manager = self.make()
        manager.sync_for_step()
        manager.sync_for_step()

    def test_training_is_that_of_the_unsharded_model(self) -> None:
        training = Training(device=self.device)
        sharded = training.sharded(lambda: {"offload": self.make()})
        sharded.check(training.reference(), self.training_tolerance)

    def _placed(self, dtype: torch.dtype = torch.float32) -> tuple[OffloadManager, UnitSpec, torch.Tensor]:
        """A new manager, a unit of six elements, and its master."""
        manager, unit = self.make(), self.unit(6, dtype)
        return manager, unit, manager.place(unit, self._numbers(6, dtype))

    def _fetched(
        self, manager: OffloadManager, unit: UnitSpec, master: torch.Tensor, compute: torch.dtype
    ) -> Sequence[float]:
        own_slice = torch.zeros(unit.shard_numel, dtype=compute, device=self.device)
        with self._stream():
            # As in the engine: whoever wrote to the master did so before a forward.
            manager.begin_forward()
            manager.fetch(unit, master, own_slice)
        values: list[float] = own_slice.tolist()
        return values

    def _numbers(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Numbers that every narrower dtype rounds, differently."""
        return ((torch.arange(numel, device=self.device, dtype=torch.float64) - 2.5) / 3.0).to(dtype)

    def _whole_numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """Six numbers whose small sums no dtype rounds."""
        return torch.arange(-2, 4, device=self.device, dtype=dtype)

    def _stored(
        self, manager: OffloadManager, unit: UnitSpec, grad: torch.Tensor, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient that a backward stores which reduces one unit."""
        with self._stream():
            stored = manager.store_grad(unit, grad, into)
        manager.sync_for_step()
        return stored

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream of its own is the current one inside, as of the engine's gathers and reductions."""
        if self.device.type != "cuda":
            yield
            return
        here, stream = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            yield
        # The host does not wait: that is the manager's part, where the host is to read.
        here.wait_stream(stream)


def _assert_usable(tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    """Parameters and ``.grad`` view it, by strides of their own."""
    assert tensor.layout is torch.strided
    assert tensor.shape == (numel,)
    assert tensor.dtype is dtype
    assert tensor.is_contiguous(), f"strides {tensor.stride()}: return a contiguous tensor"
    assert not tensor.is_meta
    assert not tensor.is_inference(), "made in inference mode: it cannot be trained"
    assert not tensor.requires_grad, "it is no value alone: detach it"
