"""What cannot be captured or replayed is refused: by name, before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import Block, Net, draw, local, seeded, units_of, whole
from polyshard import CapturedStep, CaptureFallback, CaptureMode
from polyshard.errors import CaptureError, ConfigError, ConfigTypeError, StateError
from polyshard.interfaces import PrecisionCapabilities, PrecisionPlugin, UnitDtypes, UnitSpec
from refusal import Silent
from rerun import Pretended, Rerunning, alone, captured, momentum, stepping
from torch import nn


class Encoding(PrecisionPlugin):
    """Says that it encodes."""

    capabilities = PrecisionCapabilities(encodes=True)

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return UnitDtypes(compute=torch.float64, communication=torch.float64, reduce=torch.float64, grad=torch.float64)


class Listener:
    @polyshard.hookimpl
    def step_begin(self, model: nn.Module) -> None:
        pass


@pytest.mark.parametrize(
    ("collectives", "settings", "words"),
    [
        (Silent(), {}, ["Silent cannot be recorded"]),
        (Silent(capturable=True), {"offload": "cpu"}, ["CpuOffload", "'first'", "offload='none'"]),
        (Silent(capturable=True), {"precision": Encoding()}, ["Encoding encodes"]),
        (Silent(capturable=True), {"listeners": [Listener()]}, ["listeners"]),
    ],
)
def test_a_model_that_cannot_be_captured_is_refused_before_any_collective(
    collectives: Silent, settings: dict[str, Any], words: list[str]
) -> None:
    config = polyshard.ShardConfig(collectives=collectives, policy=units_of(nn.Linear), **settings)
    model = polyshard.shard(seeded(Net), config)
    optimizer = momentum(model)
    with pytest.raises(CaptureError) as caught:
        Rerunning(model, optimizer, stepping(model, optimizer), fallback=CaptureFallback.REFUSE)
    assert "rank 2" in str(caught.value)
    assert "leave fallback='refuse' out" in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    step = Rerunning(model, optimizer, stepping(model, optimizer), fallback=CaptureFallback.EAGER)
    assert step.mode is CaptureMode.EAGER


def test_a_listener_that_hears_of_no_step_is_no_obstacle() -> None:
    collectives = Silent(capturable=True)
    config = polyshard.ShardConfig(collectives=collectives, policy=units_of(nn.Linear), listeners=["progress"])
    model = polyshard.shard(seeded(Net), config)
    optimizer = momentum(model)
    step = Rerunning(model, optimizer, stepping(model, optimizer), fallback=CaptureFallback.EAGER)
    assert step.mode is not CaptureMode.EAGER


def test_a_model_that_is_not_on_cuda_is_refused() -> None:
    model = alone()
    with pytest.raises(CaptureError, match="computes on cpu"):
        CapturedStep(model, momentum(model), print, fallback="refuse")


class Counting(torch.optim.SGD):
    """Counts its steps on the host."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        return super().step(closure)


