"""Checkpoints of an optimizer over flat parameters are those of an optimizer over the model's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import on_ranks, threaded, units_of, whole
from plain_states import Odd, Part, odd, train
from polyshard import checkpoint
from polyshard import state as states
from polyshard.errors import ConfigError
from polyshard_backends.threaded import ThreadedWorld
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

#: What is ignored here is trained, and its gradients are averaged by hand or not at all.
pytestmark = pytest.mark.filterwarnings("ignore:Nothing averages the gradients of")

Values = dict[str, torch.Tensor]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def net(seed: int = 0) -> Odd:
    """Of units with parameters of odd shapes; with a shared one, a frozen one, and one that stays as it is."""
    # Behind statistics of the batch, gradients of a bias are nothing but rounding, which Adam makes as large as any.
    made = odd(seed).double().eval()
    assert isinstance(made, Odd)
    return made


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.001, momentum=0.9, nesterov=True)


def own(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def flat(model: nn.Module) -> list[nn.Parameter]:
    return polyshard.flat_parameters(model)


def shard(model: Odd, rank: int, world: ThreadedWorld, **settings: Any) -> Odd:
    return polyshard.shard(
        model, threaded(world, rank, policy=units_of(Part), **settings), ignored_parameters=[model.scale]
    )


def save(root: Path, world_size: int, make: Make = adam, **settings: Any) -> Path:
    """Train two steps and save."""

    def on_rank(rank: int, world: ThreadedWorld) -> Path:
        model = shard(net(), rank, world, **settings)
        optimizer = make(flat(model))
        train(model, optimizer, 2)
        return checkpoint.save(root, 2, model, optimizer)

    return on_ranks(world_size, on_rank)[0]


@pytest.mark.slow
@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, {}), (2, {})),
        ((2, {}), (3, {})),
        ((3, {}), (2, {"strategy": "no_shard"})),
        ((2, {"strategy": "no_shard"}), (3, {"strategy": "shard_grad_op"})),
        # More ranks than elements of most parameters; ranks of padding alone.
        ((9, {}), (2, {})),
        ((2, {}), (1, {"strategy": "no_shard"})),
        ((1, {"strategy": "no_shard"}), (3, {})),
        ((4, {"strategy": "hybrid_shard", "shard_size": 2}), (3, {"offload": "cpu"})),
    ],
    ids=str,
)
def test_flat_state_goes_on_at_another_world_size_and_in_one_process(
    tmp_path: Path, before: Any, after: Any, make: Make
) -> None:
    directory = save(tmp_path, before[0], make, **before[1])
    wanted, plain = net(), net(seed=1)
    train(wanted, make(own(wanted)), 3)

    def on_rank(rank: int, world: ThreadedWorld) -> Values:
        model = shard(net(seed=1), rank, world, **after[1])
        optimizer = make(flat(model))
        checkpoint.load(directory, model, optimizer)
        train(model, optimizer, 1, first=2)
        return whole(model)

    found = on_ranks(after[0], on_rank)
    state, optimizer = checkpoint.read(directory), make(own(plain))
    plain.load_state_dict(state["model"])
    set_optimizer_state_dict(plain, optimizer, optim_state_dict=state["optimizer"])
    train(plain, optimizer, 1, first=2)
    for result in (*found, dict(plain.named_parameters())):
        torch.testing.assert_close(result, dict(wanted.named_parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_groups_and_names_of_parameters_are_the_models(tmp_path: Path) -> None:
    def grouped(model: nn.Module, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # The loose parameter comes last; the second group is of its own learning rate.
        named = [(f"p{index}", parameter) for index, parameter in enumerate(parameters)]
        return torch.optim.AdamW([{"params": named[:-1]}, {"params": named[-1:], "lr": 0.5}], lr=0.05)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = shard(net(), rank, world)
        optimizer = grouped(model, flat(model))
        train(model, optimizer, 2)
        first, second = states.get_optimizer_state_dict(model, optimizer)["param_groups"]
        assert set(first["params"]) == {name for name, _ in model.named_parameters()} - {"scale"}
        assert first["param_names"] == first["params"]
        assert second["params"] == ["scale"]
        directory = checkpoint.save(tmp_path, 2, model, optimizer)
        own_names = [group["param_names"] for group in optimizer.param_groups]
        optimizer.param_groups[1]["lr"] = 0.1
        checkpoint.load(directory, model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.5]
        assert [group["param_names"] for group in optimizer.param_groups] == own_names
        with pytest.raises(ConfigError, match="has 2 parameter groups, the optimizer 1"):
            checkpoint.load(directory, model, adam(flat(model)))

    on_ranks(2, on_rank)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_state_of_another_shape_is_refused(tmp_path: Path, strategy: str) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = shard(net(), rank, world, strategy=strategy)
        parameters = flat(model)
        optimizer = adam(parameters)
        train(model, optimizer, 1)
        optimizer.state[parameters[2]]["factors"] = torch.zeros(1000)
        message = rf"state 'factors' of the flat parameter of unit 'parts.0' has shape \(1000,\) on rank {rank}"
        with pytest.raises(ConfigError, match=message):
            checkpoint.save(tmp_path, 1, model, optimizer)
        optimizer.state[parameters[2]]["factors"] = [1.0]
        with pytest.raises(ConfigError, match=r"'factors' of the flat parameter of unit 'parts\.0' is a list"):
            states.get_optimizer_state_dict(model, optimizer)

    on_ranks(2, on_rank)
    assert checkpoint.latest(tmp_path) is None


State = dict[torch.Tensor, dict[str, Any]]


def differ(model: Odd, state: State) -> None:
    state[model.parts[1].line.bias]["step"].fill_(9.0)


def lack(model: Odd, state: State) -> None:
    del state[model.parts[1].gate]


def reshape(model: Odd, state: State) -> None:
    for parameter in model.parts[0].parameters():
        state[parameter]["rows"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            differ,
            r"optimizer state 'step' is 2\.0 for 'parts\.1\..* but 9\.0 for 'parts\.1\.line\.bias' in the checkpoint.*"
            r"the flat parameter of unit 'parts\.1' has one for both",
        ),
        (lack, r"'step' of .* but not of 'parts.1.gate', and the flat parameter"),
        (reshape, r"'rows' of 'parts.0.*' has shape \(2,\) .*neither a scalar nor"),
    ],
)
def test_what_a_flat_parameter_cannot_have_is_refused_by_name(
    tmp_path: Path, change: Callable[[Odd, State], None], words: str
) -> None:
    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = shard(net(), rank, world, strategy="no_shard")
        optimizer = adam(own(model))
        train(model, optimizer, 2)
        change(model, optimizer.state)
        directory = checkpoint.save(tmp_path, 2, model, optimizer)
        other = shard(net(seed=1), rank, world)
        before, fresh = whole(other), adam(flat(other))
        with pytest.raises(ConfigError, match=words):
            checkpoint.load(directory, other, fresh)
        assert not fresh.state
        torch.testing.assert_close(whole(other), before, rtol=0, atol=0)
        # Of parameters of their own the numbers may differ.
        if change is differ:
            checkpoint.load(directory, other, adam(own(other)))

    on_ranks(2, on_rank)
