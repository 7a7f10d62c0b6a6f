"""Sequences -> the tensors of one micro-batch on one rank.

    packed     one row of sequences end to end    [1, sum of lengths]      attention is kept apart by cu_seqlens
    unpacked   one sequence a row                 [sequences, longest]     causal attention never looks at padding behind

Lengths are rounded up to what the layout needs: a sequence to 2 x CP (each context-parallel rank takes the r-th chunk from the
front and from the back), a row to TP under sequence parallelism and to what FP8 products divide by, all micro-batches of a
step to one size when stages pass them on. `plan` depends on lengths alone, so every rank makes the same.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.core.algorithm.batch import PerToken, TrainSequence
from megarl.core.algorithm.packing import BY_TOKENS, Cost, pack


@dataclass(frozen=True)
class Layout:
    """What of the model's layout micro-batches depend on."""

    packing: bool
    data_parallel: int
    context_parallel: int = 1
    context_rank: int = 0
    sequence_shards: int = 1  # TP under sequence parallelism
    pipeline_parallel: int = 1
    virtual_pipeline_parallel: int = 1
    token_multiple: int = 1  # of the tokens that a rank's layers take at once

    @property
    def sequence_multiple(self) -> int:
        return 2 * self.context_parallel if self.context_parallel > 1 else 1

    @property
    def row_multiple(self) -> int:
        return lcm(self.sequence_multiple, self.context_parallel * self.sequence_shards * self.token_multiple)


@dataclass(frozen=True)
class Plan:
    """Which sequences go where: members[data-parallel rank][micro-batch][i]; `rows` x `length` is a micro-batch's least size
    before it is divided among context-parallel ranks."""

    members: list[list[list[int]]]
    rows: int
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """tokens [rows, length / CP]; padding, likewise: True where there is no token of a sequence; sequence_tokens: how many of
    those there are on all context-parallel ranks. The n trained tokens of this rank: `at` [n] indexes [length * rows] (as
    hidden states lie) where each is predicted; `labels` [n]; behaviour, reference (0 without one), advantage, value,
    value_target, weight [n] float32, as in TrainSequence; counted [n] is 0 for the filler that stands in when there is none,
    else 1; `of` [n]: which token of the sequences put end to end, for those that ask per token. Of each sequence (of one, if
    there is none): `here` int64, how many of the n are its; `lengths` float32, its trained tokens on all context-parallel
    ranks. experts [length / CP * rows, layers with experts, experts a token] int16, as hidden states lie, -1 where the model
    chooses itself; None if it does so throughout."""

    tokens: Tensor
    padding: Tensor
    sequence_tokens: int
    packed: PackedSeqParams | None
    at: Tensor
    labels: Tensor
    behaviour: Tensor
    reference: Tensor
    advantage: Tensor
    value: Tensor
    value_target: Tensor
    weight: Tensor
    counted: Tensor
    of: np.ndarray
    here: Tensor
    lengths: Tensor
    experts: Tensor | None = None


def plan(lengths: Sequence[int], max_tokens: int, layout: Layout, cost: Cost = BY_TOKENS) -> Plan:
    """Balanced micro-batches of at most `max_tokens` tokens (padding of a row counted only when not packing)."""
    padded = [_up(n, layout.sequence_multiple) for n in lengths]
    longest = _up(max(padded), layout.row_multiple)
    if layout.packing:
        members = pack(padded, max_tokens, layout.data_parallel, cost, one_size=layout.pipeline_parallel > 1)
    else:
        members = pack([longest] * len(padded), max(max_tokens, longest), layout.data_parallel)
    if layout.virtual_pipeline_parallel > 1:  # the interleaved schedule works through groups of PP micro-batches
        for microbatches in members:
            microbatches += [[] for _ in range(-len(microbatches) % layout.pipeline_parallel)]
    if layout.pipeline_parallel == 1:
        return Plan(members, rows=1, length=layout.row_multiple)
    everything = [m for microbatches in members for m in microbatches]
    if layout.packing:
        return Plan(members, 1, _up(max(sum(padded[i] for i in m) for m in everything), layout.row_multiple))
    return Plan(members, max(len(m) for m in everything), longest)


