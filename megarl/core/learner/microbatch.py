"""From sequences to the tensors of one micro-batch on one rank.

    one row of sequences end to end    [1, sum of lengths]
    cu_seqlens                         separates them in attention

Lengths are rounded up to multiples that the layout needs: a sequence to 2 x CP
(context-parallel rank r takes the r-th chunk from the front and from the back), a row
to TP under sequence parallelism and to the multiple for FP8 products; with pipeline
stages, all micro-batches of a step have one size. `plan` depends only on lengths, so
every rank makes the same plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.core.algorithm.batch import PerToken, RankExperts, TrainSequence
from megarl.core.algorithm.packing import BY_TOKENS, Cost, Packed, pack
from megarl.core.models.attention import query_ranges, segments
from megarl.core.recipe import Model

FILLER = 1024
"""Length of a filler sequence: one alone could cost more attention than all others in
its row, short ones would be many.
"""


@dataclass(frozen=True)
class RowLayout:
    """The settings that micro-batches' shapes depend on, and how many tokens the model
    knows. Filler has all of them in turn: equal tokens would choose the same experts,
    whose ranks would have several times the work and memory of the others.
    """

    model: Model
    data_parallel: int = 1
    context_rank: int = 0
    vocabulary: int = 1

    @property
    def sequence_multiple(self) -> int:
        """Tokens of which a sequence has a multiple."""
        if self.model.context_parallel == 1:
            return 1
        return 2 * self.model.context_parallel

    @property
    def row_multiple(self) -> int:
        """Tokens of which a row has a multiple."""
        shards = self.model.context_parallel * self.model.tensor_parallel
        return lcm(self.sequence_multiple, shards * self.model.token_multiple)


@dataclass(frozen=True)
class ExpertsCut:
    """The part of a sequence's recorded experts that a rank replays. columns: the
    layers of its stage, as indices among the model's layers with experts, ascending.
    """

    context_parallel: int
    context_rank: int
    columns: tuple[int, ...]

    def rows(self, recorded: int, length: int) -> int:
        """Return how many of the first `recorded` tokens of a sequence of this length
        the rank has.
        """
        return sum(end - start for start, end in self._ranges(recorded, length))

    def of(self, table: np.ndarray, length: int) -> RankExperts:
        """Return the part of a table [recorded, layers with experts, chosen]."""
        has_all_layers = self.columns == tuple(range(table.shape[1]))
        layers = slice(None) if has_all_layers else list(self.columns)
        parts = [table[start:end, layers] for start, end in self._ranges(len(table), length)]
        return RankExperts(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _ranges(self, recorded: int, length: int) -> list[tuple[int, int]]:
        ranks = self.context_parallel
        padded = length if ranks == 1 else _up(length, 2 * ranks)
        ranges = query_ranges(0, padded, ranks, self.context_rank)
        return [(min(start, recorded), min(end, recorded)) for start, end in ranges]


@dataclass(frozen=True, eq=False)
class RowExperts:
    """The recorded experts of a rank's row of `size` tokens. There is a table of them
    only while a pass needs it: those of all micro-batches would take twice their bytes.
    """

    size: int
    starts: Sequence[int]  # of each of `parts` in the row
    parts: Sequence[RankExperts]

    def table(self, columns: Sequence[int]) -> Tensor:
        """Return the choices in these of the rank's layers [size, columns, chosen]
        int16, on the CPU; -1 is a free choice.
        """
        chosen = self.parts[0].choices.shape[-1]
        table = np.full((self.size, len(columns), chosen), -1, np.int16)
        for start, part in zip(self.starts, self.parts, strict=True):
            table[start : start + len(part.choices)] = part.choices[:, columns]
        return torch.from_numpy(table)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which sequences go where."""

    members: Packed
    # The smallest size of a micro-batch, before it is divided among context-parallel
    # ranks.
    length: int


