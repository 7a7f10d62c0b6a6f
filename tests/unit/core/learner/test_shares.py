"""The recorded experts of a batch on one rank: which rollouts are asked for together,
and what follows if they do not come. tests/parallel/replay_world.py has several ranks.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from megarl.core.algorithm.batch import RankExperts, TrainSequence, sequences_in_loss
from megarl.core.base.errors import Interrupted, MegarlError
from megarl.core.base.messages import Refused, Stop
from megarl.core.base.types import Batch
from megarl.core.learner import shares
from megarl.core.learner.microbatch import ExpertsCut
from megarl.core.learner.shares import Fetch, Withheld, with_shares
from megarl.core.recipe import Recipe
from tests.recorded import fetch_from, outlined, recorded_batch

LAYERS = 3
CUT = ExpertsCut(context_parallel=1, context_rank=0, columns=(0, 2))


def shared(batch: Batch, fetch: Fetch) -> list[TrainSequence]:
    sequences = sequences_in_loss(batch, Recipe())
    members = [[list(range(len(sequences)))]]
    return with_shares(sequences, batch, members, CUT, fetch)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("most_bytes", "requests"), [(64 << 20, 3), (1, 6)])
def test_all_experts_come_in_pieces(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, requests: int
) -> None:
    """Those of an agent's paths, too. A group without a gradient is not asked for."""
    monkeypatch.setattr(shares, "PIECE_BYTES", most_bytes)
    batch = recorded_batch(4, 20, LAYERS, 2)
    equal = [batch.groups[3].rollouts[0], batch.groups[3].rollouts[0]]
    groups = (*batch.groups[:3], msgspec.structs.replace(batch.groups[3], rollouts=tuple(equal)))
    batch = Batch(step=0, groups=groups)
    asked: list[tuple[int, tuple[int, ...]]] = []
    answer = fetch_from(batch)

    def fetch(ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        asked.append((ticket, tuple(rollouts)))
        return answer(ticket, rollouts)

    found = shared(outlined(batch), fetch)
    expected = sequences_in_loss(batch, Recipe())
    assert len(found) == len(expected) == 2 * 2 + 2 * 2
    for sequence, whole in zip(found, expected, strict=True):
        assert isinstance(sequence.experts, RankExperts)
        assert isinstance(whole.experts, np.ndarray)
        np.testing.assert_array_equal(sequence.experts.choices, whole.experts[:, [0, 2]])
    assert len(asked) == requests
    assert {ticket for ticket, _ in asked} == {0, 1, 2}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stopped", [True, False])
def test_experts_that_do_not_come_stop_all_ranks(stopped: bool) -> None:
    def fetch(ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        if stopped:
            raise Interrupted("RUN/stop exists")
        raise MegarlError("the controller has not answered Experts for 600 s")

    with pytest.raises(Withheld) as withheld:
        shared(outlined(recorded_batch(1, 20, LAYERS, 2)), fetch)
    stop = withheld.value.reply
    assert isinstance(stop, Stop)
    assert stop.error is not stopped
    assert stop.reason in ("RUN/stop exists", "the controller has not answered Experts for 600 s")


@pytest.mark.usefixtures("one_rank")
def test_a_superseded_learner_gets_the_refusal_and_no_stop() -> None:
    """After a Stop it would save a checkpoint beside the newer learner's."""

    def fetch(ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        raise Withheld(Refused(error="a newer learner has taken over"))

    with pytest.raises(Withheld, match="a newer learner") as withheld:
        shared(outlined(recorded_batch(1, 20, LAYERS, 2)), fetch)
    assert isinstance(withheld.value.reply, Refused)


@pytest.mark.usefixtures("one_rank")
def test_experts_of_another_size_are_refused() -> None:
    batch = recorded_batch(2, 20, LAYERS, 2)

    def fetch(ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        return [choices[1:] for choices in fetch_from(batch)(ticket, rollouts)]

    with pytest.raises(Withheld, match=r"ticket 0: the controller sent .* \[38, 38\] bytes"):
        shared(outlined(batch), fetch)


@pytest.mark.parametrize(("length", "recorded"), [(1, 0), (1, 1), (7, 6), (16, 15), (21, 3)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_divide_the_tokens_of_a_sequence(length: int, recorded: int, ranks: int) -> None:
    table = np.arange(recorded * LAYERS).reshape(recorded, LAYERS, 1)
    found = []
    for rank in range(ranks):
        cut = ExpertsCut(ranks, rank, (0, 1, 2))
        part = cut.of(table, length).choices
        assert len(part) == cut.rows(recorded, length)
        found += part[:, 0, 0].tolist()
    assert sorted(found) == table[:, 0, 0].tolist()
