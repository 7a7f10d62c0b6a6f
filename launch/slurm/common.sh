# shellcheck shell=bash
# What the scripts of this folder have in common; each sources it. `megarl submit` writes scripts that do, too.
#
#   CONTAINER     none | pyxis | apptainer: where the roles run, with IMAGE and MOUNTS; the supervisor runs on the host
#   step …        the script's last command: `python -m …` on one node, for what is not `megarl train`
#   until_done …  a command that saves when it is told to; the job goes into the queue again if it did not get done
#
# USR1 reaches this shell alone (#SBATCH --signal=B:USR1@600) and is passed on: `megarl train` then saves and leaves, for
# which it has 540 s. TERM of a preemption reaches the roles first; they tell `megarl train`. A `step` is told through Slurm, for
# its srun would kill it at TERM.
set -euo pipefail

CONTAINER=${CONTAINER:-none}                      # none | pyxis | apptainer
IMAGE=${IMAGE:-}                                  # registry/name:tag, or a .sqsh file (pyxis); a .sif file (apptainer)
MOUNTS=${MOUNTS:-$PWD}                            # folders that the container sees, comma-separated: shared storage with RUN, models, data
INTERFACE=${INTERFACE:-slurm}                     # run.interface: the network on which the nodes trust each other (docs/security.md)
MEGARL=${MEGARL:-$PWD/.venv/bin/megarl}           # on the host: supervisor, and without a container everything else
PYTHON=$(dirname "$MEGARL")/python
export PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE

# One task of an array has the array's own id as SLURM_JOB_ID, by which Slurm's commands would reach all tasks.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}

say() { echo "megarl: $*" >&2; }

case "$CONTAINER" in
    none)
        unset MEGARL_STEP_OPTIONS MEGARL_STEP_COMMAND
        ;;
    pyxis)
        : "${IMAGE:?CONTAINER=pyxis needs IMAGE, such as registry.example.org#team/megarl:1 or /shared/megarl.sqsh}"
        mounts=()
        IFS=, read -ra folders <<< "$MOUNTS"
        for folder in "${folders[@]}"; do mounts+=("$folder:$folder"); done
        mounts_joined=$(IFS=,; echo "${mounts[*]}")
        # The name has each node unpack the image once, in the first step, and not again for each role.
        export MEGARL_STEP_OPTIONS="--container-image=$IMAGE --container-name=megarl-$SLURM_JOB_ID --container-mounts=$mounts_joined --container-workdir=$PWD --no-container-entrypoint --no-container-mount-home"
        export MEGARL_STEP_COMMAND=python
        ;;
    apptainer)
        : "${IMAGE:?CONTAINER=apptainer needs IMAGE, such as /shared/megarl.sif}"
        nvidia=""
        if command -v nvidia-smi > /dev/null; then nvidia="--nv"; fi
        export MEGARL_STEP_OPTIONS="" MEGARL_STEP_COMMAND="${APPTAINER:-apptainer} exec $nvidia --bind $MOUNTS --pwd $PWD $IMAGE python"
        ;;
    *)
        say "CONTAINER=$CONTAINER: none, pyxis or apptainer"
        exit 2
        ;;
esac

# `python -m …` on the first node, with all of its GPUs.
step() {
    # shellcheck disable=SC2086  # words
    exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mem=0 --cpu-bind=none --export=ALL \
        ${MEGARL_STEP_OPTIONS:-} ${MEGARL_STEP_COMMAND:-$PYTHON} -m "$@"
}

# SIGNAL COMMAND PID
tell() {
    if [ "$2" = step ]; then scancel --signal="$1" "$JOB"; else kill -"$1" "$3"; fi 2> /dev/null || true
}

# A command of the host, in the background, so that this shell hears signals while it runs; its status.
passing_signals_on() {
    local child="" heard status code command=$1
    trap 'heard=yes; tell USR1 "$command" "$child"' USR1
    trap 'heard=yes; tell TERM "$command" "$child"' TERM
    trap 'heard=yes; tell INT "$command" "$child"' INT
    "$@" &
    child=$!
    while true; do
        heard="" code=0
        wait "$child" || code=$?
        if [ "$code" != 127 ]; then status=$code; fi # 127: waited for already, as the signal came when it had ended
        if [ -z "$heard" ]; then break; fi           # else `wait` was interrupted
    done
    trap - USR1 TERM INT
    return "$status"
}

# 138: told to stop by SIGUSR1, ahead of the time limit. 143: by SIGTERM; a job that is still running was preempted, one that is
# not was cancelled. 75: a node is lost that the run cannot spare. 130: by SIGINT, for good.
until_done() {
    local status=0
    passing_signals_on "$@" || status=$?
    case "$status" in
        138 | 75) requeue ;;
        143) if scontrol show job "$JOB" | grep -q 'JobState=RUNNING'; then requeue; fi ;;
    esac
    return "$status"
}

requeue() {
    say "job $JOB goes into the queue again; it goes on from what it saved"
    scontrol requeue "$JOB"
    sleep 60 # Slurm ends us
    exit 1
}
