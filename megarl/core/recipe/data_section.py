"""Of the typed tree of a recipe, what prompts, rewards and evaluation suites are and where they come from."""

from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from megarl.core.recipe.section import Section


class Curriculum(Section):
    """Easy prompts first, by their `difficulty`. Not part of ScaleRL."""

    kind: Literal["none", "linear", "exponential"] = Field(
        "none", description="how the share of prompts drawn from grows"
    )
    start: float = Field(0.2, gt=0, le=1, description="share of the easiest prompts that the first epoch has")
    steps: int = Field(1000, ge=1, description="batches drawn until all prompts are in")


TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
"""It is part of the names of metrics."""


class Service(Section):
    """A reward service by HTTP."""

    url: str = Field(pattern=r"^https?://[^@\s]+$", description="requests are POSTed to it")
    api_key_env: str = Field("", description="environment variable that holds its key")
    api_key_file: str = Field("", description="or a file that holds it")
    timeout_s: float = Field(60.0, gt=0, description="of a request")
    retries: int = Field(4, ge=0, description="of a request that failed")
    batch: int = Field(32, ge=1, description="completions a request")


class Reward(Section):
    """What is added to the reward of a task's grader."""

    grader: str = Field(description="as of a task")
    weight: float = Field(description="its score is multiplied by this, which may be negative")


MappingName = Literal[
    "", "polaris", "deepscaler", "dapo-math-17k", "deepcoder", "gsm8k", "math",
    "livecodebench", "humaneval", "mbpp",
]  # fmt: skip


class Columns(Section):
    """Columns of a task's rows; a dot goes into a column of columns. Empty: what the mapping says."""

    prompt: str = ""
    answer: str = ""
    difficulty: str = Field("", description="whole numbers, or text with one in it; smaller is easier")
    id: str = Field("", description="of rows that have none anywhere it is a hash of the prompt")


class Rows(Section):
    """Rows of a data set, what the model sees of them, and how its answers are graded."""

    mapping: MappingName = Field(
        "", description="published set whose columns they have; empty: id, prompt, answer, difficulty"
    )
    columns: Columns = Columns()
    template: Literal["raw", "chat"] = Field(
        "raw", description="raw: the model sees the prompt as it is; chat: in the model's chat template"
    )
    system: str = Field("", description="system message before it, with template: chat")
    grader: str = Field(
        "math",
        description="math, exact, code, format, a name of data.services, or package.module:function: says what is right",
    )
    rewards: dict[TaskName, Reward] = Field(
        {}, description="by name: each adds weight x score to the reward; none affects correctness"
    )
    environment: str = Field(
        "",
        description="python, calculator, guessing, or package.module:Class: what answers the policy's turns; empty: one turn",
    )
    turns: int = Field(8, ge=1, description="of environment: most turns of an episode, the last one included")
    turn_tokens: int = Field(4096, ge=1, description="of environment: most tokens sampled in a turn")
    reply_tokens: int = Field(512, ge=1, description="of environment: most tokens of a reply; they count in `length`")
    reply_timeout_s: float = Field(
        600.0, gt=0, description="of environment: most seconds for a reply, the wait for a free sandbox included"
    )

    @property
    def graders(self) -> tuple[str, ...]:
        """That of the task, then those of further rewards."""
        return (self.grader, *(reward.grader for reward in self.rewards.values()))


class Task(Rows):
    """Prompts of one kind, trained on."""

    train: str = Field(description="JSONL, JSON, Parquet or Arrow file, or hub:ORG/NAME:CONFIG:SPLIT")
    heldout: str | int = Field(
        description="the same, never trained on; or a number of rows of `train`, chosen by hash and taken out of it"
    )
    weight: float = Field(1.0, gt=0, description="share of the prompts drawn, in proportion to the other tasks'")

    @field_validator("heldout", mode="before")
    @classmethod
    def a_source_or_a_number(cls, heldout: Any) -> Any:
        if isinstance(heldout, str) or (type(heldout) is int and heldout > 0):
            return heldout
        raise ValueError(
            f"should be a file or hub:… of prompts, or how many rows of train to hold out, got {heldout!r}"
        )


class Suite(Rows):
    """A set that models are scored on. Shipped ones (megarl/recipes/suites) are known by name; keys given here go first."""

    choices: Literal["", "arc", "hellaswag"] = Field(
        "", description="multiple choice with rows of this set's columns, by log-likelihood; empty: answers are sampled"
    )
    data: str = Field(description="JSONL, JSON, Parquet or Arrow file, or hub:ORG/NAME:CONFIG:SPLIT")
    prompt: str = Field("{prompt}", description="what the model is asked; {prompt} stands for the row's")
    samples: int = Field(1, ge=1, description="answers a prompt: mean@samples, pass@k and maj@k up to it")
    prompts: int | None = Field(None, ge=1, description="at most so many, chosen by hash; null: all")
    heldout: int | None = Field(
        None,
        ge=1,
        description="only the rows of `data` that a task with this number for `heldout` holds out; null: all",
    )


class Data(Section):
    tasks: dict[TaskName, Task] = Field({}, description="by name; null takes one of the base recipe away")
    on_exhausted: Literal["stop", "reset"] = Field(
        "reset",
        description="when fewer prompts of a task are left than a batch has: draw no more of it, or begin again",
    )
    curriculum: Curriculum = Curriculum()
    services: dict[TaskName, Service] = Field({}, description="reward services, by the name that a grader has")
    sandbox: Literal["bubblewrap", "rlimits"] = Field(
        "bubblewrap",
        description="of grader: code; rlimits: no namespaces; on old kernels programs read, write and delete what you can",
    )
    decontaminate: tuple[str, ...] = Field(
        (), description="sources of evaluation sets: prompts with 13 words in a row of theirs are not trained on"
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def without_those_taken_away(cls, tasks: Any) -> Any:
        return {name: task for name, task in tasks.items() if task is not None} if isinstance(tasks, dict) else tasks

    @property
    def shares(self) -> dict[str, Fraction]:
        """Of the prompts drawn, by task: exact, a weight of 0.1 being a tenth."""
        weights = {name: Fraction(repr(task.weight)) for name, task in self.tasks.items()}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}
