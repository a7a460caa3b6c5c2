"""What goes into units and comes out of them, against the same calls on unsharded models."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from parity import (
    Block,
    Net,
    assert_parity,
    draw,
    local,
    mean_square,
    on_ranks,
    seeded,
    sharded_copy,
    stepping,
    units_of,
)
from polyshard_backends.threaded import ThreadedWorld
from torch import nn

BLOCKS = {"policy": units_of(Block)}


class Pair(NamedTuple):
    hidden: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    loss: float = 1.5
    count: int = dataclasses.field(default=0, init=False)


class Mapping(OrderedDict):  # type: ignore[type-arg]
    """Like transformers' ``ModelOutput``: items are attributes too, and ``update`` is refused."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("this mapping is not to be updated")


def as_mapping(hidden: torch.Tensor, logits: torch.Tensor) -> Mapping:
    mapping = Mapping()
    mapping["hidden"], mapping["logits"] = hidden, logits
    return mapping


Structure = Callable[[torch.Tensor, torch.Tensor], Any]
Read = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]


class Returns(nn.Module):
    """Two tensors in a structure of choice, out of a block that is a unit, and of the root."""

    class Inner(nn.Module):
        def __init__(self, structure: Structure) -> None:
            super().__init__()
            self.structure = structure
            self.one = nn.Linear(3, 5)
            self.two = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = torch.tanh(self.one(x))
            return self.structure(hidden, self.two(hidden))

    def __init__(self, structure: Structure, read: Read) -> None:
        super().__init__()
        self.structure, self.read = structure, read
        self.inner = self.Inner(structure)
        self.last = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> Any:
        output = self.inner(x)
        hidden, logits = self.read(output)
        return self.structure(hidden, self.last(logits))