def assemble(
    sequences: Sequence[TrainSequence], rows: int, length: int, layout: Layout, device: torch.device
) -> MicroBatch:
    """This rank's tensors of a micro-batch of these sequences (none: filler only), of at least `rows` x `length`."""
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    boundaries, place, at = (_packed if layout.packing else _unpacked)(lengths, rows, length, layout)
    tokens, padding = np.zeros(boundaries[-1], dtype=np.int64), np.ones(boundaries[-1], dtype=np.bool_)
    weight = _joined([s.loss_weight for s in sequences], np.float32)
    trained = np.flatnonzero(weight)
    which = np.repeat(np.arange(len(sequences)), lengths)
    trained_lengths = np.bincount(which[trained], minlength=max(len(sequences), 1))
    ids = _joined([s.tokens for s in sequences], np.int64)
    tokens[place], padding[place] = ids, False
    at = at[trained]
    here = trained_lengths
    mine = None
    if layout.context_parallel > 1:
        mine = _zigzag(boundaries, layout)
        trained, at = trained[mine[at]], (np.cumsum(mine) - 1)[at[mine[at]]]
        tokens, padding = tokens[mine], padding[mine]
        here = np.bincount(which[trained], minlength=len(trained_lengths))
    counted = np.ones(len(trained), np.float32)
    if not len(trained):
        # Empty tensors would need care in every collective; one position of no weight needs none.
        at, counted = np.zeros(1, np.int64), np.zeros(1, np.float32)
        here = (np.arange(len(here)) == 0).astype(np.int64)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values if len(trained) else np.zeros(1, values.dtype)).to(device, non_blocking=True)

    def each(values: Iterable[PerToken]) -> Tensor:
        return tensor(
            _joined([np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)], np.float32)[trained]
        )

    rows = 1 if layout.packing else len(boundaries) - 1
    return MicroBatch(
        tokens=torch.from_numpy(tokens).to(device).view(rows, -1),
        padding=torch.from_numpy(padding).to(device).view(rows, -1),
        sequence_tokens=len(ids),
        packed=_packed_parameters(boundaries, device) if layout.packing else None,
        at=torch.from_numpy(at).to(device),
        labels=tensor(ids[trained]),
        behaviour=tensor(_joined([s.behaviour_logprobs for s in sequences], np.float32)[trained]),
        reference=tensor(_joined([s.reference for s in sequences], np.float32)[trained]),
        advantage=each(s.advantage for s in sequences),
        value=each(s.value for s in sequences),
        value_target=each(s.value_target for s in sequences),
        weight=tensor(weight[trained]),
        counted=torch.from_numpy(counted).to(device),
        of=trained,
        here=torch.from_numpy(here).to(device),
        lengths=torch.from_numpy(np.maximum(trained_lengths, 1).astype(np.float32)).to(device),
        experts=_experts(sequences, boundaries, place, mine, layout, device),
    )


def _packed(lengths: np.ndarray, rows: int, length: int, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Boundaries of the sequences in the row; of each token its place in the row, and that of the hidden state before it."""
    padded = -(-lengths // layout.sequence_multiple) * layout.sequence_multiple
    starts = np.concatenate([[0], np.cumsum(padded)])
    size = max(length, _up(int(starts[-1]), layout.row_multiple))
    boundaries = (
        starts if size == starts[-1] else np.append(starts, size)
    )  # the rest of the row is a sequence of its own
    place = np.repeat(starts[:-1], lengths) + _within(lengths)
    return boundaries, place, place - 1


def _unpacked(lengths: np.ndarray, rows: int, length: int, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same for one sequence a row; hidden states lie [length, rows]."""
    rows = max(rows, len(lengths))
    length = max(length, _up(int(lengths.max(initial=1)), layout.row_multiple))
    row, column = np.repeat(np.arange(len(lengths)), lengths), _within(lengths)
    return np.arange(rows + 1) * length, row * length + column, (column - 1) * rows + row


def _experts(
    sequences: Sequence[TrainSequence],
    boundaries: np.ndarray,
    place: np.ndarray,
    mine: np.ndarray | None,
    layout: Layout,
    device: torch.device,
) -> Tensor | None:
    """Recorded choices at the places of their tokens."""
    recorded = [
        (start, s.experts) for start, s in zip(_starts(sequences), sequences, strict=True) if s.experts is not None
    ]
    if not recorded:
        return None
    table = np.full((boundaries[-1], *recorded[0][1].shape[1:]), -1, np.int16)
    for start, experts in recorded:
        table[place[start : start + len(experts)]] = experts
    if mine is not None:
        table = table[mine]
    if not layout.packing:  # hidden states lie [length, rows]
        table = table.reshape(len(boundaries) - 1, -1, *table.shape[1:]).swapaxes(0, 1).reshape(table.shape)
    return torch.from_numpy(table).to(device)


def _starts(sequences: Sequence[TrainSequence]) -> list[int]:
    """Of each sequence among all tokens end to end."""
    return list(itertools.accumulate((len(s) for s in sequences), initial=0))[:-1]


def _within(lengths: np.ndarray) -> np.ndarray:
    """0 … n-1 for each length n, end to end."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _zigzag(boundaries: np.ndarray, layout: Layout) -> np.ndarray:
    """Which tokens of the row are this context-parallel rank's: of each sequence's 2 CP chunks the r-th from either end."""
    lengths = np.diff(boundaries)
    chunk = _within(lengths) // np.repeat(lengths // (2 * layout.context_parallel), lengths)
    return np.minimum(chunk, 2 * layout.context_parallel - 1 - chunk) == layout.context_rank


def _packed_parameters(boundaries: np.ndarray, device: torch.device) -> PackedSeqParams:
    cu_seqlens = torch.from_numpy(boundaries.astype(np.int32)).to(device)
    longest = int(np.diff(boundaries).max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
