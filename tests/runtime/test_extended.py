"""``polyshard.shard`` over tensor subclasses that say themselves how they are gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import polyshard
import pytest
import torch
from extended_models import IN, OUT, Layer, Net, Pair, Reference, Rounded
from parity import on_ranks, seed_all, sharded_copy, threaded, units_of, warns_for
from polyshard.errors import ConfigError, ParameterChangedError, ParameterError, RankMismatchError, UnsupportedError
from polyshard.optim import AveragedWeights
from polyshard_backends.threaded import ThreadedWorld
from polyshard_tools.forecast import ShapedBatches, plan
from torch import nn
from torch.distributed.tensor import DTensor


def seeded(make: Callable[[], nn.Module] = Net) -> Any:
    with torch.random.fork_rng(devices=[]):
        seed_all(0)
        return make()


def inputs(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, IN, dtype=torch.float64, generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def trained(model: nn.Module, rank: int, steps: int = 3) -> list[float]:
    """Losses, and norms of gradients behind them."""
    optimizer, found = adamw(model), []
    for step in range(steps):
        loss = model(inputs(step, rank)).square().mean()
        loss.backward()
        found += [loss.item(), polyshard.clip_grad_norm_(model, 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def reference(model: Net, world_size: int, steps: int = 3) -> list[list[float]]:
    """The same of the unsharded model, by rank."""
    alone = Reference(copy.deepcopy(model))
    optimizer = adamw(alone)
    found: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(steps):
        losses = [alone(inputs(step, rank)).square().mean() for rank in range(world_size)]
        torch.stack(losses).mean().backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item()
        for rank, loss in enumerate(losses):
            found[rank] += [loss.item(), norm]
        optimizer.step()
        optimizer.zero_grad()
    return found


PAIRS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"strategy": "shard_grad_op", "policy": "never"}),
    (3, {}),
    # The last rank has no rows.
    (5, {}),
    (4, {"strategy": "hybrid_shard", "shard_size": 2, "sync_module_states": True}),
    (2, {"strategy": "no_shard", "reshard_after_forward": False}),
]


@pytest.mark.parametrize(("number", "settings"), PAIRS)
def test_trains_as_the_unsharded_model(number: int, settings: dict[str, Any]) -> None:
    model = seeded()

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], list[tuple[int, ...]]]:
        mine = sharded_copy(model, rank, world, **{"policy": units_of(Layer), **settings})
        placed = mine.layer.weight, mine.down.weight
        assert all(isinstance(each, nn.Parameter) and isinstance(each, DTensor) for each in placed)
        assert [each.requires_grad for each in placed] == [False, True]
        rows = [each.detach().to_local() for each in placed]
        assert [type(each) for each in rows] == [Pair, Rounded]
        found = trained(mine, rank)
        if settings.get("strategy") == "hybrid_shard":
            polyshard.check_replicas(mine)
            if rank == 1:
                rows[0].high[0, 0] += 1
            with pytest.raises(RankMismatchError, match=r"'layer\.weight'"):
                polyshard.check_replicas(mine)
        mine(inputs(0, rank)).sum().backward()
        # What the optimizer holds gets a plain gradient of its rows.
        gradient = mine.down.weight.grad.to_local()
        assert mine.layer.weight.grad is None
        assert (type(gradient), gradient.shape) == (torch.Tensor, rows[1].shape)
        return found, [tuple(each.shape) for each in rows]

    with warns_for(number, settings):
        ranks = on_ranks(number, on_rank)
    for (found, _), wanted in zip(ranks, reference(model, number), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)
    shards = {"no_shard": 1, "hybrid_shard": 2}.get(settings.get("strategy", ""), number)
    heights = [len(each) for each in torch.arange(OUT).chunk(shards)] + [0] * shards
    assert [shapes[0][0] for _, shapes in ranks] == [heights[rank % shards] for rank in range(number)]


def test_meta_models_are_initialised_whole_and_cut() -> None:
    """The weight that is trained is of a class of its own on the meta device, and another one has values."""

    class Small(nn.Module):
        def __init__(self, device: str) -> None:
            super().__init__()
            self.down = nn.Linear(OUT, OUT, device=device, dtype=torch.float64)
            self.down.weight = nn.Parameter(Rounded(self.down.weight.detach()))
            self.layer = Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.layer(x))

    source = seeded(lambda: Small("meta"))

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            mine = copy.deepcopy(source)
            seed_all(7)
            config = threaded(world, rank, sync_module_states=True)
        polyshard.shard(mine, config)
        with polyshard.unsharded(mine):
            assert isinstance(mine.down.weight, Rounded)
            return {"weight": mine.down.weight.whole.clone(), "pair": mine.layer.weight.decoded()}

    ranks = on_ranks(3, on_rank)
    assert all(torch.equal(each["weight"], ranks[0]["weight"]) for each in ranks)
    assert torch.equal(ranks[0]["pair"], source.layer.weight.decoded())
    # As nn.Linear draws them.
    assert 0.2 < ranks[0]["weight"].abs().max().item() <= OUT**-0.5


def test_vectors_are_cut_between_elements() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(Rounded(torch.arange(1.0, 6.0, dtype=torch.float64)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    def ask(self: Rounded, mesh: Any) -> Any:
        assert (mesh.size(), mesh.ndim, mesh.get_group().size()) == (3, 1, 3)
        return (self.whole,), None

    def tell(self: Rounded, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0][:5], (outputs[0],))

    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        model = sharded_copy(Scaled(), rank, world)
        model(torch.full((5,), rank + 1.0, dtype=torch.float64)).sum().backward()
        assert model.scale.to_local().shape == ((2,), (2,), (1,))[rank]
        gradient: list[float] = model.scale.grad.to_local().tolist()
        return gradient

    with patch.object(Rounded, "fsdp_pre_all_gather", ask), patch.object(Rounded, "fsdp_post_all_gather", tell):
        assert on_ranks(3, on_rank) == [[2.0, 2.0], [2.0, 2.0], [2.0]]


class Whole(Rounded):
    """In blocks of two rows: others cannot be cut."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor and args[1] % 2:
            raise NotImplementedError("blocks of two rows")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Plain(Rounded):
    """Without the methods."""


