"""Trains a recipe's model on its questions by TRL's GRPOTrainer, and scores the
held-out ones as the recipe says.

    PYTHONPATH=.bench:. python -m benchmarks.trl_real RECIPE.yaml \
        '{"loss_type": "dapo"}'

It prints one JSON line, a `MeasuredTraining` (real_comparison.py). The second argument
has other settings of GRPOConfig, to try them. With `bf16` weights are FP32 and products
bf16; without it all is bf16.
"""

import asyncio
import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
)
from trl import GRPOTrainer  # noqa: E402

from benchmarks.real_comparison import HeldOutScore, MeasuredTraining  # noqa: E402
from benchmarks.trl_grpo import Clock, settings  # noqa: E402
from megarl.core import recipe as recipes  # noqa: E402
from megarl.core.base.contracts import Grade  # noqa: E402
from megarl.core.base.errors import MegarlError  # noqa: E402
from megarl.core.base.rundir import read_jsonl  # noqa: E402
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from megarl.core.base.types import Prompt, int32  # noqa: E402
from megarl.core.recipe import Recipe  # noqa: E402
from megarl.tasks.data.prompts import load_tasks  # noqa: E402
from megarl.tasks.graders.grader import TaskGraders  # noqa: E402

ADAMW = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-15, "weight_decay": 0.01}
"""As in megarl/core/learner/optimizer.py."""
PRECISION = {"bf16": True}
"""TRL's default: products in bf16 of FP32 weights, as in megarl's learner.

In bf16 weights most updates of this rate would be lost to rounding.
"""


class RecipeGrader:
    """The recipe's grader, for code that is not asynchronous."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._runner = asyncio.Runner()
        self._graders = self._runner.run(_graders(recipe, tokenizer))

    def grades(self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> list[Grade]:
        """Return the grade of each answer: token ids, up to and with the end token if
        there is one.
        """
        return self._runner.run(self._grades(prompts, answers))

    async def _grades(
        self, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]
    ) -> list[Grade]:
        asked = [
            self._grade(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return list(await asyncio.gather(*asked))

    async def _grade(self, prompt: Prompt, answer: Sequence[int]) -> Grade:
        ended = len(answer) > 0 and answer[-1] in self._tokenizer.ends
        text = answer[:-1] if ended else answer
        decoded = self._tokenizer.continued(int32(text))
        return await self._graders[prompt.task].grade(decoded, prompt, truncated=not ended)


async def _graders(recipe: Recipe, tokenizer: Tokenizer) -> TaskGraders:
    """Make the graders within the event loop that they need."""
    return TaskGraders(recipe, tokenizer.decode)


class HeldOut(TrainerCallback):
    """Scores the held-out prompts before training, every `evaluation.every` steps and
    at the end, while the clock is paused.
    """

    def __init__(
        self,
        recipe: Recipe,
        prompts: Sequence[Prompt],
        ends: Sequence[int],
        grader: RecipeGrader,
        clock: Clock,
    ) -> None:
        self._recipe = recipe
        self._prompts = [prompt for prompt in prompts for _ in range(recipe.evaluation.samples)]
        self._ends = ends
        self._grader = grader
        self._clock = clock
        self.scores: list[HeldOutScore] = []

    def on_train_begin(self, *args: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        self._score(model, 0, 0.0)

    def on_step_end(
        self,
        arguments: object,
        state: TrainerState,
        *args: Any,
        model: PreTrainedModel,
        **kwargs: Any,
    ) -> None:
        step = state.global_step
        if step % self._recipe.evaluation.every == 0 or step == state.max_steps:
            self._score(model, step, self._clock.ends[-1])

    def _score(self, model: PreTrainedModel, step: int, seconds: float) -> None:
        with self._clock.watch.paused():
            model.eval()
            grades = self._grader.grades(self._prompts, self._answers(model))
            model.train()
        pass_rate = sum(grade.correct for grade in grades) / len(grades)
        self.scores.append(HeldOutScore(step, seconds, pass_rate))
        print(
            f"step {step}: {seconds:.0f} s, held out {pass_rate:.3f}", file=sys.stderr, flush=True
        )

    @torch.no_grad()
    def _answers(self, model: PreTrainedModel) -> list[list[int]]:
        """Return a sampled answer to each prompt: its token ids, up to and with the end
        token if there is one.
        """
        longest = max(len(prompt.tokens) for prompt in self._prompts)
        ids = torch.full((len(self._prompts), longest), self._ends[0])
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(self._prompts):
            ids[row, longest - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens)
            mask[row, longest - len(prompt.tokens) :] = 1
        sampling = GenerationConfig(
            do_sample=True,
            temperature=self._recipe.evaluation.temperature,
            top_p=self._recipe.evaluation.top_p,
            top_k=0,
            max_new_tokens=self._recipe.length.answer_tokens,
            eos_token_id=list(self._ends),
            pad_token_id=self._ends[0],
        )
        made = model.generate(input_ids=ids, attention_mask=mask, generation_config=sampling)
        return [up_to_end(answer, self._ends) for answer in made[:, longest:].tolist()]


def up_to_end(answer: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the ids up to and with the first end token; all if there is none."""
    for position, token in enumerate(answer):
        if token in ends:
            return list(answer[: position + 1])
    return list(answer)


