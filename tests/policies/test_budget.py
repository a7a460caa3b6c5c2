"""``budget``: units within what memory allows, no smaller than the link wants them, and whole models in units."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import Net, assert_parity, seeded, square_step
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PolicyContext, WrapPolicy
from polyshard.planning.plan import plan_modules
from polyshard_policies.budget import Budget
from polyshard_testing import PolicySuite
from torch import nn

CONTEXT = PluginContext("budget", torch.device("cpu"))
#: 12 µs and 450 GB/s: over two ranks, half of the time is latency at 12e-6 * 450e9 * 2 = 10.8 MB.
LINK = {"latency_s": 12e-6, "bandwidth_bytes_per_s": 450e9}


def chosen(model: nn.Module, shards: int = 2, **options: Any) -> list[str]:
    plan = Budget(CONTEXT, **options).plan(model, PolicyContext(shards=shards))
    return [name for name, module in model.named_modules() if module in plan]


def linear(numel: int) -> nn.Linear:
    """Without memory; a weight of ``numel`` elements."""
    return nn.Linear(numel, 1, bias=False, device="meta")


class Layer(nn.Module):
    """Two weights beside each other: of a block, its projections."""

    def __init__(self, up: int, down: int) -> None:
        super().__init__()
        self.up, self.down = linear(up), linear(down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Tower(nn.Module):
    """What comes before a stack of layers, the stack, and what comes after it."""

    def __init__(self, first: int, layers: Iterable[nn.Module], last: int) -> None:
        super().__init__()
        self.first = linear(first)
        self.layers = nn.ModuleList(layers)
        self.last = linear(last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Inside(nn.Module):
    """A model inside of another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class TestBudget(PolicySuite):
    def make(self) -> WrapPolicy:
        return Budget(CONTEXT, unit_bytes=2000, link=LINK)


class TestBudgetOfAll(PolicySuite):
    def make(self) -> WrapPolicy:
        return Budget(CONTEXT, gather_bytes="100 KB", prefetch=2, itemsize=2)


# --- what it chooses ---


def test_layers_of_a_stack_become_units_wherever_it_stands() -> None:
    tower = Tower(100, [Layer(60, 40) for _ in range(4)], 50)
    layers = [f"layers.{index}" for index in range(4)]
    assert chosen(tower, unit_bytes=400) == ["first", *layers, "last"]
    # All of it would fit: cut all the same, so that one layer is gathered while another computes.
    inner = [f"inner.{name}" for name in ("first", *layers, "last")]
    assert chosen(Inside(tower), unit_bytes="1 MB") == inner
    assert chosen(Inside(Tower(100, [Layer(60, 40) for _ in range(2)], 50)), unit_bytes="1 MB") == ["inner"]


def test_a_layer_that_is_too_large_is_divided_and_one_that_fits_is_not() -> None:
    tower = Tower(10, [Layer(60, 40) for _ in range(3)], 10)
    assert "layers.0" in chosen(tower, unit_bytes=400)
    # No more than it takes: the smaller one is left.
    divided = chosen(tower, unit_bytes=399)
    assert [name for name in divided if name.startswith("layers.0")] == ["layers.0", "layers.0.up"]
    divided = chosen(tower, unit_bytes=240)
    assert [name for name in divided if name.startswith("layers.0")] == ["layers.0", "layers.0.up"]


def test_elements_count_by_their_size_on_the_way() -> None:
    tower = Tower(10, [Layer(60, 40) for _ in range(3)], 10)
    assert "layers.0.up" not in chosen(tower, unit_bytes=200, itemsize=2)
    assert "layers.0.up" in chosen(tower, unit_bytes=199, itemsize=2)


