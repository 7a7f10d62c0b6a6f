"""A stand-in, in plain torch, for SGLang's FP8 products, which need a GPU. A server of
tests uses it on a CPU.

    activations [tokens, k] ──groups of 128──► e4m3 · scale ─┐
    weight: values e4m3, scales by block ────────────────────┴──► FP32 sums ──► bf16

Activations are rounded as `per_token_group_quant_fp8` does
(sglang/kernels/ops/quantization/fp8_kernel.py): each group's largest number becomes
448. SGLang's kernels sum each group in FP32 and then scale it; here all is scaled
first: only the order of the roundings in FP32 differs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from megarl.core.sync.block_fp8 import BLOCK, LARGEST, VALUES, dequantise

SMALLEST = 1e-10


def rounded_activations(x: Tensor) -> Tensor:
    """Return [.., k] FP32: the numbers that the product sees."""
    width = x.shape[-1]
    groups = pad(x.float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    values = (groups / scales).clamp(-LARGEST, LARGEST).to(VALUES)
    return (values.float() * scales).flatten(-2)[..., :width]


def product(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return [.., rows] in the type of x [.., columns]; values [rows, columns], scales
    by block.
    """
    out = rounded_activations(x) @ dequantise(values, scales).T
    out = out.to(x.dtype)
    return out if bias is None else out + bias


def install() -> None:
    """Replace the products of SGLang's Fp8LinearMethod and Fp8MoEMethod in this
    process.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

    def linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, layer.weight, layer.weight_scale_inv, bias)

    def experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
        x = dispatch_output.hidden_states
        weights, chosen, _ = dispatch_output.topk_output
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = product(
                x[tokens], layer.w13_weight[expert], layer.w13_weight_scale_inv[expert]
            ).chunk(2, -1)
            down = product(
                silu(gate) * up, layer.w2_weight[expert], layer.w2_weight_scale_inv[expert]
            )
            out.index_add_(0, tokens, down.float() * weights[tokens, places, None])
        return StandardCombineInput(hidden_states=out.to(x.dtype))

    for method, apply in ((Fp8LinearMethod, linear), (Fp8MoEMethod, experts)):
        method.process_weights_after_loading_block_quant = lambda self, layer: None
        method.apply = apply


def serve(arguments: Sequence[str]) -> int:
    """`megarl serve` with the stand-in, of a recipe that it would refuse
    without a GPU.
    """
    from megarl.core.client import servable
    from megarl.core.engine import workers
    from tests.processes import command_line

    ports = workers.own_ports

    def ports_and_products() -> None:  # the first thing that is done once SGLang can be imported
        ports()
        install()

    servable.check_fp8 = lambda *_: None
    workers.own_ports = ports_and_products
    return command_line(arguments)
