"""What goes into a checkpoint beside the model: kept to the bit, or refused with the way there."""

from __future__ import annotations

import collections
import enum
import math
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoints import alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from polyshard import checkpoint
from polyshard.errors import ConfigError, ConfigTypeError
from torch import nn


def carried(folder: Path, extra: dict[str, Any]) -> Any:
    """What comes back, by a load and by a read."""
    model = alone()
    directory = checkpoint.save(folder, len(list(folder.iterdir())), model, extra=extra)
    loaded = checkpoint.load(directory, model)
    assert same(checkpoint.read(directory)["extra"], loaded)
    return loaded


def raw(tensor: torch.Tensor) -> list[int]:
    """Its bytes."""
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


def same(one: Any, other: Any) -> bool:
    """Of the same types and values, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(
            (one.contiguous().view(-1).view(torch.uint8) == other.contiguous().view(-1).view(torch.uint8)).all()
        )
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    return bool(one == other)


_KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.datetimes(),
    st.dates(),
    st.timedeltas(),
    st.sampled_from([torch.bfloat16, torch.device("cuda", 1), Path("a/b")]),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.lists(st.integers(0, 255), max_size=9).map(lambda values: torch.tensor(values, dtype=torch.uint8)),
    st.lists(st.floats(width=16), max_size=9).map(lambda values: torch.tensor(values, dtype=torch.bfloat16)),
    st.lists(st.floats(), max_size=6).map(
        lambda values: np.array(values).reshape(2, -1) if len(values) % 2 == 0 else np.array(values)
    ),
    st.frozensets(st.integers()),
    st.sets(st.text()),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tensor", "$", "a"]), inner),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(values=st.lists(_VALUES, max_size=6))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_come_back_as_they_were(values: list[Any], tmp_path: Path) -> None:
    assert same(carried(tmp_path, {"values": values}), {"values": values})


def test_tensors_of_every_dtype_and_layout_come_back(tmp_path: Path) -> None:
    from polyshard.io.memory import DTYPES

    raw = torch.arange(256, dtype=torch.uint8)
    held = {name: raw.view(dtype) for name, dtype in DTYPES.items() if name != "bool"}
    held["bool"] = raw % 2 == 0
    held["turned"] = torch.arange(24).view(2, 3, 4).permute(2, 0, 1)
    held["every other"] = torch.arange(24)[::2]
    held["one"] = torch.arange(24)[3]
    held["conjugate"] = torch.tensor([1 + 2j, 3 - 1j]).conj()
    held["expanded"] = torch.ones(1).expand(5)
    held["empty"] = torch.empty(3, 0)
    held["parameter"] = nn.Parameter(torch.ones(2)).detach()
    found = carried(tmp_path, held)
    for name, value in held.items():
        assert same(value.resolve_conj(), found[name]), name
    # Of its own memory: it may be changed.
    found["expanded"][0] = 2
    assert found["expanded"].tolist() == [2, 1, 1, 1, 1]


class Attributes(dict[str, Any]):
    """As Lightning's ``AttributeDict``."""


def test_kinds_of_dicts_and_lists_become_plain_ones(tmp_path: Path) -> None:
    given_ = {
        "attributes": Attributes(lr=0.1),
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, {1: [2]}),
        "proxy": types.MappingProxyType({"a": 1}),
        "size": torch.Size([2, 3]),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    found = carried(tmp_path, given_)
    assert same({name: each for name, each in found.items() if name != "parameter"}, {
        "attributes": {"lr": 0.1},
        "ordered": {"b": 1, "a": 2},
        "default": {1: [2]},
        "proxy": {"a": 1},
        "size": (2, 3),
    })  # fmt: skip
    assert type(found["parameter"]) is torch.Tensor


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    one: int


class Object:
    pass


REFUSED: list[tuple[Any, str]] = [
    ({"callbacks": [1, 2, 3, Object()]}, r"^extra\['callbacks'\]\[3\] is of .*Object.*state_dict"),
    ({"kind": Colour.RED}, r"^extra\['kind'\] is of .*Colour"),
    ({"pair": (Pair(1),)}, r"^extra\['pair'\]\[0\] is of .*Pair"),
    ({"function": len}, r"^extra\['function'\] is of builtins\.builtin_function_or_method"),
    ({"class": Object}, r"^extra\['class'\] is of builtins\.type"),
    ({"module": nn.Linear(1, 1)}, r"^extra\['module'\] is of .*Linear"),
    ({"sparse": torch.eye(2).to_sparse()}, r"^extra\['sparse'\] is a tensor of torch\.float32, torch\.sparse_coo"),
    ({"meta": torch.empty(2, device="meta")}, r"^extra\['meta'\] is a tensor .* on meta"),
    ({"strings": np.array(["a"])}, r"^extra\['strings'\] is of numpy\.ndarray"),
    ({"objects": np.array([Object()])}, r"^extra\['objects'\] is of numpy\.ndarray"),
    ({Object(): 1}, r"^the key .* of extra is of .*Object"),
    ({"huge": 1 << 20_000}, r"^extra\['huge'\] is of builtins\.int"),
    (3, r"^extra is int, and a checkpoint names what it holds\. Give a mapping"),
    ([("step", 3)], r"^extra is list"),
    ({"generator": torch.Generator()}, r"^extra\['generator'\] is of torch.*Generator"),
]


@pytest.mark.parametrize(("extra", "words"), REFUSED, ids=[words[:30] for _, words in REFUSED])
def test_other_objects_are_refused_before_anything_is_written(extra: Any, words: str, tmp_path: Path) -> None:
    model = alone()
    with pytest.raises(ConfigTypeError, match=words):
        checkpoint.save(tmp_path / "folder", 1, model, extra=extra)
    assert not (tmp_path / "folder").exists()
    checkpoint.save(tmp_path / "folder", 1, model)


def test_what_lies_in_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    for value in (endless, deep):
        with pytest.raises(ConfigError, match=r"^extra\['deep'\]\[0\].* is nested more than 100 deep"):
            checkpoint.save(tmp_path, 1, alone(), extra={"deep": value})
    allowed: Any = 1
    for _ in range(98):
        allowed = [allowed]
    assert carried(tmp_path, {"deep": allowed}) == {"deep": allowed}


def test_settings_of_groups_may_be_tensors_and_numbers_of_numpy(tmp_path: Path) -> None:
    model = alone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), betas=(0.5, np.float64(0.75)))
    optimizer.param_groups[0]["note"] = {"since": [3, None]}
    directory = checkpoint.save(tmp_path, 1, model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    checkpoint.load(directory, model, fresh)
    (group,) = fresh.param_groups
    assert same(
        [group["lr"], group["betas"], group["note"]],
        [torch.tensor(0.25), (0.5, np.float64(0.75)), {"since": [3, None]}],
    )
