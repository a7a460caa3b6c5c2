"""State dicts, streams and whole parameters of tensor subclasses that say themselves how they are gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import polyshard
import pytest
import torch
from checkpoints import tensors_in
from extended_models import IN, OUT, Layer, Pair, Rounded, adamw, seeded, trained
from parity import on_ranks, sharded_copy, units_of, warns_for
from polyshard import checkpoint
from polyshard.errors import ConfigError, ParameterChangedError, StateError, UnsupportedError
from polyshard.state import (
    StateOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.utils._pytree import tree_map_only

FULL = StateOptions(form="full")

UNITS = {"policy": units_of(Layer)}


def parts(model: Any) -> dict[str, torch.Tensor]:
    """The plain tensors of an unsharded model."""
    found = {name: each.detach() for name, each in model.named_parameters()}
    found["layer.weight.high"], found["layer.weight.low"] = model.layer.weight.high, model.layer.weight.low
    del found["layer.weight"]
    # Of one tensor of its own shape and dtype: that has its name.
    found["down.weight"] = model.down.weight.whole
    return found


def alike(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (type(found[name]), found[name].dtype) == (torch.Tensor, value.dtype)
        assert torch.equal(found[name], value), name


#: Ways from a state dict of whole tensors to a sharded model.
WAYS: dict[str, Callable[[nn.Module, dict[str, Any], int], object]] = {
    "set": lambda model, state, rank: set_model_state_dict(model, state),
    "load_state_dict": lambda model, state, rank: model.load_state_dict(state),
    "dtensors": lambda model, state, rank: None,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_whole_state_dicts_have_the_class_and_come_back(way: str) -> None:
    """The unsharded model loads them, and so does a sharded one on any number of ranks, which goes on as this one."""
    source, other = seeded(), seeded(1)

    def saves(rank: int, world: ThreadedWorld) -> Any:
        model = sharded_copy(source, rank, world, **UNITS)
        optimizer = adamw(model)
        trained(model, optimizer)
        sharded = get_model_state_dict(model)
        assert list(sharded)[2:5] == ["layer.weight.high", "layer.weight.low", "layer.bias"]
        assert sharded["layer.weight.high"].shape == (OUT, IN)
        state = get_model_state_dict(model, FULL), get_optimizer_state_dict(model, optimizer, FULL)
        if way == "dtensors":
            again = sharded_copy(other, rank, world, **UNITS)
            set_model_state_dict(again, sharded)
            # Tensors of the optimizer are the parameter's shape, and plain.
            own = get_optimizer_state_dict(model, optimizer)
            assert own["state"]["down.weight"]["exp_avg"].shape == (OUT, OUT)
            state = get_model_state_dict(again, FULL), state[1]
        return *state, trained(model, optimizer)

    state, states, wanted = on_ranks(3, saves)[0]
    assert list(state) == list(source.state_dict())
    assert [type(state[name]) for name in ("layer.weight", "down.weight")] == [Pair, torch.Tensor]
    loaded = copy.deepcopy(other)
    loaded.load_state_dict(state)
    assert loaded.down.weight.whole.ne(source.down.weight.whole).any()  # type: ignore[attr-defined]
    assert torch.equal(loaded.layer.weight.high, source.layer.weight.high)  # type: ignore[attr-defined,arg-type]

    def loads(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded_copy(other, rank, world, **UNITS)
        optimizer = adamw(model)
        WAYS["set" if way == "dtensors" else way](model, state, rank)
        set_optimizer_state_dict(model, optimizer, states)
        return trained(model, optimizer)

    torch.testing.assert_close(on_ranks(2, loads)[1], wanted, rtol=1e-12, atol=0.0)


@pytest.mark.slow
def test_streams_hand_out_plain_tensors_that_can_be_written_back() -> None:
    source, other = seeded(), seeded(1)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model, again = (sharded_copy(each, rank, world, **UNITS) for each in (source, other))
        found: dict[str, torch.Tensor] = {}
        for names, tensors in polyshard.stream(model, bucket_nbytes=300):
            found.update((name, tensor.clone()) for name, tensor in zip(names, tensors, strict=True))
        alike(found, parts(source))
        polyshard.load_stream(again, list(found.items()))
        alike(dict(stream_of(again)), parts(source))
        # The numbers inside of a parameter mean something in their own dtypes.
        cast = dict(stream_of(model, dtype=torch.bfloat16, ranks=[1]))
        kinds = {name: each.dtype for name, each in cast.items() if name.startswith(("layer.weight", "down.weight"))}
        wanted = {"down.weight": torch.bfloat16, "layer.weight.high": torch.int8, "layer.weight.low": torch.float16}
        assert kinds == (wanted if rank == 1 else {})
        only = dict(stream_of(model.layer, names=lambda name: name if name == "weight.low" else None))
        alike(only, {"weight.low": source.layer.weight.low})

    def stream_of(model: nn.Module, **settings: Any) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, tensor.clone())
            for names, tensors in polyshard.stream(model, **settings)
            for name, tensor in zip(names, tensors, strict=True)
        ]

    on_ranks(3, on_rank)


@pytest.mark.parametrize("number", [1, 3])
def test_unsharded_shows_whole_tensors_of_the_class(number: int) -> None:
    source = seeded()

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(source, rank, world, strategy="no_shard" if number == 1 else "full_shard", **UNITS)
        x = torch.ones(1, IN, dtype=torch.float64)
        before, own = model(x), (model.layer.weight, model.down.weight)
        with polyshard.unsharded(model):
            alike(parts(model), parts(source))
            assert torch.equal(model(x), source(x))
            model.down.weight.whole.fill_(3.0)
        assert model.layer.weight is own[0]
        assert model.down.weight is own[1]
        assert torch.equal(model(x), before)
        with polyshard.unsharded(model.layer, writeback=True):
            model.layer.weight.high.fill_(16)
            model.layer.weight.low.zero_()
        with polyshard.unsharded(model):
            assert torch.equal(model.layer.weight.decoded(), torch.ones(OUT, IN, dtype=torch.float64))
            alike({**parts(model), **pair_of(source)}, parts(source))
        with (
            pytest.raises(ParameterChangedError, match=r"'down\.weight' was replaced by Parameter \(7, 7\)"),
            polyshard.unsharded(model, writeback=True),
        ):
            model.down.weight = nn.Parameter(torch.ones(OUT, OUT, dtype=torch.float64))
        assert model.down.weight is own[1]

    def pair_of(model: Any) -> dict[str, torch.Tensor]:
        return {"layer.weight.high": model.layer.weight.high, "layer.weight.low": model.layer.weight.low}

    on_ranks(number, on_rank)


class Turned(Rounded):
    """Without words about what it is made of."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


