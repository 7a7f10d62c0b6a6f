"""Bytes on a learner rank and on a server's GPU. formulas.py has the formulas; this module says what is where.

In a pipeline the first stage has the most activations in flight and the embedding, the last has one micro-batch in flight and
the head: the larger of the two counts.
"""

from dataclasses import dataclass

from megarl.core.base.architecture import Architecture
from megarl.core.recipe import Recipe
from megarl.lab.planning import formulas
from megarl.lab.planning.formulas import FP8, FP32, WIDTH
from megarl.lab.planning.hardware import Assumed, Gpu


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on the rank that holds most. state: weights, gradients, optimiser. publication: buckets being sent."""

    state: float
    activations: float
    head: float
    publication: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.head + self.publication


@dataclass(frozen=True)
class ServerMemory:
    """Bytes on each GPU of a server. kv: what weights leave of the static part. transient: outside of it, at the peak."""

    weights: float
    kv: float
    kv_token: float
    transient: float

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit."""
        return max(0, int(self.kv / self.kv_token))


def colocated(recipe: Recipe, learner: LearnerMemory, server: ServerMemory) -> float:
    """Return bytes on a GPU that both share. With serving.release_memory, KV and what a step needs take turns."""
    always, step = learner.state + server.weights + server.transient, learner.total - learner.state
    return always + (max(step, server.kv) if recipe.serving.release_memory else step + server.kv)


def learner(recipe: Recipe, shape: Architecture, microbatch_tokens: float, microbatches: int) -> LearnerMemory:
    """Return the memory of the recipe's layout. microbatch_tokens: the largest packed micro-batch's, over all of CP."""
    model, last = recipe.model, recipe.model.pipeline_parallel == 1
    width = WIDTH[model.dtype]
    tokens = microbatch_tokens / model.context_parallel
    held = formulas.in_flight(model.pipeline_parallel, model.virtual_pipeline_parallel, microbatches)
    layers = _stage_activations(recipe, shape, width) * tokens
    again = _recomputed_activations(recipe, shape, width) * tokens
    head = formulas.head_bytes(tokens, shape.vocabulary, shape.hidden, model.tensor_parallel, width)
    ends = shape.embedding_parameters / model.tensor_parallel
    publication = 2.0 * recipe.weights.bucket_mb * 2**20
    if last:
        state = _state(recipe, shape, ends + shape.head_parameters / model.tensor_parallel)
        return LearnerMemory(state, layers * held + again, head, publication)
    state = _state(recipe, shape, ends)
    first = LearnerMemory(state, layers * held + again, 0.0, publication)
    return max(first, LearnerMemory(state, layers + again, head, publication), key=lambda m: m.total)


def critic_state(recipe: Recipe, shape: Architecture) -> float:
    """Return bytes of weights, gradients and optimiser on a rank, for a critic of the policy's model in its own precision."""
    changed = {"model": recipe.critic_model, "learner": recipe.learner.model_copy(update={"optimizer_offload": 0.0})}
    return _state(recipe.model_copy(update=changed), shape, shape.embedding_parameters / recipe.model.tensor_parallel)


def _state(recipe: Recipe, shape: Architecture, ends: float) -> float:
    """Return bytes of weights, gradients and optimiser of a stage whose rank holds `ends` parameters of embedding and head."""
    model, ranks = recipe.model, recipe.resources.learner_ranks
    dense = shape.dense_parameters / (model.tensor_parallel * model.pipeline_parallel) + ends
    experts = model.expert_parallel * model.expert_tensor_parallel * model.pipeline_parallel
    width, kept = WIDTH[model.dtype], 1 - recipe.learner.optimizer_offload
    routed = shape.routed_parameters / experts
    copies = ranks // (model.tensor_parallel * model.pipeline_parallel)
    # FP8's matrix units read both factors row by row: each weight is kept plain and transposed (Transformer Engine's guide).
    fp8 = 2 * FP8 * (dense - ends + routed) if model.fp8 != "none" else 0.0
    states = (
        formulas.state_bytes(dense, width, copies, kept),
        formulas.state_bytes(routed, width, ranks // experts, kept),
    )
    return fp8 + sum(states)


def _stage_activations(recipe: Recipe, shape: Architecture, width: int) -> float:
    """Return the bytes that each token keeps on a rank for the layers of one stage, until its backward pass."""
    model = recipe.model
    if recipe.learner.recompute == "full":  # each layer's input, divided as the norms are: [AR] section 5
        shards = model.tensor_parallel if model.sequence_parallel else 1
        return shape.layers * shape.hidden * width / shards / model.pipeline_parallel
    attention, dense, sparse = _layer_activations(recipe, shape, width)
    if recipe.learner.recompute == "selective":
        dense = sparse = 0.0
    whole = shape.layers * attention + (shape.layers - shape.moe_layers) * dense + shape.moe_layers * sparse
    return whole / model.pipeline_parallel


def _recomputed_activations(recipe: Recipe, shape: Architecture, width: int) -> float:
    """Return the bytes that each token takes in the one layer that is being computed again."""
    if recipe.learner.recompute == "none":
        return 0.0
    attention, dense, sparse = _layer_activations(recipe, shape, width)
    largest = max(dense if shape.moe_layers < shape.layers else 0.0, sparse if shape.moe_layers else 0.0)
    return largest + (attention if recipe.learner.recompute == "full" else 0.0)


def _layer_activations(recipe: Recipe, shape: Architecture, width: int) -> tuple[float, float, float]:
    """Return bytes per token of one layer on one rank: norms and attention, a dense MLP, experts."""
    model = recipe.model
    shards = model.tensor_parallel if model.sequence_parallel else 1
    kept = width if model.fp8 == "none" else FP8
    attention = formulas.replicated_activation_bytes(shape, width, kept) / shards
    attention += formulas.attention_activation_bytes(shape, width, kept) / model.tensor_parallel
    dense = formulas.mlp_activation_bytes(shape.feed_forward, width, kept) / model.tensor_parallel
    shared = formulas.mlp_activation_bytes(shape.shared_feed_forward, width, kept) / model.tensor_parallel
    routed = formulas.routed_activation_bytes(shape, model.expert_tensor_parallel, width, kept) / shards
    return attention, dense, shared + routed


def server(recipe: Recipe, shape: Architecture, gpu: Gpu, assumed: Assumed) -> ServerMemory:
    """Return the memory of a server with resources.server_tensor_parallel GPUs."""
    ranks, running = recipe.resources.server_tensor_parallel, recipe.serving.max_running_requests
    width = WIDTH[recipe.model.dtype]
    weights = shape.parameters * width / ranks
    logits = FP32 * running * shape.vocabulary / ranks
    return ServerMemory(
        weights=weights,
        kv=max(0.0, (recipe.serving.memory_fraction or assumed.static_share) * gpu.memory - weights),
        kv_token=formulas.kv_bytes(shape, ranks, width),
        transient=logits + recipe.weights.bucket_mb * 2**20,
    )
