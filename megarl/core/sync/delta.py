"""The changes of a tensor, encoded in a few bytes and exact to the bit.

    old, new ──encode──► gaps between the changed elements, and by how much each changed ──► Huffman code
    held by a server ──add── decode ◄──┘

The bits of each element are compared and subtracted as an integer, modulo 2^bits, so
adding the difference to `old` gives `new` whatever the bits mean: a NaN, -0.0, an
infinity. Operations that only move elements (slices, transposes, shards) can be applied
to differences too, and zeros change nothing.

A gap of g elements is written as g div 255 bytes of 255 and one byte for the rest. A
difference is a byte, or 255 if it is too large; large ones are in a list. bf16 has 8
bits of mantissa, which a step of 5e-7 seldom reaches: at most about one element in a
hundred changes, and then by one. So a gap costs 8 bits and a difference 1
(benchmarks/README.md). zlib only exploits the frequencies of bytes, as there is no
other redundancy; its checksum (Adler-32) guards the bytes.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the size of an element in bytes."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""An encoded delta names its dtype by the index in this tuple."""
SUFFIX = ".delta"
"""Suffix of a tensor's name if only its delta is sent."""
LARGE = 255
WORD = 8
"""Bytes that are compared at once."""
PIECE = 1 << 24
"""Elements that are compared at once, on the new tensor's device: each changed one
takes 50 bytes of temporary memory.
"""


def encode(old: Tensor, new: Tensor) -> Tensor:
    """Return the delta from `old` to `new`, tensors of equal shape and type on any
    devices, as [bytes] uint8 on the CPU.
    """
    before, after = (_integers(tensor) for tensor in (old, new))
    parts: tuple[list[Tensor], ...] = ([], [], [])
    last = -1
    for start in range(0, max(1, len(before)), PIECE):
        was = before[start : start + PIECE].to(new.device)
        now = after[start : start + PIECE]
        where = _changed(was, now)
        gaps = torch.diff(where, prepend=where.new_tensor([last - start])) - 1
        ends = (gaps // LARGE + 1).cumsum(0)
        skips = torch.full(
            (int(ends[-1]) if len(ends) else 0,), LARGE, dtype=torch.uint8, device=where.device
        )
        skips[ends - 1] = (gaps % LARGE).byte()
        difference = now[where] - was[where]
        folded = (difference.long() << 1) ^ (
            difference.long() >> 63
        )  # 0, -1, 1, -2, … as 0, 1, 2, 3, …
        large = folded >= LARGE
        for part, piece in zip(
            parts, (difference[large], skips, folded.masked_fill(large, LARGE).byte()), strict=True
        ):
            part.append(piece.cpu())
        last = start + int(where[-1]) if len(where) else last
    numbers, skips, folded = map(torch.cat, parts)
    head = [DTYPES.index(new.dtype), len(skips), len(folded), *new.shape]
    coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    code = b""
    for part in (torch.tensor([len(head), *head]), numbers, skips, folded):
        code += coder.compress(part.numpy()) + coder.flush(
            zlib.Z_BLOCK
        )  # each part gets a Huffman code of its own
    return torch.frombuffer(bytearray(code + coder.flush()), dtype=torch.uint8)


def decode(code: Tensor) -> Tensor:
    """Return the differences in the tensor's type and shape, on the code's device.
    RuntimeError if the code is damaged.
    """
    try:
        data = torch.frombuffer(bytearray(zlib.decompress(code.cpu().numpy())), dtype=torch.uint8)
    except zlib.error as error:
        raise RuntimeError(f"a delta is damaged: {error}") from None
    size = 8 * (1 + int(data[:8].view(torch.int64)))
    number, skipped, changed, *shape = data[8:size].view(torch.int64).tolist()
    dtype = DTYPES[number]
    kind = INTEGERS[dtype.itemsize]
    raw = data[size:].to(code.device)
    list_, skips, folded = raw.split([len(raw) - skipped - changed, skipped, changed])
    where = (skips.long() + (skips < LARGE)).cumsum(0)[skips < LARGE] - 1
    folded = folded.long()
    difference = ((folded >> 1) ^ -(folded & 1)).to(kind)
    difference[folded == LARGE] = list_.view(kind)
    whole = torch.zeros(shape, dtype=kind, device=code.device)
    whole.view(-1)[where] = difference
    return whole.view(dtype)


def add(held: Tensor, difference: Tensor) -> None:
    """Add a decoded difference to the tensor that a server holds, in place; both are
    read as integers.
    """
    kind = INTEGERS[difference.itemsize]
    held.view(kind).add_(difference.to(held.device).view(kind))


def load(
    model: Module,
    loader: Callable[[Iterable[tuple[str, Tensor]]], object],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Load tensors with the model's own loader, which slices, joins and transposes
    deltas, too; they are added, not copied.
    """
    deltas = []

    def others() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name.endswith(SUFFIX):
                deltas.append((name.removesuffix(SUFFIX), tensor))
            else:
                yield name, tensor

    loader(others())
    if not deltas:
        return
    device = next(model.parameters()).device
    with _Adding(
        model
    ):  # one by one: codes are small, but all deltas, once decoded, are as large as the model
        loader((name, decode(code.to(device))) for name, code in deltas)


class _Adding(TorchDispatchMode):
    """A context in which tensors that would be copied into the model's parameters are
    added to them instead.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self._storages = {
            parameter.untyped_storage().data_ptr() for parameter in model.parameters()
        }

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            call is torch.ops.aten.copy_.default
            and args[0].untyped_storage().data_ptr() in self._storages
        ):
            add(args[0], args[1])
            return args[0]
        return call(*args, **kwargs or {})


def _integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor's elements as integers [elements], at an address that
    is a multiple of WORD.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.data_ptr() % WORD:
        flat = flat.clone()
    return flat.view(INTEGERS[tensor.itemsize])


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Return the indices where two tensors differ [changed] int64, ascending. Compares
    whole words first: most are equal.
    """
    many = WORD // before.itemsize
    whole = len(before) // many * many
    old, new = (tensor[:whole].view(torch.int64) for tensor in (before, after))
    words = torch.nonzero(old != new).view(-1)
    places = (words[:, None] * many + torch.arange(many, device=words.device)).view(-1)
    inside = places[old[words].view(before.dtype) != new[words].view(before.dtype)]
    rest = torch.nonzero(before[whole:] != after[whole:]).view(-1) + whole
    return torch.cat([inside, rest])
