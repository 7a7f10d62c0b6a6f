"""SGLang's gated delta networks (Qwen3.5, Qwen3-Next) without a GPU: the kernels of
`sgl_kernel` that its models call on a CPU, in plain torch.

A layer keeps a slot for each request: the last inputs of its convolution [channels,
taps - 1] and, for each value head, a state S [dv, dk] in FP32. A token with q and k
[dk], v [dv], log of the decay g and rate beta does (arXiv 2412.06464)

    S ← e^g S        S ← S + beta (v - S k) kᵀ        o = S q

A decoded token takes one such step (`delta_step`). Prompts are computed CHUNK tokens at
a time (`delta_chunks`): the steps of a chunk are one triangular system. Slots are
updated in place.

`install` makes SGLang find these functions; with a build of sgl_kernel it is not
called (sglang_cpu.py).
"""

import sys
import types
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
EPSILON = 1e-6
"""Added to the squared length of q and of k, which are divided by the root."""


def install() -> None:
    """Offer the kernels under the names by which SGLang imports them. Idempotent."""
    vars(torch.ops.sgl_kernel).update(
        fused_qk_gemma_rmsnorm_cpu=ungated_norms,
        fused_qk_gemma_rmsnorm_with_gate_cpu=gated_norms,
        fused_sigmoid_mul_cpu=multiply_by_sigmoid,
        fused_qkvzba_split_reshape_cat_contiguous_cpu=divide_projections,
        fused_gdn_gating_cpu=decay_and_rate,
        fused_rmsnorm_gated_cpu=gated_norm,
        fused_sigmoid_gating_delta_rule_update_cpu=decode,
    )
    module = types.ModuleType("sgl_kernel.mamba")
    vars(module).update(
        causal_conv1d_fn_cpu=convolve,
        causal_conv1d_update_cpu=convolve_one_token,
        chunk_gated_delta_rule_cpu=extend,
    )
    sys.modules["sgl_kernel.mamba"] = module


def _centred_norm(x: Tensor, weight: Tensor, epsilon: float, head_dim: int) -> Tensor:
    """Return the RMS norm of each head, times 1 + weight [head_dim]. x: [tokens, heads
    * head_dim]; returns [tokens, heads, head_dim].
    """
    heads = x.reshape(len(x), -1, head_dim).float()
    inverse_size = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + epsilon)
    return (heads * inverse_size * (1.0 + weight.float())).to(x.dtype)


def ungated_norms(*_: Tensor | float) -> None:
    """Stand in for the norms of attention without a gate, which no served model has."""
    raise NotImplementedError("attn_output_gate=false is not implemented on a CPU")


