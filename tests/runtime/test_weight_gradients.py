"""Large linear layers write their weight gradients into the reduction's input: same numbers, no second copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Step, assert_parity, draw, on_ranks, seeded, sharded_copy, train_reference, units_of, whole
from polyshard.interfaces import PluginContext, Work
from polyshard.nested import iter_tensors
from polyshard.planning import thresholds
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

WIDE = 64


@pytest.fixture(autouse=True)
def small_weights_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "DIRECT_NUMEL", WIDE * WIDE)


def keeping_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


class Large(nn.Module):
    """Two layers over the threshold around a small one."""

    def __init__(
        self,
        tied: bool = False,
        recomputes: bool = False,
        bias: bool = True,
        keeps_products: bool = False,
        borrows: bool = False,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(WIDE, WIDE, bias=bias)
        self.scale = nn.LayerNorm(WIDE)
        self.down = nn.Linear(WIDE, WIDE, bias=bias)
        if tied:
            self.down.weight = self.up.weight
        self.borrows = borrows
        self.recomputes = recomputes or keeps_products
        self.contexts = keeping_products if keeps_products else noop_context_fn

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.scale(self.up(x))))
        if self.borrows:
            # In a graph of its own: the weight has this gradient before its layer computes one.
            x = checkpoint(lambda y: functional.linear(y, self.up.weight), x, use_reentrant=True)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recomputes:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=self.contexts)


class Deep(nn.Module):
    """Inputs of three dimensions, one block used ``times`` times."""

    def __init__(self, times: int = 1, **kind: bool) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDE)
        self.block = Large(**kind)
        self.times = times
        self.last = nn.Linear(WIDE, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).unsqueeze(1)
        for _ in range(self.times):
            x = self.block(x)
        return self.last(x.squeeze(1))


def make(times: int = 1, **kind: bool) -> nn.Module:
    model = seeded(lambda: Deep(times, **kind)).float()
    assert isinstance(model, nn.Module)
    return model


def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
    x = draw(4, 3, turn=turn, rank=rank).float()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach()]


def trained(model: nn.Module, turns: int, microbatches: int = 1, one_step: Step = step) -> dict[str, torch.Tensor]:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = sharded_copy(model, rank, world, policy=units_of(Large))
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        for turn in range(turns):
            for part in range(microbatches - 1):
                with polyshard.no_sync(mine):
                    step(mine, turn + 10 * (part + 1), rank)
            one_step(mine, turn, rank)
            optimizer.step()
            optimizer.zero_grad()
        return whole(mine)

    one, other = on_ranks(2, on_rank)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return one


def reference(model: nn.Module, turns: int, microbatches: int = 1) -> dict[str, torch.Tensor]:
    def every_microbatch(each: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        for part in range(microbatches - 1):
            step(each, turn + 10 * (part + 1), rank)
        return step(each, turn, rank)

    return train_reference(model, every_microbatch, 2, turns=turns).parameters


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"bias": False},
        {"tied": True},
        {"recomputes": True},
        {"keeps_products": True},
        {"borrows": True},
        {"times": 2},
        {"times": 2, "recomputes": True},
    ],
    ids=str,
)
def test_training_equals_the_unsharded_model(kind: dict[str, int]) -> None:
    model = make(**kind)  # type: ignore[arg-type]
    torch.testing.assert_close(trained(model, 3), reference(model, 3), rtol=1e-5, atol=1e-6)


def test_a_recomputation_may_go_on_to_the_end() -> None:
    model = make(recomputes=True)

    def both(each: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        # torch ends recomputations early unless it is told not to.
        with set_checkpoint_early_stop(turn < 2):
            return step(each, turn, rank)

    expected = train_reference(model, both, 2, turns=4).parameters
    torch.testing.assert_close(trained(model, 4, one_step=both), expected, rtol=1e-5, atol=1e-6)


def test_the_first_call_of_a_layer_is_computed_again_as_it_was() -> None:
    """No outer module was called before it."""

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        given = draw(4, WIDE, turn=turn, rank=rank, requires_grad=True)
        loss = checkpoint(model.get_submodule("0"), given, use_reentrant=False).square().mean()
        loss.backward()
        return [loss.detach()]

    layers = seeded(lambda: nn.Sequential(nn.Linear(WIDE, 2 * WIDE)))
    assert_parity(layers, step, 2, turns=2, settings={"policy": "always"})


class Written(TorchDispatchMode):
    """Where products as large as a weight are put: the address of the memory that was given for them, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm) and output.numel() == WIDE * WIDE:
            given = (kwargs or {}).get("out")
            self.to.append(None if given is None else given.untyped_storage().data_ptr())
        return output


