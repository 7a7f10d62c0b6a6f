"""This rank's part of a model: one GPTModel per virtual pipeline stage, with the right
layout and precision, without weights.

FP8 by Transformer Engine covers the products of linear maps, forward and backward:

    blockwise    E4M3; a scale per 128 values of an activation or gradient and per
                 128 x 128 of a weight (arXiv 2412.19437)
    tensorwise   E4M3, gradients E5M2; a scale per tensor, from its present values

Weights stay bf16 and are converted in each pass of the schedule, so published and
stored weights are the same as without FP8. Neither recipe keeps state between steps
(`delayed` scaling does), so scored and trained log-probs have the same precision.

A layer is built from megatron-core's modules, with ours where Transformer Engine is
missing or does not suffice:

on a GPU with Transformer Engine   its fused norms, its attention over packed rows
                                   (Hopper or newer), experts by grouped GEMM, FP8
without it, in fp32, on a CPU      layers.py: our norm, torch's kernels for attention;
                                   experts one after the other
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Collection
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
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_te_version

from megarl.core.base.architecture import Architecture, Yarn, in_directory
from megarl.core.base.delta_layers import DeltaLayers
from megarl.core.base.errors import MegarlError
from megarl.core.models import parallel
from megarl.core.models.attention import LayerAttention
from megarl.core.models.delta import DeltaNetwork
from megarl.core.models.layers import (
    CausalAttention,
    CenteredNorm,
    ChunkedTEAttention,
    LatentAttention,
    RMSNorm,
    Rope,
    SwiGLU,
    WholeNormAttention,
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
    # The feed-forward half of each layer, with or without experts, and what a gated
    # delta network does between its projections (delta.py): it would keep a state for
    # every 64 tokens. Not attention: flash kernels keep little for backward.
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
    count = parallel.virtual_stages(model)
    stages = [None] if count is None else range(count)
    return [_chunk(model, architecture, config, transformer_engine, stage) for stage in stages]


def with_transformer_engine(model: Model) -> bool:
    """Return whether layers are built from Transformer Engine's by default. Not in
    fp32: for packed rows it then has only the attention that makes a matrix of all
    scores, and its products use TF32, which keeps 10 of 23 bits of mantissa.
    """
    return HAVE_TE and torch.cuda.is_available() and model.dtype != "fp32"


def layers_made_by(model: Model) -> str:
    """Return the name of the library whose layers `build` uses, for logs."""
    if with_transformer_engine(model):
        return f"Transformer Engine {get_te_version()}"
    return "megarl"


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
    latent = architecture.latent is not None
    config_type = MLATransformerConfig if latent else TransformerConfig
    return config_type(
        **architecture.megatron_sizes(),
        **recomputed(recompute, fused),
        **_layer_arguments(architecture),
        **_precision_arguments(model),
        **_layout_arguments(model, architecture),
        **_expert_arguments(model, architecture, fused),
        perform_initialization=False,
        bias_activation_fusion=fused,
        # megatron's name for an activation that gets both halves; _chunk replaces it
        # with ours
        use_te_activation_func=not fused and architecture.glu_limit is None,
        apply_rope_fusion=fused and not latent,
    )


def _layer_arguments(architecture: Architecture) -> dict[str, object]:
    """Return megatron's arguments for norms, attention, rotation and activation."""
    latent = architecture.latent is not None
    arguments: dict[str, object] = {
        "layernorm_epsilon": architecture.epsilon,
        "normalization": "RMSNorm",
        "activation_func": torch.nn.functional.silu,
        "gated_linear_unit": True,
        "add_qkv_bias": architecture.qkv_biases,
        "qk_layernorm": architecture.head_norms,
        "rotary_interleaved": architecture.rope_interleaved and not latent,
        "layernorm_zero_centered_gamma": architecture.centered_norms,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if architecture.delta:
        # Layers differ, which checkpoints need to know.
        arguments["linear_attention_freq"] = _flags(architecture.delta_layers, architecture.layers)
    if architecture.unrotated_layers:
        arguments["no_rope_freq"] = _flags(architecture.unrotated_layers, architecture.layers)
    if architecture.glu_limit is not None:
        arguments["activation_func"] = quick_gelu
        arguments["glu_linear_offset"] = 1.0
        arguments["activation_func_clamp_value"] = architecture.glu_limit
    if latent:
        # Rotation and the scale of attention's scores are ours, so megatron's YaRN is
        # switched off.
        arguments["rope_type"] = "rope"
        arguments["rotary_scaling_factor"] = 1.0
    scaling = architecture.rope_scaling
    if isinstance(scaling, Yarn):
        arguments["softmax_scale"] = scaling.scores / math.sqrt(architecture.head_dim)
    return arguments


def _precision_arguments(model: Model) -> dict[str, object]:
    """Return megatron's arguments for the types of numbers."""
    arguments: dict[str, object] = {
        "params_dtype": DTYPES[model.dtype],
        "pipeline_dtype": DTYPES[model.dtype],
        "bf16": model.dtype == "bf16",
        "fp16": model.dtype == "fp16",
    }
    if model.fp8 != "none":
        arguments["fp8"] = FP8_FORMATS[model.fp8]
        arguments["fp8_recipe"] = model.fp8
        arguments["fp8_param"] = False
    return arguments


def _layout_arguments(model: Model, architecture: Architecture) -> dict[str, object]:
    """Return megatron's arguments for the division among ranks."""
    sends_one_by_one = model.pipeline_parallel == 2 and model.virtual_pipeline_parallel > 1
    arguments: dict[str, object] = {
        "tensor_model_parallel_size": model.tensor_parallel,
        # Experts need it, and it divides the work of norms among the ranks (arXiv
        # 2205.05198).
        "sequence_parallel": model.tensor_parallel > 1,
        "pipeline_model_parallel_size": model.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": parallel.virtual_stages(model),
        "context_parallel_size": model.context_parallel,
        "expert_model_parallel_size": model.expert_parallel,
        "expert_tensor_parallel_size": model.expert_tensor_parallel,
        # Two stages that send in batches mix up the sends of two chunks, and gradients
        # are wrong. More stages that send one by one may hang: over NCCL each pair
        # makes its communicator at its first send, in no order that all ranks share
        # (github.com/NVIDIA/Megatron-LM/pull/5240).
        "overlap_p2p_comm": sends_one_by_one,
        "batch_p2p_comm": not sends_one_by_one,
        "variable_seq_lengths": model.pipeline_parallel > 1,
    }
    if architecture.layers % model.pipeline_parallel:
        _, last_stage = model.stage_layers(architecture.layers)
        arguments["num_layers_in_last_pipeline_stage"] = last_stage
    return arguments


def _expert_arguments(model: Model, architecture: Architecture, fused: bool) -> dict[str, object]:
    """Return megatron's arguments for routers and experts. fused: as in
    `transformer_config`.
    """
    # required for dense models too, with variable lengths
    arguments: dict[str, object] = {"moe_token_dispatcher_type": "alltoall"}
    if not architecture.experts:
        return arguments
    router = architecture.router
    takes_sigmoid = router in ("sigmoid", "balanced")
    arguments |= {
        "moe_layer_freq": _flags(architecture.expert_layers, architecture.layers),
        "moe_router_topk": architecture.experts_per_token,
        "moe_router_score_function": "sigmoid" if takes_sigmoid else "softmax",
        "moe_router_pre_softmax": router == "softmax",
        "moe_apply_probs_on_input": router == "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": model.moe.aux_loss,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "moe_shared_expert_overlap": model.moe.shared_overlap,
    }
    if model.moe.aux_loss:
        arguments["moe_router_load_balancing_type"] = "aux_loss"
    if router == "balanced":
        arguments["moe_router_topk_scaling_factor"] = architecture.router_scale
    if architecture.router_groups:
        groups, top_groups = architecture.router_groups
        arguments["moe_router_num_groups"] = groups
        arguments["moe_router_group_topk"] = top_groups
    return arguments


def _flags(marked_layers: Collection[int], layers: int) -> list[int]:
    """Return 1 for each of the marked layers and 0 for the others."""
    return [int(i in marked_layers) for i in range(layers)]


def _chunk(
    model: Model,
    architecture: Architecture,
    config: TransformerConfig,
    transformer_engine: bool,
    vp_stage: int | None,
) -> GPTModel:
    """Build one of this rank's chunks. vp_stage: its number among them; None: the only
    one.
    """
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    megatron_rotates = transformer_engine and not own_attention(
        architecture, model.context_parallel
    )
    rows_per_rank = -(-architecture.vocabulary // model.tensor_parallel)
    chunk = GPTModel(
        config,
        block_spec(config, architecture, transformer_engine, vp_stage),
        vocab_size=rows_per_rank * model.tensor_parallel,
        max_sequence_length=architecture.context,
        position_embedding_type="rope" if megatron_rotates else "none",
        rotary_percent=architecture.rotated / architecture.head_dim,
        share_embeddings_and_output_weights=architecture.tied,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        vp_stage=vp_stage,
    )
    if megatron_rotates:  # megatron supports only one set of scaling constants
        frequencies = chunk.rotary_pos_emb.inv_freq
        chunk.rotary_pos_emb.inv_freq = inverse_frequencies(architecture).to(frequencies.device)
        make_angles_for_few_lengths(chunk.rotary_pos_emb)
    device = next(chunk.parameters()).device
    for module in chunk.modules():
        if isinstance(module, TopKRouter):
            _prepare_router(module, device, trained=not model.moe.freeze_router)
        if isinstance(module, SharedExpertMLP) and module.gate_weight is not None:
            # megatron makes it on the CPU. It chooses nothing, so a frozen router does
            # not include it.
            module.gate_weight.data = module.gate_weight.data.to(device)
        if isinstance(module, MLP) and config.use_te_activation_func:
            module.activation_func = SwiGLU.apply
    if architecture.biases:
        _mend_experts(chunk)
    return chunk


def _prepare_router(router: TopKRouter, device: torch.device, trained: bool) -> None:
    """Move a router to the device of the layers, and keep megatron from changing its
    bias. trained: whether it is trained, or frozen.
    """
    # Megatron makes a router on the CPU and moves it in the first forward pass, perhaps
    # after the first publication.
    for parameter in router.parameters():
        parameter.data = parameter.data.to(device)
        parameter.requires_grad = trained
    # Megatron would count tokens for the bias, with a mask of the wrong shape, and
    # update it even if a step is skipped.
    router.enable_expert_bias = False
    router.frozen_expert_bias = True


def make_angles_for_few_lengths(rotary: RotaryEmbedding) -> None:
    """Make megatron compute rotary angles of packed rows for lengths that are powers of
    two. It caches them for the last 32 lengths, and otherwise nearly every row's
    longest sequence would have another one: 0.5 GB at 32k tokens.
    """
    length = rotary.get_rotary_seq_len

    def rounded_up(*args: object) -> int:
        longest = length(*args)
        packed = args[-1]
        if packed is None:
            return longest
        return 1 << (longest - 1).bit_length()

    rotary.get_rotary_seq_len = rounded_up


def own_attention(architecture: Architecture, context_parallel: int) -> bool:
    """Return whether CausalAttention, which also rotates, replaces Transformer Engine's
    attention. That one knows no positions, so under context parallelism it cannot
    attend within Llama 4's chunks, and it has no kernels for some GPUs. Megatron, which
    would rotate for it, has no factor on rotated q and k (Yarn.magnitude).
    """
    divided = context_parallel > 1 and architecture.name.startswith("Llama4")
    scaling = architecture.rope_scaling
    has_magnitude = isinstance(scaling, Yarn) and scaling.magnitude != 1.0
    return (
        architecture.latent is not None
        or architecture.sinks
        or divided
        or has_magnitude
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
    if capability < (9, 0):
        return False
    if capability == (9, 0):
        return head_dim <= 256
    return head_dim <= 128


def _mend_experts(chunk: GPTModel) -> None:
    """Correct two faults in megatron's experts with biases. It treats an expert's bias
    as one that all tensor-parallel ranks apply to their tokens, and would sum gradients
    of different experts. Without Transformer Engine, it adds a bias in place to a view,
    which autograd refuses.
    """
    for name, module in chunk.named_modules():
        if ".experts." not in f"{name}.":
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter_name.startswith("bias"):
                parameter.sequence_parallel = False
        if isinstance(module, RowParallelLinear):
            module.register_forward_hook(_copied_output)


def _copied_output(
    _module: RowParallelLinear, _inputs: object, output: tuple[torch.Tensor, object]
) -> tuple[torch.Tensor, object]:
    product, bias = output
    return product.clone(), bias


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
    if model.fp8 == "blockwise":
        available, reason = engine.is_fp8_block_scaling_available(return_reason=True)
    else:
        available, reason = engine.is_fp8_available(return_reason=True)
    if not available:
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
    rope = _rope(architecture)
    layers = _layer_attentions(architecture)
    core_attention = None  # Transformer Engine's
    if not transformer_engine or own_attention(architecture, config.context_parallel_size):
        core_attention = functools.partial(CausalAttention, rope=rope, layers=layers)
    elif set(layers) != {LayerAttention()}:
        core_attention = functools.partial(ChunkedTEAttention, layers=layers)
    norm = CenteredNorm if architecture.centered_norms else RMSNorm
    if not transformer_engine:
        spec.layer_norm = norm
    if architecture.delta:
        first = get_transformer_layer_offset(config, vp_stage)
        _place_delta_networks(spec, architecture.delta, first)
    for layer_spec in spec.layer_specs:  # equal layers share one object
        layer = layer_spec.submodules
        if not transformer_engine:
            layer.input_layernorm = norm
            layer.pre_mlp_layernorm = norm
        if architecture.latent is not None:
            layer.self_attention = latent_attention(rope, layers)
        elif layer.self_attention.module is not DeltaNetwork:
            attention = layer.self_attention.submodules
            if not transformer_engine and attention.q_layernorm is not IdentityOp:
                attention.q_layernorm = norm
                attention.k_layernorm = norm
            if core_attention is not None:
                attention.core_attention = core_attention
            if architecture.whole_norms:
                layer.self_attention.module = WholeNormAttention
        _name_second_norm(layer, architecture.latent is not None, transformer_engine)
    return spec


def _place_delta_networks(spec: TransformerBlockSubmodules, delta: DeltaLayers, first: int) -> None:
    """Put gated delta networks in their layers. first: the number of the block's first
    layer.
    """
    for i, layer_spec in enumerate(spec.layer_specs):
        if first + i in delta.layers:
            spec.layer_specs[i] = _with_delta_network(layer_spec, delta)


def _with_delta_network(layer_spec: ModuleSpec, delta: DeltaLayers) -> ModuleSpec:
    """Return a layer with a gated delta network in place of attention, and with the
    norm before it, which Transformer Engine would compute within attention's
    projection.
    """
    names = dict(layer_spec.submodules.sharded_state_dict_keys_map)
    names.pop("input_layernorm.", None)
    submodules = dataclasses.replace(
        layer_spec.submodules,
        self_attention=ModuleSpec(DeltaNetwork, params={"delta": delta}),
        input_layernorm=CenteredNorm,
        sharded_state_dict_keys_map=names,
    )
    return dataclasses.replace(layer_spec, submodules=submodules)


def _name_second_norm(
    layer: TransformerLayerSubmodules, latent: bool, transformer_engine: bool
) -> None:
    """Give the second norm Transformer Engine's name in checkpoints: there it belongs
    to a projection, except before experts.
    """
    has_experts = layer.mlp.func is MoELayer
    if latent and not has_experts:
        layer.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    elif not latent and has_experts and not transformer_engine:
        layer.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)


def _rope(architecture: Architecture) -> Rope:
    scaling = architecture.rope_scaling
    return Rope(
        inverse_frequencies(architecture),
        architecture.rope_interleaved,
        magnitude=scaling.magnitude if isinstance(scaling, Yarn) else 1.0,
        last=architecture.latent is not None,
    )


def _layer_attentions(architecture: Architecture) -> list[LayerAttention]:
    """Return how each layer attends."""
    rotated = LayerAttention(
        chunk=architecture.attention_chunk,
        l2_epsilon=architecture.epsilon if architecture.l2_norms else None,
        sinks=architecture.sinks,
    )
    layers = [rotated] * architecture.layers
    for i in architecture.unrotated_layers:
        layers[i] = LayerAttention(rotary=False, temperature=architecture.temperature)
    for i in architecture.window_layers:
        layers[i] = dataclasses.replace(rotated, window=architecture.window)
    return layers


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
