"""How long a rollout may think, what is inserted when its budget is used up, and the
penalty on long answers. Pure.

    thinking leg   at most `thinking_budget` tokens; only the end token ends it
      ended by itself ──────────────────────► done, "stop"
      budget used up, text has no </think> ─► the interruption phrase is inserted,
                                              masked from the loss
    answer leg     at most `answer_tokens`
      ended by itself ► "stop"        budget used up ► "length": truncated

A rollout is a growing list of segments; a request that continues on another server only
adds to it.
"""

import hashlib
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from megarl.core.base.contracts import Grade
from megarl.core.base.types import Segment
from megarl.core.recipe import Length


def thinking_budget(seed: int, ticket: int, sample: int, bounds: tuple[int, int]) -> int:
    """Return the thinking budget of this rollout, uniform in [bounds[0], bounds[1]] and
    the same after a restart.
    """
    digest = hashlib.blake2b(f"{seed}/{ticket}/{sample}/thinking".encode(), digest_size=8).digest()
    shortest, longest = bounds
    choices = longest - shortest + 1
    return shortest + int.from_bytes(digest, "little") % choices


def sampled(
    tokens: np.ndarray, logprobs: np.ndarray, spans: Sequence[tuple[int, int, int]]
) -> list[Segment]:
    """Return the segments of a request's output: tokens [n], logprobs [n]; spans
    (version, start, end) cover 0 … n.
    """
    return [
        Segment(tokens=tokens[start:end], logprobs=logprobs[start:end], weight_version=version)
        for version, start, end in spans
        if end > start
    ]


def masked(tokens: np.ndarray, version: int) -> Segment:
    """Return tokens [n] that were not sampled (the interruption phrase, an
    environment's reply) as a segment masked from the loss.
    """
    return Segment(
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        weight_version=version,
        trained=False,
    )


def merge(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Merge neighbouring segments of the same origin; each request has started a new
    one.
    """
    merged = []
    for (version, trained), group in groupby(segments, key=_origin):
        parts = list(group)
        merged.append(
            Segment(
                tokens=np.concatenate([part.tokens for part in parts]),
                logprobs=np.concatenate([part.logprobs for part in parts]),
                weight_version=version,
                trained=trained,
            )
        )
    return tuple(merged)


def _origin(segment: Segment) -> tuple[int, bool]:
    """Return what neighbours that are merged have in common."""
    return segment.weight_version, segment.trained


def overlong_penalty(tokens: int, longest: int, cache: int) -> float:
    """Return the penalty for a correct answer with a completion of n tokens, a tool's
    included, between -1 and 0.

        clip((L_max - n) / L_cache - 1, -1, 0)

    That is 0 up to L_max - L_cache tokens, -1 at L_max, and linear in between.

    DAPO (arXiv 2503.14476), as in ScaleRL's baselines (arXiv 2510.13786): only for
    correct answers. L_max is `longest`, the longest possible completion
    (`Length.completion_tokens`); L_cache is `cache`, `length.answer_tokens`.
    """
    return min(0.0, max(-1.0, (longest - tokens) / cache - 1))


def reward(grade: Grade, tokens: int, length: Length) -> float:
    """Return the reward of an answer with this many tokens, with its length penalty."""
    if length.control != "overlong_penalty" or not grade.correct:
        return grade.reward
    return grade.reward + overlong_penalty(tokens, length.completion_tokens, length.answer_tokens)
