# shellcheck shell=bash
# Shared by the scripts in this folder: each sources it, and so do the scripts that `megarl submit` writes.
#
#   CONTAINER     none | pyxis | apptainer: where the roles run, with IMAGE and MOUNTS; the supervisor runs on the host
#   step …        runs `python -m …` on one node, for anything but `megarl train`; it must be the script's last command
#   until_done …  runs a command that saves on a signal; the job is queued again if the command was not done
#
# USR1 reaches only this shell (#SBATCH --signal=B:USR1@600), which passes it on: `megarl train` then saves and exits, for which
# it has 540 s. TERM at a preemption reaches the roles first; they tell `megarl train`. A `step` gets its signals through Slurm,
# since its srun would kill it at TERM.
set -euo pipefail

CONTAINER=${CONTAINER:-none}                      # none | pyxis | apptainer
IMAGE=${IMAGE:-}                                  # registry/name:tag, or a .sqsh file (pyxis); a .sif file (apptainer)
MOUNTS=${MOUNTS:-$PWD}                            # folders that the container sees, comma-separated: shared storage with RUN, models, data;
                                                  # each is FOLDER, or FOLDER:PLACE[:OPTIONS] for another place or :ro
INTERFACE=${INTERFACE:-slurm}                     # run.interface: the network on which the nodes trust each other (docs/reference/security.md)
MEGARL=${MEGARL:-$PWD/.venv/bin/megarl}           # on the host: the supervisor and, without a container, everything else
PYTHON=$(dirname "$MEGARL")/python
export PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
# Options of this job, or of one in which it was submitted, that srun would take over: megarl/run/srun.py says which and why.
unset SLURM_CPUS_PER_GPU SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_THREADS_PER_CORE SLURM_HINT SLURM_EXACT
unset SLURM_EXCLUSIVE SLURM_DISTRIBUTION SLURM_DIST_PLANESIZE SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_GPU
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_TRES_BIND
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_MEM_BIND SLURM_LABELIO

# One of an array's tasks has the array's own id as SLURM_JOB_ID; with it, Slurm's commands would reach all tasks.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}

# The host's compilers, such as those of its modules and of conda, are not in a container, where these would hide the image's own.
[ "$CONTAINER" = none ] || unset CC CXX CUDA_HOME CUDA_PATH CUDNN_HOME NVCC_CCBIN NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS

say() { echo "megarl: $*" >&2; }

# Prints its arguments in quotes that this shell and Python's shlex read alike.
quoted() {
    local mark="'"
    printf "'%s' " "${@//$mark/$mark\\$mark$mark}"
}

