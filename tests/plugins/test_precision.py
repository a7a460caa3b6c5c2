"""Precision plugins: which dtypes they choose, and what their casts do to inputs, outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext, PrecisionPlugin, UnitDtypes, UnitSpec
from polyshard_plugins.precision import Bf16, Fp16, Fp32, Mixed, Unchanged
from torch import nn

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def context(name: str = "mixed") -> PluginContext:
    return PluginContext(name=name, device=torch.device("cpu"))


def unit(
    name: str = "layers.0", module_class: type[nn.Module] = nn.Linear, master: torch.dtype = F32, is_root: bool = False
) -> UnitSpec:
    return UnitSpec(
        name=name,
        module_class=module_class,
        parameter_names=(f"{name}.weight",),
        numel=16,
        shard_numel=8,
        master_dtype=master,
        device=torch.device("cpu"),
        is_root=is_root,
    )


def cast_inputs(plugin: PrecisionPlugin, *args: Any, of: UnitSpec | None = None, **kwargs: Any) -> Any:
    cast = plugin.input_cast(of or unit())
    assert cast is not None
    return cast(args, kwargs)


# Which dtypes


@pytest.mark.parametrize("master", [F16, BF16, F32, F64])
def test_none_keeps_each_parameters_own_dtype_and_casts_nothing(master: torch.dtype) -> None:
    plugin = Unchanged(context("none"))
    assert plugin.dtypes(unit(master=master)) == UnitDtypes(master, master, master, master, None)
    assert plugin.input_cast(unit(master=master)) is None
    assert plugin.output_cast(unit(master=master)) is None


@pytest.mark.parametrize(("factory", "compute"), [(Fp32, F32), (Bf16, BF16), (Fp16, F16)])
@pytest.mark.parametrize("master", [BF16, F32, F64])
def test_uniform_precisions_reduce_in_fp32_and_give_gradients_in_the_master_dtype(
    factory: Any, compute: torch.dtype, master: torch.dtype
) -> None:
    assert factory(context()).dtypes(unit(master=master)) == UnitDtypes(compute, compute, F32, master, None)


def test_only_dtypes_in_half_range_want_loss_scaling() -> None:
    assert Fp16(context()).capabilities.loss_scaling
    assert Mixed(context(), param="bf16", overrides={"head": {"param": "fp16"}}).capabilities.loss_scaling
    assert Mixed(context(), reduce="fp16").capabilities.loss_scaling
    for plugin in (Unchanged(context()), Fp32(context()), Bf16(context()), Mixed(context(), param="bf16")):
        assert not plugin.capabilities.loss_scaling


@pytest.mark.parametrize(
    ("options", "master", "expected"),
    [
        ({}, F32, UnitDtypes(F32, F32, F32, F32)),
        ({}, F64, UnitDtypes(F64, F64, F64, F64)),
        ({"param": "fp16"}, F32, UnitDtypes(F16, F16, F16, F32)),
        ({"reduce": "fp16"}, F32, UnitDtypes(F32, F16, F16, F32)),
        ({"param": "bf16", "reduce": "fp32"}, F32, UnitDtypes(BF16, BF16, F32, F32)),
        ({"param": "bf16", "reduce": "fp32", "communication": "fp32"}, F32, UnitDtypes(BF16, F32, F32, F32)),
        ({"param": "fp16", "reduce": "bf16"}, F32, UnitDtypes(F16, BF16, BF16, F32)),
        ({"param": "fp16", "keep_low_precision_grads": True}, F32, UnitDtypes(F16, F16, F16, F16)),
        ({"param": "fp16", "reduce": "fp32", "keep_low_precision_grads": True}, BF16, UnitDtypes(F16, F16, F32, BF16)),
        ({"param": torch.float16, "buffer": "bfloat16"}, F64, UnitDtypes(F16, F16, F16, F64, BF16)),
    ],
)
def test_mixed_derives_what_is_left_out(options: dict[str, Any], master: torch.dtype, expected: UnitDtypes) -> None:
    assert Mixed(context(), **options).dtypes(unit(master=master)) == expected


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", BF16), ("BFloat16", BF16), ("torch.bfloat16", BF16), ("half", F16)]
)
def test_dtypes_have_several_names(name: str, dtype: torch.dtype) -> None:
    assert Mixed(context(), param=name).dtypes(unit()).compute == dtype


dtype_names = st.sampled_from(["none", "fp16", "bf16", "fp32", "fp64"])


@given(dtype_names, dtype_names, dtype_names, st.sampled_from([F16, BF16, F32, F64]))
def test_every_accepted_mix_can_hold_what_travels(
    param: str, reduce: str, communication: str, master: torch.dtype
) -> None:
    try:
        chosen = Mixed(context(), param=param, reduce=reduce, communication=communication).dtypes(unit(master=master))
    except ConfigError:
        assert communication != "none"
        return
    largest = torch.finfo(chosen.communication).max
    assert torch.tensor(largest, dtype=chosen.communication).to(chosen.reduce).to(F64).item() == largest
    assert torch.finfo(chosen.communication).eps >= torch.finfo(chosen.reduce).eps
    assert chosen.grad == master


@pytest.mark.parametrize("master", [torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("factory", [Fp32, Bf16, Fp16, Mixed])
def test_parameters_that_are_not_floating_point_are_left_as_they_are(factory: Any, master: torch.dtype) -> None:
    plugin = factory(context(), **({"param": "bf16"} if factory is Mixed else {}))
    assert plugin.dtypes(unit(master=master)) == UnitDtypes(master, master, master, master)
    assert plugin.input_cast(unit(master=master)) is None


# Units that differ


def test_first_override_that_fits_counts_and_keeps_the_settings_it_does_not_name() -> None:
    plugin = Mixed(
        context(),
        param="bf16",
        reduce="fp32",
        overrides={
            "torch.nn:Embedding": {"param": "fp32"},
            "layers.1*": {"reduce": "bf16"},
            "layers.*": {"param": "fp16", "full_precision_in_eval": True},
        },
    )
    assert plugin.dtypes(unit("layers.1", nn.Embedding)) == UnitDtypes(F32, F32, F32, F32)
    assert plugin.dtypes(unit("layers.10")) == UnitDtypes(BF16, BF16, BF16, F32)
    assert plugin.dtypes(unit("layers.2")) == UnitDtypes(F16, F16, F32, F32)
    assert plugin.dtypes(unit("head")) == UnitDtypes(BF16, BF16, F32, F32)
    assert [plugin.full_precision_in_eval(unit(name)) for name in ("layers.2", "head")] == [True, False]


def test_an_override_of_the_empty_name_is_for_the_root_alone() -> None:
    plugin = Mixed(context(), param="bf16", overrides={"": {"output": "fp32"}})
    assert plugin.output_cast(unit("layers.0")) is None
    to_fp32 = plugin.output_cast(unit("", is_root=True))
    assert to_fp32 is not None
    assert to_fp32(torch.ones(2, dtype=BF16)).dtype == F32


def test_modules_left_alone_keep_their_dtype_inside_a_low_precision_model() -> None:
    plugin = Bf16(context("bf16"), leave_alone=["torch.nn:LayerNorm", nn.modules.batchnorm._BatchNorm])
    norm, dense = nn.LayerNorm(4), nn.Linear(4, 4)
    assert plugin.leaves_alone(norm)
    assert plugin.leaves_alone(nn.BatchNorm1d(4))
    assert not plugin.leaves_alone(dense)
    norm_unit = unit("norm", nn.LayerNorm)
    assert plugin.dtypes(norm_unit) == UnitDtypes(F32, F32, F32, F32)

    # In the order in which a model would run them: bf16 in, the norm in fp32, bf16 out again.
    (into_norm,), _ = cast_inputs(plugin, torch.randn(3, 4).to(BF16), of=norm_unit)
    assert into_norm.dtype == F32
    cast_back = plugin.output_cast(norm_unit)
    assert cast_back is not None
    assert dense.to(BF16)(cast_back(norm(into_norm))).dtype == BF16


def test_inputs_are_cast_where_the_settings_say_so() -> None:
    root, inner = unit("", is_root=True), unit("layers.0")
    only_root = Mixed(context(), param="bf16", cast_inputs=False)
    assert only_root.input_cast(inner) is None
    assert only_root.input_cast(root) is not None
    nowhere = Mixed(context(), param="bf16", cast_inputs=False, cast_root_inputs=False)
    assert nowhere.input_cast(root) is None
    assert Bf16(context(), cast_inputs=False).input_cast(root) is None
    assert Mixed(context(), reduce="bf16").input_cast(root) is None


# Settings that are refused


def test_a_reduction_too_narrow_for_one_unit_names_it() -> None:
    plugin = Mixed(context(), communication="fp32")
    assert plugin.dtypes(unit(master=F64)).reduce == F64
    with pytest.raises(ConfigError, match=r"unit 'layers.3'"):
        plugin.dtypes(unit("layers.3", master=BF16))
