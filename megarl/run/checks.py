"""Checks of where and how a run starts. Each failure is one `MegarlError` that says
what to do.

check_start(recipe, …)      history, a writable directory, and that the roles fit; returns what would start
check_disk(recipe, …)       the disk has room for checkpoints
check_cpu(recipe, …)        on a machine without a GPU: the run is small enough for its cores
check_host(recipe, …)       nodes have enough memory for writing checkpoints and for what servers keep there
check_history(recipe, …)    an existing run may be resumed, with the settings and inputs that it began with

A resumed run compares fingerprints of its inputs (computed by lab/preflight.py): other
contents under the same path would lead to other steps.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.rundir import RunDir, complete
from megarl.core.base.weight_files import parameters
from megarl.core.controller.decision import planned_evaluations
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, differences, load
from megarl.core.server.checks import check as check_server
from megarl.core.server.checks import check_gpus, check_kernels
from megarl.run import devices, fork
from megarl.run.launcher import LocalLauncher
from megarl.run.placement import Place, place
from megarl.run.restart import Role
from megarl.run.srun import STEP_COMMAND, chosen

THREADS_A_CORE = 8
"""More threads than this per core, without a GPU, must be a mistake, such as a
cluster's recipe on a login node.
"""
LARGE = 10**9
"""A bf16 or fp16 model with more parameters than this trains so slowly on a CPU that it
must be a mistake.
"""
LARGE_ON_CPU = "MEGARL_LARGE_ON_CPU"
"""If this environment variable is 1, such a run starts anyway. It is not in the recipe,
since it concerns the machine.
"""
type Fingerprints = Mapping[str, str]
"""Fingerprints by recipe key and part of the input: `model.path: weights`."""
HISTORY = (
    "run.seed",
    "run.fork",
    "model.path",
    "model.dtype",
    "model.fp32_head",
    "model.fp8",
    "data.tasks",
    "data.curriculum",
    "length",
    "sampling",
    "pipeline.kind",
    "pipeline.k",
    "batch",
    "loss",
    "reference",
    "teacher.weight",
    "learner.epochs",
    "critic.dtype",
    "critic.lam",
    "agent.history",
    "agent.credit",
    "agent.trained_tokens",
)
"""Keys and sections that determine a run's steps. Layout, servers, learning rate and
intervals may change when resuming, and so may a path whose contents have a fingerprint,
which is compared instead.
"""


class HostBytes(NamedTuple):
    """Bytes of host memory, as planned (lab/planning/memory.py). rank: a learner's
    rank. server: a whole server with GPUs.
    """

    rank: float
    server: float


def check_start(recipe: Recipe, fingerprints: Fingerprints, host_bytes: HostBytes) -> str:
    """Check all that `megarl train` needs, except its inputs and other nodes of a job;
    return a text of what it would start. host_bytes: see check_host.
    """
    rundir = RunDir(recipe.run.path)
    check_history(recipe, rundir, fingerprints)
    there = next(
        folder
        for folder in (rundir.path, *rundir.path.absolute().parents)
        if os.path.exists(folder)
    )
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise MegarlError(f"run.dir: cannot write in {there}; give another run.dir")
    check_disk(recipe, rundir, there)
    launcher = chosen(recipe, rundir)
    with_gpus = True  # in a job the nodes report their GPUs when the run starts
    if isinstance(launcher, LocalLauncher):
        placed = place(recipe, launcher.survey(0))
        check_placed(recipe, placed, host_bytes)
        with_gpus = bool(placed[Role("learner")].gpus)
    gpus = devices.needed(recipe) if with_gpus else 0
    counts = {
        "server": recipe.resources.servers,
        "rank": recipe.resources.learner_ranks,
        "GPU": gpus,
    }
    return ", ".join(f"{count} {word}{'s' * (count != 1)}" for word, count in counts.items())


def check_disk(recipe: Recipe, rundir: RunDir, folder: Path) -> None:
    """Raise MegarlError if the disk of `folder` has no room for the run's checkpoints,
    of which the oldest goes only when a new one is whole. A checkpoint holds weights,
    fp32 weights and two moments.
    """
    weights = parameters(Path(recipe.model.path)) * (1 + recipe.has_critic)
    size = weights * (16 if recipe.model.dtype == "fp32" else 14)
    settings = recipe.checkpoint
    at_steps = sum(isinstance(milestone, int) for milestone in settings.milestones)
    written = math.ceil(recipe.run.steps / settings.every) + at_steps
    scored = 0
    if settings.keep_best:
        scored = 2  # the best, and one that is evaluated
        written += planned_evaluations(recipe.evaluation, recipe.run.steps)
    most = min(settings.keep + len(settings.milestones) + scored + 1, written)
    needed = (most - len(complete(rundir.checkpoints))) * size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MegarlError(
            f"run.dir: {free / 1e9:.1f} GB are free on the disk of {folder}, and checkpoints take"
            f" {size / 1e9:.1f} GB each, of which up to {most} are there (checkpoint.keep,"
            " milestones, keep_best, and the one being written); free some, or give another"
            " run.dir"
        )


def check_cpu(recipe: Recipe, model: str, processes: Mapping[str, int], cores: int) -> None:
    """Without a GPU, raise MegarlError if the processes (counted by kind) far exceed
    the cores, or if the model is large.
    """
    if os.environ.get(LARGE_ON_CPU) == "1":
        return
    threads = sum(processes.values()) * recipe.resources.threads
    counted = " and ".join(f"{count} {kind}" for kind, count in processes.items())
    told = (
        "start it where the GPUs are (`megarl submit` writes a Slurm job, docs/cluster.md), take a"
        " smaller recipe "
    )
    told += f"(quickstart), or export {LARGE_ON_CPU}=1"
    if threads > THREADS_A_CORE * cores:
        many = f"{counted} of {recipe.resources.threads} threads are {threads:,} threads"
        raise MegarlError(
            f"resources: {many}, and this machine has no GPU and {cores} cores; {told}"
        )
    if recipe.model.dtype != "fp32" and (count := parameters(Path(model))) > LARGE:
        large = f"{model}, which has {count / 1e9:.1f}B parameters, and this machine has no GPU"
        raise MegarlError(
            f"model.dtype: {recipe.model.dtype} for {large}: a step would take hours; {told}"
        )


def check_placed(recipe: Recipe, placed: Mapping[Role, Place], host_bytes: HostBytes) -> None:
    """Check that settings which need GPUs have them, that servers can serve these
    lengths, and that nodes have enough memory. host_bytes: see check_host.
    """
    learner = placed[Role("learner")]
    resources = recipe.resources
    unit = "GPU" if learner.gpus else "core"
    if recipe.run.stop_when and unit not in recipe.run.stop_when:
        advice = f"give the price per {unit}-hour"
        raise MegarlError(
            f"run.stop_when: {recipe.run.stop_when!r}, but this run counts {unit}-hours; {advice}"
        )
    for milestone in recipe.checkpoint.milestones:
        if isinstance(milestone, str) and unit not in milestone:
            raise MegarlError(
                f"checkpoint.milestones: {milestone!r}, but this run counts {unit}-hours; give"
                " these"
            )
    if not learner.gpus:
        nodes = {node.name: node.cores for where in placed.values() for node in where.nodes}
        server_ranks = resources.servers * resources.server_tensor_parallel
        processes = {"server processes": server_ranks, "learner ranks": resources.learner_ranks}
        check_cpu(recipe, recipe.model.path, processes, sum(nodes.values()))
        missing = "a GPU, but this machine has none"
        if recipe.learner.microbatch_tokens == "auto":
            raise MegarlError(
                f"learner.microbatch_tokens: auto tries sizes on {missing}; give a number"
            )
        if recipe.learner.optimizer_offload:
            raise MegarlError(f"learner.optimizer_offload: moves AdamW off {missing}; set it to 0")
    check_host(recipe, placed, host_bytes)
    check_allocator(recipe)
    check_served(recipe, placed)


def check_host(recipe: Recipe, placed: Mapping[Role, Place], host_bytes: HostBytes) -> None:
    """Raise MegarlError if a node has less memory than its roles need: learner ranks
    for writing checkpoints and for AdamW's offloaded share, servers for new weights
    that wait for their swap and for the experts of each token of KV.
    """
    learner = placed[Role("learner")]
    serving = [at for role, at in placed.items() if role.kind == "server" and at.gpus]
    offloaded = recipe.learner.optimizer_offload > 0
    for node in {node.name: node for at in placed.values() for node in at.nodes}.values():
        ranks = learner.ranks if node in learner.nodes else 0
        servers = sum(1 / len(at.nodes) for at in serving if node in at.nodes)
        needed = ranks * host_bytes.rank + servers * host_bytes.server
        if needed > node.memory:
            of_ranks = f"learner ranks for checkpoints, {ranks} x {host_bytes.rank / 1e9:.0f} GB"
            of_servers = (
                f"servers for new weights and tokens' experts, {servers:g} x"
                f" {host_bytes.server / 1e9:.0f} GB"
            )
            parts = (of_ranks, ranks), (of_servers, servers * host_bytes.server)
            each = " and ".join(text for text, count in parts if count)
            lower = ", or lower learner.optimizer_offload" if offloaded and ranks else ""
            has = (
                f"{node.name} has {node.memory / 1e9:.0f} GB of memory, and {each} need"
                f" {needed / 1e9:.0f} GB"
            )
            raise MegarlError(f"resources: {has}; spread them over more nodes{lower}")


def check_allocator(recipe: Recipe) -> None:
    """Refuse expandable segments with cuda_ipc: CUDA IPC hands these over as file
    descriptors, which Linux gives only to a process that may trace the learner.
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = os.environ.get(name, "").replace(" ", "").lower()
        if recipe.weights.transport == "cuda_ipc" and "expandable_segments:true" in said:
            why = "expandable_segments:True, whose memory weights.transport=cuda_ipc cannot share"
            raise MegarlError(f"{name}: {why}; remove it, or set weights.transport=disk")


