#!/usr/bin/env bash
# Runs the quickstart: data and tokenizer, the supervised warm start, then RL. The first two are skipped if they exist already.
# It resumes runs/RECIPE if that was stopped, and begins runs/RECIPE-2, -3 … if it is finished.
#   launch/quickstart.sh [quickstart | quickstart-moe | quickstart-tools | quickstart-agent] [overrides of the recipe: run.seed=1 run.name=mine]
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
export CUDA_VISIBLE_DEVICES= # The quickstart is made for a CPU: fp32, and the stack of `make setup`
megarl=.venv/bin/megarl
recipe=quickstart
case "${1:-}" in quickstart*) recipe=$1; shift ;; esac
data=runs/quickstart-data

finished() { grep -qs '"outcome": "finished"' "$1/summary.json"; }

[ -f "$data/products-agent-sft.jsonl" ] && [ -f "$data/init-moe/config.json" ] || $megarl data arithmetic "$data"

# The run itself reports wrong overrides.
warm=$({ $megarl recipes show "$recipe" "$@" 2>/dev/null || true; } | sed -n '/^model:/,/^[a-z]/{s/ *  # .*//;s/^  path: //p}')
if [ -n "$warm" ] && [ ! -f "$warm/config.json" ]; then
    echo "megarl: supervised warm start into $warm"
    overrides=()
    for word in "$@"; do
        case "$word" in model.* | sft.*) overrides+=("$word") ;; esac
    done
    $megarl sft "$recipe" "${overrides[@]}"
fi

name=$recipe
case " $* " in
    *" run.name="*) ;;
    *)
        number=1
        while finished "runs/$name"; do number=$((number + 1)); name=$recipe-$number; done
        [ "$number" = 1 ] || echo "megarl: runs/$recipe is finished; this one is runs/$name (make clean removes them)"
        set -- "run.name=$name" "$@"
        ;;
esac
exec $megarl train "$recipe" run.resume=auto "$@"
