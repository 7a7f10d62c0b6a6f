"""From sequences to the tensors of one micro-batch on one rank.

    one row of sequences end to end    [1, sum of lengths]      cu_seqlens separates them in attention

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

from megarl.core.algorithm.batch import PerToken, TrainSequence
from megarl.core.algorithm.packing import BY_TOKENS, Cost, pack
from megarl.core.models.attention import segments
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
        return 2 * self.model.context_parallel if self.model.context_parallel > 1 else 1

    @property
    def row_multiple(self) -> int:
        shards = self.model.context_parallel * self.model.tensor_parallel
        return lcm(self.sequence_multiple, shards * self.model.token_multiple)


@dataclass(frozen=True)
class MicroBatchPlan:
    """Which sequences go where."""

    members: list[list[list[int]]]  # [data-parallel rank][micro-batch]: indices of sequences
    length: (
        int  # the smallest size of a micro-batch, before it is divided among context-parallel ranks
    )


@dataclass(frozen=True)
class MicroBatch:
    """One rank's tensors. Each of its n trained tokens is predicted from the hidden
    state before it. experts: always on the CPU, since all micro-batches of a step are
    made at once, and their choices take gigabytes.
    """

    tokens: Tensor  # [1, length / CP]
    padding: Tensor  # [1, length / CP]: True where there is no sequence's token
    sequence_tokens: int  # number of tokens of sequences, on all context-parallel ranks together
    packed: PackedSeqParams
    at: Tensor  # [n] position in the row from which the token is predicted
    labels: Tensor  # [n]
    behaviour: Tensor  # [n] float32, as the following, as in TrainSequence
    reference: Tensor
    advantage: Tensor
    value: Tensor
    value_target: Tensor
    weight: Tensor
    counted: Tensor  # [n] as in Tokens
    source: (
        np.ndarray
    )  # [n, or 0 instead of the filler] index of the token in the sequences put end to end
    here: Tensor  # [sequences, at least 1] int64: trained tokens of each on this rank
    lengths: Tensor  # [sequences, at least 1] float32: on all context-parallel ranks
    experts: Tensor | None = (
        None  # [length / CP, layers with experts, chosen] int16; -1 or None: a free choice
    )


def plan(
    lengths: Sequence[int], max_tokens: int, layout: RowLayout, cost: Cost = BY_TOKENS
) -> MicroBatchPlan:
    """Plan balanced micro-batches of at most `max_tokens` tokens, without the padding
    of rows.
    """
    padded = [_up(n, layout.sequence_multiple) for n in lengths]
    members = pack(
        padded, max_tokens, layout.data_parallel, cost, one_size=layout.model.pipeline_parallel > 1
    )
    if (
        layout.model.virtual_pipeline_parallel > 1
    ):  # the interleaved schedule works through groups of PP micro-batches
        for microbatches in members:
            microbatches += [[] for _ in range(-len(microbatches) % layout.model.pipeline_parallel)]
    if layout.model.pipeline_parallel == 1:
        return MicroBatchPlan(members, layout.row_multiple)
    fullest = max(sum(padded[i] for i in m) for microbatches in members for m in microbatches)
    return MicroBatchPlan(members, _up(fullest, layout.row_multiple))


def assemble(
    sequences: Sequence[TrainSequence], length: int, layout: RowLayout, device: torch.device
) -> MicroBatch:
    """Make this rank's tensors of one micro-batch, a row of at least `length` tokens;
    without sequences, all are filler.
    """
    lengths = np.array([len(s) for s in sequences], dtype=np.int64)
    boundaries, place = _places(lengths, length, layout)
    ids = _joined([s.tokens for s in sequences], np.int64)
    tokens = np.arange(boundaries[-1]) % layout.vocabulary
    padding = np.ones(boundaries[-1], dtype=np.bool_)
    tokens[place] = ids[:-1]
    padding[place] = False
    experts = _experts(sequences, lengths, boundaries, place)
    weight = _joined([s.loss_weight for s in sequences], np.float32)
    trained = np.flatnonzero(weight)
    which = np.repeat(np.arange(len(sequences)), lengths)
    here = trained_lengths = np.bincount(which[trained], minlength=max(len(sequences), 1))
    at = place[trained] - 1
    if layout.model.context_parallel > 1:
        mine = np.zeros(len(tokens), dtype=np.bool_)
        mine[
            segments(
                boundaries.tolist(), None, layout.model.context_parallel, layout.context_rank
            ).queries
        ] = True
        trained = trained[mine[at]]
        at = (np.cumsum(mine) - 1)[at[mine[at]]]
        tokens = tokens[mine]
        padding = padding[mine]
        experts = None if experts is None else experts[mine]
        here = np.bincount(which[trained], minlength=len(trained_lengths))
    chosen = trained
    if not len(
        trained
    ):  # collectives would need special cases for empty tensors, but not for one of weight 0
        chosen = np.array([-1])
        at = np.zeros(1, np.int64)
        here = (np.arange(len(here)) == 0).astype(np.int64)

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    def joined(values: Sequence[PerToken]) -> Tensor:
        whole = [np.broadcast_to(v, n) for v, n in zip(values, lengths, strict=True)]
        return on_device(_joined(whole, np.float32)[chosen])

    ends = on_device(boundaries.astype(np.int32))
    longest = int(np.diff(boundaries).max())
    return MicroBatch(
        tokens=on_device(tokens)[None],
        padding=on_device(padding)[None],
        sequence_tokens=int(lengths.sum()),
        packed=PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest),
        at=on_device(at),
        labels=on_device(ids[chosen]),
        behaviour=joined([s.behaviour_logprobs for s in sequences]),
        reference=joined([s.reference_logprobs for s in sequences]),
        advantage=joined([s.advantage for s in sequences]),
        value=joined([s.value for s in sequences]),
        value_target=joined([s.value_target for s in sequences]),
        weight=on_device(weight[chosen]),
        counted=on_device((chosen >= 0).astype(np.float32)),
        source=trained,
        here=on_device(here),
        lengths=on_device(np.maximum(trained_lengths, 1).astype(np.float32)),
        experts=None if experts is None else torch.from_numpy(experts),
    )


def _places(lengths: np.ndarray, length: int, layout: RowLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return the boundaries of sequences end to end in one row, and each token's place
    in it.
    """
    padded = -(-lengths // layout.sequence_multiple) * layout.sequence_multiple
    starts = np.concatenate([[0], np.cumsum(padded)])
    size = max(length, _up(int(starts[-1]), layout.row_multiple))
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    # The rest of the row is filler: sequences of FILLER tokens, or of as many as the
    # longest has.
    step = _up(max(FILLER, int(padded.max(initial=0))), layout.sequence_multiple)
    rest = np.arange(starts[-1], size, step) + step
    boundaries = np.concatenate([starts, np.minimum(rest, size)])
    return boundaries, np.repeat(starts[:-1], lengths) + within


def _experts(
    sequences: Sequence[TrainSequence],
    lengths: np.ndarray,
    boundaries: np.ndarray,
    place: np.ndarray,
) -> np.ndarray | None:
    """Return the recorded choices at the places of their tokens, -1 elsewhere; None if
    nothing was recorded.
    """
    starts = np.cumsum(lengths) - lengths
    recorded = [
        (start, s.experts)
        for start, s in zip(starts, sequences, strict=True)
        if s.experts is not None
    ]
    if not recorded:
        return None
    table = np.full((boundaries[-1], *recorded[0][1].shape[1:]), -1, np.int16)
    for start, experts in recorded:
        table[place[start : start + len(experts)]] = experts
    return table


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the parts end to end, followed by a 0 for the filler."""
    return np.concatenate([*parts, np.zeros(1, dtype)]).astype(dtype, copy=False)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
