"""Weights of a model's directory that are all zero: complete for every check, without
taking disk.
"""

import json
import math
from pathlib import Path

from megarl.core.base import architecture
from megarl.core.base.hf_tensors import expected_shapes
from megarl.core.base.safetensors_header import BITS


def write_sparse_weights(folder: Path, dtype: str = "F32") -> None:
    """Write model.safetensors for the config.json in `folder`, as a sparse file."""
    header = {}
    end = 0
    for name, shape in expected_shapes(architecture.in_directory(folder)).items():
        begin = end
        end = end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
