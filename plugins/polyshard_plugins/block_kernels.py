"""``block_codec.py`` as Triton kernels: one launch encodes the shards of several units, one decodes them.

The same bits as there, which is why codes of fp8 are made and read by integer operations: they are the same on every
device that Triton serves, where its own conversions are there for some alone.

[Note: several tensors in one launch]
A launch is given up to ``MOST`` tensors, and each of its programs looks for the one that it works on: tensors have so
many tiles each, and lie one behind the other. What a table in device memory would save in arguments it would cost in a
copy to the device for every launch, since gather buffers come and go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .block_codec import SMALLEST_SCALE, BlockCode, Number

#: Tensors in one launch at most; a longer list takes several.
MOST = 16
#: Elements of a tile, unless four blocks are more: then so many. Scales are padded to fours.
_TILE = 2048

_SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def fp8_codes(quotients):  # type: ignore[no-untyped-def]
    """The codes of e4m3, int32, of finite ``quotients`` up to about 448, fp32."""
    bits = quotients.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Rounded to 3 bits of mantissa, with the exponent's offset taken from fp32's to that of fp8.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2**-6 codes are multiples of 2**-9, the last bit beside 2**14.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)


@triton.jit  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    messages,
    shards,
    numels,
    sizes,
    reciprocal: tl.constexpr,
    int8: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    number = tl.program_id(0)
    tile = number
    message, shard, numel, size = messages[0], shards[0], numels[0], sizes[0]
    first = tl.cdiv(numel, block * blocks)
    for i in tl.static_range(1, len(messages)):
        here = number >= first
        tile = tl.where(here, number - first, tile)
        message = tl.where(here, messages[i], message)
        shard = tl.where(here, shards[i], shard)
        numel = tl.where(here, numels[i], numel)
        size = tl.where(here, sizes[i], size)
        first += tl.cdiv(numels[i], block * blocks)
    rows = tile.to(tl.int64) * blocks + tl.arange(0, blocks)
    offsets = rows[:, None] * block + tl.arange(0, block)[None, :]
    values = tl.load(shard + offsets, mask=offsets < numel, other=0.0).to(tl.float32)
    # Magnitudes as integers are in the same order, with infinity and every NaN above them: a maximum loses none.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = largest < 0x7F800000
    scale = tl.maximum(tl.where(finite, largest, 0).to(tl.float32, bitcast=True) * reciprocal, _SMALLEST)
    quotients = tl.div_rn(values, tl.broadcast_to(scale[:, None], (blocks, block)))
    if int8:
        # Beside 1.5 * 2**23 the last bit of a sum is one: adding rounds to even, and leaves the integer in the bits.
        codes = (quotients + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        codes = fp8_codes(quotients)
    codes = tl.where(finite[:, None], codes, 0)
    start = (numel + 15) // 16 * 16
    tl.store(message + offsets, codes.to(tl.uint8), mask=offsets < start)
    scale = tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000).to(tl.float32, bitcast=True)
    padded = (tl.cdiv(numel, block) + 3) // 4 * 4
    tl.store((message + start).to(tl.pointer_type(tl.float32)) + rows, scale, mask=rows < padded)
    if tile == 0:
        # Fewer than 256: a rank's part is a multiple of that.
        rest = start.to(tl.int64) + 4 * padded + tl.arange(0, 256)
        tl.store(message + rest, tl.zeros((256,), dtype=tl.uint8), mask=rest < size)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    messages,
    outs,
    numels,
    sizes,
    ranks,
    int8: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    number = tl.program_id(0)
    tile = number
    message, out, numel, size = messages[0], outs[0], numels[0], sizes[0]
    first = ranks * tl.cdiv(numel, block * blocks)
    for i in tl.static_range(1, len(messages)):
        here = number >= first
        tile = tl.where(here, number - first, tile)
        message = tl.where(here, messages[i], message)
        out = tl.where(here, outs[i], out)
        numel = tl.where(here, numels[i], numel)
        size = tl.where(here, sizes[i], size)
        first += ranks * tl.cdiv(numels[i], block * blocks)
    tiles = tl.cdiv(numel, block * blocks)
    rank = (tile // tiles).to(tl.int64)
    rows = (tile % tiles).to(tl.int64) * blocks + tl.arange(0, blocks)
    offsets = rows[:, None] * block + tl.arange(0, block)[None, :]
    start = (numel + 15) // 16 * 16
    sent = message + rank * size
    codes = tl.load(sent + offsets, mask=offsets < numel, other=0).to(tl.int32)
    scale = tl.load((sent + start).to(tl.pointer_type(tl.float32)) + rows, mask=rows * block < numel, other=0.0)
    if int8:
        values = ((codes << 24) >> 24).to(tl.float32)
    else:
        magnitude = codes & 0x7F
        normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
        values = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        values = (values.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)).to(tl.float32, bitcast=True)
    tl.store(out + rank * numel + offsets, (values * scale[:, None]).to(out.dtype.element_ty), mask=offsets < numel)


def encode(code: BlockCode, messages: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> None:
    """``code.encode`` of each of ``messages`` and ``shards``, which are of one dtype, contiguous and not empty."""
    blocks = _blocks(code)
    for few in range(0, len(messages), MOST):
        ours, given = tuple(messages[few : few + MOST]), tuple(shards[few : few + MOST])
        numels = tuple(shard.numel() for shard in given)
        tiles = sum(triton.cdiv(numel, code.block * blocks) for numel in numels)
        sizes = tuple(message.numel() for message in ours)
        int8, reciprocal = code.number is Number.INT8, code.number.reciprocal
        # Triton launches on the current device, which need not be the tensors' where a model is being sharded.
        with torch.cuda.device_of(ours[0]):  # type: ignore[no-untyped-call]
            _encode[(tiles,)](ours, given, numels, sizes, reciprocal, int8, code.block, blocks, num_warps=4)


def decode(code: BlockCode, messages: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """``code.decode`` of each of ``messages`` and ``outs``: of one dtype and of equal ranks, contiguous, not empty."""
    blocks = _blocks(code)
    for few in range(0, len(messages), MOST):
        sent, ours = tuple(messages[few : few + MOST]), tuple(outs[few : few + MOST])
        numels = tuple(out.size(1) for out in ours)
        ranks = ours[0].size(0)
        tiles = ranks * sum(triton.cdiv(numel, code.block * blocks) for numel in numels)
        sizes = tuple(message.size(1) for message in sent)
        int8 = code.number is Number.INT8
        with torch.cuda.device_of(sent[0]):  # type: ignore[no-untyped-call]
            _decode[(tiles,)](sent, ours, numels, sizes, ranks, int8, code.block, blocks, num_warps=4)


def _blocks(code: BlockCode) -> int:
    return max(4, _TILE // code.block)
