"""The policy's head without its logits: log-prob and entropy of each trained token, from hidden states, in chunks.

    hidden [s(/tp), b, h] ──► trained positions [n, h] ─┐   prompt tokens and padding meet no arithmetic
                                                        ▼
    weight [V/tp, h] ──► chunk of FP32 logits [rows, columns] ──► four numbers a row ──► log-prob [n], entropy [n]

function.py knows the whole, forward and backward; a chunk is the most that is ever held. passes.py (torch) is what is done with
a chunk, the reference and what a CPU runs; kernels.py (Triton) is the same on a GPU.
"""

from megarl.core.learner.head.function import logprobs_and_entropy, selected_logprobs, trained_positions

__all__ = ["logprobs_and_entropy", "selected_logprobs", "trained_positions"]
