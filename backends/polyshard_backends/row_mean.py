"""The mean of a few long rows in one pass over memory, as a CUDA kernel.

torch's reduction over a short first dimension reaches half to three quarters of the memory's bandwidth (H200, 2 to 8
rows of bf16); this one all of it. The time counts twice: it is taken from computation that runs beside it.

NVRTC, which comes with torch, compiles it in 0.02 to 0.13 s. Triton takes 1.1 s for its first kernel in a process, and
3.9 s where nothing is in its cache on disk, all of it in a job's first backward; ``torch.cuda._compile_kernel`` takes
0.55 s, since it imports setuptools to look for headers.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from . import _torch_private

#: Elements of a row that a thread adds up: 16 bytes of each row.
_VECTOR = 8
_THREADS = 256

_SOURCE = r"""
extern "C" __global__ void mean_of_rows(const uint4* rows, float4* out, long long vectors, float factor) {
  const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  #pragma unroll 8
  for (int row = 0; row < WORLD_SIZE; ++row) {
    const uint4 words = rows[row * vectors + at];
    const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
    #pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float low, high;
  #if BFLOAT16
      low = __uint_as_float(pairs[pair] << 16);
      high = __uint_as_float(pairs[pair] & 0xffff0000u);
  #else
      asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
          : "=f"(low), "=f"(high) : "r"(pairs[pair]));
  #endif
      sums[2 * pair] += low;
      sums[2 * pair + 1] += high;
    }
  }
  out[2 * at] = make_float4(sums[0] * factor, sums[1] * factor, sums[2] * factor, sums[3] * factor);
  out[2 * at + 1] = make_float4(sums[4] * factor, sums[5] * factor, sums[6] * factor, sums[7] * factor);
}
"""


class MeanOfRows:
    """The kernel for rows of one dtype, as many as there are ranks, on one device."""

    def __init__(self, dtype: torch.dtype, world_size: int, device_index: int) -> None:
        """Compile it. Raises OSError where a library is missing, RuntimeError where one of them fails."""
        self._device_index = device_index
        self._driver = ctypes.CDLL("libcuda.so.1")
        image = _compiled(dtype is torch.bfloat16, world_size, torch.cuda.get_device_capability(device_index))
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device_index):
            _check(self._driver.cuModuleLoadData(ctypes.byref(module), image))
        _check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, b"mean_of_rows"))
        self._factor = ctypes.c_float(1.0 / world_size)

    @staticmethod
    def takes(out: torch.Tensor, rows: torch.Tensor) -> bool:
        """Whether these lie as the kernel reads and writes them."""
        addresses = rows.data_ptr() | out.data_ptr()
        return out.numel() % _VECTOR == 0 and addresses % 16 == 0

    def __call__(self, out: torch.Tensor, rows: torch.Tensor) -> None:
        """``out = rows.mean(0)``, on the current stream of the device, which is the current one.

        ``rows``: ``[world_size, n]``, contiguous; ``out``: ``[n]``, fp32; such as ``takes`` answers.
        """
        vectors = out.numel() // _VECTOR
        # Of this call alone: another thread may launch the same kernel. The launch reads them before it returns.
        given = (ctypes.c_void_p(rows.data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_longlong(vectors))
        places = (ctypes.c_void_p * 4)(*(ctypes.addressof(each) for each in (*given, self._factor)))
        stream = ctypes.c_void_p(_torch_private.stream_handle(self._device_index))
        blocks = -(-vectors // _THREADS)
        _check(self._driver.cuLaunchKernel(self._function, blocks, 1, 1, _THREADS, 1, 1, 0, stream, places, None))


@cache
def mean_of_rows(dtype: torch.dtype, world_size: int, device_index: int) -> MeanOfRows | None:
    """The kernel for rows of ``dtype``, bf16 or fp16; None where it cannot be compiled, as on AMD's devices."""
    try:
        return MeanOfRows(dtype, world_size, device_index)
    except (OSError, RuntimeError):
        return None


def _compiled(bfloat16: bool, world_size: int, capability: tuple[int, int]) -> bytes:
    """A binary for devices of ``capability``."""
    # By the name that torch loaded it under.
    nvrtc = ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}")
    major, minor = capability
    options = (f"-arch=sm_{major}{minor}", f"-DWORLD_SIZE={world_size}", f"-DBFLOAT16={int(bfloat16)}")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), _SOURCE.encode(), b"row_mean.cu", 0, None, None))
    try:
        listed = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        _check(nvrtc.nvrtcCompileProgram(program, len(options), listed))
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, image))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _check(status: int) -> None:
    """Raise RuntimeError for an error of the driver or of NVRTC."""
    if status:
        raise RuntimeError(f"CUDA or NVRTC returned error {status}")
