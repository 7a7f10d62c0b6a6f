"""`megarl submit RECIPE --nodes N`: writes a batch script for a recipe, with estimates
by `megarl plan`; submits it on request.

recipe ─► does it fit N nodes? ──yes──► as written ─┐
                 └─no, and --gpu is given ─► plan ──┴─► placement, estimates
  placement, estimates ─► #SBATCH lines ─► FILE ─► sbatch
                       └► JobSet (jobset.py) ─► FILE ─► kubectl
"""

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megarl.checks import making
from megarl.checks.table import Command, Need
from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import write_atomically
from megarl.core.recipe import Recipe, load
from megarl.predict.planning import command, show
from megarl.predict.planning.hardware import GB
from megarl.predict.planning.layouts import Plan, as_written, refusal, search
from megarl.run.devices import needed
from megarl.run.nodes import OF_SLURM, Node
from megarl.run.placement import described, place
from megarl.tools import jobset

LIBRARY = Path(__file__).parents[2] / "launch" / "slurm" / "common.sh"
SUBMIT_LIMIT_S = 60.0
SLURM_TIME = "24:00:00"
"""Time limit of a Slurm job if none is given; a JobSet then has none."""
MEMORY_GIB = 32
"""Host memory that a pod asks for: this much for itself and, where no plan says what
its roles need, for each role. The image's libraries and a server's or a rank's buffers
take half of it.
"""


class JobOptions(NamedTuple):
    """The options of the command. gpu: the kind of GPU, "" if none is named; mounts:
    separated by commas; price: that of a GPU-hour; kubernetes: a JobSet instead of a
    Slurm job; time: as Slurm writes it, None if none is given.
    """

    recipe: str
    overrides: Sequence[str]
    nodes: int
    gpus_per_node: int
    gpu: str
    model_config: str | None
    time: str | None
    partition: str | None
    account: str | None
    container: str
    image: str
    mounts: str
    price: float | None
    kubernetes: bool


class ChosenLayout(NamedTuple):
    """The layout to submit. recipe: with the plan's changes, listed in `overrides`;
    figures: lines on placement and speed; plan: with --gpu.
    """

    recipe: Recipe
    overrides: tuple[str, ...]
    figures: tuple[str, ...]
    plan: Plan | None = None


def main(job: JobOptions, path: Path | None, submitted: bool) -> int:
    """Write the script or manifest to `path` (default: in run.dir) and print it; if
    `submitted`, submit it. Return the exit status.
    """
    if not job.kubernetes and not LIBRARY.is_file():
        raise MegarlError(
            f"{LIBRARY} is missing: batch scripts need megarl's source, installed by `pip install"
            " -e .`"
        )
    facts: making.Facts = {"recipe": load(job.recipe, job.overrides), "job": job}
    making.make_and_show(terminal.console(stderr=True), Command.SUBMIT, list(Need), facts)
    chosen: ChosenLayout = facts["chosen"]
    program = ["sbatch"]
    suffix = "sbatch"
    if job.kubernetes:
        program = ["kubectl", "create", "-f"]
        suffix = "yaml"
        text = kubernetes_manifest(chosen, job)
    else:
        text = script(chosen, job)
    run = chosen.recipe.run
    file = path or Path(run.dir) / f"{run.name}.{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())
    terminal.say(text)
    if not submitted:
        terminal.say(
            f"{file} is written, nothing is submitted: `{shlex.join(program)} {file}`, or the same"
            " with --yes",
            file=sys.stderr,
        )
        return 0
    return submit(program, file)


IMAGES = {
    "pyxis": "registry.example.org#team/megarl:1 or /shared/megarl.sqsh",
    "apptainer": "/shared/megarl.sif",
}
"""Examples of an image, by the container."""


def check_container(job: JobOptions) -> None:
    """Raise MegarlError for a container without an image, with which the job would end
    when it starts, and the reverse.
    """
    if job.kubernetes:
        _check_kubernetes(job)
        return
    if job.container in IMAGES and not job.image:
        example = IMAGES[job.container]
        raise MegarlError(
            f"--container {job.container} needs --image, such as {example} (docs/how-to/cluster.md)"
        )
    if job.image and job.container not in IMAGES:
        raise MegarlError(
            f"--image {job.image} is of no use without --container {' or '.join(IMAGES)}, or"
            " --kubernetes"
        )


def _check_kubernetes(job: JobOptions) -> None:
    """Raise MegarlError for an option of Slurm's, or without an image."""
    slurm_options = {
        "--container": job.container != "none",
        "--partition": job.partition,
        "--account": job.account,
    }
    for option, value in slurm_options.items():
        if value:
            raise MegarlError(
                f"{option} is Slurm's, and --kubernetes writes no Slurm job; leave it out"
            )
    if not job.image:
        raise MegarlError(
            "--kubernetes needs --image, such as registry.example.org/team/megarl:1"
            " (docs/how-to/cluster.md)"
        )


