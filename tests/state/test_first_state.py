"""State of optimizers that never stepped: what torch's functions make of them on an unsharded model, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed.checkpoint as dcp
from matrices import Cell
from parity import Block, Net, draw, mean_square, on_ranks, seeded, sharded_copy, threaded, units_of
from polyshard.errors import ConfigError
from polyshard.optim import Muon, step_in_backward
from polyshard.state import (
    StateOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from polyshard_backends.threaded import ThreadedWorld
from processes import KeptRanks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_state_dict

RANKS = KeptRanks()
FULL = StateOptions(form="full")
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "Adam of a decay": lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.1),
    "NAdam of a tensor": lambda parameters: torch.optim.NAdam(parameters, lr=torch.tensor(0.1)),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def unsharded(model: nn.Module, make: Make) -> dict[str, Any]:
    """As torch's function tells it."""
    return dict(torchs_state_dict(model, make(model.parameters())))


def require_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["state"].keys() == wanted["state"].keys()
    for name, own in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], own, rtol=0, atol=0)
    for mine, theirs in zip(found["param_groups"], wanted["param_groups"], strict=True):
        assert sorted(mine.pop("params")) == sorted(theirs.pop("params"))
        assert mine == theirs


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_torchs_of_the_unsharded_model_and_nothing_else_changes(make: Make, flat: bool) -> None:
    plain = seeded(Net)

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        model = sharded_copy(plain, rank, world, policy=units_of(Block))
        held = polyshard.flat_parameters(model) if flat else list(model.parameters())
        optimizer, heard = make(held), []
        optimizer.register_step_post_hook(lambda *_: heard.append(rank))
        settings = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
        before = polyshard.state.get_model_state_dict(model, FULL)
        found = get_optimizer_state_dict(model, optimizer, FULL)
        torch.testing.assert_close(polyshard.state.get_model_state_dict(model, FULL), before, rtol=0, atol=0)
        assert [{**group, "params": None} for group in optimizer.param_groups] == settings
        assert not heard
        assert all(parameter.grad is None for parameter in held)
        # Once it is there it stays.
        again = get_optimizer_state_dict(model, optimizer, FULL)
        require_equal(again, copy.deepcopy(found))
        return found

    for found in on_ranks(3, on_rank):
        require_equal(found, unsharded(plain, make))


@pytest.mark.parametrize("settings", [{}, {"strategy": "hybrid_shard", "shard_size": 1}], ids=str)
def test_muons_is_that_of_torchs_muon(settings: dict[str, Any]) -> None:
    plain = seeded(lambda: Cell(6))

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [each for each in model.parameters() if each.ndim == 2]

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, Any]:
        model = sharded_copy(plain, rank, world, **settings)
        return get_optimizer_state_dict(model, Muon(matrices(model), lr=0.1), FULL)["state"]

    wanted = torchs_state_dict(plain, torch.optim.Muon(matrices(plain), lr=0.1))["state"]
    for found in on_ranks(2, on_rank):
        torch.testing.assert_close(found, dict(wanted), rtol=0, atol=0)


def resumed(rank: int, folder: str) -> list[float]:
    """Losses behind a load by the way that PyTorch's tutorial of checkpoints goes."""

    class AppState(dcp.stateful.Stateful):
        def __init__(self) -> None:
            self.model = polyshard.shard(seeded(Net), polyshard.ShardConfig(policy=units_of(Block)))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

        def state_dict(self) -> dict[str, Any]:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            return {"model": model, "optimizer": optimizer}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            model, optimizer = state["model"], state["optimizer"]
            set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    first, second = AppState(), AppState()
    trained(first.model, first.optimizer, range(3), rank)
    dcp.save({"app": first}, checkpoint_id=folder)
    dcp.load({"app": second}, checkpoint_id=folder)
    losses = trained(second.model, second.optimizer, range(3, 6), rank)
    polyshard.close(first.model)
    polyshard.close(second.model)
    return losses


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, turns: range, *ranks: int) -> list[float]:
    """The loss of each turn, a mean over ``ranks``."""
    losses = []
    for turn in turns:
        found = [mean_square(model, draw(4, 3, turn=turn, rank=rank), turn, rank) for rank in ranks]
        loss = torch.stack(found).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_tutorials_stateful_resumes_with_moments(tmp_path: Path) -> None:
    plain = seeded(Net)
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), range(6), 0, 1)[3:]
    one, other = RANKS.run(2, resumed, str(tmp_path))
    assert [(a + b) / 2 for a, b in zip(one, other, strict=True)] == pytest.approx(wanted, rel=1e-10)


def alone(**settings: Any) -> nn.Module:
    return polyshard.shard(seeded(Net), threaded(ThreadedWorld(1), 0, strategy="no_shard", **settings))


def test_what_cannot_step_so_is_refused_by_name() -> None:
    model = alone()
    with pytest.raises(ConfigError, match=r"LBFGS never stepped.*by a closure alone.*\(rank 0\)"):
        get_optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()))

    class Broken(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise RuntimeError("no such kernel")

    optimizer = Broken(model.parameters())
    with pytest.raises(ConfigError, match=r"Broken never stepped.*failed \(rank 0\): RuntimeError: no such kernel"):
        get_optimizer_state_dict(model, optimizer)
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_that_steps_in_the_backward_has_it_too() -> None:
    model = alone(offload="optimizer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_in_backward(model, optimizer)
    found = get_optimizer_state_dict(model, optimizer, FULL)
    require_equal(found, unsharded(seeded(Net), OPTIMIZERS["AdamW"]))


def test_gradients_that_wait_for_their_step_are_left_to_it() -> None:
    model = alone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(draw(4, 3)).square().mean().backward()
    assert not get_optimizer_state_dict(model, optimizer)["state"]
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_a_state_dict_that_lacks_a_trained_parameters_state_is_refused_unless_it_is_not_strict() -> None:
    model = alone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, FULL))
    name = next(iter(state["state"]))
    del state["state"][name]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ConfigError, match=rf"has no optimizer state of '{name}', which are trained, .*\(rank 0\)"):
        set_optimizer_state_dict(model, optimizer, state)
    torch.testing.assert_close(optimizer.state_dict(), before)
    set_optimizer_state_dict(model, optimizer, state, StateOptions(strict=False))
    assert len(optimizer.state) == len(before["state"]) - 1
    # Where no parameter has any, there is nothing to be lost.
    set_optimizer_state_dict(model, optimizer, {**state, "state": {}})
    assert not optimizer.state