@dataclass(frozen=True)
class MicroBatch:
    """One rank's tensors. Each of its n trained tokens is predicted from the hidden
    state before it.
    """

    tokens: Tensor  # [1, length / CP]
    padding: Tensor  # [1, length / CP]: True where there is no sequence's token
    sequence_tokens: int  # number of tokens of sequences, on all context-parallel ranks together
    packed: PackedSeqParams
    positions: Tensor  # [n] position in the row from which the token is predicted
    labels: Tensor  # [n]
    behaviour: Tensor  # [n] float32, as the following, as in TrainSequence
    reference: Tensor
    advantage: Tensor
    value: Tensor
    value_target: Tensor
    weight: Tensor
    counted: Tensor  # [n] as in Tokens
    # [n; empty if there is only the stand-in] index among the sequences' tokens
    source: np.ndarray
    local_lengths: Tensor  # [sequences, at least 1] int64: trained tokens on this rank
    lengths: Tensor  # [sequences, at least 1] float32: on all context-parallel ranks
    experts: RowExperts | None = None  # None: free choices


@dataclass(frozen=True)
class _PackedRow:
    """Where sequences are in one row, and the filler after them."""

    boundaries: np.ndarray  # [sequences and filler sequences + 1]
    places: np.ndarray  # [tokens of sequences]: position of each in the row

    @property
    def size(self) -> int:
        """Tokens in the row, with filler."""
        return int(self.boundaries[-1])


@dataclass(frozen=True)
class _Trained:
    """The n trained tokens."""

    source: np.ndarray  # [n] index in the sequences put end to end
    sequence: np.ndarray  # [n] index of its sequence
    positions: np.ndarray  # [n] position in the row from which it is predicted


# Collectives would need special cases for empty tensors, but not for one token of
# weight 0.
_STAND_IN = _Trained(np.array([-1]), np.zeros(1, np.int64), np.zeros(1, np.int64))


def plan(
    lengths: Sequence[int], max_tokens: int, layout: RowLayout, cost: Cost = BY_TOKENS
) -> MicroBatchPlan:
    """Plan balanced micro-batches of at most `max_tokens` tokens, without the padding
    of rows.
    """
    model = layout.model
    padded = [_up(n, layout.sequence_multiple) for n in lengths]
    pipelined = model.pipeline_parallel > 1
    members = pack(padded, max_tokens, layout.data_parallel, cost, one_size=pipelined)
    if not pipelined:
        return MicroBatchPlan(members, layout.row_multiple)
    if model.virtual_pipeline_parallel > 1:
        # The interleaved schedule works through groups of PP micro-batches.
        for microbatches in members:
            missing = -len(microbatches) % model.pipeline_parallel
            microbatches.extend([] for _ in range(missing))
    fullest = 0
    for microbatches in members:
        for indices in microbatches:
            fullest = max(fullest, sum(padded[i] for i in indices))
    return MicroBatchPlan(members, _up(fullest, layout.row_multiple))


def assemble(
    sequences: Sequence[TrainSequence],
    length: int,
    layout: RowLayout,
    device: torch.device,
    cut: ExpertsCut | None = None,
) -> MicroBatch:
    """Make this rank's tensors of one micro-batch, a row of at least `length` tokens;
    without sequences, all are filler. cut: the part of recorded experts that it
    replays, if it does.
    """
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    row = _row(lengths, length, layout)
    ids = _end_to_end([s.tokens for s in sequences], np.int64)
    weight = _end_to_end([s.loss_weight for s in sequences], np.float32)
    tokens = np.arange(row.size) % layout.vocabulary  # filler: see RowLayout
    tokens[row.places] = ids[:-1]  # without the stand-in's
    padding = np.ones(row.size, dtype=np.bool_)
    padding[row.places] = False
    trained = _trained(weight, lengths, row)
    trained_lengths = np.bincount(trained.sequence, minlength=max(len(sequences), 1))
    if layout.model.context_parallel > 1:
        on_rank = _positions_on_rank(row, layout)
        tokens = tokens[on_rank]
        padding = padding[on_rank]
        trained = _trained_on_rank(trained, on_rank)
    chosen = trained if len(trained.source) else _STAND_IN

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def of_chosen(values: Sequence[PerToken]) -> Tensor:
        """Return the chosen tokens' values. values: of each sequence."""
        per_token = [np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)]
        row_values = _end_to_end(per_token, np.float32)
        return on_device(row_values[chosen.source])

    ends = on_device(row.boundaries.astype(np.int32))
    longest = int(np.diff(row.boundaries).max())
    local_lengths = np.bincount(chosen.sequence, minlength=len(trained_lengths))
    is_counted = (chosen.source >= 0).astype(np.float32)
    return MicroBatch(
        tokens=on_device(tokens)[None],
        padding=on_device(padding)[None],
        sequence_tokens=int(lengths.sum()),
        packed=PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest),
        positions=on_device(chosen.positions),
        labels=on_device(ids[chosen.source]),
        behaviour=of_chosen([s.behaviour_logprobs for s in sequences]),
        reference=of_chosen([s.reference_logprobs for s in sequences]),
        advantage=of_chosen([s.advantage for s in sequences]),
        value=of_chosen([s.value for s in sequences]),
        value_target=of_chosen([s.value_target for s in sequences]),
        weight=on_device(weight[chosen.source]),
        counted=on_device(is_counted),
        source=trained.source,
        local_lengths=on_device(local_lengths),
        lengths=on_device(np.maximum(trained_lengths, 1).astype(np.float32)),
        experts=None if cut is None else _experts(sequences, row, cut),
    )


