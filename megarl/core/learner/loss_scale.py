"""Dynamic loss scaling: the loss is multiplied by a number before the backward pass, and gradients are divided by it after.

    loss ──x scale──► backward in fp16 ──► FP32 gradients ──/ scale──► finite? ──yes──► clip, AdamW; after WINDOW: scale x 2
                                                                         └─────no───► no update; HYSTERESIS of them: scale / 2

fp16 has five bits of exponent: what is smaller than 6e-8 becomes 0, what is larger than 65,504 becomes infinite. The scale
moves the gradients of activations into between (arXiv 1710.03740, section 3.2). The rule is megatron's.
"""

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

INITIAL = 2.0**16
"""As torch's and DeepSpeed's. Megatron begins with 2^32 and lets the first steps overflow until the scale fits. In pre-training
that costs some text; here each such step is a batch of rollouts that servers have generated and graded."""
LEAST = 1.0
"""Megatron's. Gradients that overflow without any scaling are no matter of the scale."""
WINDOW = 1000
"""Updates without an overflow after which a larger scale is tried. Megatron's: most runs are shorter, so they try none."""
HYSTERESIS = 2
"""Overflows until the scale falls. Megatron's: one extreme batch does not lower it for all later ones. Once it has fallen, each
further overflow lowers it, until a window has passed without one."""


class LossScale(DynamicGradScaler):
    """The scale of one network on this rank; the same on all ranks, for all of them know the same norms.

    Megatron has an optimiser for a rank's experts and one for the rest, each with a scaler of its own, but multiplies the loss
    by the first one's scale only: after an overflow in one of them the other would divide by another number. So all parts of a
    network's optimiser share one of these.
    """

    def __init__(self) -> None:
        super().__init__(INITIAL, LEAST, 2.0, 0.5, WINDOW, HYSTERESIS)

    def share(self, optimizer: MegatronOptimizer) -> None:
        """Become the scaler of each part of a network's optimiser."""
        for part in optimizer.chained_optimizers:
            part.grad_scaler = self

    def update(self, found_inf: bool) -> None:
        """What each part of the optimiser calls when it has divided its gradients. Nothing: `judge` waits for all of them."""

    def judge(self, overflowed: bool) -> None:
        """Take in what became of one backward pass over all ranks."""
        super().update(overflowed)

    @property
    def value(self) -> float:
        return float(self.scale)

    @property
    def exhausted(self) -> bool:
        """Whether it cannot fall any further."""
        return self.value <= LEAST

    def plain_state(self) -> dict[str, float]:
        """For a checkpoint: numbers, no tensors."""
        return {"scale": self.value, "growth": self._growth_tracker, "hysteresis": self._hysteresis_tracker}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `plain_state`."""
        self._scale = torch.full_like(self.scale, state["scale"])
        self._growth_tracker, self._hysteresis_tracker = int(state["growth"]), int(state["hysteresis"])
