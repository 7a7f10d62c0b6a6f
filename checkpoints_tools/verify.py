"""Whether two stored models have the same weights: names, types, shapes, bits."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from checkpoints_tools.model import Stored, loaded, stored
from megarl.models import hf

SHOWN = 20


def verify(a: Path, b: Path) -> int:
    """0 if equal; else 1, with each difference printed."""
    with ExitStack() as stack:
        left, right = (_tensors(stored(path), stack) for path in (a, b))
        differences = compare(left, right)
    for line in differences[:SHOWN]:
        print(line)
    if len(differences) > SHOWN:
        print(f"… and {len(differences) - SHOWN} more")
    print(f"{len(differences)} differences" if differences else f"equal: {len(left)} tensors")
    return 1 if differences else 0


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """One line a difference."""
    lines = [f"{name}: only in the first" for name in sorted(a.keys() - b.keys())]
    lines += [f"{name}: only in the second" for name in sorted(b.keys() - a.keys())]
    for name in sorted(a.keys() & b.keys()):
        x, y = a[name], b[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            lines.append(f"{name}: {tuple(x.shape)} {x.dtype} against {tuple(y.shape)} {y.dtype}")
        elif not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):  # bits: a NaN equals itself, 0 is not -0
            unequal = (x != y).sum().item()
            lines.append(
                f"{name}: {unequal} of {x.numel()} values differ, by {(x.double() - y.double()).abs().max().item():.3g}"
            )
    return lines


def _tensors(source: Stored, stack: ExitStack) -> Mapping[str, Tensor]:
    """By Hugging Face name. A directory's are read when asked for, a checkpoint's are held."""
    if source.meta is None:
        return hf.Tensors(source.path, stack)
    with loaded(source) as (chunks, family, _):
        return {name: tensor.clone() for name, tensor in hf.export(chunks, family)}
