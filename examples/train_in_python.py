"""ScaleRL's step in Python, from prompts to new weights: one process, no servers. A
tiny model learns to add two digits, in half a minute of one CPU core.

    python examples/train_in_python.py

    prompts ─► groups of rollouts ─► grades ─► advantages ─► CISPO ─► AdamW ─┐
                  ▲                                                         │
                  └───────────── the new weights sample the next ───────────┘

It prints how often the answers to the 80 sums in training, and to 20 others, are right.
`megarl train` runs the same functions as roles of their own, all at once: SGLang's
servers sample, a controller draws and grades, the learner's ranks train.
"""

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.core import recipe as recipes
from megarl.core.algorithm.advantages import NOTHING_SEEN
from megarl.core.algorithm.advantages.group import centred_rewards, divided
from megarl.core.algorithm.batch import TrainSequence, groups_in_loss, sequences_in_loss, unrewarded
from megarl.core.base.rundir import write_jsonl
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import Batch, Group, Prompt, Rollout, Segment, float32, int32
from megarl.core.controller.draw import PromptOrder
from megarl.core.learner.microbatch import MicroBatch
from megarl.core.learner.trainer import Trainer
from megarl.core.models import hf, parallel
from megarl.core.recipe import Recipe
from megarl.tasks.data.arithmetic_models import LLAMA, save_model
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.data.traces import MAX_TOKENS, load_traces
from megarl.tasks.graders.grader import TaskGrader, TaskGraders
from megarl.tools import sft

RECIPE = """  # what it leaves out is as in ScaleRL: the loss is CISPO
model: {path: policy, dtype: fp32}
data: {tasks: {sums: {train: train.jsonl, heldout: heldout.jsonl, grader: exact}}}
length: {control: none, end_of_thinking: "", thinking_tokens: [0, 0], answer_tokens: 3}
sampling: {generations: 16}
batch: {prompts: 32}
learner: {microbatch_tokens: 4096, optimizer: {lr: 1.0e-3, warmup_steps: 5}}
sft: {init: random, data: traces.jsonl, steps: 100, batch_tokens: 600, optimizer: {lr: 3.0e-3}}
"""
TINY = LLAMA | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}


