"""Forwards and backwards of every shape, against the same calls on unsharded models."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    Step,
    adam,
    assert_parity,
    draw,
    on_ranks,
    root_of,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    train_reference,
    units_of,
    warns_for,
    whole_of,
)
from polyshard.errors import StateError, UnshardedUseError
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


class Returns(nn.Module):
    """Two tensors in a structure of choice, out of a block that is a unit, and of the root."""

    class Inner(nn.Module):
        def __init__(self, structure: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
            super().__init__()
            self.structure = structure
            self.one = nn.Linear(3, 5)
            self.two = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = torch.tanh(self.one(x))
            return self.structure(hidden, self.two(hidden))

    def __init__(
        self,
        structure: Callable[[torch.Tensor, torch.Tensor], Any],
        read: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__()
        self.structure, self.read = structure, read
        self.inner = self.Inner(structure)
        self.last = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> Any:
        output = self.inner(x)
        hidden, logits = self.read(output)
        return self.structure(hidden, self.last(logits))


STRUCTURES: dict[
    str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], tuple[torch.Tensor, torch.Tensor]]]
] = {
    "tuple": (lambda h, o: (h, o), lambda out: (out[0], out[1])),
    "list": (lambda h, o: [h, None, o], lambda out: (out[0], out[2])),
    "dict": (lambda h, o: {"h": h, "o": o, "n": 3}, lambda out: (out["h"], out["o"])),
    "nested": (lambda h, o: {"a": [(h,), {"b": o}]}, lambda out: (out["a"][0][0], out["a"][1]["b"])),
    "namedtuple": (Pair, lambda out: (out.hidden, out.logits)),
    "dataclass": (lambda h, o: Record(o, h), lambda out: (out.hidden, out.logits)),
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
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("used", ["both", "hidden"])
def test_outputs_of_any_structure(name: str, used: str) -> None:
    structure, read = STRUCTURES[name]

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        output = model(x)
        assert type(output) is type(structure(x, x))
        hidden, logits = read(output)
        loss = hidden.square().mean() + (logits.square().mean() if used == "both" else 0.0)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    assert_parity(
        seeded(lambda: Returns(structure, read)), step, world_size=2, settings={"policy": units_of(Returns.Inner)}
    )


class Words(nn.Module):
    """An integer input, an embedding in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(5, 11, bias=False)

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks(self.embedding(tokens))
        return self.last(x if scale is None else x * scale)


def words_step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    tokens = (draw(2, 4, turn=turn, rank=rank) * 100).long() % 11
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return [loss.detach()]


@pytest.mark.parametrize("classes", [(Block,), (Block, nn.Embedding), (nn.Embedding,)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_integer_input_with_an_embedding_first(world_size: int, classes: tuple[type[nn.Module], ...]) -> None:
    assert_parity(seeded(Words), words_step, world_size, optimizer=adam, settings={"policy": units_of(*classes)})


def test_an_input_by_keyword_gets_its_gradient() -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        tokens = (draw(2, 4, turn=turn, rank=rank) * 100).long() % 11
        scale = draw(5, turn=turn, rank=rank, requires_grad=True)
        loss = model(tokens, scale=scale).square().mean()
        loss.backward()
        assert scale.grad is not None
        return [loss.detach(), scale.grad]

    assert_parity(seeded(Words), step, settings=BLOCKS)


def test_an_input_without_gradient() -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank)).square().mean()
        loss.backward()
        return [loss.detach()]

    assert_parity(seeded(Net), step, optimizer=adam, settings=BLOCKS)


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


@pytest.mark.parametrize("reshape", [lambda x: x.view(-1), lambda x: x.t(), lambda x: x[1:], lambda x: x])
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

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

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

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        out = model(x)
        out.add_(1.0)
        loss = out.square().mean()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    assert_parity(seeded(Root), step, settings={"policy": units_of(Viewing)})


