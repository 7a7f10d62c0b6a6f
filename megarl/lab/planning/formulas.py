"""Every formula of the planner, with its source. Plain numbers in, bytes, FLOP or seconds out.

[AR]   Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198
[ZeRO] Rajbhandari et al., ZeRO, arXiv 1910.02054; bytes per parameter as in Megatron-Core's guide to its distributed optimizer
[PP]   Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473
[PaLM] Chowdhery et al., PaLM, arXiv 2204.02311, appendix B
[Inf]  Pope et al., Efficiently Scaling Transformer Inference, arXiv 2211.05102
[Roof] Williams et al., Roofline, Communications of the ACM 52(4), 2009

Activations are those of megarl's own layers: flash attention, no dropout, gated MLPs, RMS norms, bf16.
"""

from megarl.core.base.architecture import Architecture

HALF, FP32, FP8 = 2, 4, 1
WIDTH = {"bf16": HALF, "fp16": HALF, "fp32": FP32}
"""Bytes of a number, by `model.dtype`."""


# Memory of the learner.


def state_bytes(parameters: float, width: int, shards: int, kept: float = 1.0) -> float:
    """Return bytes of weights, gradients and AdamW on a rank, with the optimiser divided among `shards` ranks.

    [ZeRO], stage 1. Half: 2 weight + 4 FP32 gradient + (4 main weight + 4 + 4 moments) / shards. fp32: 4 + 4 + 8 / shards.
    kept: share of the optimiser's part that is not in the host's memory.
    """
    if width == HALF:
        return parameters * (HALF + FP32 + 3 * FP32 / shards * kept)
    return parameters * (2 * FP32 + 2 * FP32 / shards * kept)


def fp8_weight_bytes(parameters: float) -> float:
    """Return bytes that FP8 products keep beside bf16 weights between micro-batches: each weight in FP8, plain and transposed.

    Their matrix units read both factors row by row (Transformer Engine, guide to FP8).
    """
    return 2 * FP8 * parameters


def replicated_activation_bytes(shape: Architecture, width: int, kept: int) -> float:
    """Return bytes per token and layer that only sequence parallelism divides: input and output of both norms.

    [AR] section 4.2.1 counts 10 sbh outside tensor-parallel parts: 4 for the layer norms' inputs, 4 for the inputs of the parts
    after them (here the norms' outputs), and 2 for dropout masks, of which there are none. width: bytes of an activation; kept:
    bytes of a value that a linear map keeps of its input, 1 if it makes FP8 products.
    """
    return 2 * shape.hidden * (width + kept)


def layer_input_bytes(shape: Architecture, width: int) -> float:
    """Return bytes per token of the input of a layer that is recomputed whole; divided as the norms are. [AR] section 5."""
    return shape.hidden * width


def attention_activation_bytes(shape: Architecture, width: int, kept: int) -> float:
    """Return bytes per token and layer that TP divides: q, k, v, the output, and the softmax's normaliser (FP32).

    [AR] equation 1 without 5as/h: flash attention (arXiv 2205.14135) recomputes the scores. The map after it keeps the same
    output, unless it keeps it in FP8.
    """
    output_again = shape.query * kept if kept != width else 0
    return (2 * shape.query + 2 * shape.key) * width + output_again + FP32 * shape.heads


def mlp_activation_bytes(feed_forward: int, width: int, kept: int) -> float:
    """Return bytes per token of a gated MLP, divided by TP: gate and up, and their product. [AR] 4.1, for SwiGLU."""
    return feed_forward * (2 * width + kept)


def routed_activation_bytes(shape: Architecture, expert_tensor_parallel: int, width: int, kept: int) -> float:
    """Return bytes per token of one layer's chosen experts together, if tokens fall evenly on the experts.

    Each choice is a separate row: gathered input and output [hidden], and the gated MLP within. Router logits in FP32.
    """
    rows = shape.hidden * (width + kept) * expert_tensor_parallel
    inner = mlp_activation_bytes(shape.expert_feed_forward, width, kept)
    return shape.experts_per_token * (rows + inner) + FP32 * shape.experts


def in_flight(pipeline_parallel: int, virtual: int, microbatches: int) -> float:
    """Return how many micro-batches' activations of its own layers the first stage holds at most. [AR] 4.2.3, [PP] 2.2.

    1F1B: as many as there are stages; interleaved: (1 + (p - 1) / (p v)) times as many.
    """
    if virtual == 1:
        return min(pipeline_parallel, microbatches)
    return pipeline_parallel * (1 + (pipeline_parallel - 1) / (pipeline_parallel * virtual))


HEAD_CHUNK = 4096 * 8192
"""Logits that the learner's head holds at a time (megarl/core/learner/head/)."""


