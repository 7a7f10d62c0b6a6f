#!/usr/bin/env bash
# Losses with and without a trust region on the tiny model of experts, with and without routing replay, in FP32 and in bf16:
# four studies of all arms of this folder. Each run that has ended becomes a row of benchmarks/results/trust_regions.json.
#   benchmarks/trust_regions/run.sh [options and overrides of `megarl study compare`: --seeds 0,1,2 run.steps=100]
# The same command goes on after an interruption. At the quickstart's rate (2e-4, one epoch, 24 prompts) hardly a ratio leaves
# anyone's bounds; here CISPO collapses. A run takes one to two minutes of two idle cores in FP32, four in bf16 without AVX-512.
# Needs the warm start: `megarl data arithmetic runs/quickstart-data`, `megarl sft quickstart-moe`.
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl=${MEGARL:-.venv/bin/megarl}
for dtype in fp32 bf16; do
    for replay in false true; do
        $megarl study compare benchmarks/trust_regions/*.yaml --dir "runs/studies/trust-regions-$dtype-replay-$replay" \
            --seeds 0 run.steps=24 batch.prompts=8 learner.optimizer.lr=1e-3 learner.epochs=2 \
            evaluation.every=24 evaluation.prompts=64 evaluation.samples=1 checkpoint.every=24 \
            model.dtype=$dtype model.moe.routing_replay=$replay "$@"
    done
done
.venv/bin/python - <<'END'
import json
from pathlib import Path
from statistics import mean

rows = []
for summary in sorted(Path("runs/studies").glob("trust-regions-*/runs/*/summary.json")):
    dtype, _, replay = summary.parts[-4].removeprefix("trust-regions-").split("-")
    arm, _, seed = summary.parent.name.rpartition("-seed")
    steps, scores = ([json.loads(line) for line in (summary.parent / f"{n}.jsonl").open()] for n in ("metrics", "eval"))
    trained = [step for step in steps if "ratio_max" in step]  # without a step that zero variance emptied
    first, last = (mean(step["pass_rate_train"] for step in part) for part in (steps[:6], steps[-6:]))
    rows.append({
        "arm": arm, "dtype": dtype, "routing_replay": replay == "true", "seed": int(seed), "steps": len(steps),
        "held_out": [score["pass_rate"] for score in scores], "first_6": first, "last_6": last,
        "collapsed": last < first / 2, "ratio_max": max(step["ratio_max"] for step in trained),
        "kl_k3": mean(step["kl_k3"] for step in trained[-6:]), "entropy": trained[-1]["entropy"],
        "routing_differs": mean(step.get("parity_routing", 0) for step in steps),
        "no_gradient": mean(max(step.get(f"{kind}_share", 0) for kind in ("clipped", "sequence_masked")) for step in trained),
    })
Path("benchmarks/results/trust_regions.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
END
