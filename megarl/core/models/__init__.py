"""Models: Megatron-Core's GPT, loaded from and written to Hugging Face directories,
sharded over any layout.

    parallel.py      process groups of TP x PP x CP x EP x DP
    build.py         this rank's chunks of the model: layers, precision, FP8
    layers.py        norm, rotary embedding, attention with and without Transformer
                     Engine, a critic's head
    attention.py     which queries attend to which keys of a packed row, and kernels for
                     it without Transformer Engine
    delta.py         gated delta networks, in place of attention
    delta_rule.py    their rule and convolution over packed rows
    delta_kernels.py   the rule by GPU kernels, whose gradients are checked first
    families.py      names of tensors in each family, and how Megatron's are made from
                     them
    products.py      matrix products that accumulate in FP32, and weight gradients by
                     them
    head/            log-probs and entropy of a split vocabulary, without its logits
    hf.py            load, export, save
    checkpoint.py    distributed checkpoints
    region.py        a tensor within a file

Importing any module of this package (or `megarl.core.models` itself) before megatron
makes megatron-core importable on a CPU.
"""

import importlib.util
import os

import torch

from megarl.core.base.device import cudnn_of_torch
from megarl.core.base.errors import MegarlError
from megarl.core.models.families import Family, family_of
from megarl.shims.megatron_cpu import run_on_cpu

__all__ = ["Family", "family_of"]


def _check_transformer_engine() -> None:
    """Raise MegarlError if there is a GPU but the installed Transformer Engine cannot
    be imported: megatron-core would silently do without it, or fail with another error.
    It gets torch's cuDNN, where it would prefer one of a module or the toolkit.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("transformer_engine") is None:
        return
    os.environ.update(cudnn_of_torch())
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        raise MegarlError(
            f"Transformer Engine is installed, but cannot be imported: {type(error).__name__}:"
            f" {error}. Build it again for this torch, or uninstall it to train with megarl's own"
            " layers (docs/how-to/install.md)"
        ) from error


_check_transformer_engine()
run_on_cpu()