def test_what_cannot_be_told_is_refused_by_name() -> None:
    source = seeded()
    source.down.weight = nn.Parameter(Turned(source.down.weight.whole))  # type: ignore[arg-type]
    sound = seeded()
    values = parts(sound)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(source, rank, world)
        for call in (
            lambda: get_model_state_dict(model),
            lambda: get_model_state_dict(model, FULL),
            lambda: next(polyshard.stream(model)),
            lambda: polyshard.unsharded(model).__enter__(),
        ):
            with pytest.raises(UnsupportedError, match=r"'down\.weight', a Turned, has no __tensor_flatten__"):
                call()
        assert torch.isfinite(model(torch.ones(1, IN, dtype=torch.float64))).all()
        other: Any = sharded_copy(sound, rank, world)
        plain = {name: torch.ones(each.shape, dtype=torch.float64) for name, each in sound.named_parameters()}
        before = other.layer.weight.to_local().high.clone()
        with pytest.raises(ConfigError, match=r"has 'layer\.weight', which the model lacks"):
            set_model_state_dict(other, plain)
        with pytest.raises(StateError, match=r"'layer\.weight' as Tensor, and the whole parameter is a Pair"):
            other.load_state_dict({"layer.weight": plain["layer.weight"]}, strict=False)
        assert torch.equal(other.layer.weight.to_local().high, before)
        # What it would not know of would be of the values before.
        # Of this rank's tensor: the ranks' threads share the class.
        more = patch.object(other.down.weight._local_tensor, "__tensor_flatten__", lambda: (["whole", "scale"], None))
        with more, pytest.raises(UnsupportedError, match=r"'down\.weight', a Rounded, has scale now, and had not"):
            set_model_state_dict(other, values)

    on_ranks(2, on_rank)


