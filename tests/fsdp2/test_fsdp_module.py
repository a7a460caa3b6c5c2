"""The methods of ``FSDPModule``, and the functions beside ``fully_shard``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

import polyshard
import pytest
import torch
import torch.distributed as dist
from fsdp2_models import (
    OURS,
    PACKAGES,
    WIDTH,
    as_whole,
    averaged,
    batches,
    beside_torch,
    both,
    copied,
    cpu_mesh,
    each_of,
    loss_of,
    make,
    same,
    shard_all,
    train,
    wholes,
)
from polyshard.errors import ParameterChangedError
from polyshard_backends.gloo import GlooCollectives
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint


def forward_methods(rank: int) -> None:
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    expected = make().blocks[0].doubled(x)
    for package in PACKAGES:
        model: Any = shard_all(package, make())
        package.register_fsdp_forward_method(model.blocks[0], "doubled")
        package.register_fsdp_forward_method(nn.Linear(1, 1), "nothing of ours")
        same(model.blocks[0].doubled(x), expected)
        with pytest.raises(ValueError, match="does not have a method"):
            package.register_fsdp_forward_method(model, "encode")


def _unshards(package: ModuleType, asynchronous: bool) -> Any:
    model: Any = shard_all(package, make())
    words, found = next(batches(1)), []
    for _ in range(2):
        block = model.blocks[0]
        handle = block.unshard(async_op=asynchronous)
        assert (handle is None) is not asynchronous
        if handle is not None:
            handle.wait()
        found.append(copied([block.up.weight, block.down.bias, model.blocks[1].up.weight]))
        found.append(model(words))
        block.unshard()
        block.reshard()
        found.append(copied(block.up.weight))
        # The optimizer is made of sharded parameters.
        model.reshard()
        found.append(train(model, 1))
    return found


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_unshard_and_reshard(ranks: KeptRanks, asynchronous: bool) -> None:
    ranks.run(2, beside_torch, _unshards, asynchronous)


class _Chunked(nn.Module):
    """A body, and a head that the loss calls by itself, for a part of the batch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(torch.tanh(self.body(x)))
        return normed


