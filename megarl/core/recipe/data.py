"""`data` and the suites of `evaluation`: rows, what the model sees of them, and how its
answers are graded.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Literal, override

from pydantic import Field, field_validator

from megarl.core.recipe.section import OF_USERS, KeyPlace, Section, TaskName, unknown_name

LM_EVAL = "lm-eval:"
"""Begins the `data` of suites that are tasks of lm-evaluation-harness."""


class Curriculum(Section):
    """Easy prompts first, by their `difficulty`. Not part of ScaleRL."""

    kind: Literal["none", "linear", "exponential"] = Field(
        "none",
        description=(
            "how the share of prompts in play grows, to all once the task's number has been drawn;"
            " none: all from the start"
        ),
    )


class Service(Section):
    """A reward service, asked over HTTP."""

    url: str = Field(pattern=r"^https?://[^@\s]+$", description="requests are POSTed to it")
    api_key: KeyPlace = Field(
        "", description="where its key is: env:VARIABLE or file:PATH; empty: it has none"
    )
    timeout_s: float = Field(60.0, gt=0, description="limit of a request, in seconds")


class Reward(Section):
    """A reward added to that of a task's grader."""

    grader: str = Field(description="what gives the score, as for a task")
    weight: float = Field(description="factor of the score; may be negative")


GRADERS = ("math", "exact", "code", "reasoning-gym", "format")
"""Built-in graders; others are services and functions."""
ENVIRONMENTS = ("python", "calculator", "guessing")
"""Built-in environments; others are classes."""
RESERVED = {
    "answer": "the task's own grader",
    "trusted": "the trusted grader",
    "total": "the sum of all rewards",
    "turns": "the sum of an agent's rewards after its turns",
}
"""Names that no reward may have."""

ColumnName = Literal["prompt", "answer", "difficulty", "id"]
MappingName = Literal[
    "",
    "verl",
    "polaris",
    "deepscaler",
    "dapo-math-17k",
    "deepcoder",
    "gsm8k",
    "math",
    "livecodebench",
    "humaneval",
    "mbpp",
]


class Rows(Section):
    """Rows of a data set, what the model sees of them, how its answers are graded."""

    mapping: MappingName = Field(
        "",
        description=(
            "published set whose columns the rows have; empty: prompt, answer, id, difficulty"
        ),
    )
    columns: dict[ColumnName, str] = Field(
        {},
        description=(
            "columns that replace the mapping's; without a mapping difficulty and id are read only"
            " if they are named too. A dot reaches into a nested one; a row without id gets its"
            " hash"
        ),
    )
    template: Literal["raw", "chat"] = Field(
        "raw",
        description="raw: the model sees the prompt as it is; chat: in the model's chat template",
    )
    system: str = Field(
        "",
        description=(
            "system message before the prompt, with template: chat; a row's own takes its place"
        ),
    )
    template_options: dict[str, bool | int | float | str] = Field(
        {},
        description=(
            "variables that the chat template reads, such as {enable_thinking: false}; for an"
            " agent's requests too"
        ),
    )
    grader: str = Field(
        "math",
        description=(
            "what says which answers are right: math, exact, code, reasoning-gym, format, a name of"
            " data.services, or package.module:function"
        ),
    )
    rewards: dict[TaskName, Reward] = Field(
        {},
        description="further rewards by name: each adds weight x score; none affects correctness",
    )
    environment: str = Field(
        "",
        description=(
            "what answers a turn: python, calculator, guessing, or package.module:Class; empty: one"
            " turn"
        ),
    )
    agent: str | tuple[str, ...] = Field(
        "",
        description=(
            "program of your own that works on the prompt through a model endpoint: a command as a"
            " list of words, or package.module:function; empty: none"
        ),
    )
    turns: int = Field(
        8, ge=1, description="environment: maximum turns of an episode, the last one included"
    )
    reply_tokens: int = Field(
        512, ge=1, description="environment: maximum tokens of a reply; they count in `length`"
    )

    @property
    def graders(self) -> tuple[str, ...]:
        """Names of the task's grader and of the graders of further rewards."""
        return (self.grader, *(reward.grader for reward in self.rewards.values()))

    @override
    def problems(self) -> Iterator[str]:
        if self.system and self.template == "raw":
            yield "system: a system message needs template: chat"
        if self.template_options and self.template == "raw" and not self.agent:
            yield "template_options: options of a chat template need template: chat, or an agent"
        for name in sorted(RESERVED.keys() & self.rewards.keys()):
            yield f"rewards.{name}: {RESERVED[name]} is logged under this name; choose another"
        if self.environment:
            yield from unknown_name(
                "environment",
                self.environment,
                "environment",
                ENVIRONMENTS,
                "package.module:Class",
            )
        if self.environment == "python" and "code" in self.graders:
            yield (
                "environment: python runs every turn that has a program in it, so an answer for"
                " the grader code could never be the last turn; leave one of them out"
            )
        if self.agent:
            yield from self._problems_of_agent()

    def _problems_of_agent(self) -> Iterator[str]:
        """Yield what contradicts the task's agent."""
        if isinstance(self.agent, str) and not OF_USERS.fullmatch(self.agent):
            yield (
                f"agent: {self.agent!r} is not a package.module:function; give a command as a"
                " list: [python, agent.py]"
            )
        if self.environment:
            yield "agent: a task has an environment or an agent, not both; leave one of them out"
        if self.template != "raw" or self.system:
            yield (
                "template: an agent is given the prompt as it is, and its requests get the"
                " template; leave it out"
            )


