"""In which order optimizer state dicts hold what they hold, and what their settings say afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from polyshard_fsdp import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_parity.optim_models import (
    IGNORED,
    STEPS_AFTER,
    STEPS_BEFORE,
    Reference,
    Settings,
    Sharded,
    assert_same_groups,
    assert_same_parameters,
    assert_same_state,
    quiet,
)
from fsdp_parity.optim_state import mesh_of
from fsdp_parity.ranks import Ranks
from fsdp_parity.subtests import run_subtests


class Reversed(Sharded):
    """A sharded model whose optimizer has its parameters in the opposite order on ranks with odd numbers."""

    def __init__(self, ranks: Ranks, settings: Settings, **resumed: Any) -> None:
        super().__init__(ranks, settings, **resumed)
        if ranks.rank % 2:
            for group in self.optim.param_groups:
                group["params"].reverse()


def _gathered(state: Mapping[str, Mapping[str, Any]], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Whole tensors of a distributed state, gathered one by one in the order in which this rank meets them."""
    whole: dict[str, dict[str, Any]] = {}
    for name, entries in state.items():
        whole[name] = {}
        for key, value in entries.items():
            if not isinstance(value, ShardedTensor):
                whole[name][key] = value
                continue
            shards = value.local_shards()
            parts: list[Any] = [None] * ranks.world_size
            dist.all_gather_object(parts, (name, key, [shard.tensor.cpu() for shard in shards]))
            assert {part[:2] for part in parts} == {(name, key)}
            whole[name][key] = torch.cat([rows for part in parts for rows in part[2]])
    return whole


def order_of_first_rank(ranks: Ranks, kind: StateDictType) -> None:
    """Ranks whose optimizers list parameters in other orders save them in one, with every value under its own name, and
    load them again.
    """

    def case(use_orig_params: bool, grouped: bool) -> None:
        settings = Settings(use_orig_params, optimizer="counting", grouped=grouped)
        reference, sharded = Reference(ranks.device, settings), Reversed(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        config = FullOptimStateDictConfig() if kind is StateDictType.FULL_STATE_DICT else ShardedOptimStateDictConfig()
        saved = sharded.save(kind, config)
        orders: list[Any] = [None] * ranks.world_size
        dist.all_gather_object(orders, list(saved["state"]))
        expected = [name for group in reference.groups() for name in group["params"] if name in reference.state()]
        if not use_orig_params and not grouped:
            # A module has its flat parameter before those of the modules inside.
            expected.sort(key=lambda name: 2 if name.startswith(IGNORED) else "block" in name)
        assert orders == [expected] * ranks.world_size, orders
        whole = saved["state"] if kind is StateDictType.FULL_STATE_DICT else _gathered(saved["state"], ranks)
        assert_same_state(whole, reference.state())
        assert_same_groups(saved["param_groups"], reference.groups())

        fresh = Reversed(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        fresh.load(saved, kind, config)
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        assert_same_state(fresh.full_state()["state"], reference.state())

    with quiet():
        run_subtests({"use_orig_params": [False, True], "grouped": [False, True]}, case)


def entries_keep_their_order(ranks: Ranks) -> None:
    """Saved, loaded and saved again, the entries of each parameter stand in the order of the plain optimizer's."""

    def case(use_orig_params: bool, optimizer: str, kind: StateDictType) -> None:
        settings = Settings(use_orig_params, optimizer=optimizer)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(1)
        sharded.train(1)
        expected = {name: list(entries) for name, entries in reference.state().items()}
        saved = sharded.save(kind)
        assert {name: list(entries) for name, entries in saved["state"].items()} == expected
        sharded.load(saved, kind)
        again = sharded.save(kind)
        assert {name: list(entries) for name, entries in again["state"].items()} == expected
        assert len({*map(tuple, expected.values())}) == 1
        held = {tuple(entries) for entries in sharded.optim.state.values() if entries}
        assert held == {*map(tuple, expected.values())}, held

    kinds = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]
    config = {"use_orig_params": [False, True], "optimizer": ["adam", "counting"], "kind": kinds}
    with quiet():
        run_subtests(config, case)


def settings_tell_of_dtensors(ranks: Ranks) -> None:
    """What ``get_state_dict_type`` says of models with and without a device mesh: once asked, and after state was saved
    from one instance alone.
    """

    def case(meshed: bool, together: bool) -> None:
        sharded = Sharded(ranks, Settings(mesh=mesh_of(ranks) if meshed else None))
        sharded.train(1)
        model, kind = sharded.model, StateDictType.SHARDED_STATE_DICT
        if together:
            FSDP.set_state_dict_type(model, kind)
        else:
            # Each instance has settings of its own then.
            for instance in reversed(FSDP.fsdp_modules(model)):
                instance._state_dict_type = kind
                instance._state_dict_config = ShardedStateDictConfig()
                instance._optim_state_dict_config = ShardedOptimStateDictConfig()
        model.block.state_dict()
        for _ in range(2):
            said = FSDP.get_state_dict_type(model)
            assert said.state_dict_config == ShardedStateDictConfig(_use_dtensor=meshed)
            assert said.optim_state_dict_config == ShardedOptimStateDictConfig(_use_dtensor=meshed)
            saved = FSDP.optim_state_dict(model, sharded.optim)
            assert isinstance(saved["state"]["block.0.weight"]["exp_avg"], DTensor if meshed else ShardedTensor)

    with quiet():
        run_subtests({"meshed": [False, True], "together": [True, False]}, case)