class Scheduled(torch.optim.SGD):
    """Sets its own learning rate, which a replay would not do."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.05
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "words"),
    [(Counting, "The state 'step' of Counting is kept on the host"), (Scheduled, "train_step sets learning rates")],
)
def test_optimizers_that_a_graph_would_leave_behind_are_refused(make: Any, words: str) -> None:
    model = alone()
    optimizer = make(model.parameters(), lr=0.1)
    step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2, fallback="refuse")
    for turn in range(2):
        step(draw(4, 3, turn=turn))
    before = whole(model)
    with pytest.raises(CaptureError, match=words):
        step(draw(4, 3))
    assert_unchanged(model, before)


def test_gradients_that_outlive_a_call_are_refused() -> None:
    model = alone()
    optimizer = momentum(model)

    def train_step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()

    step = Rerunning(model, optimizer, train_step, warmup=2, fallback="refuse")
    for turn in range(2):
        step(draw(4, 3, turn=turn))
    with pytest.raises(CaptureError, match="zero_grad"):
        step(draw(4, 3))


def assert_unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(whole(model), before, rtol=0, atol=0)


CALLS: list[tuple[Callable[[], tuple[tuple[Any, ...], dict[str, Any]]], str]] = [
    (lambda: ((draw(5, 3),), {}), r"Argument 0 has shape \(5, 3\), and had \(4, 3\)"),
    (lambda: ((draw(4, 3).float(),), {}), "Argument 0 is torch.float32, and was torch.float64"),
    (lambda: ((draw(4, 3, requires_grad=True),), {}), "Argument 0 wants a gradient"),
    (lambda: ((draw(4, 3),), {"scale": 2.0}), "Argument 'scale' is 2.0, and was 1.0"),
    (lambda: ((draw(4, 3),), {"more": {"a": draw(2), "b": None}, "scale": 1}), "Argument 'scale' is 1, and was 1.0"),
    (lambda: ((draw(4, 3),), {"more": {"a": draw(2)}}), "Argument 'more' is a dict of keys \\['a'\\], and was"),
    (lambda: ((draw(4, 3),), {"more": {"a": draw(3), "b": None}}), r"Argument 'more'\['a'\] has shape \(3,\)"),
    (lambda: ((draw(4, 3),), {"other": 1}), "Argument 'scale' was not given|argument 'other' in its place"),
    (lambda: ((draw(4, 3), 1), {}), "argument 1 in its place"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_arguments_unlike_the_captured_ones_are_refused_by_name(call: Any, message: str) -> None:
    model, _, step = captured(scale=1.0, more={"a": draw(2), "b": None})
    before = whole(model)
    args, kwargs = call()
    kwargs = {"scale": 1.0, "more": {"a": draw(2), "b": None}, **kwargs}
    with pytest.raises(CaptureError, match=message):
        step(*args, **kwargs)
    assert_unchanged(model, before)


def test_one_tensor_given_twice_at_the_capture_must_be_one_later() -> None:
    model = alone()
    optimizer = momentum(model)
    same: list[bool] = []

    def train_step(x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        same.append(scale is x)
        loss = (model(x) * scale.sum()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = Rerunning(model, optimizer, train_step, warmup=2, fallback="refuse")
    for turn in range(4):
        x = draw(4, 3, turn=turn)
        step(x, scale=x)
    assert same == [True] * len(same)
    assert step.mode is CaptureMode.CAPTURED
    before = whole(model)
    with pytest.raises(CaptureError, match="Argument 'scale' was the same tensor as argument 0 in the captured call"):
        step(draw(4, 3), scale=draw(4, 3))
    assert_unchanged(model, before)


def test_a_number_in_the_optimizers_settings_may_not_change_after_the_capture() -> None:
    model, optimizer, step = captured()
    optimizer.param_groups[0]["lr"] = 0.05
    before = whole(model)
    with pytest.raises(CaptureError, match=r"'lr' of SGD, parameter group 0, is 0\.05 and was 0\.1"):
        step(draw(4, 3))
    assert_unchanged(model, before)
    step.reset()
    assert step.mode is CaptureMode.WARMING_UP
    for turn in range(3):
        step(draw(4, 3, turn=turn))
    assert step.mode is CaptureMode.CAPTURED


def test_a_loaded_optimizer_state_outdates_the_graph() -> None:
    _, optimizer, step = captured()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(CaptureError, match=r"state of SGD was replaced.*reset\(\)"):
        step(draw(4, 3))


class Counted(Net):
    """A layer outside of all units, a parameter of one element and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(3, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.outside(x)) * self.gain * self.scale


def counted() -> tuple[nn.Module, torch.optim.Optimizer, CapturedStep[Any, Any]]:
    """As ``captured``, of ``Counted``."""
    model = seeded(Counted)
    config = polyshard.ShardConfig(collectives=Pretended(), policy=units_of(Block))
    polyshard.shard(model, config, ignored_modules=[model.outside])  # type: ignore[list-item]
    optimizer = momentum(model)
    step = Rerunning(model, optimizer, stepping(model, optimizer), warmup=2, fallback="refuse")
    for turn in range(3):
        step(draw(4, 3, turn=turn))
    assert step.mode is CaptureMode.CAPTURED
    for turn in range(20):
        step(draw(4, 3, turn=turn))
    return model, optimizer, step


Change = Callable[[Any, torch.optim.Optimizer], object]


def replace_data(model: Any, _: Any) -> None:
    model.blocks[1].up.float().double()


def replace_object(model: Any, _: Any) -> None:
    up = model.blocks[1].up
    up.weight = nn.Parameter(up.weight.detach() + 1.0)


def replace_by_an_equal(model: Any, _: Any) -> None:
    model.gain = nn.Parameter(model.gain.detach().clone())


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float64))


def freeze(model: Any, _: Any) -> None:
    model.blocks[1].down.requires_grad_(False)