class Task(Rows):
    """Prompts of one kind that a run trains on."""

    train: str = Field(
        description=(
            "training prompts: a file (JSONL, JSON, CSV, Parquet, Arrow), a pattern of files, a"
            " folder, hub:ORG/NAME:CONFIG:SPLIT, or reasoning-gym:FAMILY:KEY=VALUE"
        )
    )
    heldout: str | int = Field(
        description=(
            "prompts never trained on: a source as for train, or how many of its rows, taken out of"
            " it by their hash"
        )
    )
    weight: float = Field(
        1.0, gt=0, description="share of the prompts drawn, in proportion to the other tasks'"
    )
    trusted_grader: str = Field(
        "",
        description=(
            "grader, as above, that evaluations of held-out prompts ask too and training never;"
            " empty: none"
        ),
    )

    @property
    def graders(self) -> tuple[str, ...]:
        """Names of all graders of the task, with the trusted one if it has one."""
        if self.trusted_grader:
            return (*super().graders, self.trusted_grader)
        return super().graders

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.train.startswith(LM_EVAL):
            yield (
                f"train: {self.train} is a task of lm-eval, which only evaluation.suites can have"
            )
        if self.train.startswith("reasoning-gym:") and self.grader in ("math", "exact"):
            yield (
                "grader: problems of reasoning-gym need grader: reasoning-gym, or one of your own"
            )

    @field_validator("heldout", mode="before")
    @classmethod
    def a_source_or_a_number(cls, heldout: Any) -> Any:
        """Refuse anything but a text or a positive number; True is no number."""
        if isinstance(heldout, str) or (type(heldout) is int and heldout > 0):
            return heldout
        should = "should be a file or hub:… of prompts, or how many rows of train to hold out"
        raise ValueError(f"{should}, got {heldout!r}")


class Suite(Rows):
    """A set that models are scored on. Shipped ones (megarl/recipes/suites) are known
    by name; keys given here win.
    """

    data: str = Field(
        description=(
            "the set: a file, a pattern of files, a folder, or hub:ORG/NAME:CONFIG:SPLIT; or"
            " lm-eval:TASK, with that task's own prompts and metrics"
        )
    )
    prompt: str = Field(
        "{prompt}", description="what the model is asked; {prompt} stands for the row's prompt"
    )
    samples: int = Field(
        1, ge=1, description="answers per prompt: gives mean@samples, and pass@k and maj@k up to it"
    )
    prompts: int | None = Field(
        None, ge=1, description="maximum number of prompts, chosen by hash; null: all"
    )
    heldout: int | None = Field(
        None,
        ge=1,
        description=(
            "only those rows of `data` that a task with this `heldout` holds out; null: all"
        ),
    )

    @override
    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if "{prompt}" not in self.prompt:
            yield f"prompt: {self.prompt!r} has no {{prompt}}, the place of the row's prompt"


class Data(Section):
    """What a run trains on, and how answers are graded."""

    tasks: dict[TaskName, Task] = Field(
        {}, description="tasks by name; null removes one of the base recipe"
    )
    curriculum: Curriculum = Curriculum()
    services: dict[TaskName, Service] = Field(
        {}, description="reward services by name; a grader refers to one by it"
    )
    sandbox: Literal["bubblewrap", "rlimits"] = Field(
        "bubblewrap",
        description=(
            "where grader: code runs programs, and agents run; rlimits has no namespaces: agents,"
            " and on old kernels programs, can read, write and delete whatever you can"
        ),
    )
    decontaminate: tuple[str, ...] = Field(
        (),
        description=(
            "evaluation sets: a prompt that shares 13 consecutive words with one is not trained on"
        ),
    )
    unreadable: Literal["text", "drop", "refuse"] = Field(
        "text",
        description=(
            "an answer of a training set that grader: math cannot read as a whole: text: only the"
            " same text is right; drop: leave the prompt out; refuse: do not start"
        ),
    )

    @property
    def shares(self) -> dict[str, Fraction]:
        """Each task's exact share of the prompts drawn: a weight of .1 is a tenth."""
        weights = {name: Fraction(repr(task.weight)) for name, task in self.tasks.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}

    @override
    def problems(self) -> Iterator[str]:
        for name in self.services:
            if name in GRADERS:
                yield f"services.{name}: a built-in grader has this name; choose another"
