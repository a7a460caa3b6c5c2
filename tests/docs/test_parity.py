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

#: Names of the tests behind `test_`, by their class, by the file of PyTorch's that it is in: releases 2.3 and 2.4.
PYTORCH = {
    "test_wrap.py": {
        "TestFSDPWrap": (
            "error_already_wrapped wrap_batchnorm_individually bn_always_wrapped_individually main_wrap_api"
        ),
        "TestAutoWrap": (
            "wrap wrap_disabled_outside_context wrap_override_defaults always_wrap transformer_auto_wrap_policy "
            "module_wrap_policy module_wrap_policy_callable custom_policy auto_wrap_api "
            "auto_wrap_preset_exclude_wrap auto_wrap_preset_exclude_wrap_include_children "
            "auto_wrap_preset_force_leaf auto_wrap_preset_force_leaf_custom auto_wrap_smoke_test "
            "auto_wrap_with_ignored_modules frozen_params"
        ),
        "TestWrapUtils": "validate_frozen_params",
    },
    "test_fsdp_use_orig_params.py": {
        "TestFSDPUseOrigParamsMultipleParamGroups": (
            "fsdp_compile diff_hyperparams diff_hyperparams_cpu_offload diff_trainability multiple_optimizers"
        ),
        "TestFSDPUseOrigParamsUnshardReshard": "multiple_forward summon_between_two_forwards",
        "TestFSDPUseOrigParamsParamAccess": "access_params_after_forward",
        "TestFSDPUseOrigParamsWriteback": (
            "param_writeback grad_writeback writeback_shape_mismatch "
            "writeback_between_fwd_and_bwd_for_no_reshard_raises no_reshard_and_mixed_precision"
        ),
        "TestFSDPUseOrigParamsFQNs": "named_parameters_in_forward",
        "TestFSDPUseOrigParamsNoSync": "no_sync_correctness no_sync_mixed_precision",
        "TestFSDPUseOrigParamsInit": "non_uniform_requires_grad",
        "TestMultiTensorApply": "multi_tensor_apply_size0_tensors_cpu multi_tensor_apply_size0_tensors_cuda",
    },
    "test_fsdp_core.py": {
        "TestParityWithDDP": (
            "nested_wrapped_model nested_wrapped_model_single_iteration_mixed_precision nested_always_wrap_model "
            "transformer delayed_optim_step delayed_reduce_scatter mixture_of_experts "
            "mixture_of_experts_with_delay_before_free"
        ),
        "TestParamInit": "param_change_after_init",
        "TestHooks": (
            "pre_backward_hook_registration pre_backward_hook_registration_after_state_dict register_functions_called"
        ),
        "TestNoGrad": "transformer_no_grad",
        "TestAutograd": "unshard_params_as_tensors",
    },
    "test_fsdp_mixed_precision.py": {
        "TestFSDPMixedPrecisionSharded": (
            "mixed_precision_no_reshard_after_forward mixed_precision_e2e_full_shard mp_embedding_reduce "
            "mp_embedding_only_params_and_bufs mp_embedding_default mp_embedding_params_and_reduce_diff "
            "mixed_precision_resnet grads_reduced_precision mp_batchnorm eval_root_cast_inputs "
            "full_precision_in_eval full_precision_in_eval_buffers full_precision_in_eval_comm "
            "input_grads_with_param_mixed_precision"
        ),
        "TestFSDPMixedPrecisionUnsharded": (
            "grads_reduced_precision mixed_precision_no_reshard_after_forward mixed_precision_e2e_full_shard"
        ),
        "TestFSDPMixedPrecisionIgnoredModules": "mixed_precision_with_ignored_module",
        "TestFSDPDifferentSubmodulePrecision": (
            "float16_on_one_submodule float16_on_one_submodule_skip_inputs "
            "float16_on_one_submodule_skip_inputs_error submodules_with_different_precisions_error "
            "submodules_with_different_precisions submodules_with_external_inputs"
        ),
        "TestFSDPTrainEval": "train_ema_eval_flow",
    },
    "test_fsdp_flatten_params.py": {
        "TestFlattenParams": (
            "partial_flattening flatten_nothing empty_module numel_without_shared_params numel_with_shared_params "
            "output_without_shared_params output_with_shared_params pnorm_after_step_with_shared_params "
            "flat_param_shard_metadata_aligned_full_precision flat_param_shard_metadata_aligned_mixed_precision"
        ),
    },
    "test_fsdp_grad_acc.py": {
        "TestGradAcc": "grad_acc grad_acc_cpu_offload",
    },
    "test_fsdp_memory.py": {
        "TestFSDPMemory": "fsdp_memory",
    },
}


def named_in(file: str) -> list[tuple[str, str]]:
    return [(owner, name) for owner, names in PYTORCH[file].items() for name in names.split()]


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
    assert [row[0] for row in rows] == [f"`{owner}.test_{name}`" for owner, name in named_in(file)]


def test_there_are_as_many_as_the_page_says() -> None:
    pairs = [pair for file in PYTORCH for pair in named_in(file)]
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


@pytest.mark.slow
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
