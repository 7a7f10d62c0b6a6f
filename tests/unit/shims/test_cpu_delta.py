"""Gated delta networks on a CPU against transformers' own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from megarl.shims import sglang_cpu_delta as delta

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only used without a GPU")

KEY_HEADS = 2
VALUE_HEADS = 6
DK = 16
DV = 24
LENGTHS = [1, 3, 64, 65, 151]
SLOTS = [4, 0, 6, 2, 3]


def drawn(tokens: int) -> tuple[Tensor, ...]:
    """Draw q, k, v, the log of the decay and the rate of these tokens."""
    torch.manual_seed(tokens)
    q, k = torch.randn(2, 1, tokens, KEY_HEADS, DK)
    v = torch.randn(1, tokens, VALUE_HEADS, DV)
    log_decay = -torch.rand(1, tokens, VALUE_HEADS) * 3
    return q, k, v, log_decay, torch.rand(1, tokens, VALUE_HEADS)


def theirs(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers computes of one request's `drawn`, token by token. state:
    [value heads, dv, dk].
    """
    q, k, v, log_decay, rate = inputs
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    q, k = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for x in (q, k))
    output, state = torch_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=log_decay,
        beta=rate,
        initial_state=state.mT[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output, state[0].mT


def test_prompts_of_several_requests_each_with_a_state_of_its_own() -> None:
    """Shorter than a chunk, as long, and longer."""
    states = torch.randn(7, VALUE_HEADS, DV, DK)
    before = states.clone()
    q, k, v, log_decay, rate = inputs = drawn(sum(LENGTHS))
    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    found, *_ = delta.extend(q, k, v, log_decay, rate, states, borders, torch.tensor(SLOTS))
    pieces = zip(*(x.split(LENGTHS, 1) for x in inputs), strict=True)
    for request, (slot, piece) in enumerate(zip(SLOTS, pieces, strict=True)):
        expected, state = theirs(piece, before[slot])
        output = found[:, borders[request] : borders[request + 1]]
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[slot], state, atol=1e-5, rtol=1e-5)
    for slot in {*range(7)} - {*SLOTS}:
        assert torch.equal(states[slot], before[slot])


def test_a_decoded_token_of_each_request() -> None:
    states = torch.randn(7, VALUE_HEADS, DV, DK)
    before = states.clone()
    q, k, v, a, b = drawn(len(SLOTS))
    A_log = torch.rand(VALUE_HEADS)
    dt_bias = torch.randn(VALUE_HEADS)
    found = delta.decode(
        A_log,
        dt_bias,
        q,
        k,
        v,
        a[0],
        b[0],
        initial_state_source=states,
        initial_state_indices=torch.tensor(SLOTS),
        cu_seqlens=None,
    )
    log_decay = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    inputs = (q, k, v, log_decay, b.sigmoid())
    for request, slot in enumerate(SLOTS):
        own = [x[:, request : request + 1] for x in inputs]
        expected, state = theirs(own, before[slot])
        torch.testing.assert_close(found[:, request], expected[:, 0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states[slot], state, atol=1e-5, rtol=1e-5)


def test_the_convolution_goes_on_from_what_a_slot_keeps() -> None:
    """Prompts of fewer tokens than taps, a request that continues, decoded tokens."""
    channels = 5
    weight = torch.randn(channels, 4)
    convolution = torch.nn.Conv1d(channels, channels, 4, groups=channels, padding=3, bias=False)
    convolution.weight.data = weight[:, None]
    sequences = [torch.randn(channels, n) for n in (7, 12)]
    whole = [silu(convolution(x[None])[0, :, : x.shape[1]]) for x in sequences]
    states = torch.randn(3, channels, 3)
    slots = torch.tensor([2, 0])
    cuts = [[0, 2, 3], [0, 6, 8]]
    found: list[list[Tensor]] = [[], []]
    for part in (0, 1):
        borders = torch.tensor([0, *(cut[part + 1] - cut[part] for cut in cuts)]).cumsum(0)
        x = torch.cat(
            [s[:, cut[part] : cut[part + 1]] for s, cut in zip(sequences, cuts, strict=True)], 1
        )
        has_earlier = torch.tensor([part > 0] * 2)
        y = delta.convolve(x, weight, None, "silu", states, has_earlier, slots, borders)
        for request in (0, 1):
            found[request].append(y[:, borders[request] : borders[request + 1]])
    for step in range(4):
        token = torch.stack([s[:, cut[-1] + step] for s, cut in zip(sequences, cuts, strict=True)])
        y = delta.convolve_one_token(token, states, weight, None, "silu", slots)
        for request in (0, 1):
            found[request].append(y[request, :, None])
    for parts, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-6, rtol=1e-6)


def test_norms_and_gates() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

    q, gate, k = torch.randn(3, 5, 4, DK)
    centred = Qwen3_5RMSNorm(DK, eps=1e-5)
    centred.weight.data.uniform_(-0.5, 0.5)
    found = delta.gated_norms(
        torch.cat([q, gate], -1).view(5, -1),
        k.reshape(5, -1),
        centred.weight.data,
        centred.weight.data,
        1e-5,
        DK,
        4,
    )
    for ours, expected in zip(found, (centred(q), centred(k), gate), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
    x, z = torch.randn(2, 5, DV)
    plain = Qwen3_5RMSNormGated(DV, eps=1e-5)
    plain.weight.data.uniform_(0.5, 1.5)
    ours = delta.gated_norm(x, plain.weight.data, z, 1e-5)
    torch.testing.assert_close(ours, plain(x, z), atol=1e-6, rtol=1e-6)
    scaled = x.clone()
    delta.multiply_by_sigmoid(scaled, z)
    torch.testing.assert_close(scaled, x * z.sigmoid())
