#!/usr/bin/env bash
# Losses with and without a trust region on the tiny model of experts, each in bf16 and fp16, with and without routing replay:
# four studies of all arms of this folder. Ends each with its table; the same command goes on after an interruption.
#   benchmarks/trust_regions/run.sh [options and overrides of `megarl study compare`: --seeds 0,1,2 run.steps=100]
# At the quickstart's rate (2e-4, one epoch) hardly a ratio leaves anyone's bounds within a rehearsal; here they act.
# Needs the warm start: `megarl data arithmetic runs/quickstart-data`, `megarl sft quickstart-moe`.
set -euo pipefail
cd "$(dirname "$0")/../.."
megarl=${MEGARL:-.venv/bin/megarl}
for dtype in bf16 fp16; do
    for replay in false true; do
        $megarl study compare benchmarks/trust_regions/*.yaml --dir "runs/studies/trust-regions-$dtype-replay-$replay" \
            --seeds 0,1 run.steps=60 evaluation.every=10 learner.optimizer.lr=5e-4 learner.epochs=2 model.dtype=$dtype model.moe.routing_replay=$replay "$@"
    done
done
