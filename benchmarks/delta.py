"""How many values of a policy change from one publication to the next, how large is
their delta, and how fast is it made?

    python -m benchmarks.delta RUN --model DIR [--recipe quickstart] [--lr 5e-7]
    [--steps 40] [--dtype bf16] [--mib 64]

The learner replays the batches of RUN's journal in the given precision, with AdamW on
FP32 master weights as in any run, from the model DIR with which the run began, without
warm-up. The master weights of a newly loaded model are rounded values, and would need
hundreds of steps to reach points where rounding changes. So each is first moved to a
random point among those that round to it. After each step the weights are encoded
against those of the previous step.

`predicted` is the share that rounding alone explains: a master weight at a random
point, moved by u, is rounded to another number with probability min(1, |u| / the
distance between numbers there). `normal` is the same for normally distributed weights
with standard deviation 0.02, as in large models, and the same moves.

The codec's speed is measured on --mib MiB in which as many values changed by one as in
the median of those steps, and as many as in `normal`, relative to copying them. All
passes are repeated in turn, on one thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megarl.core import recipe as recipes
from megarl.core.base.rundir import RunDir
from megarl.core.base.types import Batch
from megarl.core.journal.journal import JournalReader
from megarl.core.learner.trainer import Trainer
from megarl.core.models import build, hf, parallel
from megarl.core.sync.delta import INTEGERS, add, decode, encode

REPEATS = 7
NORMAL = 0.0088
"""The share of changed values that was found for normal weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipe", default="quickstart", help="the run's, if it is another")
    parser.add_argument(
        "--model", required=True, help="Hugging Face directory: the model that the run began with"
    )
    parser.add_argument("--lr", type=float, default=5e-7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = (f"model.path={options.model}", f"model.dtype={options.dtype}")
    optimizer = (f"learner.optimizer.lr={options.lr}", "learner.optimizer.warmup_steps=0")
    recipe = recipes.load(options.recipe, [*model, *optimizer])
    parallel.start(recipe.model, seed=0, timeout_s=60)
    trainer = Trainer(recipe, Path(options.model))
    journal = JournalReader(RunDir(options.run).rollouts)
    share = statistics.median(replayed(trainer, journal, options.steps))
    for each in (share, NORMAL):
        passes(options.mib << 20, each, build.DTYPES[options.dtype])


def replayed(trainer: Trainer, journal: JournalReader, steps: int) -> list[float]:
    """Train, and print what changed; return each step's share of changed values."""
    admission = journal.fold().admission
    before = exported(trainer)
    rows = []
    whole = sum(tensor.nbytes for tensor in before.values())
    values = sum(tensor.numel() for tensor in before.values())
    print(
        f"{values:,} values, {whole / 2**20:.2f} MiB; in percent, of all values and of all bytes",
        flush=True,
    )
    dtype = next(iter(before.values())).dtype
    for weights in parameters(trainer):
        weights.add_((torch.rand_like(weights) - 0.5) * distance(weights, dtype))
    for step in range(steps):
        masters = [weights.clone() for weights in parameters(trainer)]
        metrics = trainer.train_step(
            trainer.sequences(Batch(step, journal.whole_groups(admission.batch(step) or ())))
        )
        after = exported(trainer)
        moved = [(old, new - old) for old, new in zip(masters, parameters(trainer), strict=True)]
        codes = {name: encode(before[name], after[name]) for name in after}
        for name, code in codes.items():
            add(before[name], decode(code))
            assert torch.equal(bits(before[name]), bits(after[name])), name
        changed = sum(int((bits(a) != 0).sum()) for a in (decode(code) for code in codes.values()))
        update = (
            torch.cat([by for _, by in moved]).square().mean().sqrt().item()
            / trainer.policy.settings.lr
        )
        predicted = [
            sum(float(crossing(w, by, dtype)) for w, by in some) / values
            for some in (moved, normal(moved))
        ]
        if step and not metrics["empty"]:  # the first step also rounds the randomly moved weights
            rows.append(
                (changed / values, sum(map(len, codes.values())) / whole, *predicted, update)
            )
    for column, title in enumerate(("values changed", "bytes of the delta", "predicted", "normal")):
        each = sorted(100 * row[column] for row in rows)
        print(
            f"{title:>20}  median {statistics.median(each):.3f}  least {each[0]:.3f}  most"
            f" {each[-1]:.3f}"
        )
    print(
        "an update's root mean square, in learning rates:"
        f" {statistics.median(row[4] for row in rows):.2f}; steps: {len(rows)}"
    )
    return [row[0] for row in rows]


def exported(trainer: Trainer) -> dict[str, Tensor]:
    policy = trainer.policy
    return {
        name: tensor.clone()
        for name, tensor in hf.export(policy.chunks, policy.family, stacked=False)
    }


def parameters(trainer: Trainer) -> list[Tensor]:
    """Return the FP32 weights that AdamW updates, flattened."""
    groups = [
        g
        for part in trainer.policy.optimizer.chained_optimizers
        for g in part.optimizer.param_groups
    ]
    return [parameter.detach().view(-1) for group in groups for parameter in group["params"]]


def distance(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance from each weight to the next number of the type."""
    near = weights.to(dtype).abs()
    return ((bits(near) + 1).view(dtype) - near).float()


def crossing(weights: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the expected number of weights that are rounded to another number after
    moving by `by`.
    """
    return (by.abs() / distance(weights, dtype)).clamp(max=1).sum()


def normal(moved: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(0.02 * torch.randn_like(weights), by) for weights, by in moved]


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])


def passes(size: int, share: float, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    old = (0.02 * torch.randn(size // 2, generator=draw)).to(dtype)
    new = old.clone()
    steps = (torch.rand(size // 2, generator=draw) < share).short()
    bits(new).add_(steps * (2 * torch.randint(0, 2, (size // 2,), generator=draw).short() - 1))
    code = encode(old, new)
    room = torch.empty_like(old)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: room.copy_(new),
        "encode": lambda: encode(old, new),
        "decode and add": lambda: add(room, decode(code)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            seconds[name].append(time.process_time() - begin)
    print(
        f"{size >> 20} MiB, {100 * share:.2f} % changed, delta {100 * len(code) / size:.2f} %; CPU"
        f" time, medians of {REPEATS}"
    )
    for name, each in seconds.items():
        median = statistics.median(each)
        print(
            f"{name:>16} {size / 1e6 / median:>7.0f} MB/s"
            f" {statistics.median(seconds['copy']) / median:>6.3f} of copy",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
