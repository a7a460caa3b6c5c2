"""Checkpoints of states in blocks of a few bits: resumed runs equal the unsharded model's to the bit."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity import draw, one_core, seed_all, units_of, whole
from polyshard import checkpoint
from polyshard.errors import ConfigError, PolyshardError
from polyshard.state import StateOptions, get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict
from polyshard_backends.threaded import ThreadedWorld
from processes import KeptRanks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Both packages warn when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[[Any], torch.optim.Optimizer]
BLOCKS = {"name": "blocks", "size": 4096}
SMALLER = {"name": "blocks", "size": 256}
#: Modules with the optimizers of each package.
_MODULES = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
#: Of which each has states of its own form.
_KINDS = ("bitsandbytes.AdamW8bit", "torchao.AdamW8bit", "torchao.AdamW4bit", "torchao.AdamWFp8")


_STEPS = threading.Lock()
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
    package, _, name = kind.partition(".")
    module: ModuleType = pytest.importorskip(_MODULES[package])
    return partial(getattr(module, name), lr=1e-2)


@pytest.fixture
def bitsandbytes() -> ModuleType:
    found: ModuleType = pytest.importorskip("bitsandbytes")
    return found


class Net(nn.Module):
    """Weights of whole blocks, of 2 x 4096 and 7.5 x 4096 elements, and small ones."""

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
        # bitsandbytes' kernels for a CPU cannot run in several threads at once.
        with _STEPS:
            optimizer.step()
        optimizer.zero_grad()


def unsharded(make: Make, turns: range = range(4)) -> Mapping[str, torch.Tensor]:
    """The parameters of the unsharded model after ``turns``."""
    model = Net()
    train(model, make(model.parameters()), turns)
    return dict(model.named_parameters())


def on_ranks(
    number: int,
    layout: Any,
    task: Callable[[nn.Module], Any],
    made: Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> list[Any]:
    """What ``task`` returns of a sharded model on each of ``number`` ranks: a ``Net``, or what ``made`` makes."""
    start = (made or Net)()

    def on_rank(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:
            model = copy.deepcopy(start)
        collectives = {"name": "threaded", "world": world, "rank": rank}
        config = polyshard.ShardConfig(
            collectives=collectives, layout=layout, policy=units_of(nn.Sequential), timeout_s=60.0, **settings
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
    ("kind", "before", "after", "layout"),
    [
        *((kind, 2, 4, BLOCKS) for kind in (*_KINDS, "bitsandbytes.Lion8bit")),
        *((kind, 1, 4, SMALLER) for kind in _KINDS[:3]),
        ("torchao.AdamW4bit", 4, 1, BLOCKS),
    ],
    ids=str,
)
def test_another_number_of_ranks_goes_on_as_the_unsharded_model(
    kind: str, before: int, after: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    make = make_of(kind)
    on_ranks(before, layout, partial(begun, tmp_path, make))
    wanted = unsharded(make)
    # Of one rank, pieces of 2048 elements have blocks that their optimizer would not have begun with.
    for found in on_ranks(after, layout, partial(resumed, tmp_path, make)):
        assert differing(found, wanted) == []


def message_of(task: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        task()
    return str(caught.value)


def refused_at(number: int, layout: Any, folder: Path, make: Make) -> str:
    """What the load on ``number`` ranks says, which changes nothing."""

    def load(model: nn.Module) -> str:
        before, optimizer = whole(model), make(model.parameters())
        message = message_of(lambda: checkpoint.load(checkpoint.latest(folder), model, optimizer))
        assert differing(whole(model), before) == []
        assert not optimizer.state
        return message

    return str(on_ranks(number, layout, load)[0])


def check_same_ranks_alone(make: Make, layout: Any, folder: Path) -> None:
    wanted = on_ranks(2, layout, partial(begun, folder, make))[0]
    for found in on_ranks(2, layout, partial(resumed, folder, make)):
        assert differing(found, wanted) == []
    message = refused_at(1, layout, folder, make)
    assert "has optimizer state" in message
    assert "of 'first.weight' for the pieces [0:5" in message
    assert "and not for this rank's, [0:8192] (rank 0)" in message
    assert "Load it at the number of ranks, and with the layout and strategy, that saved it" in message
    assert "layout={'name': 'blocks', 'size': 4096} resumes at any number of ranks" in message


def test_pieces_in_blocks_beside_small_ones_in_full_precision_resume_at_the_same_ranks(
    make: Make, tmp_path: Path
) -> None:
    # Of 'first.weight' rank 0 has 5120 elements and rank 1 has 3072.
    check_same_ranks_alone(make, SMALLER, tmp_path)


def test_pieces_that_begin_inside_of_blocks_resume_at_the_same_ranks(bitsandbytes: ModuleType, tmp_path: Path) -> None:
    check_same_ranks_alone(partial(bitsandbytes.optim.AdamW8bit, lr=1e-2), "flat", tmp_path)


def test_a_layout_that_cuts_blocks_cannot_take_whole_ones(tmp_path: Path) -> None:
    make = make_of("torchao.AdamW8bit")
    on_ranks(1, BLOCKS, partial(begun, tmp_path, make))
    message = refused_at(4, "flat", tmp_path, make)
    assert "is not made of whole ones" in message
    assert "Shard with layout={'name': 'blocks', 'size': 4096}" in message


def test_states_of_few_bits_and_of_full_precision_are_not_mistaken(bitsandbytes: ModuleType, tmp_path: Path) -> None:
    # Of one class.
    of_8, of_32 = (partial(bitsandbytes.optim.AdamW, lr=1e-2, optim_bits=bits) for bits in (8, 32))
    on_ranks(2, BLOCKS, partial(begun, tmp_path / "8", of_8))
    on_ranks(2, BLOCKS, partial(begun, tmp_path / "32", of_32))
    message = refused_at(2, BLOCKS, tmp_path / "8", of_32)
    assert "was saved by AdamW with states in blocks of 256 elements, and the optimizer keeps them in full" in message
    assert "Make it as it was when it was saved, or load without it" in message
    message = refused_at(2, BLOCKS, tmp_path / "32", of_8)
    assert "was saved by AdamW with states in full precision, and the optimizer keeps them in blocks of 256" in message
    message = refused_at(2, BLOCKS, tmp_path / "8", partial(bitsandbytes.optim.AdamW8bit, lr=1e-2))
    assert "was saved by bitsandbytes.optim.adamw.AdamW, whose state means nothing to" in message

    # A state dict names no class.
    def exchange(model: nn.Module) -> list[str]:
        told = []
        for one, other in ((of_8, of_32), (of_32, of_8)):
            optimizer = one(model.parameters())
            train(model, optimizer, range(1))
            state = get_optimizer_state_dict(model, optimizer)
            optimizer = other(model.parameters())
            told.append(message_of(partial(set_optimizer_state_dict, model, optimizer, state)))
            assert not optimizer.state
        return told

    few, full = on_ranks(2, BLOCKS, exchange)[0]
    assert "has optimizer state of 'first.weight' in blocks of a few bits, and the optimizer has it" in few
    assert "Load it into the optimizer that saved it, over model.parameters(), or load without the optimizer" in few
    assert "has optimizer state of 'first.weight' in full precision, and AdamW keeps that of 4096 elements" in full
    assert "Make the optimizer as it was when it was saved, or load without it" in full


def test_flat_parameters_with_states_in_blocks_are_refused_by_name(bitsandbytes: ModuleType, tmp_path: Path) -> None:
    def save(model: nn.Module) -> str:
        optimizer = bitsandbytes.optim.AdamW8bit(polyshard.flat_parameters(model))
        train(model, optimizer, range(1))
        return message_of(lambda: checkpoint.save(tmp_path, 1, model, optimizer))

    message = on_ranks(2, BLOCKS, save)[0]
    assert "of the flat parameter of unit" in message
    assert "is in blocks (rank 0)" in message
    assert "Give the optimizer model.parameters()" in message


def test_whole_states_go_to_one_process_and_back(make: Make) -> None:
    def save(model: nn.Module) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        optimizer = make(model.parameters())
        train(model, optimizer, range(2))
        return get_optimizer_state_dict(model, optimizer, StateOptions(form="full")), whole(model)

    state, values = on_ranks(4, BLOCKS, save)[3]
    wanted = unsharded(make)

    def load(model: nn.Module) -> dict[str, torch.Tensor]:
        model.load_state_dict(values)
        optimizer = make(model.parameters())
        set_optimizer_state_dict(model, optimizer, state, StateOptions(origin="rank_0"))
        train(model, optimizer, range(2, 4))
        return whole(model)

    assert differing(on_ranks(2, BLOCKS, load)[1], wanted) == []
    model = Net()
    model.load_state_dict(values)
    optimizer = make(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    group = {**state["param_groups"][0], "params": list(range(len(names)))}
    optimizer.load_state_dict({"state": dict(enumerate(map(state["state"].get, names))), "param_groups": [group]})
    train(model, optimizer, range(2, 4))
    assert differing(dict(model.named_parameters()), wanted) == []


def test_pieces_without_a_state_of_the_whole_are_refused_by_name() -> None:
    make = make_of("torchao.AdamW8bit")

    def ask(model: nn.Module) -> str:
        optimizer = make(model.parameters())
        train(model, optimizer, range(1))
        return message_of(lambda: get_optimizer_state_dict(model, optimizer, StateOptions(form="full_on_rank_0")))

    for rank, message in enumerate(on_ranks(2, SMALLER, ask)):
        assert "state of 'first.weight' is in blocks" in message
        assert f"(rank {rank}): there is no state of the whole" in message


def test_replicas_save_their_blocks_once_and_resume_sharded(tmp_path: Path) -> None:
    make = make_of("torchao.AdamW4bit")
    hybrid = {"strategy": "hybrid_shard", "shard_size": 2}
    on_ranks(4, BLOCKS, partial(begun, tmp_path, make), **hybrid)
    for found in on_ranks(2, BLOCKS, partial(resumed, tmp_path, make)):
        assert differing(found, unsharded(make)) == []


def test_torchs_checkpoints_carry_the_tensors_of_a_state(tmp_path: Path) -> None:
    make = make_of("torchao.AdamW4bit")

    def save(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = make(model.parameters())
        train(model, optimizer, range(2))
        one, other = get_state_dict(model, optimizer)
        dcp.save({"model": one, "optimizer": other}, checkpoint_id=tmp_path, no_dist=True)
        return whole(model)

    # Each rank alone would write half of it.
    on_ranks(1, BLOCKS, save)

    def load(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = make(model.parameters())
        checkpoint.load_dcp(tmp_path, model, optimizer)
        train(model, optimizer, range(2, 4))
        return whole(model)

    assert differing(on_ranks(4, BLOCKS, load)[0], unsharded(make)) == []


@pytest.mark.parametrize("kind", ["bitsandbytes.AdamW8bit", "torchao.AdamW8bit"])
def test_full_precision_of_small_pieces_replaces_blocks(kind: str, tmp_path: Path) -> None:
    """Four pieces of 2048 elements go on as they were, where one of 8192 has stepped in blocks before the load."""
    make = make_of(kind)

    def made() -> nn.Module:
        seed_all(0)
        return nn.Linear(64, 128, bias=False)

    wanted = on_ranks(4, SMALLER, partial(begun, tmp_path, make), made)[0]

    def load(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer = make(model.parameters())
        train(model, optimizer, range(1))
        checkpoint.load(checkpoint.latest(tmp_path), model, optimizer)
        train(model, optimizer, range(2, 4))
        return whole(model)

    assert differing(on_ranks(1, SMALLER, load, made)[0], wanted) == []


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
    make = make_of("torchao.AdamW8bit")
    mesh = init_device_mesh("cpu", (4 // parts, parts), mesh_dim_names=("dp", "tp"))
    found, message = [], ""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(action="ignore"):
        for task in (begun, resumed) if parts == 2 else (resumed,):
            model = Parted()
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            polyshard.shard(model, polyshard.ShardConfig(mesh=mesh, shard="dp", layout=BLOCKS))
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
        assert "of 'down.weight' for the pieces [0:64,0:256], [0:64,256:512]" in message
        assert "or tensor parallelism cut its columns" in message
        assert "'up.weight'" not in message
