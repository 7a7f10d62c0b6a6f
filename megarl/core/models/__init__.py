"""Models: Megatron-Core's GPT, loaded from and written to Hugging Face directories, sharded over any layout.

    parallel.py      process groups of TP x PP x CP x EP x DP
    build.py         this rank's chunks of the model: layers, precision, FP8
    layers.py        norm, rotary embedding, attention with and without Transformer Engine, a critic's head
    attention.py     which queries meet which keys of a packed row, and kernels for that without Transformer Engine
    families.py      what each family calls its tensors, and how Megatron's are made from them
    products.py      products whose sums stay in FP32, and weight gradients by them
    hf.py            load, export, save                    checkpoint.py  distributed checkpoints

Importing any module of this package (or `megarl.core.models` itself) before megatron makes megatron-core importable on a CPU.
"""

from megarl.shims.megatron_cpu import run_on_cpu

run_on_cpu()

from megarl.core.models.families import Family, family_of  # noqa: E402  these import megatron

__all__ = ["Family", "family_of"]
