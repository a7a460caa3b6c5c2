"""Kernels of a profiled step by what they compute: names as CUDA, cuDNN, cuBLAS and Triton give them, and times."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from polyshard.errors import ConfigError
from polyshard_plugins.trace_kernels import Kernel, KernelKind, kernel_table, kind_of, read_kernels
from polyshard_tools.cli import main

NAMES = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN": KernelKind.GEMM,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": KernelKind.GEMM,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>": KernelKind.GEMM,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>": KernelKind.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob": KernelKind.ATTENTION,
    "void at::native::(anonymous)::cunn_SoftMaxForward<8, float>": KernelKind.LOSS,
    "triton_red_fused__log_softmax__to_copy_nll_loss_forward_0": KernelKind.LOSS,
    "void at::native::(anonymous)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>": KernelKind.NORM,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": KernelKind.NORM,
    "triton_poi_fused__to_copy_mul_silu_3": KernelKind.POINTWISE,
    "void at::native::(anonymous)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": KernelKind.OPTIMIZER,
    "void at::native::(anonymous)::multi_tensor_apply_kernel<..., at::native::Copy<float, float>>": KernelKind.COPY,
    "Memcpy DtoD (Device -> Device)": KernelKind.COPY,
    "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>": (
        KernelKind.POINTWISE
    ),
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)": KernelKind.COMMUNICATION,
    "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)": KernelKind.COMMUNICATION,
    "Memcpy PtoP (Device -> Device)": KernelKind.COMMUNICATION,
}


def test_kernels_are_told_by_their_names() -> None:
    assert {name: kind_of(name) for name in NAMES} == NAMES


def test_times_add_up_to_the_step_whatever_runs_beside_what() -> None:
    draw = random.Random(3)
    kernels = [
        Kernel(name, start, start + draw.randint(1, 40))
        for name in NAMES
        for start in (draw.randint(0, 2000) for _ in range(9))
    ]
    table = kernel_table(kernels)
    # Microsecond by microsecond: the first kind that runs has it.
    begin, end = (round(f(k[i] for k in kernels)) for f, i in ((min, 1), (max, 2)))
    expected = dict.fromkeys(KernelKind, 0.0)
    for at in range(begin, end):
        running = {kind_of(kernel.name) for kernel in kernels if kernel.start_us <= at < kernel.end_us}
        expected[next((kind for kind in KernelKind if kind in running), KernelKind.IDLE)] += 0.001
    assert table.ms == pytest.approx(expected)
    assert table.whole_ms == pytest.approx((end - begin) / 1000)
    assert sum(table.launches.values()) == len(kernels)


def trace_of(path: Path) -> Path:
    """A step of 10 ms: 4 of products, 1 of a copy beside nothing, the rest idle."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 1000.0, "dur": 4000.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 4500.0, "dur": 1500.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
        {"ph": "X", "cat": "kernel", "name": "void adam", "ts": 10999.0, "dur": 1.0},
    ]
    text = json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_the_command_says_what_to_change_first(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(tmp_path / name)
    assert main(["trace", str(path)]) == 0
    text = capsys.readouterr().out
    assert "idle                 5.00" in text
    assert "GEMM                 4.00" in text
    assert "whole               10.00" in text
    assert "capture the step" in text
    assert main(["trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ms"]["copy"] == 1.0


def test_what_is_no_trace_of_kernels_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("[1]")
    for wrong in ("other.json", "none.json"):
        assert main(["trace", str(tmp_path / wrong)]) == 2
        assert "export_chrome_trace" in capsys.readouterr().err
    (tmp_path / "cpu.json").write_text('{"traceEvents": []}')
    with pytest.raises(ConfigError, match=r"ProfilerActivity\.CUDA"):
        kernel_table(read_kernels(tmp_path / "cpu.json"))
