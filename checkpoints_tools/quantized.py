"""Converts Hugging Face directories from FP8 or MXFP4 to bf16. The stored tensors, and
the numbers that they represent:

fp8     NAME E4M3 [rows, columns], NAME_scale_inv a scale per block of it (DeepSeek-V3,
        arXiv 2412.19437, section 3.3)
        E4M3 * scale
mxfp4   NAME_blocks U8 [experts, rows, groups, 16], two E2M1 per byte, lower bits first;
        NAME_scales U8 [experts, rows, groups]
        E2M1 * 2^(scale - 127) (OCP Microscaling Formats 1.0); NAME [experts, columns,
        rows] is the transpose of that (gpt-oss)

Products are rounded to bf16 once. All other tensors are copied bit for bit. One tensor,
or one expert of a stacked tensor, is in memory at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from checkpoints_tools.convert import FILE_BYTES, write_tensors
from checkpoints_tools.partial import identity, refuse_existing, writing
from checkpoints_tools.safetensors_files import Directory
from checkpoints_tools.stored import TensorGroup
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_config
from megarl.core.base.model_directory import few
from megarl.core.models.hf import copy_description
from megarl.core.models.region import Region, Shape

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.bfloat16)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], 1)
"""[256, 2]: the two numbers in each byte."""
SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
"""Types of the scales of FP8 numbers; the last is powers of 2 (`scale_fmt: ue8m0`)."""
ENDINGS = ("_scale_inv", "_blocks", "_scales")
QUANTIZED = (
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


class WrittenTensor(NamedTuple):
    """A tensor to be written. values: yields its entries along dimension 0 one by one,
    or the whole tensor as the only one.
    """

    shape: Shape
    values: Callable[[], Iterable[Tensor]]


def dequantize(source: Path, destination: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write the directory `source`, whose weights are FP8 or MXFP4, as `destination` in
    bf16.
    """
    quantization = read_config(source).get("quantization_config")
    if not isinstance(quantization, dict):
        raise MegarlError(
            f"{source}: not quantised (no quantization_config in its config.json); use it as it is"
        )
    refuse_existing(destination)
    tensors = planned(source, Directory(source).regions, quantization)

    def values(group: TensorGroup) -> Iterator[tuple[str, int, Tensor]]:
        """Yield a group's values, as `write_tensors` asks for them."""
        for name in group.tensors:
            for entry, value in enumerate(tensors[name].values()):
                if not value.isfinite().all():
                    raise MegarlError(
                        f"{source}: {name} is not finite: its numbers or scales are damaged; fetch"
                        " it again"
                    )
                yield name, entry, value

    with writing(destination, identity("dequantize", source, file_bytes=file_bytes)) as unfinished:
        write_tensors(
            unfinished,
            [TensorGroup((), {name: t.shape}) for name, t in tensors.items()],
            values,
            file_bytes,
        )
        copy_description(source, unfinished.path, torch.bfloat16)


def planned(
    source: Path, stored: Mapping[str, Region], quantization: dict[str, Any]
) -> dict[str, WrittenTensor]:
    """Return the tensors to write, by name. A MegarlError lists all tensors that do not
    fit together.
    """
    method = quantization.get("quant_method")
    block: list[int] | None = None  # as for `_misshapen`
    pairs: dict[str, tuple[str, str]] = {}  # by the name to write: names of numbers and scales
    if method == "fp8":
        block = _block_size(source, quantization)
        for name, region in stored.items():
            if region.dtype == torch.float8_e4m3fn:
                pairs[name] = (name, f"{name}_scale_inv")
    elif method == "mxfp4":
        stacks = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
        pairs = {name: (f"{name}_blocks", f"{name}_scales") for name in stacks}
    else:
        raise MegarlError(
            f"{source}: quant_method {method!r} in config.json: only fp8 and mxfp4 can be converted"
        )
    problems = [] if pairs else [f"no tensor is {method}"]
    weights: dict[str, WrittenTensor] = {}
    for name, (numbers, scales) in pairs.items():
        if scales not in stored:
            problems.append(f"{scales} is missing")
        elif wrong := _misshapen(stored[numbers], stored[scales], block):
            problems.append(f"{numbers} {wrong}")
        elif block is None:
            weights[name] = _from_mxfp4(stored[numbers], stored[scales])
        else:
            weights[name] = _from_fp8(stored[numbers], stored[scales], *block)
    in_pairs = {part for pair in pairs.values() for part in pair}
    for name in sorted(stored.keys() - in_pairs):
        region = stored[name]
        weights[name] = _untouched(region)
        if region.dtype in QUANTIZED or name.endswith(ENDINGS):
            problems.append(f"{name} has no counterpart")
    if problems:
        raise MegarlError(
            f"{source}: weights do not fit quant_method {method} in config.json: {few(problems)}"
        )
    return dict(sorted(weights.items()))


