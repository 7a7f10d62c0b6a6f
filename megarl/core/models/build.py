"""This rank's part of a model: one GPTModel per virtual pipeline stage, with the right
layout and precision, without weights.

FP8 by Transformer Engine covers the products of linear maps, forward and backward:

    blockwise    E4M3; a scale per 128 values of an activation or gradient and per 128 x 128 of a weight (arXiv 2412.19437)
    tensorwise   E4M3, gradients E5M2; a scale per tensor, from its present values

Weights stay bf16 and are converted in each pass of the schedule, so published and
stored weights are the same as without FP8. Neither recipe keeps state between steps
(`delayed` scaling does), so scored and trained log-probs have the same precision.

A layer is built from megatron-core's modules, with ours where Transformer Engine is
missing or does not suffice:

on a GPU with Transformer Engine        its fused norms, its attention over packed rows (Hopper or newer), experts by grouped
                                        GEMM, FP8
without it, in fp32, and on a CPU       layers.py: our norm, torch's kernels for attention; experts one after the other
"""

import dataclasses
import functools
import importlib
import math
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import get_te_version

from megarl.core.base.architecture import Architecture, Yarn, in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.models import parallel
from megarl.core.models.attention import LayerAttention
from megarl.core.models.layers import (
    CausalAttention,
    ChunkedTEAttention,
    LatentAttention,
    RMSNorm,
    Rope,
    SwiGLU,
    inverse_frequencies,
)
from megarl.core.recipe import Model
from megarl.core.recipe.rules import impossible_for
from megarl.shims import fp16_on_cpu

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8_FORMATS = {"blockwise": "e4m3", "tensorwise": "hybrid"}
RECOMPUTE: dict[str, dict[str, object]] = {
    "none": {},
    # What costs least to compute again: no product and no exchange of tokens.
    "light": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    # The feed-forward half of each layer, with or without experts. Not attention: flash
    # kernels keep little for backward.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
"""Arguments of megatron-core by `learner.recompute`: what the backward pass recomputes
instead of keeping it.

Not among them, though megatron has them: `core_attn`, since flash kernels keep their
inputs, which a recomputation would keep too, and the output, which the next product
keeps; and `mla_up_proj`, since our latent attention replaces the method that would do
it.
"""


def build(
    model: Model, hf_dir: Path, transformer_engine: bool | None = None, recompute: str = "none"
) -> list[GPTModel]:
    """Build this rank's chunks, first pipeline stage first; `chunk.config` is their
    common TransformerConfig. Call this after parallel.start with the same `model`.
    transformer_engine: whether to use its layers; None: if it can run here. recompute:
    a key of RECOMPUTE. Embedding and head have padding rows if the vocabulary is not a
    multiple of TP.
    """
    architecture = in_directory(hf_dir)
    if transformer_engine is None:
        transformer_engine = with_transformer_engine(model)
    check(model, transformer_engine)
    if model.dtype == "fp16":
        fp16_on_cpu.install()
    config = transformer_config(model, architecture, transformer_engine, recompute)
    stages = parallel.virtual_stages(model)
    return [
        _chunk(model, architecture, config, transformer_engine, i)
        for i in (range(stages) if stages else [None])
    ]


def with_transformer_engine(model: Model) -> bool:
    """Return whether layers are built from Transformer Engine's by default. Not in
    fp32: for packed rows it then has only the attention that makes a matrix of all
    scores, and its products use TF32, which keeps 10 of 23 bits of mantissa.
    """
    return HAVE_TE and torch.cuda.is_available() and model.dtype != "fp32"


def layers_made_by(model: Model) -> str:
    """Return the name of the library whose layers `build` uses, for logs."""
    return f"Transformer Engine {get_te_version()}" if with_transformer_engine(model) else "megarl"


def recomputed(recompute: str, grouped_experts: bool) -> dict[str, object]:
    """Return megatron's arguments for a key of RECOMPUTE. grouped_experts: whether
    experts are one grouped product; one after the other, as on a CPU, they keep what
    their activation functions return.
    """
    arguments = dict(RECOMPUTE[recompute])
    if recompute == "light" and not grouped_experts:
        arguments["recompute_modules"] = ["layernorm"]
    return arguments


def transformer_config(
    model: Model, architecture: Architecture, fused: bool, recompute: str = "none"
) -> TransformerConfig:
    """Return megatron's configuration. fused: use the kernels that need a GPU and
    Transformer Engine.
    """
    for problem in impossible_for(model, architecture.megatron_sizes(), recompute):
        raise MegarlError(problem)
    layers = range(architecture.layers)
    router = architecture.router
    more = recomputed(recompute, fused)
    if architecture.layers % model.pipeline_parallel:
        more["num_layers_in_last_pipeline_stage"] = model.stage_layers(architecture.layers)[1]
    if model.fp8 != "none":
        more |= {"fp8": FP8_FORMATS[model.fp8], "fp8_recipe": model.fp8, "fp8_param": False}
    if architecture.unrotated_layers:
        more["no_rope_freq"] = [int(i in architecture.unrotated_layers) for i in layers]
    if architecture.experts:
        more |= {
            "moe_layer_freq": [int(i in architecture.expert_layers) for i in layers],
            "moe_router_topk": architecture.experts_per_token,
            "moe_router_score_function": (
                "sigmoid" if router in ("sigmoid", "balanced") else "softmax"
            ),
            "moe_router_pre_softmax": router == "softmax",
            "moe_apply_probs_on_input": router == "sigmoid",
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "aux_loss" if model.moe.aux_loss else "none",
            "moe_aux_loss_coeff": model.moe.aux_loss,
            "moe_grouped_gemm": fused,
            "moe_permute_fusion": fused,
            "moe_shared_expert_overlap": model.moe.shared_overlap,
        }
    if router == "balanced":
        more["moe_router_topk_scaling_factor"] = architecture.router_scale
    if architecture.router_groups:
        more["moe_router_num_groups"], more["moe_router_group_topk"] = architecture.router_groups
    if architecture.glu_limit is not None:
        more |= {"glu_linear_offset": 1.0, "activation_func_clamp_value": architecture.glu_limit}
    one_by_one = model.pipeline_parallel == 2 and model.virtual_pipeline_parallel > 1
    latent = architecture.latent is not None
    scaling = architecture.rope_scaling
    if latent:
        # Rotation and the scale of attention's scores are ours, so megatron's YaRN is
        # switched off.
        more |= {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if isinstance(scaling, Yarn):
        more["softmax_scale"] = scaling.scores / math.sqrt(architecture.head_dim)
    return (MLATransformerConfig if latent else TransformerConfig)(
        **architecture.megatron_sizes(),
        **more,
        layernorm_epsilon=architecture.epsilon,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu if architecture.glu_limit is None else quick_gelu,
        gated_linear_unit=True,
        add_qkv_bias=architecture.qkv_biases,
        qk_layernorm=architecture.head_norms,
        rotary_interleaved=architecture.rope_interleaved and not latent,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPES[model.dtype],
        pipeline_dtype=DTYPES[model.dtype],
        bf16=model.dtype == "bf16",
        fp16=model.dtype == "fp16",
        perform_initialization=False,
        tensor_model_parallel_size=model.tensor_parallel,
        # Experts need it, and it divides the work of norms among the ranks (arXiv
        # 2205.05198).
        sequence_parallel=model.tensor_parallel > 1,
        pipeline_model_parallel_size=model.pipeline_parallel,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages(model),
        context_parallel_size=model.context_parallel,
        expert_model_parallel_size=model.expert_parallel,
        expert_tensor_parallel_size=model.expert_tensor_parallel,
        # Two stages that send in batches mix up the sends of two chunks, and gradients
        # are wrong. More stages that send one by one may hang: over NCCL each pair
        # makes its communicator at its first send, in no order that all ranks share
        # (github.com/NVIDIA/Megatron-LM/pull/5240).
        overlap_p2p_comm=one_by_one,
        batch_p2p_comm=not one_by_one,
        variable_seq_lengths=model.pipeline_parallel > 1,
        # required for dense models too, with variable lengths
        moe_token_dispatcher_type="alltoall",
        bias_activation_fusion=fused,
        # megatron's name for an activation that gets both halves; _chunk replaces it
        # with ours
        use_te_activation_func=not fused and architecture.glu_limit is None,
        apply_rope_fusion=fused and not latent,
    )


def _chunk(
    model: Model,
    architecture: Architecture,
    config: TransformerConfig,
    transformer_engine: bool,
    vp_stage: int | None,
) -> GPTModel:
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    rotates = transformer_engine and not own_attention(architecture, model.context_parallel)
    chunk = GPTModel(
        config,
        block_spec(config, architecture, transformer_engine, vp_stage),
        vocab_size=-(-architecture.vocabulary // model.tensor_parallel) * model.tensor_parallel,
        max_sequence_length=architecture.context,
        position_embedding_type="rope" if rotates else "none",
        rotary_percent=architecture.rotated / architecture.head_dim,
        share_embeddings_and_output_weights=architecture.tied,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=vp_stage,
    )
    if rotates:  # megatron supports only one set of scaling constants
        frequencies = chunk.rotary_pos_emb.inv_freq
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies(architecture).to(frequencies.device)
        make_angles_for_few_lengths(chunk.rotary_pos_emb)
    device = next(chunk.parameters()).device
    for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
        # Megatron makes a router on the CPU and moves it in the first forward pass,
        # perhaps after the first publication.
        for parameter in router.parameters():
            parameter.data = parameter.data.to(device)
            parameter.requires_grad = not model.moe.freeze_router
        # Megatron would count tokens for the bias, with a mask of the wrong shape, and
        # update it even if a step is skipped.
        router.enable_expert_bias = False
        router.frozen_expert_bias = True
    if config.use_te_activation_func:
        for mlp in (module for module in chunk.modules() if isinstance(module, MLP)):
            mlp.activation_func = SwiGLU.apply
    if architecture.biases:
        _mend_experts(chunk)
    return chunk


def make_angles_for_few_lengths(rotary: RotaryEmbedding) -> None:
    """Make megatron compute rotary angles of packed rows for lengths that are powers of
    two. It caches them for the last 32 lengths, and otherwise nearly every row's
    longest sequence would have another one: 0.5 GB at 32k tokens.
    """
    length = rotary.get_rotary_seq_len

    def rounded_up(*args: object) -> int:
        asked = length(*args)
        packed = args[-1]
        return asked if packed is None else 1 << (asked - 1).bit_length()

    rotary.get_rotary_seq_len = rounded_up


def own_attention(architecture: Architecture, context_parallel: int) -> bool:
    """Return whether CausalAttention, which also rotates, replaces Transformer Engine's
    attention. That one knows no positions, so under context parallelism it cannot
    attend within Llama 4's chunks, and it has no kernels for some GPUs.
    """
    divided = context_parallel > 1 and architecture.name.startswith("Llama4")
    return (
        architecture.latent is not None
        or architecture.sinks
        or divided
        or not fused_takes(architecture.head_dim)
    )


def fused_takes(head_dim: int) -> bool:
    """Return whether Transformer Engine has a kernel on this GPU that trains on packed
    rows with heads of this size (its nvte_get_fused_attn_backend). Without one it makes
    a matrix of all scores, and refuses context parallelism.
    """
    if not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability()
    return head_dim <= (0 if capability < (9, 0) else 256 if capability == (9, 0) else 128)


def _mend_experts(chunk: GPTModel) -> None:
    """Correct two faults in megatron's experts with biases. It treats an expert's bias
    as one that all tensor-parallel ranks apply to their tokens, and would sum gradients
    of different experts. Without Transformer Engine, it adds a bias in place to a view,
    which autograd refuses.
    """
    for name, module in chunk.named_modules():
        if ".experts." in f"{name}.":
            for bias, parameter in module.named_parameters(recurse=False):
                if bias.startswith("bias"):
                    parameter.sequence_parallel = False
            if isinstance(module, RowParallelLinear):
                module.register_forward_hook(lambda _, __, output: (output[0].clone(), output[1]))


def check(model: Model, transformer_engine: bool) -> None:
    """Raise MegarlError if these layers cannot compute in FP8. transformer_engine:
    whether it provides them.
    """
    if model.fp8 == "none":
        return
    if not transformer_engine:
        missing = "this machine has no NVIDIA GPU" if HAVE_TE else "it is not installed"
        raise MegarlError(
            f"model.fp8: {model.fp8} needs Transformer Engine, but {missing}; set model.fp8=none"
        )
    engine = importlib.import_module("transformer_engine.pytorch")
    available = (
        engine.is_fp8_block_scaling_available
        if model.fp8 == "blockwise"
        else engine.is_fp8_available
    )
    can, reason = available(return_reason=True)
    if not can:
        raise MegarlError(
            f"model.fp8: {model.fp8} cannot be computed on this GPU: {reason} Set model.fp8=none"
        )


def block_spec(
    config: TransformerConfig,
    architecture: Architecture,
    transformer_engine: bool,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    """Return this rank's layers of chunk `vp_stage`. Our attention rotates q and k; for
    Transformer Engine's the model does.
    """
    spec = get_gpt_decoder_block_spec(
        config, transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    scaling = architecture.rope_scaling
    magnitude = scaling.magnitude if isinstance(scaling, Yarn) else 1.0
    latent = architecture.latent is not None
    rope = Rope(
        inverse_frequencies(architecture), architecture.rope_interleaved, magnitude, last=latent
    )
    l2_epsilon = architecture.epsilon if architecture.l2_norms else None
    rotated = LayerAttention(
        chunk=architecture.attention_chunk, l2_epsilon=l2_epsilon, sinks=architecture.sinks
    )
    unrotated = LayerAttention(rotary=False, temperature=architecture.temperature)
    special = dict.fromkeys(architecture.unrotated_layers, unrotated)
    special |= dict.fromkeys(
        architecture.window_layers, dataclasses.replace(rotated, window=architecture.window)
    )
    layers = [special.get(i, rotated) for i in range(architecture.layers)]
    ours = functools.partial(CausalAttention, rope=rope, layers=layers)
    if not transformer_engine:
        spec.layer_norm = RMSNorm
    for layer in (spec.submodules for spec in spec.layer_specs):  # equal layers share one object
        attention = layer.self_attention.submodules
        has_experts = layer.mlp.func is MoELayer
        if not transformer_engine:
            layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        # Checkpoints use Transformer Engine's names: there the second norm belongs to a
        # projection, except before experts.
        if latent:
            layer.self_attention = latent_attention(rope, layers)
            if not has_experts:
                layer.sharded_state_dict_keys_map = {
                    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"
                }
        elif not transformer_engine:
            attention.core_attention = ours
            if attention.q_layernorm is not IdentityOp:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
            if has_experts:
                layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
        elif own_attention(architecture, config.context_parallel_size):
            attention.core_attention = ours
        elif set(layers) != {LayerAttention()}:
            attention.core_attention = functools.partial(ChunkedTEAttention, layers=layers)
    return spec


def latent_attention(rope: Rope, layers: list[LayerAttention]) -> ModuleSpec:
    """Return latent attention, made of megatron's own linear maps even with Transformer
    Engine.
    """
    maps = [f"linear_{name}_proj" for name in ("q", "q_down", "q_up", "kv_down", "kv_up")]
    submodules = MLASelfAttentionSubmodules(
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
        core_attention=ModuleSpec(CausalAttention, params={"rope": rope, "layers": layers}),
        **dict.fromkeys(maps, ColumnParallelLinear),
    )
    return ModuleSpec(
        LatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules
    )
