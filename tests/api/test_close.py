"""What sharding holds beside parameters is reused by the next model, and released by ``polyshard.close``."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
from parity import local
from polyshard import ShardConfig, hookimpl
from polyshard.errors import RankMismatchError, StateError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from processes import KeptRanks, run_processes
from torch import nn

WORLD = 4
RANKS = KeptRanks()


HYBRID: dict[str, Any] = {"strategy": "hybrid_shard", "shard_size": 2}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def train(model: nn.Module) -> None:
    model(torch.ones(2, 6)).sum().backward()


def held() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def first_use() -> None:
    """What a process opens once for good: the default group's connections among it."""
    polyshard.close(polyshard.shard(net(), ShardConfig(**HYBRID)))
    dist.barrier()
    gc.collect()


def many_models(rank: int, way: str, cycles: int) -> list[tuple[int, int]]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    counts = []
    for _ in range(cycles):
        model = net()
        config = ShardConfig(policy={"name": "module_class", "classes": nn.Linear}, **HYBRID)
        if way == "composed":
            config = ShardConfig(**HYBRID)
            for layer in (model[0], model[2]):
                polyshard.fully_shard(layer, config)
            polyshard.fully_shard(model, config)
        else:
            polyshard.shard(model, config)
        train(model)
        if way == "closed":
            polyshard.close(model)
        del model
        if way != "collected late":
            gc.collect()
        dist.barrier()
        counts.append(held())
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(("way", "cycles"), [("deleted", 5), ("collected late", 8), ("closed", 5), ("composed", 5)])
def test_threads_and_descriptors_stay_as_many(way: str, cycles: int) -> None:
    for counts in RANKS.run(WORLD, many_models, way, cycles, timeout=110.0):
        # The first models make the groups, and the pools of threads that compute.
        assert set(counts[3:]) == {counts[3]}


def others_live_on(rank: int) -> int:
    """Closing one of several models over the same groups leaves the others theirs."""
    first_use()
    before = held()[1]
    models = [polyshard.shard(net(), ShardConfig(**HYBRID)) for _ in range(3)]
    for model in models:
        train(model)
    for index, model in enumerate(models):
        polyshard.close(model)
        for other in models[index + 1 :]:
            other.zero_grad()
            train(other)
            with polyshard.unsharded(other):
                torch.testing.assert_close(other[0].weight.detach(), net()[0].weight.detach())
    dist.barrier()
    again = polyshard.shard(net(), ShardConfig(**HYBRID))
    train(again)
    polyshard.close(again)
    return held()[1] - before


@pytest.mark.slow
def test_models_over_the_same_groups_are_closed_one_by_one() -> None:
    # The group that the user made is the user's, and goes on.
    assert RANKS.run(WORLD, others_live_on) == [0] * WORLD


def fails_to_shard(rank: int, moment: str) -> int:
    """A model that could not be sharded on one rank leaves no group behind, on any."""
    first_use()
    before = held()[1]
    with torch.device("meta"):
        model = net()

    def initializer(module: nn.Module) -> None:
        if rank == 1 and moment == "before the cut":
            raise ValueError("no values")
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    config = ShardConfig(listeners=[RaisesBehind(rank == 1)] if moment == "behind it" else (), **HYBRID)
    with pytest.raises(ValueError if rank == 1 else RankMismatchError, match="no values"):
        polyshard.shard(model, config, initializer=initializer)
    dist.barrier()
    return held()[1] - before


class RaisesBehind:
    api_version = 1

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    @hookimpl
    def after_shard(self) -> None:
        if self.raises:
            raise ValueError("no values")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the cut", "behind it"])
def test_a_model_that_could_not_be_sharded_leaves_no_group(moment: str) -> None:
    assert RANKS.run(WORLD, fails_to_shard, moment) == [0] * WORLD


def a_world_after_another(rank: int, folder: str) -> None:
    for turn in range(2):
        model = polyshard.shard(net(), ShardConfig(**HYBRID))
        train(model)
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store{turn}", WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        # Its groups went with their world.
        polyshard.close(model)


@pytest.mark.slow
def test_groups_of_a_world_that_was_destroyed_are_not_used_again(tmp_path: Path) -> None:
    run_processes(WORLD, a_world_after_another, str(tmp_path))


# A closed model.


def fake(**settings: Any) -> ShardConfig:
    return ShardConfig(collectives={"name": "fake", "world_size": 4}, policy="always", **settings)


