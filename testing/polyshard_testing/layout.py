"""The conformance suite for layouts."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from polyshard.interfaces import Arrangement, Group, Layout, ParameterGeometry, UnitGeometry

from .plugin import Dispatched, LocalPluginSuite, as_rank

#: Lines of Python that laying out a unit may take: seconds where nothing traces them.
MOST_LINES = 1_000_000
_SHARDS = (1, 2, 3, 7, 8, 64, 1000, 4096)
#: A layout knows the size of elements alone, which sets the alignment: the smallest, the usual, and the largest.
_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.complex128)

Shape = tuple[int, ...]
#: Shapes of the parameters of units by what they are like, with strides where they are not row-major.
_UNITS: dict[str, tuple[Shape | tuple[Shape, Shape], ...]] = {
    "a transformer block": ((256,), (768, 256), (768,), (256, 256), (256,), (1024, 256), (1024,), (256, 1024), (256,)),
    "odd sizes": ((7, 5), (1,), (3, 3, 3), (129, 17), (1, 1000), (1000, 1), (11,)),
    "rows without a common multiple": ((1009, 3), (31, 1013), (127, 131), (2, 997)),
    "one long row beside many short ones": ((1, 100_003), (100_003, 2), (5,)),
    "an embedding": ((50257, 64), (64,)),
    "vectors": ((5,), (1,), (4096,), (17,)),
    "one element": ((1,),),
    "nothing": ((0,), (3, 0), (0, 3)),
    "nothing in between": ((3, 4), (0,), (5, 0), (0, 5), (2,)),
    "channels last": (((8, 3, 3, 3), (27, 1, 9, 3)), (8,)),
    "transposed": (((12, 8), (1, 12)), (12, 8), ((6, 5, 4), (1, 24, 6))),
    "one row or column": (((1, 9), (1, 1)), ((9, 1), (1, 9)), (1, 1, 1)),
    "many": tuple((1 + index % 37, 1 + index % 11) for index in range(200)),
}


def _contiguous(shape: Shape) -> Shape:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _parameter(index: int, given: Any, dtype: torch.dtype) -> ParameterGeometry:
    shape, stride = given if isinstance(given[0], tuple) else (given, _contiguous(given))
    return ParameterGeometry(f"layer.{index}.weight", shape, stride, dtype, True)


class _TooLongError(BaseException):
    """Ends a layout that would not."""


@contextmanager
def _counted(most: int) -> Iterator[list[int]]:
    """Count lines of Python that run inside, and raise behind ``most`` of them: a clock would tell of the machine."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        lines[0] += event == "line"
        if lines[0] > most:
            raise _TooLongError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


