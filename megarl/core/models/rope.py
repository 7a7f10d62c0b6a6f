"""Rotary embedding: the frequencies of a config.json, and rotating queries and keys by them.

halves         (x0 … x7)  ->  pairs (x0, x4) (x1, x5) (x2, x6) (x3, x7)       most models
interleaved    (x0 … x7)  ->  pairs (x0, x1) (x2, x3) (x4, x5) (x6, x7)       Llama 4, which rotates in float32
"""

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.core.base.errors import MegarlError


def rope_parameters(config: dict[str, Any], where: Path) -> dict[str, Any]:
    """Read rope_parameters as transformers 5 writes them, or rope_theta and rope_scaling as before."""
    rope: dict[str, Any] = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        raise MegarlError(f"{where}: rope_type {rope['rope_type']!r} is not supported; supported: default, llama3")
    return rope


def inverse_frequencies(head_dim: int, rope: dict[str, Any]) -> Tensor:
    """Return [head_dim / 2] float32, bit for bit transformers' `default` and `llama3` (modeling_rope_utils.py).

    llama3: wavelengths longer than original/low_freq_factor are stretched by `factor`, those shorter than
    original/high_freq_factor are kept, those between are interpolated (Llama 4 has both factors 1: nothing is between).
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / (rope["rope_theta"] ** (steps / head_dim))
    if rope.get("rope_type", "default") == "default":
        return frequencies
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
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
