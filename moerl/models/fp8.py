"""float8 (E4M3) matrices with one float32 scale a block of 128 x 128, DeepSeek-V3's checkpoint format: value = weight * scale."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
BLOCK = (128, 128)
ROWS_AT_ONCE = 32  # of a matrix in the buffers of one pass, which then stay in the cache


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int] = BLOCK, *, corner: tuple[int, int] = (0, 0),
               dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [r, c] of the E4M3 numbers `weight` [r, c], which stand at `corner` of the matrix that `scale` [blocks, blocks] belongs to.

    Bit for bit the float32 product, then rounded to `dtype`. torch converts E4M3 one number at a time; here its bits are moved to where
    float16 has them, which divides by 256 and is exact also below the normal numbers. E4M3's one NaN comes out as NaN.
    """
    rows, columns = weight.shape
    stored = weight.view(torch.int8)
    out = torch.empty(rows, columns, dtype=dtype)
    bits = torch.empty(ROWS_AT_ONCE, columns, dtype=torch.int16)
    values = torch.empty(ROWS_AT_ONCE, columns)
    column = (torch.arange(columns) + corner[1]) // block[1]
    low = 0
    while low < rows:
        row = (corner[0] + low) // block[0]
        high = min(rows, low + ROWS_AT_ONCE, (row + 1) * block[0] - corner[0])
        half, whole = bits[: high - low], values[: high - low]
        half.copy_(stored[low:high]).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        whole.copy_(half.view(torch.float16))
        out[low:high] = whole.mul_(scale[row, column] * 256)
        low = high
    if (nan := stored.bitwise_and(0x7F) == 0x7F).any():
        out[nan] = float("nan")
    return out


def quantize(values: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """E4M3 numbers [r, c] and float32 scales [ceil(r / 128), ceil(c / 128)]: a block's largest magnitude becomes 448."""
    rows, columns = values.shape
    grid = tuple(-(-n // size) for n, size in zip(values.shape, block))
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = values
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    scale = blocks.abs().amax((1, 3)) / LARGEST
    scale[scale == 0] = 1.0
    blocks /= scale[:, None, :, None]
    return padded.clamp_(-LARGEST, LARGEST)[:rows, :columns].to(torch.float8_e4m3fn), scale