def submit(command: Sequence[str], file: Path) -> int:
    """Hand the file to a command such as `sbatch`, print its answer and return 0.
    MegarlError if that is not there, does not answer, or refuses it.
    """
    program = command[0]
    try:
        done = subprocess.run(
            [*command, str(file)], capture_output=True, text=True, timeout=SUBMIT_LIMIT_S
        )
    except FileNotFoundError:
        raise MegarlError(f"there is no {program} here; submit {file} where there is one") from None
    except subprocess.TimeoutExpired:
        late = f"{program} did not answer within {SUBMIT_LIMIT_S:g} s"
        raise MegarlError(f"{late}; {file} may be queued or not") from None
    if done.returncode:
        raise MegarlError(f"{program} refused {file}: {done.stderr.strip()}")
    terminal.say(done.stdout.strip())
    return 0


def choose(recipe: Recipe, job: JobOptions) -> ChosenLayout:
    """Return the recipe as written if it fits these nodes, with --gpu their memory,
    too; else, with --gpu, the best plan that fits. MegarlError if nothing fits.
    """
    per_node = job.gpus_per_node
    if not per_node:
        return ChosenLayout(
            recipe, (), ("nodes without GPUs: the placement is found when the job starts",)
        )
    gpus = tuple(map(str, range(per_node)))
    nodes = []
    for i in range(job.nodes):  # for a placement only names and GPUs matter
        node = Node(
            name=f"node {i + 1}",
            host=f"{i}",
            address="",
            interface="",
            gpus=gpus,
            cores=0,
            memory=0,
            ports=(),
        )
        nodes.append(node)
    layout: ChosenLayout | None = None
    misfit = ""  # why there is no layout as written
    try:
        layout = ChosenLayout(recipe, (), _placement(recipe, nodes))
    except MegarlError as error:
        misfit = str(error)
    if job.gpu:
        return _choose_with_memory(recipe, job, nodes, layout, misfit)
    if layout is None:
        raise MegarlError(
            f"{misfit}\n--gpu NAME has `megarl plan` choose a layout for {job.nodes} nodes"
        )
    return layout


