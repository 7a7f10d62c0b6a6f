"""How the head meets Megatron: which hidden states it gets, and how their gradient finds all tensor-parallel ranks."""

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from megarl.core.learner.head.function import logprobs_and_entropy


def selected_logprobs(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: Any,
    vocab_size: int,
    temperature: float,
    precision: torch.dtype,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """megarl's head, as GPTModel's `output_processor`: log-probs and entropies [n] of a micro-batch's trained tokens.

    hidden_states [s/tp or s, b, h]; output_weight: the embedding, where it is the head; context: the MicroBatch
    (megarl/core/learner/microbatch.py), whose `at` indexes [s*b].
    """
    return logprobs_and_entropy(
        trained_positions(hidden_states, output_layer, context.at, in_parts=True),
        output_layer.weight if output_weight is None else output_weight,
        context.labels,
        vocab_size=vocab_size,
        temperature=temperature,
        precision=precision,
        group=output_layer.tp_group,
    )


def trained_positions(hidden_states: Tensor, output_layer: Any, at: Tensor, in_parts: bool) -> Tensor:
    """[n, h] of hidden states [s/tp or s, b, h] at `at` [n], which indexes [s*b].

    in_parts: each rank has its columns' part of the gradient, and the parts are summed as megatron's output layer does it:
    reduce-scattered under sequence parallelism, else all-reduced. Without, all ranks must have the same gradient.
    """
    if output_layer.sequence_parallel:  # any rank's part may hold any number of trained positions: gather, then select
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=in_parts, group=output_layer.tp_group
        )
    chosen = hidden_states.flatten(0, 1).index_select(0, at)
    if in_parts and not output_layer.sequence_parallel:
        chosen = copy_to_tensor_model_parallel_region(chosen, group=output_layer.tp_group)
    return chosen
