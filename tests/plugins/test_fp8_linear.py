"""Linear layers that gather and compute in fp8, against formulas of what they compute. Twin on CUDA:
``gpu/test_fp8_linear_cuda.py``."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import polyshard
import pytest
import torch
from parity import draw, local, on_ranks, root_of, sharded_copy, units_of, whole
from polyshard.errors import StateError, UnsupportedError
from polyshard.interfaces import PluginContext, PrecisionPlugin
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedWorld
from polyshard_plugins.fp8_linear import Fp8Linear
from polyshard_testing import PrecisionSuite
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def plugin(**options: Any) -> Fp8Linear:
    return Fp8Linear(PluginContext("fp8_linear", torch.device("cpu")), **options)


class TestFp8Linear(PrecisionSuite):
    form_tolerance = 0.05

    def make(self) -> PrecisionPlugin:
        return plugin()


class Feed(nn.Module):
    """Two linear layers behind a norm, around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fed: torch.Tensor = self.down(functional.silu(self.up(self.norm(x))))
        return x + fed


class Model(nn.Module):
    """Two blocks, and a head that is too narrow for fp8."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def rounded(values: torch.Tensor, dim: int) -> torch.Tensor:
    """``values`` as fp8 with a scale along ``dim``, in fp64."""
    values = values.double()
    scale = (values.abs().amax(dim, keepdim=True) / 448).clamp(min=2.0**-126)
    return (values / scale).float().to(torch.float8_e4m3fn).double() * scale


class _Formula(torch.autograd.Function):
    """A linear layer by the formulas of the documentation, in fp64."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_fp8: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.in_fp8 = in_fp8
        return (rounded(x, 1) @ rounded(weight, 1).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        scale = (weight.double().abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126)
        codes = rounded(weight, 1) / scale
        of_x = rounded(gradient.double() * scale.t(), 1) @ codes
        of_weight = gradient.double().t() @ x.double()
        if ctx.in_fp8:
            of_weight = rounded(gradient, 0).t() @ rounded(x, 0)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class Reference(nn.Linear):
    """``nn.Linear`` by ``_Formula``."""

    in_fp8 = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Formula.apply(input, self.weight, self.in_fp8)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


def reference_of(model: nn.Module, *, in_fp8: bool = False) -> nn.Module:
    reference = copy.deepcopy(model)
    for block in reference.blocks:  # type: ignore[union-attr]
        for layer in (block.up, block.down):
            layer.__class__ = Reference
            layer.in_fp8 = in_fp8
    return reference


def model_of(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options)


def loss_of(model: nn.Module, turn: int, rank: int) -> torch.Tensor:
    x = draw(16, 32, turn=turn, rank=rank).float()
    return (model(x) - x[:, :5].cumsum(1)).square().mean()


def trained(model: nn.Module, rank: int, turns: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for turn in range(turns):
        loss = loss_of(model, turn, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("ranks", "options", "settings"),
    [
        (1, {}, {"strategy": "no_shard"}),
        (2, {"weight_gradient": "fp8"}, {"offload": "cpu"}),
        (3, {}, {"recomputes": True}),
        (3, {"weight_gradient": "fp8"}, {"strategy": "shard_grad_op"}),
        (2, {}, {"freezes": True}),
    ],
    ids=str,
)
def test_training_follows_the_formula(ranks: int, options: dict[str, Any], settings: dict[str, Any]) -> None:
    settings = dict(settings)
    model = model_of(recomputes=settings.pop("recomputes", False))
    if settings.pop("freezes", False):
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
    reference = reference_of(model, in_fp8="weight_gradient" in options)
    optimizer = torch.optim.SGD([each for each in reference.parameters() if each.requires_grad], lr=0.1)
    expected = []
    for turn in range(3):
        losses = [loss_of(reference, turn, rank) for rank in range(ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append([loss.item() for loss in losses])

    def on_rank(rank: int, world: ThreadedWorld) -> tuple[list[float], dict[str, torch.Tensor]]:
        precision = plugin(compute="fp32", **options)
        mine = sharded_copy(model, rank, world, precision=precision, policy=units_of(Feed), **settings)
        return trained(mine, rank), whole(mine)

    wanted, start = dict(reference.named_parameters()), dict(model.named_parameters())
    for rank, (losses, parameters) in enumerate(on_ranks(ranks, on_rank)):
        assert losses == pytest.approx([each[rank] for each in expected], rel=1e-3)
        for name, parameter in parameters.items():
            # Rounded in another precision, few values get another code.
            change = (wanted[name] - start[name]).abs().max()
            assert (parameter - wanted[name]).abs().max() <= 0.02 * change, name


def labels(model: nn.Module) -> list[str]:
    return [unit.name for unit in root_of(model).units]


def pretended(model: nn.Module, precision: object, ranks: int = 4, **settings: Any) -> FakeCollectives:
    collectives = FakeCollectives(PluginContext("fake", torch.device("cpu")), 0, ranks)
    settings = {"policy": units_of(Feed), **settings}
    polyshard.shard(model, polyshard.ShardConfig(collectives=collectives, precision=precision, **settings))
    return collectives


def test_half_of_the_bytes_of_bf16_travel() -> None:
    moved = []
    for precision in ("bf16", plugin()):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        collectives = pretended(model, precision, policy=units_of(nn.Linear))
        model(torch.randn(16, 256)).sum().backward()
        sent = [call for call in collectives.calls if call.operation == "all_gather"]
        moved.append(sum(call.sent_nbytes for call in sent))
    # A byte an element, and four a row of 256.
    assert moved[1] / moved[0] == (256 + 4) / 512


class Odd(nn.Linear):
    """Computes otherwise than ``nn.Linear``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight * 2)


def test_other_layers_compute_in_the_compute_dtype() -> None:
    model = nn.Module()
    model.taken = nn.Linear(32, 32, bias=False)
    model.left_out = nn.Linear(32, 32, bias=False)
    model.alone = nn.Sequential(nn.Linear(32, 32, bias=False))
    model.narrow = nn.Linear(32, 24, bias=False)
    model.odd = Odd(32, 32, bias=False)
    model.tied = nn.Linear(32, 32, bias=False)
    model.tie = nn.Linear(32, 32, bias=False)
    model.tie.weight = model.tied.weight
    pretended(model, plugin(leave_out="left_*", leave_alone=nn.Sequential), policy=units_of(Odd))
    formed = [unit.spec.parameter_names for unit in root_of(model).units if unit.forms]
    assert formed == [("taken.weight",)]
    assert labels(model)[:2] == ["(root)", "(root)[float32, formed]"]


def test_part_of_it_cannot_be_kept_for_backward() -> None:
    model = model_of()
    with pytest.raises(UnsupportedError, match=r"reshard_after_forward=2 for 'blocks\.0\.(up|down)\.weight'"):
        pretended(model, plugin(), reshard_after_forward=2)
    pretended(model, plugin())
    assert model(torch.ones(2, 32)).isfinite().all()


def test_rows_of_zeros_stay_zeros_and_what_is_not_finite_shows() -> None:
    model = model_of().blocks[0]
    with torch.no_grad():
        model.up.weight[3] = 0.0
        model.up.bias.zero_()

    def on_rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        mine = sharded_copy(model, rank, world, precision=plugin(compute="fp32"))
        seen: list[torch.Tensor] = []
        mine.up.register_forward_hook(lambda _, __, output: seen.append(output.detach().clone()))  # type: ignore[union-attr]
        mine(draw(4, 32).float())
        for value in (math.inf, math.nan):
            with torch.no_grad():
                local(mine.down.weight)[-1, 0] = value  # type: ignore[union-attr, arg-type]
            seen.append(mine(draw(4, 32).float()).detach())
        return seen

    for before, _, after_inf, _, after_nan in on_ranks(2, on_rank):
        assert before[:, 3].abs().max() == 0
        assert before.isfinite().all()
        assert after_inf.isnan().any()
        assert after_nan.isnan().any()


def test_evaluation_computes_as_training_does_and_unsharded_in_full_precision() -> None:
    model = model_of()
    x = draw(8, 32).float()
    expected = model(x)

    def on_rank(rank: int, world: ThreadedWorld) -> Iterator[torch.Tensor]:
        mine = sharded_copy(model, rank, world, precision=plugin(compute="fp32"), policy=units_of(Feed))
        trains = mine(x).detach()
        with torch.no_grad():
            evaluates = mine.eval()(x)
        with polyshard.unsharded(mine), torch.no_grad():
            full = mine(x)
        return trains, evaluates, full  # type: ignore[return-value]

    for trains, evaluates, full in on_ranks(2, on_rank):
        assert torch.equal(trains, evaluates)
        torch.testing.assert_close(full, expected)
        assert 1e-4 < (trains - expected).abs().max() < 0.2


class Peeks(nn.Module):
    """Computes with the weight of a layer by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(self.layer.weight.dtype), self.layer.weight)


def test_a_weight_that_something_else_computes_with_is_nan() -> None:
    model = nn.Sequential(Peeks())
    pretended(model, plugin(), policy=units_of(Peeks))
    assert model(torch.ones(2, 32)).isnan().all()


def test_the_first_call_of_all_may_be_a_layers() -> None:
    layers = nn.Sequential(nn.Linear(32, 32))

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model: Any = sharded_copy(layers, rank, world, precision=plugin(), policy="always")
        return model[0](torch.ones(2, 32)).detach()  # type: ignore[no-any-return]

    assert all(output.isfinite().all() for output in on_ranks(2, on_rank))


def test_a_forward_that_was_replaced_after_sharding_is_refused() -> None:
    model = model_of()
    pretended(model, plugin())
    down = model.blocks[0].down
    down.forward = lambda input: input  # type: ignore[method-assign]
    with pytest.raises(StateError, match=r"forward of 'blocks\.0\.down' was replaced"):
        model(torch.ones(2, 32))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")
def test_compiled_blocks_compute_as_eager_ones_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyshard.planning.thresholds.DIRECT_NUMEL", 1024)
    losses = []
    for compiles in (False, True):
        model = model_of()
        for block in model.blocks if compiles else ():
            block.compile(fullgraph=True)
        pretended(model, plugin(), ranks=2)
        losses.append(trained(model, 0, 4))
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
