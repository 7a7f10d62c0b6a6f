#!/usr/bin/env bash
# Resolves requirements/cpu.in and gpu.in into cpu.txt and gpu.txt: every package, pinned, to be installed with --no-deps.
# Versions that are already pinned are kept if possible; --upgrade takes the newest of all packages.
set -euo pipefail
cd "$(dirname "$0")/.."
upgrade=("$@")
# Added to the CPU stack without their own requirements; cpu.in says why, and lists the packages that they import.
without_requirements=(sglang==0.5.23 xgrammar==0.2.7 lm-eval==0.4.13 reasoning-gym==0.1.25)
resolved=$(mktemp)
trap 'rm -f "$resolved"' EXIT

# lock NAME [package==version …]: writes requirements/NAME.txt from NAME.in, and adds these packages as they are
lock() {
    local name=$1 pinned="requirements/$1.txt"
    shift
    cat "$pinned" > "$resolved" 2> /dev/null || : > "$resolved"
    .venv/bin/python -m uv pip compile --quiet --no-header --no-annotate --python-version 3.12 \
        --python-platform x86_64-manylinux_2_34 "${upgrade[@]}" --output-file "$resolved" "requirements/$name.in"
    {
        echo "# Every package of the ${name^^} stack, pinned; made by \`make lock\` from $name.in and installed with --no-deps."
        { grep -v '^#' "$resolved"; for package in "$@"; do echo "$package"; done; } | LC_ALL=C sort -t= -k1,1
    } > "$resolved.new"
    mv "$resolved.new" "$pinned"
}

lock cpu "${without_requirements[@]}"
lock gpu
