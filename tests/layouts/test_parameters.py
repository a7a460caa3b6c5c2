"""What users do to parameters, gradients and state dicts means the same under every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, adam, assert_parity, on_ranks, threaded, train_reference, units_of, whole, whole_of
from polyshard.errors import ParameterChangedError, StateError
from polyshard_backends.threaded import ThreadedWorld
from reference_models import LAYOUTS, Frozen, Halves, Mixed, mixed, mixed_step
from torch import nn

EVERY = {**LAYOUTS, "halves": Halves()}
UNITS = units_of(Block, Frozen)
#: A row-major matrix, four dimensions in channels_last, one that is not row-major, a vector, one with tied names, and
#: one of another unit.
CHANGED = ["first.weight", "conv.weight", "turned", "norm.bias", "embed.weight", "blocks.1.down.weight"]

pytestmark = pytest.mark.parametrize("layout", EVERY)


def cut(rank: int, world: ThreadedWorld, layout: str, **settings: Any) -> nn.Module:
    with world.lock:
        mine = mixed()
    return polyshard.shard(mine, threaded(world, rank, **{"policy": UNITS, "layout": EVERY[layout], **settings}))


def changed() -> dict[str, torch.Tensor]:
    """Other whole values, with the strides of the model's."""
    return {name: value.detach() * 2 + 1 for name, value in mixed().named_parameters() if name in CHANGED}