# Prints MOUNTS, each as FOLDER:PLACE[:OPTIONS] with absolute paths. Blanks around commas are not part of a path.
mounts_in_full() {
    local entries entry folder place options joined=""
    local entry_of="^([^:]+)(:([^:]+))?(:([^:]+))?$"
    if [[ $MOUNTS == *$'\n'* ]]; then say "MOUNTS has a line end; separate folders by commas"; return 2; fi
    IFS=, read -ra entries <<< "$MOUNTS"
    for entry in "${entries[@]}"; do
        entry=${entry#"${entry%%[![:space:]]*}"}
        entry=${entry%"${entry##*[![:space:]]}"}
        if [ -z "$entry" ]; then continue; fi
        if ! [[ $entry =~ $entry_of ]]; then
            say "MOUNTS: '$entry' is neither FOLDER nor FOLDER:PLACE nor FOLDER:PLACE:OPTIONS"
            return 2
        fi
        folder=${BASH_REMATCH[1]} place=${BASH_REMATCH[3]} options=${BASH_REMATCH[4]}
        folder=$(realpath --canonicalize-missing --no-symlinks -- "${folder/#"~/"/"${HOME:-}/"}") || return 2
        if [ -n "$place" ] && [[ $place != /* ]]; then
            say "MOUNTS: '$entry': its place in the container, $place, is not an absolute path; write FOLDER:PLACE:OPTIONS"
            return 2
        fi
        joined+="${joined:+,}$folder:${place:-$folder}$options"
    done
    if [ -z "$joined" ]; then say "MOUNTS='$MOUNTS' names no folder"; return 2; fi
    echo "$joined"
}

case "$CONTAINER" in
    none)
        unset MEGARL_STEP_OPTIONS MEGARL_STEP_COMMAND
        ;;
    pyxis)
        : "${IMAGE:?CONTAINER=pyxis needs IMAGE, such as registry.example.org#team/megarl:1 or /shared/megarl.sqsh}"
        # With the node's /tmp, where its roles share compiled kernels; else each would have one of its own, in memory.
        mounts_joined=$(mounts_in_full)
        if ! [[ $mounts_joined =~ :/tmp(:|,|$) ]]; then mounts_joined+=",/tmp:/tmp"; fi
        # The name has each node unpack the image once, in the first step, and not again for each role. With no_exec a role never
        # enters the container of another role, which may end meanwhile. It needs pyxis 0.14.
        MEGARL_STEP_OPTIONS=$(quoted "--container-image=$IMAGE" "--container-name=megarl-$SLURM_JOB_ID:no_exec" \
            "--container-mounts=$mounts_joined" "--container-workdir=$PWD" --no-container-entrypoint --no-container-mount-home)
        export MEGARL_STEP_OPTIONS
        export MEGARL_STEP_COMMAND=python
        ;;
    apptainer)
        : "${IMAGE:?CONTAINER=apptainer needs IMAGE, such as /shared/megarl.sif}"
        nvidia=""
        if command -v nvidia-smi > /dev/null; then nvidia="--nv"; fi
        mounts_joined=$(mounts_in_full)
        MEGARL_STEP_COMMAND="${APPTAINER:-apptainer} exec $nvidia $(quoted --bind "$mounts_joined" --pwd "$PWD" "$IMAGE" python)"
        export MEGARL_STEP_OPTIONS="" MEGARL_STEP_COMMAND
        # The home directory is there, too: what `pip install --user` put into it must not hide the image's packages.
        export APPTAINERENV_PYTHONNOUSERSITE=1 SINGULARITYENV_PYTHONNOUSERSITE=1
        ;;
    *)
        say "CONTAINER=$CONTAINER: none, pyxis or apptainer"
        exit 2
        ;;
esac

# Runs `python -m …` on the first node, with all of its GPUs.
step() {
    local options python
    eval "options=(${MEGARL_STEP_OPTIONS:-}) python=(${MEGARL_STEP_COMMAND:-})" # quoted words
    exec srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mem=0 --cpu-bind=none --export=ALL \
        "${options[@]}" "${python[@]:-$PYTHON}" -m "$@"
}

# tell SIGNAL COMMAND PID: sends the signal to the running command
tell() {
    if [ "$2" = step ]; then scancel --signal="$1" "$JOB"; else kill -"$1" "$3"; fi 2> /dev/null || true
}

# Runs a command on the host, in the background, so that this shell receives signals meanwhile; returns the command's status.
passing_signals_on() {
    local child="" heard status=127 code command=$1
    trap 'heard=yes; tell USR1 "$command" "$child"' USR1
    trap 'heard=yes; tell TERM "$command" "$child"' TERM
    trap 'heard=yes; tell INT "$command" "$child"' INT
    "$@" &
    child=$!
    while true; do
        heard="" code=0
        wait "$child" || code=$?
        if [ "$code" != 127 ]; then status=$code; fi # 127: already waited for, since the signal came after its end
        if [ -z "$heard" ]; then break; fi           # else `wait` was interrupted
    done
    trap - USR1 TERM INT
    return "$status"
}

# 138: stopped by SIGUSR1, ahead of the time limit. 143: stopped by SIGTERM; if the job is still running, it was preempted, else
# cancelled. 75: the run lost a node that it needs. 130: stopped by SIGINT, for good.
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
    sleep 60 # until Slurm ends this job
    exit 1
}
