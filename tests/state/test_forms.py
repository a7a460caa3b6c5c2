"""State dicts of a sharded model in every form, against those of a plain model, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import polyshard
import pytest
import torch
from parity import on_ranks, threaded, units_of
from plain_states import Part, adamw, differing, made, odd, plain_state, train
from polyshard import state as states
from polyshard.errors import ConfigError, RankMismatchError, StateError, UnsupportedError
from polyshard.state import StateOptions
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

FULL, FIRST = StateOptions(form="full"), StateOptions(form="full_on_rank_0")
SETTINGS = [
    {},
    {"strategy": "no_shard"},
    {"strategy": "hybrid_shard", "shard_size": 2},
    {"offload": "cpu"},
    {"strategy": "hfsdp", "shard_size": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_a_plain_model_has_goes_in_and_comes_out(settings: dict[str, Any]) -> None:
    plain = plain_state()
    ranks = 4 if "shard_size" in settings else 3

    def body(rank: int, world: ThreadedWorld) -> list[Any]:
        model, optimizer = made(rank, world, 1, **settings)
        states.set_state_dict(model, optimizer, model_state_dict=plain["model"], optim_state_dict=plain["optimizer"])
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach().full_tensor(), plain["model"][name])
        return [states.get_state_dict(model, optimizer, options) for options in (FULL, FIRST)]

    for rank, (everywhere, first) in enumerate(on_ranks(ranks, body)):
        for model_state, optim_state in (everywhere, first) if rank == 0 else (everywhere,):
            assert not differing(plain, {"model": model_state, "optimizer": optim_state})
        if rank:
            assert first == ({}, {})


def test_no_rank_holds_more_than_two_units_whole() -> None:
    """Beside its own shards, and on rank 0 what it asked for."""

    def body(rank: int, world: ThreadedWorld) -> tuple[int, int]:
        with world.lock:
            model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(8)))
        polyshard.shard(model, threaded(world, rank, policy=units_of(nn.Linear), check_ranks=False))
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        largest = Largest()
        with largest:
            held = states.get_state_dict(model, optimizer, FIRST)
        return largest.nbytes, sum(value.numel() * 4 for value in held[0].values())

    # Of 20 rows three ranks have 7 each.
    unit, part, everything = 3 * 147 * 4, 147 * 4, 8 * 420 * 4
    (first, held), *others = on_ranks(3, body)
    assert held == everything
    # Of a unit two: one that arrives, and one in order. Of the optimizer one tensor is whole at a time.
    assert all(most <= 2 * unit + part + 200 and not kept for most, kept in others), (others, unit)
    assert 3 * everything < first <= 3 * everything + 2 * unit + part + 200


class Largest(TorchDispatchMode):
    """The most bytes that tensors made inside took at once."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, int] = {}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and func._schema.name.rpartition("::")[2] in MAKING:
            storage = out.untyped_storage()
            key = storage._cdata
            self._live[key] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, key, None)
            self.nbytes = max(self.nbytes, sum(self._live.values()))
        return out


MAKING = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "clone", "_to_copy", "new_empty")


@pytest.mark.parametrize("of", ["model", "optimizer"])
def test_a_whole_state_that_one_rank_asks_for_is_told_on_all(of: str) -> None:
    def body(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = odd(1)
        polyshard.shard(model, threaded(world, rank, policy=units_of(Part)))
        optimizer = adamw(model)
        train(model, optimizer, 2)
        asks: Callable[[], object] = partial(states.get_model_state_dict, model, FIRST)
        if of == "optimizer":
            asks = partial(states.get_optimizer_state_dict, model, optimizer, FIRST)
        words = f"rank 0: a whole state dict of the {of}.*\n  rank 1: all_gather of"
        with pytest.raises(RankMismatchError, match=words):
            (partial(train, model, optimizer, 1) if rank else asks)()

    on_ranks(2, body)


def test_all_that_is_wrong_is_told_at_once_and_nothing_was_changed() -> None:
    plain = plain_state()
    values = dict(plain["model"])
    del values["norm.bias"]
    values["parts.1.gate"] = torch.zeros(3, 5, 8)
    values["other"] = torch.zeros(2)

    def body(rank: int, world: ThreadedWorld) -> str:
        model, optimizer = made(rank, world, 1)
        before = states.get_model_state_dict(model, FULL)
        with pytest.raises(ConfigError) as caught:
            states.set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=plain["optimizer"])
        # One rank alone was given something else.
        expected = ConfigError if rank == 1 else RankMismatchError
        with pytest.raises(expected, match="'other', which the model lacks"):
            states.set_model_state_dict(model, values if rank == 1 else plain["model"])
        assert not differing(before, states.get_model_state_dict(model, FULL))
        assert not optimizer.state
        found = states.set_model_state_dict(
            model, {name: value for name, value in values.items() if name != "parts.1.gate"}, StateOptions(strict=False)
        )
        assert set(found.missing) == {"norm.bias", "parts.1.gate"}
        assert found.unexpected == ("other",)
        train(model, optimizer, 1)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "has no 'norm.bias'" in text
        assert "has 'other', which the model lacks" in text
        assert "'parts.1.gate' has shape (3, 5, 8) in the state dict" in text
        assert "but (3, 5, 7) in the model" in text