def _in_chunks(model: Any) -> list[float]:
    """Losses of steps as torchtitan makes them."""
    sharded = isinstance(model, OURS.FSDPModule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random, told = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(3):
        hidden = model(torch.randn(4, WIDTH, generator=random, dtype=torch.float64))
        leaf = hidden.detach().requires_grad_()
        if sharded:
            # Both are whole behind the forward, which ran one of them.
            model.norm.unshard()
        for number, part in enumerate(leaf.chunk(2)):
            if sharded:
                model.head.unshard()
                model.head.set_requires_gradient_sync(number == 1)
            loss = model.head(part).square().mean() + nn.functional.linear(part, model.head.weight).mean()
            loss.backward()
            told.append(loss.item())
        hidden.backward(leaf.grad)
        if not sharded:
            averaged(model)
        optimizer.step()
        optimizer.zero_grad()
    return told


def a_loss_in_chunks(rank: int) -> None:
    # FSDP2 of torch 2.11 fails in the backward through the norm.
    torch.manual_seed(0)
    plain: Any = _Chunked().double()
    model = copy.deepcopy(plain)
    OURS.fully_shard(model.body, mesh=cpu_mesh())
    OURS.fully_shard([model.norm, model.head], mesh=cpu_mesh(), reshard_after_forward=False)
    OURS.fully_shard(model, mesh=cpu_mesh())
    same(_in_chunks(model), _in_chunks(plain))
    same(wholes(model), dict(plain.state_dict()), rtol=0, atol=1e-12)


def a_loss_in_chunks_on_one_rank(rank: int) -> None:
    a_loss_in_chunks(rank)


def modules_that_are_whole_already(rank: int) -> None:
    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make(), reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        modules, told = [model, model.blocks[0], model.embedding], []

        def again(*_: object) -> None:
            for module in modules:
                module.unshard()

        for module in model.blocks:
            module.register_forward_pre_hook(again)
            module.register_forward_hook(again)
            module.register_full_backward_pre_hook(again)
        for words in batches(3):
            again()
            loss = loss_of(model, words)
            again()
            model.blocks[0].reshard()
            again()
            loss.backward()
            again()
            model.reshard()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                again()
                told += [loss.item(), loss_of(model, words).item()]
            again()
            model.load_state_dict({name: value * 1.25 for name, value in model.state_dict().items()})
            again()
            model._get_fsdp_state()._lazy_init()
            for module in modules:
                module.reshard()
        return told, wholes(model)

    both(run)


def what_is_done_to_whole_parameters(rank: int) -> None:
    """Each is lost in FSDP2, without a word."""
    model: Any = shard_all(OURS, make())
    expected = wholes(model)
    block, words = model.blocks[0], next(batches(1))
    calls: list[Callable[[], object]] = [block.unshard, block.reshard, lambda: model(words)]
    for call in calls:
        block.unshard()
        block.up.weight = nn.Parameter(torch.ones_like(block.up.weight))
        with pytest.raises(ParameterChangedError, match=r"'blocks.0.up.weight' was replaced while it was whole"):
            call()
        block.reshard()
        same(wholes(model), expected)
    block.unshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, words).backward()
    with pytest.raises(ValueError, match=r"SGD holds .*'blocks.0.norm.weight'.* and behind reshard\(\)"):
        optimizer.step()
    model.zero_grad()
    with polyshard.unsharded(model, writeback=True):
        block.reshard()
        model._get_fsdp_state()._lazy_init()
        model.load_state_dict({name: value * 2 for name, value in expected.items()})
    same(wholes(model), {name: value * 2 for name, value in expected.items()})
    train(model, 1)


def what_is_written_to_whole_parameters(rank: int) -> None:
    """Each is lost in FSDP2, without a word: at the latest behind the next backward."""
    model: Any = shard_all(OURS, make(), reshard_after_forward=False)
    expected = wholes(model)
    block, words = model.blocks[0], next(batches(1))
    loss = loss_of(model, words)
    expected_loss = loss.item()
    refused = pytest.raises(ParameterChangedError, match=r"Whole parameters of 'blocks.0' were written to outside")
    calls: list[Callable[[], object]] = [
        lambda: model(words),
        lambda: model.state_dict(),
        lambda: block.reshard(),
        # A bias is not saved for backward: autograd says nothing.
        lambda: loss.backward(),
    ]
    for call in calls:
        loss = loss_of(model, words)
        with torch.no_grad():
            block.up.bias.add_(1)
        with refused:
            call()
        same(wholes(model), expected)
    block.unshard()
    with torch.no_grad():
        block.up.weight.zero_()
    with refused:
        block.reshard()
    assert loss_of(model, words).item() == expected_loss
    model.reshard()
    for each in model.blocks:
        each.reshard()
    train(model, 1)


