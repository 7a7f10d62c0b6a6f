"""`evaluation`: when and on what the policy is scored."""

from pydantic import Field

from megarl.core.recipe.data import LM_EVAL, Suite
from megarl.core.recipe.section import Section, TaskName


class Evaluation(Section):
    """When and on what the policy is scored."""

    every: int = Field(
        100, ge=1, description="steps between evaluations; also at step 0 and after the last"
    )
    growth: float = Field(
        1.0,
        ge=1,
        description=(
            "above 1: each evaluation's step is that of the last times this, at least `every` later"
        ),
    )
    prompts: int = Field(1000, ge=1, description="held-out prompts of each task")
    samples: int = Field(16, ge=1, description="answers per prompt: mean@samples")
    temperature: float = Field(
        1.0, ge=0, description="divides the logits of evaluation answers; 0: greedy"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus of evaluation answers")
    keep: int | None = Field(
        None, ge=1, description="newest evaluations whose answers are kept; null: all"
    )
    forecast: str = Field(
        "",
        description=(
            "task or suite whose pass rate is forecast; empty: that of a single task, none with"
            " several"
        ),
    )
    suites: dict[TaskName, Suite] = Field(
        {}, description="further sets to score, by name; `aime24: {}` is shipped"
    )

    @property
    def sampled(self) -> dict[str, Suite]:
        """Suites whose answers are sampled and graded."""
        return {
            name: suite for name, suite in self.suites.items() if not suite.data.startswith(LM_EVAL)
        }
