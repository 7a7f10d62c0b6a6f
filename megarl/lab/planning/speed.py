"""Seconds of a training step, of a server's decode step, and of a publication.

[PaLM] Chowdhery et al., PaLM, arXiv 2204.02311, appendix B
[Roof] Williams et al., Roofline, Communications of the ACM 52(4), 2009
[Ring] Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005
[AR], [PP], [ZeRO]: memory.py
"""

from collections.abc import Sequence
from typing import NamedTuple

from megarl.core.algorithm.packing import HEAD_PASSES, LAYER_PASSES, Cost, pack
from megarl.core.base.architecture import Architecture
from megarl.core.recipe import Recipe
from megarl.lab.planning.hardware import ASSUMED, GB, Gpu
from megarl.lab.planning.memory import FP32, HALF, WIDTH

CONTROL_CALLS = 5
"""HTTP calls of a publication to one server: pause, begin, end, checksums, continue (megarl/core/weights/publisher.py)."""


class Packing(NamedTuple):
    """How a step's sequences fall into micro-batches."""

    microbatches: int  # per data-parallel rank
    largest: int  # tokens of the fullest one
    rank_tokens: int  # of the busiest rank
    positions: float  # mean number of positions that one of these tokens attends to


def packing(
    lengths: Sequence[int], microbatch_tokens: int, data_parallel: int, cost: Cost, one_size: bool = False
) -> Packing:
    """Pack these sequence lengths with megarl's own packing."""
    members = pack(lengths, microbatch_tokens, data_parallel, cost, one_size)
    ranks = [[lengths[i] for microbatch in rank for i in microbatch] for rank in members]
    busiest = max(ranks, key=lambda rank: sum(cost.of(n) for n in rank))
    return Packing(
        microbatches=len(members[0]),
        largest=max(sum(lengths[i] for i in microbatch) for rank in members for microbatch in rank),
        rank_tokens=sum(busiest),
        positions=sum(n**2 for n in busiest) / (2 * sum(busiest)),
    )


def train_seconds(recipe: Recipe, shape: Architecture, packed: Packing, gpu: Gpu) -> float:
    """Return seconds of forward, backward, gradients and optimiser of a step on the slowest rank."""
    model, stages, microbatches = recipe.model, recipe.model.pipeline_parallel, packed.microbatches
    # Stages exchange micro-batches of one size (learner/microbatch.py), so the fullest sets the pace.
    tokens = (packed.rank_tokens if stages == 1 else packed.largest * microbatches) / model.context_parallel
    attention, recompute = attention_flop(shape, packed.positions), recipe.learner.recompute
    bf16 = gpu.bf16 * ASSUMED.training_efficiency
    # The backward pass computes again the matrices of all layers, or of MLPs and experts (models/build.py): [AR] section 5
    body = shape.body_parameters
    again = {"none": 0.0, "selective": body - shape.layers * shape.attention_parameters, "full": body}[recompute]
    linear = LAYER_PASSES * layer_flop(shape) + 2 * again
    linear_seconds = linear / (bf16 if model.fp8 == "none" else gpu.fp8 * ASSUMED.fp8_efficiency)
    attention_seconds = (LAYER_PASSES + (recompute == "full")) * attention / bf16
    head_seconds = HEAD_PASSES * head_flop(shape) / bf16
    per_token = ((linear_seconds + attention_seconds) / stages + head_seconds) / model.tensor_parallel
    links = _layer_link_seconds(recipe, shape, tokens, gpu) / stages
    slowest = tokens * per_token + links
    bubble = (stages - 1) / (microbatches * model.virtual_pipeline_parallel)  # [PP] 2.2
    return slowest * (1 + bubble) + _update_seconds(recipe, shape, gpu)


def _layer_link_seconds(recipe: Recipe, shape: Architecture, tokens: float, gpu: Gpu) -> float:
    """Return seconds of tensor and expert parallelism's communication in all layers, as if none of it were hidden."""
    model, again, row = recipe.model, recipe.learner.recompute, HALF * shape.hidden
    tensor, experts, seconds = model.tensor_parallel, model.expert_parallel, 0.0
    if tensor > 1:
        # [AR] 4.2.2. Sequence parallelism: four gathers and four scatters of [tokens, hidden], and two more gathers for weight
        # gradients. Without it: four all-reduces, each a gather and a scatter. Recomputation repeats two exchanges or one.
        passes = (10 if model.sequence_parallel else 8) + {"none": 0, "selective": 2, "full": 4}[again]
        size = passes * tokens * row * (tensor - 1) / tensor
        seconds += shape.layers * size / (gpu.nvlink * ASSUMED.network_efficiency)
    if experts > 1:  # each pass there and back: GShard, arXiv 2006.16668
        local = tokens / (tensor if model.sequence_parallel else 1)
        size = (4 if again == "none" else 6) * local * shape.experts_per_token * row * (experts - 1) / experts
        rate = gpu.nvlink if experts <= gpu.nvlink_gpus else gpu.network
        seconds += shape.moe_layers * size / (rate * ASSUMED.network_efficiency)
    return seconds


