"""Bytes on a learner rank and on a server's GPU.

[AR]   Korthikanti et al., Reducing Activation Recomputation in Large Transformer
       Models, arXiv 2205.05198
[ZeRO] Rajbhandari et al., ZeRO, arXiv 1910.02054; bytes per parameter as in
       Megatron-Core's guide to its distributed optimizer
[PP]   Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
       arXiv 2104.04473
[Inf]  Pope et al., Efficiently Scaling Transformer Inference, arXiv 2211.05102

Activations are those of fused kernels: flash attention, no dropout, gated MLPs, RMS
norms, bf16. In a pipeline the first stage has the embedding and the most activations in
flight, and the last stage has the head and one micro-batch in flight; the larger of the
two counts.
"""

import math
from dataclasses import dataclass

from megarl.core.base import architecture
from megarl.core.base.architecture import Architecture
from megarl.core.base.delta_layers import CHUNK
from megarl.core.client.servable import state_slots
from megarl.core.recipe import Recipe
from megarl.core.recipe.model import FP8_BLOCK
from megarl.predict.planning.hardware import ASSUMED
from megarl.run import devices
from megarl.run.devices import HostBytes

HALF = 2
FP32 = 4
FP8 = 1
INT32 = 4
WIDTH = {"bf16": HALF, "fp16": HALF, "fp32": FP32}  # bytes of a number, by `model.dtype`

SCORED_AT_ONCE = 2048
"""Tokens whose logits SGLang computes together when parity asks for log-probs of a
prompt (SGLANG_LOGPROB_CHUNK_SIZE).
"""


def host_bytes(recipe: Recipe) -> HostBytes:
    """Return the host memory that a learner rank and a server on GPUs like this
    machine's use. It is a check's fact (checks/table.py).
    """
    shape = architecture.read(recipe.model.path)
    of_rank = learner(recipe, shape, microbatch_tokens=1, microbatches=1)
    of_gpu = server(recipe, shape, devices.memory())
    return HostBytes(of_rank.host, of_gpu.host * recipe.resources.server_tensor_parallel)


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on the rank that holds most. state: weights, gradients, optimiser, also of
    a critic, and the weights of a reference model. publication: buckets that are sent
    between steps, when there are no activations. host: bytes in the host's memory, not
    counted in `total`.
    """

    state: float
    activations: float
    head: float
    publication: float
    host: float

    @property
    def total(self) -> float:
        """Bytes on the GPU at the moment when there are most."""
        in_a_pass = self.activations + self.head
        return self.state + max(in_a_pass, self.publication)


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on each GPU of a server. states: slots for states of delta networks. kv:
    the static part without weights and states. transient: peak use outside the static
    part. In the host's memory: new weights that wait for their swap (staged), and for
    each token of KV the experts that were chosen.
    """

    weights: float
    states: float
    kv: float
    kv_token: float
    transient: float
    staged: float
    routed_token: float

    @property
    def kv_tokens(self) -> int:
        """Tokens whose k and v fit."""
        return max(0, int(self.kv / self.kv_token))

    @property
    def host(self) -> float:
        """Bytes in the host's memory."""
        return self.staged + self.routed_token * self.kv_tokens


def learner(
    recipe: Recipe, shape: Architecture, microbatch_tokens: float, microbatches: int
) -> LearnerMemory:
    """Return the memory of the layout. microbatch_tokens: in the largest packed
    micro-batch, over context-parallel ranks.
    """
    model = recipe.model
    width = WIDTH[model.dtype]
    one_stage = model.pipeline_parallel == 1
    tokens = microbatch_tokens / model.context_parallel
    kept_layers, recomputed_layer = activation_bytes(recipe, shape, recipe.learner.recompute)
    layers = kept_layers * tokens
    recomputed = recomputed_layer * tokens
    head = head_bytes(tokens, shape, width)
    ends = shape.embedding_parameters / model.tensor_parallel
    if one_stage:
        ends += shape.head_parameters / model.tensor_parallel
    bucket = recipe.weights.bucket_mb * 2**20
    publication = bucket + 2 * largest_bucket(recipe, shape)
    state = _state(recipe, shape, ends)
    if recipe.has_critic:
        state += critic_state(recipe, shape)
    if recipe.reference.coefficient:
        parameters = sum(_parameters(recipe, shape)) + ends
        state += width * parameters
    host = _host(recipe, shape, ends)
    host += batch_bytes(recipe, shape, microbatch_tokens, microbatches)
    microbatches_held = in_flight(
        model.pipeline_parallel, model.virtual_pipeline_parallel, microbatches
    )
    first_activations = layers * microbatches_held + recomputed
    first_head = head if one_stage else 0.0
    first_stage = LearnerMemory(state, first_activations, first_head, publication, host)
    last_stage = LearnerMemory(state, layers + recomputed, head, publication, host)
    return max(first_stage, last_stage, key=lambda memory: memory.total)


