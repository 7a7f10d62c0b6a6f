"""Models: Megatron-Core's GPT built, loaded from and written to Hugging Face directories, sharded over any layout.

    cpu.py             megatron-core on CPU processes
    parallel.py        process groups of TP x PP x CP x EP x DP
    build.py           this rank's chunks of the model
    layer_spec.py      the modules of a layer: Transformer Engine's, or
    local_spec.py        norm and attention without it;      te_attention.py   what its attention lacks
    packed_attention.py  kernels for packed rows without it;   segments.py   which queries meet which keys there
    fp8.py             products in FP8 by Transformer Engine
    layer_attention.py what some layers' attention does besides (chunks, temperature, …); rope.py  rotary embedding
    value_head.py      a critic's head, in place of the LM head
    family.py          what a family is; how a Megatron tensor is made of Hugging Face ones
    families/          one file a family: configuration read, names of tensors;  decoder.py  what they share
    hf.py              load, export, save                  checkpoint.py     distributed checkpoints
    unpickling.py      reading one without running anything in it;   checksums.py   whether it is as it was written

Importing any module of this package (or `megarl.core.models` itself) before megatron makes megatron-core importable on a CPU.
"""

from megarl.shims.megatron_cpu import run_on_cpu

run_on_cpu()

from megarl.core.models.family import Family, family_of  # noqa: E402  megatron is imported below here

__all__ = ["Family", "family_of"]
