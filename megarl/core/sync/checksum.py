"""A 64-bit checksum of a parameter: the sum of its pieces' checksums, which may be
computed in any order, on any device.

    learner   q ──► checksum(q, 0) ─────────┐       server   qkv_proj
              v ──► checksum(v, |q| + |k|) ─┼─► +                │
              k ──► checksum(k, |q|) ───────┘   │                ▼
                                                └─ equal ─ checksum(qkv_proj)

The parameter's bytes are signed numbers x(0), x(1), …. Modulo 2^64,

    checksum = bytes · LENGTH + Σ x(i) · w(i)
    w(i) = column(i mod COLUMNS) · row(i div COLUMNS)

with fixed pseudo-random odd 64-bit columns and rows. To compute it, each column is
written as eight signed digits of base 256, so that one matrix product of 8-bit numbers,
for which CPUs and GPUs have instructions, reads the bytes once:

    bytes [rows, COLUMNS] int8 · digits [COLUMNS, 8] int8
        ──► [rows, 8] int32, exact: at most 2^26 ──► · 256^digit · row ──► Σ

On a GPU the product is cuBLASLt's, whose tensor-core kernels for 8-bit numbers take one
layout only, "TN": rows of bytes and columns of digits that lie contiguous (NVIDIA's
documentation of cublasLtMatmul, "To use IMMA kernels"; PyTorch's test__int_mm skips the
other layout on CUDA 13). Each process tries the product when it starts, and where it
fails, or is wrong, sums the same in 64-bit integers (`multiplies_exactly`).

What it detects. Let d(i) be the changes of the bytes and 2^t the largest power of two
that divides all of them; t is at most 7. A change of a single byte, even of one bit, is
always detected: |d| < 2^8 and w is odd, so d · w is no multiple of 2^64. Several
changed bytes of one row cancel only if Σ d(i) · column(i) = 0 modulo 2^64, which for
random odd columns has a probability of at most 2^-(63 - t); of several rows, 2^-(57 -
t), hence 2^-50. Swapped, shifted, repeated or lost values are such changes. LENGTH
makes the checksum of zero bytes depend on their number. An attacker can easily find
changes that cancel.
"""

import functools
import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

log = logging.getLogger(__name__)

COLUMNS = 4096
DIGITS = 8
WIDTH = 16
"""Columns of the matrix of digits, padded with zeros: with only 8, CPU and GPU take
slower paths.
"""
FEWEST_ROWS = 17
"""Fewest rows that a GPU multiplies in this way (torch._int_mm;
aten/src/ATen/native/cuda/Blas.cpp)."""
ALIGNED = 16
"""Bytes; on a GPU the address has to be a multiple of 4, and is fastest as a multiple
of this.
"""
PIECE = 64 << 20
"""Bytes that are summed, and before that copied to a device, at once: whole rows."""
INTEGER_ROWS = 1024
"""Rows that are summed in 64-bit integers at once, for which each byte becomes eight.
"""
TRIED_ROWS = 128
"""Rows of the numbers with which the product is tried."""
LENGTH = 0x1E3779B97F4A7C15
_COLUMNS = 1
_ROWS = 2
"""Seeds."""


