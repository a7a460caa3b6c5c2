"""Flat parameters and what their shards hold, as PyTorch's FSDP tests of that name assert it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_parity.models import expected_warnings, wrap_fsdp
from fsdp_parity.ranks import Pools, Ranks, across
from polyshard_fsdp._flat_param import FlatParamHandle, HandleShardingStrategy
from torch import nn


class SmallTransformer(nn.Transformer):
    """Width 32, two encoder and two decoder layers, and a buffer.

    ``shared``: each decoder layer has its feed-forward weights from the encoder layer of the same number.
    """

    def __init__(self, shared: bool, seed: int = 0) -> None:
        torch.manual_seed(seed)
        with expected_warnings():
            super().__init__(d_model=32, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, dropout=0.1)
        self.register_buffer("dummy_buffer", torch.tensor(1.0))
        if shared:
            for encoder, decoder in zip(self.encoder.layers, self.decoder.layers, strict=True):
                decoder.linear1.weight = encoder.linear1.weight
                decoder.linear2.weight = encoder.linear2.weight

    def get_input(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Source (20, 8, 32) and target (10, 8, 32), after seeding the generators with 1."""
        torch.manual_seed(1)
        return torch.rand(20, 8, 32).to(device, dtype), torch.rand(10, 8, 32).to(device, dtype)


