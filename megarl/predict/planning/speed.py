"""Estimates the seconds of a training step, of a server's decode step, and of a
publication.

[PaLM] Chowdhery et al., PaLM, arXiv 2204.02311, appendix B
[Roof] Williams et al., Roofline, Communications of the ACM 52(4), 2009
[Ring] Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations
       in MPICH, 2005
[AR], [PP], [ZeRO]: memory.py
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megarl.core.algorithm.packing import HEAD_PASSES, LAYER_PASSES, Cost, pack
from megarl.core.base.architecture import Architecture
from megarl.core.client.membership import in_a_row, sending_copies
from megarl.core.recipe import Recipe
from megarl.predict.planning import memory
from megarl.predict.planning.hardware import ASSUMED, GB, Gpu
from megarl.predict.planning.memory import FP32, HALF, WIDTH

CONTROL_CALLS = 7
"""HTTP calls to a server in a publication (sync/publisher.py): version, begin,
receive, checksums, pause, swap, continue.
"""
TAIL_PARTS = 32
"""Number of quantiles of the lengths. Requests of a batch between two of them are
treated as ending together.
"""
PREFILL_CHUNK = 8192
"""Prompt tokens that SGLang reads at a time (--chunked-prefill-size)."""


class Packing(NamedTuple):
    """How a step's sequences are packed into micro-batches."""

    microbatches: int  # per data-parallel rank
    largest: int  # tokens of the fullest one
    rank_tokens: int  # tokens of the busiest rank
    positions: float  # mean number of positions to which one of these tokens attends


def packing(
    lengths: Sequence[int],
    microbatch_tokens: int,
    data_parallel: int,
    cost: Cost,
    one_size: bool = False,
) -> Packing:
    """Pack sequences of these lengths with the learner's own packing."""
    members = pack(lengths, microbatch_tokens, data_parallel, cost, one_size)
    largest = 0
    busiest: list[int] = []
    highest_cost = -1.0
    for rank in members:
        rank_lengths: list[int] = []
        for microbatch in rank:
            microbatch_lengths = [lengths[i] for i in microbatch]
            largest = max(largest, sum(microbatch_lengths))
            rank_lengths += microbatch_lengths
        rank_cost = sum(cost.of(length) for length in rank_lengths)
        if rank_cost > highest_cost:
            busiest = rank_lengths
            highest_cost = rank_cost
    rank_tokens = sum(busiest)
    squares = sum(length**2 for length in busiest)
    return Packing(
        microbatches=len(members[0]),
        largest=largest,
        rank_tokens=rank_tokens,
        positions=squares / (2 * rank_tokens),
    )


def train_seconds(
    recipe: Recipe, shape: Architecture, packed: Packing, gpu: Gpu, by_node: bool = False
) -> float:
    """Return seconds of a step on the slowest rank: forward, backward, gradients,
    optimiser. by_node: see `_link_seconds`.
    """
    model = recipe.model
    stages = model.pipeline_parallel
    microbatches = packed.microbatches
    # Stages exchange micro-batches of one size (learner/microbatch.py), so the fullest
    # one sets the pace.
    microbatch_tokens = float(packed.largest)
    if stages == 1:
        microbatch_tokens = packed.rank_tokens / microbatches
    tokens = microbatch_tokens / model.context_parallel
    all_layers = _layer_seconds(recipe, shape, tokens, packed.positions, gpu, by_node)
    layers = all_layers * memory.stage_share(recipe, shape)
    head_rate = gpu.bf16 * gpu.training
    head = tokens * HEAD_PASSES * head_flop(shape) / head_rate / model.tensor_parallel
    slots = microbatches * model.virtual_pipeline_parallel
    bubble = (stages - 1) / slots  # [PP] 2.2
    forward_and_backward = layers + head
    # Gradients are reduced during the last micro-batch's backward pass, two thirds of
    # its time (learner/optimizer.py).
    update = _update_seconds(recipe, shape, gpu, hidden=forward_and_backward * 2 / 3)
    passes = 1.0
    if recipe.reference.coefficient > 0:  # a reference only scores: forward
        passes += 1 / LAYER_PASSES
    return forward_and_backward * (passes * microbatches) * (1 + bubble) + update


