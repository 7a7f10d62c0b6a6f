"""Runs `scalerl-1gpu` at its own shapes, with random weights and hash-based rewards,
killed, resumed and killed again.

Checkpoints are in TMPDIR, up to two at a time. Steps after the last checkpoint are
trained twice. Their batches come from the journal, so both times must have the same
loss, as far as kernels always add in the same order.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import networks, serving
from benchmarks.gpu.parts.checkpoint import BYTES_A_PARAMETER
from benchmarks.gpu.rows import Absent, Row, Said
from benchmarks.gpu.training import Training
from megarl.core.base.rundir import read_jsonl

STEADY = 2
SAVED = 12
KILLED = 14
AFTER = 4
"""The steps before which steps are not representative; of the first checkpoint; before
the kill, at least; after it.
"""
LENGTHS = ("run.steps=100000", f"checkpoint.every={SAVED}", "checkpoint.keep=1")
"""Without an end, so that the run is alive when its checkpoint is on a slow disk."""


def rows(tiny: bool) -> Iterator[Said]:
    serving.need_sglang()
    with tempfile.TemporaryDirectory() as name:
        recipe = serving.one_gpu(Path(name), tiny, "run.name=run", *LENGTHS)
        shape = networks.shape_of(recipe)
        free = shutil.disk_usage(name).free
        needed = 2.2 * BYTES_A_PARAMETER * shape.parameters
        if free < needed:
            raise Absent(
                f"{name} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed: set TMPDIR"
            )
        rollouts = recipe.batch.prompts * recipe.sampling.generations
        sizes = f"{serving.sizes(recipe)}, {rollouts} rollouts a step, k = {recipe.pipeline.k}"
        began = time.monotonic()
        first = Training(recipe)
        yield Row("until the first step is trained", first.wait_for(1) - began, "s", sizes)
        first.wait_for(KILLED, saved=True)
        first.kill()
        killed = time.monotonic()
        before = first.rows()
        yield f"killed by SIGKILL after step {len(before)}"
        second = Training(recipe, resume=True)
        for metric, unit in (
            ("step_seconds", "s"),
            ("train_seconds", "s"),
            ("publish_seconds", "s"),
            ("tokens_per_second", "tokens/s"),
        ):
            yield Row(
                f"{metric}, median",
                statistics.median(row[metric] for row in before[STEADY:]),
                unit,
                sizes,
            )
        for metric in ("lag_mean", "versions_per_rollout", "reward_mean", "zero_variance_share"):
            yield Row(
                f"{metric}, mean of steps",
                statistics.fmean(row[metric] for row in before),
                "",
                sizes,
            )
        yield Row(
            "from the kill to the next new step",
            second.wait_for(len(before) + 1) - killed,
            "s",
            sizes,
        )
        second.wait_for(len(before) + AFTER)
        second.kill()
        found = second.rows()
        lines = list(read_jsonl(second.rundir.metrics))
        yield {"rows": lines}
        trained = [
            row for row in found if not row["empty"] and not row["skipped"] and row["grad_norm"] > 0
        ]
        yield Row("steps that trained", len(trained), "steps", sizes, "of", len(found))
        yield from again(lines, sizes)
        if [row["step"] for row in found] != list(range(len(found))) or not trained:
            raise RuntimeError(
                f"steps {[row['step'] for row in found]}, of which {len(trained)} have a gradient"
            )


def again(lines: list[dict[str, float]], sizes: str) -> Iterator[Row]:
    """Yield rows on the steps that were trained both before and after the kill."""
    first: dict[float, dict[str, float]] = {}
    twice = []
    for line in lines:
        before = first.setdefault(line["step"], line)
        if before is not line and not line["empty"]:
            twice.append(abs(before["loss"] - line["loss"]))
    yield Row("steps trained again after the kill", len(twice), "steps", sizes)
    if twice:
        yield Row("their loss: largest difference", max(twice), "", sizes)
