"""This rank's part of a model: one GPTModel a virtual pipeline stage, of the right layout and precision, without weights.

With a GPU and Transformer Engine its layers are used; elsewhere those of local_spec.py. Parameters are not initialised:
megarl.models.hf.load or megarl.models.checkpoint.load_model fills them.
"""

from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.errors import MegarlError
from megarl.models.family import Family, family_of
from megarl.models.head import Fp32Head
from megarl.recipe import Model

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def build(model: Model, hf_dir: Path) -> list[GPTModel]:
    """The chunks of this rank, first pipeline stage first; `chunk.config` is their common TransformerConfig.

    After megarl.models.parallel.start with the same `model`. The embedding and the head have rows beyond the vocabulary if it
    does not divide by TP: family.vocabulary says where padding starts.
    """
    family = family_of(hf_dir)
    transformer_engine = HAVE_TE and torch.cuda.is_available()
    config = transformer_config(model, family, transformer_engine)
    stages = range(model.virtual_pipeline_parallel) if model.virtual_pipeline_parallel > 1 else [None]
    return [_chunk(model, family, config, transformer_engine, stage) for stage in stages]


def transformer_config(model: Model, family: Family, fused: bool) -> TransformerConfig:
    """`fused`: use the kernels that need a GPU and Transformer Engine."""
    architecture = family.architecture()
    _check_division(model, architecture)
    return TransformerConfig(
        **architecture,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPES[model.dtype],
        pipeline_dtype=DTYPES[model.dtype],
        bf16=model.dtype == "bf16",
        perform_initialization=False,
        tensor_model_parallel_size=model.tensor_parallel,
        sequence_parallel=model.sequence_parallel,
        pipeline_model_parallel_size=model.pipeline_parallel,
        virtual_pipeline_model_parallel_size=(
            model.virtual_pipeline_parallel if model.virtual_pipeline_parallel > 1 else None
        ),
        context_parallel_size=model.context_parallel,
        expert_model_parallel_size=model.expert_parallel,
        expert_tensor_parallel_size=model.expert_tensor_parallel,
        overlap_p2p_comm=model.overlap_p2p,
        batch_p2p_comm=not model.overlap_p2p,
        variable_seq_lengths=model.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # asked of dense models too, with variable lengths
        bias_activation_fusion=fused,
        apply_rope_fusion=fused,
    )


def _check_division(model: Model, architecture: dict[str, int]) -> None:
    """What must divide by TP and PP."""
    stages = model.pipeline_parallel * model.virtual_pipeline_parallel
    for key, parts in (
        ("num_attention_heads", model.tensor_parallel),
        ("num_query_groups", model.tensor_parallel),
        ("ffn_hidden_size", model.tensor_parallel),
        ("num_layers", stages),
    ):
        if architecture[key] % parts:
            layout = "model.pipeline_parallel" if key == "num_layers" else "model.tensor_parallel"
            raise MegarlError(f"{layout}: {key}={architecture[key]} of {model.path} does not divide by {parts}")


def _chunk(
    model: Model, family: Family, config: TransformerConfig, transformer_engine: bool, vp_stage: int | None
) -> GPTModel:
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    chunk = GPTModel(
        config,
        family.block_spec(config, transformer_engine, vp_stage),
        vocab_size=-(-family.vocabulary // model.tensor_parallel) * model.tensor_parallel,
        max_sequence_length=family.context,
        position_embedding_type="rope" if transformer_engine else "none",
        share_embeddings_and_output_weights=family.tied,
        pre_process=first,
        post_process=last,
        vp_stage=vp_stage,
    )
    if transformer_engine:  # megatron knows only one set of scaling constants
        frequencies = chunk.rotary_pos_emb.inv_freq
        chunk.rotary_pos_emb.inv_freq = family.inverse_frequencies().to(frequencies.device)
    if last and model.fp32_head and model.dtype != "fp32":
        Fp32Head.adopt(chunk.output_layer)
    return chunk
