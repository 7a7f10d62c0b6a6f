"""Shows what a directory holds: architecture, size, step, recipe, the layout with which
it was written, and a tree of tensors in which equal siblings share a line.

decoder
  layers.[0-31]
    mlp.down_proj.weight   [4096, 14336] bfloat16  117.4 MB
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import yaml

from checkpoints_tools.card import run_of
from checkpoints_tools.safetensors_files import Directory
from checkpoints_tools.shards import OPTIMIZER, Shards, StoredTensor
from checkpoints_tools.stored import StoredModel, stored
from megarl.core.base import terminal
from megarl.core.base.config_values import names
from megarl.core.base.hf_files import read_config
from megarl.core.base.model_directory import unusable
from megarl.core.models.region import Region, Shape

type Tree = dict[str, Tree | str]
"""Descriptions of tensors by the components of their names."""


def inspect(directory: Path, every_tensor: bool) -> None:
    """Print what a directory holds, without reading weights. every_tensor: one line for
    each tensor instead of the tree.
    """
    model = stored(directory)
    config = read_config(model.hf_dir)
    terminal.say(model.path)
    terminal.say(f"  architecture  {', '.join(names(config)) or 'unknown'}")
    tensors: Mapping[str, Region | StoredTensor]
    tensors = Directory(model.path).regions if model.meta is None else Shards(model.path).tensors
    if model.meta is not None:
        layout = []
        for key, value in model.meta.model.items():
            if key.endswith("_parallel") and value not in (1, False):
                layout.append(f"{key}={value}")
        optimizer = {name: tensors[name] for name in tensors if name.startswith(OPTIMIZER)}
        tensors = {name: tensors[name] for name in tensors if name not in optimizer}
        terminal.say(
            f"  checkpoint    step {model.meta.step}, weights of version {model.meta.version}"
        )
        terminal.say(f"  made from     {model.meta.hf_source}")
        terminal.say(f"  recipe        {_recipe(model)}")
        terminal.say(f"  written at    {', '.join(layout) or 'one rank per copy'}")
        terminal.say(f"  optimiser     {_size(optimizer) if optimizer else 'none'}")
    terminal.say(f"  weights       {_size(tensors)}")
    if model.meta is None and (problem := unusable(model.path)):
        terminal.say(f"  unusable      {problem}")
    described = {name: _described(tensor) for name, tensor in tensors.items()}
    lines = _lines(_tree(described))
    if every_tensor:
        lines = [f"{name}  {text}" for name, text in sorted(described.items())]
    for line in lines:
        terminal.say(f"  {line}")


def _described(tensor: Region | StoredTensor) -> str:
    """Return a tensor's shape, type, size, and file; for a checkpoint, instead of the
    file, the number of its pieces and the shape of the first.
    """
    if isinstance(tensor, Region):
        place = tensor.path.name
    else:
        _, sizes = tensor.boxes[0]
        place = f"{len(tensor.boxes)} x {list(sizes)}"
    return f"{list(tensor.shape)} {_plain(tensor.dtype)}  {tensor.nbytes / 1e6:,.1f} MB  {place}"


def _recipe(model: StoredModel) -> str:
    """Return the path of the run's recipe and the run's name, if there is a run."""
    run = run_of(model.path)
    if run is None:
        return "none: not in a run directory"
    recipe = yaml.safe_load(run.recipe.read_text()) or {}
    return f"{run.recipe}: {recipe.get('run', {}).get('name')}"


def _tree(described: Mapping[str, str]) -> Tree:
    """Return descriptions, by tensors' names, as a tree. If a name is also that of a
    folder of others, as `a` beside `a.b`, the tensor stands in the root.
    """
    root: Tree = {}
    folders = set()
    for name in described:
        folders |= {name[:at] for at, letter in enumerate(name) if letter == "."}
    for name, text in described.items():
        *path, leaf = [name] if name in folders else name.split(".")
        node = root
        for component in path:
            child = node.setdefault(component, {})
            assert isinstance(child, dict)  # no tensor, as these stand in the root
            node = child
        node[leaf] = text
    return root


def _lines(node: Tree, indent: str = "") -> list[str]:
    """Return the tree's lines. Equal numbered siblings share a line, and a node with
    one child is joined with it.
    """
    lines: list[str] = []
    for name, child in _merged(node):
        while isinstance(child, dict) and len(grandchildren := _merged(child)) == 1:
            ((only_name, child),) = grandchildren
            name = f"{name}.{only_name}"
        if isinstance(child, dict):
            lines += [f"{indent}{name}", *_lines(child, indent + "  ")]
        else:
            lines.append(f"{indent}{name}  {child}")
    return lines


def _merged(node: Tree) -> list[tuple[str, Tree | str]]:
    """Return the children by name. Numbered ones that differ at most in the files of
    their tensors are merged into one, with a name such as [0-3,6].
    """
    equal_children: dict[str, list[str]] = {}
    for name, child in node.items():
        kind = name
        if name.isdigit():
            kind = re.sub(r"[\w.-]+\.safetensors", "", repr(child))
        equal_children.setdefault(kind, []).append(name)
    merged = []
    for children in equal_children.values():
        name = children[0]
        if len(children) > 1:
            name = _ranges(sorted(map(int, children)))
        merged.append((name, node[children[0]]))
    return merged


def _ranges(numbers: list[int]) -> str:
    """Write ascending numbers as [0-3,6]."""
    ranges: list[list[int]] = []  # [first, last] of each
    for n in numbers:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return f"[{','.join(texts)}]"


def _size(tensors: Mapping[str, Shape]) -> str:
    """Return the number of tensors, their values and bytes, and their types."""
    count = sum(math.prod(tensor.shape) for tensor in tensors.values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    types = sorted({_plain(tensor.dtype) for tensor in tensors.values()})
    return f"{len(tensors)} tensors, {count:,} values, {size / 2**20:,.1f} MiB, {', '.join(types)}"


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
