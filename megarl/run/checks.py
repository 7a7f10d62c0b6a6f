"""Checks of where and how a run starts. Each failure is one `MegarlError` that says what to do.

check_start(recipe, …)      history, a writable directory, and that the roles fit; returns what would start
check_cpu(recipe, …)        on a machine without a GPU: the run is small enough for its cores
check_host(recipe, …)       nodes have the memory for what checkpoints are written from and servers receive into
check_history(recipe, …)    an existing run may be resumed, and resumes as it began

A resumed run compares fingerprints of its inputs (read by lab/preflight.py): other contents under the same path would make
other steps.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from megarl.core.base.architecture import in_directory
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import parameters, read_json
from megarl.core.base.rundir import RunDir
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, differences, load
from megarl.core.server.checks import check as check_server
from megarl.core.server.checks import check_kernels
from megarl.run import devices, fork
from megarl.run.launcher import LocalLauncher
from megarl.run.placement import Place, place
from megarl.run.restart import Role
from megarl.run.srun import STEP_COMMAND, chosen

THREADS_A_CORE = 8
"""More threads than this per core, without a GPU, are a mistake rather than a run: a cluster's recipe on a login node."""
LARGE = 10**9
"""Parameters of a bf16 or fp16 model that a CPU trains too slowly for anything but a mistake."""
LARGE_ON_CPU = "MEGARL_LARGE_ON_CPU"
"""Environment variable by which, at 1, such a run starts all the same. Not in the recipe: it is a fact of the machine."""
HALF = 2
"""Bytes of a weight that a server with a GPU holds: bf16 or fp16."""
type Fingerprints = Mapping[str, str]
"""Fingerprint by recipe key and part of it: `model.path: weights`."""
HISTORY = (
    "run.seed", "run.fork", "model.path", "model.dtype", "model.fp32_head", "model.fp8", "data", "length", "sampling",
    "pipeline.kind", "pipeline.k", "batch", "loss", "reference", "teacher", "learner.epochs", "critic.dtype", "critic.lam",
)  # fmt: skip
"""Keys and sections that determine a run's steps. Layout, servers, learning rate and cadences may change on resuming."""


def check_start(recipe: Recipe, fingerprints: Fingerprints, host_bytes: float) -> str:
    """Check all that `megarl train` needs beside its inputs but other nodes of a job, and return what it would start.

    host_bytes: see check_host.
    """
    rundir = RunDir(recipe.run.path)
    check_history(recipe, rundir, fingerprints)
    there = next(folder for folder in (rundir.path, *rundir.path.absolute().parents) if os.path.exists(folder))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise MegarlError(f"run.dir: cannot write in {there}; give another run.dir")
    launcher = chosen(recipe, rundir)
    if isinstance(launcher, LocalLauncher):
        placed = place(recipe, launcher.survey(0))
        check_placed(recipe, placed, host_bytes)
        with_gpus = bool(placed[Role("learner")].gpus)
        unit = "GPU" if with_gpus else "core"
        if recipe.run.stop_when and unit not in recipe.run.stop_when:
            raise MegarlError(
                f"run.stop_when: {recipe.run.stop_when!r}, but this run counts {unit}-hours; give its price in these"
            )
    else:
        with_gpus = True  # the nodes report their GPUs when the run starts
    gpus = devices.needed(recipe) if with_gpus else 0
    roles = (
        (recipe.resources.servers, "server"),
        (recipe.teachers, "teacher"),
        (recipe.resources.learner_ranks, "rank"),
    )
    counts = (*(counted for counted in roles if counted[0]), (gpus, "GPU"))
    return ", ".join(f"{count} {word}{'s' * (count != 1)}" for count, word in counts)


def check_cpu(recipe: Recipe, model: str, processes: Mapping[str, int], cores: int) -> None:
    """Without a GPU, raise MegarlError if the processes (counted by kind) far exceed the cores, or if the model is large."""
    if os.environ.get(LARGE_ON_CPU) == "1":
        return
    threads = sum(processes.values()) * recipe.resources.threads
    counted = " and ".join(f"{count} {kind}" for kind, count in processes.items())
    told = (
        "start it where the GPUs are (`megarl submit` writes a Slurm job, docs/cluster.md), take a smaller recipe "
        f"(quickstart), or export {LARGE_ON_CPU}=1"
    )
    if threads > THREADS_A_CORE * cores:
        raise MegarlError(
            f"resources: {counted} of {recipe.resources.threads} threads are {threads:,} threads, and this machine has "
            f"no GPU and {cores} cores; {told}"
        )
    if recipe.model.dtype != "fp32" and (count := parameters(Path(model))) > LARGE:
        raise MegarlError(
            f"model.dtype: {recipe.model.dtype} for {model}, which has {count / 1e9:.1f}B parameters, and this machine has no "
            f"GPU: a step would take hours; {told}"
        )


def check_placed(recipe: Recipe, placed: Mapping[Role, Place], host_bytes: float) -> None:
    """Check that what needs GPUs has them, that servers can serve these lengths, that the recipe's fixed ports are free, and
    that there is memory. host_bytes: see check_host.
    """
    learner, resources = placed[Role("learner")], recipe.resources
    if not learner.gpus:
        nodes = {node.name: node.cores for where in placed.values() for node in where.nodes}
        server_ranks = resources.servers * resources.server_tensor_parallel
        processes = {"server processes": server_ranks, "learner ranks": resources.learner_ranks}
        if recipe.teachers:
            processes["teacher processes"] = recipe.teacher_gpus
        check_cpu(recipe, recipe.model.path, processes, sum(nodes.values()))
        if recipe.learner.microbatch_tokens == "auto":
            raise MegarlError(
                "learner.microbatch_tokens: auto tries a GPU's memory, and there is none here; give a number"
            )
        if recipe.learner.optimizer_offload:
            raise MegarlError("learner.optimizer_offload: takes AdamW off a GPU, and there is none here; set it to 0")
    check_host(recipe, placed, host_bytes)
    check_allocator(recipe)
    check_served(recipe, placed)