class Slotted:
    __slots__ = ("hidden", "logits")

    def __init__(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.hidden, self.logits = hidden, logits


@dataclasses.dataclass
class Late:
    """Two of its fields may never be set."""

    logits: torch.Tensor
    hidden: torch.Tensor = dataclasses.field(init=False)
    loss: torch.Tensor = dataclasses.field(init=False)


def late(hidden: torch.Tensor, logits: torch.Tensor) -> Late:
    record = Late(logits)
    record.hidden = hidden
    return record


def deep(hidden: torch.Tensor, logits: torch.Tensor) -> Any:
    # Views, so that the containers are made anew.
    value: Any = hidden.view(-1, 1)
    for _ in range(1_000):
        value = [(value,)]
    return value, logits.t()


def bottom_of(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    value, logits = output
    while not isinstance(value, torch.Tensor):
        (value,) = value
    return value.view(-1, 5), logits.t()


def round_trip(hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    output: dict[str, Any] = {"hidden": hidden.view(-1, 1), "logits": logits.t()}
    output["self"] = [output]
    return output


def around(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert output["self"][0] is output
    return output["hidden"].view(-1, 5), output["logits"].t()


def again(reshape: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Structure, Read]:
    """One tensor returned several times, which stays one."""

    def structure(hidden: torch.Tensor, logits: torch.Tensor) -> Any:
        hidden = reshape(hidden)
        return {"all": (hidden, [hidden, logits]), "last": hidden}

    def read(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, (same, logits) = output["all"]
        assert hidden is same
        assert hidden is output["last"]
        return hidden.view(4, 5) + same.view(4, 5), logits

    return structure, read


def by_name(output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return output.hidden, output.logits


STRUCTURES: dict[str, tuple[Structure, Read]] = {
    "tuple": (lambda h, o: (h, o), lambda out: (out[0], out[1])),
    "list": (lambda h, o: [h, None, o], lambda out: (out[0], out[2])),
    "dict": (lambda h, o: {"h": h, "o": o, "n": 3}, lambda out: (out["h"], out["o"])),
    "nested": (lambda h, o: {"a": [(h,), {"b": o}]}, lambda out: (out["a"][0][0], out["a"][1]["b"])),
    "namedtuple": (Pair, by_name),
    "dataclass": (lambda h, o: Record(o, h), by_name),
    "mapping": (as_mapping, lambda out: (out.hidden, out["logits"])),
    "views": (lambda h, o: (h.view(-1, 1), o.t()), lambda out: (out[0].view(-1, 5), out[1].t())),
    "views in a mapping": (
        lambda h, o: as_mapping(h.view(-1, 1), o.t()),
        lambda out: (out.hidden.view(-1, 5), out["logits"].t()),
    ),
    "views in a dataclass": (
        lambda h, o: Record(o.t(), h.view(-1, 1)),
        lambda out: (out.hidden.view(-1, 5), out.logits.t()),
    ),
    "object with slots": (Slotted, by_name),
    "namespace": (lambda h, o: SimpleNamespace(hidden=h, logits=o), by_name),
    "unset field": (late, by_name),
    "deep": (deep, bottom_of),
    "cyclic": (round_trip, around),
    "tensor twice": again(lambda x: x),
    "view twice": again(lambda x: x.view(-1)),
}


#: Structures deeper than Python's limit of recursion are among them.
RETURNED = [
    *((name, "both") for name in STRUCTURES),
    *((name, "hidden") for name in ("tuple", "dataclass", "mapping", "views", "views in a mapping")),
]


@pytest.mark.parametrize(
    ("name", "used", "prefetch"), [(name, used, number % 2) for number, (name, used) in enumerate(RETURNED)]
)
def test_outputs_of_any_structure(name: str, used: str, prefetch: int) -> None:
    structure, read = STRUCTURES[name]

    def loss_of(model: nn.Module, x: torch.Tensor, turn: int, rank: int) -> torch.Tensor:
        output = model(x)
        assert type(output) is type(structure(x, x))
        hidden, logits = read(output)
        return hidden.square().mean() + (logits.square().mean() if used == "both" else 0.0)

    settings = {"policy": units_of(Returns.Inner), "backward_prefetch": prefetch}
    assert_parity(seeded(lambda: Returns(structure, read)), stepping(loss_of), world_size=2, settings=settings)


def test_nested_inputs_all_get_their_gradients() -> None:
    class Takes(Net):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            return super().forward(batch["x"][0] * batch["record"].logits)

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        y = draw(3, turn=turn, rank=rank, requires_grad=True)
        loss = model({"x": [x, 2], "record": Record(y)}).square().mean()
        loss.backward()
        assert x.grad is not None
        assert y.grad is not None
        return [loss.detach(), x.grad, y.grad]

    assert_parity(seeded(Takes), step, world_size=2, settings=BLOCKS)


@pytest.mark.parametrize("reshape", [lambda x: x.view(-1), lambda x: x[1:], lambda x: x])
def test_a_unit_may_return_a_view_of_its_input_beside_what_it_computed(
    reshape: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return reshape(x), self.linear(x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.passes = Passes()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            view, computed = self.passes(self.first(x))
            return view.square().mean() + computed.square().mean()

    step = stepping(lambda model, x, turn, rank: model(x))

    assert_parity(seeded(Root), step, settings={"policy": units_of(Passes)})


def test_the_caller_may_change_a_returned_view_in_place() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(-1, 2, 3)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.viewing = Viewing()
            self.last = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.viewing(self.first(x))
            y.mul_(2.0)
            y[:, 0] += 1.0
            return self.last(y).transpose(0, 1)

    step = stepping(lambda model, x, turn, rank: model(x).add_(1.0).square().mean())
    assert_parity(seeded(Root), step, settings={"policy": units_of(Viewing)})


class Rescales(nn.Module):
    """Changes its inputs in place, one of them by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, others: dict[str, torch.Tensor]) -> torch.Tensor:
        x.mul_(self.scale)
        others["other"].relu_()
        return self.linear(x)


@pytest.mark.parametrize("uses_output", [True, False])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_the_caller_goes_on_with_what_a_unit_changed_in_place(strategy: str, uses_output: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.unit = Rescales()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, z = self.first(x), self.first(2 * x)
            found = self.unit(y, {"other": z})
            return y * y + z * y + (found if uses_output else found.detach())

    assert_parity(seeded(Root), settings={"policy": units_of(Rescales), "strategy": strategy})


class SeesTheSame(nn.MultiheadAttention):
    """Asks what its superclass asks before it takes the packed path."""

    seen: tuple[bool, bool] = (False, False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
        self.seen = (query is key, key is value)
        return super().forward(query, key, value, **kwargs)


class Attends(nn.Module):
    def __init__(self, same: tuple[bool, bool], by_name: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.attention = SeesTheSame(6, 2, batch_first=True)
        self.last = nn.Linear(6, 2)
        self.same, self.by_name = same, by_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.first(x)
        key = query if self.same[0] else query * 2.0
        value = key if self.same[1] else key * 0.5
        if self.by_name:
            output, _ = self.attention(query, key=key, value=value)
        else:
            output, _ = self.attention(query, key, value)
        assert self.attention.seen == self.same
        return self.last(output.to(self.last.weight.dtype))


@pytest.mark.parametrize(
    ("same", "by_name"), [((True, True), False), ((True, True), True), ((False, True), True), ((True, False), False)]
)
def test_one_tensor_given_several_times_stays_one(same: tuple[bool, bool], by_name: bool) -> None:
    step = stepping(mean_square, 2, 4, 3)

    settings = {"policy": units_of(nn.MultiheadAttention)}
    assert_parity(seeded(lambda: Attends(same, by_name)), step, world_size=2, settings=settings)


@pytest.mark.parametrize("precision", ["bf16", {"name": "mixed", "param": "bf16", "output": "fp32"}])
def test_one_tensor_given_several_times_stays_one_when_it_is_cast(precision: Any) -> None:
    model = seeded(lambda: Attends((True, True), True)).float()
    # What the root hands on is cast by it; the unit is given fp32 here.
    model.first.register_forward_hook(lambda module, args, output: output.float())

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(nn.MultiheadAttention), precision=precision)
        loss = mine(draw(2, 4, 3).float()).square().mean()
        loss.backward()
        return [local(parameter.grad) for parameter in mine.parameters() if parameter.grad is not None]

    for gradients in on_ranks(2, on_rank):
        assert any(gradient.abs().max() > 0 for gradient in gradients if gradient.numel())
