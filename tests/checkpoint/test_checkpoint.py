"""Checkpoints: written under one sharding, read under another, by torch alone, and by no mistake."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from checkpoints import tensors_in
from parity import local, on_ranks, units_of, whole
from plain_states import Odd, Part, adamw, differing, odd, train
from polyshard import checkpoint
from polyshard.checkpoint.writing import Writing
from polyshard.errors import ConfigError, ConfigTypeError, PolyshardError, StateError
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.precision import Unchanged
from processes import RankPool
from torch import nn

Values = dict[str, torch.Tensor]


def net(seed: int) -> Odd:
    made = odd(seed).double()
    assert isinstance(made, Odd)
    return made


def shard(model: Odd, collectives: Any, **settings: Any) -> Odd:
    config = polyshard.ShardConfig(collectives=collectives, policy=units_of(Part), check_ranks=False, **settings)
    return polyshard.shard(model, config)


def on_threads(
    world_size: int, work: Callable[[Odd], Any], seed: int = 0, change: Callable[[Odd], None] = lambda model: None
) -> list[Any]:
    """``work(model)`` on every rank of a threaded world, where ``change`` changed the models of ``seed`` before."""

    def body(rank: int, world: ThreadedWorld) -> Any:
        with world.lock:
            model = net(seed)
        change(model)
        return work(shard(model, {"name": "threaded", "world": world, "rank": rank}))

    return on_ranks(world_size, body)


def saved(root: Path, world_size: int = 2) -> Path:
    """A checkpoint of an untrained model and optimizer."""
    return Path(on_threads(world_size, lambda model: checkpoint.save(root, 1, model, adamw(model)))[0])


def test_only_committed_directories_count(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    directory = saved(tmp_path)
    assert json.loads((directory / "COMMITTED").read_text())["world_size"] == 2
    unfinished = tmp_path / "step-00000007"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "step-9").mkdir()
    assert checkpoint.latest(tmp_path) == directory

    def load(model: Odd) -> None:
        with pytest.raises(StateError, match=r"step-00000007 is no complete checkpoint.*'COMMITTED'.*latest\(root"):
            checkpoint.load(unfinished, model)
        checkpoint.save(tmp_path, 7, model)

    on_threads(2, load)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000007.2"
    assert (unfinished / "__0_0.distcp").read_bytes() == b"half"


def polyshard_rank(model: nn.Module) -> int:
    return polyshard.report(model).rank


@pytest.mark.slow
def test_frozen_parameters_may_be_left_out_where_both_sides_say_so(tmp_path: Path) -> None:
    def save(model: Odd) -> tuple[Path, Path, Values]:
        optimizer = adamw(model)
        train(model, optimizer, 2)
        everything = checkpoint.save(tmp_path / "all", 1, model, optimizer)
        return everything, checkpoint.save(tmp_path / "trained", 1, model, optimizer, frozen=False), whole(model)

    everything, directory, trained = on_threads(2, save, seed=0)[0]
    written = tensors_in(directory)
    assert {name for name in net(0).state_dict() if f"model.{name}" not in written} == {"frozen"}

    def load(model: Odd) -> tuple[Values, Values, Values]:
        before, optimizer = whole(model), adamw(model)
        with pytest.raises(ConfigError, match=r"has no 'frozen' \(rank \d\)\. They need no gradient.*frozen=False"):
            checkpoint.load(directory, model, optimizer)
        assert not differing(whole(model), before)
        checkpoint.load(directory, model, optimizer, frozen=False)
        assert optimizer.param_groups[0]["lr"] == 0.01
        loaded = whole(model)
        checkpoint.load(everything, model, frozen=False)
        again = whole(model)
        # What is trained here must be there.
        model.frozen.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"has no 'frozen' \(rank \d\)\. Load it into the model"):
            checkpoint.load(directory, model, frozen=False)
        return before, loaded, again

    for before, loaded, again in on_threads(3, load, seed=1):
        assert not differing(loaded, {**trained, "frozen": before["frozen"]})
        assert not differing(again, trained)


def test_an_optimizer_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    def work(model: Odd) -> None:
        without = checkpoint.save(tmp_path, 1, model)
        with pytest.raises(ConfigError, match="holds no optimizer"):
            checkpoint.load(without, model, adamw(model))
        directory = checkpoint.save(tmp_path, 2, model, adamw(model))
        with pytest.raises(ConfigError, match="has 2 parameter groups, the optimizer 1"):
            checkpoint.load(directory, model, torch.optim.AdamW(model.parameters()))
        swapped = adamw(model)
        swapped.param_groups.reverse()
        with pytest.raises(ConfigError, match=r"Group 0 of the optimizer .* differ in 'conv.bias', 'conv.weight'"):
            checkpoint.load(directory, model, swapped)
        stranger = torch.optim.SGD([nn.Parameter(torch.zeros(4))])
        with pytest.raises(ConfigError, match=r"Parameter 0 of the optimizer's group 0, of shape \(4,\), is not"):
            checkpoint.save(tmp_path, 3, model, stranger)
        odd = adamw(model)
        odd.state[model.conv.weight]["factors"] = torch.zeros(1000)
        with pytest.raises(ConfigError, match=r"state 'factors' of 'conv.weight' has shape \(1000,\)"):
            checkpoint.save(tmp_path, 3, model, odd)
        odd.state[model.conv.weight]["factors"] = lambda: None
        words = r"optimizer\.state\['conv\.weight'\]\['factors'\] is of builtins\.function"
        with pytest.raises(ConfigTypeError, match=words):
            checkpoint.save(tmp_path, 3, model, odd)

    on_threads(2, work)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"


def test_calls_at_the_wrong_place_are_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path)

    def work(model: Odd) -> None:
        refused: list[str] = []

        def inside(*_: Any) -> None:
            for call in (lambda: checkpoint.load(directory, model), lambda: checkpoint.save(tmp_path, 2, model)):
                with pytest.raises(StateError, match="was called inside a forward of the model") as caught:
                    call()
                refused.append(str(caught.value))

        handle = model.norm.register_forward_hook(inside)
        train(model, torch.optim.SGD(model.parameters()), 1)
        handle.remove()
        assert len(refused) == 2
        with polyshard.unsharded(model), pytest.raises(StateError, match=r"inside polyshard.unsharded\(\)"):
            checkpoint.load(directory, model)

    on_threads(2, work)


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_backward_that_failed_is_left_behind(tmp_path: Path, call: str) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError

    def work(model: Odd) -> Values:
        optimizer = adamw(model)
        directory = checkpoint.save(tmp_path, 1, model, optimizer)
        handle = model.norm.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
        with pytest.raises(ArithmeticError):
            train(model, optimizer, 1)
        handle.remove()
        if call == "save":
            checkpoint.save(tmp_path, 2, model, optimizer)
        else:
            checkpoint.load(directory, model, optimizer)
        optimizer.zero_grad()
        train(model, optimizer, 3)
        return whole(model)

    plain = net(0)
    train(plain, adamw(plain), 3)
    for result in on_threads(2, work):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach(), rtol=0, atol=1e-12)


def test_buffers_are_those_of_the_first_rank(tmp_path: Path) -> None:
    def work(model: Odd) -> float:
        mean, unsaved = model.get_buffer("norm.running_mean"), model.get_buffer("unsaved")
        mean.fill_(4 + 10 * polyshard_rank(model))
        directory = checkpoint.save(tmp_path, 1, model)
        mean.zero_()
        unsaved.fill_(7.0)
        checkpoint.load(directory, model)
        assert unsaved.tolist() == [7.0, 7.0]
        return float(mean[0])

    assert on_threads(3, work) == [4.0, 4.0, 4.0]


def test_a_learning_rate_that_is_a_tensor_stays_that_tensor(tmp_path: Path) -> None:
    def work(model: Odd) -> None:
        optimizer = adamw(model)
        rate = torch.tensor(0.25)
        optimizer.param_groups[0]["lr"] = rate
        directory = checkpoint.save(tmp_path, 1, model, optimizer)
        rate.fill_(0.5)
        checkpoint.load(directory, model, optimizer)
        assert optimizer.param_groups[0]["lr"] is rate
        assert float(rate) == 0.25
        fresh = adamw(model)
        checkpoint.load(directory, model, fresh)
        assert float(fresh.param_groups[0]["lr"]) == 0.25

    on_threads(2, work)


class Counting(Unchanged):
    """A precision plugin with something to remember."""

    def __init__(self) -> None:
        self.amax = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"amax": self.amax}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.amax = state["amax"]


def test_a_precision_plugin_takes_its_state_back(tmp_path: Path) -> None:
    one, other = Counting(), Counting()
    choice = {"name": "fake", "rank": 0, "world_size": 2}
    model = shard(net(0), choice, precision=one)
    one.amax = 3.5
    directory = checkpoint.save(tmp_path, 1, model)
    checkpoint.load(directory, shard(net(0), choice, precision=other))
    assert other.amax == 3.5


def test_one_rank_of_a_pretended_world_takes_back_its_own_part_only(tmp_path: Path) -> None:
    model = shard(net(0), {"name": "fake", "rank": 1, "world_size": 4})
    optimizer = adamw(model)
    directory = checkpoint.save(tmp_path, 1, model, optimizer)
    again = shard(net(1), {"name": "fake", "rank": 1, "world_size": 4})
    checkpoint.load(directory, again, adamw(again))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(local(one), local(other))
    stranger = shard(net(1), {"name": "fake", "rank": 2, "world_size": 4})
    with pytest.raises(ConfigError, match=r"has no|one rank of a pretended world saved it"):
        checkpoint.load(directory, stranger)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as ranks:
        yield ranks


def _save_and_resume(rank: int, root: Path) -> tuple[Values, Values, Values] | None:
    """Parameters at the save, after three more steps, and after these in a model that was loaded."""
    # Not the first ranks: a rank of the group and a rank of the job are two numbers.
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = shard(net(0), group)
    optimizer = adamw(model)
    train(model, optimizer, 3)
    directory = checkpoint.save(root, 3, model, optimizer, extra={"rank": rank})
    at_save = whole(model)
    train(model, optimizer, 3, first=3)
    other = shard(net(1), group)
    its = adamw(other)
    assert checkpoint.load(directory, other, its) == {"rank": 1}
    train(other, its, 3, first=3)
    return at_save, whole(model), whole(other)


@pytest.mark.slow
def test_processes_of_a_gloo_group_save_load_and_resume(tmp_path: Path, pool: RankPool) -> None:
    read: dict[str, Any] = {}
    for found in pool.run(_save_and_resume, tmp_path)[1:]:
        assert found is not None
        at_save, at_end, resumed = found
        assert not differing(at_end, resumed)
        read = read or checkpoint.read(tmp_path / "step-00000003")["model"]
        assert not differing({name: read[name] for name in at_save}, at_save)


def _wait_for_a_slow_rank(rank: int, root: Path) -> str:
    # The group's own timeout is 90 seconds.
    model = shard(net(0), {"name": "gloo"}, timeout_s=1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    told = root / "told"
    write = Writing.write

    def slow(self: Writing) -> Any:
        """Writes once a file is there."""
        deadline = time.monotonic() + 50
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return write(self)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Writing, "write", slow)
        try:
            checkpoint.save(root, 1, model, optimizer)
        except PolyshardError as error:
            text = f"{type(error).__name__}: {error}"
            if rank == 0:
                assert not told.exists()
                told.touch()
            return text
    raise AssertionError("the save went through")


@pytest.mark.slow
def test_a_save_waits_as_long_as_the_configuration_says(tmp_path: Path, pool: RankPool) -> None:
    first, *_ = pool.run(_wait_for_a_slow_rank, tmp_path)
    assert first.startswith("CollectiveTimeoutError")
    assert "on rank 0 did not end within 1 s" in first
    assert checkpoint.latest(tmp_path) is None
