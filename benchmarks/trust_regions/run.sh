#!/usr/bin/env bash
# Losses with and without a trust region on the tiny model of experts, with and without routing replay, in bf16, fp16 and FP32:
# six studies of all arms of this folder; then CISPO with frozen routers. Each run that has ended becomes a row of
# benchmarks/results/trust_regions.json, in place of the one that was there.
#   benchmarks/trust_regions/run.sh [options and overrides of `megarl study compare`: --seeds 0,1,2 run.steps=100]
# The same command goes on after an interruption. At the quickstart's rate (2e-4, one epoch, 24 prompts) hardly a ratio leaves
# anyone's bounds; here CISPO collapses. A run takes one to two minutes of two idle cores in FP32, four in bf16 without AVX-512.
# Needs the warm start: `megarl data arithmetic runs/quickstart-data`, `megarl sft quickstart-moe`.
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl=${MEGARL:-.venv/bin/megarl}
arms=benchmarks/trust_regions
study() {  # what tells its runs from others', then its arms and their overrides
    local name=$1
    shift
    $megarl study compare --dir "runs/studies/trust-regions-$name" --seeds 0 run.steps=24 batch.prompts=8 \
        learner.optimizer.lr=1e-3 learner.epochs=2 checkpoint.every=24 \
        evaluation.every=24 evaluation.prompts=64 evaluation.samples=1 "$@"
}
for dtype in bf16 fp16 fp32; do
    for replay in false true; do
        study "$dtype-replay-$replay" $arms/*.yaml model.dtype=$dtype model.moe.routing_replay=$replay "$@"
    done
done
study fp32-replay-frozen $arms/cispo.yaml model.dtype=fp32 model.moe.freeze_router=true "$@"
.venv/bin/python - <<'END'
import json
from pathlib import Path
from statistics import mean, median

KEYS = ("dtype", "routing", "arm", "seed")
ROUTING = {"false": "own", "true": "replayed", "frozen": "own, routers frozen"}
file = Path("benchmarks/results/trust_regions.json")
rows = {tuple(row[key] for key in KEYS): row for row in json.loads(file.read_text())}
for summary in sorted(Path("runs/studies").glob("trust-regions-*/runs/*/summary.json")):
    if json.loads(summary.read_text())["outcome"] != "finished":
        continue
    dtype, _, replay = summary.parts[-4].removeprefix("trust-regions-").split("-")
    arm, _, seed = summary.parent.name.rpartition("-seed")
    steps, scores = ([json.loads(line) for line in (summary.parent / f"{n}.jsonl").open()] for n in ("metrics", "eval"))
    trained = [step for step in steps if "ratio_max" in step]  # without steps that zero variance emptied
    late = trained[-6:]
    row = {
        "arm": arm, "dtype": dtype, "routing": ROUTING[replay], "seed": int(seed), "steps": len(steps),
        "held_out": [score["pass_rate"] for score in scores],
        "pass_rate_by_6": [mean(step["pass_rate_train"] for step in steps[i : i + 6]) for i in range(0, len(steps), 6)],
        "ratio_max": [median(step["ratio_max"] for step in trained), max(step["ratio_max"] for step in trained)],
        "kl_k3": mean(step["kl_k3"] for step in late), "entropy": mean(step["entropy"] for step in late),
        "imbalance": [trained[0]["expert_imbalance_max"], trained[-1]["expert_imbalance_max"]],
        "routing_differs": mean(step.get("parity_routing", 0) for step in steps),
        "no_gradient": mean(max(step.get(f"{kind}_share", 0) for kind in ("clipped", "sequence_masked")) for step in trained),
        "alarms": sorted({key.partition("/")[2] for step in steps for key in step if key.startswith("alarm/") and step[key]}),
    }
    rows[tuple(row[key] for key in KEYS)] = row
file.write_text("[\n" + ",\n".join(json.dumps(rows[key]) for key in sorted(rows)) + "\n]\n")
END