def critic_state(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of weights, gradients and optimiser on a rank, for a critic of the
    policy's size in its own precision.
    """
    learner = recipe.learner.model_copy(update={"optimizer_offload": 0.0})
    critic = recipe.model_copy(update={"model": recipe.critic_model, "learner": learner})
    embedding = shape.embedding_parameters / recipe.model.tensor_parallel
    return _state(critic, shape, ends=embedding)


def _parameters(recipe: Recipe, shape: Architecture) -> tuple[float, float]:
    """Return the numbers of dense parameters and of experts' parameters on a rank,
    without embedding and head.
    """
    tensor = recipe.model.tensor_parallel
    experts = recipe.model.expert_parallel * recipe.model.expert_tensor_parallel
    share = stage_share(recipe, shape)
    dense = shape.dense_parameters * share / tensor
    routed = shape.routed_parameters * share / experts
    return dense, routed


def stage_share(recipe: Recipe, shape: Architecture) -> float:
    """Return the share of the model's layers that a pipeline stage has. The last one
    may have fewer.
    """
    layers = recipe.model.stage_layers(shape.layers)[0]
    return layers / shape.layers


def layer_parameters(recipe: Recipe, shape: Architecture) -> float:
    """Return the number of parameters in all layers on one of the ranks that share each
    layer, as if there were one stage.
    """
    return sum(_parameters(recipe, shape)) / stage_share(recipe, shape)


def _state(recipe: Recipe, shape: Architecture, ends: float) -> float:
    """Return bytes of weights, gradients and optimiser on a rank that holds `ends`
    parameters of embedding and head.
    """
    model = recipe.model
    width = WIDTH[model.dtype]
    on_gpu = 1 - recipe.learner.optimizer_offload
    dense, routed = _parameters(recipe, shape)
    # In each pipeline stage, ranks that have different parameters, and copies of them.
    stage_ranks = recipe.resources.learner_ranks // model.pipeline_parallel
    copies = stage_ranks // model.tensor_parallel
    expert_ranks = model.expert_parallel * model.expert_tensor_parallel
    expert_copies = stage_ranks // expert_ranks
    # FP8 matrix units read both factors row by row, so each weight is also kept
    # transposed (Transformer Engine's guide).
    fp8_weights = 0.0
    if model.fp8 != "none":
        fp8_weights = 2 * FP8 * (dense + routed)
    dense_state = state_bytes(dense + ends, width, copies, on_gpu)
    routed_state = state_bytes(routed, width, expert_copies, on_gpu)
    return fp8_weights + dense_state + routed_state


def _host(recipe: Recipe, shape: Architecture, ends: float) -> float:
    """Return a rank's bytes in the host's memory: the copy from which a checkpoint is
    written while training goes on, and the offloaded part of AdamW with its gradients.
    For a checkpoint each rank gathers AdamW's state of its whole stage, and copies the
    part that it writes: at most its weights, and its share of AdamW's state.
    """
    model = recipe.model.model_copy(update={"fp8": "none"})
    learner = recipe.learner.model_copy(update={"optimizer_offload": 0.0})
    plain = recipe.model_copy(update={"learner": learner, "model": model})
    parameters = sum(_parameters(recipe, shape)) + ends
    copied = _state(plain, shape, ends) - parameters * FP32  # without gradients
    optimizer = copied - parameters * WIDTH[model.dtype]
    offloaded = recipe.learner.optimizer_offload * optimizer * 4 / 3
    return 3 * FP32 * parameters + copied + offloaded


def batch_bytes(
    recipe: Recipe, shape: Architecture, microbatch_tokens: float, microbatches: int
) -> float:
    """Return a step's bytes in a rank's host memory, if its rollouts carry their
    experts; otherwise they are few. Each rank holds the ids and log-probs of all ranks'
    tokens as received and as decoded. Of experts it holds those of its own tokens in
    its own layers (learner/shares.py), and those of a micro-batch in two bytes each.
    """
    model = recipe.model
    if not model.moe.routing_replay:
        return 0.0
    tokens = microbatch_tokens * microbatches
    of_all_ranks = 2 * recipe.data_parallel * tokens * (INT32 + FP32)
    layers = shape.moe_layers * stage_share(recipe, shape)
    own_choices = layers * shape.experts_per_token / model.context_parallel
    width = 1 if shape.experts <= 256 else 2
    return of_all_ranks + own_choices * (tokens * width + microbatch_tokens * 2)


def activation_bytes(recipe: Recipe, shape: Architecture, recompute: str) -> tuple[float, float]:
    """Return bytes per token on a rank: kept by a stage's layers until the backward
    pass, and in the layer being recomputed.
    """
    model = recipe.model
    width = WIDTH[model.dtype]
    tensor = model.tensor_parallel
    input_width = width if model.fp8 == "none" else FP8
    norms = replicated_activation_bytes(shape, width, input_width) / tensor
    attention = norms + attention_activation_bytes(shape, width, input_width) / tensor
    rule = delta_rule_activation_bytes(shape, width) / tensor
    delta = norms + delta_activation_bytes(shape, width, input_width) / tensor
    dense = mlp_activation_bytes(shape.feed_forward, width, input_width) / tensor
    routed = routed_activation_bytes(shape, model.expert_tensor_parallel, width, input_width)
    shared = mlp_activation_bytes(shape.shared_feed_forward, width, input_width) / tensor
    sparse = shared + routed / tensor
    layers = shape.layers
    moe = shape.moe_layers
    share = stage_share(recipe, shape)
    all_attention = shape.attention_layers * attention
    all_delta = len(shape.delta_layers) * (delta + rule)
    all_dense = (layers - moe) * dense
    if recompute == "none":
        layer_bytes = all_attention + all_delta + all_dense + moe * sparse
        return layer_bytes * share, 0.0
    if recompute == "light":
        light = light_activation_bytes(shape, input_width) / tensor
        layer_bytes = all_attention + all_delta + all_dense + moe * (sparse - light)
        return layer_bytes * share, light
    largest = 0.0
    if moe < layers:
        largest = dense
    if moe:
        largest = max(largest, sparse)
    if recompute == "selective":
        mixers = all_attention + len(shape.delta_layers) * delta
        return mixers * share, max(largest, rule)
    # Each layer's input, divided like the norms': [AR] section 5
    inputs = layers * shape.hidden * width / tensor
    mixer = max(attention, delta + rule) if shape.delta else attention
    return inputs * share, mixer + largest


def server(recipe: Recipe, shape: Architecture, gpu_memory: float) -> ServerMemory:
    """Return the memory of a server with resources.server_tensor_parallel GPUs of this
    size. If the model has experts, each rank of SGLang keeps those of every layer as
    int32, in pinned memory: [tokens of KV, layers, chosen] (BaseHostCache in its
    state_capturer/base.py). A token's k and v are in one copy of the attention only;
    kv_token is the mean over the server's GPUs.
    """
    ranks = recipe.resources.server_tensor_parallel
    running = recipe.serving.max_running_requests
    copies = recipe.serving.attention_copies
    weights = server_rank_bytes(recipe, shape)
    rows_of_logits = max(running / ranks, SCORED_AT_ONCE)
    logits = FP32 * rows_of_logits * shape.vocabulary
    landings = 2 if recipe.stages_weights else 1
    kv_token = kv_bytes(shape, ranks // copies, kv_width(recipe)) / copies
    share = recipe.serving.memory_fraction or ASSUMED.static_share
    most_kv = (recipe.serving.kv_tokens or math.inf) * kv_token
    states = slot_bytes(recipe, shape) * state_slots(recipe, cuda=True)
    room = share * gpu_memory - weights - states
    return ServerMemory(
        weights=weights,
        states=states,
        kv=max(0.0, min(room, most_kv)),
        kv_token=kv_token,
        transient=logits + landings * largest_bucket(recipe, shape),
        staged=weights if recipe.stages_weights else 0.0,
        routed_token=INT32 * shape.layers * shape.experts_per_token / copies,
    )


def slot_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Return the bytes of one state of all delta networks on each GPU of a server,
    which divides their heads; 0 without delta networks.
    """
    ranks = recipe.resources.server_tensor_parallel
    return shape.state_bytes(WIDTH[recipe.model.dtype]) / ranks


def kv_width(recipe: Recipe) -> int:
    """Return the bytes of a number in the servers' KV cache."""
    if recipe.serving.kv_cache_dtype == "auto":
        return WIDTH[recipe.model.dtype]
    return FP8


def map_width(recipe: Recipe) -> float:
    """Return the bytes of a weight in the servers' linear maps, with its share of a
    block's scale (sync/block_fp8.py).
    """
    if recipe.serving.quantization == "none":
        return WIDTH[recipe.model.dtype]
    return FP8 + FP32 / FP8_BLOCK**2


def dense_served_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of what servers hold, without routed experts, embedding and head.
    Routers, norms and biases are not quantised.
    """
    routers = shape.moe_layers * shape.experts * shape.hidden
    exact = shape.vector_parameters + routers
    maps = shape.dense_parameters - exact
    return exact * WIDTH[recipe.model.dtype] + maps * map_width(recipe)


def served_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of the model as servers hold it, and as it is published."""
    ends = shape.embedding_parameters + shape.head_parameters
    end_bytes = ends * WIDTH[recipe.model.dtype]
    routed_bytes = shape.routed_parameters * map_width(recipe)
    return dense_served_bytes(recipe, shape) + routed_bytes + end_bytes


def server_rank_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of the model on each GPU of a server. Each copy of the attention
    (serving.attention_copies) has all of it and of the embedding, divided among the
    copy's GPUs.
    """
    further_copies = recipe.serving.attention_copies - 1
    embedding = shape.embedding_parameters * WIDTH[recipe.model.dtype]
    repeated = further_copies * (attention_bytes(recipe, shape) + embedding)
    return (served_bytes(recipe, shape) + repeated) / recipe.resources.server_tensor_parallel


def attention_bytes(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of the attention's matrices in all layers as servers hold them."""
    return shape.layers * shape.attention_parameters * map_width(recipe)


def largest_bucket(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of the largest publication bucket. A tensor is not divided, and the
    embedding is the largest. A learner's rank holds the embedding twice, gathered and
    as a bucket, while the previous bucket is being sent.
    """
    embedding = shape.vocabulary * shape.hidden * WIDTH[recipe.model.dtype]
    return max(recipe.weights.bucket_mb * 2.0**20, embedding)


def state_bytes(parameters: float, width: int, shards: int, on_gpu: float = 1.0) -> float:
    """Return bytes of weights, gradients and AdamW on a rank, with the optimiser
    divided among `shards` ranks. [ZeRO], stage 1. Half: 2 weight + 4 FP32 gradient + (4
    main weight + 4 + 4 moments) / tensor. fp32: 4 + 4 + 8 / tensor. on_gpu: the share
    of the optimiser's state that is not in the host's memory.
    """
    optimizer_numbers = 3 if width == HALF else 2
    optimizer = optimizer_numbers * FP32 / shards * on_gpu
    return parameters * (width + FP32 + optimizer)


def replicated_activation_bytes(shape: Architecture, width: int, input_width: int) -> float:
    """Return bytes per token and layer that only sequence parallelism divides: input
    and output of both norms.

    [AR] section 4.2.1 counts 10 sbh outside tensor-parallel parts: 4 for the layer
    norms' inputs, 4 for the inputs of the parts after them (here the norms' outputs),
    and 2 for dropout masks, of which there are none. width: bytes of an activation;
    input_width: bytes of a value in the input that a linear layer keeps, 1 if it
    multiplies in FP8.
    """
    return 2 * shape.hidden * (width + input_width)


def attention_activation_bytes(shape: Architecture, width: int, input_width: int) -> float:
    """Return bytes per token and layer that TP divides: q, k, v, the output, and the
    softmax's normaliser (FP32). [AR] equation 1 without 5as/h: flash attention (arXiv
    2205.14135) recomputes the scores. The linear layer after it keeps the same output,
    unless it keeps that in FP8.
    """
    numbers = shape.query + shape.key + shape.value + shape.attended
    latent = shape.latent
    if latent:  # v and the output are padded to the width of q (models/layers.py)
        padding = 2 * (shape.query - shape.attended)
        numbers += (latent.query or 0) + latent.shared + padding
    output_in_fp8 = 0
    if input_width != width:
        output_in_fp8 = shape.attended * input_width
    return numbers * width + output_in_fp8 + FP32 * shape.heads


def delta_activation_bytes(shape: Architecture, width: int, input_width: int) -> float:
    """Return bytes per token and layer that TP divides, kept by a delta network's
    projections: what they give, and the input of the one after the rule.
    """
    delta = shape.delta
    if delta is None:
        return 0.0
    projected = delta.convolved + delta.value + 2 * delta.value_heads
    return projected * width + delta.value * input_width


def delta_rule_activation_bytes(shape: Architecture, width: int) -> float:
    """Return bytes per token and layer that TP divides, kept between a delta network's
    projections: q, k and v after the convolution, the rule's output, and a state in
    FP32 for each chunk (arXiv 2412.06464, section 3.3).
    """
    delta = shape.delta
    if delta is None:
        return 0.0
    states = FP32 * delta.value_heads * delta.key_dim * delta.value_dim / CHUNK
    return (delta.convolved + delta.value) * width + states


def mlp_activation_bytes(feed_forward: int, width: int, input_width: int) -> float:
    """Return bytes per token of a gated MLP, which TP divides: gate and up, and their
    product. [AR] 4.1, for SwiGLU.
    """
    return feed_forward * (2 * width + input_width)


def routed_activation_bytes(
    shape: Architecture, expert_tensor_parallel: int, width: int, input_width: int
) -> float:
    """Return bytes per token of one layer's chosen experts together, if tokens are
    spread evenly over the experts. Each choice is a separate row: gathered input and
    output [hidden], and those of the gated MLP. Router logits are in FP32.
    """
    rows = shape.hidden * (width + input_width) * expert_tensor_parallel
    inner = mlp_activation_bytes(shape.expert_feed_forward, width, input_width)
    router_logits = FP32 * shape.experts
    return shape.experts_per_token * (rows + inner) + router_logits


def light_activation_bytes(shape: Architecture, input_width: int) -> float:
    """Return bytes per token of a layer with experts that `learner.recompute: light`
    does not keep: the output of the norm before the experts, and of each chosen expert
    the product of gate and up. Norms that Transformer Engine computes within the next
    linear layer, attention's and a dense MLP's, are kept. input_width: as in
    replicated_activation_bytes.
    """
    norm = shape.hidden * input_width
    activated = shape.experts_per_token * shape.expert_feed_forward * input_width
    return norm + activated


def in_flight(pipeline_parallel: int, virtual: int, microbatches: int) -> float:
    """Return the most micro-batches for which the first stage holds its layers'
    activations. [AR] 4.2.3, [PP] 2.2. 1F1B: as many as there are stages; interleaved:
    (1 + (p - 1) / (p v)) times as many.
    """
    if virtual == 1:
        return min(pipeline_parallel, microbatches)
    extra = (pipeline_parallel - 1) / (pipeline_parallel * virtual)
    return pipeline_parallel * (1 + extra)


HEAD_CHUNK = 4096 * 8192
"""Logits that the learner's head holds at a time (megarl/core/models/head/)."""


def head_bytes(tokens: float, shape: Architecture, width: int) -> float:
    """Return peak bytes of the head for this many trained tokens in a micro-batch
    (megarl/core/models/head/). A chunk of FP32 logits and its gradient; the gradient of
    the tokens' hidden states, as summed (FP32) and as passed on (`width` bytes per
    number, as in the model).
    """
    return (FP32 + width) * (HEAD_CHUNK + tokens * shape.hidden)


def kv_bytes(shape: Architecture, tensor_parallel: int, width: int) -> float:
    """Return KV bytes per token on each GPU of a server [Inf]. With more GPUs than KV
    groups, GPUs hold copies. Delta networks keep nothing per token.
    """
    if shape.latent:  # one vector for all heads, which every GPU holds
        return shape.layers * shape.cached * width
    groups = max(shape.groups / tensor_parallel, 1)
    return 2 * shape.attention_layers * groups * shape.head_dim * width
