"""`length`, `sampling`, `pipeline`: how rollouts are made."""

from collections.abc import Iterator
from typing import Literal, override

from pydantic import Field

from megarl.core.recipe.section import Section


class Stage(Section):
    """A shorter budget at the beginning of a run."""

    until_step: int = Field(
        ge=1, description="the stage is for prompts drawn for steps before this one"
    )
    thinking_tokens: tuple[int, int] = Field(
        description="budget of the stage, as length.thinking_tokens"
    )


class Length(Section):
    """Limits of prompts, thinking and answers, in tokens."""

    control: Literal["interruption", "overlong_penalty", "none"] = Field(
        "interruption",
        description=(
            "interruption: a phrase ends the thinking; the others sample thinking and answer in"
            " one, up to the sum of both limits"
        ),
    )
    prompt_tokens: int = Field(
        2048, ge=1, description="longest prompt with its template; longer ones are left out"
    )
    thinking_tokens: tuple[int, int] = Field(
        (10_000, 12_000),
        description=(
            "smallest and largest thinking budget; each rollout draws one; [0, 0] with another"
            " control than interruption: the model does not think"
        ),
    )
    stages: tuple[Stage, ...] = Field(
        (), description="shorter budgets at first, [{until_step, thinking_tokens}, …]"
    )
    answer_tokens: int = Field(
        2048,
        ge=1,
        description=(
            "maximum tokens after the thinking; overlong_penalty: the last ones, in which a right"
            " answer loses up to 1"
        ),
    )
    grade_truncated: bool = Field(
        False,
        description=(
            "grade an answer that a length limit cut off like a finished one; else math and exact"
            " count it as wrong unless it has a complete box or answer line"
        ),
    )
    end_of_thinking: str = Field(
        "</think>", description="the answer is the text after it; empty: no thinking trace"
    )
    interruption: str = Field(
        "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>",
        description="phrase appended when the thinking budget runs out; masked from the loss",
    )

    def at(self, step: int) -> "Length":
        """Return the section as it applies to a prompt drawn for this step: with its
        stage's budget, and no stages.
        """
        budget = self.thinking_tokens
        for stage in self.stages:
            if step < stage.until_step:
                budget = stage.thinking_tokens
                break
        return self.model_copy(update={"thinking_tokens": budget, "stages": ()})

    @property
    def completion_tokens(self) -> int:
        """Longest completion, interruption phrase not counted."""
        return self.thinking_tokens[1] + self.answer_tokens

    @property
    def context_tokens(self) -> int:
        """Longest sequence, interruption phrase not counted."""
        return self.prompt_tokens + self.completion_tokens

    @override
    def problems(self) -> Iterator[str]:
        yield from self._problems_of_budgets()
        end = self.end_of_thinking
        interrupts = self.control == "interruption"
        if end and not end.strip():
            yield (
                f"end_of_thinking: {end!r} is only white space, which every thinking trace"
                " contains; give what ends one"
            )
        if not end and interrupts:
            yield (
                "end_of_thinking: is empty, so no thinking trace is ever interrupted; set"
                " length.control=none, or give what ends a trace"
            )
        if interrupts and not self.interruption.endswith(end):
            yield (
                "interruption: must end with length.end_of_thinking, or the model would go on"
                " thinking in its answer"
            )

    def _problems_of_budgets(self) -> Iterator[str]:
        """Check that thinking budgets are intervals, and rise from stage to stage."""
        budgets = [("stages", stage.thinking_tokens) for stage in self.stages]
        budgets.append(("thinking_tokens", self.thinking_tokens))
        least = 1 if self.control == "interruption" else 0
        for key, (shortest, longest) in budgets:
            if not least <= shortest <= longest:
                yield f"{key}: give [shortest, longest], {least} or more"
        steps = [stage.until_step for stage in self.stages]
        if steps != sorted(set(steps)):
            yield (
                "stages: until_step must rise from stage to stage; it is"
                f" {', '.join(map(str, steps))}"
            )
        all_longest = [longest for _, (_, longest) in budgets]
        if all_longest != sorted(all_longest):
            yield (
                "stages: budgets must not fall, up to length.thinking_tokens; the longest are"
                f" {', '.join(map(str, all_longest))}"
            )


class Sampling(Section):
    """How rollouts are sampled."""

    generations: int = Field(16, ge=2, description="rollouts per prompt")
    temperature: float = Field(
        1.0,
        gt=0,
        description="divides the logits, on servers and learner; the paper gives no number",
    )


class PipelineSection(Section):
    """How far generation may run ahead of training."""

    kind: Literal["pipeline-rl", "ppo-off-policy"] = Field(
        "pipeline-rl",
        description=(
            "ppo-off-policy: k batches are generated with one version, then trained in k steps"
        ),
    )
    k: int = Field(
        8,
        ge=0,
        description="largest lag of a trained token, in steps; ppo-off-policy: steps per phase",
    )
    window: Literal["full", "auto"] = Field(
        "full",
        description=(
            "full: prompts are drawn as early as k allows; auto: only as early as the learner would"
            " wait for them otherwise; ppo-off-policy: phases are drawn whole"
        ),
    )

    @property
    def phase_steps(self) -> int:
        """Steps between two publications: those of a phase. For ppo-off-policy, k = 0
        and k = 1 are both synchronous.
        """
        return max(self.k, 1) if self.kind == "ppo-off-policy" else 1

    @property
    def max_lag(self) -> int:
        """Number of steps by which the phase being generated may be ahead of the
        servers' weights.
        """
        return 0 if self.kind == "ppo-off-policy" else self.k

    @property
    def lag_limit(self) -> int:
        """Largest lag of a trained token, in steps."""
        return self.max_lag + self.phase_steps - 1

    @property
    def window_steps(self) -> int:
        """Number of steps whose prompts may be drawn but not yet trained."""
        return self.max_lag + self.phase_steps