def test_an_optimizer_that_does_not_fit_is_refused() -> None:
    plain = plain_state()
    raw = torch.optim.AdamW(odd().parameters()).state_dict()
    sgd = {
        **plain["optimizer"],
        "param_groups": [{**group, "amsgrad": True} for group in plain["optimizer"]["param_groups"]],
    }
    moments = {**plain["optimizer"], "state": {**plain["optimizer"]["state"]}}
    for name in ("parts.0.gate", "parts.1.gate"):
        moments["state"][name] = {**moments["state"][name], "exp_avg": torch.zeros(4)}

    def body(rank: int, world: ThreadedWorld) -> None:
        model, optimizer = made(rank, world, 1)
        for given, words in (
            (raw, r"by numbers \(0\), as optimizer\.state_dict\(\) has it"),
            (sgd, "'amsgrad' was True and is False"),
            (
                moments,
                r"'exp_avg' of 'parts.0.gate' has shape \(4,\)(.|\n)*'exp_avg' of 'parts.1.gate' has shape \(4,\)",
            ),
            ({"state": {}}, "must have 'state' and 'param_groups'"),
            ({**plain["optimizer"], "param_groups": plain["optimizer"]["param_groups"][:1]}, "has 1 parameter groups"),
        ):
            with pytest.raises(ConfigError, match=words):
                states.set_optimizer_state_dict(model, optimizer, given)
            assert not optimizer.state
        train(model, optimizer, 1)

    on_ranks(2, body)


def test_adapters_alone() -> None:
    plain = plain_state()

    def body(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        model, _ = made(rank, world, 1)
        trained = StateOptions(form="full", frozen=False)
        adapters = states.get_model_state_dict(model, trained)
        assert adapters.keys() == plain["model"].keys() - {"frozen"}
        given = {name: value for name, value in plain["model"].items() if name != "frozen"}
        states.set_model_state_dict(model, given, trained)
        with pytest.raises(ConfigError, match="has no 'frozen'"):
            states.set_model_state_dict(model, given)
        return states.get_model_state_dict(model, FULL)

    for found in on_ranks(2, body):
        assert differing(plain["model"], found) == ["/frozen"]
        assert torch.equal(found["frozen"], odd(1).frozen)


def test_dtensors_of_another_sharding_are_gathered_and_wholes_are_converted() -> None:
    plain = {
        name: value.bfloat16() if value.is_floating_point() else value for name, value in plain_state()["model"].items()
    }

    def body(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        model, _ = made(rank, world, 0)
        for settings in ({}, {"strategy": "no_shard"}):
            other, _ = made(rank, world, 1, **settings)
            states.set_model_state_dict(model, states.get_model_state_dict(other))
            assert not differing(states.get_model_state_dict(model, FULL), odd(1).state_dict())
            states.set_model_state_dict(other, states.get_model_state_dict(made(rank, world, 0)[0]))
            assert not differing(states.get_model_state_dict(other, FULL), odd(0).state_dict())
        states.set_model_state_dict(model, plain)
        return states.get_model_state_dict(model, FULL)

    for found in on_ranks(2, body):
        assert not differing(found, {name: value.to(found[name].dtype) for name, value in plain.items()})


def test_what_cannot_be_had_is_refused() -> None:
    model = polyshard.shard(odd(), polyshard.ShardConfig(collectives={"name": "fake", "world_size": 4}))
    optimizer = adamw(model)
    for options in (FULL, FIRST):
        with pytest.raises(UnsupportedError, match="a pretended world of 4"):
            states.get_state_dict(model, optimizer, options)
    with pytest.raises(ConfigError, match=r"form is 'whole'; give one of 'dtensor', 'full', 'full_on_rank_0'"):
        StateOptions(form="whole")
    with pytest.raises(StateError, match="this Odd is not sharded"):
        states.get_model_state_dict(odd())
    with polyshard.unsharded(model), pytest.raises(StateError, match=r"inside polyshard\.unsharded"):
        states.get_model_state_dict(model)
    with pytest.raises(ConfigError, match="state dict is a list"):
        states.set_model_state_dict(model, [1])  # type: ignore[arg-type]
    train(model, optimizer, 1)


def test_state_of_flat_parameters_is_of_the_models_parameters() -> None:
    """DTensors over the flat memory, and whole tensors: those of an optimizer of the plain model."""

    def body(rank: int, world: ThreadedWorld) -> None:
        model, _ = made(rank, world, 0)
        optimizer = torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-2)
        train(model, optimizer, 2)
        state = states.get_optimizer_state_dict(model, optimizer)["state"]
        whole = states.get_optimizer_state_dict(model, optimizer, FULL)["state"]
        flat = [each.to_local() for its in optimizer.state.values() for each in its.values() if each.ndim]
        memory = {each.untyped_storage().data_ptr() for each in flat}
        assert state.keys() == whole.keys() == {name for name, each in model.named_parameters() if each.requires_grad}
        for name, values in state.items():
            parameter = model.get_parameter(name)
            for key in ("exp_avg", "exp_avg_sq"):
                assert values[key].placements == parameter.placements
                assert values[key].to_local().untyped_storage().data_ptr() in memory
                assert torch.equal(values[key].full_tensor(), whole[name][key])
            assert whole[name]["step"] == 2
        again = torch.optim.AdamW(polyshard.flat_parameters(model), lr=1e-2)
        states.set_optimizer_state_dict(model, again, {**states.get_optimizer_state_dict(model, again), "state": state})
        assert not differing(whole, states.get_optimizer_state_dict(model, again, FULL)["state"])

    on_ranks(3, body)
