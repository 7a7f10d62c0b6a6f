"""Tiny models in Hugging Face directories, made by transformers: the reference side of the model tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_llama(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A Llama with random weights, none of them trivial (norms too), saved in `path`; `overrides` go to LlamaConfig.

    llama3 rope scaling, grouped queries and a head_dim other than hidden / heads unless overridden.
    """
    config = LlamaConfig(
        **{
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": LLAMA3_ROPE,
            "attn_implementation": "eager",
            **overrides,
        }
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.1, generator=generator)
    model.to(dtype).save_pretrained(path)
    return model.eval()