Plain.fsdp_pre_all_gather = Plain.fsdp_post_all_gather = property()  # type: ignore[assignment,method-assign]


class Half(Rounded):
    """With one of them."""

    fsdp_post_all_gather = property()  # type: ignore[assignment]


def holding(weight: torch.Tensor) -> Net:
    model: Net = seeded()
    model.down.weight = nn.Parameter(weight)
    return model


def a_trained_pair() -> Net:
    model: Net = seeded()
    model.layer.weight.requires_grad_(True)
    return model


REFUSALS: dict[str, tuple[Callable[[], Net], dict[str, Any], type[Exception], str]] = {
    "no protocol": (
        lambda: holding(Plain(torch.ones(OUT, OUT, dtype=torch.float64))),
        {},
        ParameterError,
        r"'down.weight' on rank \d is a Plain, .* has no fsdp_pre_all_gather",
    ),
    "one method": (
        lambda: holding(Half(torch.ones(OUT, OUT, dtype=torch.float64))),
        {},
        ParameterError,
        "is a Half, .* has fsdp_pre_all_gather without fsdp_post_all_gather",
    ),
    "a block cut": (
        lambda: holding(Whole(torch.ones(6, OUT, dtype=torch.float64))),
        {},
        ParameterError,
        r"'down.weight' on rank \d is a Whole of shape \(6, 7\), .* between 2 ranks: .* blocks of two rows",
    ),
    "packed and trained": (
        a_trained_pair,
        {},
        ParameterError,
        r"'layer.weight' on rank \d is a Pair that is trained, .* add_\(\) failed.* Char. Freeze it",
    ),
    "columns in memory": (
        lambda: holding(Rounded(torch.ones(OUT, OUT, dtype=torch.float64).t())),
        {},
        ParameterError,
        r"'down.weight' on rank \d is a Rounded of shape \(7, 7\) and strides \(1, 7\)",
    ),
    "offloaded": (seeded, {"offload": "cpu"}, UnsupportedError, "CpuOffload would offload 'down.weight', a Rounded"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused_before_anything_changes(case: str) -> None:
    make, settings, error, words = REFUSALS[case]

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = make()
        before = dict(model.named_parameters())
        with pytest.raises(error, match=words):
            polyshard.shard(model, threaded(world, rank, **settings))
        assert all(each is before[name] for name, each in model.named_parameters())
        assert not hasattr(model, "_polyshard_module_state")

    on_ranks(2, on_rank)


def test_changes_by_the_program() -> None:
    """A DTensor of the class that lies as it did is taken over; what else takes a parameter's place is refused."""
    source = seeded()

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded_copy(source, rank, world, policy=units_of(nn.Linear))
        x = inputs(0, 0)
        own = model.down.weight
        model(x)
        other = Rounded(torch.full_like(own.detach().to_local().whole, 0.25))
        shape, stride = own.shape, own.stride()
        model.down.weight = nn.Parameter(
            DTensor.from_local(other, own.device_mesh, own.placements, run_check=False, shape=shape, stride=stride)
        )
        seen: list[torch.Tensor] = []
        model.down.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        out = model(x)
        bias = model.down.bias.full_tensor()
        torch.testing.assert_close(out, 0.25 * seen[0].sum(1, keepdim=True) + bias, rtol=1e-12, atol=0.0)
        own = model.down.weight
        model.down.weight = nn.Parameter(Rounded(torch.ones(OUT, OUT, dtype=torch.float64)))
        with pytest.raises(ParameterChangedError, match=r"'down.weight' was replaced by a plain tensor \(rank \d\)"):
            model(x)
        model.down.weight = own
        torch.testing.assert_close(model(x), out, rtol=0.0, atol=0.0)
        model.layer.weight.requires_grad_(True)
        with pytest.raises(ParameterError, match=r"'layer.weight' on rank \d is a Pair that is trained"):
            model(x)
        model.layer.weight.requires_grad_(False)
        own.requires_grad_(False)
        model(x).sum().backward()
        assert own.grad is None
        model.layer.forward = lambda x: x @ model.down.weight.T
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model(x)

    on_ranks(2, on_rank)


def test_what_needs_a_flat_buffer_names_the_parameter() -> None:
    source = seeded()

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            mine = copy.deepcopy(source)
        before = adamw(mine)
        polyshard.shard(mine, threaded(world, rank))
        for call in (lambda: polyshard.flat_parameters(mine), lambda: AveragedWeights(mine, 0.9)):
            with pytest.raises(UnsupportedError, match=r"'down\.weight' gathers itself"):
                call()
        mine(inputs(0, rank)).sum().backward()
        with pytest.raises(ConfigError, match=r"AdamW holds 'up.weight', which a DTensor of this rank's part took"):
            before.step()
        assert polyshard.report(mine).master_nbytes > 0
        assert type(mine.state_dict()["down.weight"]) is DTensor

    on_ranks(2, on_rank)


def test_plans_count_what_rows_are_made_of() -> None:
    with torch.device("meta"):
        model = Net()
    config = polyshard.ShardConfig(policy=units_of(Layer))
    (group,) = plan(config, model, 2, batch=ShapedBatches.parse(f"float64[2,{IN}]")).groups
    # On rank 0: half of what is plain around the layer, each parameter but the last padded to 16 bytes; its own rows of
    # int8 and fp16, and what is trained.
    plain, pair, rounded, bias = (3 * IN + 4 + 4) * 8, 4 * IN * 3, 4 * OUT * 8, 4 * 8
    assert group.parameters_nbytes == plain + pair + rounded + bias
    assert group.gradients_nbytes == plain + rounded + bias
