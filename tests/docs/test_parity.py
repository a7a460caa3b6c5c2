"""docs/parity.md has every one of PyTorch's FSDP tests, and names tests that are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parity.md"
HEADER = ["PyTorch's test", "What it asserts", "Test here", "Where", "Reference, differences"]
_NODE = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)*)`")
_PLACE = re.compile(r"(CPU|GPU)(?: (gloo|nccl))? [12]")

#: Class and name of each test, by the file of PyTorch's that it is in: releases 2.3 and 2.4.
PYTORCH = {
    "test_wrap.py": (
        ("TestFSDPWrap", "test_error_already_wrapped"),
        ("TestFSDPWrap", "test_wrap_batchnorm_individually"),
        ("TestFSDPWrap", "test_bn_always_wrapped_individually"),
        ("TestFSDPWrap", "test_main_wrap_api"),
        ("TestAutoWrap", "test_wrap"),
        ("TestAutoWrap", "test_wrap_disabled_outside_context"),
        ("TestAutoWrap", "test_wrap_override_defaults"),
        ("TestAutoWrap", "test_always_wrap"),
        ("TestAutoWrap", "test_transformer_auto_wrap_policy"),
        ("TestAutoWrap", "test_module_wrap_policy"),
        ("TestAutoWrap", "test_module_wrap_policy_callable"),
        ("TestAutoWrap", "test_custom_policy"),
        ("TestAutoWrap", "test_auto_wrap_api"),
        ("TestAutoWrap", "test_auto_wrap_preset_exclude_wrap"),
        ("TestAutoWrap", "test_auto_wrap_preset_exclude_wrap_include_children"),
        ("TestAutoWrap", "test_auto_wrap_preset_force_leaf"),
        ("TestAutoWrap", "test_auto_wrap_preset_force_leaf_custom"),
        ("TestAutoWrap", "test_auto_wrap_smoke_test"),
        ("TestAutoWrap", "test_auto_wrap_with_ignored_modules"),
        ("TestAutoWrap", "test_frozen_params"),
        ("TestWrapUtils", "test_validate_frozen_params"),
    ),
    "test_fsdp_use_orig_params.py": (
        ("TestFSDPUseOrigParamsMultipleParamGroups", "test_fsdp_compile"),
        ("TestFSDPUseOrigParamsMultipleParamGroups", "test_diff_hyperparams"),
        ("TestFSDPUseOrigParamsMultipleParamGroups", "test_diff_hyperparams_cpu_offload"),
        ("TestFSDPUseOrigParamsMultipleParamGroups", "test_diff_trainability"),
        ("TestFSDPUseOrigParamsMultipleParamGroups", "test_multiple_optimizers"),
        ("TestFSDPUseOrigParamsUnshardReshard", "test_multiple_forward"),
        ("TestFSDPUseOrigParamsUnshardReshard", "test_summon_between_two_forwards"),
        ("TestFSDPUseOrigParamsParamAccess", "test_access_params_after_forward"),
        ("TestFSDPUseOrigParamsWriteback", "test_param_writeback"),
        ("TestFSDPUseOrigParamsWriteback", "test_grad_writeback"),
        ("TestFSDPUseOrigParamsWriteback", "test_writeback_shape_mismatch"),
        ("TestFSDPUseOrigParamsWriteback", "test_writeback_between_fwd_and_bwd_for_no_reshard_raises"),
        ("TestFSDPUseOrigParamsWriteback", "test_no_reshard_and_mixed_precision"),
        ("TestFSDPUseOrigParamsFQNs", "test_named_parameters_in_forward"),
        ("TestFSDPUseOrigParamsNoSync", "test_no_sync_correctness"),
        ("TestFSDPUseOrigParamsNoSync", "test_no_sync_mixed_precision"),
        ("TestFSDPUseOrigParamsInit", "test_non_uniform_requires_grad"),
        ("TestMultiTensorApply", "test_multi_tensor_apply_size0_tensors_cpu"),
        ("TestMultiTensorApply", "test_multi_tensor_apply_size0_tensors_cuda"),
    ),
    "test_fsdp_core.py": (
        ("TestParityWithDDP", "test_nested_wrapped_model"),
        ("TestParityWithDDP", "test_nested_wrapped_model_single_iteration_mixed_precision"),
        ("TestParityWithDDP", "test_nested_always_wrap_model"),
        ("TestParityWithDDP", "test_transformer"),
        ("TestParityWithDDP", "test_delayed_optim_step"),
        ("TestParityWithDDP", "test_delayed_reduce_scatter"),
        ("TestParityWithDDP", "test_mixture_of_experts"),
        ("TestParityWithDDP", "test_mixture_of_experts_with_delay_before_free"),
        ("TestParamInit", "test_param_change_after_init"),
        ("TestHooks", "test_pre_backward_hook_registration"),
        ("TestHooks", "test_pre_backward_hook_registration_after_state_dict"),
        ("TestHooks", "test_register_functions_called"),
        ("TestNoGrad", "test_transformer_no_grad"),
        ("TestAutograd", "test_unshard_params_as_tensors"),
    ),
    "test_fsdp_mixed_precision.py": (
        ("TestFSDPMixedPrecisionSharded", "test_mixed_precision_no_reshard_after_forward"),
        ("TestFSDPMixedPrecisionSharded", "test_mixed_precision_e2e_full_shard"),
        ("TestFSDPMixedPrecisionSharded", "test_mp_embedding_reduce"),
        ("TestFSDPMixedPrecisionSharded", "test_mp_embedding_only_params_and_bufs"),
        ("TestFSDPMixedPrecisionSharded", "test_mp_embedding_default"),
        ("TestFSDPMixedPrecisionSharded", "test_mp_embedding_params_and_reduce_diff"),
        ("TestFSDPMixedPrecisionSharded", "test_mixed_precision_resnet"),
        ("TestFSDPMixedPrecisionSharded", "test_grads_reduced_precision"),
        ("TestFSDPMixedPrecisionSharded", "test_mp_batchnorm"),
        ("TestFSDPMixedPrecisionSharded", "test_eval_root_cast_inputs"),
        ("TestFSDPMixedPrecisionSharded", "test_full_precision_in_eval"),
        ("TestFSDPMixedPrecisionSharded", "test_full_precision_in_eval_buffers"),
        ("TestFSDPMixedPrecisionSharded", "test_full_precision_in_eval_comm"),
        ("TestFSDPMixedPrecisionSharded", "test_input_grads_with_param_mixed_precision"),
        ("TestFSDPMixedPrecisionUnsharded", "test_grads_reduced_precision"),
        ("TestFSDPMixedPrecisionUnsharded", "test_mixed_precision_no_reshard_after_forward"),
        ("TestFSDPMixedPrecisionUnsharded", "test_mixed_precision_e2e_full_shard"),
        ("TestFSDPMixedPrecisionIgnoredModules", "test_mixed_precision_with_ignored_module"),
        ("TestFSDPDifferentSubmodulePrecision", "test_float16_on_one_submodule"),
        ("TestFSDPDifferentSubmodulePrecision", "test_float16_on_one_submodule_skip_inputs"),
        ("TestFSDPDifferentSubmodulePrecision", "test_float16_on_one_submodule_skip_inputs_error"),
        ("TestFSDPDifferentSubmodulePrecision", "test_submodules_with_different_precisions_error"),
        ("TestFSDPDifferentSubmodulePrecision", "test_submodules_with_different_precisions"),
        ("TestFSDPDifferentSubmodulePrecision", "test_submodules_with_external_inputs"),
        ("TestFSDPTrainEval", "test_train_ema_eval_flow"),
    ),
    "test_fsdp_flatten_params.py": (
        ("TestFlattenParams", "test_partial_flattening"),
        ("TestFlattenParams", "test_flatten_nothing"),
        ("TestFlattenParams", "test_empty_module"),
        ("TestFlattenParams", "test_numel_without_shared_params"),
        ("TestFlattenParams", "test_numel_with_shared_params"),
        ("TestFlattenParams", "test_output_without_shared_params"),
        ("TestFlattenParams", "test_output_with_shared_params"),
        ("TestFlattenParams", "test_pnorm_after_step_with_shared_params"),
        ("TestFlattenParams", "test_flat_param_shard_metadata_aligned_full_precision"),
        ("TestFlattenParams", "test_flat_param_shard_metadata_aligned_mixed_precision"),
    ),
    "test_fsdp_grad_acc.py": (
        ("TestGradAcc", "test_grad_acc"),
        ("TestGradAcc", "test_grad_acc_cpu_offload"),
    ),
    "test_fsdp_memory.py": (("TestFSDPMemory", "test_fsdp_memory"),),
}


@cache
def sections() -> dict[str, list[list[str]]]:
    """The cells of each table row, its header's first, by the section's heading."""
    tables: dict[str, list[list[str]]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif line.startswith("|") and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            tables.setdefault(heading, []).append(cells)
    return tables


@cache
def defined_in(file: str) -> set[str]:
    """What follows the file in the node ids of the tests that it defines, without their parameters; or none of it."""
    found = {""}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(f"::{node.name}")
        elif isinstance(node, ast.ClassDef):
            found.update(f"::{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
    return found


@pytest.mark.parametrize("file", PYTORCH)
def test_every_test_of_pytorchs_has_one_row(file: str) -> None:
    header, *rows = sections()[file]
    assert header == HEADER
    assert [row[0] for row in rows] == [f"`{owner}.{name}`" for owner, name in PYTORCH[file]]


def test_there_are_as_many_as_the_page_says() -> None:
    pairs = [pair for of_file in PYTORCH.values() for pair in of_file]
    assert len(pairs) == len(set(pairs)) == 92
    assert " 92 tests of seven files " in PAGE.read_text(encoding="utf-8").replace("\n", " ")


@pytest.mark.parametrize("file", PYTORCH)
def test_every_row_is_complete(file: str) -> None:
    for row in sections()[file][1:]:
        assert len(row) == len(HEADER), row
        assert all(row), f"{row[0]} has an empty cell"
        assert not any(re.search(r"\bopen\b", cell, re.IGNORECASE) for cell in row), f"{row[0]} is open"
        assert all(re.fullmatch(_NODE, node) and "::" in node for node in row[2].split(", ")), f"{row[0]}: {row[2]}"
        assert all(_PLACE.fullmatch(place) for place in row[3].split(", ")), f"{row[0]}: {row[3]}"


def test_every_test_that_is_named_exists() -> None:
    named = _NODE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 92
    for file, test in named:
        assert test in defined_in(file), f"{file}{test}"


def test_every_file_of_the_drop_ins_tests_is_named() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "fsdp").glob("test_*.py")}
    assert {file for file, _ in _NODE.findall(PAGE.read_text(encoding="utf-8"))} == files


def test_every_test_in_the_files_with_rows_is_named() -> None:
    named = set(_NODE.findall(PAGE.read_text(encoding="utf-8")))
    for file in {node[0] for table in PYTORCH for row in sections()[table][1:] for node in _NODE.findall(row[2])}:
        tests = {test for test in defined_in(file) if test.rpartition("::")[2].startswith("test_")}
        assert {test for test in tests if (file, test) not in named} == set(), f"{file} has tests without a row"
