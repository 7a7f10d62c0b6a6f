"""Seconds of a training step, of a server's decode step, and of a publication.

[PaLM] Chowdhery et al., PaLM, arXiv 2204.02311, appendix B
[Roof] Williams et al., Roofline, Communications of the ACM 52(4), 2009
[Ring] Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005
[AR], [PP], [ZeRO]: memory.py
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megarl.core.algorithm.packing import HEAD_PASSES, LAYER_PASSES, Cost, pack
from megarl.core.base.architecture import Architecture
from megarl.core.recipe import Recipe
from megarl.core.server.membership import in_a_row
from megarl.lab.planning import memory
from megarl.lab.planning.hardware import ASSUMED, GB, Gpu
from megarl.lab.planning.memory import FP32, HALF, WIDTH

CONTROL_CALLS = 5
"""HTTP calls of a publication to one server: pause, begin, end, checksums, continue (megarl/core/weights/publisher.py)."""


TAIL_PARTS = 32
"""Quantiles of the lengths, between which the requests of a batch count as ending together."""

PREFILL_CHUNK = 8192
"""Tokens of prompts that SGLang reads at a time (--chunked-prefill-size)."""


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


def train_seconds(recipe: Recipe, shape: Architecture, packed: Packing, gpu: Gpu, by_node: bool = False) -> float:
    """Return seconds of forward, backward, gradients and optimiser of a step on the slowest rank. by_node: of _link_seconds."""
    model, stages, microbatches = recipe.model, recipe.model.pipeline_parallel, packed.microbatches
    # Stages exchange micro-batches of one size (learner/microbatch.py), so the fullest sets the pace.
    tokens = (packed.rank_tokens / microbatches if stages == 1 else packed.largest) / model.context_parallel
    layers = _layer_seconds(recipe, shape, tokens, packed.positions, gpu, by_node) / stages
    head = tokens * HEAD_PASSES * head_flop(shape) / (gpu.bf16 * gpu.training) / model.tensor_parallel
    bubble = (stages - 1) / (microbatches * model.virtual_pipeline_parallel)  # [PP] 2.2
    # Gradients are reduced while the last micro-batch's backward pass, two thirds of it, goes on (learner/optimizer.py).
    update = _update_seconds(recipe, shape, gpu, hidden=(layers + head) * 2 / 3)
    passes = (1 + (recipe.reference.coefficient > 0) / LAYER_PASSES) * microbatches  # a reference only scores: forward
    return (layers + head) * passes * (1 + bubble) + update


def _layer_seconds(
    recipe: Recipe, shape: Architecture, tokens: float, positions: float, gpu: Gpu, by_node: bool
) -> float:
    """Return seconds of a micro-batch's forward and backward passes through all layers, with `tokens` of it on the rank.

    The GPU does products, memory traffic and exchanges one after the other. The processor that starts its kernels runs ahead,
    so a layer takes the longer of the two times. Each of three passes writes and reads every number kept for the backward pass,
    once in a product and once in an element-wise kernel, and reads the weights. [Roof], [AR] 4.1
    """
    model, recompute = recipe.model, recipe.learner.recompute
    body, ranks = shape.body_parameters, model.tensor_parallel
    bf16 = gpu.bf16 * gpu.training
    # The backward pass computes again the matrices of all layers, or of MLPs and experts (models/build.py): [AR] section 5
    again = {"none": 0.0, "selective": body - shape.layers * shape.attention_parameters, "full": body}[recompute]
    linear = LAYER_PASSES * layer_flop(shape) + 2 * again
    attention = (LAYER_PASSES + (recompute == "full")) * attention_flop(shape, positions)
    products = linear / (bf16 if model.fp8 == "none" else gpu.fp8 * gpu.fp8_training) + attention / bf16
    kept = memory.activation_bytes(recipe, shape, "none")[0] * model.pipeline_parallel
    passes = LAYER_PASSES + again / body
    # A token's row for each expert is put in order before and after two exchanges: read and written, forward and backward.
    rows = shape.experts_per_token * shape.moe_layers / ranks
    ordered = 16 * HALF * shape.hidden * rows / LAYER_PASSES
    traffic = passes * (tokens * (2 * kept + ordered) + WIDTH[model.dtype] * memory.layer_parameters(recipe, shape))
    moved = traffic / (gpu.memory_rate * ASSUMED.bandwidth_efficiency)
    device = tokens * products / ranks + moved + _link_seconds(recipe, shape, tokens, gpu, by_node)
    dense = shape.layers - shape.moe_layers
    host = passes / LAYER_PASSES * (dense * ASSUMED.layer_s + shape.moe_layers * gpu.expert_layer_s)
    return max(device, host)


def _link_seconds(recipe: Recipe, shape: Architecture, tokens: float, gpu: Gpu, by_node: bool) -> float:
    """Return seconds of tensor, context and expert parallelism's exchanges that nothing hides, in all layers.

    by_node: rows for several experts of a node cross the network once, as with DeepEP (github.com/deepseek-ai/DeepEP).
    """
    model, again, row = recipe.model, recipe.learner.recompute, HALF * shape.hidden
    tensor, experts, seconds = model.tensor_parallel, model.expert_parallel, 0.0
    if tensor > 1:
        # [AR] 4.2.2. Sequence parallelism: four gathers and two scatters of [tokens, hidden]. Two scatters of the backward pass
        # and two gathers for weight gradients are hidden by the products beside them (megatron's tensor_parallel/layers.py).
        # Recomputation repeats two exchanges or one.
        passes = 6 + {"none": 0, "selective": 2, "full": 4}[again]
        size = passes * tokens * row * (tensor - 1) / tensor
        seconds += shape.layers * size / (gpu.nvlink * ASSUMED.network_efficiency)
    if (context := model.context_parallel) > 1:
        # k and v of all ranks are gathered, their gradients scattered (models/layers.py); recomputation gathers again.
        size = (3 if again == "full" else 2) * tokens * (context - 1) * HALF * (shape.key + shape.value) / tensor
        seconds += shape.layers * size / (gpu.nvlink * ASSUMED.network_efficiency)
    if experts > 1:  # each pass there and back: GShard, arXiv 2006.16668
        passes, chosen = 4 if again == "none" else 6, shape.experts_per_token
        nodes = max(1.0, experts / gpu.nvlink_gpus)
        reached = (
            nodes * (1 - (1 - 1 / nodes) ** chosen) if by_node else chosen
        )  # rows that leave, each choosing uniformly
        far, near = reached * (nodes - 1) / nodes / gpu.network, chosen * (experts - 1) / experts / gpu.nvlink
        seconds += shape.moe_layers * passes * tokens / tensor * row * max(far, near) / ASSUMED.network_efficiency
    return seconds


def _update_seconds(recipe: Recipe, shape: Architecture, gpu: Gpu, hidden: float) -> float:
    """Return seconds to reduce gradients beyond `hidden`, run AdamW on this rank's share and gather weights."""
    model, ranks = recipe.model, recipe.resources.learner_ranks
    seconds, reduced, offload = 0.0, 0.0, recipe.learner.optimizer_offload
    dense = shape.parameters - shape.routed_parameters
    experts = model.expert_parallel * model.expert_tensor_parallel
    for parameters, neighbours in ((dense, model.tensor_parallel), (shape.routed_parameters, experts)):
        shards = neighbours * model.pipeline_parallel
        local, copies = parameters / shards, ranks // shards
        # Groups of copies interleave: one has every so manieth rank of a node. A ring over several nodes leaves each on as many
        # adapters as it has ranks there, since NCCL makes a ring for each (nccl-tests, PERFORMANCE.md).
        here, inside = max(1, gpu.nvlink_gpus // neighbours), copies * neighbours <= gpu.nvlink_gpus
        rate = (gpu.nvlink if inside else min(gpu.network * here, gpu.nvlink)) * ASSUMED.network_efficiency
        # FP32 gradients scattered, weights gathered: [ZeRO] 7.2.1
        reduced += FP32 * local * (copies - 1) / copies / rate
        seconds += WIDTH[model.dtype] * local * (copies - 1) / copies / rate
        mine = local / copies
        kept = (1 - offload) * optimizer_bytes(mine) / (gpu.memory_rate * ASSUMED.bandwidth_efficiency)
        # In the host's memory: FP32 gradients to it, FP32 weights back.
        moved = 2 * FP32 * offload * mine / (gpu.host * ASSUMED.network_efficiency)
        seconds += max(kept, moved + optimizer_bytes(offload * mine) / (ASSUMED.host_gb_s * GB))
    return seconds + max(0.0, reduced - hidden)


class Decoder:
    """Computes seconds of a server's decode steps. kv_token: bytes of a token's k and v on each of its GPUs."""

    def __init__(self, recipe: Recipe, shape: Architecture, gpu: Gpu, kv_token: float) -> None:
        self.shape, self.kv_token, self.ranks = shape, kv_token, recipe.resources.server_tensor_parallel
        width = WIDTH[recipe.model.dtype]
        # On each GPU: bytes that any step reads, and for each expert reached in all layers; FLOP of a token; seconds of a step.
        self.read = width * (shape.dense_parameters + shape.embedding_parameters) / self.ranks
        self.read_expert = width * shape.moe_layers * shape.expert_parameters / self.ranks
        self.flop = (layer_flop(shape) + head_flop(shape)) / self.ranks
        nodes = max(1.0, self.ranks / gpu.nvlink_gpus)  # an all-reduce goes up and down a tree of them: [Ring]
        allreduce = (
            2 * (ASSUMED.allreduce_latency_s + 2 * math.log2(nodes) * ASSUMED.hop_latency_s) if self.ranks > 1 else 0.0
        )
        dense, routed = shape.layers - shape.moe_layers, shape.moe_layers
        self.fixed_seconds = dense * ASSUMED.decode_layer_s + routed * gpu.decode_expert_layer_s
        self.fixed_seconds += shape.layers * allreduce + ASSUMED.decode_overhead_s
        self.host_seconds = (
            dense * ASSUMED.layer_s / LAYER_PASSES + routed * ASSUMED.prefill_expert_layer_s
        )  # of a prompt's chunk
        self.exchanged = (
            2 * shape.layers * 2 * HALF * shape.hidden * (self.ranks - 1) / self.ranks
        )  # [AR] 4.2.2: bytes a token
        self.memory_rate = gpu.memory_rate * gpu.serving
        self.flop_rate = gpu.bf16 * ASSUMED.decode_efficiency
        self.link_rate = (gpu.nvlink if nodes == 1 else gpu.network) * ASSUMED.network_efficiency

    def step_seconds(self, running: float, context_tokens: float) -> float:
        """Return seconds to decode one token for each of `running` requests that hold `context_tokens` in total."""
        shape, positions = self.shape, context_tokens  # tokens whose k and v are read, averaged over layers
        if shape.local_positions is not None:
            local = min(context_tokens, running * shape.local_positions)
            positions -= shape.local_layers / shape.layers * (context_tokens - local)
        moved = self.read + positions * self.kv_token
        if shape.experts:  # those that requests reach, each choosing uniformly
            moved += shape.experts * (1 - (1 - shape.experts_per_token / shape.experts) ** running) * self.read_expert
        attention = attention_flop(shape, context_tokens / max(running, 1)) / self.ranks
        # Whichever limits: [Roof]
        limit = max(moved / self.memory_rate, running * (self.flop + attention) / self.flop_rate)
        return limit + running * self.exchanged / self.link_rate + self.fixed_seconds

    def prefill_seconds(self, tokens: float, prompts: float = 1.0) -> float:
        """Return seconds to read prompts of so many tokens each, PREFILL_CHUNK tokens at a time, while nothing is decoded."""
        flop = self.flop + attention_flop(self.shape, tokens / 2) / self.ranks
        chunks = max(1.0, tokens * prompts / PREFILL_CHUNK)
        device = tokens * prompts * (flop / self.flop_rate + self.exchanged / self.link_rate)
        return max(device, chunks * self.host_seconds)

    def batch_seconds(self, lengths: np.ndarray, prompt: float, requests: float, limit: float) -> float:
        """Return seconds until the last of `requests` ends. Completions are like `lengths`; at most `limit` run at once.

        Those that wait are worked off at the limit's rate; then ever fewer run until the longest ends. prompt: tokens of each.
        """
        last, mean = min(requests, limit), float(lengths.mean())
        waiting = (requests - last) * mean * self.step_seconds(last, last * (prompt + mean / 2)) / last
        ends = np.quantile(lengths, np.arange(1, TAIL_PARTS + 1) / TAIL_PARTS)
        begins = np.concatenate([[0.0], ends[:-1]])
        tail = 0.0
        for part, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            running = max(1.0, last * (1 - part / TAIL_PARTS))
            tail += (end - begin) * self.step_seconds(running, running * (prompt + (begin + end) / 2))
        return self.prefill_seconds(prompt, requests) + waiting + tail


class Publication(NamedTuple):
    """Seconds that servers are paused (transfer), and that the learner is busy beyond that, scoring for parity."""

    transfer: float
    parity: float


def publication(recipe: Recipe, shape: Architecture, gpu: Gpu, devices: int) -> Publication:
    """Return the cost of sending the whole model to all servers, bucket by bucket.

    Every rank of a server receives all of it through one network adapter, so stages that send at once save nothing here.
    """
    servers, ranks = recipe.resources.servers, recipe.resources.server_tensor_parallel
    size = shape.parameters * WIDTH[recipe.model.dtype]
    bucket = recipe.weights.bucket_mb * 2**20
    buckets = max(recipe.model.pipeline_parallel, -(-int(size) // bucket))
    rate = (gpu.nvlink if devices <= gpu.nvlink_gpus else gpu.network) * ASSUMED.network_efficiency
    # A pipelined ring: bytes pass each link once, and the last rank is as many hops away as there are receivers: [Ring]
    wire = size / buckets / rate + servers * ranks * ASSUMED.hop_latency_s
    calls = in_a_row(servers) * ASSUMED.call_seconds
    transfer = buckets * max(wire, calls) + CONTROL_CALLS * calls + ASSUMED.control_seconds
    return Publication(transfer, ASSUMED.parity_seconds)


def layer_flop(shape: Architecture) -> float:
    """Return FLOP per token forward: 2 for each parameter it is multiplied with, without embedding and head. [PaLM]"""
    return 2 * shape.body_parameters


def attention_flop(shape: Architecture, positions: float) -> float:
    """Return FLOP forward of a token that attends to so many positions: scores and their sum over values. [PaLM], causal."""
    local = shape.local_layers * min(positions, shape.local_positions or positions)
    return 2 * (shape.query + shape.attended) * (local + (shape.layers - shape.local_layers) * positions)


def head_flop(shape: Architecture) -> float:
    """Return FLOP per token forward, at the rate of bf16: FP32 logits are sums of bf16 products on both sides. [PaLM]"""
    return 2 * shape.embedding_parameters


def optimizer_bytes(parameters: float) -> float:
    """Return bytes read and written by AdamW for these parameters: gradient; three values read and written; the weight."""
    return (FP32 + 6 * FP32 + HALF) * parameters