class Reduced(ThreadedCollectives):
    """Notes the addresses of what is reduced."""

    addresses: list[int]

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
        self.addresses.append(full.untyped_storage().data_ptr())
        return super().reduce_scatter(out, full, **options)


def test_gradients_are_produced_in_the_reductions_input(monkeypatch: pytest.MonkeyPatch) -> None:
    # As of larger units, which nothing brings together.
    monkeypatch.setattr(thresholds, "SIDE_BY_SIDE_NBYTES", 0)

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[int | None], list[int]]:
        collectives = Reduced(PluginContext("threaded", torch.device("cpu")), world, rank)
        collectives.addresses = []
        with world.lock:
            model = copy.deepcopy(whole)
        # Each unit is reduced by itself.
        config = polyshard.ShardConfig(collectives=collectives, policy=units_of(Large), batch_nbytes=0)
        polyshard.shard(model, config)
        with Written() as written:
            step(model, 0, rank)
        return written.to, collectives.addresses

    whole = make(bias=False)
    for to, reduced in on_ranks(2, on_rank):
        # Of both layers.
        assert len(to) == 2
        assert set(to) <= set(reduced)


def test_other_forwards_of_a_linear_layer_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = make()
    doubled = Doubled(WIDE, WIDE)
    doubled.load_state_dict(model.get_submodule("block.up").state_dict())
    model.get_submodule("block")._modules["up"] = doubled
    torch.testing.assert_close(trained(model, 2), reference(model, 2), rtol=1e-5, atol=1e-6)


class Noted(FakeCollectives):
    """Notes the addresses of what is reduced."""

    addresses: list[int]

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, **options: Any) -> Work:
        self.addresses.append(full.untyped_storage().data_ptr())
        return super().reduce_scatter(out, full, **options)


class Produced(TorchDispatchMode):
    """The addresses of weight gradients that graphs compute, and how many tensors as large as a weight are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.to: list[int] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.polyshard.weight_gradient:
            self.to.append(output.untyped_storage().data_ptr())
        elif any(name in str(func) for name in ("copy", "clone", "cat")):
            self.copies += any(tensor.numel() == WIDE * WIDE for tensor in iter_tensors(output))
        return output


def compiled_steps(blocks: int) -> tuple[int, int, int, int]:
    """Graphs of as many equal blocks, each compiled by itself; weight gradients, those of them in place, and copies.

    Over three steps, the last of which has other sizes.
    """
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        made: Callable[..., Any] = lookup_backend("aot_eager")(graph, inputs)
        return made

    model = nn.Sequential(*(Large(bias=False) for _ in range(blocks)))
    for block in model:
        block.compile(backend=note, fullgraph=True)
    collectives = Noted(PluginContext("fake", torch.device("cpu")), world_size=4)
    collectives.addresses = []
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, policy=units_of(Large), batch_nbytes=0))
    written: list[int] = []
    copies = 0
    for rows in (4, 4, 5):
        output = model(torch.ones(rows, WIDE, requires_grad=True))
        with Produced() as produced:
            output.sum().backward()
        written += produced.to
        copies += produced.copies
    return len(graphs), len(written), sum(each in collectives.addresses for each in written), copies


@pytest.mark.slow
# The compiler looks at .grad of the tensors that a frame takes in, and does not silence this in every version.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# The compiler does that itself with any autograd function that it meets.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_blocks_share_their_graphs_and_write_weight_gradients_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thresholds, "SIDE_BY_SIDE_NBYTES", 0)
    # More blocks than the compiler makes versions of one function before it gives up on it.
    # One graph for all of them, and one more for other sizes.
    assert compiled_steps(10) == (2, 3 * 10 * 2, 3 * 10 * 2, 0)