def _layer_seconds(
    recipe: Recipe, shape: Architecture, tokens: float, positions: float, gpu: Gpu, by_node: bool
) -> float:
    """Return seconds of forward and backward passes through all layers, for a
    micro-batch with `tokens` tokens on the rank.

    The GPU does products, memory traffic and exchanges one after the other. The CPU
    launches its kernels ahead of time, so a layer takes the longer of GPU time and CPU
    time. Each of three passes writes and reads every number kept for the backward pass,
    once in a product and once in an element-wise kernel, and reads the weights. [Roof],
    [AR] 4.1
    """
    model = recipe.model
    recompute = recipe.learner.recompute
    body = shape.body_parameters
    ranks = model.tensor_parallel
    bf16 = gpu.bf16 * gpu.training
    linear_rate = bf16
    if model.fp8 != "none":
        linear_rate = gpu.fp8 * gpu.fp8_training
    # The backward pass repeats the products of all layers, or of MLPs and experts
    # (models/build.py): [AR] section 5
    feed_forward = body - shape.mixing_parameters
    repeated_of = {"none": 0.0, "light": 0.0, "selective": feed_forward, "full": body}
    repeated = repeated_of[recompute]
    linear = LAYER_PASSES * layer_flop(shape) + 2 * repeated
    attention_passes = LAYER_PASSES
    if recompute == "full":
        attention_passes += 1
    attention = attention_passes * attention_flop(shape, positions)
    products = linear / linear_rate + attention / bf16
    activations = memory.activation_bytes(recipe, shape, "none")[0] * model.pipeline_parallel
    passes = LAYER_PASSES + repeated / body
    # A token's row for each expert is reordered before and after two exchanges: read
    # and written, forward and backward.
    rows = shape.experts_per_token * shape.moe_layers / ranks
    ordered = 16 * HALF * shape.hidden * rows / LAYER_PASSES
    weights = WIDTH[model.dtype] * memory.layer_parameters(recipe, shape)
    token_bytes = 2 * activations + ordered
    traffic = passes * (tokens * token_bytes + weights)
    if recompute == "light":
        # An element-wise kernel reads gate and up of each product, or a norm's input,
        # and writes one number again.
        light = memory.light_activation_bytes(shape, HALF)
        traffic += tokens * 3 * light * shape.moe_layers / ranks
    memory_rate = gpu.memory_rate * ASSUMED.bandwidth_efficiency
    moved = traffic / memory_rate
    exchanged = _link_seconds(recipe, shape, tokens, gpu, by_node)
    device = tokens * products / ranks + moved + exchanged
    dense = shape.layers - shape.moe_layers
    launches = dense * ASSUMED.layer_s + shape.moe_layers * gpu.expert_layer_s
    host = passes / LAYER_PASSES * launches
    return max(device, host)


def _link_seconds(
    recipe: Recipe, shape: Architecture, tokens: float, gpu: Gpu, by_node: bool
) -> float:
    """Return seconds, in all layers, of those exchanges of tensor, context and expert
    parallelism that no computation hides. by_node: rows for several experts of a node
    cross the network once, as with DeepEP (github.com/deepseek-ai/DeepEP).
    """
    model = recipe.model
    recompute = recipe.learner.recompute
    row = HALF * shape.hidden
    tensor = model.tensor_parallel
    context = model.context_parallel
    experts = model.expert_parallel
    rate = gpu.nvlink * ASSUMED.network_efficiency
    # [AR] 4.2.2. Sequence parallelism: four gathers and two scatters of [tokens,
    # hidden]. Two scatters of the backward pass and two gathers for weight gradients
    # are hidden by the products beside them (megatron's tensor_parallel/layers.py).
    # Recomputation repeats two exchanges or one.
    recomputed = {"none": 0, "light": 0, "selective": 2, "full": 4}
    passes = 6 + recomputed[recompute]
    size = passes * tokens * row * (tensor - 1) / tensor
    seconds = shape.layers * size / rate
    # k and v of all ranks are gathered and their gradients scattered
    # (models/layers.py); recomputation gathers again.
    passes = 3 if recompute == "full" else 2
    key_and_value = shape.key + shape.value
    size = passes * tokens * (context - 1) * HALF * key_and_value / tensor
    seconds += shape.attention_layers * size / rate
    # Delta networks exchange tokens for heads, and outputs back (models/delta.py).
    rows = memory.delta_activation_bytes(shape, HALF, HALF)
    size = passes * tokens * (context - 1) / context * rows / tensor
    seconds += len(shape.delta_layers) * size / rate
    # Each pass goes there and back: GShard, arXiv 2006.16668. A token has a row for
    # each expert, chosen uniformly; some leave.
    passes = 6 if recompute in ("selective", "full") else 4
    chosen = shape.experts_per_token
    nodes = max(1.0, experts / gpu.nvlink_gpus)
    nodes_reached: float = chosen
    if by_node:
        chance_of_none = (1 - 1 / nodes) ** chosen
        nodes_reached = nodes * (1 - chance_of_none)
    over_network = nodes_reached * (nodes - 1) / nodes / gpu.network
    over_nvlink = chosen * (experts - 1) / experts / gpu.nvlink
    slower = max(over_network, over_nvlink)
    exchanged = shape.moe_layers * passes * tokens / tensor * row
    return seconds + exchanged * slower / ASSUMED.network_efficiency


