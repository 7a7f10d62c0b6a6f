#!/usr/bin/env bash
# Resolves requirements/cpu.in into requirements/cpu.txt: every package of the CPU stack, pinned.
# sglang, xgrammar and lm-eval are added without their own requirements (cpu.in says why and lists what they do import).
set -euo pipefail
cd "$(dirname "$0")/.."
without_requirements=(sglang==0.5.23 xgrammar==0.2.7 lm-eval==0.4.13)

resolved=$(mktemp)
trap 'rm -f "$resolved"' EXIT
.venv/bin/python -m uv pip compile --quiet --no-header --no-annotate --python-version 3.12 --output-file "$resolved" requirements/cpu.in
{
    echo "# Every package of the CPU stack, pinned; made by \`make lock\` from cpu.in and installed with --no-deps."
    { grep -v '^#' "$resolved"; printf '%s\n' "${without_requirements[@]}"; } | LC_ALL=C sort -t= -k1,1
} > "$resolved.new"
mv "$resolved.new" requirements/cpu.txt
