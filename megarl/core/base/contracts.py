"""What tasks implement and the core asks for: prompts, graders, environments.

    controller ─► TaskPrompts ─► sampler ⇄ PlayedEnvironment ─► Grader ─► Grade

megarl/tasks/ has the implementations; megarl/cli/roles.py gives them to the controller as one `Tasks`. A user writes an
`Environment` (docs/tools.md) or a function that grades (docs/data.md).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from megarl.core.base.types import Episode, Prompt, int32

RIGHT, WRONG = 1.0, -1.0


class GraderDown(Exception):
    """There is no grader that could judge this: its processes do not start or die, its service does not answer."""


class Verdict(NamedTuple):
    """Of one grader. An answer is right if its score is above 0.

    timeout, error (its text): the grader ran out of time, or failed at the answer; the score is then that of a wrong one.
    """

    score: float
    timeout: bool = False
    error: str = ""


class Grade(NamedTuple):
    """reward: the score of the task's grader, ±1 unless that is the user's own, and what the others add by their weights.

    format_ok: thinking was closed and something stands after it. timeout, error: of any of the graders.
    rewards: the score of each by name, where there are several; that of the task's grader is `answer`.
    """

    reward: float
    correct: bool
    format_ok: bool
    timeout: bool = False
    error: bool = False
    rewards: Mapping[str, float] = {}


class Grader(Protocol):
    """Judges completions of one task."""

    async def grade(self, text: str, prompt: Prompt, verdict: Verdict | None = None) -> Grade:
        """The grade of a completion's text. verdict: the environment's, which then says what is right.

        Raises GraderDown if one of the graders cannot be had.
        """
        ...

    async def grade_answer(self, text: str, prompt: Prompt, verdict: Verdict | None = None) -> Grade:
        """The same by the task's own grader, or its environment, alone: what an evaluation needs."""
        ...

    async def agrees(self, answer: str, expected: str) -> bool:
        """Whether it would hold the answer for right if this were expected."""
        ...


class Graders(Protocol):
    """The graders of a run, by task or suite."""

    def __getitem__(self, task: str) -> Grader: ...

    def close(self) -> None:
        """End their processes."""


def answer_of(text: str, end_of_thinking: str) -> str:
    """What stands after the first `end_of_thinking`, blanks around it aside; "" if it is missing or nothing follows.

    With end_of_thinking "", of a model that has no thinking trace, it is all of the text."""
    if not end_of_thinking:
        return text.strip()
    return text.partition(end_of_thinking)[2].strip()


def last_box(text: str) -> str | None:
    r"""What is in the last `\boxed{…}` or `\fbox{…}`, braces within it matched; of `\boxed 5` the 5."""
    begin = max((m.end() for m in re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])", text)), default=None)
    if begin is None:
        return None
    rest = text[begin:].lstrip()
    if not rest.startswith("{"):
        return next(iter(re.findall(r"^[^\s$]+", rest)), None)
    depth = 0
    for n, sign in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth == 0:
            return rest[1:n]
    return None


class EnvironmentDown(GraderDown):
    """An environment does not answer or fails. The rollout cannot be judged, as if its grader were down."""


class Observation(NamedTuple):
    """The answer to a turn. tokens [m] int32: put in behind it, masked from the loss; done: the turn was the last one, and
    nothing is put in; error: the policy called a tool wrongly, or the tool failed at what it was given (a metric)."""

    tokens: np.ndarray
    done: bool = False
    error: bool = False


DONE = Observation(int32(()), done=True)


@runtime_checkable
class Environment(Protocol):
    """One episode. `step` is all that has to be written."""

    stop_tokens: tuple[int, ...] = ()
    """Ids that end a turn besides the end token. After one of these the policy goes on in the same message."""

    async def reset(self, prompt: Prompt) -> None:
        """Begin; its tokens are the first thing the policy sees."""

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn. tokens [n] int32, the end or stop token included."""
        ...

    async def reward(self) -> Verdict | None:
        """After the last turn: right or wrong, or None: the task's grader judges the text of the last message."""
        return None

    async def close(self) -> None:
        """Let go of what it holds; called in any case."""


class PlayedEnvironment(Protocol):
    """An environment in one episode. turns, turn_tokens: limits of the recipe; stop_tokens: known once it is played.

    What is awaited raises EnvironmentDown if the environment fails, is late, or says what cannot be.
    """

    turns: int
    turn_tokens: int
    stop_tokens: tuple[int, ...]

    def played(self, prompt: Prompt) -> AbstractAsyncContextManager[None]:
        """From its reset to its close."""
        ...

    async def step(self, tokens: np.ndarray) -> Observation:
        """Its answer to a turn [n]."""
        ...

    async def reward(self) -> Verdict | None:
        """After the last turn."""
        ...

    def told(self, turns: int, limited: bool) -> Episode:
        """The record of an episode of so many turns. limited: a limit of turns ended it."""
        ...


class Environments(Protocol):
    """The environments of a run."""

    def of(self, task: str) -> PlayedEnvironment | None:
        """A new one for an episode of this task; None: its rollouts are one turn."""
        ...

    def close(self) -> None:
        """End their processes."""


class TaskPrompts(NamedTuple):
    """The prompts of one task."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]


@dataclass(frozen=True)
class Tasks:
    """All tasks of a run. graders and environments are made within the running event loop."""

    prompts: Mapping[str, TaskPrompts]
    graders: Callable[[], Graders]
    environments: Callable[[], Environments]
