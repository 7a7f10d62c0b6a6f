"""What tasks implement and the core requires: prompts, graders, environments, agents.

    controller ─► TaskPrompts ─► sampler ⇄ PlayedEnvironment, Agents ─► Grader ─► Grade

megarl/tasks/ has the implementations; megarl/cli passes them to the controller as one
`Tasks`. Users write an `Environment` (docs/how-to/tools.md) or a grading function
(docs/how-to/grading.md).
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from megarl.core.base.types import Branch, Episode, FinishReason, Prompt, Segment, int32

RIGHT = 1.0
WRONG = -1.0


class GraderDown(Exception):
    """No grader could judge this: its processes do not start or keep dying, or its
    service does not answer.
    """


class Verdict(NamedTuple):
    """One grader's judgement. After a failure or a timeout the score is a wrong
    answer's, or NaN.
    """

    score: float  # right if above 0; NaN: the grader could not judge it
    timeout: bool = False
    error: str = ""  # the text of its failure on the answer


def score_of(value: Any) -> float:
    """Convert a score that a user's code gave to a float. True and False, also NumPy's
    and torch's, mean right and wrong.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return RIGHT if value else WRONG
    return float(value)


class Grade(NamedTuple):
    """The grade of a completion. reward: the task grader's score, ±1 unless the grader
    is the user's own, plus the others' weighted scores; NaN if one of them could not
    judge.
    """

    reward: float
    correct: bool
    format_ok: bool  # the thinking was closed and an answer follows it
    timeout: bool = False  # of any grader
    error: bool = False  # of any grader
    # Of several graders by name, if all could judge; `answer`: the task grader's.
    rewards: Mapping[str, float] = {}


class Grader(Protocol):
    """Judges completions of one task."""

    async def grade(
        self, text: str, prompt: Prompt, verdict: Verdict | None = None, truncated: bool = False
    ) -> Grade:
        """Grade a completion's text. GraderDown if a grader is unavailable. verdict:
        the environment's; it takes precedence. truncated: whether a length limit cut
        the text off.
        """

    async def grade_answer(
        self, text: str, prompt: Prompt, verdict: Verdict | None = None, truncated: bool = False
    ) -> Grade:
        """Grade for an evaluation. Without a trusted grader only the task's own grader
        or environment is asked. With one all graders are; its score is `trusted` in
        `rewards`, and adds nothing to the reward.
        """

    async def agrees(self, answer: str, expected: str) -> bool:
        """Return whether `answer` would be right if `expected` were the reference
        answer.
        """


class Graders(Protocol):
    """The graders of a run, by task or suite."""

    def __getitem__(self, task: str) -> Grader: ...

    def close(self) -> None:
        """Release resources, such as grading processes."""