@pytest.mark.parametrize("operation", ["add_", "relu_", "mul_"])
def test_the_first_operation_of_a_unit_may_be_in_place(operation: str) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            getattr(x, operation)(*(() if operation == "relu_" else (2.0,)))
            return self.linear(x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.unit = InPlace()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.unit(self.first(x))

    assert_parity(seeded(Root), settings={"policy": units_of(InPlace)})


def test_the_caller_sees_what_a_unit_did_in_place_to_its_input() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1.0)
            return self.linear(x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = InPlace()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.unit(x)
            return self.unit.linear.weight.new_zeros(()) + x.sum()

    model = seeded(Root)

    def on_rank(rank: int, world: ThreadedWorld) -> float:
        mine = sharded_copy(model, rank, world)
        with torch.no_grad():
            return float(mine(torch.zeros(2, 5, dtype=torch.float64)))

    assert on_ranks(2, on_rank) == [10.0, 10.0]


def test_an_output_that_needs_no_gradient_leaves_nothing_gathered_and_trains_on() -> None:
    class Detached(Net):
        detaches = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.detach() if self.detaches else y

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        model.detaches = True
        y = model(draw(4, 3, turn=turn, rank=rank))
        assert not y.requires_grad
        model.detaches = False
        return [y, *square_step(model, turn, rank)]

    assert_parity(seeded(Detached), step, settings=BLOCKS)


def test_a_detached_output_releases_every_unit() -> None:
    class Detached(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).argmax(-1)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(Detached), rank, world, **BLOCKS)
        mine(draw(4, 3))
        # Autograd dropped the graph; the root's output can start no backward.
        assert "(root)" not in root_of(mine).gathered
        with torch.no_grad():
            mine(draw(4, 3))
        assert root_of(mine).gathered == ()

    on_ranks(2, on_rank)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_several_forwards_before_one_backward(world_size: int, strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = [draw(4, 3, turn=turn + 10 * k, rank=rank, requires_grad=True) for k in range(3)]
        loss = sum((model(each).square().mean() for each in x), torch.zeros((), dtype=torch.float64))
        loss.backward()
        return [loss.detach(), *(each.grad for each in x if each.grad is not None)]

    assert_parity(seeded(Net), step, world_size, settings={**BLOCKS, "strategy": strategy})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("integer", [False, True])
def test_two_forwards_then_two_backwards(order: tuple[int, int], strategy: str, integer: bool) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        losses = []
        for k in range(2):
            x = draw(2, 3, turn=turn + 10 * k, rank=rank)
            losses.append(model((x * 100).long() % 11 if integer else x).square().mean())
        for index in order:
            losses[index].backward()
        return [loss.detach() for loss in losses]

    assert_parity(seeded(Words if integer else Net), step, optimizer=adam, settings={**BLOCKS, "strategy": strategy})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_forward_without_gradient_between_forward_and_backward(strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x).square().mean()
        with torch.no_grad():
            teacher = model(x * 2)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad, teacher]

    assert_parity(seeded(Net), step, settings={**BLOCKS, "strategy": strategy})