def checksum(piece: Tensor, start: int = 0) -> Tensor:
    """Return the checksum [] int64, on its device, of a piece of any dtype that begins
    `start` bytes into its parameter.
    """
    data = _bytes(piece)
    total = _length_term(len(data), data.device)
    row, column = divmod(start, COLUMNS)  # where the next part begins in the parameter
    edge = min(-start % COLUMNS, len(data))  # bytes that complete a row begun before the piece
    in_rows = (len(data) - edge) // COLUMNS * COLUMNS  # bytes of whole rows after that
    for part in data.split([edge, in_rows, len(data) - edge - in_rows]):
        if len(part) == 0:
            continue
        if len(part) < COLUMNS:  # zeros on both sides make it a row, and add nothing
            part = pad(part, (column, COLUMNS - column - len(part)))
        for rows in part.view(-1, COLUMNS).split(PIECE // COLUMNS):
            keys = _row_keys(row + len(rows), data.device)[row:]
            total += _sum(rows, keys)
            row += len(rows)
        column = 0
    return total


def in_whole_rows(piece: Tensor, start: int) -> bool:
    """Return whether a piece that begins `start` bytes into its parameter can be summed
    by `checksum_together`: if it begins and ends with a row.
    """
    return start % COLUMNS == 0 and piece.nbytes % COLUMNS == 0


def checksum_together(pieces: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """Return the sum [] int64 of the checksums of several pieces of one parameter.

    To take no more operations than for one piece, it copies all pieces into one matrix.
    starts: where each begins in the parameter, in bytes. All are `in_whole_rows`.
    """
    rows_of_pieces = [_bytes(piece).view(-1, COLUMNS) for piece in pieces]
    first_rows = [start // COLUMNS for start in starts]
    device = pieces[0].device
    ends = [first + len(rows) for first, rows in zip(first_rows, rows_of_pieces, strict=True)]
    keys = _row_keys(max(ends), device)
    keys_of_pieces = [keys[first:end] for first, end in zip(first_rows, ends, strict=True)]
    length = sum(piece.nbytes for piece in pieces)
    sum_of_bytes = _sum(torch.cat(rows_of_pieces), torch.cat(keys_of_pieces))
    return _length_term(length, device) + sum_of_bytes


def checksum_on(device: torch.device, parameter: Tensor) -> Tensor:
    """Return the checksum [] of a parameter that is elsewhere, computed on `device`
    piece by piece.
    """
    data = _bytes(parameter)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, len(data), PIECE):
        total += checksum(data[start : start + PIECE].to(device, non_blocking=True), start)
    return total


def written(checksum: int) -> str:
    """Return 16 hexadecimal digits, as SGLang writes a checksum."""
    return f"{checksum % 2**64:016x}"


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes [n] int8. `as_strided` gives a view of one dimension
    whatever the tensor's own are, none included.
    """
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.int8)


def _length_term(count: int, device: torch.device) -> Tensor:
    """Return what the number of bytes adds to a checksum, count x LENGTH, [] int64."""
    # modulo 2^64, as a signed number
    signed = (count * LENGTH + 2**63) % 2**64 - 2**63
    return torch.full((), signed, dtype=torch.int64, device=device)


def _row_keys(rows: int, device: torch.device) -> Tensor:
    """Return the factors [rows] int64 of a parameter's first rows. A power of two of
    them is made at once, so that few lengths are cached.
    """
    return _odd(_ROWS, 1 << rows.bit_length(), device)[:rows]


def _sum(rows: Tensor, keys: Tensor) -> Tensor:
    """Return Σ x · w [] int64 over whole rows [rows, COLUMNS] int8. keys: the rows'
    factors [rows] int64.
    """
    if multiplies_exactly(rows.device):
        sums_of_rows = by_product(rows)
    else:
        sums_of_rows = by_integers(rows)
    return (sums_of_rows * keys).sum()


def by_product(rows: Tensor) -> Tensor:
    """Return Σ x · column [rows] int64 of each of these rows [rows, COLUMNS] int8, by a
    product of 8-bit numbers.
    """
    height = len(rows)
    if rows.is_cuda and (height < FEWEST_ROWS or rows.data_ptr() % ALIGNED):
        rows = pad(rows, (0, 0, 0, FEWEST_ROWS))  # a copy, which is aligned
    digits, place_values = _digits(rows.device)
    sums_of_digits = torch._int_mm(rows, digits)[:height, :DIGITS]
    return (sums_of_digits * place_values).sum(1)


def by_integers(rows: Tensor) -> Tensor:
    """Return what `by_product` returns, by arithmetic that every device has, in some
    times the time.
    """
    columns = _odd(_COLUMNS, COLUMNS, rows.device)
    return torch.cat([(part.long() * columns).sum(1) for part in rows.split(INTEGER_ROWS)])


@functools.cache
def multiplies_exactly(device: torch.device) -> bool:
    """Return whether products of 8-bit numbers are right on this device, which is tried
    once and takes some milliseconds; log why not. device: with its number if it is a
    GPU. A process calls this when it starts, so that no publication has to.
    """
    problem = _wrong_product(device)
    if problem:
        log.warning(
            "%s: checksums of weights are summed in 64-bit integers, which takes longer: %s",
            device,
            problem,
        )
    return not problem


def _wrong_product(device: torch.device) -> str:
    """Return what was wrong with a product on this device, or "" if all that were tried
    equal sums of integers on the CPU.
    """
    numbers = torch.arange(TRIED_ROWS * COLUMNS // 8) * LENGTH
    rows = numbers.view(torch.int8).view(TRIED_ROWS, COLUMNS)
    sums_of_rows = by_integers(rows)
    heights = [1, FEWEST_ROWS, TRIED_ROWS]
    if device.type == "cuda":  # where another size may be given to another kernel
        heights.append(PIECE // COLUMNS)
    try:
        for height in heights:
            repeats = -(-height // TRIED_ROWS)
            aligned = rows.to(device).repeat(repeats, 1)[:height]
            one_byte_later = torch.cat([aligned.new_zeros(1), aligned.flatten()])[1:]
            unaligned = one_byte_later.view(height, COLUMNS)
            expected = sums_of_rows.to(device).repeat(repeats)[:height]
            for tried in (aligned, unaligned):
                if not torch.equal(by_product(tried), expected):
                    return f"a product of {height} rows by torch._int_mm was wrong"
    except RuntimeError as error:
        return f"torch._int_mm: {str(error).splitlines()[0]}"
    return ""


@functools.cache
def _odd(seed: int, count: int, device: torch.device) -> Tensor:
    """Return the first odd numbers [count] int64 of a pseudo-random sequence."""
    numbers = np.random.PCG64(seed).random_raw(count).view(np.int64)
    return torch.from_numpy(numbers | 1).to(device)


@functools.cache
def _digits(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the columns' digits [COLUMNS, WIDTH] int8, of which each of the WIDTH
    columns is contiguous, and the digits' place values [DIGITS] int64.
    """
    quotients = np.random.PCG64(_COLUMNS).random_raw(COLUMNS) | np.uint64(1)
    digits = np.zeros((WIDTH, COLUMNS), np.int8)
    for n in range(DIGITS):
        # the lowest byte as a signed number; what is left is a multiple of 256
        digits[n] = quotients.astype(np.uint8).view(np.int8)
        quotients = (quotients - digits[n].astype(np.int64).view(np.uint64)) >> np.uint64(8)
    place_values = torch.tensor([256**n for n in range(DIGITS)], device=device)
    return torch.from_numpy(digits).to(device).t(), place_values