@pytest.mark.parametrize(
    ("shards", "share", "least"),
    [
        (2, 0.5, 10_800_000),
        (2, 0.75, 32_400_000),  # three times as much
        (3, 0.5, 8_100_000),  # a rank has a third of it
        (1, 0.5, 0),  # nothing travels
    ],
)
def test_small_modules_stay_with_what_is_around_them(shards: int, share: float, least: int) -> None:
    numel = -(-least // 4)
    for more, units in ((0, ["first", "layers.0", "layers.1", "layers.2", "last"]), (-1, [])):
        if numel + more < 1:
            continue
        tower = Tower(numel + more, [linear(numel + more) for _ in range(3)], numel + more)
        assert chosen(tower, shards, unit_bytes="1 GB", link=LINK, share=share) == units


def test_too_much_of_what_is_small_becomes_units_of_siblings_all_the_same() -> None:
    tower = Tower(1000, [linear(900) for _ in range(40)], 800)
    link = {"latency_s": 12e-6, "bandwidth_bytes_per_s": 450e9}
    layers = [f"layers.{index}" for index in range(40)]
    assert chosen(tower, unit_bytes=150_000 + 1_200, link=link) == []
    # The layers take most: all of them, and not as many as it takes.
    assert chosen(tower, unit_bytes=150_000, link=link) == layers


def test_all_gathered_units_together_stay_within_gather_bytes() -> None:
    tower = Tower(50, [Layer(60, 40) for _ in range(4)], 50)
    # One that computes, one ahead: 400 bytes each.
    assert "layers.0.up" not in chosen(tower, gather_bytes=800)
    assert "layers.0.up" in chosen(tower, gather_bytes=799)
    assert "layers.0.up" not in chosen(tower, gather_bytes=1200, prefetch=2)
    assert "layers.0.up" in chosen(tower, gather_bytes=1199, prefetch=2)
    # The root's own 200 bytes stay.
    tower.own = nn.Parameter(torch.empty(50, device="meta"))
    assert "layers.0.up" not in chosen(tower, gather_bytes=1000)
    assert "layers.0.up" in chosen(tower, gather_bytes=999)


def test_units_inside_of_units_are_made_room_for() -> None:
    class Own(Layer):
        def __init__(self) -> None:
            super().__init__(300, 300)
            self.scale = nn.Parameter(torch.empty(240, device="meta"))

    # Up and down are units of 1200 bytes, and what is left, 960, is around them; at once 960 + 1200 + 1200 and the
    # root's 200. That fits.
    class Root(Tower):
        def __init__(self, own: int) -> None:
            super().__init__(300, [Own() for _ in range(2)], 300)
            self.own = nn.Parameter(torch.empty(own, device="meta"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(chosen(Root(50), gather_bytes=3600)) == 8
    # 1000 bytes more of the root's do not, whatever is cut.
    words = r"policy 'budget' may gather 3.6 kB at once, but what .* takes 4.6 kB: units that lie in each other\."
    with pytest.warns(UserWarning, match=words):
        chosen(Root(300), gather_bytes=3600)


class Hidden(nn.Module):
    """Holds layers that others call."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(f"layer_{index}", layer)


def test_what_nothing_calls_becomes_no_unit() -> None:
    holders: list[Callable[..., nn.Module]] = [
        Hidden,
        nn.Sequential,
        lambda *layers: nn.ModuleList(layers),
        lambda *layers: nn.ModuleDict({f"layer_{index}": layer for index, layer in enumerate(layers)}),
    ]
    for holder in holders:
        model = Inside(holder(Layer(10, 10), Layer(10, 10)))
        names = [name for name, module in model.named_modules() if isinstance(module, Layer)]
        assert chosen(model, unit_bytes=100) == names
    attention = Inside(nn.MultiheadAttention(8, 2, device="meta"))
    with pytest.warns(UserWarning, match="cannot divide 'inner' .MultiheadAttention, 1.2 kB."):
        # Its projection is never called: attention reads the weight.
        assert chosen(attention, unit_bytes=300) == ["inner"]


def test_a_module_of_two_is_at_home_in_what_contains_both() -> None:
    shared = linear(100)
    model = Inside(nn.ModuleList([Inside(shared), Inside(shared), Inside(linear(100))]))
    assert chosen(model, unit_bytes=400) == ["inner.0.inner", "inner.2"]
    tied = Tower(100, [Layer(60, 40) for _ in range(3)], 100)
    tied.last.weight = tied.first.weight
    assert chosen(tied, unit_bytes=400) == ["layers.0", "layers.1", "layers.2"]


def test_what_two_units_hold_inside_of_a_larger_one_is_a_unit_where_that_is_too_large() -> None:
    class Own(Inside):
        def __init__(self, numel: int, *inner: nn.Module) -> None:
            super().__init__(Hidden(*inner))
            self.own = nn.Parameter(torch.empty(numel, device="meta"))

    shared = linear(100)
    model = Inside(Own(90, Own(10, shared), Own(10, shared)))
    first, second = "inner.inner.layer_0", "inner.inner.layer_1"
    # Of 840 bytes, 360 are the larger one's own and 400 the shared module's.
    assert chosen(model, unit_bytes=400) == ["inner", first, f"{first}.inner.layer_0", second]
    assert chosen(model, unit_bytes=840) == ["inner"]


# --- whatever the model ---


class Node(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class OtherNode(Node):
    pass


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Trees of modules with and without a forward, some of them, and some parameters, in several places."""
    weights: list[nn.Parameter] = []
    modules: list[nn.Module] = []

    def build(depth: int) -> nn.Module:
        if modules and draw(st.integers(0, 9)) == 0:
            return draw(st.sampled_from(modules))
        kind = draw(st.sampled_from([Node, OtherNode, nn.ModuleList, nn.Sequential]))
        module = kind()
        if kind in (Node, OtherNode):
            for index in range(draw(st.integers(0, 2))):
                if weights and draw(st.integers(0, 9)) == 0:
                    weight = draw(st.sampled_from(weights))
                else:
                    weight = nn.Parameter(torch.empty(draw(st.integers(1, 60)), device="meta"))
                    weights.append(weight)
                module.register_parameter(f"weight_{index}", weight)
        if depth:
            for index in range(draw(st.integers(0, 4))):
                module.add_module(str(index), build(depth - 1))
        modules.append(module)
        return module

    root = Node()
    root.register_parameter("own", nn.Parameter(torch.empty(3, device="meta")))
    for index in range(draw(st.integers(1, 4))):
        root.add_module(f"child_{index}", build(3))
    return root


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 600), st.sampled_from([None, 1e-7, 1e-4]), st.booleans())
def test_every_unit_fits_or_cannot_be_divided_and_is_named(
    model: nn.Module, most: int, latency: float | None, of_all: bool
) -> None:
    options: dict[str, Any] = {"gather_bytes": 3 * most} if of_all else {"unit_bytes": most}
    if latency is not None:
        options["link"] = {"latency_s": latency, "bandwidth_bytes_per_s": 1e9}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan = Budget(CONTEXT, **options).plan(model, PolicyContext(shards=2))
        again = Budget(CONTEXT, **options).plan(model, PolicyContext(shards=2))
    assert list(plan) == list(again)
    module_states = plan_modules(model, plan)
    if of_all and not told:
        root, *others = [
            sum(each.original.nbytes for group in stage.groups for each in group) for stage in module_states
        ]
        assert root + sum(sorted(others)[-2:]) <= 3 * most
    owned = [managed.original for stage in module_states for group in stage.groups for managed in group]
    assert len(owned) == len(set(owned))
    assert set(owned) == set(model.parameters())
    messages = " ".join(str(each.message) for each in told)
    for module in plan:
        assert isinstance(module, Node)
        assert any(stage.module is module for stage in module_states), "a unit of nothing"
    for stage in module_states:
        own = [managed for group in stage.groups for managed in group]
        nbytes = 4 * sum(each.original.numel() for each in own)
        if of_all or nbytes <= most:
            continue
        assert f"'{stage.name or '(root)'}'" in messages or " more. " in messages
        # Nothing inside could take a part of it: each parameter is directly the module's, or of what nothing calls.
        holders = [set(inner_homes(stage.module, managed.original)) for managed in own]
        # One that would take all of it would be as large.
        whole = set.intersection(*holders)
        for managed, inside in zip(own, holders, strict=True):
            for holder in inside - whole:
                assert not isinstance(holder, Node), f"{stage.name}: {managed.names} could be in a unit of its own"


def inner_homes(module: nn.Module, parameter: nn.Parameter) -> list[nn.Module]:
    """The modules inside ``module``, less itself, that contain all uses of ``parameter`` in it."""

    def paths(at: nn.Module, above: tuple[nn.Module, ...]) -> list[tuple[nn.Module, ...]]:
        here = (*above, at)
        found = [here] if any(each is parameter for each in at.parameters(recurse=False)) else []
        return found + [path for child in at.children() for path in paths(child, here)]

    every = paths(module, ())
    return [each for each in every[0][1:] if all(each in path for path in every)]


# --- beside the engine ---


def test_the_engine_trains_with_what_it_chose() -> None:
    # In fp64 a block has 616 bytes, in projections of 336 and 280: one becomes a unit, the other the block's rest.
    policy = Budget(CONTEXT, unit_bytes=400)
    net = seeded(Net)
    plan = policy.plan(net, PolicyContext())
    names = [name for name, module in net.named_modules() if module in plan]
    assert names == ["first", *(f"blocks.{index}{name}" for index in range(3) for name in ("", ".up")), "last"]
    assert_parity(seeded(Net), square_step, 2, settings={"policy": policy})


def test_reasons_say_sizes_and_the_link() -> None:
    tower = Tower(1000, [linear(16_777_216) for _ in range(3)], 1000)
    policy = Budget(CONTEXT, unit_bytes="64 MiB", itemsize=2, link=LINK)
    plan = policy.plan(tower, PolicyContext(shards=2))
    assert [policy.reason(module, "") for module in plan] == [
        # 33.6 MB, half of them received: 37.3 µs of 49.3.
        "one of 3 Linear side by side, 16.8 M parameters: its gather of 33.6 MB takes 0.76 of its time in bandwidth at "
        "450 GB/s and 12 µs"
    ] * 3
    assert policy.reason(tower, "") == ""
    plain = Budget(CONTEXT, unit_bytes="64 MiB")
    plan = plain.plan(tower, PolicyContext(shards=2))
    reasons = [plain.reason(module, "") for module in plan]
    assert reasons[0] == "1.0 k parameters: 4.0 kB gathered, of the 67.1 MB that a unit may take"


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["unit_bytes and gather_bytes", "'256 MiB'"]),
        ({"unit_bytes": 1, "gather_bytes": 1}, ["one of unit_bytes and gather_bytes"]),
        ({"unit_bytes": 0}, ["unit_bytes", "above 0", "not 0"]),
        ({"unit_bytes": "many"}, ["'many'"]),
        ({"gather_bytes": -5}, ["gather_bytes", "-5"]),
        ({"unit_bytes": 1, "prefetch": 1}, ["prefetch", "changes nothing"]),
        ({"gather_bytes": 9, "prefetch": -1}, ["prefetch", "-1"]),
        ({"unit_bytes": 1, "itemsize": 0}, ["itemsize", "2 for bf16"]),
        ({"unit_bytes": 1, "share": 0.5}, ["share", "without a link"]),
        ({"unit_bytes": 1, "link": LINK, "share": 1}, ["share", "below 1"]),
        ({"unit_bytes": 1, "link": 450e9}, ["link of policy 'budget'", "latency_s = 12e-6"]),
        ({"unit_bytes": 1, "link": {"latency": 1}}, ["'latency'", "Did you mean 'latency_s'?"]),
        ({"unit_bytes": 1, "link": {"latency_s": 1e-6}}, ["bandwidth_bytes_per_s", "None"]),
        ({"unit_bytes": 1, "link": LINK | {"bandwidth_bytes_per_s": 0}}, ["bandwidth_bytes_per_s", "0"]),
        ({"unit_bytes": 1, "force_leaf": "nowhere"}, ["force_leaf of policy 'budget'", "'nowhere'"]),
    ],
    ids=str,
)
def test_options_that_it_cannot_take(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Budget(CONTEXT, **options)
    for word in words:
        assert word in str(caught.value)
