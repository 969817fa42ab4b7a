"""MXFP4, the microscaling format of gpt-oss's experts: 4-bit floats (E2M1), 32 of them to one power of two (OCP MX specification 1.0)."""

from __future__ import annotations

import torch

BLOCKS, SCALES = "_blocks", "_scales"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
EXPONENT_BIAS = 127


class Mxfp4:
    """A tensor [experts, inputs, outputs], stored as `blocks` [experts, outputs, inputs / 32, 16] of two numbers a byte (low half first)
    and `scales` [experts, outputs, inputs / 32]; slices of safetensors, from which only the experts asked for are read."""

    def __init__(self, blocks, scales):
        self.blocks, self.scales = blocks, scales

    def get_shape(self) -> list[int]:
        experts, outputs, groups, size = self.blocks.get_shape()
        return [experts, groups * size * 2, outputs]

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """The values in a box of whole experts, in float32; every one is exact in bfloat16 too, as long as it is not below its range."""
        blocks, scales = self.blocks[box[0]].int(), self.scales[box[0]].int() - EXPONENT_BIAS
        values = E2M1[torch.stack([blocks & 15, blocks >> 4], dim=-1)].flatten(-2)
        values = torch.ldexp(values, scales[..., None])
        values[scales == 255 - EXPONENT_BIAS] = float("nan")  # the one scale that is not a power of two
        return values.flatten(-2).transpose(1, 2)[(slice(None), *box[1:])]