def check_served(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """Raise MegarlError if the servers cannot serve the model with these lengths."""
    gpus = placed[Role("server", 0)].gpus
    check_server(recipe, cuda=bool(gpus))
    if gpus:
        check_gpus(recipe, devices.capabilities())
    if gpus and STEP_COMMAND not in os.environ:  # otherwise the roles have another Python
        check_kernels()


def check_history(recipe: Recipe, rundir: RunDir, fingerprints: Fingerprints) -> bool:
    """Return whether there is a run to resume. MegarlError if it must not be resumed,
    or would become another run.
    """
    history = _history(rundir)
    other = "give this one another run.name"
    if not history:
        if recipe.run.fork:
            fork.check(recipe)
            check_inputs(RunDir(recipe.run.forked[0]), fingerprints, other)
        return False
    if not os.path.exists(rundir.recipe):
        missing = "but not the recipe.yaml that the run began with"
        raise MegarlError(
            f"{rundir.path}: has {history} of a run, {missing}; put it back, or {other}"
        )
    if recipe.run.resume == "never":
        raise MegarlError(
            f"{rundir.path}: already holds a run; resume it with run.resume=auto, or {other}"
        )
    try:
        before = load(str(rundir.recipe))
    except MegarlError as error:
        why = "the recipe this run began with cannot be read by this version"
        raise MegarlError(f"{why}; {other}\n{error}") from None
    begun = read_json(rundir.fingerprints) if rundir.fingerprints.exists() else {}
    compared = {name.partition(": ")[0] for name in begun.keys() & fingerprints.keys()}
    changed = [
        f"{key}: {old!r} in {rundir.recipe}, {new!r} now"
        for key, old, new in differences(before, recipe)
        if key not in compared
        and (
            (key, new) == fork.THAWED
            or any(key == fixed or key.startswith(f"{fixed}.") for fixed in HISTORY)
        )
    ]
    if changed:
        keeps = "A resumed run must keep these, because its steps are one history; undo the change"
        raise MegarlError("\n".join([*changed, f"{keeps}, or {other}"]))
    check_inputs(rundir, fingerprints, other)
    return True


def check_inputs(rundir: RunDir, fingerprints: Fingerprints, other: str) -> None:
    """Raise MegarlError if model or prompts are not those that this run began with, or
    if that is unknown.
    """
    file = rundir.fingerprints
    if not file.exists():
        raise MegarlError(
            f"{file}: is gone, so nobody can tell whether model and prompts are those that the run"
            " began with; put it back, or, if you are sure of them, write {} into it"
        )
    before = read_json(file)
    changed = [key for key, now in fingerprints.items() if before.get(key, now) != now]
    if changed:
        named = [f"{key}: not what the run began with (see {file})" for key in changed]
        raise MegarlError("\n".join([*named, f"Put back what was there, or {other}"]))


def _history(rundir: RunDir) -> str:
    """Return a text of what exists of a run; empty if nothing was ever drawn, trained
    or evaluated there.
    """
    steps = [
        path.name
        for path in (rundir.metrics, rundir.eval)
        if os.path.exists(path) and path.stat().st_size
    ]
    if os.path.isdir(rundir.checkpoints) and any(rundir.checkpoints.glob("step-*")):
        steps.append("checkpoints")
    if JournalReader(rundir.rollouts).has_tickets():
        steps.append("a journal")
    return ", ".join(steps)
