"""Checks of where and how a run starts. Each failure is one `MegarlError` that says
what to do. checks/table.py has their order.

    check_history     an existing run may be resumed, with the settings and inputs that
                      it began with
    check_writable    its directory can be written
    check_disk        the disk has room for checkpoints
    check_units       prices, milestones and earlier compute are in the unit in which
                      compute is counted
    check_devices     without a GPU, the run is small enough and needs none
    check_host        nodes have enough memory for writing checkpoints and for what
                      servers keep there
    check_allocator   torch can share memory as the transport needs it
    check_served      the servers can serve the model

A resumed run compares fingerprints of its inputs (computed by checks/inputs.py): other
contents under the same path would lead to other steps.
"""

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import read_json
from megarl.core.base.rundir import RunDir, complete, latest_rows
from megarl.core.base.weight_files import parameters
from megarl.core.client.servable import check as check_server
from megarl.core.client.servable import check_gpus, check_kernels
from megarl.core.controller.decision import planned_evaluations
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, differences, load
from megarl.run import devices, fork
from megarl.run.devices import HostBytes
from megarl.run.launcher import Launcher
from megarl.run.nodes import Node
from megarl.run.placement import Place
from megarl.run.prepare import Fingerprints
from megarl.run.restart import Role
from megarl.run.srun import STEP_COMMAND

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
HISTORY = (
    "run.seed",
    "run.fork",
    "model.path",
    "model.dtype",
    "model.fp32_head",
    "model.fp8",
    "model.moe.routing_replay",
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


def check_writable(rundir: RunDir) -> Path:
    """Return the run's directory or, while it does not exist, the nearest folder above
    it that does. MegarlError if we cannot write there.
    """
    path = rundir.path
    candidates = (path, *path.absolute().parents)
    folder = next(part for part in candidates if os.path.exists(part))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise MegarlError(f"run.dir: cannot write in {folder}; give another run.dir")
    return folder


def survey(launcher: Launcher, ports: int) -> tuple[Node, ...]:
    """Return the nodes for the run; see `Launcher.survey`."""
    return launcher.survey(ports)


def counted(count: int, word: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def starts(facts: Mapping[str, Any]) -> str:
    """Return a text of what `megarl train` would start. In a job the nodes report their
    GPUs when the run starts, and are taken to have them.
    """
    recipe: Recipe = facts["recipe"]
    placed: Mapping[Role, Place] | None = facts.get("placed")
    gpus = devices.needed(recipe)
    if placed is not None and not placed[Role("learner")].gpus:
        gpus = 0
    texts = [counted(recipe.resources.servers, "server")]
    texts.append(counted(recipe.resources.learner_ranks, "rank"))
    texts.append(counted(gpus, "GPU"))
    return ", ".join(texts)


def check_disk(recipe: Recipe, rundir: RunDir, folder: Path) -> None:
    """Raise MegarlError if the disk of `folder` has no room for the run's checkpoints.
    For each parameter one has the weight, a copy in fp32 and two moments in fp32. The
    oldest goes only when a new one is whole.
    """
    networks = 2 if recipe.has_critic else 1
    weight_bytes = 4 if recipe.model.dtype == "fp32" else 2
    size = networks * parameters(Path(recipe.model.path)) * (weight_bytes + 3 * 4)
    settings = recipe.checkpoint
    at_steps = sum(isinstance(milestone, int) for milestone in settings.milestones)
    written = math.ceil(recipe.run.steps / settings.every) + at_steps
    kept_for_scores = 0
    if settings.keep_best:
        kept_for_scores = 2  # the best, and one that is evaluated
        written += planned_evaluations(recipe.evaluation, recipe.run.steps)
    being_written = 1
    kept_at_once = settings.keep + len(settings.milestones) + kept_for_scores + being_written
    checkpoints = min(kept_at_once, written)
    needed = (checkpoints - len(complete(rundir.checkpoints))) * size
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MegarlError(
            f"run.dir: {free / 1e9:.1f} GB are free on the disk of {folder}, and checkpoints take"
            f" {size / 1e9:.1f} GB each, of which up to {checkpoints} are there (checkpoint.keep,"
            " milestones, keep_best, and the one being written); free some, or give another"
            " run.dir"
        )


def check_cpu(recipe: Recipe, model: str, processes: Mapping[str, int], cores: int) -> None:
    """Without a GPU, raise MegarlError if the processes (counted by kind) far exceed
    the cores, or if the model is large.
    """
    if os.environ.get(LARGE_ON_CPU) == "1":
        return
    advice = (
        "start it where the GPUs are (`megarl submit` writes a Slurm job, docs/how-to/cluster.md),"
        f" take a smaller recipe (quickstart), or export {LARGE_ON_CPU}=1"
    )
    threads = sum(processes.values()) * recipe.resources.threads
    if threads > THREADS_A_CORE * cores:
        texts = " and ".join(f"{count} {kind}" for kind, count in processes.items())
        raise MegarlError(
            f"resources: {texts} of {recipe.resources.threads} threads are {threads:,} threads, and"
            f" this machine has no GPU and {cores} cores; {advice}"
        )
    if recipe.model.dtype == "fp32":
        return
    count = parameters(Path(model))
    if count > LARGE:
        raise MegarlError(
            f"model.dtype: {recipe.model.dtype} for {model}, which has {count / 1e9:.1f}B"
            f" parameters, and this machine has no GPU: a step would take hours; {advice}"
        )


def check_units(
    recipe: Recipe, placed: Mapping[Role, Place], rundir: RunDir, resumed: bool
) -> None:
    """Check that compute is counted in the unit in which the recipe gives prices and
    milestones, and in which a run that is resumed or forked has counted its own.
    """
    unit = "GPU" if placed[Role("learner")].gpus else "core"
    origin = rundir
    if recipe.run.fork and not resumed:
        origin = RunDir(recipe.run.forked[0])
    for row in latest_rows(origin.metrics)[-1:]:
        old_unit = row.get("compute_unit", unit.lower())
        if old_unit != unit.lower():
            raise MegarlError(
                f"{origin.path}: its compute is in {old_unit}-hours, to which {unit}-hours cannot be"
                f" added; go on with it on the kind of devices that it began on, or {OTHER_NAME}"
                + (" without run.fork" if origin is not rundir else "")
            )
    if recipe.run.stop_when and unit not in recipe.run.stop_when:
        raise MegarlError(
            f"run.stop_when: {recipe.run.stop_when!r}, but this run counts {unit}-hours; give the"
            f" price per {unit}-hour"
        )
    for milestone in recipe.checkpoint.milestones:
        if isinstance(milestone, str) and unit not in milestone:
            raise MegarlError(
                f"checkpoint.milestones: {milestone!r}, but this run counts {unit}-hours; give"
                " these"
            )


def check_devices(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """Check that a run without a GPU is small enough for its cores, and that settings
    which need a GPU have one.
    """
    if placed[Role("learner")].gpus:
        return
    cores: dict[str, int] = {}
    for place in placed.values():
        cores |= {node.name: node.cores for node in place.nodes}
    resources = recipe.resources
    processes = {
        "server processes": resources.servers * resources.server_tensor_parallel,
        "learner ranks": resources.learner_ranks,
    }
    check_cpu(recipe, recipe.model.path, processes, sum(cores.values()))
    if recipe.learner.microbatch_tokens == "auto":
        raise MegarlError(
            "learner.microbatch_tokens: auto tries sizes on a GPU, but this machine has none; give"
            " a number"
        )
    if recipe.learner.optimizer_offload:
        raise MegarlError(
            "learner.optimizer_offload: moves AdamW off a GPU, but this machine has none; set it"
            " to 0"
        )


def check_host(recipe: Recipe, placed: Mapping[Role, Place], host_bytes: HostBytes) -> None:
    """Raise MegarlError if a node has less memory than its roles need: learner ranks
    for writing checkpoints and for AdamW's offloaded share, servers for new weights
    that wait for their swap and for the experts of each token of KV.
    """
    learner = placed[Role("learner")]
    serving = [place for role, place in placed.items() if role.kind == "server" and place.gpus]
    nodes = {node.name: node for place in placed.values() for node in place.nodes}
    for node in nodes.values():
        ranks = learner.ranks if node in learner.nodes else 0
        # a server on several nodes has an equal part on each
        servers = sum(1 / len(place.nodes) for place in serving if node in place.nodes)
        needed = ranks * host_bytes.rank + servers * host_bytes.server
        if needed <= node.memory:
            continue
        parts = []
        if ranks:
            size = f"{host_bytes.rank / 1e9:.0f} GB"
            parts.append(f"learner ranks for checkpoints, {ranks} x {size}")
        if servers * host_bytes.server:
            size = f"{host_bytes.server / 1e9:.0f} GB"
            parts.append(f"servers for new weights and tokens' experts, {servers:g} x {size}")
        advice = "spread them over more nodes"
        if ranks and recipe.learner.optimizer_offload > 0:
            advice += ", or lower learner.optimizer_offload"
        raise MegarlError(
            f"resources: {node.name} has {node.memory / 1e9:.0f} GB of memory, and"
            f" {' and '.join(parts)} need {needed / 1e9:.0f} GB; {advice}"
        )


def check_allocator(recipe: Recipe) -> None:
    """Refuse expandable segments with cuda_ipc: CUDA IPC hands these over as file
    descriptors, which Linux gives only to a process that may trace the learner.
    """
    if recipe.weights.transport != "cuda_ipc":
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = os.environ.get(name, "").replace(" ", "").lower()
        if "expandable_segments:true" in value:
            raise MegarlError(
                f"{name}: expandable_segments:True, whose memory weights.transport=cuda_ipc cannot"
                " share; remove it, or set weights.transport=disk"
            )


def check_served(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """Raise MegarlError if the servers cannot serve the model with these lengths."""
    gpus = placed[Role("server", 0)].gpus
    check_server(recipe, cuda=bool(gpus))
    for role, place in placed.items():
        if role.kind == "server" and place.gpus:
            check_gpus(recipe, place.capabilities)
    if gpus and STEP_COMMAND not in os.environ:  # otherwise the roles have another Python
        check_kernels()


OTHER_NAME = "give this one another run.name"


def check_history(recipe: Recipe, rundir: RunDir, fingerprints: Fingerprints) -> bool:
    """Return whether there is a run to resume. MegarlError if it must not be resumed,
    or would become another run.
    """
    remains = _history(rundir)
    if not remains:
        if recipe.run.fork:
            fork.check(recipe)
            check_inputs(RunDir(recipe.run.forked[0]), fingerprints, OTHER_NAME)
        return False
    if not os.path.exists(rundir.recipe):
        raise MegarlError(
            f"{rundir.path}: has {remains} of a run, but not the recipe.yaml that the run began"
            f" with; put it back, or {OTHER_NAME}"
        )
    if recipe.run.resume == "never":
        raise MegarlError(
            f"{rundir.path}: already holds a run; resume it with run.resume=auto, or {OTHER_NAME}"
        )
    changes = _changes_of_history(recipe, rundir, fingerprints)
    if changes:
        raise MegarlError(
            "\n".join(changes)
            + "\nA resumed run must keep these, because its steps are one history; undo the change,"
            f" or {OTHER_NAME}"
        )
    check_inputs(rundir, fingerprints, OTHER_NAME)
    return True


def _changes_of_history(recipe: Recipe, rundir: RunDir, fingerprints: Fingerprints) -> list[str]:
    """Return the keys of HISTORY that have changed since the run began, as texts. A
    path whose contents have a fingerprint may change.
    """
    try:
        first_recipe = load(str(rundir.recipe))
    except MegarlError as error:
        raise MegarlError(
            f"the recipe this run began with cannot be read by this version; {OTHER_NAME}\n{error}"
        ) from None
    first_inputs = read_json(rundir.fingerprints) if rundir.fingerprints.exists() else {}
    # a fingerprint's name is `KEY: PART`, such as `model.path: weights`
    compared = {name.partition(": ")[0] for name in first_inputs.keys() & fingerprints.keys()}
    changes = []
    for key, old, new in differences(first_recipe, recipe):
        is_fixed = any(key == fixed or key.startswith(f"{fixed}.") for fixed in HISTORY)
        thaws_routers = (key, new) == fork.THAWED
        if (is_fixed or thaws_routers) and key not in compared:
            changes.append(f"{key}: {old!r} in {rundir.recipe}, {new!r} now")
    return changes


def check_inputs(rundir: RunDir, fingerprints: Fingerprints, advice: str) -> None:
    """Raise MegarlError if model or prompts are not those that the run of `rundir`
    began with, or if that is unknown. An input that it had not, or has no more, does
    not matter. advice: what may be done besides putting them back.
    """
    file = rundir.fingerprints
    if not file.exists():
        raise MegarlError(
            f"{file}: is gone, so nobody can tell whether model and prompts are those that the run"
            " began with; put it back, or, if you are sure of them, write {} into it"
        )
    first = read_json(file)
    changed = [key for key, present in fingerprints.items() if first.get(key, present) != present]
    if changed:
        lines = [f"{key}: not what the run began with (see {file})" for key in changed]
        raise MegarlError("\n".join([*lines, f"Put back what was there, or {advice}"]))


def _history(rundir: RunDir) -> str:
    """Return a text of what exists of a run; empty if nothing was ever drawn, trained
    or evaluated there.
    """
    remains = []
    for path in (rundir.metrics, rundir.eval):
        if os.path.exists(path) and path.stat().st_size:
            remains.append(path.name)
    if os.path.isdir(rundir.checkpoints) and any(rundir.checkpoints.glob("step-*")):
        remains.append("checkpoints")
    if JournalReader(rundir.rollouts).has_tickets():
        remains.append("a journal")
    return ", ".join(remains)