class LayoutSuite(LocalPluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``; override ``units`` to add shapes of your own."""

    group = Group.LAYOUTS

    shards: ClassVar[Sequence[int]] = _SHARDS
    """Numbers of ranks that a unit is cut for."""

    def make(self) -> Layout:
        """A newly constructed layout."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def units(self) -> Iterator[UnitGeometry]:
        """Every unit that the tests ask for: each kind of shapes, in a dtype of every size, for each of ``shards``."""
        for kind, shapes in _UNITS.items():
            for dtype in _DTYPES:
                parameters = tuple(_parameter(index, given, dtype) for index, given in enumerate(shapes))
                # One large unit is asked for in one dtype only.
                for shards in self.shards if kind != "many" or dtype is torch.bfloat16 else ():
                    yield UnitGeometry(f"{kind} in {dtype}", parameters, shards, dtype.itemsize)

    def test_answers_are_plain_numbers_in_the_types_of_the_contract(self) -> None:
        layout = self.make()
        for unit in self.units():
            answer = layout.arrange(unit)
            assert isinstance(answer, Sequence), _about(unit)
            for each in answer:
                assert isinstance(each, Arrangement), _about(unit)
                assert isinstance(each.order, tuple), _about(unit)
                assert isinstance(each.offsets, tuple), _about(unit)
                assert isinstance(each.by_rows, frozenset), _about(unit)
                assert isinstance(each.exact, bool), _about(unit)
                numbers = (*each.order, *each.offsets, each.shard_numel, *each.by_rows)
                assert all(type(number) is int and number >= 0 for number in numbers), _about(unit)
                assert len(each.order) == len(each.offsets) > 0, _about(unit)

    def test_every_parameter_lies_in_one_buffer_once(self) -> None:
        layout = self.make()
        for unit in self.units():
            taken = sorted(index for each in layout.arrange(unit) for index in each.order)
            assert taken == list(range(len(unit.parameters))), _about(unit)

    def test_parameters_do_not_overlap_and_lie_in_the_order_that_is_told(self) -> None:
        for unit, each in self._arrangements():
            end = 0
            for index, offset in zip(each.order, each.offsets, strict=True):
                assert offset >= end, f"{unit.parameters[index].name} begins before {end}, {_about(unit)}"
                end = offset + unit.parameters[index].numel

    def test_slices_hold_every_parameter_to_its_end(self) -> None:
        for unit, each in self._arrangements():
            for index, offset in zip(each.order, each.offsets, strict=True):
                end = offset + unit.parameters[index].numel
                assert end <= each.shard_numel * unit.shards, f"{unit.parameters[index].name}, {_about(unit)}"

    def test_parameters_begin_at_multiples_of_the_alignment(self) -> None:
        for unit, each in self._arrangements():
            assert not any(offset % unit.alignment for offset in each.offsets), _about(unit)

    def test_slices_are_aligned(self) -> None:
        for unit, each in self._arrangements():
            assert each.shard_numel % unit.slice_alignment(each.shard_numel) == 0 or each.exact, _about(unit)

    def test_what_is_cut_by_rows_has_whole_rows_in_every_slice(self) -> None:
        for unit, each in self._arrangements():
            assert each.by_rows <= set(each.order), _about(unit)
            for index, offset in zip(each.order, each.offsets, strict=True):
                if index in each.by_rows:
                    self._check_rows(unit, unit.parameters[index], offset, each.shard_numel)

    def _arrangements(self) -> Iterator[tuple[UnitGeometry, Arrangement]]:
        layout = self.make()
        for unit in self.units():
            for each in layout.arrange(unit):
                yield unit, each

    def _check_rows(self, unit: UnitGeometry, parameter: ParameterGeometry, offset: int, size: int) -> None:
        row = parameter.row_numel
        assert row is not None, f"the rows of {parameter.name} do not lie together, {_about(unit)}"
        if parameter.numel:
            ends = range((offset // size + 1) * size, offset + parameter.numel, size)
            assert not any((end - offset) % row for end in ends), f"a row of {parameter.name} is cut, {_about(unit)}"

    def test_asking_again_gives_the_same_answer(self) -> None:
        layout = self.make()
        first = [tuple(layout.arrange(unit)) for unit in self.units()]
        again = [tuple(layout.arrange(unit)) for unit in reversed(list(self.units()))]
        self._check_alike(first, again[::-1])

    def test_every_rank_gets_the_same_answer(self) -> None:
        # Another rank has another object, asked about equal units in another order and with other random numbers.
        with as_rank(0):
            one = self.make()
            first = [tuple(one.arrange(unit)) for unit in self.units()]
        with as_rank(1):
            other = self.make()
            second = [tuple(other.arrange(copy.deepcopy(unit))) for unit in reversed(list(self.units()))]
        self._check_alike(first, second[::-1])

    def _check_alike(self, first: Sequence[object], second: Sequence[object]) -> None:
        for unit, one, other in zip(self.units(), first, second, strict=True):
            assert one == other, _about(unit)

    def test_the_unit_is_left_as_it_was(self) -> None:
        layout = self.make()
        for unit in self.units():
            before = copy.deepcopy(unit)
            layout.arrange(unit)
            assert unit == before

    def test_it_is_arithmetic_alone(self) -> None:
        layout = self.make()
        called: list[str] = []
        with Dispatched(lambda operation: called.append(str(operation))):
            for unit in self.units():
                layout.arrange(unit)
                assert not called, f"{called[0]} was called, {_about(unit)}"

    def test_it_ends_soon(self) -> None:
        layout = self.make()
        for unit in self.units():
            if unit.itemsize != 2:
                # Counting takes many times as long as what is counted.
                continue
            try:
                with _counted(MOST_LINES):
                    layout.arrange(unit)
            except _TooLongError:
                pytest.fail(f"more than {MOST_LINES} lines of Python ran, {_about(unit)}")


def _about(unit: UnitGeometry) -> str:
    return f"in the unit '{unit.name}' of {unit.shards} shards"
