"""State dicts where something else goes on: other settings, other hooks, other moments, and values that do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import wrap_fsdp
from fsdp_parity.ranks import Ranks, across, on_cpu, orig
from fsdp_parity.state_models import (
    FULL,
    LOCAL,
    SHARDED,
    STRATEGIES,
    assert_same,
    kind,
    plain_model,
    step,
    wrapped_model,
)
from fsdp_parity.subtests import subtests
from fsdp_parity.training import full_parameters
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import ShardingStrategy, StateDictType
from polyshard_fsdp._common_utils import TrainingState
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


@orig
@across(2)
def test_keys_are_reported_by_plain_names(ranks: Ranks, use_orig_params: bool) -> None:
    """Strict loading says what is missing, unexpected or of another shape; the rest is loaded; training goes on."""
    plain = plain_model(ranks, seed=1)
    values = plain.state_dict()
    del values["block.first.bias"], values["scale"], values["block.norm.running_mean"]
    values["block.extra"] = values["another.extra"] = torch.ones(1)
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params)
    result = model.load_state_dict(values, strict=False)
    assert set(result.missing_keys) == {"block.first.bias", "scale", "block.norm.running_mean"}
    assert set(result.unexpected_keys) == {"block.extra", "another.extra"}
    wanted = plain_model(ranks, seed=0)
    wanted.load_state_dict(values, strict=False)
    assert_same(model.state_dict(), wanted.state_dict())

    with pytest.raises(RuntimeError, match=r'Missing key.*"scale".*"block\.first\.bias"') as strict:
        model.load_state_dict(values)
    values = plain.state_dict()
    values["block.first.weight"] = torch.ones(5, 5)
    with pytest.raises(RuntimeError, match=r"size mismatch for block\.first\.weight") as shape:
        model.load_state_dict(values)
    assert "_fsdp_wrapped_module" not in str(strict.value) + str(shape.value)
    step(wanted, ranks)
    wanted.load_state_dict(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    step(wanted, ranks)
    step(model, ranks)
    assert_same(model.state_dict(), wanted.state_dict(), rtol=1e-5, atol=1e-6)


@orig
@across(2)
def test_ignored_states(ranks: Ranks, use_orig_params: bool) -> None:
    """What FSDP leaves alone is saved as it is, and loaded in place."""
    for by_module in (False, True):
        plain, inner = plain_model(ranks, seed=0), plain_model(ranks, seed=0)
        ignored = [inner.block] if by_module else list(inner.block.first.parameters())
        model = wrap_fsdp(inner, ranks.group, use_orig_params=use_orig_params, ignored_states=ignored)
        assert_same(model.state_dict(), plain.state_dict())
        weight = inner.block.first.weight
        assert model.state_dict()["block.first.weight"].data_ptr() == weight.data_ptr()
        other = plain_model(ranks, seed=1)
        for state_dict_type in (SHARDED, FULL):
            with kind(model, state_dict_type):
                saved = model.state_dict()
                if state_dict_type is SHARDED:
                    assert type(saved["block.first.weight"]) is torch.Tensor
                    assert type(saved["projection.weight"]) is ShardedTensor
                model.load_state_dict(saved)
        model.load_state_dict(other.state_dict())
        assert inner.block.first.weight is weight
        assert_same(model.state_dict(), other.state_dict())


@across(2)
@subtests(strategy=STRATEGIES, use_orig_params=(False, True), state_dict_type=(FULL, SHARDED, LOCAL))
def test_between_passes(
    ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool, state_dict_type: StateDictType
) -> None:
    """Saved after a forward without a backward, and between the two: the same values, and training undisturbed."""
    plain = plain_model(ranks, seed=0)
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params, sharding_strategy=strategy)
    torch.manual_seed(3)
    x = torch.rand(6, 4).to(ranks.device)
    for each in (plain, model):
        with torch.no_grad():
            each(x)
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    losses = [each(x).square().sum() for each in (plain, model)]
    with kind(model, state_dict_type):
        saved = model.state_dict()
    if state_dict_type is FULL:
        assert_same(saved, plain.state_dict(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(losses[1], losses[0])
    for loss, each in zip(losses, (plain, model), strict=True):
        loss.backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    # What is loaded counts in the next forward, although the root kept what it gathered for the last.
    with torch.no_grad():
        model(x)
        other = plain_model(ranks, seed=1)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x))


@orig
@across(2)
def test_inside_summon_full_params(ranks: Ranks, use_orig_params: bool) -> None:
    """Saving finds the parameters whole; what is loaded is kept as the context says."""
    plain, other = plain_model(ranks, seed=0), plain_model(ranks, seed=1)
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        saved = model.state_dict()
        assert_same(saved, plain.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_same(saved, plain.state_dict())
        model.load_state_dict(other.state_dict())
    assert_same(model.state_dict(), other.state_dict())
    parameters = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    with FSDP.summon_full_params(model, writeback=False):
        model.load_state_dict(plain.state_dict())
    kept = model.state_dict()
    assert all(torch.equal(kept[name], other.state_dict()[name]) for name in parameters)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        if ranks.rank == 0:
            assert set(model.state_dict()) == set(plain.state_dict())
        else:
            with pytest.raises(RuntimeError, match="not whole on rank"):
                model.state_dict()
    with kind(model, LOCAL), FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="is made of shards"):
        model.state_dict()
    assert_same(model.state_dict(), kept)


class Refusing(nn.Module):
    """Calls for the state dict of a model in the midst of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.ask: Callable[[], Any] = dict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ask()
        output: torch.Tensor = self.linear(x)
        return output


