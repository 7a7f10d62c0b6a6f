"""Weights in FP8 with a scale for each block, as servers hold them with
`serving.quantization: fp8`.

    weight [rows, columns] bf16 ──► values [rows, columns] float8_e4m3fn
                                    scales [rows / 128, columns / 128] FP32, a power of
                                    two each: weight ≈ values · scale

This is the format of DeepSeek-V3's and Qwen3's FP8 directories: NAME.weight has the
values, NAME.weight_scale_inv the scales (`weight_block_size: [128, 128]`). Learner and
server both use this module, so a server that reads a bf16 directory holds the same
bytes as one that the learner has sent them.

The bits are those of SGLang's `per_block_cast_to_fp8` (0.5.23,
srt/layers/quantization/fp8_utils.py:2394, itself from DeepGEMM), which rounds scales up
to powers of two. slime sends the same to Blackwell GPUs and amax / 448 to others
(megatron_to_hf/processors). With powers of two the division is exact, so a weight is
rounded only once, and a block's scale seldom changes from one step to the next, so
deltas stay small. At most one bit of the range is lost.

Which weights: SGLang's FP8 configuration covers the linear maps of a layer, of experts
and shared experts too (`Fp8Config.get_quant_method`, fp8.py:389). It leaves embedding,
head, norms, biases and routers as they are: routers are made without that configuration
(models/qwen3_moe.py:285). slime quantises the same maps.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Rows, and columns, of a block."""
VALUES = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of VALUES."""
SMALLEST = 1e-4
"""A block whose largest number is smaller has the scale of this one."""
BYTES = 1 + 4 / BLOCK**2
"""Bytes of a weight, with its share of the block's scale."""
PIECE_ROWS = 32 * BLOCK
"""Rows that are quantised at once: each number takes about ten bytes of temporary
memory.
"""
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""`quantization_config` of a directory in this format."""

_MAP = re.compile(r"(?:^|\.)layers\.\d+\..+\.(q|k|v|o|gate|up|down)_proj\.weight$")
_EXPONENT_BITS = 0xFF
_MANTISSA_BITS = 23


class BlockFp8(NamedTuple):
    """values [rows, columns] of VALUES; scales [⌈rows / BLOCK⌉, ⌈columns / BLOCK⌉]
    FP32.
    """

    values: Tensor
    scales: Tensor


def is_quantised(name: str) -> bool:
    """Return whether servers hold the Hugging Face tensor of this name in FP8."""
    return _MAP.search(name) is not None


def scales_name(name: str) -> str:
    """Return the name of the scales of the weight `name`."""
    return f"{name}_scale_inv"


def quantised(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as servers hold them: values and scales in place of each weight
    that is quantised, and all others unchanged, those that are in FP8 already too.
    """
    for name, tensor in tensors:
        if not is_quantised(name) or tensor.dtype == VALUES:
            yield name, tensor
            continue
        values, scales = quantise(tensor.to(torch.bfloat16))
        yield name, values
        yield scales_name(name), scales


def quantise(weight: Tensor) -> BlockFp8:
    """Quantise a weight [rows, columns] bf16, on its device. The last blocks may be
    incomplete.
    """
    pieces = [_quantised_piece(piece) for piece in weight.split(PIECE_ROWS)]
    if len(pieces) == 1:
        return pieces[0]
    values = torch.cat([piece.values for piece in pieces])
    scales = torch.cat([piece.scales for piece in pieces])
    return BlockFp8(values, scales)


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """Return the weight [rows, columns] FP32 that values and scales stand for."""
    rows, columns = values.shape
    scale_of_each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * scale_of_each[:rows, :columns]


def _quantised_piece(weight: Tensor) -> BlockFp8:
    """Quantise rows of a weight, [rows, columns] bf16, of which the first begins a
    block. For the calculation, incomplete blocks are padded with zeros.
    """
    rows, columns = weight.shape
    padded = pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    block_rows = padded.shape[0] // BLOCK
    block_columns = padded.shape[1] // BLOCK
    blocks = padded.view(block_rows, BLOCK, block_columns, BLOCK)
    largest = blocks.abs().amax((1, 3), keepdim=True).float().clamp(min=SMALLEST)
    scales = power_of_two_above(largest / LARGEST)
    values = (blocks * (1 / scales)).to(VALUES)
    return BlockFp8(
        values.view_as(padded)[:rows, :columns].contiguous(),
        scales.view(block_rows, block_columns),
    )


def power_of_two_above(numbers: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each number; numbers: FP32,
    above 0.
    """
    bits = numbers.view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) & _EXPONENT_BITS
    has_mantissa = (bits & ((1 << _MANTISSA_BITS) - 1)) != 0
    exponent = (exponent + has_mantissa.int()).clamp(1, _EXPONENT_BITS - 1)
    return (exponent << _MANTISSA_BITS).view(torch.float32)