class Drops(nn.Module):
    """Layers under checkpoints; a call may go on without what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, drops: bool) -> torch.Tensor:
        def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = layer(x)
            return x * 1.0 if drops else y

        for layer in self.layers:
            x = checkpoint(run, layer, x, use_reentrant=False)
        return x


def what_a_recomputation_gathers_is_no_write(rank: int) -> None:
    torch.manual_seed(0)
    plain, x = Drops().double(), torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    model: Any = copy.deepcopy(plain)
    for layer in (*model.layers, model):
        OURS.fully_shard(layer, mesh=cpu_mesh())
    for each in (plain, model):
        # In the later forward, which is run again first, the layers compute for nobody on one rank.
        sum(each(x, drops).square().mean() for drops in (False, rank == 0)).backward()  # type: ignore[union-attr]
    averaged(plain)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        same(ours.grad.full_tensor(), theirs.grad)


def recovery_from_an_exception(rank: int) -> None:
    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make())

        def fails(*_: object) -> None:
            raise ValueError("of the user")

        hook = model.blocks[1].down.register_forward_hook(fails)
        with pytest.raises(ValueError, match="of the user"):
            model(next(batches(1)))
        hook.remove()
        model.reset_iter_state()
        with contextlib.suppress(RuntimeError):
            model.blocks[0].reset_iter_state()
            raise AssertionError("an inner module has nothing to reset")
        return train(model), wholes(model)

    both(run)


class Chooses(nn.Module):
    """A layer that runs and one that does not; a parameter each for all calls, for some, and for none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.used, self.chosen, self.unused = (nn.Parameter(torch.full((5,), value)) for value in (1.0, 2.0, 3.0))

    def forward(self, x: torch.Tensor, chooses: bool) -> torch.Tensor:
        x = self.layers[0](x) * self.used[:4]
        return x * self.chosen[:4] if chooses else x


def unused_parameters_get_zeros(rank: int) -> None:
    torch.manual_seed(0)
    plain, x = Chooses().double(), torch.ones(2, 4, dtype=torch.float64) + rank
    plain(x, rank == 0).square().sum().backward()
    expected = {}
    for name, parameter in plain.named_parameters():
        expected[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(expected[name])
        expected[name] /= 2
    plain.zero_grad()
    # FSDP2 has the method from torch 2.15 on.
    for package in PACKAGES if hasattr(PACKAGES[0].FSDPModule, "set_reduce_scatter_unused_params") else (OURS,):
        model: Any = copy.deepcopy(plain)
        for layer in model.layers:
            package.fully_shard(layer, mesh=cpu_mesh())
        package.fully_shard(model, mesh=cpu_mesh())
        model.set_reduce_scatter_unused_params(True)
        for turn in (1, 2):
            model(x, rank == 0).square().sum().backward()
            found = {name: each.grad for name, each in model.named_parameters()}
            assert {name for name, each in found.items() if each is None} == {"layers.1.weight", "layers.1.bias"}
            for name, gradient in found.items():
                if gradient is not None:
                    same(gradient.full_tensor(), turn * expected[name])
        model.zero_grad()
        model.set_reduce_scatter_unused_params(False)
        if package is OURS:
            model(x, rank == 0).square().sum().backward()
            unused = {name for name, each in model.named_parameters() if each.grad is None}
            assert unused == {"layers.1.weight", "layers.1.bias", "unused"}


def hints_change_no_number(rank: int) -> None:
    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make())
        blocks = list(model.blocks)
        model.set_modules_to_forward_prefetch(blocks)
        blocks[1].set_modules_to_backward_prefetch([blocks[0]])
        model.set_reshard_after_forward(True)
        model.set_reshard_after_backward(True)
        blocks[0].set_force_sum_reduction_for_comms(True)
        model.embedding.set_unshard_in_backward(False)
        if hasattr(model, "set_reduce_scatter_unused_params"):
            model.set_reduce_scatter_unused_params(True)
        for wrong in (model.set_modules_to_forward_prefetch, model.set_modules_to_backward_prefetch):
            with pytest.raises(ValueError, match="Expects FSDPModule"):
                wrong([nn.Linear(1, 1)])
        with pytest.raises(ValueError, match="should be a bool"):
            model.set_reshard_after_forward(1)
        return train(model), wholes(model)

    both(run)


