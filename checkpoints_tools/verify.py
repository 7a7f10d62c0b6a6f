"""Checks whether two stored models are the same: names, types, shapes, bits; and, on
request, their logits.

Tensors are compared one at a time. Logits need one whole model in memory and are
computed in float32: those of a checkpoint by megatron, those of a Hugging Face
directory by transformers.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checkpoints_tools.layout import WHOLE
from checkpoints_tools.stored import StoredModel, stored, tensors_of
from megarl.core.base import terminal
from megarl.core.base.architecture import in_directory
from megarl.core.base.model_directory import few, unusable
from megarl.core.models import build, checkpoint, parallel
from megarl.core.models.region import is_finite

SHOWN = 20
PROMPT_TOKENS = 64
LOGITS_TOLERANCE = 1e-4
"""Relative to the largest logit. It allows for float32 operations in another order;
bf16 weights are converted exactly.
"""
TIMEOUT_S = 60.0


def verify(a: Path, b: Path, prompts: int = 0) -> int:
    """Return 0 if both are equal and usable, else 1; print the differences and what is
    wrong. prompts: random prompts whose logits are compared, too.
    """
    sides = stored(a), stored(b)
    # A checkpoint has only what is trained, so a directory is compared in that alone.
    are_directories = all(side.meta is None for side in sides)
    first, second = (tensors_of(side, everything=are_directories) for side in sides)
    differences = list(compare(first, second))
    for line in differences[:SHOWN]:
        terminal.say(line)
    if len(differences) > SHOWN:
        terminal.say(f"… and {len(differences) - SHOWN} more")
    terminal.say(
        f"{len(differences)} differences" if differences else f"equal: {len(first)} tensors"
    )
    problems = {side.path: unusable(side.path) for side in sides if side.meta is None}
    broken = [f"{path}: {problem}" for path, problem in problems.items() if problem]
    broken += _not_finite(a, first)
    if differences:  # else the second has the same values
        broken += _not_finite(b, second)
    for line in dict.fromkeys(broken):  # each once, also if both paths are the same
        terminal.say(line)
    agree = _logits_agree(*sides, prompts) if prompts else True
    return 0 if agree and not differences and not broken else 1


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield one line for each difference. Values are compared by their bits, so that a
    NaN equals itself.
    """
    yield from (f"{name}: only in the first" for name in sorted(a.keys() - b.keys()))
    yield from (f"{name}: only in the second" for name in sorted(b.keys() - a.keys()))
    for name in (name for name in a if name in b):
        x = a[name]
        y = b[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"{name}: {tuple(x.shape)} {x.dtype} against {tuple(y.shape)} {y.dtype}"
        elif not torch.equal(_bytes_of(x), _bytes_of(y)):
            yield _difference(name, x, y)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _not_finite(path: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a line that names the tensors with values that are NaN or infinite, if
    there are any.
    """
    names = [name for name in tensors if not is_finite(tensors[name])]
    return [f"{path}: NaN or infinite values in {few(names, ', ')}"] if names else []


def _difference(name: str, x: Tensor, y: Tensor) -> str:
    """Return a line on how many values differ, and by how much at most."""
    unequal = 0
    largest = 0.0
    # In pieces, because the differences in double precision take much memory. A
    # parameter's views need not be contiguous.
    pieces_of_x = x.reshape(-1).split(1 << 24)
    pieces_of_y = y.reshape(-1).split(1 << 24)
    for piece_of_x, piece_of_y in zip(pieces_of_x, pieces_of_y, strict=True):
        unequal += int((piece_of_x != piece_of_y).sum())
        differences = (piece_of_x.double() - piece_of_y.double()).abs()
        largest = max(largest, differences.max().item())
    return f"{name}: {unequal} of {x.numel()} values differ, by {largest:.3g}"


def _logits_agree(a: StoredModel, b: StoredModel, prompts: int) -> bool:
    """Return whether the logits of random prompts agree within LOGITS_TOLERANCE, and
    print by how much they differ. Models of different vocabularies do not agree.
    """
    vocabulary = in_directory(a.hf_dir).vocabulary
    second_vocabulary = in_directory(b.hf_dir).vocabulary
    if vocabulary != second_vocabulary:
        terminal.say(
            f"logits cannot be compared: the vocabularies have {vocabulary} and"
            f" {second_vocabulary} tokens"
        )
        return False
    generator = torch.Generator().manual_seed(0)  # the same prompts each time
    tokens = torch.randint(vocabulary, (prompts, PROMPT_TOKENS), generator=generator)
    logits_a = _logits(a, tokens)
    logits_b = _logits(b, tokens)
    largest = logits_a.abs().max().item()
    difference = (logits_a - logits_b).abs().max().item()
    terminal.say(
        f"logits of {prompts} random prompts of {PROMPT_TOKENS} tokens differ by {difference:.3g},"
        f" the largest is {largest:.3g}"
    )
    return difference <= LOGITS_TOLERANCE * max(1.0, largest)


@torch.no_grad()
def _logits(side: StoredModel, tokens: Tensor) -> Tensor:
    """Return logits [prompts, tokens, vocabulary] float32: a directory's by
    transformers, a checkpoint's by megatron in a process group of this process alone.
    """
    if side.meta is None:
        reference = AutoModelForCausalLM.from_pretrained(
            side.path, dtype=torch.float32, trust_remote_code=False
        )
        return torch.cat([reference(prompt[None]).logits for prompt in tokens])
    model = WHOLE.section(side.hf_dir, "fp32")
    parallel.start(model, seed=0, timeout_s=TIMEOUT_S)
    try:
        chunks = build.build(model, side.hf_dir)
        checkpoint.load_model(side.path, chunks)
        chunk = chunks[0].eval()
        on_device = tokens.to(next(chunk.parameters()).device)
        return torch.cat([chunk(prompt[None], None, None).cpu() for prompt in on_device])
    finally:
        parallel.stop()
