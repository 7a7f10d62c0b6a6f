"""Everything that can be wrong before a process is started, each one `MegarlError` that says what to do.

check_inputs(recipe)        the model directory, data, graders: there, and read whole (inputs.py)
check_all(recipe)           the same, what is there of the run, and that the roles fit; says what would start
check_cpu(recipe, …)        without a GPU: it is a size for cores
check_history(recipe, …)    a run that is there may go on, and goes on as it began
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.ports import check_free
from megarl.core.base.rundir import RunDir
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.journal.journal import JournalReader
from megarl.core.recipe import Recipe, flat, load
from megarl.core.recipe.combinations import LOSSES
from megarl.core.server.checks import check as check_server
from megarl.core.telemetry import wandb_writer
from megarl.lab.model_files import parameters
from megarl.run import devices, inputs
from megarl.run.launcher import LocalLauncher
from megarl.run.placement import Place, place
from megarl.run.restart import Role
from megarl.run.srun import chosen
from megarl.tasks.data import sources
from megarl.tasks.data.chat import load_chat

THREADS_A_CORE = 8
"""More than these, on a machine without a GPU, are no run but a mistake: the recipe of a cluster on a login node."""
LARGE = 10**9
HISTORY = (
    "run.seed",
    "model.path",
    "model.dtype",
    "model.fp32_head",
    "model.fp8",
    "data",
    "length",
    "sampling",
    "pipeline",
    "batch",
    "loss",
    "reference",
    "learner.epochs",
    "critic.path",
    "critic.dtype",
    "critic.gamma",
    "critic.lam",
    "critic.value_clip",
)
"""Keys and sections that decide what a run's steps are. Layout, servers, learning rate, cadences may change on resuming."""


def check_inputs(recipe: Recipe) -> inputs.Fingerprints:
    """What the recipe names exists and can be read. What it is known by."""
    if not _is_model(recipe.model.path):
        raise MegarlError(_no_model(recipe))
    _check_files("model.path", recipe.model.path)
    for key, used, path in (
        ("reference.path", recipe.reference.coefficient > 0, recipe.reference.path),
        ("critic.path", recipe.has_critic, recipe.critic.path),
    ):
        if used and path and not _is_model(path):
            raise MegarlError(
                f"{key}: {path!r} is not a Hugging Face model directory (no config.json in it); leave it empty for model.path"
            )
        if used and path:
            _check_files(key, path, tokenizer=False)
    if not recipe.data.tasks:
        raise MegarlError("data.tasks: there is none; give one, such as data.tasks.math={train: FILE, heldout: FILE}")
    _check_sources(recipe)
    _check_graders(recipe)
    if recipe.loss.kind not in LOSSES:
        check_own_loss(recipe)
    wandb_writer.check(recipe)
    return inputs.read_inputs(recipe)


def _check_files(key: str, path: str, tokenizer: bool = True) -> None:
    """A model's weights are there and whole, and its tokenizer can be loaded."""
    try:
        parameters(Path(path))
        if tokenizer:
            load_tokenizer(path)
    except MegarlError as error:
        raise MegarlError(f"{key}: {error}") from None


def _check_sources(recipe: Recipe) -> None:
    """Files of prompts are there, and the model has the template that a task wants around them."""
    named = [(f"data.tasks.{name}.train", task.train) for name, task in recipe.data.tasks.items()]
    named += [
        (f"data.tasks.{name}.heldout", task.heldout)
        for name, task in recipe.data.tasks.items()
        if isinstance(task.heldout, str)
    ]
    named += [(f"evaluation.suites.{name}.data", suite.data) for name, suite in recipe.evaluation.suites.items()]
    for key, source in [*named, *(("data.decontaminate", source) for source in recipe.data.decontaminate)]:
        wrong = sources.problem(source)
        if wrong:
            made = f" (`megarl data arithmetic {Path(source).parent}` makes the quickstart's)" if source else ""
            raise MegarlError(f"{key}: {wrong}; give prompts as JSONL, Parquet or Arrow{made}")
    asked = [*recipe.data.tasks.values(), *recipe.evaluation.sampled.values()]
    if any(rows.template == "chat" for rows in asked):
        load_chat(recipe.model.path)


def _check_graders(recipe: Recipe) -> None:
    """Sandbox, functions and keys are there; the controller, which needs them, starts with this environment."""
    from megarl.tasks.graders.grader import check_graders  # it brings aiohttp

    check_graders(recipe.data, recipe.evaluation.sampled)