def check_host(recipe: Recipe, placed: Mapping[Role, Place], host_bytes: float) -> None:
    """Raise MegarlError if a node has less memory than its roles fill: learner ranks `host_bytes` each, as the plan counts them
    (what a checkpoint is written from, and what of AdamW is offloaded), servers with GPUs the copy that they receive into.
    """
    learner = placed[Role("learner")]
    copying = [at for role, at in placed.items() if role.kind == "server" and at.gpus and recipe.stages_weights]
    copy = in_directory(recipe.model.path).parameters * HALF if copying else 0
    offloaded = recipe.learner.optimizer_offload > 0
    for node in {node.name: node for at in placed.values() for node in at.nodes}.values():
        ranks = learner.ranks if node in learner.nodes else 0
        servers = sum(node in at.nodes for at in copying)
        needed = ranks * host_bytes + servers * copy
        if needed > node.memory:
            of_ranks = f"learner ranks for checkpoints, {ranks} x {host_bytes / 1e9:.0f} GB"
            of_servers = f"servers for copies of their weights, {servers} x {copy / 1e9:.0f} GB"
            each = " and ".join(text for text, count in ((of_ranks, ranks), (of_servers, servers)) if count)
            lower = ", or lower learner.optimizer_offload" if offloaded and ranks else ""
            raise MegarlError(
                f"resources: {node.name} has {node.memory / 1e9:.0f} GB of memory, and {each} need {needed / 1e9:.0f} GB; "
                f"spread them over more nodes{lower}"
            )


def check_allocator(recipe: Recipe) -> None:
    """Refuse memory that a server cannot open: of expandable segments CUDA IPC hands over file descriptors, which Linux gives
    to none but a process that may trace the learner.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = os.environ.get(name, "").replace(" ", "").lower()
        if recipe.weights.transport == "cuda_ipc" and "expandable_segments:true" in said:
            raise MegarlError(
                f"{name}: expandable_segments:True, of whose memory weights.transport=cuda_ipc can hand nothing over; take it "
                "out, or set weights.transport=disk"
            )


def check_served(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """The servers can serve the model with these lengths."""
    gpus = placed[Role("server", 0)].gpus
    check_server(recipe, cuda=bool(gpus))
    if gpus and STEP_COMMAND not in os.environ:  # else the roles have another Python
        check_kernels()
    if recipe.teachers:
        check_server(recipe.teacher_recipe, cuda=bool(placed[Role("teacher", 0)].gpus))


def check_history(recipe: Recipe, rundir: RunDir, fingerprints: Fingerprints) -> bool:
    """Return whether there is a run to resume; raise MegarlError if it must not be touched, or would turn into another run."""
    history, other = _history(rundir), "give this one another run.name"
    if not history:
        if recipe.run.fork:
            fork.check(recipe)
            _check_inputs(RunDir(recipe.run.forked[0]), fingerprints, other)
        return False
    if not os.path.exists(rundir.recipe):
        missing = "but not the recipe.yaml that the run began with"
        raise MegarlError(f"{rundir.path}: has {history} of a run, {missing}; put it back, or {other}")
    if recipe.run.resume == "never":
        raise MegarlError(f"{rundir.path}: holds a run already; go on with it by run.resume=auto, or {other}")
    try:
        before = load(str(rundir.recipe))
    except MegarlError as error:
        why = "the recipe this run began with cannot be read by this version"
        raise MegarlError(f"{why}; {other}\n{error}") from None
    changed = [
        f"{key}: {old!r} in {rundir.recipe}, {new!r} now"
        for key, old, new in differences(before, recipe)
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in HISTORY)
    ]
    if changed:
        keeps = "A run that goes on keeps these, or its steps would no longer be one history; undo the change"
        raise MegarlError("\n".join([*changed, f"{keeps}, or {other}"]))
    _check_inputs(rundir, fingerprints, other)
    return True


def _check_inputs(rundir: RunDir, fingerprints: Fingerprints, other: str) -> None:
    """Raise MegarlError if model or prompts are not those that this run began with."""
    if others := _changed(rundir.fingerprints, fingerprints):
        named = [f"{key}: not what the run began with (by {rundir.fingerprints})" for key in others]
        raise MegarlError("\n".join([*named, f"Put back what was there, or {other}"]))


def _history(rundir: RunDir) -> str:
    """Describe what exists of a run that has begun; empty if nothing was ever drawn, trained or scored there."""
    steps = [path.name for path in (rundir.metrics, rundir.eval) if os.path.exists(path) and path.stat().st_size]
    if os.path.isdir(rundir.checkpoints) and any(rundir.checkpoints.glob("step-*")):
        steps.append("checkpoints")
    if JournalReader(rundir.rollouts).begun():
        steps.append("a journal")
    return ", ".join(steps)


def _changed(file: Path, now: Fingerprints) -> list[str]:
    """Return the keys of the run's own fingerprints that differ now. MegarlError if the file is missing."""
    if not file.exists():
        raise MegarlError(
            f"{file}: is gone, so nobody can tell whether model and prompts are those that the run began with; put it back, "
            "or, if you are sure of them, write {} into it"
        )
    before = read_json(file)
    return [key for key in now if before.get(key, now[key]) != now[key]]
