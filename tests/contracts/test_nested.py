"""Finding and replacing tensors in nested values: of any depth, shared, containing themselves, with unset fields."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.nested import iter_hidden_tensors, iter_tensors, map_tensors

DEPTH = 20_000


class Pair(NamedTuple):
    first: Any
    second: Any


class Checked(namedtuple("Checked", ["first", "second"])):
    """Cannot be made from two items."""

    def __new__(cls, only: Any) -> Checked:
        return super().__new__(cls, only, only)


@dataclasses.dataclass
class Record:
    value: Any
    later: Any = dataclasses.field(init=False)
    total: Any = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(slots=True)
class Base:
    first: Any


@dataclasses.dataclass(slots=True)
class Derived(Base):
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


# Tensors come from a few, so that some occur at several places.
TENSORS = [torch.full((2,), float(index)) for index in range(4)]
TREES = st.recursive(
    st.sampled_from([*TENSORS, None, 1, "text"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner),
        st.builds(Derived, inner, inner),
        st.builds(Frozen, inner),
        inner.map(lambda item: [item, (item, item)]),
    ),
    max_leaves=12,
)


def found_by_recursion(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif dataclasses.is_dataclass(value):
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [each for item in value for each in found_by_recursion(item)] if isinstance(value, (list, tuple)) else []


def mapped_by_recursion(value: Any, new: dict[int, torch.Tensor]) -> Any:
    """As plain values that can be compared: the type, and what is in it."""
    if isinstance(value, torch.Tensor):
        return id(new.get(id(value), value))
    if isinstance(value, dict):
        return type(value), [(key, mapped_by_recursion(item, new)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [mapped_by_recursion(item, new) for item in value]
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name, "unset") for field in dataclasses.fields(value)]
        return type(value), [mapped_by_recursion(item, new) for item in fields]
    return value


@pytest.mark.slow
@given(TREES, st.sets(st.integers(0, 3)))
def test_every_tensor_is_found_and_replaced_once(tree: Any, chosen: set[int]) -> None:
    expected = list(dict.fromkeys(map(id, found_by_recursion(tree))))
    assert list(dict.fromkeys(map(id, iter_tensors(tree)))) == expected
    new = {id(TENSORS[index]): torch.zeros(2) for index in chosen}
    asked: list[int] = []

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(id(tensor))
        return new.get(id(tensor), tensor)

    before = mapped_by_recursion(tree, {})
    result = map_tensors(replace, tree)
    assert sorted(asked) == sorted(expected)
    assert mapped_by_recursion(result, {}) == mapped_by_recursion(tree, new)
    assert mapped_by_recursion(tree, {}) == before
    if new.keys().isdisjoint(expected):
        assert result is tree


def nested(kind: type, leaf: Any) -> Any:
    for _ in range(DEPTH):
        leaf = kind([leaf])
    return leaf


class Node:
    def __init__(self, value: torch.Tensor, following: Any) -> None:
        self.value, self.following = value, following


@pytest.mark.slow
@pytest.mark.parametrize("kind", [tuple, list, lambda items: {"x": items[0]}, lambda items: Frozen(items[0])])
def test_depth_is_no_limit(kind: Any) -> None:
    leaf = torch.ones(2)
    deep = nested(kind, leaf)
    assert list(iter_tensors(deep)) == [leaf]
    assert list(iter_hidden_tensors(deep)) == []
    (doubled,) = iter_tensors(map_tensors(lambda tensor: 2 * tensor, deep))
    assert torch.equal(doubled, 2 * leaf)
    assert map_tensors(lambda tensor: tensor, deep) is deep


@pytest.mark.slow
def test_a_long_list_of_objects_is_followed_to_its_end() -> None:
    tensors = [torch.full((1,), float(index)) for index in range(DEPTH)]
    head = None
    for tensor in reversed(tensors):
        head = Node(tensor, head)
    assert [float(tensor) for tensor in iter_hidden_tensors(head)] == list(range(DEPTH))


def test_containers_that_contain_themselves_end_and_are_copied_as_they_are() -> None:
    one, two = torch.ones(1), torch.ones(2)
    listed: list[Any] = [one]
    table: dict[str, Any] = {"list": listed, "two": two}
    record = Record((listed, (table,)))
    table["record"] = record
    listed += [record, (record.value,), listed]
    assert sorted(map(len, iter_tensors(listed))) == [1, 2]
    assert list(iter_hidden_tensors(listed)) == []
    copied = map_tensors(lambda tensor: tensor + 1, listed)
    assert copied is not listed
    assert copied[3] is copied
    assert copied[1].value[0] is copied
    assert copied[2][0] is copied[1].value
    inner = copied[1].value[1][0]
    assert inner["list"] is copied
    assert inner["record"] is copied[1]
    assert (copied[0].tolist(), inner["two"].tolist()) == ([2.0], [2.0, 2.0])
    assert listed[0] is one
    assert table["two"] is two
    assert map_tensors(lambda tensor: tensor, listed) is listed
    ring = Node(one, None)
    ring.following = [ring]
    assert list(iter_hidden_tensors(ring)) == [one]


def test_a_shared_container_stays_shared() -> None:
    shared = [torch.ones(1)]
    first, (second,), third = map_tensors(lambda tensor: 2 * tensor, (shared, (shared,), {"x": shared}))
    assert first is second
    assert third["x"] is first


def test_fields_that_are_not_set_and_slots_of_base_classes_are_kept() -> None:
    record = Record(torch.ones(1))
    copied = map_tensors(lambda tensor: 2 * tensor, record)
    assert (copied.value.item(), copied.total, hasattr(copied, "later")) == (2.0, 3, False)
    derived = map_tensors(lambda tensor: 2 * tensor, Derived("kept", torch.ones(1)))
    assert (derived.first, derived.second.item()) == ("kept", 2.0)
    checked = map_tensors(lambda tensor: 2 * tensor, Checked(torch.ones(1)))
    assert type(checked) is Checked
    assert checked.first is checked.second
    values, indices = map_tensors(lambda tensor: tensor + 1, torch.max(torch.ones(2, 2), 0))
    assert (values.tolist(), indices.tolist()) == ([2.0, 2.0], [1, 1])


def test_slots_are_opened_however_they_are_declared() -> None:
    class One:
        __slots__ = "alone"

    class Two(One):
        __slots__ = ("__private", "unset")

        def __init__(self, alone: torch.Tensor, private: torch.Tensor) -> None:
            self.alone, self.__private = alone, private

    alone, private = torch.ones(1), torch.ones(2)
    assert sorted(map(len, iter_hidden_tensors(Two(alone, private)))) == [1, 2]


def test_a_packed_sequence_is_one_value() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    doubled, same = map_tensors(lambda tensor: 2 * tensor, [packed, packed])
    assert doubled is same
    assert torch.equal(doubled.data, 2 * packed.data)
    assert doubled.batch_sizes is packed.batch_sizes
