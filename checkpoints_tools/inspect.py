"""What a directory holds: architecture, size, step, recipe, the layout it was written at, and its tensors as a tree.

decoder                                                    in a tree, equal siblings are one line
  layers.[0-31]
    mlp.down_proj.weight   [4096, 14336] bfloat16  117.4 MB
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from checkpoints_tools.card import run_of
from checkpoints_tools.region import Shape
from checkpoints_tools.safetensors_files import Directory
from checkpoints_tools.shards import OPTIMIZER, Shards
from checkpoints_tools.stored import StoredModel, stored
from megarl.core.base.hf_files import read_config


@dataclass(frozen=True)
class Described(Shape):
    """A tensor. shards: how many pieces it is stored in, and the shape of one; for Hugging Face its file."""

    shards: str

    def __str__(self) -> str:
        return f"{list(self.shape)} {_plain(self.dtype)}  {self.nbytes / 1e6:,.1f} MB  {self.shards}"


type Tree = dict[str, Tree | Described]
"""Tensors by the components of their names."""


def inspect(directory: Path, every_tensor: bool) -> None:
    """Print what a directory holds, without reading weights. every_tensor: a line for each instead of the tree."""
    what = stored(directory)
    config = read_config(what.hf_dir)
    print(what.path)
    print(f"  architecture  {', '.join(config.get('architectures') or ['unknown'])}")
    tensors = _described(what)
    if what.meta is not None:
        layout = {k: v for k, v in what.meta.model.items() if k.endswith("_parallel") and v not in (1, False)}
        optimizer = {k: v for k, v in tensors.items() if k.startswith(OPTIMIZER)}
        tensors = {k: v for k, v in tensors.items() if k not in optimizer}
        print(f"  checkpoint    step {what.meta.step}, weights of version {what.meta.version}")
        print(f"  made from     {what.meta.hf_source}")
        print(f"  recipe        {_recipe(what)}")
        print(f"  written at    {', '.join(f'{k}={v}' for k, v in layout.items()) or 'one rank a copy'}")
        print(f"  optimiser     {_size(optimizer) if optimizer else 'none'}")
    print(f"  weights       {_size(tensors)}")
    every = [f"{name}  {tensor}" for name, tensor in sorted(tensors.items())]
    for line in every if every_tensor else _lines(_tree(tensors)):
        print(f"  {line}")


def _described(what: StoredModel) -> dict[str, Described]:
    if what.meta is None:
        regions = Directory(what.path).regions
        return {name: Described(r.shape, r.dtype, r.path.name) for name, r in regions.items()}
    return {
        name: Described(t.shape, t.dtype, f"{len(t.boxes)} x {list(t.boxes[0][1])}")
        for name, t in Shards(what.path).tensors.items()
    }


def _recipe(what: StoredModel) -> str:
    run = run_of(what.path)
    if run is None:
        return "none: not in a run directory"
    recipe = yaml.safe_load(run.recipe.read_text()) or {}
    return f"{run.recipe}: {recipe.get('run', {}).get('name')}"


def _tree(tensors: dict[str, Described]) -> Tree:
    root: Tree = {}
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = root
        for component in path:
            child = node.setdefault(component, {})
            assert isinstance(child, dict)  # no tensor's name is the beginning of another's
            node = child
        node[leaf] = tensor
    return root


def _lines(node: Tree, indent: str = "") -> list[str]:
    """Return the tree's lines: numbered siblings that hold the same share one; a node with one child is joined with it."""
    lines: list[str] = []
    for name, child in _merged(node):
        while isinstance(child, dict) and len(below := _merged(child)) == 1:
            ((joined, child),) = below
            name = f"{name}.{joined}"
        if isinstance(child, dict):
            lines += [f"{indent}{name}", *_lines(child, indent + "  ")]
        else:
            lines.append(f"{indent}{name}  {child}")
    return lines


def _merged(node: Tree) -> list[tuple[str, Tree | Described]]:
    kinds: dict[str, list[str]] = {}
    for name, child in node.items():
        same = _without_files(child) if name.isdigit() else name
        kinds.setdefault(same, []).append(name)
    return [
        (_ranges(sorted(map(int, names))) if len(names) > 1 else names[0], node[names[0]]) for names in kinds.values()
    ]


def _without_files(child: Tree | Described) -> str:
    """Return the same text for two subtrees that differ at most in the files of their tensors."""
    return re.sub(r"[\w.-]+\.safetensors", "", str(child) if isinstance(child, dict) else f"leaf {child}")


def _ranges(numbers: list[int]) -> str:
    """Write numbers as [0-3,6]."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "]"


def _size(tensors: dict[str, Described]) -> str:
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    types = sorted({_plain(tensor.dtype) for tensor in tensors.values()})
    return f"{len(tensors)} tensors, {count:,} values, {size / 2**20:,.1f} MiB, {', '.join(types)}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