def piece_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of ``value`` that ``parameter`` holds here, in its shape, by ``polyshard.placement`` alone."""
    place = polyshard.placement(parameter)
    assert place.shape == tuple(value.shape)
    if parameter.ndim > 1 and value.ndim > 1:
        row = math.prod(value.shape[1:])
        return value[place.start // row : place.stop // row].clone()
    flat = torch.empty_strided(place.shape, place.stride, dtype=value.dtype).copy_(value)
    return flat.as_strided((value.numel(),), (1,))[place.start : place.stop].clone()


def holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def test_pieces_have_the_shape_that_the_layout_says(layout: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = cut(rank, world, layout)
        for name, parameter in mine.named_parameters():
            if name in CHANGED:
                torch.testing.assert_close(parameter.detach(), piece_of(plain[name], parameter), rtol=0, atol=0)
        return {name: parameter.detach().clone() for name, parameter in mine.named_parameters()}

    plain = {name: value.detach() for name, value in mixed().named_parameters()}
    ranks = on_ranks(3, on_rank)
    for name, value in plain.items():
        assert torch.equal(whole_of(value, [rank[name] for rank in ranks]), value), name
    shown = {name for name, value in plain.items() if ranks[0][name].ndim == value.ndim > 1}
    matrices = {name for name, value in plain.items() if value.ndim == 2} - {"turned", "empty"}
    by_rows = {*matrices, "conv.weight", "empty"}
    assert shown == {"flat": set(), "blocks": set(), "tiles": matrices}.get(layout, by_rows)


@pytest.mark.parametrize("part", ["whole", "piece"])
@pytest.mark.parametrize("by", ["replaced", "data"])
def test_parameters_may_be_replaced_and_given_other_data(by: str, part: str, layout: str) -> None:
    wanted = changed()

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = cut(rank, world, layout)
        before = dict(mine.named_parameters())
        for name, other in wanted.items():
            value = other.clone() if part == "whole" else piece_of(other, before[name])
            if by == "data":
                before[name].data = value
                continue
            module, key = holder(mine, name)
            setattr(module, key, nn.Parameter(value))
            if name == "embed.weight":
                mine.head.weight = mine.embed.weight
        mixed_step(mine, 0, rank)
        assert all(parameter is before[name] for name, parameter in mine.named_parameters())
        return whole(mine)

    for got in on_ranks(3, on_rank):
        for name, other in wanted.items():
            assert torch.equal(got[name], other), name


def test_data_of_another_shape_are_refused(layout: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> str:
        mine = cut(rank, world, layout)
        weight = mine.blocks[0].up.weight
        weight.data = torch.zeros(weight.numel() + 1, dtype=weight.dtype)
        with pytest.raises(ParameterChangedError) as caught:
            mixed_step(mine, 0, rank)
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, on_rank)):
        assert f"'blocks.0.up.weight' on rank {rank}" in message


def test_requires_grad_may_change_between_steps(layout: str) -> None:
    def step(model: nn.Module, turn: int, rank: int) -> list[torch.Tensor]:
        model.first.weight.requires_grad_(turn != 1)
        model.conv.requires_grad_(turn != 2)
        return mixed_step(model, turn, rank)

    settings = {"policy": UNITS, "layout": EVERY[layout]}
    assert_parity(mixed(), step, 3, turns=3, optimizer=adam, settings=settings)


def test_gradients_add_to_those_that_are_there(layout: str) -> None:
    model = mixed()
    expected = train_reference(model, mixed_step, 3, turns=1).gradients[0]

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = cut(rank, world, layout)
        for parameter in mine.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        mixed_step(mine, 0, rank)
        return {name: p.grad.clone() for name, p in mine.named_parameters() if p.grad is not None}

    ranks = on_ranks(3, on_rank)
    for name, original in model.named_parameters():
        if original.requires_grad and original.numel():
            got = whole_of(original, [rank[name] for rank in ranks])
            torch.testing.assert_close(got, expected[name] + 1, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("writeback", [False, True])
def test_whole_parameters_are_written_back_where_that_is_asked_for(writeback: bool, layout: str) -> None:
    plain = {name: value.detach() for name, value in mixed().named_parameters()}

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        mine = cut(rank, world, layout)
        with polyshard.unsharded(mine, writeback=writeback), torch.no_grad():
            for name, parameter in mine.named_parameters():
                assert parameter.shape == plain[name].shape
                assert torch.equal(parameter, plain[name])
                parameter.mul_(3)
        mixed_step(mine, 0, rank)
        return whole(mine)

    factor = 3 if writeback else 1
    for got in on_ranks(3, on_rank):
        for name, value in got.items():
            assert torch.equal(value, plain[name] * factor), name


CLIPS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    "polyshard": lambda model: polyshard.clip_grad_norm_(model, 0.01),
    "torch": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
    "torch, some": lambda model: nn.utils.clip_grad_norm_([model.norm.bias, model.turned], 0.01),
    "norm alone": lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("ranks", [2, 5])
def test_gradients_are_clipped_by_the_norm_of_all_ranks(ranks: int, clip: str, layout: str) -> None:
    model = mixed()
    gradients = train_reference(model, mixed_step, ranks, turns=1).gradients[0]
    chosen = [name for name in gradients if clip != "torch, some" or name in ("norm.bias", "turned")]
    norm = torch.cat([gradients[name].flatten().double() for name in chosen]).norm()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mine = cut(rank, world, layout)
        mixed_step(mine, 0, rank)
        total = CLIPS[clip](mine)
        return total, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mine.named_parameters()}

    found = on_ranks(ranks, on_rank)
    for total, _ in found:
        torch.testing.assert_close(total.double(), norm, rtol=1e-6, atol=0)
    factor = 1.0 if clip == "norm alone" else 0.01 / (norm + 1e-6)
    for name in chosen:
        got = whole_of(model.get_parameter(name), [each[name].detach() for _, each in found])
        torch.testing.assert_close(got, (gradients[name] * factor).to(got.dtype), rtol=1e-6, atol=1e-9)


def test_pieces_are_given_and_taken_and_whole_parameters_loaded(layout: str) -> None:
    plain = {name: value.detach() for name, value in mixed().named_parameters()}

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        mine = cut(rank, world, layout)
        with pytest.raises(StateError, match=rf"sharded \(rank {rank}\)"):
            mine.state_dict()
        pieces = {name: value.clone() for name, value in polyshard.local_state_dict(mine).items()}
        for name, parameter in mine.named_parameters():
            assert pieces[name].shape == parameter.shape
        polyshard.load_local_state_dict(mine, {name: value + 1 for name, value in pieces.items()})
        for name, value in whole(mine).items():
            assert torch.equal(value, plain[name] + 1), name
        # In whatever memory format.
        contiguous = {name: (value * 2).contiguous() for name, value in plain.items()}
        mine.load_state_dict({**contiguous, "head.weight": contiguous["embed.weight"]})
        for name, value in whole(mine).items():
            assert torch.equal(value, plain[name] * 2), name
        with polyshard.unsharded(mine):
            assert {name: value.shape for name, value in mine.state_dict().items() if name in plain} == {
                name: value.shape for name, value in plain.items()
            }
        whole_alone = {name: value for name, value in pieces.items() if value.shape != plain.get(name, value).shape}
        if whole_alone:
            with pytest.raises(StateError, match="Give whole parameters"):
                mine.load_state_dict({**contiguous, **whole_alone}, strict=False)

    on_ranks(3, on_rank)


def test_a_model_from_meta_is_initialised_alike(layout: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock, torch.random.fork_rng(devices=[]):
            made = mixed()
            with torch.device("meta"):
                mine = Mixed().double()
            for name, parameter in mine.named_parameters():
                if name in ("turned", "empty", "narrow"):
                    module, key = holder(mine, name)
                    value = made.get_parameter(name).detach()
                    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                    setattr(module, key, nn.Parameter(meta, requires_grad=parameter.requires_grad))

            def fill(module: nn.Module) -> None:
                names = {each: name for name, each in mine.named_modules()}
                theirs = made.get_submodule(names[module])
                for key, parameter in module._parameters.items():
                    if parameter is not None:
                        parameter.data.copy_(theirs._parameters[key].detach())

            config = threaded(world, rank, policy=UNITS, layout=EVERY[layout], device="cpu", check_ranks=False)
            polyshard.shard(mine, config, initializer=fill)
        return whole(mine)

    plain = {name: value.detach() for name, value in mixed().named_parameters()}
    for got in on_ranks(3, on_rank):
        for name, value in got.items():
            assert torch.equal(value, plain[name]), name
