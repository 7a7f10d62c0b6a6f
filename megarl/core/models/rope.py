"""Rotary embedding: its frequencies, and turning queries and keys by them.

halves         (x0 … x7)  ->  pairs (x0, x4) (x1, x5) (x2, x6) (x3, x7)       most models
interleaved    (x0 … x7)  ->  pairs (x0, x1) (x2, x3) (x4, x5) (x6, x7)       Llama 4, which rotates in float32
"""

import functools
import math

import torch
from torch import Tensor

from megarl.core.base.architecture import Architecture


def inverse_frequencies(model: Architecture) -> Tensor:
    """[head_dim / 2] float32, bit for bit transformers' `default` and `llama3` (modeling_rope_utils.py).

    Llama 4 has low and high 1: no wavelength is between.
    """
    steps = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (model.rope_theta ** (steps / model.head_dim))
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    factor, low, high, original = scaling.factor, scaling.low, scaling.high, scaling.original
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    if low == high:
        return stretched
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    return torch.where((wavelengths >= original / high) & (wavelengths <= original / low), between, stretched)


class Rope:
    """Rotary embedding of one model. inverse_frequencies [head_dim / 2] float32."""

    def __init__(self, inverse_frequencies: Tensor, interleaved: bool) -> None:
        self.inverse_frequencies, self.interleaved = inverse_frequencies, interleaved
        self.of_range = functools.lru_cache(maxsize=4)(self._of_range)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [positions, 1, head_dim], computed in float32; kept so if interleaved, else converted to `dtype`."""
        angles = positions.float()[:, None] * self.inverse_frequencies.to(positions.device)
        if self.interleaved:
            angles = angles.repeat_interleave(2, -1)[:, None]
            return angles.cos(), angles.sin()
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of x [..., head_dim] by its angle, keeping x's dtype."""
        if self.interleaved:
            wide = x.to(cos.dtype)
            partner = torch.stack([-wide[..., 1::2], wide[..., ::2]], -1).flatten(-2)
            return (wide * cos + partner * sin).to(x.dtype)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def _of_range(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos, sin [length, 1, 1, head_dim] for the positions 0 … length-1."""
        cos, sin = self(torch.arange(length, device=device), dtype)
        return cos[:, None], sin[:, None]
