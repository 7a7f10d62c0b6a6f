"""Models deep enough for rounding to show, with the quickstart's tokenizer. Weights are
random; the head is scaled so that logits spread like a trained model's (standard
deviation about 3).
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.tasks.data.arithmetic_models import LLAMA, LLAMA4, save_model

LOGIT_SPREAD = 3.0
DEEP_LLAMA = LLAMA | {
    "num_hidden_layers": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DEEP_QWEN3_MOE = DEEP_LLAMA | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 16,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEP_LLAMA4 = LLAMA4 | {
    "num_hidden_layers": 16,
    "num_local_experts": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS = {"llama-24": DEEP_LLAMA, "qwen3-moe-16": DEEP_QWEN3_MOE, "llama4-16": DEEP_LLAMA4}


def make(name: str, directory: Path) -> Path:
    """Return the directory of the model of that name in Hugging Face format; make it
    unless it exists.
    """
    path = directory / name
    if not path.exists():
        partial = directory / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_model(partial, MODELS[name], seed=0)
        file = partial / "model.safetensors"
        tensors = load_file(file)
        # Final states have unit size (RMSNorm), so logits are as large as a row of the
        # head.
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = torch.randn(
            head.shape, generator=torch.Generator().manual_seed(1)
        ) * (LOGIT_SPREAD / head.shape[1] ** 0.5)
        save_file(tensors, file, metadata={"format": "pt"})
        partial.rename(path)
    return path
