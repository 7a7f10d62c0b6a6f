"""What training a sequence costs, in floating-point operations, for micro-batches of like cost (algorithm/packing.py).

The planner has the same from a model's config.json alone (megarl/lab/planning/formulas.py); a test holds the two together.
"""

from megarl.core.algorithm.packing import Cost
from megarl.core.models import Family

LAYER_PASSES, HEAD_PASSES = 3, 4
"""Forward and backward, in forwards: backward is two, and the head makes its logits again (megarl/core/learner/head)."""


def cost_of(family: Family) -> Cost:
    """Of a sequence in all layers and the head: 2 operations for each parameter that a token is multiplied with, 4 for each
    number of a query that meets a position (PaLM, arXiv 2204.02311, appendix B)."""
    sizes = family.architecture
    hidden, layers = sizes["hidden_size"], sizes["num_layers"]
    query, key = (sizes[name] * sizes["kv_channels"] for name in ("num_attention_heads", "num_query_groups"))
    matrices = layers * hidden * (2 * query + 2 * key)
    sparse = 0
    if family.experts:
        sparse = sum(sizes["moe_layer_freq"])
        inner = sizes["moe_router_topk"] * sizes["moe_ffn_hidden_size"]
        inner += sizes.get("moe_shared_expert_intermediate_size", 0)
        matrices += sparse * hidden * (3 * inner + family.experts)
    matrices += (layers - sparse) * 3 * hidden * sizes["ffn_hidden_size"]
    chunks = [layer.chunk for layer in family.attention if layer.chunk is not None]
    pair = LAYER_PASSES * 4 * query
    return Cost(
        token=LAYER_PASSES * 2 * matrices + HEAD_PASSES * 2 * hidden * family.vocabulary,
        pair=pair * (layers - len(chunks)),
        local_pair=pair * len(chunks),
        chunk=chunks[0] if chunks else 1,
    )
