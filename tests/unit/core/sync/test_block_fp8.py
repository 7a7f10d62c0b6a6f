"""Weights in FP8 blocks: SGLang's own quantiser gives the same bits; what is quantised,
and what is not.
"""

import math

import pytest
import torch
from torch import Tensor

from megarl.core.sync.block_fp8 import (
    BLOCK,
    LARGEST,
    PIECE_ROWS,
    VALUES,
    dequantise,
    is_quantised,
    power_of_two_above,
    quantise,
    quantised,
)


def weight(rows: int, columns: int, scale: float = 0.02, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw) * scale).bfloat16()


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


SHAPES = [(128, 128), (256, 384), (192, 576), (1, 1), (PIECE_ROWS + 130, 130)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [0.02, 1e-7, 300.0])
def test_the_bits_are_sglangs(shape: tuple[int, int], scale: float) -> None:
    """Whole and incomplete blocks, more rows than are done at once, blocks below its
    smallest scale.
    """
    from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8

    given = weight(*shape, scale)
    given[0, 0] = 0.0
    values, scales = quantise(given)
    theirs, their_scales = per_block_cast_to_fp8(given)
    assert_same_bits(values, theirs)
    assert_same_bits(scales, their_scales)


def test_sglang_restores_the_weight_to_three_bits_of_mantissa() -> None:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    given = weight(192, 320)
    values, scales = quantise(given)
    restored = dequantise(values, scales)
    assert torch.equal(restored, block_quant_dequant(values, scales, [BLOCK, BLOCK], torch.float32))
    off = (restored - given.float()).abs()
    block_largest = given.abs().max().item()
    assert bool((off <= given.float().abs() / 16 + block_largest / LARGEST).all())
    assert off.max() > 0


def test_what_is_quantised_once_stays() -> None:
    """A directory that was made from quantised weights is quantised to
    the same ones.
    """
    values, scales = quantise(weight(256, 256))
    again, again_scales = quantise(dequantise(values, scales).bfloat16())
    assert_same_bits(dequantise(again, again_scales), dequantise(values, scales))


def test_no_number_overflows() -> None:
    given = torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16)
    for largest in (447.0, 448.0, 449.0, 3e38, 1e-30):
        given[3, 5] = largest
        values, _ = quantise(given)
        assert bool(values.float().isfinite().all()), largest


def test_powers_of_two() -> None:
    numbers = torch.tensor([1.0, 1.0 + 2**-23, 0.75, 3e38, 2.0**-120])
    assert power_of_two_above(numbers).tolist() == [1.0, 2.0, 1.0, 2.0**127, 2.0**-120]
    assert all(
        math.log2(n).is_integer() for n in quantise(weight(256, 256)).scales.flatten().tolist()
    )


def test_linear_maps_are_quantised_and_nothing_else() -> None:
    layer = "model.layers.3"
    yes = [
        *(f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{layer}.mlp.experts.7.down_proj.weight",
        f"{layer}.mlp.shared_experts.up_proj.weight",
    ]
    no = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.self_attn.q_norm.weight",
        f"{layer}.self_attn.q_proj.bias",
        f"{layer}.mlp.gate.weight",
        f"{layer}.mlp.gate.e_score_correction_bias",
        f"{layer}.mlp.up_proj.weight.delta",
        f"{layer}.mlp.up_proj.weight_scale_inv",
    ]
    assert [name for name in (*yes, *no) if is_quantised(name)] == yes


def test_a_stream_has_values_and_scales_in_place_of_weights() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    given = [("model.norm.weight", torch.ones(3)), (name, weight(130, 256))]
    found = list(quantised(given))
    assert [key for key, _ in found] == ["model.norm.weight", name, f"{name}_scale_inv"]
    assert found[0][1] is given[0][1]
    assert (found[1][1].dtype, found[2][1].shape) == (VALUES, (2, 2))
    assert list(quantised(found)) == found, "what is in FP8 already passes unchanged"
    wide = dict(quantised([(name, weight(130, 256).float())]))
    assert_same_bits(wide[name], found[1][1])


@pytest.mark.parametrize(("rows", "columns"), [(0, 256), (5, 0), (0, 0)])
def test_a_weight_without_numbers(rows: int, columns: int) -> None:
    found = quantise(weight(rows, columns))
    assert found.values.shape == (rows, columns)
    assert found.scales.shape == (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    assert dequantise(*found).shape == (rows, columns)