def answer_of(text: str, end_of_thinking: str) -> str:
    """Return what follows the first `end_of_thinking`, stripped; the whole text if it
    is empty: the model does not think.
    """
    if end_of_thinking:
        _, _, text = text.partition(end_of_thinking)
    return text.strip()


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` or `\fbox{…}`, with inner braces
    matched; `\boxed 5` gives 5.
    """
    openings = list(re.finditer(r"\\(?:boxed|fbox)(?![a-zA-Z])", text))
    if not openings:
        return None
    content = text[openings[-1].end() :].lstrip()
    if not content.startswith("{"):
        word = re.match(r"[^\s$]+", content)
        return word[0] if word else None
    depth = 0
    for position, character in enumerate(content):
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return content[1:position]
    return None


class EnvironmentDown(GraderDown):
    """An environment fails or does not answer. The rollout cannot be judged, just as
    when its grader is down.
    """


class Observation(NamedTuple):
    """An environment's answer to a turn."""

    tokens: np.ndarray  # [m] int32: inserted after the turn, masked from the loss
    done: bool = False  # the turn was the last one; nothing is inserted
    error: bool = False  # the policy called a tool wrongly, or the tool failed on its input


DONE = Observation(int32(()), done=True)


@runtime_checkable
class Environment(Protocol):
    """One episode. Only `step` has to be implemented."""

    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a turn, besides the end token. After one of these the policy
    continues in the same message.
    """

    async def reset(self, prompt: Prompt) -> None:
        """Begin the episode. The prompt's tokens are the first thing that the policy
        sees.
        """
        return None

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn. tokens [n] int32, the end or stop token included."""

    async def reward(self) -> Verdict | None:
        """Judge the episode after its last turn. None: the task's grader judges, by the
        text of the last message.
        """
        return None

    async def close(self) -> None:
        """Release resources; always called."""
        return None


class PlayedEnvironment(Protocol):
    """An environment in one episode. turns: the recipe's limit. stop_tokens: set when
    `played` is entered. Its coroutines raise EnvironmentDown if the environment fails,
    is late, or gives an invalid answer.
    """

    turns: int
    stop_tokens: tuple[int, ...]

    def played(self, prompt: Prompt) -> AbstractAsyncContextManager[None]:
        """Return a context that resets the environment, and closes it at its end."""

    async def step(self, tokens: np.ndarray) -> Observation:
        """Answer a turn [n]."""

    async def reward(self) -> Verdict | None:
        """Return the environment's verdict after the last turn, if it has one."""

    def record(self, turns: int, limited: bool) -> Episode:
        """Return the record of an episode with this many turns. limited: the limit on
        turns ended it.
        """


class Environments(Protocol):
    """The environments of a run's tasks."""

    def of(self, task: str) -> PlayedEnvironment | None:
        """Return a new environment for an episode of this task; None if its rollouts
        have a single turn.
        """

    def close(self) -> None:
        """Release resources of all environments."""


class TurnRequest(NamedTuple):
    """What an agent asks the policy for: at most `limit` tokens after `tokens` [n]
    int32.
    """

    tokens: np.ndarray
    limit: int
    cached: int = 0  # first tokens that the servers' caches should hold
    routed: int = 0  # first tokens whose experts are known (model.moe.routing_replay)


class PolicyTurn(NamedTuple):
    """What the policy wrote for one request. ended: it ended with the end token, not at
    a limit. experts: those that servers chose for the tokens from
    `TurnRequest.routed` on, the last ones perhaps missing [rows, layers with experts,
    chosen]; None if they are not recorded.
    """

    segments: tuple[Segment, ...]
    ended: bool
    experts: np.ndarray | None = None


type Policy = Callable[[TurnRequest], Awaitable[PolicyTurn]]
"""Samples a turn."""


class AgentRollout(NamedTuple):
    """What an agent's session leaves."""

    segments: tuple[Segment, ...]
    paths: tuple[Branch, ...]
    text: str  # the policy's last message
    finish: FinishReason  # `length` if a limit ended the session
    verdict: Verdict | None  # the agent's own; None: the task's grader judges
    episode: Episode
    truncated: bool = False  # a length limit cut the last message off
    # As in `Rollout.routing`; None if none are recorded.
    experts: np.ndarray | None = None


class AgentDown(GraderDown):
    """An agent ended twice without a reward, so that the rollout cannot be judged.
    rollout: what the policy wrote.
    """

    def __init__(self, reason: str, rollout: AgentRollout) -> None:
        super().__init__(reason)
        self.rollout = rollout


class Agents(Protocol):
    """The agents of a run's tasks."""

    def work(self, task: str) -> bool:
        """Return whether an agent does the rollouts of this task."""

    async def run_session(
        self,
        prompt: Prompt,
        order: tuple[int, int, int],
        policy: Policy,
        waited: Callable[[], float],
    ) -> AgentRollout:
        """Run the agent of the prompt's task on the prompt. order: as
        `places.Order`. waited: seconds of waiting for servers, which the limit on the
        session's time leaves out. Raises AgentDown, or what `policy` raises.
        """

    async def close(self) -> None:
        """End all sessions."""


class TaskPrompts(NamedTuple):
    """The prompts of one task."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]


@dataclass(frozen=True)
class Tasks:
    """All tasks of a run. `graders`, `environments` and `agents` must be called while
    the event loop runs.
    """

    prompts: Mapping[str, TaskPrompts]
    graders: Callable[[], Graders]
    environments: Callable[[], Environments]
    agents: Callable[[], Agents]
