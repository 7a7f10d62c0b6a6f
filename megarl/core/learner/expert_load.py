"""How evenly a step's tokens fall on the experts, and the loss that evens it out if the recipe asks for one.

    each micro-batch   padding ──► routers ──routing map──► tokens of each expert of each layer       (padding left out)
    after the step     summed over ranks ──► max / mean of each layer: 1 is even, the number of experts is all to one

The balancing loss is megatron's (Switch Transformer, arXiv 2101.03961, eq. 4), computed for each micro-batch. Each counts by
its share of the step's tokens, so that a step's balancing gradient does not grow with the number of micro-batches.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megarl.core.learner.microbatch import MicroBatch
from megarl.core.recipe import Moe


class ExpertLoad:
    """Of one rank: `begin` a step, `padding_mask` for each forward pass, `metrics` at its end."""

    def __init__(self, chunks: Sequence[GPTModel], settings: Moe) -> None:
        config = chunks[0].config
        device = next(chunks[0].parameters()).device
        self._coefficient = settings.aux_loss_coefficient if settings.load_balancing == "aux_loss" else 0.0
        self._sequence_parallel = config.sequence_parallel
        self._tokens = torch.zeros(config.num_layers, config.num_moe_experts, device=device)
        self._step_tokens = 0
        # Of each router of a chunk, the coefficients of the micro-batches that it has not seen with gradients yet.
        self._waiting: dict[GPTModel, list[deque[float]]] = {chunk: [] for chunk in chunks}
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                if isinstance(layer.mlp, MoELayer):
                    waiting: deque[float] = deque()
                    self._waiting[chunk].append(waiting)
                    layer.mlp.router.register_forward_pre_hook(partial(_weigh, waiting))
                    layer.mlp.router.register_forward_hook(partial(self._count, layer.layer_number - 1))

    def begin(self, step_tokens: int) -> None:
        """A step over so many tokens, of all ranks together."""
        self._tokens.zero_()
        self._step_tokens = step_tokens
        for waiting in (queue for queues in self._waiting.values() for queue in queues):
            waiting.clear()

    def padding_mask(self, chunk: GPTModel, micro: MicroBatch) -> Tensor:
        """`padding_mask` of the chunk's forward pass of this micro-batch, which it is being prepared for."""
        for waiting in self._waiting[chunk]:
            waiting.append(self._coefficient * micro.sequence_tokens / max(self._step_tokens, 1))
        if chunk.pre_process or not self._sequence_parallel:
            return micro.padding
        # The first stage divides it among tensor-parallel ranks itself, the others take it as it is.
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        return micro.padding.chunk(size, 1)[rank]

    def metrics(self) -> dict[str, float]:
        """Of the step, the same on all ranks. COLLECTIVE over all of them."""
        dist.all_reduce(self._tokens)
        imbalance = {
            f"expert_imbalance_layer_{layer}": max(tokens) * len(tokens) / sum(tokens)
            for layer, tokens in enumerate(self._tokens.tolist())
            if sum(tokens)
        }
        return imbalance | {"expert_imbalance_max": max(imbalance.values(), default=1.0)}

    def _count(self, layer: int, _: Any, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> None:
        """After a router: inputs are hidden states and the mask [s, b], outputs probabilities and the map [s * b, experts]."""
        if torch.is_grad_enabled():
            self._tokens[layer] += (outputs[1] & ~inputs[1].reshape(-1, 1)).sum(0)


def _weigh(waiting: deque[float], router: Any, _: Any) -> None:
    """Before a router: the loss it adds is weighed. A router that is run again adds it then, in the backward pass, when other
    micro-batches may have gone forward; they go backward in the same order."""
    if torch.is_grad_enabled():
        router.config.moe_aux_loss_coeff = waiting.popleft()