CALLS = {
    "forward": lambda model: model(torch.ones(2, 6)),
    "inner forward": lambda model: model[0](torch.ones(2, 6)),
    "no_sync()": lambda model: polyshard.no_sync(model).__enter__(),
    "no_all_reduce()": lambda model: polyshard.no_all_reduce(model).__enter__(),
    "clip_grad_norm_()": lambda model: polyshard.clip_grad_norm_(model, 1.0),
    "token_divisor()": lambda model: polyshard.token_divisor(model, 1),
    "agree_on_use()": lambda model: polyshard.agree_on_use(model, {}),
    "unsharded()": lambda model: polyshard.unsharded(model).__enter__(),
    "flat_parameters()": polyshard.flat_parameters,
    "report()": polyshard.report,
    "CapturedStep()": lambda model: polyshard.CapturedStep(lambda x: model(x), model=model),
}


@pytest.mark.parametrize("call", [name for name in CALLS if name != "CapturedStep()"])
def test_a_closed_model_is_refused_by_name(call: str) -> None:
    model = polyshard.shard(net(), fake())
    train(model)
    polyshard.close(model)
    for _ in range(2):
        with pytest.raises(StateError, match=r"polyshard\.close.*rank 0") as caught:
            CALLS[call](model)
        if call.endswith("()"):
            assert call in str(caught.value)


def test_a_backward_behind_the_close_is_refused() -> None:
    model = polyshard.shard(net(), fake())
    loss = model(torch.ones(2, 6)).sum()
    polyshard.close(model)
    with pytest.raises(StateError, match=r"polyshard\.close"):
        loss.backward()


def test_closing_keeps_shards_and_gradients_and_may_be_repeated() -> None:
    model = polyshard.shard(net(), fake())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model)
    before = {name: local(value).clone() for name, value in model.state_dict().items()}
    polyshard.close(model)
    polyshard.close(model)
    for name, value in model.state_dict().items():
        assert torch.equal(local(value), before[name])
    gradient = local(model[0].weight.grad).clone()
    optimizer.step()
    assert torch.equal(local(model[0].weight), before["0.weight"] - 0.5 * gradient)


def live_nbytes() -> int:
    """Bytes of every tensor that the collector of garbage knows, memory that several share counted once."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_closing_gives_up_what_is_gathered() -> None:
    model = polyshard.shard(net(), fake(reshard_after_forward=False))
    model(torch.ones(2, 6))
    loss = model(torch.ones(2, 6)).sum()
    gathered = live_nbytes()
    polyshard.close(model)
    # Two layers of 6 rows of 6 fp32 elements and 6 of the bias, of which four ranks have two each.
    assert gathered - live_nbytes() >= 2 * (8 * 6 + 8) * 4
    del loss


def test_closing_inside_a_step_is_refused() -> None:
    model = polyshard.shard(net(), fake())
    model[1].register_forward_hook(lambda *_: polyshard.close(model))
    with pytest.raises(StateError, match=r"close\(\).*forward"):
        model(torch.ones(2, 6))
    with polyshard.unsharded(model), pytest.raises(StateError, match=r"close\(\).*unsharded"):
        polyshard.close(model)


class Counted(FakeCollectives):
    """Tells how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_collectives_that_the_user_made_stay_the_users() -> None:
    mine = Counted(PluginContext("mine", torch.device("cpu")), 0, 4)
    model = polyshard.shard(net(), ShardConfig(collectives=mine))
    polyshard.close(model)
    assert mine.closed == 0


def test_the_wrapper_closes() -> None:
    model = polyshard.FullyShardedDataParallel(net(), fake())
    model.close()
    with pytest.raises(StateError, match=r"polyshard\.close"):
        model(torch.ones(2, 6))


def keys_of_agreements(rank: int) -> list[int]:
    store = dist.HashStore()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    counts = []
    for _ in range(5):
        with pytest.warns(UserWarning, match="world size is 1"):
            polyshard.shard(net(), ShardConfig())
        counts.append(store.num_keys())
    return counts


@pytest.mark.slow
def test_the_store_does_not_fill_with_former_agreements() -> None:
    counts = run_processes(1, keys_of_agreements)[0]
    assert counts[1:] == [counts[1]] * 4


def destroyed_in_between(rank: int) -> list[float]:
    losses = []
    for _ in range(3):
        model = polyshard.shard(net(), ShardConfig(policy={"name": "module_class", "classes": nn.Linear}, **HYBRID))
        known = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}
        train(model)
        losses.append(float(model(torch.ones(2, 6)).detach().sum()))
        del model
        gc.collect()
        for group in sorted(known, key=lambda each: each.group_name):
            dist.destroy_process_group(group)
    return losses


@pytest.mark.slow
def test_a_program_may_destroy_the_groups_of_models_that_are_gone() -> None:
    with torch.random.fork_rng():
        expected = float(net()(torch.ones(2, 6)).detach().sum())
    for losses in run_processes(WORLD, destroyed_in_between):
        assert losses == pytest.approx([expected] * 3, rel=1e-6)
