#!/usr/bin/env bash
# The quickstart, each part only if it is not there yet: data and tokenizer, the supervised warm start, then RL.
# `make quickstart` goes on with runs/quickstart if it was stopped, and begins runs/quickstart-2, -3 … if it is finished.
# Arguments are overrides of the recipe: launch/quickstart.sh run.seed=1 run.name=mine
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
megarl=.venv/bin/megarl
data=runs/quickstart-data

finished() { grep -qs '"outcome": "finished"' "$1/summary.json"; }

[ -f "$data/heldout.jsonl" ] && [ -f "$data/init/config.json" ] || $megarl data arithmetic "$data"

warm=$($megarl train quickstart --dry-run "$@" 2>/dev/null | sed -n 's/^  output: //p')
if [ ! -f "$warm/config.json" ]; then
    echo "megarl: supervised warm start into $warm"
    $megarl sft quickstart
fi

name=quickstart
case " $* " in
    *" run.name="*) ;;
    *)
        number=1
        while finished "runs/$name"; do number=$((number + 1)); name=quickstart-$number; done
        [ "$number" = 1 ] || echo "megarl: runs/quickstart is finished; this one is runs/$name (make clean removes them)"
        set -- "run.name=$name" "$@"
        ;;
esac
exec $megarl train quickstart run.resume=auto "$@"
