"""Tools for what training leaves behind: `python -m checkpoints_tools convert | dequantize | reshard | verify | inspect`.

    __main__.py    the command line
    convert.py     one form into the other, one layout into another; one parameter in memory at a time
      layout.py      which rank holds which part of which tensor, by megatron itself, without data or processes
      shards.py      megarl's distributed checkpoints, shard by shard       region.py   a tensor within a file
      safetensors_files.py   Hugging Face directories, tensor by tensor     partial.py  resumable, atomic directories
      card.py        the model card of an exported directory
    quantized.py   FP8 and MXFP4 directories into bf16
    stored.py      what lies at a path, under Hugging Face names, and how the two forms correspond
    verify.py      are two the same, bit by bit and in what they compute
    inspect.py     what a directory holds

They use megarl.core.models and nothing of the roles, and need one process and no GPU.
"""
