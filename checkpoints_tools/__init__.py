"""Tools for checkpoints and models: `python -m checkpoints_tools COMMAND`.

    __main__.py     the command line
    convert.py      converts between the two formats, and between layouts, with one
                    parameter in memory at a time
      layout.py       which rank holds which part of which tensor, from megatron
                      itself, without data or processes
      shards.py       megarl's distributed checkpoints, shard by shard
      safetensors_files.py   Hugging Face directories, tensor by tensor
      partial.py      directories that appear whole; an interrupted one is continued
      card.py         the model card of an exported directory
    quantized.py    converts FP8 and MXFP4 directories to bf16
    gguf_import.py  makes a Hugging Face directory of a GGUF file
    stored.py       the model at a path, under Hugging Face names, and how the two
                    formats correspond
    verify.py       compares two models: their bits, and their logits
    inspect.py      shows what a directory holds

They use megarl.core.models but nothing of the roles, and need only one process and no
GPU.
"""

import logging
import warnings


def silence_libraries() -> None:
    """Leave out what megatron and torch say while a tool runs: only the tool's own
    lines are for the user.
    """
    warnings.simplefilter("ignore")  # megatron warns of each optional package that is not installed
    logging.basicConfig(level=logging.ERROR)
    # It reports that there is no GPU, and where it found an unused CUDA.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