def _update_seconds(recipe: Recipe, shape: Architecture, gpu: Gpu) -> float:
    """Return seconds to reduce gradients, run AdamW on this rank's share and gather weights, as if none of it were hidden."""
    model, ranks = recipe.model, recipe.resources.learner_ranks
    dense_shards = model.tensor_parallel * model.pipeline_parallel
    expert_shards = model.expert_parallel * model.expert_tensor_parallel * model.pipeline_parallel
    rate = (gpu.nvlink if ranks <= gpu.nvlink_gpus else gpu.network) * ASSUMED.network_efficiency
    seconds, offload = 0.0, recipe.learner.optimizer_offload
    dense = shape.parameters - shape.routed_parameters
    for parameters, shards in ((dense, dense_shards), (shape.routed_parameters, expert_shards)):
        local, copies = parameters / shards, ranks // shards
        # FP32 gradients scattered, weights gathered: [ZeRO] 7.2.1
        seconds += (FP32 + WIDTH[model.dtype]) * local * (copies - 1) / copies / rate
        mine = local / copies
        here = (1 - offload) * optimizer_bytes(mine) / (gpu.memory_rate * ASSUMED.bandwidth_efficiency)
        # In the host's memory: FP32 gradients to it, FP32 weights back.
        moved = 2 * FP32 * offload * mine / (gpu.host * ASSUMED.network_efficiency)
        seconds += max(here, moved + optimizer_bytes(offload * mine) / (ASSUMED.host_gb_s * GB))
    return seconds


class Decoder:
    """Computes seconds of a server's decode steps. kv_token: bytes of a token's k and v on each of its GPUs."""

    def __init__(self, recipe: Recipe, shape: Architecture, gpu: Gpu, kv_token: float) -> None:
        self.shape, self.kv_token, self.ranks = shape, kv_token, recipe.resources.server_tensor_parallel
        width = WIDTH[recipe.model.dtype]
        # On each GPU: bytes that any step reads, and for each expert reached in all layers; FLOP of a token; seconds of a step.
        self.read = width * (shape.dense_parameters + shape.embedding_parameters) / self.ranks
        self.read_expert = width * shape.moe_layers * shape.expert_parameters / self.ranks
        self.flop = (layer_flop(shape) + head_flop(shape)) / self.ranks
        allreduces = 2 * shape.layers * ASSUMED.allreduce_latency_s if self.ranks > 1 else 0.0
        self.fixed_seconds = allreduces + ASSUMED.decode_overhead_s
        self.memory_rate = gpu.memory_rate * ASSUMED.bandwidth_efficiency
        self.flop_rate = gpu.bf16 * ASSUMED.decode_efficiency

    def step_seconds(self, running: float, context_tokens: float) -> float:
        """Return seconds to decode one token for each of `running` requests that hold `context_tokens` in total."""
        shape, positions = self.shape, context_tokens  # tokens whose k and v are read, averaged over layers
        if shape.attention_chunk is not None:
            local = min(context_tokens, running * shape.attention_chunk)
            positions -= shape.local_layers / shape.layers * (context_tokens - local)
        moved = self.read + positions * self.kv_token
        if shape.experts:  # those that requests reach, each choosing uniformly
            moved += shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** running) * self.read_expert
        attention = attention_flop(shape, context_tokens / max(running, 1)) / self.ranks
        # Whichever limits: [Roof]
        return max(moved / self.memory_rate, running * (self.flop + attention) / self.flop_rate) + self.fixed_seconds


class Publication(NamedTuple):
    """Seconds that servers are paused (transfer), and that the learner is busy beyond that, scoring for parity."""

    transfer: float
    parity: float


def publication(recipe: Recipe, shape: Architecture, gpu: Gpu, devices: int) -> Publication:
    """Return the cost of sending the whole model to all servers, bucket by bucket; stages send one after the other."""
    servers, ranks = recipe.resources.servers, recipe.resources.server_tensor_parallel
    size = shape.parameters * WIDTH[recipe.model.dtype]
    bucket = recipe.weights.bucket_mb * 2**20
    buckets = max(recipe.model.pipeline_parallel, -(-int(size) // bucket))
    rate = (gpu.nvlink if devices <= gpu.nvlink_gpus else gpu.network) * ASSUMED.network_efficiency
    # A pipelined ring: bytes pass each link once, and the last rank is as many hops away as there are receivers: [Ring]
    wire, calls = size / buckets / rate + servers * ranks * ASSUMED.hop_latency_s, servers * ASSUMED.call_seconds
    transfer = buckets * max(wire, calls) + CONTROL_CALLS * calls + ASSUMED.control_seconds
    return Publication(transfer, ASSUMED.parity_seconds)


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


def optimizer_bytes(parameters: float) -> float:
    """Return bytes read and written by AdamW for these parameters: gradient; three values read and written; the weight."""
    return (FP32 + 6 * FP32 + HALF) * parameters
