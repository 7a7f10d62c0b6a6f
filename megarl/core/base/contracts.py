"""What tasks implement and the core requires: prompts, graders, environments, agents.

    controller ─► TaskPrompts ─► sampler ⇄ PlayedEnvironment, Agents ─► Grader ─► Grade

megarl/tasks/ has the implementations; megarl/cli passes them to the controller as one `Tasks`. Users write an
`Environment` (docs/tools.md) or a grading function (docs/grading.md).
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from megarl.core.base.types import Branch, Episode, FinishReason, Prompt, Segment, int32

RIGHT, WRONG = 1.0, -1.0


class GraderDown(Exception):
    """No grader could judge this: its processes do not start or keep dying, or its service does not answer."""


class Verdict(NamedTuple):
    """One grader's judgement. An answer is right if its score is above 0.

    timeout, error (its text): the grader ran out of time, or failed on the answer; the score is then that of a wrong one.
    """

    score: float
    timeout: bool = False
    error: str = ""


class Grade(NamedTuple):
    """The grade of a completion.

    reward: the task grader's score, ±1 unless the grader is the user's own, plus the others' weighted scores.
    format_ok: thinking was closed and something follows it. timeout, error: true if any of the graders had one.
    rewards: each grader's score by name, if there are several; the task grader's is `answer`.
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
        """Grade a completion's text. verdict: the environment's judgement, if any; it overrides the task's grader.

        Raises GraderDown if one of the graders is unavailable.
        """

    async def grade_answer(self, text: str, prompt: Prompt, verdict: Verdict | None = None) -> Grade:
        """Grade for an evaluation: by the task's own grader or environment alone; with a trusted grader by all, whose score is
        then `trusted` in `rewards` and adds nothing to the reward.
        """

    async def agrees(self, answer: str, expected: str) -> bool:
        """Return whether the answer would be right if this were expected."""


class Graders(Protocol):
    """The graders of a run, by task or suite."""

    def __getitem__(self, task: str) -> Grader: ...

    def close(self) -> None:
        """End the graders' processes."""


def answer_of(text: str, end_of_thinking: str) -> str:
    """Return what follows the first `end_of_thinking`, stripped; "" if it is missing or nothing follows.

    An empty end_of_thinking means that the model has no thinking trace: return the whole text, stripped.
    """
    if not end_of_thinking:
        return text.strip()
    return text.partition(end_of_thinking)[2].strip()


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` or `\fbox{…}`, with inner braces matched; `\boxed 5` gives 5."""
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
    """An environment fails or does not answer. The rollout cannot be judged, just as when its grader is down."""


class Observation(NamedTuple):
    """The answer to a turn.

    tokens [m] int32: inserted after the turn, masked from the loss; done: the turn was the last one, and nothing is inserted;
    error: the policy called a tool wrongly, or the tool failed on its input (a metric).
    """

    tokens: np.ndarray
    done: bool = False
    error: bool = False


DONE = Observation(int32(()), done=True)


@runtime_checkable
class Environment(Protocol):
    """One episode. Only `step` has to be implemented."""

    stop_tokens: tuple[int, ...] = ()
    """Ids that end a turn besides the end token. After one of these the policy continues in the same message."""

    async def reset(self, prompt: Prompt) -> None:
        """Begin; the prompt's tokens are the first thing the policy sees."""

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn. tokens [n] int32, the end or stop token included."""

    async def reward(self) -> Verdict | None:
        """Judge after the last turn; None leaves it to the task's grader, which judges the text of the last message."""
        return None

    async def close(self) -> None:
        """Release resources; always called."""


class PlayedEnvironment(Protocol):
    """An environment in one episode. turns: the recipe's limit; stop_tokens: set once it is played.

    Its coroutines raise EnvironmentDown if the environment fails, is late, or gives an invalid answer.
    """

    turns: int
    stop_tokens: tuple[int, ...]

    def played(self, prompt: Prompt) -> AbstractAsyncContextManager[None]:
        """Play from reset to close."""

    async def step(self, tokens: np.ndarray) -> Observation:
        """Return the environment's answer to a turn [n]."""

    async def reward(self) -> Verdict | None:
        """Return the environment's verdict after the last turn, if it has one."""

    def told(self, turns: int, limited: bool) -> Episode:
        """Return the record of an episode of this many turns. limited: the limit on turns ended it."""


class Environments(Protocol):
    """The environments of a run."""

    def of(self, task: str) -> PlayedEnvironment | None:
        """Return a new environment for an episode of this task; None if its rollouts have a single turn."""

    def close(self) -> None:
        """End the environments' processes."""


class AgentDown(GraderDown):
    """An agent ended twice without a reward, or cannot be run. The rollout cannot be judged, as if its grader were down."""


class PolicyTurn(NamedTuple):
    """What the policy wrote for one request. ended: it stopped at the end token, not at a limit."""

    segments: tuple[Segment, ...]
    ended: bool


type Policy = Callable[[np.ndarray, int, int], Awaitable[PolicyTurn]]
"""Samples a turn: after these tokens [n], at most so many, of which the servers' caches should have the first so many."""


class AgentRollout(NamedTuple):
    """A session of an agent. text: the last message that the policy wrote in it. verdict: the agent's own; None leaves it to
    the task's grader. finish: `length` if a limit ended it."""

    segments: tuple[Segment, ...]
    paths: tuple[Branch, ...]
    text: str
    finish: FinishReason
    verdict: Verdict | None
    episode: Episode


class Agents(Protocol):
    """The agents of a run."""

    def work(self, task: str) -> bool:
        """Return whether rollouts of this task are sessions of an agent."""

    async def session(self, prompt: Prompt, order: tuple[int, int, int], policy: Policy) -> AgentRollout:
        """Have the agent of the prompt's task work on it. order: smaller goes first. AgentDown, or what `policy` raises."""

    async def close(self) -> None:
        """End the agents' processes."""


class TaskPrompts(NamedTuple):
    """The prompts of one task."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]


@dataclass(frozen=True)
class Tasks:
    """All tasks of a run. graders, environments and agents are called within the running event loop."""

    prompts: Mapping[str, TaskPrompts]
    graders: Callable[[], Graders]
    environments: Callable[[], Environments]
    agents: Callable[[], Agents]
