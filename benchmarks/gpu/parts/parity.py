"""Measures how far server and learner differ in bf16 and in fp16, by cause
(megarl/core/evaluation/parity.py), in short runs.

The references are the limits above which a run would warn.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import serving
from benchmarks.gpu.rows import Row, Said
from benchmarks.gpu.training import Training
from benchmarks.parity.__main__ import told
from megarl.core.evaluation.parity import CAUSES, LIMITS

STEPS = 4
SHORT = (
    f"run.steps={STEPS}",
    "batch.prompts=8",
    "sampling.generations=4",
    "serving.max_running_requests=32",
    "checkpoint.every=100000",
)


def rows(tiny: bool) -> Iterator[Said]:
    serving.need_sglang()
    failures = []
    with tempfile.TemporaryDirectory() as name:
        for dtype in ("bf16", "fp16"):
            recipe = serving.one_gpu(
                Path(name), tiny, f"run.name={dtype}", f"model.dtype={dtype}", *SHORT
            )
            run = Training(recipe)
            try:
                run.wait_for(STEPS)
                run.kill()  # before it writes a checkpoint, which takes longer than the steps
            except (
                RuntimeError
            ) as failed:  # perhaps because of the differences that are to be measured
                failures.append(f"{dtype}: {failed}")
            found = told(run.rundir.path)
            shutil.rmtree(
                run.rundir.checkpoints, ignore_errors=True
            )  # makes room for the other type's
            yield {"dtype": dtype} | found
            limits = LIMITS[dtype, False]
            for cause in CAUSES:
                if cause not in found:
                    yield f"{dtype}, {cause}: nothing was measured"
                    continue
                one = found[cause]
                sizes = (
                    f"{serving.sizes(recipe)}, {one['tokens']} tokens of {found['publications']}"
                    " publications"
                )
                judged = cause in ("kernels", "decode")
                limit = (
                    ("limit", limits.mean_of(cause, int(one["tokens"]))) if judged else ("", None)
                )
                yield Row(
                    f"{dtype}, {cause}: mean difference of a log-prob",
                    one["mean"],
                    "nats",
                    sizes,
                    *limit,
                )
                yield Row(f"{dtype}, {cause}: 99th percentile", one["p99"], "nats", sizes)
    if failures:
        raise RuntimeError("; ".join(failures))