class Branches(nn.Module):
    """Three heads on a trunk; a backward may reach any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Block(3)
        self.heads = nn.ModuleList(Block(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.trunk(x)
        return [head(x) for head in self.heads]


@pytest.mark.parametrize("policy", [units_of(Block), "never", "always"])
def test_backward_of_part_of_the_outputs(policy: Any) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x)[turn].square().mean()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    assert_parity(seeded(Branches), step, settings={"policy": policy})


def test_backwards_of_one_output_after_the_other() -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        losses = [output.square().mean() for output in model(x)]
        for loss in losses:
            loss.backward(retain_graph=True)
        assert x.grad is not None
        return [*(loss.detach() for loss in losses), x.grad]

    assert_parity(seeded(Branches), step, settings=BLOCKS)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_two_backwards_through_a_retained_graph(world_size: int, strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    assert_parity(seeded(Net), step, world_size, settings={**BLOCKS, "strategy": strategy})


def grad_of_input(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, x)[0]


def backward_into_input(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    loss.backward(inputs=[x])
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("differentiate", [grad_of_input, backward_into_input])
def test_gradients_of_inputs_alone_touch_no_parameter(
    differentiate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], world_size: int, strategy: str
) -> None:
    model = seeded(Net)
    settings = {**BLOCKS, "strategy": strategy}

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mine = sharded_copy(model, rank, world, **settings)
        x = draw(4, 3, rank=rank, requires_grad=True)
        gradient = differentiate(mine(x).square().mean(), x)
        assert all(parameter.grad is None for parameter in mine.parameters())
        assert root_of(mine).gathered == ()
        return gradient, square_step(mine, 0, rank)

    expected = train_reference(model, square_step, world_size, turns=1).observed[0]
    with warns_for(world_size):
        ranks = on_ranks(world_size, on_rank)
    for (gradient, after), reference in zip(ranks, expected, strict=True):
        torch.testing.assert_close(gradient, reference[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, reference, rtol=1e-12, atol=1e-12)


def test_gradients_of_gradients_are_refused_and_the_model_goes_on() -> None:
    model = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, **BLOCKS)
        x = draw(4, 3, rank=rank, requires_grad=True)
        with pytest.raises(StateError, match="does not support gradients of gradients"):
            torch.autograd.grad(mine(x).square().mean(), x, create_graph=True)
        return square_step(mine, 0, rank)

    expected = train_reference(model, square_step, 2, turns=1).observed[0]
    for values, reference in zip(on_ranks(2, on_rank), expected, strict=True):
        torch.testing.assert_close(values, reference, rtol=1e-12, atol=1e-12)


class Twice(nn.Module):
    """One block used twice, and one parameter used twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.block = Block()
        self.other = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.first(x))
        x = self.block(self.other(x))
        return x @ self.first.weight