class EmptyModule(nn.Module):
    """Adds one, and has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def _transformer(half: bool, *, shared: bool = False) -> SmallTransformer:
    module = SmallTransformer(shared)
    return module.half() if half else module


def _handle(ranks: Ranks, parameters: list[nn.Parameter], module: nn.Module, **changes: Any) -> FlatParamHandle:
    settings: dict[str, Any] = {
        "device": ranks.device,
        "sharding_strategy": HandleShardingStrategy.FULL_SHARD,
        "offload_params": False,
        "mp_param_dtype": None,
        "mp_reduce_dtype": None,
        "keep_low_precision_grads": False,
        "process_group": ranks.group,
        "use_orig_params": False,
        "fsdp_extension": None,
    }
    return FlatParamHandle(parameters, module, **{**settings, **changes})


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _output(module: Any) -> torch.Tensor:
    first = next(module.parameters())
    output: torch.Tensor = module(*module.get_input(first.device, first.dtype))
    return output


def partial_flattening(ranks: Ranks, half: bool) -> None:
    """Some layers are wrapped, others stay; ``to(dtype)`` reaches both, and the model computes in the new dtype."""
    module: Any = _transformer(half).to(ranks.device)
    plain = copy.deepcopy(module)
    numel = _numel(module)
    flattened = [*module.encoder.layers[1].parameters(), *module.decoder.layers[0].parameters()]
    expected = sum(parameter.numel() for parameter in flattened)
    untouched = (module.encoder.layers[0], module.decoder.layers[1])
    counts = [len(list(layer.parameters())) for layer in untouched]
    assert counts == [12, 18]
    module.encoder.layers[1] = wrap_fsdp(module.encoder.layers[1])
    module.decoder.layers[0] = wrap_fsdp(module.decoder.layers[0])
    wrapped = (module.encoder.layers[1], module.decoder.layers[0])
    flats = [layer._flat_param for layer in wrapped]
    assert sum(flat.numel() for flat in flats) == expected
    assert _numel(module) == numel
    assert [len(list(layer.parameters())) for layer in wrapped] == [1, 1]
    assert [len(list(layer.parameters())) for layer in untouched] == counts

    old, new = (torch.float16, torch.float32) if half else (torch.float32, torch.float16)
    assert {flat.dtype for flat in flats} == {old}
    assert {parameter.dtype for parameter in untouched[0].parameters()} == {old}
    module = module.to(dtype=new)
    # The same objects: an optimizer made before still has them.
    assert all(layer._flat_param is flat for layer, flat in zip(wrapped, flats, strict=True))
    assert {flat.dtype for flat in flats} == {new}
    assert {parameter.dtype for parameter in untouched[0].parameters()} == {new}
    plain.to(dtype=new)
    torch.testing.assert_close(_output(module), _output(plain))


def nothing_to_flatten(ranks: Ranks, half: bool) -> None:
    """A handle needs a parameter."""
    module = _transformer(half)
    with pytest.raises(ValueError, match="Cannot construct a FlatParamHandle with an empty parameter list"):
        _handle(ranks, [], module)


@across(1)
def test_empty_module(ranks: Ranks) -> None:
    """A module without parameters is wrapped, and computes."""
    torch.manual_seed(0)
    module = EmptyModule()
    # On the CPU, wherever the group computes.
    x = torch.rand(1)
    expected = module(x)
    sharded = wrap_fsdp(module)
    assert list(sharded.parameters()) == []
    assert sharded._flat_param is None
    torch.testing.assert_close(sharded(x).cpu(), expected, rtol=0.0, atol=0.0)


def numel_of_flat_parameter(ranks: Ranks, half: bool, shared: bool) -> None:
    """Parameters lie back to back, shared ones once."""
    module = _transformer(half, shared=shared)
    expected = _numel(module)
    # Two matrices of 32 x 128 in each of two layers are the same in both.
    assert expected == _numel(_transformer(half)) - (2 * 2 * 32 * 128 if shared else 0)
    handle = _handle(ranks, list(module.parameters()), module)
    assert handle.flat_param.numel() == expected
    assert handle.flat_param.dtype == (torch.float16 if half else torch.float32)


@across(1)
def test_aligned_shard_metadata_in_full_precision(ranks: Ranks) -> None:
    """Every parameter ends at a multiple of four fp32 elements: 21 + (3) + 35 + (1) + 25 = 85."""
    module = nn.Sequential(nn.Linear(3, 7, bias=False), nn.Linear(7, 5, bias=False), nn.Linear(5, 5, bias=False))
    handle = _handle(ranks, list(module.parameters()), module, use_orig_params=True)
    assert handle.flat_param.numel() == 85
    _check_metadata(
        handle,
        (0, 42),
        param_names=["0.weight", "1.weight"],
        param_shapes=[(7, 3), (5, 7)],
        param_numels=[21, 35],
        # 21 + (3) + 19 = 43
        param_offsets=[(0, 20), (0, 18)],
    )
    _check_metadata(
        handle,
        (43, 85),
        param_names=["1.weight", "2.weight"],
        param_shapes=[(5, 7), (5, 5)],
        param_numels=[35, 25],
        # 16 + (1) + 25 = 42, and one that no parameter has
        param_offsets=[(19, 34), (0, 24)],
    )


@across(1)
def test_aligned_shard_metadata_in_mixed_precision(ranks: Ranks) -> None:
    """The alignment counts in the dtype that computes, eight fp16 elements: 10 + (6) + 25 + (7) + 15 = 63."""
    module = nn.Sequential(nn.Linear(2, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False))
    parameters = list(module.parameters())
    handle = _handle(ranks, parameters, module, use_orig_params=True, mp_param_dtype=torch.float16)
    assert handle.flat_param.numel() == 63
    assert handle.flat_param.dtype == torch.float32
    _check_metadata(
        handle,
        (0, 31),
        param_names=["0.weight", "1.weight"],
        param_shapes=[(5, 2), (5, 5)],
        param_numels=[10, 25],
        # 10 + (6) + 16 = 32
        param_offsets=[(0, 9), (0, 15)],
    )
    _check_metadata(
        handle,
        (32, 63),
        param_names=["1.weight", "2.weight"],
        param_shapes=[(5, 5), (3, 5)],
        param_numels=[25, 15],
        # 9 + (7) + 15 = 31, and one that no parameter has
        param_offsets=[(16, 24), (0, 14)],
    )


def _check_metadata(handle: FlatParamHandle, elements: tuple[int, int], **expected: Any) -> None:
    """The shard of these elements, both ends included, is described so."""
    handle.flat_param._shard_param_infos = handle._get_shard_metadata(*elements)
    metadata = handle.shard_metadata()
    assert {name: list(getattr(metadata, name)) for name in expected} == expected


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize(
    ("body", "shared"),
    [
        (partial_flattening, ()),
        (nothing_to_flatten, ()),
        (numel_of_flat_parameter, (False,)),
        (numel_of_flat_parameter, (True,)),
    ],
)
def test_flattening(ranks: Pools, body: Callable[..., Any], half: bool, shared: tuple[bool, ...]) -> None:
    ranks.run(1, body, half, *shared)