def _update_seconds(recipe: Recipe, shape: Architecture, gpu: Gpu, hidden: float) -> float:
    """Return seconds to reduce gradients (less `hidden`, in the backward pass), run
    AdamW on a rank's share, gather weights.
    """
    model = recipe.model
    width = WIDTH[model.dtype]
    offload = recipe.learner.optimizer_offload
    memory_rate = gpu.memory_rate * ASSUMED.bandwidth_efficiency
    host_link_rate = gpu.host * ASSUMED.network_efficiency
    host_memory_rate = ASSUMED.host_gb_s * GB
    dense = shape.parameters - shape.routed_parameters
    experts = model.expert_parallel * model.expert_tensor_parallel
    seconds = 0.0
    reduced = 0.0
    for parameters, neighbours in (
        (dense, model.tensor_parallel),
        (shape.routed_parameters, experts),
    ):
        shards = neighbours * model.pipeline_parallel
        local = parameters / shards
        copies = recipe.resources.learner_ranks // shards
        rate = _ring_rate(gpu, neighbours, copies)
        # FP32 gradients scattered, weights gathered: [ZeRO] 7.2.1
        reduced += FP32 * local * (copies - 1) / copies / rate
        seconds += width * local * (copies - 1) / copies / rate
        own_part = local / copies
        on_gpu = (1 - offload) * optimizer_bytes(own_part) / memory_rate
        # The offloaded part: FP32 gradients go to the host's memory, FP32 weights come
        # back.
        moved = 2 * FP32 * offload * own_part / host_link_rate
        on_host = optimizer_bytes(offload * own_part) / host_memory_rate
        seconds += max(on_gpu, moved + on_host)
    return seconds + max(0.0, reduced - hidden)


