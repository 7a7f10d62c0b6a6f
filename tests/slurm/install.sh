#!/usr/bin/env bash
# Debian's Slurm and munge, for tests/slurm; nothing is started. Status 3 where they cannot be had: not root, or no apt.
set -euo pipefail
for program in slurmctld slurmd srun sbatch munged; do
    command -v "$program" > /dev/null || missing=$program
done
[ -n "${missing:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "$missing is not there, and only root can install slurm-wlm and munge, by apt-get" >&2
    exit 3
fi
patience=(-o Acquire::Retries=3 -o DPkg::Lock::Timeout=120)
install=(timeout 240 apt-get install "${patience[@]}" -y -qq --no-install-recommends slurm-wlm munge)
"${install[@]}" > /dev/null 2>&1 || { timeout 120 apt-get update "${patience[@]}" -qq && "${install[@]}"; } > /dev/null
