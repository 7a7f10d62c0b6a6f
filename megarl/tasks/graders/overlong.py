"""The overlong penalty: what a right answer loses for the length of its trace.

    clip((L_max - |y|) / L_cache - 1, -1, 0)        0 up to L_max - L_cache tokens, -1 at L_max, in a straight line between

DAPO (arXiv 2503.14476), as ScaleRL's baselines have it (arXiv 2510.13786): added to correct traces only. L_max is the longest
completion there can be (`Length.completion_tokens`), L_cache is `length.overlong_tokens`.
"""

from megarl.core.recipe import Length
from megarl.tasks.graders.answer import Grade


def penalty(tokens: int, longest: int, cache: int) -> float:
    """Of a completion of so many tokens, between -1 and 0."""
    return min(0.0, max(-1.0, (longest - tokens) / cache - 1))


def reward(grade: Grade, tokens: int, length: Length) -> float:
    """The grade's reward, less the penalty if the recipe has it and the answer is right."""
    if length.control != "overlong_penalty" or not grade.correct:
        return grade.reward
    return grade.reward + penalty(tokens, length.completion_tokens, length.overlong_tokens)
