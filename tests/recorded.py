"""Recorded experts in tests: batches that have them, their outlines, and a controller
that answers `Experts`.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from megarl.core.base.types import Batch, Branch, Group, Prompt, Rollout, Routing
from megarl.core.learner.shares import Fetch
from tests import make

EXPERTS = 4


def outlined(batch: Batch) -> Batch:
    """The batch as the controller sends it."""
    return msgspec.structs.replace(batch, groups=tuple(g.outline for g in batch.groups))


def fetch_from(batch: Batch) -> Fetch:
    """Answers as a controller that has the batch."""
    groups = {group.ticket: group for group in batch.groups}

    def fetch(ticket: int, rollouts: Sequence[int]) -> list[bytes]:
        found = []
        for position in rollouts:
            routing = groups[ticket].rollouts[position].routing
            assert routing is not None
            found.append(routing.packed.tobytes())
        return found

    return fetch


def recorded_batch(groups: int, tokens: int, layers: int, chosen: int) -> Batch:
    """Groups of two rollouts, whose prompt has 4 tokens and whose completion the others
    of `tokens`. In the first group a rollout has two paths of so many tokens, which
    share the first half, and the experts of its last 3 tokens are unknown.
    """
    draw = np.random.default_rng(0)

    def rollout(sample: int) -> Rollout:
        table = draw.integers(0, EXPERTS, (tokens - 1, layers, chosen))
        return make.rollout(
            make.segment(draw.integers(0, 8, tokens - 4)),
            reward=float(sample),
            sample=sample,
            routing=Routing.of(table, EXPERTS),
        )

    def branched(sample: int) -> Rollout:
        half = tokens // 2
        own = (tokens - 1, half - 3)
        table = draw.integers(0, EXPERTS, (sum(own), layers, chosen))
        return make.rollout(
            make.segment(draw.integers(0, 8, tokens)),
            make.segment(draw.integers(0, 8, tokens - half)),
            reward=float(sample),
            sample=sample,
            routing=Routing.of(table, EXPERTS),
            paths=(
                Branch(segments=1, routed=own[0]),
                Branch(segments=1, parent=0, shared=half, routed=own[1]),
            ),
        )

    made = []
    for ticket in range(groups):
        prompt = Prompt(id=str(ticket), tokens=np.arange(4, dtype=np.int32), answer="")
        maker = rollout if ticket else branched
        made.append(Group(ticket=ticket, prompt=prompt, rollouts=(maker(0), maker(1))))
    return Batch(step=0, groups=tuple(made))