def replace_state(_: Any, optimizer: torch.optim.Optimizer) -> None:
    values = next(values for values in optimizer.state.values() if values["momentum_buffer"].numel() > 1)
    values["momentum_buffer"] = torch.zeros_like(values["momentum_buffer"])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace_data, "'blocks.1.up.weight' was given other data"),
        (replace_object, "'blocks.1.up.weight' was replaced"),
        (replace_by_an_equal, "'gain' was replaced"),
        (lambda model, _: setattr(model.last, "bias", zeros(2)), "'last.bias' was replaced"),
        (freeze, "'blocks.1.down.weight' was frozen"),
        (lambda model, _: setattr(model, "outside", nn.Linear(3, 3, bias=False).double()), "'outside' was replaced"),
        (lambda model, _: setattr(model.outside, "weight", zeros(3, 3)), "'outside.weight' was replaced"),
        (lambda model, _: model.outside.requires_grad_(False), "'outside.weight' was frozen"),
        (lambda model, _: setattr(model, "scale", torch.ones(1, dtype=torch.float64)), "'scale' was replaced"),
        (lambda model, _: model.register_buffer("another", torch.ones(1)), "a buffer or a module was added"),
        (
            lambda _, optimizer: optimizer.param_groups[0]["params"].__setitem__(2, zeros(2)),
            "parameters of SGD changed",
        ),
        (replace_state, "state of SGD was replaced"),
    ],
)
def test_what_was_replaced_or_frozen_after_the_capture_is_refused_by_the_next_call(change: Change, what: str) -> None:
    model, optimizer, step = counted()
    change(model, optimizer)
    before = [local(p).detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(CaptureError, match=rf"{what}.*reset\(\)"):
            step(draw(4, 3))
    assert all(torch.equal(local(p).detach(), was) for p, was in zip(model.parameters(), before, strict=True))


def test_what_was_unfrozen_is_refused_and_captured_anew() -> None:
    model, optimizer, step = counted()
    freeze(model, optimizer)
    step.reset()
    for turn in range(4):
        step(draw(4, 3, turn=turn))
    assert step.mode is CaptureMode.CAPTURED
    model.requires_grad_(True)
    with pytest.raises(CaptureError, match=r"'blocks\.1\.down\.weight' was unfrozen"):
        step(draw(4, 3))


def test_a_replay_in_eval_mode_is_refused() -> None:
    model, _, step = captured()
    model.eval()
    with pytest.raises(CaptureError, match=r"Call train\(\)"):
        step(draw(4, 3))
    model.train()
    step(draw(4, 3))


def test_no_sync_around_the_call_is_refused_and_so_is_what_it_left() -> None:
    model, _, step = captured()
    with polyshard.no_sync(model):
        with pytest.raises(CaptureError, match="no_sync"):
            step(draw(4, 3))
        model(draw(4, 3)).sum().backward()
    with pytest.raises(CaptureError, match="wait to be reduced"):
        step(draw(4, 3))


def test_no_call_inside_a_step_or_unsharded() -> None:
    model, _, step = captured("eager")
    with polyshard.unsharded(model), pytest.raises(StateError, match="unsharded"):
        step(draw(4, 3))
    inner = model.blocks[0]  # type: ignore[union-attr, index]
    handle = inner.register_forward_pre_hook(lambda *_: step(draw(4, 3)))  # type: ignore[union-attr, operator]
    with pytest.raises(StateError, match="inside a forward"):
        model(draw(4, 3))
    handle.remove()
    step(draw(4, 3))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"warmup": 1}, ConfigError, "at least 2"),
        ({"warmup": True}, ConfigError, "warmup=True"),
        ({"fallback": "maybe"}, ConfigError, "'refuse', 'eager'"),
        ({"optimizer": [1]}, ConfigTypeError, "a int as an optimizer"),
        ({"train_step": 3}, ConfigTypeError, "a int as train_step"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    model = alone()
    given: dict[str, Any] = {"optimizer": momentum(model), "train_step": print, "fallback": "eager", **arguments}
    with pytest.raises(error, match=words):
        CapturedStep(model, given.pop("optimizer"), given.pop("train_step"), **given)


def test_an_unsharded_or_inner_module_is_refused() -> None:
    plain = seeded(Net)
    with pytest.raises(StateError, match="needs a sharded module"):
        CapturedStep(plain, momentum(plain), print)
    model = alone()
    with pytest.raises(StateError, match=r"blocks\.0"):
        CapturedStep(model.blocks[0], momentum(model), print)  # type: ignore[index, arg-type]
