"""How far does a policy move in its first steps in bf16 and in FP32, from the same
weights by the same batches?

    python -m benchmarks.dead_zone RUN --model DIR [--recipe quickstart] [--rates 1e-6
    2e-5] [--steps 10]

The weights of DIR, with which RUN began, are rounded to bf16. The learner then trains
on the batches of RUN's journal, without warm-up: in bf16, as any run does with FP32
main weights, and in FP32. After each step it scores the rollouts of the first batch.

changed  share of weights that are another bf16 number than at first; in FP32: rounded
moved    mean |d|, for d the change of a token's log-prob since the first step
along    bf16: how much of FP32's movement it makes,
         <d, d of FP32> / <d of FP32, d of FP32>
noise    bf16: mean |d - along x d of FP32|, what is not of that movement

FP32 is the reference. In bf16 a weight moves only when its FP32 main weight has come
half of the way to the next bf16 number, and then it jumps all of it.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.delta import bits, exported
from megarl.core import recipe as recipes
from megarl.core.base.messages import Score, ScoredRollout
from megarl.core.base.rundir import RunDir
from megarl.core.base.types import Batch
from megarl.core.journal.journal import JournalReader
from megarl.core.learner.trainer import Trainer
from megarl.core.models import parallel
from megarl.core.recipe import Recipe

SHOWN = (1, 2, 5, 10, 20, 50, 100)
"""Steps after which a row is printed."""


@dataclass(frozen=True, eq=False)
class Movement:
    """How far a policy is from its start. change: of each token's log-prob, [tokens]
    float32.
    """

    step: int
    change: np.ndarray
    changed_weights: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", default="quickstart", help="the run's, if it is another")
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="Hugging Face directory: the model that RUN began with",
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 2e-5])
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parallel.start(recipes.Model(), seed=0, timeout_s=60)
    batches = first_batches(options.run, options.steps)
    print(
        f"{'rate':>8} {'steps':>5} {'dtype':>5} {'changed':>9} {'moved':>9} {'along':>6}"
        f" {'noise':>9}"
    )
    with tempfile.TemporaryDirectory() as folder:
        start = rounded(options.model, Path(folder) / "model")
        for rate in options.rates:
            exact, bf16 = (
                list(movements(recipe_with(options.recipe, start, dtype, rate), start, batches))
                for dtype in ("fp32", "bf16")
            )
            for one, other in zip(exact, bf16, strict=True):
                if one.step in SHOWN:
                    show(rate, one, other)


def show(rate: float, exact: Movement, bf16: Movement) -> None:
    along = float(bf16.change @ exact.change) / float(exact.change @ exact.change)
    noise = np.abs(bf16.change - along * exact.change).mean()
    for dtype, one, more in (("fp32", exact, ""), ("bf16", bf16, f" {along:6.2f} {noise:9.5f}")):
        moved = np.abs(one.change).mean()
        print(
            f"{rate:8g} {one.step:5} {dtype:>5} {one.changed_weights:9.3%} {moved:9.5f}{more}",
            flush=True,
        )


def first_batches(run: Path, steps: int) -> list[Batch]:
    journal = JournalReader(RunDir(run).rollouts)
    admission = journal.fold().admission
    return [
        Batch(step=step, groups=journal.whole_groups(admission.batch(step) or ()))
        for step in range(steps)
    ]


def rounded(model: Path, copy: Path) -> Path:
    """Copy a Hugging Face directory with its weights rounded to bf16."""
    shutil.copytree(model, copy)
    for file in copy.glob("*.safetensors"):
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    return copy


def recipe_with(name: str, model: Path, dtype: str, rate: float) -> Recipe:
    optimizer = [f"learner.optimizer.lr={rate}", "learner.optimizer.warmup_steps=0"]
    return recipes.load(name, [f"model.path={model}", f"model.dtype={dtype}", *optimizer])


def movements(recipe: Recipe, model: Path, batches: Sequence[Batch]) -> Iterator[Movement]:
    """Train on the batches; after each step yield how far the policy is
    from its start.
    """
    trainer = Trainer(recipe, model)
    sequences = trainer.sequences(batches[0])
    scored = tuple(
        ScoredRollout(tokens=s.tokens, first=int(np.argmax(s.trained))) for s in sequences
    )
    before = logprobs(trainer, scored)
    start = bf16_weights(trainer)
    for batch in batches:
        trainer.train_step(trainer.sequences(batch))
        change = logprobs(trainer, scored) - before
        yield Movement(trainer.step, change, changed_share(start, bf16_weights(trainer)))


def logprobs(trainer: Trainer, rollouts: tuple[ScoredRollout, ...]) -> np.ndarray:
    """Return the log-probs of all scored tokens, [tokens] float32."""
    return np.concatenate(
        trainer.score(Score(version=trainer.step, rollouts=rollouts, against=0), "").logprobs
    )


def bf16_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in exported(trainer).items()}


def changed_share(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    changed = sum(int((bits(before[name]) != bits(after[name])).sum()) for name in after)
    return changed / sum(tensor.numel() for tensor in after.values())


if __name__ == "__main__":
    sys.exit(main())
