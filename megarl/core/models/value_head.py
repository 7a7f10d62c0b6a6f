"""A critic is a policy with another head: one float32 number per hidden state, in place of logits.

The weight starts at zero, so that a new critic expects exactly 0 and the first advantages are the rewards themselves. Every
tensor-parallel rank holds it whole and computes the same values, so gradients of weight and hidden states need no reduction.
"""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear


class ValueHead(Module):
    """Replaces GPTModel's output layer, with the attributes needed by code that gathers hidden states."""

    def __init__(self, config: TransformerConfig, group: torch.distributed.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.weight = Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self.tp_group, self.sequence_parallel = group, config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [...] float32 for hidden [..., h] of any precision."""
        return linear(hidden.float(), self.weight)[..., 0]

    @staticmethod
    def adopt(chunks: Sequence[GPTModel]) -> None:
        """Give this head to chunks whose weights are loaded. What they shared with the embedding is no longer shared."""
        for chunk in chunks:
            chunk.share_embeddings_and_output_weights = False
            if chunk.post_process:
                device = next(chunk.parameters()).device
                chunk.output_layer = ValueHead(chunk.config, chunk.output_layer.tp_group, device)
