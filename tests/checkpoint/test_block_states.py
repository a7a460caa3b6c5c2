"""Checkpoints of states in blocks of a few bits: resumed runs equal the unsharded model's to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import draw, one_core, seed_all, units_of, whole
from polyshard import checkpoint
from polyshard.errors import ConfigError, PolyshardError
from polyshard.state import StateOptions, get_optimizer_state_dict, set_optimizer_state_dict
from polyshard_backends.threaded import ThreadedWorld
from processes import KeptRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# The package warns when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[[Any], torch.optim.Optimizer]
#: Optimizers of torchao, each with states of its own form. Others take no DTensors.
_KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
RANKS = KeptRanks()


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its steps, which takes longer than all of them."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(params=_KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return make_of(request.param)


def make_of(kind: str) -> Make:
    return partial(getattr(pytest.importorskip("torchao.optim"), kind), lr=1e-2)


class Net(nn.Module):
    """Weights of 128 rows, of which four have a block of 256, and of 240, of which two have one; and small ones."""

    def __init__(self) -> None:
        super().__init__()
        seed_all(0)
        self.first = nn.Linear(64, 128)
        self.middle = nn.Sequential(nn.Linear(128, 240), nn.Tanh())
        self.last = nn.Linear(240, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range) -> None:
    for turn in turns:
        # The same batch on every rank: the mean of two or four equal gradients is that gradient, to the bit.
        model(draw(16, 64, turn=turn).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unsharded(make: Make, turns: range = range(4)) -> Mapping[str, torch.Tensor]:
    """The parameters of the unsharded model after ``turns``."""
    model = Net()
    train(model, make(model.parameters()), turns)
    return dict(model.named_parameters())


def on_ranks(
    number: int, task: Callable[[nn.Module], Any], made: Callable[[], nn.Module] | None = None, **settings: Any
) -> list[Any]:
    """What ``task`` returns of a sharded model on each of ``number`` ranks: a ``Net``, or what ``made`` makes."""
    start = (made or Net)()

    def on_rank(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:
            model = copy.deepcopy(start)
        collectives = {"name": "threaded", "world": world, "rank": rank}
        config = polyshard.ShardConfig(
            collectives=collectives, policy=units_of(nn.Sequential), timeout_s=60.0, **settings
        )
        return task(polyshard.shard(model, config))

    with one_core():
        return ThreadedWorld(number, timeout=60.0).run(on_rank, timeout=100.0)


def begun(folder: Path, make: Make, model: nn.Module) -> dict[str, torch.Tensor]:
    """Train two steps, save, and train two more."""
    optimizer = make(model.parameters())
    train(model, optimizer, range(2))
    checkpoint.save(folder, 2, model, optimizer)
    train(model, optimizer, range(2, 4))
    return whole(model)


def resumed(folder: Path, make: Make, model: nn.Module) -> dict[str, torch.Tensor]:
    """Load the latest checkpoint, train a step, save, and train another."""
    optimizer = make(model.parameters())
    checkpoint.load(checkpoint.latest(folder), model, optimizer)
    train(model, optimizer, range(2, 3))
    checkpoint.save(folder, 3, model, optimizer)
    train(model, optimizer, range(3, 4))
    return whole(model)


def differing(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize(
    ("kind", "before", "after", "settings"),
    [
        *((kind, 2, 4, {}) for kind in _KINDS),
        *((kind, 1, 4, {}) for kind in _KINDS[:2]),
        ("AdamW4bit", 2, 1, {}),
        # Replicas save their blocks once.
        ("AdamW4bit", 4, 2, {"strategy": "hybrid_shard", "shard_size": 2}),
    ],
    ids=str,
)
def test_another_number_of_ranks_goes_on_as_the_unsharded_model(
    kind: str, before: int, after: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    make = make_of(kind)
    on_ranks(before, partial(begun, tmp_path, make), **settings)
    wanted = unsharded(make)
    # Of four ranks, pieces of 2048 elements have blocks that their optimizer would not have begun with.
    for found in on_ranks(after, partial(resumed, tmp_path, make)):
        assert differing(found, wanted) == []


def message_of(task: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        task()
    return str(caught.value)


def refused_at(number: int, folder: Path, make: Make, made: Callable[[], nn.Module] | None = None) -> str:
    """What the load on ``number`` ranks says, which changes nothing."""

    def load(model: nn.Module) -> str:
        before, optimizer = whole(model), make(model.parameters())
        message = message_of(lambda: checkpoint.load(checkpoint.latest(folder), model, optimizer))
        assert differing(whole(model), before) == []
        assert not optimizer.state
        return message

    return str(on_ranks(number, load, made)[0])


def line(columns: int, rows: int) -> nn.Module:
    seed_all(0)
    return nn.Linear(columns, rows, bias=False)


#: Of 127 rows the first of two ranks has 4096 elements, in blocks, and the second 4032, in full precision.
UNEVEN = partial(line, 64, 127)


def test_pieces_in_blocks_beside_small_ones_in_full_precision_resume_at_the_same_ranks(
    make: Make, tmp_path: Path
) -> None:
    wanted = on_ranks(2, partial(begun, tmp_path, make), UNEVEN)[0]
    for found in on_ranks(2, partial(resumed, tmp_path, make), UNEVEN):
        assert differing(found, wanted) == []
    message = refused_at(1, tmp_path, make, UNEVEN)
    assert "has optimizer state" in message
    assert "of 'weight' for the pieces [0:4" in message
    assert f"and not for this rank's, [0:{64 * 127}] (rank 0)" in message
    assert "Load it at the number of ranks, and with the strategy, that saved it" in message


def test_ranks_that_cut_blocks_cannot_take_whole_ones(tmp_path: Path) -> None:
    make = make_of("AdamW8bit")
    on_ranks(1, partial(begun, tmp_path, make))
    # 43 of 128 rows are 10.75 blocks.
    message = refused_at(3, tmp_path, make)
    assert (
        "of 'first.weight' in blocks of 256 elements, and this rank's piece, [0:2752], is not made of whole" in message
    )
    assert "Load it at a number of ranks that gives each whole blocks" in message


def test_states_of_other_blocks_are_not_mistaken(tmp_path: Path) -> None:
    of_256 = make_of("AdamW8bit")
    of_128 = partial(of_256, block_size=128)
    on_ranks(2, partial(begun, tmp_path, of_256))
    message = refused_at(2, tmp_path, of_128)
    assert "was saved by AdamW8bit with states in blocks of 256 elements, and the optimizer keeps them in bl" in message
    assert "blocks of 128 elements (rank 0). Make it as it was when it was saved, or load without it" in message
    message = refused_at(2, tmp_path, partial(torch.optim.AdamW, lr=1e-2))
    assert "was saved by torchao.optim.adam.AdamW8bit, whose state means nothing to torch.optim.adamw.AdamW" in message

    # A state dict names no class.
    def exchange(model: nn.Module) -> list[str]:
        told = []
        for one, other in ((of_256, of_128), (of_256, torch.optim.AdamW), (torch.optim.AdamW, of_256)):
            optimizer = one(model.parameters())
            train(model, optimizer, range(1))
            state = get_optimizer_state_dict(model, optimizer, StateOptions(form="full"))
            optimizer = other(model.parameters())
            told.append(message_of(partial(set_optimizer_state_dict, model, optimizer, state)))
            assert not optimizer.state
        return told

    for_128, few, full = on_ranks(2, exchange)[0]
    assert "has 32 numbers of 'exp_avg:scale' for 8192 elements of 'first.weight', and the optimizer" in for_128
    assert "the optimizer has blocks of 128 (rank 0). Make the optimizer as it was when it was saved" in for_128
    assert "'decoupled_weight_decay' is missing in the checkpoint" in few
    assert "'decoupled_weight_decay' is missing in the optimizer" in full


def test_flat_parameters_with_states_in_blocks_are_refused_by_name(tmp_path: Path) -> None:
    def save(model: nn.Module) -> str:
        optimizer = make_of("AdamW8bit")(polyshard.flat_parameters(model))
        train(model, optimizer, range(1))
        return message_of(lambda: checkpoint.save(tmp_path, 1, model, optimizer))

    message = on_ranks(2, save, partial(line, 64, 128))[0]
    assert "of the flat parameter of unit" in message
    assert "is in blocks (rank 0)" in message
    assert "Give the optimizer model.parameters()" in message


def test_whole_states_go_to_one_process_and_back(make: Make) -> None:
    def save(model: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        optimizer = make(model.parameters())
        train(model, optimizer, range(2))
        return get_optimizer_state_dict(model, optimizer, StateOptions(form="full")), whole(model)

    state, values = on_ranks(2, save)[1]
    wanted = unsharded(make)

    def load(model: nn.Module) -> dict[str, torch.Tensor]:
        model.load_state_dict(values)
        optimizer = make(model.parameters())
        set_optimizer_state_dict(model, optimizer, state)
        train(model, optimizer, range(2, 4))
        return whole(model)

    assert differing(on_ranks(4, load)[3], wanted) == []
    model = Net()
    model.load_state_dict(values)
    optimizer = make(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    group = {**state["param_groups"][0], "params": list(range(len(names)))}
    optimizer.load_state_dict({"state": dict(enumerate(map(state["state"].get, names))), "param_groups": [group]})
    train(model, optimizer, range(2, 4))
    assert differing(dict(model.named_parameters()), wanted) == []


def test_pieces_without_a_state_of_the_whole_are_refused_by_name() -> None:
    make = make_of("AdamW8bit")

    def ask(model: nn.Module) -> str:
        optimizer = make(model.parameters())
        train(model, optimizer, range(1))
        return message_of(lambda: get_optimizer_state_dict(model, optimizer, StateOptions(form="full_on_rank_0")))

    for rank, message in enumerate(on_ranks(2, ask, UNEVEN)):
        assert "state of 'weight' is in blocks" in message
        assert f"(rank {rank}): there is no state of the whole" in message


def test_full_precision_of_small_pieces_replaces_blocks(tmp_path: Path) -> None:
    """Four pieces of 2048 elements go on as they were, where one of 8192 has stepped in blocks before the load."""
    make = make_of("AdamW8bit")
    made = partial(line, 64, 128)
    wanted = on_ranks(4, partial(begun, tmp_path, make), made)[0]

    def load(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = make(model.parameters())
        train(model, optimizer, range(1))
        checkpoint.load(checkpoint.latest(tmp_path), model, optimizer)
        train(model, optimizer, range(2, 4))
        return whole(model)

    assert differing(on_ranks(1, load, made)[0], wanted) == []


class Parted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        seed_all(0)
        self.up = nn.Linear(64, 512, bias=False)
        self.down = nn.Linear(512, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def over_parts(rank: int, folder: Path, parts: int) -> tuple[str, list[str]]:
    """What a load at ``parts`` ranks of tensor parallelism says, and where it goes on otherwise than at the save."""
    make = make_of("AdamW8bit")
    mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("dp", "tp"))
    found, message = [], ""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore"):
        for task in (begun, resumed) if parts == 2 else (resumed,):
            model = Parted()
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            polyshard.shard(model, polyshard.ShardConfig(mesh=mesh, shard="dp"))
            try:
                found.append(task(folder, make, model))
            except PolyshardError as error:
                message = str(error)
            polyshard.close(model)
    return message, differing(found[1], found[0]) if len(found) == 2 else []


@pytest.mark.slow
def test_columns_of_tensor_parallelism_resume_at_the_same_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    assert RANKS.run(4, over_parts, tmp_path, 2) == [("", [])] * 4
    for message, _ in RANKS.run(4, over_parts, tmp_path, 1):
        # Rows are whole blocks, which any rank takes.
        assert "of 'down.weight' for the pieces [0:32,0:256], [0:32,256:512], [32:64,0:256]" in message
        assert "or tensor parallelism cut its columns" in message
        assert "'up.weight'" not in message
