"""float8 (E4M3) matrices with one float32 scale a block of 128 x 128, DeepSeek-V3's checkpoint format: value = weight * scale."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
BLOCK = (128, 128)
AT_ONCE = 2**17  # numbers in the buffers of one pass, which then stay in the cache


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK, *, corner: tuple[int, int] = (0, 0),
               dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [r, c] of the E4M3 numbers `weight` [r, c], which stand at `corner` of the matrix that `scale` [blocks, blocks] belongs to.

    Bit for bit the float32 product, then rounded to `dtype`. torch converts E4M3 one number at a time; here its bits are moved to where
    float16 has them, which divides by 256 and is exact also below the normal numbers. E4M3's one NaN comes out as NaN.
    """
    if dtype == torch.bfloat16 and _compiled() is not None:
        return _dequantize_compiled(weight.contiguous(), scale.contiguous(), block, corner)
    rows, columns = weight.shape
    stored = weight.view(torch.int8)
    out = torch.empty(rows, columns, dtype=dtype)
    at_once = max(1, min(block[0], AT_ONCE // max(1, columns)))
    bits = torch.empty(at_once, columns, dtype=torch.int16)
    values = torch.empty(at_once, columns)
    huge = bool(scale.numel()) and float(scale.abs().amax()) >= 2.0**119  # 256 of it would not be a float32
    factors = scale[:, (torch.arange(columns) + corner[1]) // block[1]] * (1 if huge else 256)
    low = 0
    while low < rows:
        row = (corner[0] + low) // block[0]
        high = min(rows, low + at_once, (row + 1) * block[0] - corner[0])
        half, whole = bits[: high - low], values[: high - low]
        half.copy_(stored[low:high]).mul_(128).bitwise_and_(~0x4000)  # torch multiplies faster than it shifts
        whole.copy_(half.view(torch.float16))
        out[low:high] = (whole.mul_(256) if huge else whole).mul_(factors[row])
        low = high
    if stored.numel() and (stored.amax() == 0x7F or weight.view(torch.uint8).amax() == 0xFF):  # the two codes of NaN
        out[stored.bitwise_and(0x7F) == 0x7F] = float("nan")
    return out


@cache
def _compiled():
    """The function of fp8.c, or None where it was not built."""
    for file in Path(__file__).parent.glob("_fp8.*.so"):
        return ctypes.CDLL(str(file)).moerl_dequantize
    return None


def _dequantize_compiled(weight: Tensor, scale: Tensor, block: tuple[int, int], corner: tuple[int, int]) -> Tensor:
    out = torch.empty(weight.shape, dtype=torch.bfloat16)
    pointers, numbers = ctypes.c_void_p, ctypes.c_int64
    _compiled()(
        pointers(weight.data_ptr()), pointers(out.data_ptr()), *map(numbers, (*weight.shape, *corner)), pointers(scale.data_ptr()),
        *map(numbers, (scale.shape[1], *block)),
    )
    return out


def quantize(values: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """E4M3 numbers [r, c] and float32 scales [ceil(r / 128), ceil(c / 128)]: a block's largest magnitude becomes 448."""
    rows, columns = values.shape
    grid = tuple(-(-n // size) for n, size in zip(values.shape, block))
    numbers, scale = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(grid)
    padded = torch.zeros(block[0], grid[1] * block[1])
    blocks = padded.view(block[0], grid[1], block[1])
    for row in range(grid[0]):
        found = values[row * block[0] : (row + 1) * block[0]]
        padded[: len(found), :columns] = found
        padded[len(found) :] = 0
        largest = torch.maximum(blocks.amax((0, 2)), blocks.amin((0, 2)).neg_()) / LARGEST
        scale[row] = largest.masked_fill_(largest == 0, 1.0)
        blocks /= scale[row][:, None]
        numbers[row * block[0] :][: len(found)] = padded.clamp_(-LARGEST, LARGEST)[: len(found), :columns]
    return numbers, scale