def _block_size(source: Path, quantization: dict[str, Any]) -> list[int]:
    """Return [rows, columns] of the blocks of FP8 numbers that share a scale.
    MegarlError if config.json has none.
    """
    block = quantization.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2:
        if all(isinstance(n, int) and n > 0 for n in block):
            return block
    raise MegarlError(
        f"{source}: weight_block_size {block!r} in config.json: only block scales can be converted"
    )


def _untouched(region: Region) -> WrittenTensor:
    """Return a tensor that is copied bit for bit."""
    return WrittenTensor(region, lambda: [region.tensor()])


def _misshapen(numbers: Region, scales: Region, block: list[int] | None) -> str:
    """Return what is wrong with the shapes and types of a pair of numbers and scales,
    "" if nothing is. block: the block's size for FP8; None for MXFP4.
    """
    if block is None:
        has_types = numbers.dtype == scales.dtype == torch.uint8
        is_right = has_types and len(numbers.shape) == 4 and numbers.shape[3] == 16
        scales_shape = numbers.shape[:-1]
    else:
        is_right = len(numbers.shape) == 2 and scales.dtype in SCALES
        # One scale a block; blocks at the ends may be smaller.
        scales_shape = tuple(-(-n // size) for n, size in zip(numbers.shape, block, strict=False))
    if is_right and scales.shape == scales_shape:
        return ""
    return f"is {_type_and_shape(numbers)} with scales {_type_and_shape(scales)}"


def _type_and_shape(region: Region) -> str:
    dtype = str(region.dtype).removeprefix("torch.")
    return f"{dtype} {list(region.shape)}"


def _from_fp8(numbers: Region, scales: Region, rows: int, columns: int) -> WrittenTensor:
    """Multiply E4M3 numbers, a matrix, by the scales of their blocks of `rows` x
    `columns`, a matrix of one scale per block.
    """

    def values() -> Iterator[Tensor]:
        weights = torch.empty(numbers.shape, dtype=torch.bfloat16)
        strips = numbers.tensor().split(rows)  # a row of blocks each, as of `weights`
        strip_scales = scales.tensor().float()
        for strip, scale, target in zip(strips, strip_scales, weights.split(rows), strict=True):
            factors = scale.repeat_interleave(columns)  # the last block may be narrower
            target.copy_(strip.float() * factors[: numbers.shape[1]])
        yield weights

    return WrittenTensor(Shape(numbers.shape, torch.bfloat16), values)


def _from_mxfp4(numbers: Region, scales: Region) -> WrittenTensor:
    """Multiply numbers [experts, rows, groups, 16] by scales [experts, rows, groups]
    into [experts, groups * 32, rows].
    """
    experts, rows, groups, _ = numbers.shape

    def values() -> Iterator[Tensor]:
        for blocks, exponents in zip(numbers.tensor(), scales.tensor(), strict=True):
            factors = torch.ldexp(torch.ones(()), exponents.int() - 127).bfloat16()
            values_of_groups = _PAIRS[blocks.int()].flatten(-2)  # [rows, groups, 32]
            values_of_groups.mul_(factors[..., None])
            yield values_of_groups.flatten(1).T

    return WrittenTensor(Shape((experts, groups * 32, rows), torch.bfloat16), values)