class Shifted(Rounded):
    """Beside the rows a number, which every rank has whole, as NF4's mean of scales."""

    shift: torch.Tensor

    @staticmethod
    def __new__(cls, whole: torch.Tensor, shift: torch.Tensor) -> Shifted:
        shifted = cast("Shifted", Rounded.__new__(cls, whole))
        shifted.shift = shift
        return shifted

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "shift"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> Shifted:
        return Shifted(inner["whole"], inner["shift"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: list[Shifted] = []

        def opened(shifted: Shifted) -> torch.Tensor:
            found.append(shifted)
            return shifted.whole

        args, kwargs = tree_map_only(Shifted, opened, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda each: Shifted(each, found[0].shift.clone()), func(*args, **kwargs))


@pytest.mark.parametrize("number", [1, 3])
def test_a_number_inside_of_a_weight_comes_back_from_a_checkpoint(number: int, tmp_path: Path) -> None:
    def net(shift: float) -> nn.Module:
        linear = nn.Linear(IN, OUT, bias=False).double()
        weight = Shifted(torch.full((OUT, IN), shift, dtype=torch.float64), torch.tensor(shift))
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return nn.Sequential(linear, nn.Linear(OUT, 2).double())

    three, zero, units = net(3.0), net(0.0), units_of(nn.Linear)
    on_ranks(2, lambda rank, world: checkpoint.save(tmp_path, 1, sharded_copy(three, rank, world, policy=units)))

    def loads(rank: int, world: ThreadedWorld) -> tuple[float, float]:
        other = sharded_copy(zero, rank, world, policy=units)
        checkpoint.load(tmp_path / "step-00000001", other)
        weight: Any = get_model_state_dict(other, FULL)["0.weight"]
        return weight.shift.item(), weight.whole.mean().item()

    with warns_for(number):
        assert on_ranks(number, loads) == [(3.0, 3.0)] * number


@pytest.mark.slow
def test_checkpoints_go_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    source, other = seeded(0), seeded(1)

    def saves(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded_copy(source, rank, world, **UNITS)
        optimizer = adamw(model)
        trained(model, optimizer)
        checkpoint.save(tmp_path, 1, model, optimizer)
        return trained(model, optimizer)

    wanted = on_ranks(3, saves)[0]
    directory = tmp_path / "step-00000001"
    written = tensors_in(directory)
    kinds = {name: (each.dtype, tuple(each.shape)) for name, each in written.items() if "layer.weight" in name}
    assert kinds == {
        "model.layer.weight.high": (torch.int8, (OUT, IN)),
        "model.layer.weight.low": (torch.float16, (OUT, IN)),
    }
    assert torch.equal(written["model.layer.weight.high"], source.layer.weight.high)  # type: ignore[arg-type]

    def loads(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded_copy(other, rank, world, **UNITS)
        optimizer = adamw(model)
        checkpoint.load(directory, model, optimizer)
        return trained(model, optimizer)

    for number in (1, 2, 5):
        with warns_for(number):
            for found in on_ranks(number, loads):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


def test_a_checkpoint_of_plain_weights_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """And what is not finite inside of a parameter is found under its name."""
    source, plain = seeded(0), seeded(0)
    plain.layer.weight = nn.Parameter(torch.ones(OUT, IN, dtype=torch.float64), requires_grad=False)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model: Any = sharded_copy(source, rank, world, **UNITS)
        other = sharded_copy(plain, rank, world, **UNITS)
        checkpoint.save(tmp_path, 1, other)
        own = model.layer.weight.to_local()
        before = own.high.clone()
        with pytest.raises(ConfigError, match=r"has no 'layer\.weight\.high', 'layer\.weight\.low'"):
            checkpoint.load(tmp_path / "step-00000001", model)
        assert torch.equal(own.high, before)
        if rank == 1:
            own.low[0, 0] = float("nan")
        checkpoint.save(tmp_path, 2, model)

    with pytest.warns(UserWarning, match=r"infinite or no number: 'layer\.weight\.low'\. Whoever"):
        on_ranks(2, on_rank)
