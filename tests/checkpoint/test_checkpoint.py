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
from polyshard.errors import ConfigError, PolyshardError, RankMismatchError, StateError
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


@pytest.mark.slow
def test_any_program_reads_whole_tensors_under_ordinary_names(tmp_path: Path) -> None:
    reference = net(0)
    directory = saved(tmp_path, 3)
    assert directory == tmp_path / "step-00000001"
    plain = net(1)
    plain.load_state_dict(checkpoint.read(directory)["model"])
    assert not differing(plain.state_dict(), reference.state_dict())
    found = {name.removeprefix("model."): each for name, each in tensors_in(directory).items() if name[:6] == "model."}
    # A shared parameter is written once and found under all names; buffers that are not persistent are not there.
    assert found.keys() == set(reference.state_dict())
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["aliases"]
    assert manifest["aliases"].keys() | manifest["model"].keys() == set(reference.state_dict())
    assert not manifest["aliases"].keys() & manifest["model"].keys()
    assert torch.equal(found["head.weight"], reference.embed.weight)
    assert torch.equal(found["conv.weight"], reference.conv.weight)


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


def test_a_committed_step_is_not_overwritten_and_old_ones_can_go(tmp_path: Path) -> None:
    def work(model: Odd) -> None:
        first = checkpoint.save(tmp_path, 1, model)
        before = sorted((path.name, path.stat().st_mtime_ns) for path in first.iterdir())
        expected = ConfigError if polyshard_rank(model) == 0 else RankMismatchError
        with pytest.raises(expected, match="step-00000001 is committed already"):
            checkpoint.save(tmp_path, 1, model)
        assert sorted((path.name, path.stat().st_mtime_ns) for path in first.iterdir()) == before
        for step in (2, 3, 4):
            checkpoint.save(tmp_path, step, model, keep=2)
        with pytest.raises(ConfigError, match="keep is 0, and must be 1 or more"):
            checkpoint.save(tmp_path, 5, model, keep=0)

    on_threads(2, work)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["step-00000003", "step-00000004"]


def polyshard_rank(model: nn.Module) -> int:
    return polyshard.report(model).rank


def drop(model: Odd) -> None:
    del model.scale


def widen(model: Odd) -> None:
    model.scale = nn.Parameter(torch.zeros(2).double())


@pytest.mark.parametrize(
    ("change_saved", "change_loading", "message"),
    [
        (drop, lambda model: None, r"has no 'scale' \(rank \d\)"),
        (lambda model: None, drop, r"has 'scale', which the model lacks"),
        (widen, lambda model: None, r"'scale' has shape \(2,\) in the checkpoint .* but \(1,\) in the model"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(
    tmp_path: Path, change_saved: Callable[[Odd], None], change_loading: Callable[[Odd], None], message: str
) -> None:
    def load(model: Odd) -> None:
        before = whole(model)
        with pytest.raises(ConfigError, match=message):
            checkpoint.load(tmp_path / "step-00000001", model)
        assert not differing(whole(model), before)

    on_threads(2, lambda model: checkpoint.save(tmp_path, 1, model), 0, change_saved)
    on_threads(2, load, 1, change_loading)


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

    on_threads(2, work)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"


def test_a_failure_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    def work(model: Odd) -> None:
        optimizer = adamw(model)
        if polyshard_rank(model) == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4))]})
            with pytest.raises(ConfigError, match="is not a parameter of the model"):
                checkpoint.save(tmp_path, 1, model, optimizer)
        else:
            with pytest.raises(RankMismatchError, match="rank 1: ConfigError: Parameter 0 of the optimizer's group 2"):
                checkpoint.save(tmp_path, 1, model, optimizer)

    on_threads(3, work)
    assert checkpoint.latest(tmp_path) is None


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
        with pytest.raises(StateError, match="this Linear is not sharded"):
            checkpoint.save(tmp_path, 2, nn.Linear(1, 1))
        with pytest.raises(StateError, match=r"was given the inner one 'parts\.0'"):
            checkpoint.save(tmp_path, 2, model.parts[0])

    on_threads(2, work)


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_backward_that_failed_is_left_behind(tmp_path: Path, call: str) -> None:
    class StopError(Exception):
        pass

    def work(model: Odd) -> Values:
        optimizer = adamw(model)
        directory = checkpoint.save(tmp_path, 1, model, optimizer)

        def stop(gradient: torch.Tensor) -> None:
            raise StopError

        def stopping(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            if stops:
                output.register_hook(stop)

        stops = True
        model.norm.register_forward_hook(stopping)
        with pytest.raises(StopError):
            train(model, optimizer, 1)
        if call == "save":
            checkpoint.save(tmp_path, 2, model, optimizer)
        else:
            checkpoint.load(directory, model, optimizer)
        stops = False
        optimizer.zero_grad()
        train(model, optimizer, 3)
        return whole(model)

    plain = net(0)
    optimizer = adamw(plain)
    train(plain, optimizer, 3)
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


def test_a_precision_caster_takes_its_state_back(tmp_path: Path) -> None:
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


def _sharded_here(ranks: list[int], seed: int) -> Odd | None:
    group = dist.new_group(ranks)
    return shard(net(seed), group) if dist.get_rank() in ranks else None


def _train_and_save(rank: int, root: Path) -> tuple[Values, Values] | None:
    # Not the first ranks: a rank of the group and a rank of the job are two numbers.
    model = _sharded_here([1, 2], 0)
    if model is None:
        return None
    optimizer = adamw(model)
    train(model, optimizer, 3)
    checkpoint.save(root, 3, model, optimizer, extra={"rank": rank})
    at_save = whole(model)
    train(model, optimizer, 3, first=3)
    return at_save, whole(model)


def _load_and_save(rank: int, root: Path, target: Path) -> tuple[Values, Any]:
    model = _sharded_here([0, 1, 2], 1)
    assert model is not None
    optimizer = adamw(model)
    directory = checkpoint.latest(root)
    assert directory is not None
    extra = checkpoint.load(directory, model, optimizer)
    checkpoint.save(target, 3, model, optimizer)
    return whole(model), extra


def _resume(rank: int, directory: Path) -> Values | None:
    model = _sharded_here([1, 2], 2)
    if model is None:
        return None
    optimizer = adamw(model)
    checkpoint.load(directory, model, optimizer)
    train(model, optimizer, 3, first=3)
    return whole(model)


@pytest.mark.slow
def test_processes_of_a_gloo_group_save_load_and_resume(tmp_path: Path, pool: RankPool) -> None:
    none, first, second = pool.run(_train_and_save, tmp_path)
    assert none is None
    assert first is not None
    assert second is not None
    at_save, at_end = first
    assert not differing(second[1], at_end)
    for loaded, extra in pool.run(_load_and_save, tmp_path, tmp_path / "by three"):
        assert not differing(loaded, at_save)
        assert extra == {"rank": 1}
    for root in (tmp_path, tmp_path / "by three"):
        for resumed in pool.run(_resume, root / "step-00000003")[1:]:
            assert resumed is not None
            assert not differing(resumed, at_end)
    plain = net(3)
    plain.load_state_dict(checkpoint.read(tmp_path / "step-00000003")["model"])
    assert not differing({name: parameter.detach() for name, parameter in plain.named_parameters()}, at_save)


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
