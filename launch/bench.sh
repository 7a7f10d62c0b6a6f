#!/usr/bin/env bash
# Runs benchmarks/end_to_end.py with its reference. TRL is installed in .bench/, outside the stack's own environment.
#   launch/bench.sh --real    # a pretrained model; needs what `make quickstart-real` makes
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
if [ ! -d .bench/trl ]; then
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --target .bench --requirements requirements/benchmarks.txt
fi
exec .venv/bin/python -W ignore -m benchmarks.end_to_end "$@"
