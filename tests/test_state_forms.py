"""State dicts of a sharded model in every form, against those of a plain model, bit for bit."""

from __future__ import annotations

from typing import Any

import polyshard
import pytest
import torch
from parity import on_ranks, threaded, units_of
from plain_states import Odd, Part, adamw, differing, odd, plain_state
from polyshard import state as states
from polyshard.state import StateOptions
from polyshard_backends.threaded import ThreadedWorld

FULL, FIRST = StateOptions(form="full"), StateOptions(form="full_on_rank_0")
SETTINGS = [
    {"layout": "flat"},
    {"layout": "rows"},
    {"layout": {"name": "blocks", "size": 4, "smallest": 1}},
    {"strategy": "no_shard"},
    {"strategy": "hybrid_shard", "shard_size": 2},
    {"offload": "cpu"},
]
Made = tuple[Odd, torch.optim.Optimizer]


def made(rank: int, world: ThreadedWorld, seed: int, **settings: Any) -> Made:
    with world.lock:
        model = odd(seed)
    polyshard.shard(model, threaded(world, rank, policy=units_of(Part), check_ranks=False, **settings))
    return model, adamw(model)


@pytest.mark.parametrize("origin", ["every_rank", "rank_0"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_a_plain_model_has_goes_in_and_comes_out(settings: dict[str, Any], origin: str) -> None:
    plain = plain_state()
    ranks = 4 if settings.get("strategy") == "hybrid_shard" else 3

    def body(rank: int, world: ThreadedWorld) -> list[Any]:
        model, optimizer = made(rank, world, 1, **settings)
        given = plain if origin == "every_rank" or rank == 0 else {"model": {}, "optimizer": {}}
        states.set_state_dict(
            model,
            optimizer,
            model_state_dict=given["model"],
            optim_state_dict=given["optimizer"],
            options=StateOptions(origin=origin),
        )
        for name, parameter in model.named_parameters():
            place = polyshard.placement(parameter)
            whole = plain["model"][name].as_strided((parameter.numel(),), (1,), place.start)
            assert torch.equal(parameter.detach().as_strided((parameter.numel(),), (1,)), whole)
        return [states.get_state_dict(model, optimizer, options) for options in (FULL, FIRST)]

    for rank, (everywhere, first) in enumerate(on_ranks(ranks, body)):
        for model_state, optim_state in (everywhere, first) if rank == 0 else (everywhere,):
            assert not differing(plain["model"], model_state)
            assert not differing(sorted_groups(plain)["optimizer"], sorted_groups({"optimizer": optim_state})["optimizer"])
        if rank:
            assert first == ({}, {})
