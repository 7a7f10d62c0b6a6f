"""The changes of a tensor, encoded in a few bytes and exact to the bit.

    old, new ──encode──► gaps between the changed elements, and by how much each changed
                             ──► Huffman code ──decode──► add to what a server holds

The bits of each element are compared and subtracted as an integer, modulo 2^bits, so
adding the difference to `old` gives `new` whatever the bits mean: a NaN, -0.0, an
infinity. Operations that only move elements (slices, transposes, shards) can be applied
to differences too, and zeros change nothing.

A gap of g elements is written as g div 255 bytes of 255 and one byte for the rest. A
difference is a byte, or 255 if it is too large; large ones are in a list. bf16 has 8
bits of mantissa, which a step of 5e-7 seldom reaches: at most about one element in a
hundred changes, and then by one. So a gap costs 8 bits and a difference 1
(benchmarks/publication.md). zlib only exploits the frequencies of bytes, as there is no
other redundancy; its checksum (Adler-32) guards the bytes.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
    old_numbers = _integers(old)
    new_numbers = _integers(new)
    pieces = []
    last_change = -1
    for start in range(0, max(1, len(old_numbers)), PIECE):
        old_piece = old_numbers[start : start + PIECE].to(new.device)
        new_piece = new_numbers[start : start + PIECE]
        changes = _changed(old_piece, new_piece)
        gaps = torch.diff(changes, prepend=changes.new_tensor([last_change - start])) - 1
        pieces.append(_encoded_piece(gaps, new_piece[changes] - old_piece[changes]))
        if len(changes):
            last_change = start + int(changes[-1])
    large = torch.cat([piece.large for piece in pieces])
    gaps = torch.cat([piece.gaps for piece in pieces])
    small = torch.cat([piece.small for piece in pieces])
    head = [DTYPES.index(new.dtype), len(gaps), len(small), *new.shape]
    coder = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    code = b""
    for part in (torch.tensor([len(head), *head]), large, gaps, small):
        code += coder.compress(part.numpy())
        code += coder.flush(zlib.Z_BLOCK)  # each part gets a Huffman code of its own
    return torch.frombuffer(bytearray(code + coder.flush()), dtype=torch.uint8)


class _EncodedPiece(NamedTuple):
    """The changes of PIECE elements, on the CPU. large: differences that need more than
    a byte, in the tensor's integer type. gaps, small: bytes.
    """

    large: Tensor
    gaps: Tensor
    small: Tensor


def _encoded_piece(gaps: Tensor, differences: Tensor) -> _EncodedPiece:
    """Encode the gaps before changes and their differences [changed]."""
    ends = (gaps // LARGE + 1).cumsum(0)
    size = int(ends[-1]) if len(ends) else 0
    gap_bytes = torch.full((size,), LARGE, dtype=torch.uint8, device=gaps.device)
    gap_bytes[ends - 1] = (gaps % LARGE).byte()
    signed = differences.long()
    folded = (signed << 1) ^ (signed >> 63)  # 0, -1, 1, -2, … as 0, 1, 2, 3, …
    is_large = folded >= LARGE
    small = folded.masked_fill(is_large, LARGE).byte()
    return _EncodedPiece(differences[is_large].cpu(), gap_bytes.cpu(), small.cpu())


def decode(code: Tensor) -> Tensor:
    """Return the differences in the tensor's type and shape, on the code's device.
    RuntimeError if the code is damaged.
    """
    try:
        data = torch.frombuffer(bytearray(zlib.decompress(code.cpu().numpy())), dtype=torch.uint8)
    except zlib.error as error:
        raise RuntimeError(f"a delta is damaged: {error}") from None
    size = 8 * (1 + int(data[:8].view(torch.int64)))
    dtype_index, gap_bytes, changes, *shape = data[8:size].view(torch.int64).tolist()
    dtype = DTYPES[dtype_index]
    integer = INTEGERS[dtype.itemsize]
    parts = data[size:].to(code.device)
    large, gaps, small = parts.split([len(parts) - gap_bytes - changes, gap_bytes, changes])
    ends_gap = gaps < LARGE
    indices = (gaps.long() + ends_gap).cumsum(0)[ends_gap] - 1
    folded = small.long()
    changed = ((folded >> 1) ^ -(folded & 1)).to(integer)
    changed[folded == LARGE] = large.view(integer)
    difference = torch.zeros(shape, dtype=integer, device=code.device)
    difference.view(-1)[indices] = changed
    return difference.view(dtype)


def add(parameter: Tensor, difference: Tensor) -> None:
    """Add a decoded difference to a server's parameter, in place; both are read as
    integers.
    """
    integer = INTEGERS[difference.itemsize]
    parameter.view(integer).add_(difference.to(parameter.device).view(integer))


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
    # One by one: codes are small, but all deltas, once decoded, are as large as the
    # model.
    with _Adding(model):
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


def _changed(old: Tensor, new: Tensor) -> Tensor:
    """Return the indices where two tensors differ [changed] int64, ascending. Compares
    whole words first: most are equal.
    """
    word_elements = WORD // old.itemsize
    end = len(old) // word_elements * word_elements  # of the last whole word
    old_words = old[:end].view(torch.int64)
    new_words = new[:end].view(torch.int64)
    words = torch.nonzero(old_words != new_words).view(-1)
    offsets = torch.arange(word_elements, device=words.device)
    candidates = (words[:, None] * word_elements + offsets).view(-1)
    differ = old_words[words].view(old.dtype) != new_words[words].view(old.dtype)
    after_words = torch.nonzero(old[end:] != new[end:]).view(-1) + end
    return torch.cat([candidates[differ], after_words])
