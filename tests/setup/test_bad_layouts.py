"""Layouts that answer what cannot be, named on all ranks alike before anything changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from parity import on_ranks, threaded
from polyshard import ShardConfig, errors
from polyshard.interfaces import Arrangement, Layout, PluginContext, UnitGeometry
from polyshard_backends.threaded import ThreadedWorld
from polyshard_layouts.layouts import Flat
from refusal import Tower, description, refused, silent
from torch import nn

SOURCE = """
from polyshard.interfaces import Layout

class Says(Layout):
    api_version = 1

    def __init__(self, context, answer):
        self._answer = answer

    def arrange(self, unit):
        return self._answer(unit)

class Older(Says):
    api_version = 0

class Unversioned(Layout):
    def __init__(self, context):
        pass

    def arrange(self, unit):
        return ()

class Unable(Layout):
    api_version = 1

    def __init__(self, context):
        pass
"""

Answer = Callable[[UnitGeometry], Any]


def flat(unit: UnitGeometry) -> Arrangement:
    (found,) = Flat(PluginContext("flat", torch.device("cpu"))).arrange(unit)
    return found


def but(**changes: Callable[[UnitGeometry, Arrangement], Any]) -> Answer:
    """What ``flat`` answers, but for some fields."""

    def answer(unit: UnitGeometry) -> Sequence[Arrangement]:
        right = flat(unit)
        return [dataclasses.replace(right, **{name: change(unit, right) for name, change in changes.items()})]

    return answer


def raising(error: BaseException) -> Answer:
    def answer(unit: UnitGeometry) -> Any:
        raise error

    return answer


class Treacherous(list[Arrangement]):
    """Cannot be looked through."""

    def __iter__(self) -> Iterator[Arrangement]:
        raise OSError("gone")


#: What a layout answers for unit ``inner.head``, of a weight (4, 4) and a bias (4,) in fp32 over 4 shards, and words of
#: the message.
FAULTS: dict[str, tuple[Answer, tuple[str, ...]]] = {
    "nothing": (lambda unit: None, ("None", "no sequence of Arrangements")),
    "no buffer": (lambda unit: [], ("no place for 'inner.head.weight'",)),
    "numbers": (lambda unit: [0, 16], ("[0, 16]", "no sequence of Arrangements")),
    "one outside of a sequence": (flat, ("Arrangement(", "no sequence of Arrangements")),
    "a generator": (lambda unit: (each for each in [flat(unit)]), ("no sequence of Arrangements",)),
    "text": (lambda unit: "flat", ("'flat'", "no sequence of Arrangements")),
    "an overlap": (but(offsets=lambda u, a: (0, 12)), ("offset 12 for 'inner.head.bias'", "ends at 16", "overlap")),
    "not in order": (but(offsets=lambda u, a: (4, 0)), ("offset 0 for 'inner.head.bias'", "ends at 20")),
    "too short": (but(shard_numel=lambda u, a: 4), ("slices of 4 elements", "16 together", "ends at 20", "longer")),
    "a misaligned offset": (
        but(offsets=lambda u, a: (0, 18)),
        ("offset 18", "multiple of 4", "UnitGeometry.alignment"),
    ),
    "a misaligned slice": (
        but(shard_numel=lambda u, a: 16385),
        ("slices of 16385", "no multiple of 64", "UnitGeometry.aligned_slice"),
    ),
    "one missing": (but(order=lambda u, a: (0,), offsets=lambda u, a: (0,)), ("no place for 'inner.head.bias'",)),
    "one twice": (
        but(order=lambda u, a: (0, 1, 0), offsets=lambda u, a: (0, 16, 20)),
        ("'inner.head.weight' twice",),
    ),
    "one in two buffers": (lambda unit: [flat(unit), flat(unit)], ("'inner.head.weight' twice",)),
    "one that is not there": (but(order=lambda u, a: (0, 2)), ("order (0, 2)", "of 2 parameters")),
    "one counted from the end": (but(order=lambda u, a: (0, -1)), ("order (0, -1)",)),
    "an order in a list": (but(order=lambda u, a: [0, 1]), ("order [0, 1]", "tuple")),
    "an order of floats": (but(order=lambda u, a: (0, 1.0)), ("order (0, 1.0)",)),
    "no order": (but(order=lambda u, a: None), ("order None",)),
    "an empty buffer": (
        lambda unit: [flat(unit), Arrangement((), (), 1)],
        ("0 offsets for 0 parameters",),
    ),
    "too few offsets": (but(offsets=lambda u, a: (0,)), ("1 offsets for 2 parameters",)),
    "offsets in a list": (but(offsets=lambda u, a: [0, 16]), ("not all numbers of elements",)),
    "offsets of floats": (but(offsets=lambda u, a: (0, 16.0)), ("not all numbers of elements",)),
    "negative": (but(offsets=lambda u, a: (-4, 16)), ("not all numbers of elements",)),
    "a slice of a float": (but(shard_numel=lambda u, a: 5.0), ("not all numbers of elements",)),
    "a slice of a bool": (but(shard_numel=lambda u, a: True), ("not all numbers of elements",)),
    "a slice as a tensor": (but(shard_numel=lambda u, a: torch.tensor(5)), ("not all numbers of elements",)),
    "a row cut": (
        but(by_rows=lambda u, a: frozenset({0})),
        ("'inner.head.weight' by rows of 4", "slices of 5", "begins at 0"),
    ),
    "rows of another buffer": (but(by_rows=lambda u, a: frozenset({7})), ("by_rows frozenset({7})",)),
    "rows in a set": (but(by_rows=lambda u, a: {0}), ("by_rows {0}",)),
    "rows as a flag": (but(by_rows=lambda u, a: True), ("by_rows True",)),
    "an error": (raising(ZeroDivisionError("by zero")), ("failed", "ZeroDivisionError: by zero")),
    "the end": (raising(SystemExit(3)), ("failed", "SystemExit: 3")),
    "a sequence that fails": (lambda unit: Treacherous(), ("failed", "OSError: gone")),
}
WHERE = ("plugin 'says' of polyshard.layouts (from acme-layouts 2.3)", "unit 'inner.head'", "of 4 shards")


@pytest.fixture
def _acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    points = [("polyshard.layouts", name.lower(), f"acme_layouts:{name}") for name in ("Says", "Older", "Unable")]
    points.append(("polyshard.layouts", "unversioned", "acme_layouts:Unversioned"))
    install(tmp_path, "acme-layouts", "2.3", points, {"acme_layouts": SOURCE})


def on_the_head(answer: Answer) -> Answer:
    """``answer`` for the unit of ``Tower.inner.head`` alone, so that others were laid out before."""
    return lambda unit: answer(unit) if unit.name == "inner.head" else [flat(unit)]


@pytest.mark.usefixtures("_acme")
@pytest.mark.parametrize(("answer", "words"), FAULTS.values(), ids=FAULTS)
def test_a_bad_answer_is_named_and_the_model_is_as_it_was(answer: Answer, words: tuple[str, ...]) -> None:
    config = silent(layout={"name": "says", "answer": on_the_head(answer)}, policy="always", check_ranks=False)
    text = refused(Tower(), config, errors.PluginContractError, *WHERE, "(rank 2)", *words, twin=Tower())
    assert text.endswith(".") or "failed" in words


@pytest.mark.usefixtures("_acme")
@pytest.mark.parametrize("name", ["an overlap", "too short", "a row cut", "one missing", "an error", "the end"])
def test_every_rank_says_so_and_can_be_sharded_then(name: str) -> None:
    answer, words = FAULTS[name]

    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            model = Tower()
        expected, before = model(torch.ones(5, 3)), description(model)
        layout = {"name": "says", "answer": on_the_head(answer)}
        with pytest.raises(errors.PluginContractError) as caught:
            polyshard.shard(model, threaded(world, rank, layout=layout, policy="always"))
        assert type(caught.value) is errors.PluginContractError
        assert description(model) == before
        assert torch.equal(model(torch.ones(5, 3)), expected)
        polyshard.shard(model, threaded(world, rank, layout="rows", policy="always"))
        torch.testing.assert_close(model(torch.ones(5, 3)), expected)
        return str(caught.value)

    for rank, text in enumerate(on_ranks(4, on_rank)):
        for word in (*WHERE, f"(rank {rank})", *words):
            assert word in text, text


@pytest.mark.usefixtures("_acme")
def test_what_a_layout_refuses_of_the_users_settings_is_the_users_to_mend() -> None:
    answer = on_the_head(raising(errors.ConfigError("tiles of 3 elements do not fit. Choose 4.")))
    config = silent(layout={"name": "says", "answer": answer}, policy="always", check_ranks=False)
    words = (*WHERE, "(rank 2)", "refused: tiles of 3 elements do not fit. Choose 4.")
    refused(Tower(), config, errors.ConfigError, *words, twin=Tower())


#: What rank 1 alone answers, and words of what all ranks are told.
DIFFERENT: dict[str, tuple[Answer, tuple[str, ...]]] = {
    "offsets": (
        but(offsets=lambda u, a: (0, 20), shard_numel=lambda u, a: 12),
        ("['inner.head.bias', 16, ", "['inner.head.bias', 20, "),
    ),
    "slices": (but(shard_numel=lambda u, a: 11), ("['slices', 10]", "['slices', 11]")),
    "order": (
        but(order=lambda u, a: (1, 0), offsets=lambda u, a: (0, 4)),
        ("['inner.head.weight', 0, ", "['inner.head.weight', 4, "),
    ),
    "rows": (
        but(by_rows=lambda u, a: frozenset({0}), shard_numel=lambda u, a: 12),
        ("['inner.head.weight', 0, 'elements']", "['inner.head.weight', 0, 'rows']"),
    ),
    "buffers": (
        lambda unit: [Arrangement((0,), (0,), 8), Arrangement((1,), (0,), 2)],
        ("'inner.head'",),
    ),
}


@pytest.mark.usefixtures("_acme")
@pytest.mark.parametrize(("answer", "words"), DIFFERENT.values(), ids=DIFFERENT)
def test_another_answer_on_another_rank_is_told_to_all(answer: Answer, words: tuple[str, ...]) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            model = Tower()
        before = description(model)
        says = on_the_head(answer) if rank else lambda unit: [flat(unit)]
        # The same function on both ranks, as far as names go.
        says.__qualname__ = "says"
        with pytest.raises(errors.RankMismatchError) as caught:
            polyshard.shard(model, threaded(world, rank, layout={"name": "says", "answer": says}, policy="always"))
        assert description(model) == before
        polyshard.shard(model, threaded(world, rank, layout="rows"))
        return str(caught.value)

    texts = on_ranks(2, on_rank)
    for word in ("shard differently", "plugin 'says' of polyshard.layouts (from acme-layouts 2.3)", *words):
        assert all(word in text for text in texts), texts


@pytest.mark.usefixtures("_acme")
def test_a_failure_on_one_rank_is_told_to_all() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        with world.lock:
            model = Tower()
        before = description(model)
        says = on_the_head(raising(SystemExit(3))) if rank else lambda unit: [flat(unit)]
        says.__qualname__ = "says"
        with pytest.raises(errors.PolyshardError) as caught:
            polyshard.shard(model, threaded(world, rank, layout={"name": "says", "answer": says}, policy="always"))
        assert description(model) == before
        return str(caught.value)

    for text in on_ranks(2, on_rank):
        assert "SystemExit: 3" in text
        assert "plugin 'says' of polyshard.layouts (from acme-layouts 2.3) for unit 'inner.head'" in text
        assert "(rank 1)" in text


@pytest.mark.usefixtures("_acme")
@pytest.mark.parametrize(
    ("layout", "error", "words"),
    [
        ("rwos", errors.PluginNotFoundError, ("'rwos'", "polyshard.layouts", "Did you mean 'rows'?")),
        ("older", errors.PluginVersionError, ("'older'", "acme-layouts 2.3", "contract")),
        ("unversioned", errors.PluginVersionError, ("'unversioned'", "acme-layouts 2.3", "api_version")),
        ("unable", errors.PluginContractError, ("'unable'", "acme-layouts 2.3", "arrange")),
        ({"name": "rows", "size": 2}, errors.ConfigError, ("'rows'", "does not take the option 'size'")),
        ({"name": "blocks", "sizes": 2}, errors.ConfigError, ("'blocks'", "Did you mean 'size'?")),
        ({"name": "blocks", "size": 0}, errors.ConfigError, ("size of the layout 'blocks'", "0")),
        ({"name": "blocks", "size": [2, 2, 2]}, errors.ConfigError, ("size of the layout 'blocks'", "[2, 2, 2]")),
        ({"name": "blocks", "size": "256"}, errors.ConfigError, ("size of the layout 'blocks'", "'256'")),
        ({"name": "blocks", "smallest": -1}, errors.ConfigError, ("smallest of the layout 'blocks'", "-1")),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_made(layout: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    refused(Tower(), silent(layout=layout), error, *words, twin=Tower())


def test_an_object_that_is_no_layout() -> None:
    words = ("Linear", "polyshard.layouts")
    refused(Tower(), lambda: silent(layout=nn.Linear(2, 2))(), errors.PluginContractError, *words, twin=Tower())


class Own(Layout):
    """A user's own object, which needs no package."""

    def arrange(self, unit: UnitGeometry) -> Sequence[Arrangement]:
        return [dataclasses.replace(flat(unit), offsets=(0,))]


def test_an_object_of_the_users_is_named_by_its_class() -> None:
    words = ("plugin 'Own' of polyshard.layouts", "'(root)'", "1 offsets for", "(rank 2)")
    refused(Tower(), silent(layout=Own(), check_ranks=False), errors.PluginContractError, *words, twin=Tower())


def test_a_layout_that_a_policy_chose_is_named_too() -> None:
    def chosen(module: nn.Module) -> bool | dict[str, Any]:
        return {"layout": Own()} if module.__class__ is nn.Linear and module.out_features == 2 else False

    policy = {"name": "custom", "fn": chosen}
    words = ("plugin 'Own' of polyshard.layouts", "unit 'last'", "(rank 2)")
    refused(Tower(), silent(policy=policy, check_ranks=False), errors.PluginContractError, *words, twin=Tower())


def test_the_setting_is_read_from_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[shard]\nlayout = { name = "blocks", size = 64 }\n')
    assert ShardConfig.from_toml(file, environ={}).layout == {"name": "blocks", "size": 64}
    assert ShardConfig.from_toml(file, environ={"POLYSHARD_LAYOUT": "rows"}).layout == "rows"
