"""Memory against published footprints, and against what the parts must add up to."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megarl.core.base import architecture
from megarl.core.models import head
from megarl.core.recipe import Recipe, load
from megarl.predict.planning import memory
from megarl.predict.planning.hardware import GB, gpu_named
from megarl.shims import sglang_cpu

EIGHT = architecture.read("llama-3.1-8b")
SCOUT = architecture.read("llama-4-scout")


LAYOUTS = {
    "scalerl-8b": {"model__tensor_parallel": 4, "resources__server_tensor_parallel": 1},
    "scalerl-17bx16": {"model__expert_parallel": 8},
}
"""What differs from the shipped layouts, on 16 ranks: the formulas are worked out for
these.
"""


def recipe(name: str = "scalerl-8b", **keys: Any) -> Recipe:
    """Return the recipe on 16 ranks (TP 4; Scout: TP 4, PP 2, EP 8) with these keys
    changed.
    """
    all_keys = {"resources__learner_ranks": 16} | LAYOUTS[name] | keys
    return load(name, [f"{k.replace('__', '.')}={v}" for k, v in all_keys.items()])


def test_mixed_precision_adam_is_16_bytes_a_parameter_and_one_more_for_fp32_gradients() -> None:
    """ZeRO's 16 bytes have bf16 gradients (2 + 2 + 12); megarl's are FP32 (2 + 4 + 12).
    Megatron's guide: 6 + 12 / d.
    """
    assert memory.state_bytes(1, memory.HALF, 1) == 18
    assert memory.state_bytes(1, memory.HALF, 8) == 6 + 12 / 8
    assert memory.state_bytes(1, memory.FP32, 1) == 16
    assert memory.state_bytes(1, memory.FP32, 4) == 8 + 8 / 4


def test_weights_of_servers_are_the_published_footprints() -> None:
    """Llama 3.1 8B: 16 GB of bf16. Scout: 218 GB with its vision tower; not on two of
    80 GB.
    """
    size = gpu_named("h100").memory
    assert memory.server(recipe(), EIGHT, size).weights == pytest.approx(16.06 * GB, rel=1e-3)
    on_four = memory.server(recipe("scalerl-17bx16"), SCOUT, size)
    assert on_four.weights == pytest.approx(218 * GB / 4, rel=0.02)
    on_two = memory.server(
        recipe("scalerl-17bx16", resources__server_tensor_parallel=2), SCOUT, size
    )
    assert on_two.kv_tokens == 0


def test_kv_of_llama_3_1_8b_is_128_kib_a_token() -> None:
    """2 x 32 layers x 8 groups x 128 x 2 bytes; 8 GPUs a server divide it, 16 hold
    copies.
    """
    assert memory.kv_bytes(EIGHT, 1, 2) == 128 * 1024
    assert memory.kv_bytes(EIGHT, 8, 2) == memory.kv_bytes(EIGHT, 16, 2) == 16 * 1024


@pytest.mark.parametrize(
    ("name", "parameters", "active", "state_mib", "token_kib", "state_tokens"),
    [
        ("qwen3.5-35b-a3b", 34.66e9, 2.44e9, 61.4, 20, 3144),
        ("qwen3.5-27b", 26.90e9, 24.35e9, 146.8, 64, 2349),
        ("qwen3.5-9b", 8.95e9, 6.92e9, 49.1, 32, 1572),
        ("qwen3-next-80b-a3b", 79.67e9, 3.25e9, 73.7, 24, 3144),
    ],
)
def test_delta_networks_keep_a_state_and_no_keys(
    name: str,
    parameters: float,
    active: float,
    state_mib: float,
    token_kib: int,
    state_tokens: int,
) -> None:
    """Worked out by hand from the sizes in config.json; only every fourth layer has
    keys and values.
    """
    shape = architecture.read(name)
    assert shape.parameters == pytest.approx(parameters, abs=0.005e9)
    assert shape.body_parameters == pytest.approx(active, abs=0.005e9)
    state = shape.state_bytes(memory.HALF)
    assert state / 2**20 == pytest.approx(state_mib, abs=0.05)
    assert memory.kv_bytes(shape, 1, memory.HALF) == token_kib * 2**10
    assert state / (token_kib * 2**10) == pytest.approx(state_tokens, abs=1)


def test_a_server_reserves_five_states_for_each_request() -> None:
    """Qwen3.5-35B-A3B: 79 GiB for 256 requests and 8 of parity, divided by the server's
    GPUs; KV gets what is left.
    """
    shape = architecture.read("qwen3.5-35b-a3b")
    size = gpu_named("h200").memory
    keys: dict[str, Any] = {"resources__server_tensor_parallel": 2}
    two = memory.server(recipe(**keys), shape, size)
    assert two.states == pytest.approx(5 * 264 * 61.4 * 2**20 / 2, rel=1e-3)
    few = memory.server(recipe(serving__max_running_requests=24, **keys), shape, size)
    assert few.states == pytest.approx(two.states * 32 / 264)
    assert few.states + few.kv == pytest.approx(two.states + two.kv)
    assert memory.server(recipe(), EIGHT, size).states == 0


def test_activations_of_a_gpt_are_those_of_the_paper() -> None:
    """arXiv 2205.05198, equation 1, for a GPT of h = 12288 and 4 h in its MLP, is 34
    sbh + 5 a s^2 b. Without dropout masks (1 + 2 of the 34; attention's own falls with
    the scores), with SwiGLU's three inner values where the GPT has two of 4 h (16 of
    the 34), and with both ends of a norm kept: what is left must agree.
    """
    h = 12288
    shape = replace(EIGHT, hidden=h, heads=96, groups=96, feed_forward=4 * h)
    ours = memory.replicated_activation_bytes(shape, 2, 2) + memory.attention_activation_bytes(
        shape, 2, 2
    )
    paper = (4 + 2 + 2) * h + (
        2 + 2 + 2 + 2
    ) * h  # norms' inputs and outputs; q, k, v and attention's output
    assert ours == paper + 4 * 96
    assert (
        memory.mlp_activation_bytes(4 * h, 2, 2) == 24 * h
    )  # gate, up, product; a GELU MLP keeps 8 h + 8 h


def test_fp8_halves_what_linear_maps_keep_and_adds_two_copies_of_the_layers() -> None:
    """A token's of a layer: two norms' inputs and q, k, v and what attention gives in
    bf16; inputs of the four maps in FP8.
    """
    bf16 = memory.learner(recipe(), EIGHT, 1000, 8)
    fp8 = memory.learner(recipe(model__fp8="blockwise"), EIGHT, 1000, 8)
    less = 2 * EIGHT.hidden + EIGHT.feed_forward - EIGHT.query  # attention's output is kept twice
    assert bf16.activations - fp8.activations == pytest.approx(32 * 1000 * less / 4)
    layers = EIGHT.parameters - 2 * EIGHT.embedding_parameters
    assert fp8.state - bf16.state == pytest.approx(2 * layers / 4, rel=1e-3)
    assert fp8.head == bf16.head


def test_parallelism_divides_what_it_should() -> None:
    tokens = 16384
    alone = memory.learner(recipe(model__tensor_parallel=1), EIGHT, tokens, 8)
    four = memory.learner(recipe(), EIGHT, tokens, 8)
    assert four.activations == pytest.approx(alone.activations / 4)
    assert (
        four.head == alone.head
    )  # each rank has a chunk of its own columns, and all hidden states
    context = memory.learner(recipe(model__context_parallel=4), EIGHT, tokens, 8)
    assert context.activations == pytest.approx(four.activations / 4)
    assert context.state == four.state  # 16 ranks share the optimiser in both


def test_the_first_stage_of_a_pipeline_has_as_much_in_flight_as_a_single_one() -> None:
    """arXiv 2205.05198, 4.2.3: p micro-batches of L / p layers."""
    assert memory.in_flight(4, 1, 100) / 4 == 1
    assert memory.in_flight(4, 1, 2) == 2  # no more than there are
    assert memory.in_flight(4, 2, 100) / 4 == 1 + 3 / 8


def test_the_head_holds_a_chunk_and_no_logits() -> None:
    """0.20 GB of chunk, 0.40 of gradients of hidden states;
    all logits would be 8.4 GB.
    """
    assert math.prod(head.CHUNK) == memory.HEAD_CHUNK
    assert memory.head_bytes(16384, EIGHT, 2) == pytest.approx(0.60 * GB, rel=0.01)


def test_experts_are_divided_by_expert_parallelism_and_their_optimiser_by_what_is_left() -> None:
    """Scout on 16 ranks, TP 4 x PP 2 x EP 8: every rank has 1/16 of the experts alone,
    and half of a quarter of the rest.
    """
    found = memory.learner(recipe("scalerl-17bx16"), SCOUT, 16384, 8).state
    experts = SCOUT.routed_parameters / 16 * (6 + 12)
    rest = (SCOUT.dense_parameters / 8 + SCOUT.embedding_parameters / 4) * (6 + 12 / 2)
    assert found == pytest.approx(experts + rest, rel=1e-6)


def test_a_critic_and_a_reference_model_are_counted() -> None:
    """A critic of 8B in FP32, TP 4 and 4 copies: 8 bytes and a quarter of 8 for each of
    a quarter of its parameters, which have no head. A reference model: two bytes for
    each of the policy's.
    """
    plain = memory.learner(recipe(), EIGHT, 1000, 8).state
    reference: dict[str, Any] = {"reference__coefficient": 0.1, "reference__estimator": "k3"}
    scored = memory.learner(recipe(**reference), EIGHT, 1000, 8).state
    assert scored - plain == pytest.approx(2 * EIGHT.parameters / 4, rel=1e-6)
    critic = {
        "batch__centring": "critic",
        "batch__zero_variance": "keep",
        "batch__positive_threshold": "null",
    }
    valued = memory.learner(recipe(**critic), EIGHT, 1000, 8).state
    without_head = EIGHT.parameters - EIGHT.head_parameters
    assert valued - plain == pytest.approx(10 * without_head / 4, rel=1e-6)


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer_at_a_time() -> None:
    """arXiv 2205.05198, section 5: 2 sbh a layer in bf16. Selective: no MLP, whose 3 x
    14336 are most of a layer.
    """
    alone: dict[str, Any] = {"model__tensor_parallel": 1}
    none, selective, full = (
        memory.learner(recipe(**alone, learner__recompute=what), EIGHT, 1000, 8).activations
        for what in ("none", "selective", "full")
    )
    layer = none / 32
    assert full == pytest.approx(1000 * 32 * 2 * 4096 + layer)
    mlp = 1000 * 3 * 14336 * 2
    assert selective == pytest.approx(none - 31 * mlp)


def test_light_recomputation_keeps_no_product_of_experts_and_no_norm_before_them() -> None:
    """Qwen3-30B-A3B in bf16: of 48 layers the norm's 2,048 numbers and 768 of each of 8
    experts; one layer's are made again.
    """
    shape = architecture.read("qwen3-30b-a3b")
    alone: dict[str, Any] = {"model__tensor_parallel": 1}
    none, light, selective = (
        memory.learner(recipe(**alone, learner__recompute=what), shape, 1000, 8).activations
        for what in ("none", "light", "selective")
    )
    dropped = 1000 * 2 * (2048 + 8 * 768)
    assert light == pytest.approx(none - 47 * dropped)
    assert selective < light


def test_a_pipeline_holds_what_it_keeps_of_all_its_micro_batches_and_computes_one_again() -> None:
    """TP 1, PP 4: the first stage has four micro-batches of a quarter of the layers,
    and one layer of one.
    """
    one: dict[str, Any] = {"model__tensor_parallel": 1, "learner__recompute": "full"}
    alone, four = (
        memory.learner(recipe(**one, model__pipeline_parallel=stages), EIGHT, 16384, 8).activations
        for stages in (1, 4)
    )
    assert four == alone


def test_an_offloaded_optimiser_takes_12_bytes_a_parameter_off_the_ranks_that_share_it() -> None:
    here, half, there = (
        memory.learner(recipe(learner__optimizer_offload=x), EIGHT, 1000, 8).state
        for x in (0.0, 0.5, 1.0)
    )
    assert here - there == pytest.approx(12 * EIGHT.parameters / 16, rel=1e-6)  # TP 4 x DP 4
    assert half == pytest.approx((here + there) / 2)


def test_a_server_holds_no_more_tokens_than_it_is_told() -> None:
    free = memory.server(recipe(), EIGHT, 80 * GB).kv_tokens
    told = memory.server(recipe(serving__kv_tokens=100_000), EIGHT, 80 * GB).kv_tokens
    assert free > 300_000
    assert told == 100_000


def test_a_servers_host_memory_is_new_weights_and_the_experts_of_each_token() -> None:
    """SGLang's own table, on a CPU. Qwen3-30B-A3B on two GPUs: 61 GB of weights, and 8
    of 48 layers' experts for each token.
    """
    from sglang.srt.state_capturer.base import BaseHostCache

    sglang_cpu.patch()
    shape = architecture.read("qwen3-30b-a3b")
    keys: dict[str, Any] = {"resources__server_tensor_parallel": 2, "serving__kv_tokens": 20_000}
    table = BaseHostCache(
        20_000, shape.layers, shape.experts_per_token, "routed_experts", "cpu"
    ).get_buffer_size_bytes()
    found = memory.server(recipe(**keys), shape, 80 * GB)
    assert found.host == pytest.approx(30.5 * GB + table, rel=2e-3)
    assert (
        memory.server(recipe(**keys, weights__transport="disk"), shape, 80 * GB).host
        == table
        == 20_000 * 48 * 8 * 4
    )
    assert memory.server(recipe(), EIGHT, 80 * GB).host == pytest.approx(16.06 * GB, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "data_parallel", "parts"),
    [
        ({"model__tensor_parallel": 1}, 8, 1),
        ({"model__tensor_parallel": 1, "model__context_parallel": 2}, 4, 2),
        ({"model__tensor_parallel": 2, "model__pipeline_parallel": 4}, 1, 4),
    ],
)
def test_each_learners_rank_has_its_own_experts(
    layout: dict[str, Any], data_parallel: int, parts: int
) -> None:
    """Qwen3-30B-A3B, 128k tokens on each data-parallel rank: 8 bytes of each token of
    all, as received and as decoded, and a rank's part of the 48 x 8 choices of its own
    tokens.
    """
    shape = architecture.read("qwen3-30b-a3b")
    keys: dict[str, Any] = {"resources__learner_ranks": 8} | layout
    hosts = [
        memory.learner(
            recipe(**keys, model__moe={"routing_replay": replayed}), shape, 16_384, 8
        ).host
        for replayed in (True, False)
    ]
    tokens = 16_384 * 8
    choices = 384 / parts
    expected = 2 * data_parallel * tokens * 8 + choices * (tokens + 2 * 16_384)
    assert hosts[0] - hosts[1] == pytest.approx(expected)


def test_servers_in_fp8_hold_a_byte_a_weight_and_a_scale_a_block() -> None:
    """Llama 3.1 8B: all but embedding, head and norms; twice the embedding's 128,256 x
    4,096 stays in bf16.
    """
    size = gpu_named("h100").memory
    bf16, fp8 = (
        memory.server(recipe(**keys), EIGHT, size)
        for keys in ({}, {"serving__quantization": "fp8"})
    )
    maps = EIGHT.dense_parameters - EIGHT.vector_parameters
    assert bf16.weights - fp8.weights == pytest.approx(maps * (2 - (1 + 4 / 128**2)))
    assert fp8.weights == pytest.approx(9.08 * GB, rel=1e-3)
    assert (fp8.staged, fp8.kv_token) == (fp8.weights, bf16.kv_token)


def test_routers_are_not_quantised() -> None:
    shape = architecture.read("qwen3-30b-a3b")
    fp8 = memory.served_bytes(recipe(serving__quantization="fp8"), shape)
    exact = 2 * (shape.embedding_parameters * 2 + shape.vector_parameters + 48 * 128 * 2048)
    maps = shape.parameters - exact / 2
    assert fp8 == pytest.approx(exact + maps * (1 + 4 / 128**2))


def test_an_fp8_cache_has_room_for_twice_the_tokens() -> None:
    size = gpu_named("h100").memory
    bf16, fp8 = (
        memory.server(recipe(**keys), EIGHT, size)
        for keys in ({}, {"serving__kv_cache_dtype": "fp8_e4m3"})
    )
    assert fp8.kv_tokens == pytest.approx(2 * bf16.kv_tokens, abs=2)
    assert fp8.weights == bf16.weights