def _placement(recipe: Recipe, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return lines on where roles are, and on idle GPUs. MegarlError if the roles do
    not fit the nodes.
    """
    lines = described(place(recipe, nodes), nodes)
    idle = sum(len(node.gpus) for node in nodes) - needed(recipe)
    if not idle:
        return tuple(lines)
    return (
        *lines,
        f"{idle} GPUs have nothing to do; `megarl plan` has layouts for all of them",
    )


def _choose_with_memory(
    recipe: Recipe,
    job: JobOptions,
    nodes: Sequence[Node],
    layout: ChosenLayout | None,
    misfit: str,
) -> ChosenLayout:
    """Return the layout as written if its memory suffices, too, else the best plan that
    fits the nodes. layout: as written, None if it does not fit; misfit: why not.
    MegarlError if nothing fits, or the kind of GPU cannot run the recipe.
    """
    gpus = job.nodes * job.gpus_per_node
    problem = command.problem(recipe, gpus, job.gpu, job.model_config, command.work(recipe))
    if reason := refusal(problem):
        raise MegarlError(f"--gpu: no such run starts on {job.gpu}: {reason}")
    if layout is not None:
        written = as_written(problem)
        if isinstance(written, Plan):
            figures = (*layout.figures, *_figures(written, job.price))
            return ChosenLayout(recipe, (), figures, written)
        misfit = written  # the reason, instead of a plan
    for plan in search(problem).plans:
        try:
            placed = place(plan.recipe, nodes)
        except MegarlError:
            continue
        change = f"the layout is the plan's; as written it does not fit: {misfit}"
        figures = (change, *described(placed, nodes), *_figures(plan, job.price))
        return ChosenLayout(plan.recipe, tuple(show.overrides(plan)), figures, plan)
    raise MegarlError(
        f"as written: {misfit}\nno layout fits {job.nodes} nodes of {job.gpus_per_node} GPUs;"
        " `megarl plan` says why each is refused"
    )


def _figures(plan: Plan, price: float | None) -> tuple[str, ...]:
    """Return lines on a plan's times, memory and cost. price: of a GPU-hour."""
    likely_seconds = show.in_short(show.likely(plan.step_seconds))
    return (
        (
            f"a step takes {plan.step_seconds:.1f} s (likely {likely_seconds}), training"
            f" {plan.train_seconds:.1f} ({show.error('training')}), generating"
            f" {plan.generate_seconds:.1f} ({show.error('generation')});"
            f" {plan.tokens_per_second:,.0f} tokens/s; {show.ERRORS_NOTE}; {show.LIKELY_NOTE}"
        ),
        (
            f"the learner needs {plan.learner.total / GB:.0f} GB a GPU; a server holds"
            f" {plan.server.kv_tokens:,.0f} tokens"
        ),
        show.cost(plan, price),
    )


def script(chosen: ChosenLayout, job: JobOptions) -> str:
    """Return the text of the batch script."""
    recipe = chosen.recipe
    settings = {  # of sbatch: "" for an option without a value, None for none
        "job-name": recipe.run.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "exclusive": "",
        "mem": "0",
        "time": job.time or SLURM_TIME,
        "partition": job.partition,
        "account": job.account,
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": "",
        "no-kill": "",
        "signal": "B:USR1@600",
    }
    lines = []
    for option, value in settings.items():
        if value is not None:
            assignment = f"={value}" if value else ""
            lines.append(f"#SBATCH --{option}{assignment}")
    name = job.recipe
    if name.endswith((".yaml", ".yml")):
        name = str(Path(name).resolve())
    variables = {"CONTAINER": job.container, "IMAGE": job.image, "MOUNTS": job.mounts}
    lines.append(f"# {written_by(job)}")
    lines += [f"# {line}" for line in chosen.figures]
    for key, value in variables.items():
        if value:
            lines.append(f"export {key}={shlex.quote(value)}")
    megarl = Path(sys.executable).with_name("megarl")
    lines.append(f"export MEGARL={shlex.quote(str(megarl))}")
    lines += ["# shellcheck disable=SC1091", f"source {shlex.quote(str(LIBRARY))}"]
    command = shlex.join(train_words(name, OF_SLURM, chosen, job))
    lines.append(f'until_done "$MEGARL" {command}')
    return "\n".join(["#!/usr/bin/env bash", *lines, ""])


def written_by(job: JobOptions) -> str:
    """Return a comment's one line, whatever the path of the recipe has in it."""
    option = " --kubernetes" if job.kubernetes else ""
    return f"Written by `megarl submit {' '.join(job.recipe.splitlines())}{option}`."


def kubernetes_manifest(chosen: ChosenLayout, job: JobOptions) -> str:
    """Return the manifest. A recipe that is a file keeps the path that the user gave,
    under which the pods must see it.
    """
    roles = roles_of_a_node(chosen.recipe, job)
    settings = jobset.PodSettings(
        image=job.image,
        gpus=job.gpus_per_node,
        mounts=jobset.read_mounts(job.mounts),
        cores=1 + roles * chosen.recipe.resources.threads,  # one for itself
        memory_gib=MEMORY_GIB + math.ceil(roles * memory_of_a_role(chosen.plan)),
        limit_s=None if job.time is None else seconds_of(job.time),
    )
    name = jobset.object_name(chosen.recipe.run.name)
    command = ["megarl", *train_words(job.recipe, jobset.INTERFACE, chosen, job)]
    comments = (written_by(job), *chosen.figures)
    return jobset.manifest(name, job.nodes, settings, command, comments)


def roles_of_a_node(recipe: Recipe, job: JobOptions) -> int:
    """Return how many servers' and learner's ranks a node has: one for each GPU or, on
    nodes without, an equal share of all.
    """
    if job.gpus_per_node:
        return job.gpus_per_node
    return math.ceil(needed(recipe) / job.nodes)


def memory_of_a_role(plan: Plan | None) -> float:
    """Return the GiB of host memory that a rank of the learner or of a server takes:
    the plan's larger figure, MEMORY_GIB without a plan.
    """
    if plan is None:
        return MEMORY_GIB
    return max(plan.learner.host, plan.server.host) / (1 << 30)


TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
FORMS = "minutes, minutes:seconds, hours:minutes:seconds or days-hours"


def seconds_of(time: str) -> int:
    """Return the seconds of a time limit in one of Slurm's forms, such as 24:00:00,
    1-12 and 90, which are minutes. MegarlError for another.
    """
    match = TIME.fullmatch(time)
    if match is None:
        raise MegarlError(f"--time: {time!r} is not a time limit; give {FORMS}")
    parts = [int(part) for part in match["clock"].split(":")]
    if match["days"] is not None:  # the clock begins with hours
        parts[0] += 24 * int(match["days"])
        parts = [*parts, 0, 0][:3]
    elif len(parts) < 3:  # it begins with minutes
        parts = [0, *parts, 0][:3]
    hours, minutes, seconds = parts
    total = 3600 * hours + 60 * minutes + seconds
    if not total:
        raise MegarlError(f"--time: {time!r} is no time at all; give {FORMS}")
    return total


def train_words(recipe: str, interface: str, chosen: ChosenLayout, job: JobOptions) -> list[str]:
    """Return the words of the command after `megarl`. recipe: its name or path;
    interface: the network to use if the recipe names none.
    """
    words = ["train", recipe, "run.resume=auto"]
    if not chosen.recipe.run.interface:
        words.append(f"run.interface={interface}")
    return [*words, *job.overrides, *chosen.overrides]
