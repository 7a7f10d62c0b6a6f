"""The LM head in float32: hidden states and weight are widened for the product, the weight stays in the model's type.

A bf16 head errs by 0.03 to 0.06 in a log-prob (measured against float64), which the importance ratio feels; this one by 2e-6.
"""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


class Fp32Head(ColumnParallelLinear):
    """megatron's output layer with float32 logits. GPTModel builds its own class: `adopt` turns that into this one."""

    @staticmethod
    def adopt(layer: ColumnParallelLinear) -> None:
        layer.__class__ = Fp32Head
        layer.gradient_accumulation_fusion = False  # the fused kernel writes the gradient of a bf16 weight only

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        weight = self.weight if weight is None else weight
        return super().forward(input_.float(), weight.float(), runtime_gather_output)