def head_bytes(tokens: float, vocabulary: int, hidden: int, tensor_parallel: int, width: int) -> float:
    """Return peak bytes of the head for this many trained tokens of a micro-batch (megarl/core/learner/head/).

    A chunk of FP32 logits and its gradient; the gradient of the tokens' hidden states, as summed and as passed on; the zeros
    that autograd gets as the weight's gradient. width: bytes of a number of the model.
    """
    chunk = (FP32 + width) * HEAD_CHUNK
    return chunk + (FP32 + width) * tokens * hidden + width * vocabulary / tensor_parallel * hidden


# Memory of a server.


def kv_bytes(shape: Architecture, tensor_parallel: int, width: int) -> float:
    """Return bytes per token on each GPU of a server: k and v of every layer. [Inf] More GPUs than groups hold copies."""
    return 2 * shape.layers * max(shape.groups / tensor_parallel, 1) * shape.head_dim * width


# Work.


def layer_flop(shape: Architecture) -> float:
    """Return FLOP per token forward: 2 for each parameter it is multiplied with, without embedding and head. [PaLM]"""
    return 2 * shape.body_parameters


def attention_flop(shape: Architecture, positions: float) -> float:
    """Return FLOP forward of a token that attends to so many positions: scores and their sum over values. [PaLM], causal."""
    chunk = shape.attention_chunk or positions
    local = shape.local_layers * min(positions, chunk)
    return 4 * shape.query * (local + (shape.layers - shape.local_layers) * positions)


def head_flop(shape: Architecture) -> float:
    """Return FLOP per token forward, at the rate of bf16: FP32 logits are sums of bf16 products on both sides. [PaLM]"""
    return 2 * shape.embedding_parameters


def forward_again(recompute: str, shape: Architecture) -> float:
    """Return FLOP per token of the layers' matrices that the backward pass computes again. [AR] section 5.

    recompute: as in the recipe; selective means MLPs and experts (megarl/core/models/build.py).
    """
    attention = 2 * shape.layers * shape.attention_parameters
    return {"none": 0.0, "selective": layer_flop(shape) - attention, "full": layer_flop(shape)}[recompute]


def bubble(pipeline_parallel: int, virtual: int, microbatches: int) -> float:
    """Return a step's pipeline time as a multiple of its micro-batches' time: 1 + (p - 1) / (m v). [PP] 2.2."""
    return 1 + (pipeline_parallel - 1) / (microbatches * virtual)


def tensor_parallel_bytes(
    tokens: float, shape: Architecture, ranks: int, sequence_parallel: bool, recompute: str = "none"
) -> float:
    """Return bytes over a rank's link for the tensor parallelism of one layer, forward and backward. [AR] 4.2.2.

    Sequence parallelism: four gathers and four scatters of [tokens, hidden], and two more gathers for weight gradients.
    Without it: four all-reduces, each a gather and a scatter. Recomputation repeats exchanges: two of each, or one.
    """
    passes = (10 if sequence_parallel else 8) + {"none": 0, "selective": 2, "full": 4}[recompute]
    return passes * HALF * tokens * shape.hidden * (ranks - 1) / ranks


def expert_parallel_bytes(tokens: float, shape: Architecture, ranks: int, recompute: str = "none") -> float:
    """Return bytes over a rank's link for one layer's experts, each pass there and back. GShard, arXiv 2006.16668."""
    exchanges = 4 if recompute == "none" else 6
    return exchanges * HALF * tokens * shape.experts_per_token * shape.hidden * (ranks - 1) / ranks


def data_parallel_bytes(parameters: float, width: int, ranks: int) -> float:
    """Return bytes over a rank's link once a step: FP32 gradients scattered, weights gathered. [ZeRO] 7.2.1"""
    return (FP32 + width) * parameters * (ranks - 1) / ranks


def optimizer_bytes(parameters: float) -> float:
    """Return bytes read and written by AdamW for these parameters: gradient; three values read and written; the weight."""
    return (FP32 + 6 * FP32 + HALF) * parameters


def offload_bytes(parameters: float) -> float:
    """Return bytes each way over a GPU's link to its host, for AdamW there: FP32 gradients to it, FP32 weights back."""
    return FP32 * parameters


def experts_met(experts: int, chosen: int, tokens: float) -> float:
    """Return how many of a layer's experts this many tokens reach, each choosing uniformly: what decoding has to read."""
    return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 0.0


def roofline(bytes_moved: float, memory_rate: float, flop: float, flop_rate: float) -> float:
    """Return seconds, by whichever limits. [Roof]"""
    return max(bytes_moved / memory_rate, flop / flop_rate)


def broadcast_seconds(size: float, rate: float, receivers: int, hop_s: float) -> float:
    """Return seconds of a pipelined ring broadcast: bytes pass each link once, the last rank is `receivers` hops away.

    Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005: large messages.
    """
    return size / rate + receivers * hop_s
