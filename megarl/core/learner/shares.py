"""Gives each rank of the learner the recorded experts that it replays, and no others.

    Train(batch): routing is outlines ──► all ranks: the step's plan of micro-batches
    rank 0 ── Experts(some rollouts) ──► controller: from its journal
           ◄── PIECE_BYTES at most, or one rollout
           ──► the first tensor-parallel rank of each data-parallel, context-parallel
               and pipeline rank that trains a sequence of them: its tokens, its layers
                 └──► the other tensor-parallel ranks

So a rank holds 1 / (DP x CP x PP) of a batch's experts, and rank 0 a piece besides. All
ranks make the same plan from the outlines, so they know who sends what to whom.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from msgspec import structs

from megarl.core.algorithm.batch import RankExperts, TrainSequence
from megarl.core.algorithm.packing import Packed
from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.messages import Refused, Stop
from megarl.core.base.ranks import from_rank_0, gathered
from megarl.core.base.types import Batch, Group, Rollout
from megarl.core.learner.microbatch import ExpertsCut

PIECE_BYTES = 64 << 20
"""Packed bytes that rank 0 asks for at a time: it holds them, and unpacks one rollout
after another. A rollout of more is asked for alone.
"""

type Fetch = Callable[[int, Sequence[int]], list[bytes]]
"""Returns `Routing.packed` of some rollouts of a ticket, by their positions in its
group. Raises Interrupted, MegarlError, or Withheld if they are refused. Called on
rank 0.
"""


class Withheld(Exception):
    """Raised on all ranks if rank 0 could not get the experts. reply: what follows, as
    if the controller had said it.
    """

    def __init__(self, reply: Stop | Refused) -> None:
        super().__init__(reply.reason if isinstance(reply, Stop) else reply.error)
        self.reply = reply


@dataclass(frozen=True)
class RankPlace:
    """The part of the work that a rank has."""

    data: int
    pipeline: int
    tensor: int
    cut: ExpertsCut


@dataclass(frozen=True)
class ExpertsPiece:
    """Some rollouts of a group, by their positions in it."""

    group: Group
    rollouts: Sequence[int]


def with_shares(
    sequences: Sequence[TrainSequence],
    batch: Batch,
    members: Packed,
    cut: ExpertsCut,
    fetch: Fetch,
) -> list[TrainSequence]:
    """Return the sequences with this rank's share of the experts of which the batch has
    outlines. COLLECTIVE. members: the plan for these sequences. Raises Withheld.
    """
    shared = list(sequences)
    handout = _Handout(cut, members)
    of_rollout: dict[tuple[int, int], list[int]] = {}
    for i, sequence in enumerate(sequences):
        of_rollout.setdefault((sequence.ticket, sequence.sample), []).append(i)
    for piece in _pieces(batch, of_rollout):
        received = _received(piece, fetch)
        for position in piece.rollouts:
            rollout = piece.group.rollouts[position]
            tables: Sequence[np.ndarray | None] = rollout.path_experts
            if received is not None:
                tables = _with_choices(rollout, received.pop(0)).path_experts
            for i in of_rollout[piece.group.ticket, rollout.sample]:
                path = sequences[i].path
                experts = handout.share(i, len(sequences[i]), rollout, path, tables[path])
                shared[i] = replace(sequences[i], experts=experts)
    return shared


def _pieces(batch: Batch, in_loss: dict[tuple[int, int], list[int]]) -> Iterator[ExpertsPiece]:
    """Yield pieces with outlined experts of the rollouts in the loss, which are keys
    (ticket, sample) of `in_loss`, in the batch's order.
    """
    for group in batch.groups:
        positions: list[int] = []
        size = 0
        for position, rollout in enumerate(group.rollouts):
            routing = rollout.routing
            is_in_loss = (group.ticket, rollout.sample) in in_loss
            if routing is None or not routing.is_outline or not is_in_loss:
                continue
            if positions and size + routing.size > PIECE_BYTES:
                yield ExpertsPiece(group, positions)
                positions = []
                size = 0
            positions.append(position)
            size += routing.size
        if positions:
            yield ExpertsPiece(group, positions)


def _received(piece: ExpertsPiece, fetch: Fetch) -> list[bytes] | None:
    """Return, on rank 0, the packed choices of the piece's rollouts. COLLECTIVE: raises
    Withheld on all ranks.
    """
    received = None
    reply: Stop | Refused | None = None
    if dist.get_rank() == 0:
        try:
            received = fetch(piece.group.ticket, piece.rollouts)
            _check_sizes(piece, received)
        except Interrupted as reason:
            reply = Stop(reason=str(reason))
        except Withheld as withheld:
            reply = withheld.reply
        except MegarlError as error:
            reply = Stop(reason=str(error), error=True)
    reply = from_rank_0(reply)
    if reply is not None:
        raise Withheld(reply)
    return received


def _check_sizes(piece: ExpertsPiece, received: Sequence[bytes]) -> None:
    expected = []
    for position in piece.rollouts:
        routing = piece.group.rollouts[position].routing
        expected.append(0 if routing is None else routing.size)
    sizes = [len(choices) for choices in received]
    if sizes != expected:
        raise MegarlError(
            f"ticket {piece.group.ticket}: the controller sent recorded experts of {sizes} bytes"
            f" where the batch has {expected}; look at logs/controller/ of the run"
        )


def _with_choices(rollout: Rollout, packed: bytes) -> Rollout:
    """Return the rollout with its experts."""
    assert rollout.routing is not None
    return structs.replace(rollout, routing=rollout.routing.with_choices(packed))


class _Handout:
    """Sends parts of tables from rank 0 to the ranks that replay them."""

    def __init__(self, cut: ExpertsCut, members: Packed) -> None:
        self._rank = dist.get_rank()
        self._places = gathered(
            RankPlace(
                data=parallel_state.get_data_parallel_rank(),
                pipeline=parallel_state.get_pipeline_model_parallel_rank(),
                tensor=parallel_state.get_tensor_model_parallel_rank(),
                cut=cut,
            )
        )
        self._first_ranks = _first_ranks(self._places)
        self._owners: dict[int, int] = {}  # data-parallel rank by index of the sequence
        for data, microbatches in enumerate(members):
            for indices in microbatches:
                self._owners |= dict.fromkeys(indices, data)

    def share(
        self, index: int, length: int, rollout: Rollout, path: int, table: np.ndarray | None
    ) -> RankExperts | None:
        """Return this rank's share of a sequence of `length` tokens, a path of the
        rollout; None if another data-parallel rank trains it. COLLECTIVE. table: as
        `Rollout.path_experts`, on rank 0.
        """
        routing = rollout.routing
        recorded = rollout.path_rows[path]
        assert routing is not None
        share = None
        for first, followers in self._first_ranks[self._owners[index]].items():
            cut = self._places[first].cut
            shape = (cut.rows(recorded, length), len(cut.columns), routing.chosen)
            if self._rank not in (0, first, *followers) or 0 in shape:
                continue
            if table is None:
                part = np.empty(shape, routing.dtype)
            else:
                part = cut.of(table, length).choices.copy()
            _pass_on(part, self._rank, 0, [first])
            _pass_on(part, self._rank, first, followers)
            if self._rank == first or self._rank in followers:
                share = RankExperts(part)
        return share


def _first_ranks(places: Sequence[RankPlace]) -> dict[int, dict[int, list[int]]]:
    """Return, by data-parallel rank, the first tensor-parallel ranks, each with the
    ranks that have the same share.
    """
    ranks_of: dict[RankPlace, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(replace(place, tensor=0), []).append(rank)
    first_ranks: dict[int, dict[int, list[int]]] = {}
    for place, ranks in ranks_of.items():
        first, *followers = sorted(ranks, key=lambda rank: places[rank].tensor)
        first_ranks.setdefault(place.data, {})[first] = followers
    return first_ranks


def _pass_on(part: np.ndarray, rank: int, source: int, targets: Sequence[int]) -> None:
    """Send the part from the source to the targets, if `rank` is one of them."""
    data = torch.from_numpy(part.reshape(-1).view(np.uint8))
    for target in targets:
        if rank == source and target != source:
            dist.send(data, target)
        elif rank == target and target != source:
            dist.recv(data, source)