@pytest.mark.parametrize("policy", [units_of(Block), "never", "always"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_module_used_twice_and_a_parameter_used_twice(policy: Any, strategy: str) -> None:
    class Root(Twice):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # `always` makes a unit of the linear layer, whose weight is not to be read outside of it.
            x = self.block(self.first(x))
            x = self.block(self.other(x))
            return self.first(x[:, :3])

    chosen = Root if policy == "always" else Twice
    assert_parity(seeded(chosen), settings={"policy": policy, "strategy": strategy}, optimizer=adam)


def test_a_parameter_used_on_one_rank_only() -> None:
    class Sometimes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
            x = self.first(x)
            if rank == 1:
                x = self.extra(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        loss = model(draw(4, 3, turn=turn, rank=rank), rank).square().mean()
        loss.backward()
        return [loss.detach()]

    assert_parity(seeded(Sometimes), step, settings=BLOCKS)


class Skips(nn.Module):
    """A unit that every rank enters, but whose parameters only some use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        return self.linear(x) if use else x


@pytest.mark.parametrize("at", ["first", "middle", "last"])
@pytest.mark.parametrize("with_input_gradient", [True, False])
def test_a_unit_whose_parameters_are_used_on_one_rank_only(at: str, with_input_gradient: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.skips = Skips()
            self.one, self.two = Block(), Block()

        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            if at == "first":
                return self.two(self.one(self.skips(x, use)))
            if at == "middle":
                return self.two(self.skips(self.one(x), use))
            return self.skips(self.two(self.one(x)), use)

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 5, turn=turn, rank=rank, requires_grad=with_input_gradient)
        loss = model(x, use=rank == turn % 2).square().mean()
        loss.backward()
        return [loss.detach(), *([x.grad] if x.grad is not None else [])]

    assert_parity(seeded(Root), step, world_size=2, settings={"policy": units_of(Block, Skips)})


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_parameter_and_a_unit_used_nowhere(strategy: str) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.ones(4))
            self.spare = Block()

    assert_parity(seeded(Unused), settings={**BLOCKS, "strategy": strategy})


def test_a_unit_entered_whose_output_is_thrown_away() -> None:
    class Wastes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spare = Block(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.spare(x)
            return super().forward(x)

    assert_parity(seeded(Wastes), settings=BLOCKS)


def test_a_parameter_on_a_branch_beside_the_input() -> None:
    """Its gradient can come after all of those between output and input."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.table = nn.Parameter(torch.arange(15.0).reshape(3, 5) / 15)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            # Made before the input was touched, and long on its way.
            branch = self.table.exp().sin().cumsum(0)
            for _ in range(5):
                branch = branch * 0.9
            return y + branch.sum(0)

    class Early(Beside):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            branch = self.table.exp().sin().cumsum(0).sum(0)
            return self.linear(x) + branch

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.late, self.early = Beside(), Early()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.early(self.late(self.first(x)))

    assert_parity(seeded(Root), settings={"policy": units_of(Beside, Early)})


def test_a_cached_computation_on_parameters_outlives_the_unit_s_own_backward() -> None:
    """The second unit's input does not depend on the first's parameters alone."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 5))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, self.weight.square()

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.gate = Gate()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, penalty = self.gate(self.first(x))
            return self.block(x) + penalty

    assert_parity(seeded(Root), settings={"policy": units_of(Block, Gate)})


def test_hooks_of_the_user_on_submodules_see_whole_parameters() -> None:
    model = seeded(Net)
    shapes = {name: tuple(p.shape) for name, p in model.blocks[1].named_parameters()}

    def on_rank(rank: int, world: ThreadedWorld) -> list[str]:
        seen: list[str] = []
        with world.lock:
            mine = seeded(Net)
        block = mine.blocks[1]

        def look(when: str) -> Callable[..., None]:
            def hook(module: nn.Module, *_: Any) -> None:
                assert {name: tuple(p.shape) for name, p in block.named_parameters()} == shapes, when
                torch.testing.assert_close(block.up.weight.detach(), model.blocks[1].up.weight.detach())
                seen.append(when)

            return hook

        block.register_forward_pre_hook(look("before the unit, from before sharding"))
        block.up.register_forward_hook(look("inside"))
        block.up.register_full_backward_hook(lambda *_: seen.append("backward"))
        sharded_copy_of = polyshard.shard

        sharded_copy_of(mine, threaded(world, rank, **BLOCKS))
        block.register_forward_pre_hook(look("before the unit, from after sharding"))
        block.down.register_forward_pre_hook(look("inside, from after sharding"))
        square_step(mine, 0, rank)
        return seen

    for seen in on_ranks(2, on_rank):
        assert seen == [
            "before the unit, from before sharding",
            "before the unit, from after sharding",
            "inside",
            "inside, from after sharding",
            "backward",
        ]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("registered", ["before", "after"])
def test_post_accumulate_hooks_fire_once_a_backward_with_the_reduced_gradient(
    registered: str, world_size: int, strategy: str
) -> None:
    model = seeded(Net)
    settings = {**BLOCKS, "strategy": strategy}

    def on_rank(rank: int, world: ThreadedWorld) -> list[dict[str, list[torch.Tensor]]]:

        seen: dict[str, list[torch.Tensor]] = {}

        def register() -> None:
            for name, parameter in mine.named_parameters():
                seen[name] = []
                parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: seen[name].append(p.grad.detach().clone())
                )

        with world.lock:
            mine = seeded(Net)
        if registered == "before":
            register()
        polyshard.shard(mine, threaded(world, rank, **settings))
        if registered == "after":
            register()
        turns = []
        for turn in range(2):
            square_step(mine, turn, rank)
            turns.append({name: list(values) for name, values in seen.items()})
            for values in seen.values():
                values.clear()
            mine.zero_grad()
        return turns

    reference = train_reference(
        model, square_step, world_size, turns=2, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.0)
    )
    with warns_for(world_size, settings):
        ranks = on_ranks(world_size, on_rank)
    originals = dict(model.named_parameters())
    for turn in range(2):
        for name, original in originals.items():
            fired = [rank[turn][name] for rank in ranks]
            assert all(len(values) <= 1 for values in fired)
            assert any(fired)
            parts = [values[0] if values else torch.empty(0, dtype=torch.float64) for values in fired]
            torch.testing.assert_close(
                whole_of(original, parts), reference.gradients[turn][name], rtol=1e-12, atol=1e-12
            )


def test_a_post_accumulate_hook_may_step_and_drop_the_gradient() -> None:
    """The optimizer in the backward: gradients are gone when the backward ends."""

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(seeded(Net), rank, world, **BLOCKS)

        def update(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

        for parameter in mine.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for turn in range(3):
            square_step(mine, turn, rank)
            assert all(parameter.grad is None for parameter in mine.parameters())
        with polyshard.unsharded(mine):
            return {name: p.detach().clone() for name, p in mine.named_parameters()}

    reference = train_reference(seeded(Net), square_step, 2)
    for whole in on_ranks(2, on_rank):
        torch.testing.assert_close(whole, reference.parameters, rtol=1e-12, atol=1e-12)


class Leaks(nn.Module):
    """Returns its own weight, or a view of it, on request."""

    leaks = "no"

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5)
        self.two = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.two(self.one(x))
        if self.leaks == "weight":
            return y, self.two.weight
        if self.leaks == "view":
            return {"y": y, "row": self.two.weight[1]}
        if self.leaks == "detached":
            return y, self.two.weight.detach().t()
        return y


@pytest.mark.parametrize("leaks", ["weight", "view", "detached"])
@pytest.mark.parametrize("train", [True, False])
def test_a_unit_that_returns_its_own_weight_is_refused_by_name(leaks: str, train: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.unit = Leaks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = self.unit(self.first(x))
            return output if isinstance(output, torch.Tensor) else next(iter(output))

    model = seeded(Root)

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Leaks))
        mine.unit.leaks = leaks
        with torch.set_grad_enabled(train), pytest.raises(UnshardedUseError, match=r"'unit\.two\.weight'") as caught:
            mine(draw(4, 3))
        assert f"rank {rank}" in str(caught.value)
        assert root_of(mine).gathered == ()
        mine.unit.leaks = "no"
        return square_step(mine, 0, rank)

    expected = train_reference(model, square_step, 2, turns=1).observed[0]
    for values, reference in zip(on_ranks(2, on_rank), expected, strict=True):
        torch.testing.assert_close(values, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", [square_step])
@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_any_prefetch_gives_the_same_numbers(step: Step, prefetch: int) -> None:
    assert_parity(seeded(Net), step, settings={**BLOCKS, "forward_prefetch": prefetch, "backward_prefetch": prefetch})


class Plain:
    """An output that is none of Python's own containers."""

    def __init__(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.hidden, self.logits = hidden, logits


class Slotted:
    __slots__ = ("hidden", "logits")

    def __init__(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        self.hidden, self.logits = hidden, logits


@pytest.mark.parametrize("container", [Plain, Slotted, lambda h, o: SimpleNamespace(hidden=h, logits=o)])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_outputs_hidden_in_objects(container: Callable[[torch.Tensor, torch.Tensor], Any], prefetch: int) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        output = model(x)
        loss = output.hidden.square().mean() + output.logits.square().mean()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    model = seeded(lambda: Returns(container, lambda output: (output.hidden, output.logits)))
    settings = {"policy": units_of(Returns.Inner), "backward_prefetch": prefetch}
    assert_parity(model, step, world_size=2, settings=settings)


@pytest.mark.parametrize("train", [True, False])
def test_the_outermost_module_may_not_return_a_kept_unit_s_weight(train: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.unit = Leaks()

        def forward(self, x: torch.Tensor) -> Any:
            return self.unit(self.first(x))

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = sharded_copy(seeded(Root), rank, world, policy=units_of(Leaks), strategy="shard_grad_op")
        mine.unit.leaks = "weight"
        with torch.set_grad_enabled(train), pytest.raises(UnshardedUseError, match=r"'unit\.two\.weight'"):
            mine(draw(4, 3))
        assert root_of(mine).gathered == ()

    on_ranks(2, on_rank)


class Queries(nn.Module):
    """The root's own parameter is what the first unit computes on, and an argument of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5))
        self.scale = nn.Parameter(torch.ones(5))
        self.memory = nn.Linear(3, 5)
        self.one, self.two = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(self.queries)
        return self.two(y * self.scale) + self.one(self.memory(x))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_parameter_of_the_root_as_input_of_a_unit(strategy: str) -> None:
    assert_parity(seeded(Queries), optimizer=adam, settings={**BLOCKS, "strategy": strategy})


def recorder(log: list[torch.Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        log.extend(each.detach().clone() for each in (*inputs, *outputs) if each is not None)

    return hook


@pytest.mark.parametrize("before", [True, False])
def test_full_backward_hooks_on_units_and_root_see_the_right_gradients(before: bool) -> None:
    logs: dict[nn.Module, list[torch.Tensor]] = {}

    def register(model: nn.Module) -> None:
        log = logs.setdefault(model, [])
        for module in (model, model.blocks[0], model.blocks[1].up, model.blocks[2]):
            module.register_full_backward_hook(recorder(log))

    def wrap(model: nn.Module, config: polyshard.ShardConfig) -> nn.Module:
        if before:
            register(model)
        polyshard.shard(model, config)
        if not before:
            register(model)
        return model

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        if model not in logs:
            register(model)
        logs[model].clear()
        return [*square_step(model, turn, rank), *logs[model]]

    assert_parity(seeded(Net), step, world_size=2, wrap=wrap, settings=BLOCKS)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_two_sharded_models_in_one_graph(strategy: str) -> None:
    """A generator trained through a discriminator, and the discriminator on what the generator made."""

    def play(generator: nn.Module, critic: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        fake = generator(draw(4, 3, turn=turn, rank=rank))
        critic.requires_grad_(False)
        first = critic(torch.cat([fake, fake[:, :1]], dim=1)).square().mean()
        first.backward()
        critic.requires_grad_(True)
        with torch.no_grad():
            fake = generator(draw(4, 3, turn=turn + 3, rank=rank))
        second = critic(torch.cat([fake, fake[:, :1]], dim=1)).square().mean()
        third = critic(draw(4, 3, turn=turn, rank=rank)).mean()
        (second - third).backward()
        return [first.detach(), second.detach(), third.detach()]

    models = seeded(Net), seeded(Net, seed=1)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        pair = [sharded_copy(each, rank, world, **BLOCKS, strategy=strategy) for each in models]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in pair]
        seen = []
        for turn in range(3):
            seen += play(pair[0], pair[1], turn, rank)
            assert all(root_of(each).gathered == () for each in pair)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return seen, [p.grad for each in pair for p in each.parameters() if p.grad is not None]

    pairs = [[copy.deepcopy(each) for each in models] for _ in range(2)]
    expected: list[list[torch.Tensor]] = [[], []]
    for turn in range(3):
        for rank, pair in enumerate(pairs):
            expected[rank] += play(pair[0], pair[1], turn, rank)
        for name_index in range(2):
            for one, two in zip(pairs[0][name_index].parameters(), pairs[1][name_index].parameters(), strict=True):
                assert one.grad is not None
                assert two.grad is not None
                mean = (one.grad + two.grad) / 2
                with torch.no_grad():
                    one.sub_(0.1 * mean)
                    two.sub_(0.1 * mean)
                one.grad = two.grad = None
    for (seen, _), wanted in zip(on_ranks(2, on_rank), expected, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=1e-12, atol=1e-12)


def test_gradients_through_two_sharded_models_in_one_backward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        one = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        two = sharded_copy(seeded(Block), rank, world)
        x = draw(4, 3, rank=rank, requires_grad=True)
        loss = two(torch.cat([one(x), x], dim=1)).square().mean()
        loss.backward()
        assert root_of(one).gathered == root_of(two).gathered == ()
        assert x.grad is not None
        assert all(p.grad is not None for each in (one, two) for p in each.parameters() if p.numel())
        return [loss.detach(), x.grad]

    one, two = seeded(Net), seeded(Block)
    for rank, values in enumerate(on_ranks(2, on_rank)):
        x = draw(4, 3, rank=rank, requires_grad=True)
        loss = two(torch.cat([one(x), x], dim=1)).square().mean()
        loss.backward()
        torch.testing.assert_close(values, [loss.detach(), x.grad], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_autocast_around_forward_computes_in_bfloat16_with_float32_shards(strategy: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank).float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            first = model(x)
            second = model(x)
        assert first.dtype == torch.bfloat16
        loss = first.float().square().mean() + second.float().abs().mean()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    # Ranks add float32 gradients in another order than the reference: a few units in the last place.
    assert_parity(seeded(Net).float(), step, world_size=2, settings={**BLOCKS, "strategy": strategy}, tolerance=1e-6)
