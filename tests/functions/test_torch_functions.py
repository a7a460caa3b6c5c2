"""Torch's functions over parameters of a sharded model, which are torch's ``DTensor``, and inside of ``unsharded``."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import (
    Block,
    Net,
    assert_all_close,
    assert_parity,
    draw,
    on_ranks,
    seeded,
    sharded_copy,
    square_step,
    threaded,
    units_of,
    whole,
)
from polyshard import ShardConfig
from polyshard.errors import AlreadyShardedError, ParameterChangedError, PolyshardError, UnsupportedError
from polyshard_backends.threaded import ThreadedWorld
from polyshard_testing.plugin import group_of_one
from processes import run_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.init import kaiming_uniform_, normal_
from torch.nn.utils import (
    clip_grad_norm_,
    get_total_norm,
    parameters_to_vector,
    parametrizations,
    prune,
    vector_to_parameters,
)

BLOCKS = {"policy": units_of(Block)}

CUT = [
    (2, {"strategy": "full_shard"}),
    (3, {"strategy": "shard_grad_op"}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2}),
]

WHOLE = (2, {"strategy": "no_shard"})

INPUTS = draw(4, 3)


def whole_value(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def refusal(model: nn.Module, call: Callable[[Any], object], kind: type[PolyshardError], rank: int) -> str:
    """What ``call`` is refused with; the model is as before, and goes on training."""
    before = whole(model)
    with pytest.raises(kind) as caught:
        call(model)
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
    expected = seeded(Net)
    expected.load_state_dict(before)
    torch.testing.assert_close(model(INPUTS), expected(INPUTS), rtol=1e-12, atol=1e-12)
    square_step(model, 0, rank)
    assert f"rank {rank}" in str(caught.value)
    return str(caught.value)


def other() -> dict[str, torch.Tensor]:
    return values(seeded(Net, seed=5))


REFUSED: dict[str, tuple[Callable[[Any], object], type[PolyshardError], list[str]]] = {
    "functional_call": (
        lambda model: functional_call(model, other(), (INPUTS,)),
        ParameterChangedError,
        ["'first.weight' was replaced by a plain tensor"],
    ),
    "functional_call of a unit": (
        lambda model: functional_call(model.blocks[1], {"up.bias": torch.ones(7).double()}, (draw(4, 5),)),
        ParameterChangedError,
        ["'blocks.1.up.bias' was replaced by a plain tensor"],
    ),
    "grad of parameters": (
        lambda model: grad(lambda given: functional_call(model, given, (INPUTS,)).sum())(other()),
        ParameterChangedError,
        ["'first.weight' was replaced by a plain tensor"],
    ),
    "grad of inputs": (
        lambda model: grad(lambda x: model(x).sum())(INPUTS),
        UnsupportedError,
        ["torch.func (grad, vjp, jacrev, hessian, nested jvp) called '(root)', a Net that is sharded"],
    ),
    "jacrev of a unit": (
        lambda model: jacrev(model.blocks[1])(draw(4, 5)),
        UnsupportedError,
        ["torch.func (grad, vjp, jacrev, hessian, nested jvp) called 'blocks.1', a Block", "jacfwd"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_plain_parameters_is_refused_outside_of_unsharded(name: str) -> None:
    call, kind, words = REFUSED[name]
    for world_size, settings in (CUT[0], WHOLE):

        def on_rank(rank: int, world: ThreadedWorld, settings: dict[str, Any] = settings) -> str:
            return refusal(sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings), call, kind, rank)

        for message in on_ranks(world_size, on_rank):
            for word in words:
                assert word in message


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    ],
)
def test_what_is_parametrized_or_pruned_before_sharding_trains_as_the_unsharded_model(
    change: Callable[[nn.Module], object],
) -> None:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = nn.Linear(3, 4).double()
            change(module)
        return module

    def trained(module: nn.Module, ranks: list[int]) -> torch.Tensor:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for turn in range(2):
            for rank in ranks:
                (module(draw(4, 3, turn=turn, rank=rank)).square().mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return module.eval()(INPUTS).detach()

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        with world.lock:
            module = make()
        module.eval()
        polyshard.shard(module, threaded(world, rank))
        return trained(module, [rank])

    expected = trained(make().eval(), [0, 1])
    assert_all_close(on_ranks(2, on_rank), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "settings"), [*CUT, WHOLE])
def test_inside_of_unsharded_they_see_the_whole_model(world_size: int, settings: dict[str, Any]) -> None:
    plain, given = seeded(Net), other()

    def calls(model: nn.Module) -> list[Any]:
        def loss(each: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return functional_call(model, each, (x,)).square().sum()

        own = {name: value.detach() for name, value in model.named_parameters()}
        with torch.no_grad():
            seen: list[Any] = [functional_call(model, given, (INPUTS,))]
        seen += [grad(loss)(given, INPUTS), vmap(grad(loss), (None, 0))(own, INPUTS), vmap(model)(INPUTS)]
        seen += [jacrev(model)(INPUTS[:1]), parameters_to_vector(model.parameters()).detach()]
        return seen

    def on_rank(rank: int, world: ThreadedWorld) -> list[Any]:
        model = sharded_copy(plain, rank, world, **BLOCKS, **settings)
        square_step(model, 0, rank)
        model.zero_grad()
        before = whole(model)
        with polyshard.unsharded(model):
            seen = calls(model)
        torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters())
        square_step(model, 0, rank)
        return seen

    expected = calls(seeded(Net))
    assert_all_close(on_ranks(world_size, on_rank), expected)


@pytest.mark.parametrize(("world_size", "settings"), [*CUT, WHOLE])
def test_inside_of_unsharded_what_they_write_is_written_back(world_size: int, settings: dict[str, Any]) -> None:
    vector = parameters_to_vector(seeded(Net, seed=5).parameters()).detach()

    def change(model: Any) -> None:
        vector_to_parameters(vector, model.parameters())
        normal_(model.first.weight, generator=torch.Generator().manual_seed(1))
        nn.init.xavier_uniform_(model.last.weight, generator=torch.Generator().manual_seed(2))
        prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
        prune.remove(model.blocks[0].up, "weight")

    plain = seeded(Net)
    change(plain)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS, **settings)
        before = whole(model)
        with polyshard.unsharded(model):
            vector_to_parameters(vector, model.parameters())
        torch.testing.assert_close(whole(model), before, rtol=0, atol=0)
        with polyshard.unsharded(model, writeback=True):
            change(model)
        square_step(model, 0, rank)
        return whole(model)

    for got in on_ranks(world_size, on_rank):
        torch.testing.assert_close(got, values(plain), rtol=0, atol=0)


def test_a_parameter_that_is_removed_inside_of_unsharded_is_missed_by_the_next_forward() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        up, weight = model.blocks[0].up, model.blocks[0].up.weight
        with polyshard.unsharded(model):
            prune.l1_unstructured(up, "weight", amount=0.5)
        for _ in range(2):
            with pytest.raises(
                ParameterChangedError, match=rf"'blocks.0.up.weight' was removed .*rank {rank}.*parametrizations"
            ):
                model(INPUTS)
        del up.weight_orig, up.weight_mask, up.weight
        up._forward_pre_hooks.clear()
        up.weight = weight
        torch.testing.assert_close(model(INPUTS), seeded(Net)(INPUTS), rtol=1e-12, atol=1e-12)

    on_ranks(2, on_rank)


def test_constants_reach_the_rows_of_each_rank() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        model: Any = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        nn.init.ones_(model.first.weight)
        nn.init.constant_(model.last.weight, 0.5)
        nn.init.zeros_(model.last.bias)
        return whole(model)

    for got in on_ranks(2, on_rank):
        assert torch.equal(got["first.weight"], torch.ones(5, 3).double())
        assert torch.equal(got["last.weight"], torch.full((2, 5), 0.5).double())
        assert not got["last.bias"].any()


def test_buffers_alone_may_be_put_in_for_a_call() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()

    buffers = {"1.running_mean": draw(4), "1.running_var": draw(4).square() + 1}

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(make), rank, world)
        return functional_call(model, dict(buffers), (INPUTS,)).detach()

    expected = functional_call(seeded(make), dict(buffers), (INPUTS,)).detach()
    assert_all_close(on_ranks(2, on_rank), expected)


def test_gradients_of_parameters_come_by_backward_alone() -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        parameters = list(model.parameters())
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(model(INPUTS).sum(), parameters)
        assert not any(
            each is not None for each in torch.autograd.grad(model(INPUTS).sum(), parameters, allow_unused=True)
        )
        square_step(model, 0, rank)

    on_ranks(2, on_rank)


@pytest.mark.parametrize("to_input", [False, True])
def test_a_backward_to_parameters_that_some_ranks_used(to_input: bool) -> None:
    """On the others it comes through nothing of the model, or to the input alone."""

    class Dropping(Net):
        def forward(self, x: torch.Tensor, drops: bool = False) -> torch.Tensor:
            x = self.first(x)
            y = self.blocks[0](x)
            return self.last(x if drops else y)

    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        x = draw(4, 3, turn=turn, rank=rank, requires_grad=True)
        loss = model(x, drops=rank > 0).square().mean()
        weight: Any = model.get_parameter("blocks.0.up.weight")
        polyshard.backward(loss, inputs=[weight, x] if to_input else [weight])
        return [loss.detach()] if x.grad is None else [loss.detach(), x.grad]

    assert_parity(seeded(Dropping), step, settings=BLOCKS)


def test_penalties_of_parameters_count_in_the_loss() -> None:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        penalty = [whole_value(p.square().sum()) for p in model.parameters()]
        return model(draw(4, 3, rank=rank)).square().mean() + 0.1 * torch.stack(penalty).sum()

    plain = seeded(Net)
    for rank in range(2):
        (loss(plain, rank) / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded_copy(seeded(Net), rank, world, **BLOCKS)
        loss(model, rank).backward()
        return whole_value(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))

    for got in on_ranks(2, on_rank):
        torch.testing.assert_close(got, norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_distributed_data_parallel_refuses_a_sharded_model(strategy: Any) -> None:
    fake = {"name": "fake", "world_size": 2}
    inner = polyshard.shard(nn.Linear(4, 2), ShardConfig(collectives=fake, strategy=strategy))
    around = nn.Sequential(inner, nn.Linear(2, 2))
    for model in (inner, around):
        with group_of_one(), pytest.raises(AlreadyShardedError, match=r"DistributedDataParallel got .*Leave it out"):
            nn.parallel.DistributedDataParallel(model)
    inner(torch.ones(1, 4)).sum().backward()
    # Models beside it are theirs.
    with group_of_one():
        nn.parallel.DistributedDataParallel(nn.Linear(4, 2))


def _beside_fsdp2(rank: int, folder: Path) -> None:
    """The same calls of torch's over ``polyshard.shard`` and over torch's ``fully_shard`` leave the same bits."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    theirs = copy.deepcopy(ours)
    polyshard.shard(ours, ShardConfig(policy=units_of(nn.Linear)))
    for module in (*theirs, theirs):
        fully_shard(module)

    def calls(model: Any, path: Path) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        # As every rank does that was given the same seed.
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
            kaiming_uniform_(model[0].weight)
            normal_(model[1].weight, std=0.1)
            model[1].apply(lambda module: nn.init.ones_(module.bias))
        # With gradients torch cannot.
        seen += copy.deepcopy(list(model.parameters()))
        model(torch.full((2, 6), 1.0 + rank)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        seen += [get_total_norm(gradients), get_total_norm(model.parameters())]
        seen += [clip_grad_norm_(model.parameters(), 0.1), *gradients, parameters_to_vector(model[0].parameters())]
        torch.save(model.state_dict(), path)
        seen += torch.load(path, weights_only=False).values()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        changed = {name: value + 1 for name, value in whole.items()}
        set_model_state_dict(model, changed, options=StateDictOptions(full_state_dict=True))
        return list(map(whole_value, [*seen, *whole.values(), *model.parameters()]))

    got, wanted = calls(ours, folder / f"ours{rank}.pt"), calls(theirs, folder / f"theirs{rank}.pt")
    assert len(got) == len(wanted) == 24
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.slow
def test_torchs_functions_do_what_they_do_for_fsdp2(tmp_path: Path) -> None:
    run_processes(2, _beside_fsdp2, tmp_path)


PROGRAM = """
import sys, types
import torch
import torch.distributed.pipelining.schedules as schedules
import torch.utils.checkpoint
from torch import nn

def held():
    functions = [each for each in vars(nn.init).values() if isinstance(each, types.FunctionType)]
    functions += [each for each in vars(nn.utils).values() if isinstance(each, types.FunctionType)]
    functions += [each for each in vars(torch.utils.checkpoint).values() if isinstance(each, types.FunctionType)]
    functions += [each for each in vars(torch.autograd).values() if isinstance(each, types.FunctionType)]
    cells = [[cell.cell_contents for cell in each.__closure__ or ()] for each in functions]
    methods = [dict(vars(each)) for each in (torch.amp.GradScaler, schedules._PipelineSchedule)]
    return functions, [each.__code__ for each in functions], cells, methods, list(sys.meta_path)

before = held()
import polyshard, polyshard.pipelining
fake = {"name": "fake", "world_size": 2}
model = polyshard.shard(nn.Linear(4, 2), polyshard.ShardConfig(collectives=fake))
optimizer = torch.optim.AdamW(model.parameters())
torch.utils.checkpoint.checkpoint(model, torch.ones(1, 4), use_reentrant=False).sum().backward()
optimizer.step()
assert held() == before
"""


@pytest.mark.slow
def test_importing_and_sharding_leave_torchs_functions_as_they_were() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


#: Of a torch whose checkpoints compute again in other frames than those of today.
OTHER_FRAMES = """
import torch
import torch.utils.checkpoint
from torch import nn

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, given):
        ctx.function, ctx.given = function, given
        with torch.no_grad():
            return function(given)

    @staticmethod
    def backward(ctx, gradient):
        given = ctx.given.detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(given).backward(gradient)
        return None, given.grad

torch.utils.checkpoint.checkpoint = lambda function, given, **settings: Again.apply(function, given)
import polyshard
model = nn.Linear(3, 2)
config = polyshard.ShardConfig(collectives="fake", strategy="no_shard")
for shard in (polyshard.shard, polyshard.fully_shard, polyshard.shard):
    try:
        shard(model, config)
    except polyshard.errors.UnsupportedError as error:
        print(error)
# The model is as it was.
model(torch.ones(1, 3)).sum().backward()
assert type(model) is nn.Linear and type(model.weight) is nn.Parameter
assert model.weight.grad.tolist() == [[1.0] * 3] * 2
"""


@pytest.mark.slow
def test_a_torch_whose_checkpoints_cannot_be_seen_is_refused_before_anything_changes() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", OTHER_FRAMES], check=True, timeout=120, capture_output=True, text=True
    )
    words = (
        f"Calls of torch.utils.checkpoint.checkpoint of torch {torch.__version__} are not what polyshard knows of "
        "torch 2.11 to 2.15, so that ranks could not agree on what is computed again. Use one of these, or a newer "
        "polyshard."
    )
    assert ended.stdout.splitlines() == [words] * 3