def _ring_rate(gpu: Gpu, neighbours: int, copies: int) -> float:
    """Return bytes/s of a ring among copies of the same parameters.

    Groups of copies interleave: a group has every n-th rank, n being `neighbours`. A
    ring over several nodes uses as many network adapters of a node as it has ranks
    there, since NCCL makes a ring for each (nccl-tests, PERFORMANCE.md).
    """
    if copies * neighbours <= gpu.nvlink_gpus:
        return gpu.nvlink * ASSUMED.network_efficiency
    ranks_of_node = max(1, gpu.nvlink_gpus // neighbours)
    rate = min(gpu.network * ranks_of_node, gpu.nvlink)
    return rate * ASSUMED.network_efficiency


class Decoder:
    """Computes seconds of a server's decode steps. kv_token: bytes of a token's k and v
    on each of the server's GPUs.
    """

    def __init__(self, recipe: Recipe, shape: Architecture, gpu: Gpu, kv_token: float) -> None:
        self.shape = shape
        self.kv_token = kv_token
        self.ranks = recipe.resources.server_tensor_parallel
        width = WIDTH[recipe.model.dtype]
        # On each GPU: bytes read in any step, and per expert used in all layers; FLOP
        # per token, those in FP8 counted as the bf16 ones that take as long; fixed
        # seconds of a step.
        embedding = width * shape.embedding_parameters
        further_copies = recipe.serving.attention_copies - 1
        dense_bytes = memory.dense_served_bytes(recipe, shape)
        dense_bytes += further_copies * memory.attention_bytes(recipe, shape)
        self.read = (dense_bytes + embedding) / self.ranks
        expert = memory.map_width(recipe) * shape.moe_layers * shape.expert_parameters
        self.read_expert = expert / self.ranks
        # Each step reads and writes the state of each running request.
        self.moved_state = 2 * memory.slot_bytes(recipe, shape)
        layers_flop = layer_flop(shape) * _quickened(recipe, gpu)
        self.flop = (layers_flop + head_flop(shape)) / self.ranks
        # An all-reduce goes up and down a tree of nodes: [Ring]
        nodes = max(1.0, self.ranks / gpu.nvlink_gpus)
        allreduce = 0.0
        if self.ranks > 1:
            tree = 2 * math.log2(nodes) * ASSUMED.hop_latency_s
            allreduce = 2 * (ASSUMED.allreduce_latency_s + tree)
        dense = shape.layers - shape.moe_layers
        routed = shape.moe_layers
        launches = dense * ASSUMED.decode_layer_s + routed * gpu.decode_expert_layer_s
        overhead = shape.layers * allreduce + ASSUMED.decode_overhead_s
        self.fixed_seconds = launches + overhead
        # CPU seconds for a chunk of prompts; bytes exchanged per token: [AR] 4.2.2
        dense_host = dense * ASSUMED.layer_s / LAYER_PASSES
        self.host_seconds = dense_host + routed * ASSUMED.prefill_expert_layer_s
        rows = 2 * shape.layers * 2 * HALF * shape.hidden
        self.exchanged = rows * (self.ranks - 1) / self.ranks
        self.memory_rate = gpu.memory_rate * gpu.serving
        self.flop_rate = gpu.bf16 * ASSUMED.decode_efficiency
        # A ring over several nodes uses all network adapters of each, as for gradients
        # (`_update_seconds`).
        rate = gpu.nvlink
        if nodes > 1:
            rate = min(gpu.network * gpu.nvlink_gpus, gpu.nvlink)
        self.link_rate = rate * ASSUMED.network_efficiency

    def step_seconds(self, running: float, context_tokens: float) -> float:
        """Return seconds to decode one token for each of `running` requests that hold
        `context_tokens` in total.
        """
        shape = self.shape
        positions = context_tokens  # positions: tokens whose k and v are read, averaged over layers
        if shape.local_positions is not None:
            local = min(context_tokens, running * shape.local_positions)
            local_share = shape.local_layers / shape.attention_layers
            positions -= local_share * (context_tokens - local)
        moved = self.read + positions * self.kv_token + running * self.moved_state
        if shape.experts:
            # Only the experts that any request uses are read; each request chooses
            # uniformly.
            chosen_share = shape.experts_per_token / shape.experts
            unused = (1 - chosen_share) ** running
            moved += shape.experts * (1 - unused) * self.read_expert
        context = context_tokens / max(running, 1)
        attention = attention_flop(shape, context) / self.ranks
        reading = moved / self.memory_rate
        products = running * (self.flop + attention) / self.flop_rate
        exchange = running * self.exchanged / self.link_rate
        # Memory or products, whichever is slower: [Roof]
        return max(reading, products) + exchange + self.fixed_seconds

    def prefill_seconds(self, tokens: float, prompts: float = 1.0) -> float:
        """Return seconds to read prompts of `tokens` tokens each, PREFILL_CHUNK at a
        time, while nothing is decoded.
        """
        attention = attention_flop(self.shape, tokens / 2) / self.ranks
        products = (self.flop + attention) / self.flop_rate
        exchange = self.exchanged / self.link_rate
        chunks = max(1.0, tokens * prompts / PREFILL_CHUNK)
        device = tokens * prompts * (products + exchange)
        return max(device, chunks * self.host_seconds)

    def batch_seconds(
        self, lengths: np.ndarray, prompt: float, requests: float, limit: float
    ) -> float:
        """Return seconds until the last of `requests` ends. Completions are like
        `lengths`; at most `limit` run at once. While requests wait, `limit` run, and a
        prompt is read alone when another request ends; then ever fewer run until the
        longest ends. prompt: tokens of each prompt.
        """
        last = min(requests, limit)
        mean = float(lengths.mean())
        mean_square = float((lengths**2).mean())
        # As in Workload.live_context.
        context = prompt + mean_square / (2 * mean)
        decoding = mean * self.step_seconds(last, last * context) / last
        request_seconds = decoding + self.prefill_seconds(prompt)
        waiting = (requests - last) * request_seconds
        shares = np.arange(1, TAIL_PARTS + 1) / TAIL_PARTS
        ends = np.quantile(lengths, shares)
        starts = np.concatenate([[0.0], ends[:-1]])
        tail = 0.0
        for part, (start, end) in enumerate(zip(starts, ends, strict=True)):
            running = max(1.0, last * (1 - part / TAIL_PARTS))
            sampled = (start + end) / 2
            context_tokens = running * (prompt + sampled)
            tail += (end - start) * self.step_seconds(running, context_tokens)
        return self.prefill_seconds(prompt, last) + waiting + tail


def _quickened(recipe: Recipe, gpu: Gpu) -> float:
    """Return the time of a product on a server as a share of that in bf16. FP8 products
    of servers were not measured: they are taken to reach the share of their peak that
    those of training reach.
    """
    if recipe.serving.quantization == "none":
        return 1.0
    fp8_rate = gpu.fp8 * gpu.fp8_training
    return gpu.bf16 * gpu.training / fp8_rate


class Publication(NamedTuple):
    """Seconds for which the learner waits: weights are sent (transfer), swapped in by
    servers that generated, then parity.
    """

    transfer: float
    swap: float
    parity: float

    @property
    def pause(self) -> float:
        """Seconds in which servers generate nothing: the swap, or all if they do not
        generate as they receive.
        """
        return self.swap or self.transfer


def publication(recipe: Recipe, shape: Architecture, gpu: Gpu, devices: int) -> Publication:
    """Return the cost of sending the whole model to all servers, in buckets. Each
    source of `process_group` is taken to use another network adapter of a server, as
    long as there are some. A rank of a server copies its part to the host's memory as
    it arrives, and reads it there for the checksums and for the swap.
    """
    resources = recipe.resources
    servers = resources.servers
    ranks = resources.server_tensor_parallel
    stages = recipe.model.pipeline_parallel
    size = memory.served_bytes(recipe, shape)
    bucket = recipe.weights.bucket_mb * 2**20
    full_buckets = -(-int(size) // bucket)
    buckets = max(stages, full_buckets)
    sources = 1
    part = 0.0
    if recipe.stages_weights:
        shards = recipe.model.tensor_parallel * stages
        copies = resources.learner_ranks // shards
        senders = stages * sending_copies(copies, stages, ranks)
        sources = min(ranks, senders)
        host_rate = gpu.host * ASSUMED.network_efficiency
        part = memory.server_rank_bytes(recipe, shape) / host_rate
    rate = gpu.nvlink
    if devices > gpu.nvlink_gpus:
        rate = min(sources * gpu.network, gpu.nvlink)
    rate *= ASSUMED.network_efficiency
    arriving = max(size / rate, part)
    # A pipelined ring: bytes cross each link once, and the last rank is as many hops
    # away as there are receivers: [Ring]
    hops = buckets * servers * ranks * ASSUMED.hop_latency_s
    calls = CONTROL_CALLS * in_a_row(servers) * ASSUMED.call_seconds
    transfer = arriving + hops + part + calls + ASSUMED.control_seconds
    if not recipe.generates_meanwhile:
        return Publication(transfer + part, swap=0.0, parity=ASSUMED.parity_seconds)
    return Publication(transfer, swap=part, parity=ASSUMED.parity_seconds)


def layer_flop(shape: Architecture) -> float:
    """Return forward FLOP per token: 2 per parameter that multiplies it, without
    embedding and head [PaLM]; and those of the delta rule, which do not grow with
    positions.
    """
    rule = shape.delta.rule_flops if shape.delta else 0
    return 2 * shape.body_parameters + len(shape.delta_layers) * rule


def attention_flop(shape: Architecture, positions: float) -> float:
    """Return forward FLOP of attention for a token that attends to `positions`: scores
    and sum of values. [PaLM], causal.
    """
    local = shape.local_layers * min(positions, shape.local_positions or positions)
    all_positions = (shape.attention_layers - shape.local_layers) * positions
    return 2 * (shape.query + shape.attended) * (local + all_positions)


def head_flop(shape: Architecture) -> float:
    """Return forward FLOP per token, at bf16's rate: on servers and learner, FP32
    logits are sums of bf16 products. [PaLM]
    """
    return 2 * shape.embedding_parameters


def optimizer_bytes(parameters: float) -> float:
    """Return the bytes that AdamW reads and writes: the gradient, three values read and
    written, and the weight.
    """
    return (FP32 + 6 * FP32 + HALF) * parameters
