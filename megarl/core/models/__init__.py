"""Models: Megatron-Core's GPT, loaded from and written to Hugging Face directories, sharded over any layout.

    parallel.py      process groups of TP x PP x CP x EP x DP
    build.py         this rank's chunks of the model: layers, precision, FP8
    local_spec.py    norm and attention without Transformer Engine;   te_attention.py  what its attention lacks
    attention.py     which queries meet which keys of a packed row, and kernels for that without Transformer Engine
    rope.py          rotary embedding                       value_head.py  a critic's head, in place of the LM head
    family.py        what a family is; how a Megatron tensor is made of Hugging Face ones
    families.py      what each family calls its tensors
    hf.py            load, export, save                     checkpoint.py  distributed checkpoints

Importing any module of this package (or `megarl.core.models` itself) before megatron makes megatron-core importable on a CPU.
"""

from megarl.shims.megatron_cpu import run_on_cpu

run_on_cpu()

from megarl.core.models.families import family_of  # noqa: E402  megatron is imported below here
from megarl.core.models.family import Family  # noqa: E402

__all__ = ["Family", "family_of"]