def conversations(recipe: Recipe) -> dict[str, list[dict[str, str]]]:
    """Return the messages of each training question, by its id."""
    (task,) = recipe.data.tasks.values()
    messages = {}
    for row in read_jsonl(Path(task.train)):
        messages[row["id"]] = [
            {"role": "system", "content": task.system},
            {"role": "user", "content": row["prompt"]},
        ]
    return messages


def check_same(
    prompt: Prompt, conversation: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise MegarlError if TRL would show the model other tokens than megarl does."""
    shown = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
    if list(shown) != prompt.tokens.tolist():
        raise MegarlError(
            f"prompt {prompt.id!r}: TRL's tokens {shown} are not megarl's {prompt.tokens.tolist()}"
        )


def train(recipe: Recipe, chosen: Mapping[str, Any]) -> MeasuredTraining:
    """Train for `run.steps` steps. chosen: settings of GRPOConfig."""
    ours = load_tokenizer(recipe.model.path)
    (prompts,) = load_tasks(recipe, ours).values()
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path, padding_side="left")
    by_id = {prompt.id: prompt for prompt in prompts.train}
    conversation_of = conversations(recipe)
    for prompt in prompts.train:
        check_same(prompt, conversation_of[prompt.id], tokenizer)
    grader = RecipeGrader(recipe, ours)
    tokens: list[int] = []

    def reward(completion_ids: list[list[int]], question: list[str], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        asked = [by_id[name] for name in question]
        return [grade.reward for grade in grader.grades(asked, completion_ids)]

    clock = Clock()
    held_out = HeldOut(
        recipe, prompts.heldout[: recipe.evaluation.prompts], ours.ends, grader, clock
    )
    optimizer = recipe.learner.optimizer
    with tempfile.TemporaryDirectory() as out:
        arguments = settings(
            output_dir=out,
            num_generations=recipe.sampling.generations,
            per_device_train_batch_size=recipe.batch.prompts * recipe.sampling.generations,
            max_completion_length=recipe.length.answer_tokens,
            max_steps=recipe.run.steps,
            learning_rate=optimizer.lr,
            lr_scheduler_type=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            max_grad_norm=optimizer.grad_clip,
            temperature=recipe.sampling.temperature,
            seed=recipe.run.seed,
            **ADAMW | chosen,
        )
        dtype = torch.float32 if arguments.bf16 else torch.bfloat16
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=dtype),
            reward_funcs=reward,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(
                [{"question": name, "prompt": conversation_of[name]} for name in by_id]
            ),
            callbacks=[clock, held_out],
            args=arguments,
        )
        trainer.train()
    return MeasuredTraining(tuple(tokens), tuple(clock.ends), tuple(held_out.scores))


def main() -> None:
    recipe = recipes.load(sys.argv[1])
    print(json.dumps(asdict(train(recipe, PRECISION | json.loads(sys.argv[2])))))


if __name__ == "__main__":
    main()
