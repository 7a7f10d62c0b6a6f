"""A 64-bit checksum of a parameter that is the sum of its pieces' checksums, in any order, on any device.

    learner   q ──► checksum(q, 0) ─────────┐              server   qkv_proj ──► checksum(qkv_proj)
              v ──► checksum(v, |q| + |k|) ─┼─► +                         ▲
              k ──► checksum(k, |q|) ───────┘   └──────── equal ──────────┘

The parameter's bytes are signed 32-bit words x(0), x(1), … (the last one filled up with zeros). Modulo 2^64,

    checksum = bytes · LENGTH + Σ x(i) · w(i)        w(i) = column(i mod COLUMNS) · row(i div COLUMNS)

with fixed pseudo-random odd 64-bit columns and rows. A piece that begins or ends inside a word has zeros for the rest of it,
and the sum is the same. Multiplication and addition of 64-bit integers wrap in the same way on a CPU and on a GPU.

How much it finds. Let d(i) be the changes of the words and 2^t the largest power of two that divides all of them; t is at most
31. One changed word, be it by a bit, is always found: |d| < 2^32 and w is odd, so d · w is no multiple of 2^64. Several
changed words of one row cancel only if Σ d(i) · column(i) = 0 modulo 2^64, which for random odd columns has a probability of
at most 2^-(63 - t). Changes in several rows can also cancel between them, and the sum over what rows may have in common makes
that 2^-(57 - t) at most. Words, rows or pieces that were swapped, shifted, repeated or lost are such changes, with t near 0; t
is 31 only if nothing but sign bits of words has changed, and then 2^-26 is left. Bytes that are all zero are known by LENGTH.
This guards against errors on the way. It keeps out nobody: changes that cancel are easy to compute.
"""

import functools

import numpy as np
import torch
from torch import Tensor

WORD = 4
COLUMNS = 4096
ROWS_AT_ONCE = {"cpu": 7, "cuda": 2048}
"""The products of so many rows, 32 KiB a row, are held at once. On a CPU they fit in its cache and are fewer than the 32,768
numbers from which on torch takes all threads: on a busy machine those wait for each other, and it took thirty times as long."""
LENGTH = 0x1E3779B97F4A7C15
_COLUMNS, _ROWS = 1, 2
"""Seeds."""


def checksum(piece: Tensor, start: int = 0) -> Tensor:
    """Return the checksum [] (int64, on its device) of a piece that begins `start` bytes into its parameter, of any type."""
    data = piece.detach().contiguous().as_strided((piece.numel(),), (1,)).view(torch.uint8)
    total = torch.full((), _signed(len(data) * LENGTH), dtype=torch.int64, device=data.device)
    if not len(data):  # a server may have such buffers
        return total
    before, after = start % WORD, -(start + len(data)) % WORD
    if before or after or data.storage_offset() % WORD:
        data = torch.cat([data.new_zeros(before), data, data.new_zeros(after)])
    words, first = data.view(torch.int32), start // WORD
    edge = min(-first % COLUMNS, len(words))  # the rest of a row that began before the piece
    whole = (len(words) - edge) // COLUMNS * COLUMNS
    for part in words.split([edge, whole, len(words) - edge - whole]):
        if len(part):
            total += _sum(part.view(-1, min(COLUMNS, len(part))), *divmod(first, COLUMNS))
            first += len(part)
    return total


def written(checksum: int) -> str:
    """Return 16 hexadecimal digits, as SGLang writes a checksum."""
    return f"{checksum % 2**64:016x}"


def _signed(value: int) -> int:
    """Return the int64 that is `value` modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63


def _sum(words: Tensor, row: int, column: int) -> Tensor:
    """Return Σ x · w [] of words [rows, columns], the first of which is at (row, column) of its parameter."""
    height, width = words.shape
    columns = _odd(_COLUMNS, COLUMNS, words.device)[column : column + width]
    rows = _odd(_ROWS, 1 << (row + height).bit_length(), words.device)[row : row + height]
    at_once = ROWS_AT_ONCE[words.device.type]
    sums = torch.cat([(part * columns).sum(1) for part in words.split(at_once)])
    return (sums * rows).sum()


@functools.cache
def _odd(seed: int, count: int, device: torch.device) -> Tensor:
    """Return the first `count` odd numbers [count] int64 of a pseudo-random sequence."""
    return torch.from_numpy(np.random.PCG64(seed).random_raw(count).view(np.int64) | 1).to(device)