def check_own_loss(recipe: Recipe) -> None:
    """It can be imported and is a loss; looked at in another process, for it brings torch, and importing may do anything."""
    from megarl.tasks.graders.functions import IMPORT_LIMIT_S, environment  # it brings aiohttp

    code = (
        "import sys; from megarl.core.recipe import Loss; from megarl.core.algorithm.losses.own import own; "
        "own(Loss.model_validate_json(sys.argv[1], strict=False))"
    )
    words = [sys.executable, "-c", code, recipe.loss.model_dump_json()]
    try:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=IMPORT_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise MegarlError(f"loss.kind: {recipe.loss.kind} was not imported within {IMPORT_LIMIT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise MegarlError(said.removeprefix("megarl.core.base.errors.MegarlError: "))


def check_all(recipe: Recipe) -> str:
    """All that `megarl train` checks, without starting anything or writing; what it would start. Other nodes of a Slurm job
    are not asked."""
    fingerprints = check_inputs(recipe)
    rundir = RunDir.of(recipe)
    check_history(recipe, rundir, fingerprints)
    _check_writable(rundir.path)
    launcher = chosen(recipe, rundir)
    if isinstance(launcher, LocalLauncher):
        placed = place(recipe, launcher.survey(0))
        check_placed(recipe, placed)
        with_gpus = bool(placed[Role("learner")].gpus)
    else:
        with_gpus = True  # the nodes say it when the run starts
    return _ready(recipe, devices.needed(recipe) if with_gpus else 0)


def _check_writable(path: Path) -> None:
    """The run's directory can be made, or be written in. MegarlError as the lock of a run would say it."""
    there = next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise MegarlError(f"run.dir: cannot write in {there}; give another run.dir")


def _ready(recipe: Recipe, gpus: int) -> str:
    counts = ((recipe.resources.servers, "server"), (recipe.resources.learner_ranks, "rank"), (gpus, "GPU"))
    return ", ".join(f"{count} {word}{'s' * (count != 1)}" for count, word in counts)


def check_sft(recipe: Recipe) -> str:
    """What `megarl sft` reads exists, and its ranks fit; what it would start."""
    if not _is_model(recipe.sft.init):
        raise MegarlError(f"sft.init: {recipe.sft.init!r} is not a Hugging Face model directory (no config.json in it)")
    _check_files("sft.init", recipe.sft.init)
    wrong = sources.problem(recipe.sft.data)
    if wrong:
        raise MegarlError(f"sft.data: {wrong}; give rows of prompt and completion, or of messages")
    for source in recipe.data.decontaminate:
        if wrong := sources.problem(source):
            raise MegarlError(f"data.decontaminate: {wrong}")
    if not recipe.sft.output:
        raise MegarlError("sft.output: say where the trained model is to be written")
    ranks, here = recipe.resources.learner_ranks, len(devices.gpus())
    if 0 < here < ranks:
        raise MegarlError(
            f"resources.learner_ranks: {ranks} ranks, and this machine, on which the warm start runs, has {here} GPUs; set "
            f"resources.learner_ranks={here}"
        )
    if not here:
        check_cpu(recipe, recipe.sft.init, {"learner ranks": ranks}, len(os.sched_getaffinity(0)))
    return f"{ranks} rank{'s' * (ranks != 1)}, {min(here, ranks)} GPU{'s' * (min(here, ranks) != 1)}"


def check_cpu(recipe: Recipe, model: str, processes: Mapping[str, int], cores: int) -> None:
    """Without a GPU: so many processes, by kind, are not far more than the cores can run, and the model is small."""
    if recipe.resources.large_on_cpu:
        return
    threads = sum(processes.values()) * recipe.resources.threads
    counted = " and ".join(f"{count} {kind}" for kind, count in processes.items())
    told = (
        "start it where the GPUs are (`megarl submit` writes a Slurm job, docs/cluster.md), take a smaller recipe "
        "(quickstart), or set resources.large_on_cpu=true"
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


def check_placed(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """What needs GPUs has them; servers can serve these lengths; ports that the recipe fixes are free."""
    learner, resources = placed[Role("learner")], recipe.resources
    if not learner.gpus:
        nodes = {node.name: node.cores for of in placed.values() for node in of.nodes}
        server_ranks = resources.servers * resources.server_tensor_parallel
        processes = {"server processes": server_ranks, "learner ranks": resources.learner_ranks}
        check_cpu(recipe, recipe.model.path, processes, sum(nodes.values()))
        if recipe.learner.microbatch_tokens == "auto":
            raise MegarlError(
                "learner.microbatch_tokens: auto tries a GPU's memory, and there is none here; give a number"
            )
        if recipe.learner.optimizer_offload:
            raise MegarlError("learner.optimizer_offload: takes AdamW off a GPU, and there is none here; set it to 0")
    check_served(recipe, placed)
    _check_ports(recipe, placed)


def check_served(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """The servers can serve the model with these lengths."""
    try:
        check_server(recipe, cuda=bool(placed[Role("server", 0)].gpus))
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise MegarlError(f"{recipe.model.path}/config.json: not a model's configuration: {error}") from None


def _check_ports(recipe: Recipe, placed: Mapping[Role, Place]) -> None:
    """Ports of this machine's roles that the recipe fixes can be listened on; on other nodes the roles say it."""
    name = placed[Role("controller")].nodes[0].name
    for role, of in placed.items():
        if of.nodes[0].name != name:
            continue
        if role.kind == "server" and recipe.serving.port is not None:
            check_free("serving.port", of.nodes[0].address, recipe.serving.port + role.index)
        if role.kind != "server" and recipe.monitor.prometheus and recipe.monitor.prometheus_port is not None:
            second = int(role.kind == "learner")
            check_free("monitor.prometheus_port", of.nodes[0].address, recipe.monitor.prometheus_port + second)


def check_history(recipe: Recipe, rundir: RunDir, fingerprints: inputs.Fingerprints) -> bool:
    """Whether a run is there to go on with; MegarlError if it must not be touched, or would become another one."""
    history = _history(rundir)
    if not history:
        return False
    if not os.path.exists(rundir.recipe):
        raise MegarlError(
            f"{rundir.path}: has {history} of a run, but not the recipe.yaml that the run began with; put it back, or give "
            "this one another run.name"
        )
    if recipe.run.resume == "never":
        raise MegarlError(
            f"{rundir.path}: holds a run already; go on with it by run.resume=auto, or give this one another run.name"
        )
    try:
        before = load(str(rundir.recipe))
    except MegarlError as error:
        raise MegarlError(
            f"the recipe this run began with cannot be read by this version; give another run.name\n{error}"
        ) from None
    changed = [
        f"{key}: {old!r} in {rundir.recipe}, {new!r} now"
        for key, old, new in differences(before, recipe)
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in HISTORY)
    ]
    if changed:
        raise MegarlError(
            "\n".join(changed) + "\nA run that goes on keeps these, or its steps would no longer be one history; "
            "undo the change, or give another run.name"
        )
    others = inputs.changed(rundir.fingerprints, fingerprints)
    if others:
        raise MegarlError(
            "\n".join(f"{key}: not what the run began with (by {rundir.fingerprints})" for key in others)
            + "\nPut back what was there, or give another run.name"
        )
    return True


def _history(rundir: RunDir) -> str:
    """What there is of a run that has begun, in words; empty if nothing was ever drawn, trained or scored there."""
    steps = [path.name for path in (rundir.metrics, rundir.eval) if os.path.exists(path) and path.stat().st_size]
    if os.path.isdir(rundir.checkpoints) and any(rundir.checkpoints.glob("step-*")):
        steps.append("checkpoints")
    if JournalReader(rundir.rollouts).begun():
        steps.append("a journal")
    return ", ".join(steps)


def differences(before: Recipe, after: Recipe) -> list[tuple[str, Any, Any]]:
    """(dotted key, old, new) of every value that differs."""
    old, new = flat(before.model_dump(mode="json")), flat(after.model_dump(mode="json"))
    return [(key, old.get(key), new.get(key)) for key in old | new if old.get(key) != new.get(key)]


def _is_model(path: str) -> bool:
    return bool(path) and os.path.isfile(Path(path) / "config.json")


def _no_model(recipe: Recipe) -> str:
    path = recipe.model.path
    text = f"model.path: {path!r} is not a Hugging Face model directory (no config.json in it)"
    if path and path == recipe.sft.output:
        return f"{text}; it is what the warm start writes: run `megarl sft` with this recipe first (`make quickstart` does)"
    return f"{text}; download one (`hf download ORG/NAME --local-dir {path or 'DIR'}`) or give the path of one you have"