def _row(lengths: np.ndarray, length: int, layout: RowLayout) -> _PackedRow:
    """Put sequences of these lengths end to end in a row of at least `length` tokens.
    The rest is filler: sequences of FILLER tokens, or of as many as the longest has.
    """
    multiple = layout.sequence_multiple
    padded = -(-lengths // multiple) * multiple  # rounded up
    starts = np.concatenate([[0], np.cumsum(padded)])
    filler_start = int(starts[-1])
    size = max(length, _up(filler_start, layout.row_multiple))
    first_tokens = np.cumsum(lengths) - lengths
    within_sequence = np.arange(lengths.sum()) - np.repeat(first_tokens, lengths)
    places = np.repeat(starts[:-1], lengths) + within_sequence
    longest = int(padded.max(initial=0))
    filler = _up(max(FILLER, longest), multiple)
    filler_ends = np.arange(filler_start, size, filler) + filler
    filler_ends = np.minimum(filler_ends, size)
    boundaries = np.concatenate([starts, filler_ends])
    return _PackedRow(boundaries, places)


def _trained(weight: np.ndarray, lengths: np.ndarray, row: _PackedRow) -> _Trained:
    """Return the tokens with a weight. weight: of all tokens end to end, and of the
    stand-in, which has none.
    """
    source = np.flatnonzero(weight)
    sequence_of_token = np.repeat(np.arange(len(lengths)), lengths)
    sequence = sequence_of_token[source]
    return _Trained(source, sequence, row.places[source] - 1)


def _positions_on_rank(row: _PackedRow, layout: RowLayout) -> np.ndarray:
    """Return whether this context-parallel rank has each position, [row.size] bool."""
    ranks = layout.model.context_parallel
    parts = segments(row.boundaries.tolist(), None, ranks, layout.context_rank)
    on_rank = np.zeros(row.size, dtype=np.bool_)
    on_rank[parts.queries] = True
    return on_rank


def _trained_on_rank(trained: _Trained, on_rank: np.ndarray) -> _Trained:
    """Return the tokens that are predicted from this rank's positions (`on_rank`) of
    the row; their positions count only those.
    """
    chosen = on_rank[trained.positions]
    position_on_rank = np.cumsum(on_rank) - 1
    return _Trained(
        source=trained.source[chosen],
        sequence=trained.sequence[chosen],
        positions=position_on_rank[trained.positions[chosen]],
    )


def _experts(
    sequences: Sequence[TrainSequence], row: _PackedRow, cut: ExpertsCut
) -> RowExperts | None:
    """Return the recorded experts of a rank's part of the row; None if there are none.
    A rank has the same share of each sequence, whose recorded tokens come first.
    """
    starts: list[int] = []
    parts: list[RankExperts] = []
    for start, sequence in zip(row.boundaries.tolist(), sequences, strict=False):
        experts = sequence.experts
        if isinstance(experts, np.ndarray):
            experts = cut.of(experts, len(sequence))
        if experts is not None:
            starts.append(start // cut.context_parallel)
            parts.append(experts)
    return RowExperts(row.size // cut.context_parallel, starts, parts) if parts else None


def _end_to_end(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the parts end to end, followed by a 0 for the stand-in (_STAND_IN)."""
    return np.concatenate([*parts, np.zeros(1, dtype)]).astype(dtype, copy=False)


def _up(n: int, multiple: int) -> int:
    """Return n rounded up to a multiple."""
    return -(-n // multiple) * multiple