def _gathers(package: ModuleType, sizes: Sequence[int], step: Callable[[], object]) -> list[int]:
    """In which order ``step`` gathers, as the places in ``sizes`` of what comes of it."""
    found: list[int] = []

    def one(output: torch.Tensor) -> None:
        if output.numel() in sizes:
            found.append(sizes.index(output.numel()))

    # As FSDP2 calls it in torch 2.11, and in 2.13.
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    theirs, alone, many = getattr(dist, name), GlooCollectives.all_gather, GlooCollectives.all_gather_many

    def of_theirs(output_tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        one(output_tensor)
        return theirs(output_tensor, *args, **options)

    def all_gather(self: GlooCollectives, out: torch.Tensor, *args: Any) -> Any:
        one(out)
        return alone(self, out, *args)

    def all_gather_many(self: GlooCollectives, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        one(torch.cat([out for out, _ in pairs]))
        return many(self, pairs)

    patches = (
        [patch.object(GlooCollectives, each.__name__, each) for each in (all_gather, all_gather_many)]
        if package is OURS
        else [patch.object(dist, name, of_theirs)]
    )
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        step()
    return found


def _hinted(package: ModuleType) -> None:
    torch.manual_seed(0)
    layers = [[nn.Linear(4, 2 * width), nn.Linear(2 * width, 4)] for width in (1, 2, 4, 8, 16, 32)]
    blocks: Any = [nn.Sequential(*each).double() for each in layers]
    parts = [blocks[:1], blocks[1:2], blocks[2:3], blocks[3:5], blocks[5:]]
    sizes = [sum(parameter.numel() for block in part for parameter in block.parameters()) for part in parts]
    for part in parts:
        package.fully_shard(part if len(part) > 1 else part[0], mesh=cpu_mesh(), reshard_after_forward=True)
    # Before the root is there, and behind.
    blocks[0].set_modules_to_forward_prefetch([blocks[2], blocks[1]])
    model: Any = package.fully_shard(nn.Sequential(*blocks), mesh=cpu_mesh())
    model.set_modules_to_forward_prefetch([blocks[0]])
    blocks[1].set_modules_to_forward_prefetch([blocks[5]])
    model.set_modules_to_backward_prefetch([blocks[5]])
    blocks[5].set_modules_to_backward_prefetch([blocks[2], blocks[4]])
    blocks[3].set_modules_to_backward_prefetch([blocks[0]])
    x, losses = torch.ones(2, 4, dtype=torch.float64), []

    def forward() -> None:
        losses.append(model(x).sum())

    for _ in range(3):
        # Blocks without hints gather what comes next in the recorded order.
        assert _gathers(package, sizes, forward) == [0, 2, 1, 4, 3]
        assert _gathers(package, sizes, losses.pop().backward) == [4, 2, 3, 0, 1]
    blocks[0].set_modules_to_forward_prefetch([blocks[1]])
    blocks[1].set_modules_to_forward_prefetch([blocks[3]])
    assert _gathers(package, sizes, forward) == [0, 1, 3, 2, 4]
    blocks[1].set_modules_to_forward_prefetch([])
    # Here what is left is one launch.
    assert _gathers(package, sizes, forward) == ([0, 1] if package is OURS else [0, 1, 2, 3, 4])


def hints_say_what_is_gathered_next(rank: int) -> None:
    for package in PACKAGES:
        _hinted(package)


def what_the_engine_decides_and_what_is_refused(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    words = next(batches(1))
    expected = model(words)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_separate_reduce_scatter_group()
    model.set_allocate_memory_from_process_group_for_comm(True)
    model.set_symm_mem_for_comm()
    model.set_reduce_scatter_divide_factor(dist.get_world_size())
    model._set_unshard_async_op(True)
    OURS.share_comm_ctx([model])
    with pytest.raises(TypeError, match="max_input_buffers must be an int"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="positive int"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(ValueError, match="above 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(ValueError, match="FSDPModules"):
        OURS.share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]
    same(model(words), expected)


def whole_parameters_keep_their_memory(rank: int) -> None:
    """As of torch 2.15."""

    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make())
        block, told = model.blocks[0], []
        block.set_keep_unsharded_storage(True)
        block.unshard()
        kept, address = block.up.weight, block.up.weight.data_ptr()
        block.reshard()
        assert kept.untyped_storage().nbytes()
        told += train(model, 2)
        block.unshard()
        assert block.up.weight.data_ptr() == address
        block.reshard()
        model.set_keep_unsharded_storage(True, recurse=False)
        model.set_keep_unsharded_storage(False)
        told += train(model, 1)
        assert not kept.untyped_storage().nbytes()
        return told, wholes(model)

    if hasattr(PACKAGES[0].FSDPModule, "set_keep_unsharded_storage"):
        both(run)
    else:
        run(OURS)


def what_is_kept_is_not_read(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    model.set_keep_unsharded_storage(True)
    loss = loss_of(model, next(batches(1)))
    saved = (model.blocks[1].up.weight * 2).sum()
    model.blocks[1].unshard()
    gathered = (model.blocks[1].up.weight * model.blocks[1].up.weight).sum()
    model.blocks[1].reshard()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gathered.backward()
    loss.backward()
    saved.backward()
    train(model, 1)


class _Event:
    """Stands for an event of a GPU, which this machine may not have."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def event_behind_the_optimizer(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    event = _Event()
    model.set_post_optim_event(event)
    assert event.waited == 1
    train(model, 1)


def parameters_on_some_ranks(rank: int) -> None:
    def run(package: ModuleType) -> Any:
        model: Any = shard_all(package, make(), reshard_after_forward=2)
        told = train(model, 1)
        # Gathered by hand behind a forward, for its backward.
        loss = loss_of(model, next(batches(1)))
        shapes = {tuple(each.device_mesh.shape) for each in model.blocks[1].parameters()}
        # What is kept is not shown.
        assert shapes == ({(4,)} if package is OURS else {(2, 2)})
        model.blocks[1].unshard()
        same(as_whole(model.blocks[1].up.weight).shape, (4 * WIDTH + 1, WIDTH))
        loss.backward()
        model.zero_grad()
        assert {tuple(each.device_mesh.shape) for each in model.blocks[1].parameters()} == {(4,)}
        told += train(model, 1)
        # What is written behind a forward is in what is gathered next.
        loss_of(model, next(batches(1)))
        if package is not OURS:
            # What it shows is no part of the parameters.
            model.blocks[0].reshard()
        with torch.no_grad():
            for each in model.blocks[0].parameters():
                each.mul_(1.25)
        model.blocks[0].unshard()
        loss = loss_of(model, next(batches(1)))
        loss.backward()
        model.zero_grad()
        told += [loss.item(), *train(model, 1)]
        model.set_reshard_after_forward(False)
        told += train(model, 1)
        model.set_reshard_after_forward(True)
        return told + train(model, 1), wholes(model)

    both(run)

    def by_columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.shape[1:] == (WIDTH,) else None

    def run_columns(package: ModuleType) -> Any:
        # FSDP2 fails with a number there.
        settings = {"shard_placement_fn": by_columns, "reshard_after_forward": 2 if package is OURS else True}
        model = shard_all(package, make(), **settings)
        return train(model, 2), wholes(model)

    both(run_columns)


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    forward_methods: 2,
    a_loss_in_chunks: 2,
    a_loss_in_chunks_on_one_rank: 1,
    modules_that_are_whole_already: 2,
    what_is_done_to_whole_parameters: 2,
    what_is_written_to_whole_parameters: 2,
    what_a_recomputation_gathers_is_no_write: 2,
    recovery_from_an_exception: 2,
    unused_parameters_get_zeros: 2,
    hints_change_no_number: 2,
    hints_say_what_is_gathered_next: 2,
    what_the_engine_decides_and_what_is_refused: 2,
    whole_parameters_keep_their_memory: 2,
    what_is_kept_is_not_read: 2,
    event_behind_the_optimizer: 2,
    parameters_on_some_ranks: 4,
}


@pytest.mark.parametrize("body", each_of(BODIES, newer=[recovery_from_an_exception]))
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