@across(2)
def test_refused_inside_forward(ranks: Ranks) -> None:
    """As for ``summon_full_params``; the model is usable afterwards."""
    inner = Refusing().to(ranks.device)
    model = wrap_fsdp(inner, ranks.group)
    x = torch.ones(2, 2, device=ranks.device)
    inner.ask = model.state_dict
    with pytest.raises(AssertionError, match="during forward/backward"):
        model(x)
    inner.ask = dict
    model(x).sum().backward()
    assert list(model.state_dict()) == ["linear.weight", "linear.bias"]


class Renamed(nn.Linear):
    """A layer that was once saved under another name, and which counts what its hooks saw."""

    def __init__(self) -> None:
        super().__init__(3, 5)
        self.saved_shapes: list[torch.Size] = []
        self.register_state_dict_post_hook(_remember)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_rename)  # type: ignore[no-untyped-call]


def _remember(module: Renamed, values: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    module.saved_shapes.append(values[prefix + "weight"].shape)


def _rename(module: Renamed, values: dict[str, Any], prefix: str, *rest: Any) -> None:
    if prefix + "kernel" in values:
        values[prefix + "weight"] = values.pop(prefix + "kernel")


@orig
@across(2)
def test_hooks_of_modules_inside(ranks: Ranks, use_orig_params: bool) -> None:
    """A module's own hooks see whole parameters, as without FSDP, and may rename them; one may fail."""
    torch.manual_seed(0)
    layer = Renamed()
    model = wrap_fsdp(nn.Sequential(layer).to(ranks.device), ranks.group, use_orig_params=use_orig_params)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert layer.saved_shapes == [(5, 3)]
    kernel = torch.arange(15.0, device=ranks.device).view(5, 3)
    model.load_state_dict({"0.kernel": kernel, "0.bias": torch.ones(5, device=ranks.device)})
    assert torch.equal(model.state_dict()["0.weight"], kernel)

    def fail(*args: Any) -> None:
        raise LookupError("a hook that fails")

    for recover in (model.state_dict, lambda: model(torch.ones(2, 3, device=ranks.device))):
        handle = layer.register_state_dict_pre_hook(fail)  # type: ignore[no-untyped-call]
        with pytest.raises(LookupError, match="a hook that fails"):
            model.state_dict()
        handle.remove()
        recover()
    assert torch.equal(model.state_dict()["0.weight"], kernel)
    assert model.training_state is TrainingState.IDLE


@across(2)
@subtests(wrapper_inside=(False, True), use_orig_params=(False, True), state_dict_type=(FULL, SHARDED, LOCAL))
def test_activation_checkpointing(
    ranks: Ranks, wrapper_inside: bool, use_orig_params: bool, state_dict_type: StateDictType
) -> None:
    """Checkpoint wrappers inside, around and between leave names as they are."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 4), nn.Linear(4, 3)]
        for index, layer in enumerate(layers):
            if wrapper_inside:
                layers[index] = wrap_fsdp(checkpoint_wrapper(layer), ranks.group, use_orig_params=use_orig_params)
            else:
                layers[index] = checkpoint_wrapper(wrap_fsdp(layer, ranks.group, use_orig_params=use_orig_params))
        inner = nn.Sequential(*layers, checkpoint_wrapper(nn.Linear(3, 2))).to(ranks.device)
        return wrap_fsdp(inner, ranks.group, use_orig_params=use_orig_params)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)).to(ranks.device)
    model, other = build(0), build(1)
    assert_same(model.state_dict(), plain.state_dict())
    with kind(model, state_dict_type), kind(other, state_dict_type):
        other.load_state_dict(model.state_dict())
    assert_same(other.state_dict(), plain.state_dict())


@orig
@across(2)
def test_refusals_on_load(ranks: Ranks, use_orig_params: bool) -> None:
    """Values of another kind are refused on every rank before anything is sent, and the model is as it was."""
    plain = plain_model(ranks, seed=0)
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params)
    step(plain, ranks)
    step(model, ranks)
    whole = model.state_dict()
    with kind(model, SHARDED):
        pieces = model.state_dict()
        with pytest.raises(AssertionError, match="Expected ShardedTensor, got"):
            model.load_state_dict(whole)
        # The outer instance has its pieces, and the one inside has not.
        mixed = {name: whole[name] if name.startswith("block") else value for name, value in pieces.items()}
        with pytest.raises(AssertionError, match=r"Expected ShardedTensor, got .* 'block\.first\.weight' on rank"):
            model.load_state_dict(mixed)
        assert model.training_state is TrainingState.IDLE
        with pytest.raises(RuntimeError, match="size mismatch for scale"):
            model.load_state_dict({**pieces, "scale": pieces["projection.bias"]})
        with pytest.raises(RuntimeError, match=r'Missing key.*: "block\.first\.bias"'):
            model.load_state_dict({name: value for name, value in pieces.items() if name != "block.first.bias"})
    with kind(model, LOCAL):
        shards = model.state_dict()
        with pytest.raises(AssertionError, match="No `FlatParameter` in `state_dict` for this FSDP instance"):
            model.load_state_dict(whole)
        with pytest.raises(AssertionError, match="Tensors in local_state_dict should be ShardedTensor"):
            model.load_state_dict({**shards, "block._flat_param": torch.ones(1)})
        with pytest.raises(AssertionError, match=r"Local shard size = .* and the tensor in the state_dict is"):
            model.load_state_dict({**shards, "block._flat_param": shards["_flat_param"]})
    step(plain, ranks)
    step(model, ranks)
    assert_same(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@on_cpu
@across(3)
def test_saved_by_another_number_of_ranks(ranks: Ranks) -> None:
    """Pieces for two ranks do not fit three: every rank is told so, and nothing is sent."""
    pair = dist.new_group([0, 1])
    model = wrapped_model(ranks, 0, "root")
    if ranks.rank < 2:
        assert isinstance(pair, dist.ProcessGroup)
        small = wrap_fsdp(plain_model(ranks, 0), pair)
        with kind(small, SHARDED):
            saved = small.state_dict()
        with (
            kind(model, SHARDED),
            pytest.raises(RuntimeError, match=r"cut into \[3, 2\] rows, and 3 ranks need \[2, 2, 1\]"),
        ):
            model.load_state_dict({name: value for name, value in saved.items() if name != "scale"})
    dist.barrier()
    assert_same(model.state_dict(), plain_model(ranks, 0).state_dict())


@orig
@across(2)
def test_shared_instances(ranks: Ranks, use_orig_params: bool) -> None:
    """One FSDP module at two places is saved and loaded at both."""

    def build(seed: int, sharded: bool) -> nn.Module:
        torch.manual_seed(seed)
        layer: nn.Module = nn.Linear(3, 3).to(ranks.device)
        if sharded:
            layer = wrap_fsdp(layer, ranks.group, use_orig_params=use_orig_params)
        model = nn.Sequential(layer, nn.Linear(3, 3).to(ranks.device), layer)
        return wrap_fsdp(model, ranks.group, use_orig_params=use_orig_params) if sharded else model

    plain, model, other = build(0, sharded=False), build(0, sharded=True), build(1, sharded=True)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    assert_same(model.state_dict(), plain.state_dict())
    for state_dict_type in (FULL, SHARDED, LOCAL):
        with kind(model, state_dict_type), kind(other, state_dict_type):
            other.load_state_dict(model.state_dict())
        assert_same(other.state_dict(), plain.state_dict())
        other.load_state_dict(build(1, sharded=False).state_dict())


@orig
@across(2)
def test_load_by_assignment(ranks: Ranks, use_orig_params: bool) -> None:
    """``assign=True`` changes no parameter object: the shard is written, and the optimizer goes on with it."""
    model = wrapped_model(ranks, 0, "nested", use_orig_params=use_orig_params)
    before = list(model.parameters())
    other = plain_model(ranks, seed=1)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), before, strict=True))
    step(other, ranks)
    step(model, ranks)
    assert_same(model.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)
    values = full_parameters(model)
    assert all(value.is_floating_point() for value in values.values())