def write_inputs() -> None:
    """Write recipe, prompts, a random model, and traces of a teacher who guesses."""
    draw = random.Random(0)
    rows = [{"prompt": f"{n // 10}+{n % 10}=", "answer": str(n // 10 + n % 10)} for n in range(100)]
    draw.shuffle(rows)
    traces = []
    for row in rows[20:] * 20:
        answer = row["answer"] if draw.random() < 0.6 else str(draw.randrange(19))
        traces.append({"prompt": row["prompt"], "completion": answer})
    write_jsonl(Path("heldout.jsonl"), rows[:20])
    write_jsonl(Path("train.jsonl"), rows[20:])
    write_jsonl(Path("traces.jsonl"), traces)
    save_model(Path("random"), TINY, seed=0)
    Path("recipe.yaml").write_text(RECIPE)


def warm_start(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Train the random model on the traces, and write it to model.path, as `megarl sft`
    does: a policy that is never right learns nothing from rewards.
    """
    trainer = Trainer(recipe, Path(recipe.sft.init), supervised=True)
    traces = load_traces(recipe.sft.data, tokenizer, (), MAX_TOKENS)
    batches = sft.batches(traces, recipe.sft.batch_tokens, recipe.run.seed)
    for sequences in islice(batches, recipe.sft.steps):
        trainer.train_step(sequences)
    policy = trainer.policy
    hf.save(policy.chunks, policy.family, Path(recipe.sft.init), Path(recipe.model.path))


def head(*, context: MicroBatch, hidden_states: Tensor, output_layer: Any, **_: object) -> Tensor:
    """Return the log-probs [n, vocabulary] of what may follow each of n positions."""
    return (hidden_states.flatten(0, 1)[context.positions] @ output_layer.weight.T).log_softmax(-1)


@dataclass(frozen=True)
class Loop:
    """A step, in parts: `sample`, `grade`, `advantages`, and megarl's `train_step`."""

    recipe: Recipe
    tokenizer: Tokenizer
    grader: TaskGrader
    trainer: Trainer
    random: np.random.Generator

    def sample(self, prompts: Sequence[Prompt]) -> list[Segment]:
        """Return completions. The network reads the whole text again for each token."""
        vocabulary = self.trainer.policy.family.architecture.vocabulary
        texts = [prompt.tokens for prompt in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        for _ in range(self.recipe.length.completion_tokens):
            unfinished = [n for n, text in enumerate(texts) if text[-1] != self.tokenizer.end]
            if not unfinished:
                break
            # `ask` answers for given tokens; the 0 only stands where the next will be
            extended = [np.append(texts[n], int32([0])) for n in unfinished]
            questions = [unrewarded(n, text, len(text) - 1) for n, text in enumerate(extended)]
            answers = self.trainer.policy.ask(questions, head, shape=(vocabulary,))
            for n, distributions in zip(unfinished, answers, strict=True):
                noise = self.random.gumbel(size=vocabulary)  # so the largest is a sample
                token = int(np.argmax(distributions[-1] + noise))
                texts[n] = np.append(texts[n], int32([token]))
                logprobs[n].append(float(distributions[-1][token]))
        segments = []
        step = self.trainer.step
        for prompt, text, values in zip(prompts, texts, logprobs, strict=True):
            tokens = text[len(prompt.tokens) :]
            segments.append(Segment(tokens=tokens, logprobs=float32(values), weight_version=step))
        return segments

    async def grade(self, prompt: Prompt, sample: int, segment: Segment) -> Rollout:
        """Return a completion with its reward."""
        finished = segment.tokens[-1] == self.tokenizer.end
        text = self.tokenizer.decode(segment.tokens[:-1] if finished else segment.tokens)
        grade = await self.grader.grade(text, prompt, truncated=not finished)
        return Rollout(
            sample=sample,
            segments=(segment,),
            reward=grade.reward,
            correct=grade.correct,
            finish="stop" if finished else "length",
        )

    async def groups(self, prompts: Sequence[Prompt], generations: int) -> tuple[Group, ...]:
        """Return a group of graded rollouts of each prompt."""
        segments = iter(self.sample([prompt for prompt in prompts for _ in range(generations)]))
        groups = []
        for ticket, prompt in enumerate(prompts):
            rollouts = [await self.grade(prompt, n, next(segments)) for n in range(generations)]
            groups.append(Group(ticket=ticket, prompt=prompt, rollouts=tuple(rollouts)))
        return tuple(groups)

    def advantages(self, batch: Batch) -> list[TrainSequence]:
        """Return the sequences of groups that are neither all right nor all wrong. The
        advantage is the reward less the group's mean, by the deviation in the batch.
        """
        groups = groups_in_loss(batch.groups, self.recipe.batch)
        centred = [centred_rewards(group, "group", {}) for group in groups]
        values = np.concatenate([np.zeros(0), *divided(centred, "batch", NOTHING_SEEN)])
        sequences = sequences_in_loss(batch, self.recipe)
        return [replace(s, advantage=float(v)) for s, v in zip(sequences, values, strict=True)]

    async def pass_rate(self, prompts: Sequence[Prompt]) -> float:
        """Return the share of right answers, of four to each prompt."""
        return float(np.mean([group.pass_rate for group in await self.groups(prompts, 4)]))


async def train(steps: int) -> Loop:
    """Take that many steps from the inputs in the working directory."""
    recipe = recipes.load("recipe.yaml", [f"run.steps={steps}"])
    parallel.start(recipe.model, recipe.run.seed, timeout_s=60)
    tokenizer = load_tokenizer(recipe.sft.init)
    warm_start(recipe, tokenizer)
    trainer = Trainer(recipe, Path(recipe.model.path))
    grader = TaskGraders(recipe, tokenizer.decode)["sums"]
    loop = Loop(recipe, tokenizer, grader, trainer, np.random.default_rng(recipe.run.seed))
    training, heldout = load_tasks(recipe, tokenizer)["sums"]
    prompts = {prompt.id: prompt for prompt in training}
    difficulty = dict.fromkeys(prompts, 0)
    batch = recipe.batch
    order = PromptOrder(difficulty, recipe.run.seed, batch.positive_threshold, batch.prompts)
    for step in range(steps):
        if step % 10 == 0:
            rates = (await loop.pass_rate(training), await loop.pass_rate(heldout))
            print("step {:3}  right: {:.2f} in training, {:.2f} held out".format(step, *rates))
        drawn = [prompts[order.draw().prompt_id] for _ in range(batch.prompts)]
        groups = await loop.groups(drawn, recipe.sampling.generations)
        for group in groups:  # what is nearly always answered rightly is not drawn again
            order.observe(group.prompt.id, group.pass_rate)
        trainer.train_step(loop.advantages(Batch(step=step, groups=groups)))
    return loop


def main(steps: int = 61) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs()
        asyncio.run(train(steps))
        parallel.stop()


if __name__ == "__main__":
    main()
