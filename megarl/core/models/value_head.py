"""A critic is a policy with another head: one float32 number for a hidden state, in place of logits.

The weight is zero at first, so that a new critic expects exactly 0 and the first advantages are the rewards' own. It is whole
on every tensor-parallel rank: each computes the same values, so the gradients of weight and hidden states need no reduction.
"""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear


class ValueHead(Module):
    """Stands where GPTModel has its output layer, and says of itself what one that gathers hidden states has to know."""

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.tp_group, self.sequence_parallel = group, config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., h] of any precision -> [...] float32."""
        return linear(hidden.float(), self.weight)[..., 0]

    @staticmethod
    def adopt(chunks: Sequence[GPTModel]) -> None:
        """Give the chunks, whose weights are loaded, this head. What they shared with the embedding they share no more."""
        for chunk in chunks:
            chunk.share_embeddings_and_output_weights = False
            if chunk.post_process:
                device = next(chunk.parameters()).device
                chunk.output_layer = ValueHead(chunk.config, chunk.output_layer.tp_group, device)