def gated_norms(
    query_and_gate: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    epsilon: float,
    head_dim: int,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Divide q and gate, and norm q and k. query_and_gate: [tokens, heads * 2 *
    head_dim], in each head q, then its gate; key: [tokens, groups * head_dim]. Returns
    q, k and gate [tokens, heads or groups, head_dim].
    """
    query, gate = query_and_gate.reshape(len(key), heads, 2 * head_dim).chunk(2, -1)
    query = query.reshape(len(key), -1)
    normed_query = _centred_norm(query, query_weight, epsilon, head_dim)
    normed_key = _centred_norm(key, key_weight, epsilon, head_dim)
    return normed_query, normed_key, gate.contiguous()


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> None:
    """Multiply x in place by the sigmoid of a gate with as many values."""
    x.mul_(torch.sigmoid(gate.reshape(x.shape).float()).to(x.dtype))


def divide_projections(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, dk: int, dv: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divide what the joined projections give: q, k and v together [tokens, channels],
    z [tokens, value_heads, dv], b and a [tokens, value_heads].
    """
    channels = 2 * key_heads * dk + value_heads * dv
    qkv, z = qkvz.split([channels, value_heads * dv], -1)
    b, a = ba.split([value_heads, value_heads], -1)
    z = z.reshape(len(z), value_heads, dv)
    return qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def decay_and_rate(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the decay and the rate, both [1, tokens, value_heads] FP32. a,
    b: [tokens, value_heads]; A_log, dt_bias: [value_heads].
    """
    log_decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return log_decay[None], torch.sigmoid(b.float())[None]


def gated_norm(x: Tensor, weight: Tensor, z: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of each row, times weight [dv] and silu(z). x, z: [rows, dv].
    It is rounded once, as by SGLang's kernel for GPUs.
    """
    rows = x.float()
    inverse_size = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
    return (rows * inverse_size * weight.float() * F.silu(z.float())).to(x.dtype)


def _per_value_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k of length 1, q divided by the root of dk, once for each value
    head; all FP32. q, k: [tokens, key_heads, dk]; v: [tokens, value_heads, dv].
    """
    repeats = v.shape[-2] // q.shape[-2]
    unit = []
    for x in (q.float(), k.float()):
        inverse_length = torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPSILON)
        unit.append((x * inverse_length).repeat_interleave(repeats, -2))
    return unit[0] * q.shape[-1] ** -0.5, unit[1], v.float()


def decode(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Take one step for each request. q, k: [1, requests, key_heads, dk]; v: [1,
    requests, value_heads, dv]; initial_state_source: all slots [slots, value_heads, dv,
    dk], in place; initial_state_indices: the requests' slots. Returns o [1, requests,
    value_heads, dv].
    """
    log_decay, rate = decay_and_rate(A_log, a, b, dt_bias)
    slots = initial_state_indices.long()
    state, output = delta_step(
        initial_state_source[slots].float(),
        *_per_value_head(q[0], k[0], v[0]),
        log_decay[0],
        rate[0],
    )
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return output[None].to(v.dtype)


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the state after one token and its output [.., heads, dv]. state: [..,
    heads, dv, dk]; q, k: [.., heads, dk]; v: [.., heads, dv]; log_decay, rate: [..,
    heads].
    """
    decayed = state * log_decay.exp()[..., None, None]
    recalled = (decayed * k[..., None, :]).sum(-1)
    change = (v - recalled) * rate[..., None]
    state = decayed + change[..., None] * k[..., None, :]
    return state, (state * q[..., None, :]).sum(-1)


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    initial_state_indices: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Compute prompts, or what follows a cached beginning. q, k: [1, tokens, key_heads,
    dk] of all of them; v: [1, tokens, value_heads, dv]; g, beta: [1, tokens,
    value_heads]; initial_state: all slots, as in `decode`. Returns o like v, and what
    only other kernels return.
    """
    query, key, value = _per_value_head(q[0], k[0], v[0])
    outputs = []
    for slot, (first, end) in zip(
        initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=False
    ):
        output, state = delta_chunks(
            query[first:end].transpose(0, 1),
            key[first:end].transpose(0, 1),
            value[first:end].transpose(0, 1),
            g[0, first:end].float().T,
            beta[0, first:end].float().T,
            initial_state[slot].float().mT,
        )
        initial_state[slot] = state.mT.to(initial_state.dtype)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)[None].to(v.dtype), None, None


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all tokens of one request [heads, tokens, dv] and the state
    after them. q, k: [heads, tokens, dk]; v: [heads, tokens, dv]; log_decay, rate:
    [heads, tokens]; state: [heads, dk, dv].

    Let u(i) be what token i adds to S along k(i), and G(i) the sum of g from the start
    of its chunk. Each u depends on those before it (arXiv 2412.06464, section 3.3):

        u(i) + beta(i) Σ_{j<i} e^(G(i) - G(j)) k(i)·k(j) u(j)
            = beta(i) (v(i) - e^G(i) S₀ k(i))
    """
    outputs = []
    for first in range(0, q.shape[1], CHUNK):
        piece = slice(first, first + CHUNK)
        query = q[:, piece]
        key = k[:, piece]
        total = log_decay[:, piece].cumsum(-1)
        tokens = total.shape[-1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        between = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
        since_start = total.exp()[..., None]
        weighted_key = key * rate[:, piece, None]
        system = (weighted_key @ key.mT) * between
        right_side = v[:, piece] * rate[:, piece, None] - (weighted_key * since_start) @ state
        added = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        of_chunk = ((query @ key.mT) * between) @ added
        outputs.append((query * since_start) @ state + of_chunk)
        until_end = (total[..., -1:] - total).exp()[..., None]
        state = state * since_start[:, -1:] + (key * until_end).mT @ added
    return torch.cat(outputs, 1), state


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve the tokens of prompts along time, each prompt alone, then silu. x:
    [channels, tokens]; weight: [channels, taps]; conv_states: all slots' last inputs
    [slots, channels, taps - 1], in place; has_initial_state: which prompts go on from
    their slot. Returns [channels, tokens].
    """
    assert activation in ("silu", "swish")
    assert bias is None
    output = torch.empty_like(x)
    earlier_taps = weight.shape[-1] - 1
    for request, (first, end) in enumerate(pairwise(query_start_loc.tolist())):
        slot = conv_states[int(cache_indices[request])]
        earlier = x.new_zeros(len(x), earlier_taps)
        if has_initial_state[request]:
            earlier = slot.to(x.dtype)
        inputs = torch.cat([earlier, x[:, first:end]], 1)
        slot.copy_(inputs[:, -earlier_taps:])
        convolved = F.conv1d(inputs[None], weight[:, None], groups=len(x))[0]
        output[:, first:end] = F.silu(convolved)
    return output


def convolve_one_token(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    conv_state_indices: Tensor,
) -> Tensor:
    """Convolve one new token of each request, as `convolve`. x: [requests, channels];
    returns the same.
    """
    assert activation in ("silu", "swish")
    assert bias is None
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], -1)
    conv_states[slots] = inputs[..., 1:].to(conv_states.dtype)
    return F.silu((inputs * weight).sum(-1))
