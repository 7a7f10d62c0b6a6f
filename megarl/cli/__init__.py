"""The command line. Every command is a thin function that imports its part when it
runs, so that `--help` answers at once.

parameters.py  parameters that several commands share
data.py        `megarl data`
scaling.py     `megarl scaling`
"""

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from megarl import __version__
from megarl.cli import data, scaling
from megarl.cli import parameters as p
from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError
from megarl.core.base.process import (
    bind_no_threads,
    dump_no_core,
    importing,
    raise_limits,
    start_logging,
)
from megarl.run.process import die_with_supervisor, have_streams

if TYPE_CHECKING:
    from megarl.checks.making import Finding
    from megarl.core.base.rundir import RunDir
    from megarl.core.recipe import Recipe
    from megarl.predict.planning.layouts import PlanningProblem


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0 success, 1 failure, 2 a message to the
    user on stderr, 130 interrupted.
    """
    have_streams()
    die_with_supervisor()
    raise_limits()
    dump_no_core()
    bind_no_threads()
    try:
        status: int = app(arguments, prog_name="megarl", standalone_mode=False)
        return status
    except MegarlError as error:
        terminal.say(f"megarl: {error}", file=sys.stderr)
    except typer.TyperException as error:
        terminal.say(f"megarl: {_misused(error)}", file=sys.stderr)
    return 2


def _misused(error: typer.TyperException) -> str:
    """Return a line that says what is wrong with the command line, and where to find
    help.
    """
    from pydantic import ValidationError

    message = error.format_message().removesuffix(".").replace("Value error, ", "")
    if isinstance(error.__cause__, ValidationError):  # its message may leave out the value
        value = repr(error.__cause__.errors()[0]["input"])
        if value not in message:
            message += f", not {value}"
    context: typer.Context | None = getattr(error, "ctx", None)
    if context is None:
        return message
    if not message.endswith("?"):
        message += "."
    return f"{message} See `{context.command_path} --help`"


LASTING = ("train", "sft", "eval", "serve", "rollout", "learn", "study")
"""Commands that do more than print. A BrokenPipeError in them means undone work: Python
raises this class also for ESHUTDOWN, the error that Lustre returns to a client that it
has evicted.
"""


class _Commands(TyperGroup):
    """All commands. Those that print succeed even if their reader leaves early, as in
    `megarl recipes show x | head`.
    """

    def invoke(self, ctx: Any) -> object:
        """Run the command that was named and return its status. If it is none of
        LASTING, a reader that has left counts as success, and a file's OSError becomes
        a MegarlError.
        """
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()  # here, where an error of the reader is caught
            return status
        except OSError as error:
            if ctx.invoked_subcommand in LASTING:
                raise
            if error.errno == errno.EPIPE:
                _discard_output()
                return 0
            if error.filename is None:  # it is of no file that the user could know
                raise
            # such as a folder of --out that is a file
            raise MegarlError(f"{error.filename}: {error.strerror}") from None


def _discard_output() -> None:
    """Redirect stdout to /dev/null, once its reader has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,  # its panels take longer than everything else
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
recipes = typer.Typer(name="recipes")
study = typer.Typer(name="study", help="Variants of a recipe, several seeds each, compared.")
rollouts = typer.Typer(name="rollouts", help="The journal of a run.")
answers = typer.Typer(name="answers", help="Answers of evaluations: best-of-n curves, comparisons.")
for group in (recipes, study, rollouts, data.app, answers, scaling.app):
    app.add_typer(group)


def _version(is_given: bool) -> None:
    """Print the version and exit, if --version is given."""
    if is_given:
        terminal.say(f"megarl {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        Option("--version", callback=_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Reinforcement learning with Megatron-Core and SGLang."""


@app.command()
def train(
    recipe: p.RecipeName,
    overrides: p.Overrides,
    dry_run: p.DryRun = False,
    plan: Annotated[
        str | None, Option(metavar="GPU", help="divide this machine's GPUs as `megarl plan` does")
    ] = None,
) -> int:
    """Train a policy: start, watch and restart all roles."""
    from megarl.checks import inputs
    from megarl.checks.dry_run import warnings
    from megarl.run.train import main

    if plan is None:
        loaded = _load(recipe, overrides)
    else:
        from megarl.predict.planning.command import planned

        loaded = planned(recipe, overrides, plan)
    if dry_run:
        return _dry_run(recipe, loaded)
    facts = inputs.check_inputs(loaded)
    for warning in warnings(loaded):
        terminal.say(f"warning: {warning}", file=sys.stderr)
    return main(loaded, facts, inputs.check_start, write_report)


def write_report(rundir: "RunDir") -> None:
    """Write RUN/report.html and RUN/reward.png. The import comes only here, so that a
    run of weeks does not hold matplotlib.
    """
    from megarl.tools.report.report import write_report

    write_report(rundir)


@app.command()
def sft(recipe: p.RecipeName, overrides: p.Overrides, dry_run: p.DryRun = False) -> int:
    """Warm start, supervised, with the same learner."""
    from megarl.checks import inputs

    loaded = _load(recipe, overrides)
    if dry_run:
        return _dry_run_of_sft(recipe, loaded)
    inputs.check_sft(loaded)
    with importing():
        from megarl.tools.sft import main

    return main(loaded)


def _load(recipe: str, overrides: Sequence[str]) -> "Recipe":
    from megarl.core.recipe import load

    return load(recipe, overrides)


def _dry_run(name: str, recipe: "Recipe") -> int:
    """Show on stdout what would start and what differs from the base, on stderr the
    checks, warnings and that it is ready; return 0. MegarlError if it cannot start.
    name: of the recipe, as the user gave it.
    """
    from megarl.checks import inputs
    from megarl.checks.dry_run import brief, warnings
    from megarl.checks.start import starts
    from megarl.checks.table import Command

    facts = inputs.facts_of(recipe)
    _show_checks(inputs.findings(Command.DRY_RUN, facts))
    text = starts(facts)
    lines = [f"{heading:<8} {line}" for heading, line in brief(recipe, text)]
    _show_plan(name, recipe, lines)
    for warning in warnings(recipe):
        terminal.say(f"warning: {warning}", file=sys.stderr)
    terminal.say(f"ready: {text}", file=sys.stderr)
    return 0


def _dry_run_of_sft(name: str, recipe: "Recipe") -> int:
    """Show of a warm start what `_dry_run` shows of a run; return 0."""
    from megarl.checks import inputs
    from megarl.checks.table import Command

    _show_checks(inputs.findings(Command.SFT, inputs.facts_of(recipe)))
    _show_plan(name, recipe, [])
    terminal.say(f"ready: {inputs.sft_starts(recipe)}", file=sys.stderr)
    return 0


def _show_checks(findings: "Iterator[Finding]") -> None:
    """Make checks and list them on stderr. MegarlError if one fails."""
    from megarl.checks import making

    try:
        making.show_all(terminal.console(stderr=True), findings)
    except MegarlError as error:
        raise MegarlError(f"before this can start: {error}") from None


def _show_plan(name: str, recipe: "Recipe", lines: list[str]) -> None:
    """Print lines on what would start, and what differs from the recipe's base. name:
    of the recipe, as the user gave it.
    """
    from megarl.checks.dry_run import changes

    base, changed = changes(name, recipe)
    lines.append(f"differs from {base}:" if changed else f"as {base}")
    lines += [f"  {change}" for change in changed]
    try:
        terminal.say(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        _discard_output()


@app.command()
def plan(
    recipe: p.RecipeName,
    overrides: p.Overrides,
    gpus: p.PlannedGpus = None,
    gpu: p.PlannedGpu = None,
    model_config: p.ModelConfig = None,
    mean_tokens: p.MeanTokens = None,
    spread: p.Spread = 0.5,
    lengths: p.LengthsOf = None,
    measured: p.MeasuredRun = None,
    trained_share: p.TrainedShare = 1.0,
    simulate: p.Simulate = False,
    steps: p.SimulatedSteps = 20,
    output: p.SimulationPicture = Path("plan.png"),
    price: p.Price = None,
    as_json: p.Json = False,
    allocate: p.AllocatedHours = None,
    curves: p.AllocationCurves = "",
    answers: p.AllocationAnswers = None,
) -> int:
    """Say what a recipe needs on N GPUs, and how fast it will be; or, from a run of a
    few steps, how long it will take on this machine; or how to spend a budget.
    """
    from megarl.predict.planning.command import main, problem, work

    if measured is not None:
        # What --measured does not go with, None where it is not given.
        others = (gpus, gpu, allocate, lengths, simulate or None)
        return _plan_by_measurement(recipe, overrides, measured, mean_tokens, as_json, others)
    if (gpus is None) != (gpu is None) or (gpus is None and allocate is None):
        raise MegarlError(
            "give both --gpus N and --gpu NAME: the GPUs to plan for; or --measured RUN, a run of a"
            " few steps on this machine, with or without GPUs"
        )
    loaded = _load(recipe, overrides)
    posed = None
    if gpus is not None and gpu is not None:
        workload = work(loaded, mean_tokens, spread, lengths, trained_share)
        posed = problem(loaded, gpus, gpu, model_config, workload)
    if allocate is not None:
        if simulate or price is not None:
            raise MegarlError(
                "--allocate takes neither --simulate nor --price: its budget is in hours"
            )
        return _allocate(loaded, allocate, curves, answers, posed, as_json)
    if curves or answers:
        raise MegarlError(f"{'--curves' if curves else '--answers'} needs --allocate HOURS")
    assert posed is not None
    return main(posed, (steps, output) if simulate else None, as_json, price)


def _plan_by_measurement(
    recipe: str,
    overrides: Sequence[str],
    run: Path,
    mean_tokens: float | None,
    as_json: bool,
    others: Sequence[object],
) -> int:
    """Plan by the speeds of a run; return the exit status. others: options that do not
    go with it, None for those that are not given.
    """
    from megarl.predict.planning.measured import main

    if any(option is not None for option in others):
        raise MegarlError(
            "--measured takes only --mean-tokens and --json beside it: it has the speeds of a run"
        )
    return main(_load(recipe, overrides), run, mean_tokens, as_json)


def _allocate(
    recipe: "Recipe",
    hours: float,
    curves: str,
    answers: int | None,
    posed: "PlanningProblem | None",
    as_json: bool,
) -> int:
    """Choose batch and steps for a budget of device-hours; return the exit status.
    curves: run directories, separated by commas; answers: prompts that the budget also
    answers; posed: the problem of GPUs, if they are given.
    """
    from megarl.predict.planning import allocate

    if not curves:
        raise MegarlError(
            "--allocate needs --curves RUN,RUN…: short runs of two or more batches, with"
            " evaluations"
        )
    runs = [Path(run) for run in curves.split(",")]
    return allocate.main(recipe, hours, runs, answers, posed, as_json)


@app.command()
def submit(
    recipe: p.RecipeName,
    overrides: p.Overrides,
    nodes: Annotated[int, Option(min=1)],
    gpus_per_node: Annotated[int, Option(min=0, help="0: nodes without GPUs")] = 8,
    gpu: p.SubmittedGpu = "",
    model_config: p.ModelConfig = None,
    time: p.TimeLimit = None,
    partition: str | None = None,
    account: str | None = None,
    container: Literal["none", "pyxis", "apptainer"] = "none",
    image: Annotated[str, Option(help="image of the container")] = "",
    mounts: p.Mounts = "",
    kubernetes: p.Kubernetes = False,
    price: p.Price = None,
    output: p.Script = None,
    yes: Annotated[bool, Option("--yes", help="submit it")] = False,
) -> int:
    """Write a Slurm batch script or a Kubernetes JobSet for a recipe, and submit it."""
    from megarl.tools.submit import JobOptions, main

    job = JobOptions(
        recipe=recipe,
        overrides=overrides,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        model_config=model_config,
        time=time,
        partition=partition,
        account=account,
        container=container,
        image=image,
        mounts=mounts,
        price=price,
        kubernetes=kubernetes,
    )
    return main(job, output, yes)


@app.command()
def status(run: p.RunDirectory) -> int:
    """Show the state of a run, from any terminal, also after its end."""
    from megarl.run.status import main

    return main(run)


@app.command()
def health(run: p.RunDirectory) -> int:
    """Judge a run by its metrics: which signals left their course, since when, and what
    to do. Exit status 1: one is off.
    """
    from megarl.run.status import health

    return health(run)


@app.command()
def logs(
    run: p.RunDirectory,
    role: Annotated[
        str, Option(help="server, server-3, learner, learner-0, controller or supervisor")
    ] = "learner-0",
    lines: Annotated[int, Option("-n", min=1, metavar="LINES", help="lines of each file")] = 20,
    follow: Annotated[
        bool, Option("-f", "--follow", help="follow until the run has ended")
    ] = False,
) -> int:
    """Show what the processes of a run wrote."""
    from megarl.run.logs import main

    return main(run, role, lines, follow)


@app.command()
def report(run: p.RunDirectory) -> int:
    """Write report.html and reward.png of a run again."""
    from megarl.tools.report.report import main

    return main(run)


@app.command()
def metrics(
    name: Annotated[
        str, Argument(metavar="NAME", show_default=False, help="only names that contain this")
    ] = "",
) -> int:
    """Explain the metrics of metrics.jsonl."""
    from megarl.core.telemetry.names import explained

    text = explained(name)
    if not text:
        raise MegarlError(f"no metric's name contains {name!r}")
    terminal.say(text)
    return 0


@app.command()
def trace(
    run: p.RunDirectory,
    steps: Annotated[int, Option(min=1, help="how many of the last steps")] = 20,
    output: Annotated[
        Path | None, Option(help="JSON, compressed if it ends in .gz; else RUN/trace.json.gz")
    ] = None,
) -> int:
    """Write where the time of a run's last steps went, for Perfetto. Also while it
    runs.
    """
    from megarl.tools.report.trace import main

    return main(run, steps, output)


@app.command()
def export(
    run: p.RunDirectory,
    directory: Annotated[
        Path, Argument(help="must not exist; an export that was killed is continued")
    ],
    step: Annotated[
        int | None, Option(min=0, help="of this checkpoint; else of the newest")
    ] = None,
    base: Annotated[
        Path | None, Option(help="the original model, for tensors that are not trained")
    ] = None,
) -> int:
    """Write the trained policy of a run as a Hugging Face directory."""
    from megarl.core.base.rundir import RunDir, checkpoint_of

    source = checkpoint_of(RunDir.opened(run), step)
    with importing():
        from checkpoints_tools import convert, silence_libraries

    silence_libraries()
    convert.megatron_to_hf(source, directory, base)
    return 0


@app.command("eval")
def evaluate(
    overrides: p.Overrides,
    model: Annotated[
        str, Option(help="a Hugging Face directory, RUN (newest checkpoint), RUN@STEP or RUN@best")
    ],
    suite: Annotated[str, Option(metavar="NAME[,NAME]", help=p.SUITES)],
    samples: Annotated[
        int | None, Option(help="answers a prompt; else as many as the suite says")
    ] = None,
    limit: Annotated[
        int | None, Option(help="prompts of each suite, chosen by hash; else all")
    ] = None,
    data: Annotated[
        str | None, Option(help="rows of the one suite, instead of its set on the hub")
    ] = None,
    output: Annotated[Path | None, Option("--out", help="else runs/evaluations/MODEL")] = None,
) -> int:
    """Score a model or a run's checkpoint on suites. It starts servers of its own."""
    from megarl.tools.eval.main import main

    return main(model, suite, overrides, samples, limit, data, output)


@app.command()
def doctor(
    models: Annotated[
        list[Path] | None,
        Argument(metavar="[MODEL]...", help="directories: can agents use their chat templates?"),
    ] = None,
) -> int:
    """Say what this machine can run, and what to do about what it cannot."""
    from megarl.checks.doctor import main

    return main(models or ())


@app.command()
def serve(
    recipe: p.RecipeOrNone,
    overrides: p.Overrides,
    index: Annotated[
        int | None, Option(min=0, help="which of the recipe's servers this is, from 0")
    ] = None,
    port: Annotated[int | None, Option(min=1, max=65_535)] = None,
    model: Annotated[
        Path | None,
        Option(metavar="DIR", help="instead: serve this model by itself, to anyone with the key"),
    ] = None,
    host: Annotated[str, Option(help="with --model: address to listen on")] = "127.0.0.1",
    api_key: Annotated[
        str, Option(metavar="env:VARIABLE", help="with --model: where its key is; or file:PATH")
    ] = "",
    join: Annotated[
        Path | None, Option(metavar="RUN", help="instead: be one more server of this run")
    ] = None,
    interface: Annotated[
        str, Option(help="with --join: network interface to listen on; else run.interface")
    ] = "",
) -> int:
    """Role: one SGLang server. With --join: one more for a run that is under way, until
    SIGTERM or the run's end. With --model: one by itself, such as a teacher.
    """
    from megarl.core.engine.launch import main

    if model is not None:
        if join is not None or index is not None or interface or port is None:
            raise MegarlError(
                "--model serves a model by itself: give --port N, --api-key env:VARIABLE and, if"
                " need be, --host, a recipe and key=value"
            )
        return _serve_model(recipe, overrides, model, host, port, api_key)

    if join is not None:
        if recipe is not None:
            raise MegarlError(
                f"--join takes the run's recipe and serves its policy; leave out {recipe}"
            )
        return _join(join, interface, index, port)
    if recipe is None or index is None or port is None or interface:
        raise MegarlError("give --join RUN [--interface NAME], or RECIPE --index N --port N")
    loaded = _load(recipe, overrides)
    _check_index(index, loaded.resources.servers)
    main(loaded, index, port)
    return 0


def _join(run: Path, interface: str, index: int | None, port: int | None) -> int:
    """Join a run; return the exit status. That starts this command again with an index
    and a port, which then is the server that has joined.
    """
    from megarl.core.engine.launch import main
    from megarl.run import join

    if index is None or port is None:
        return join.main(run, interface)
    _, loaded, endpoints = join.opened(run)
    main(loaded, index, port, join.listening(loaded, endpoints, interface).address)
    return 0


def _serve_model(
    recipe: str | None, overrides: Sequence[str], model: Path, host: str, port: int, api_key: str
) -> int:
    """Serve a model without a run; return 0. recipe: gives all other keys; None: the
    defaults; key=value: an override, as the recipe was left out.
    """
    from megarl.core.base.api_key import check_key_place, read_api_key
    from megarl.core.engine.launch import serve_model
    from megarl.core.recipe import from_tree, load

    try:
        key = read_api_key("--api-key", check_key_place(api_key))
    except ValueError as error:
        raise MegarlError(f"--api-key: {error}") from None
    if not key:
        raise MegarlError("--api-key: the server answers only to a key; give env:VARIABLE")
    overrides = [*overrides, f"model.path={json.dumps(str(model))}", "resources.colocate=false"]
    overrides.append("weights.transport=process_group")  # it gets no weights
    if recipe is not None and "=" in recipe:  # the first override, not a recipe
        overrides.insert(0, recipe)
        recipe = None
    loaded = from_tree({}, overrides) if recipe is None else load(recipe, overrides)
    terminal.say(f"http://{host}:{port} will serve {model}", flush=True)
    serve_model(loaded, host, port, key)
    return 0


def _check_index(index: int, count: int) -> None:
    """Raise MegarlError if the recipe has no server of this number."""
    if index < count:
        return
    raise MegarlError(
        f"--index: {index}, and the recipe's servers are numbered from 0 to {count - 1}"
    )


@app.command()
def rollout(recipe: p.RecipeName, overrides: p.Overrides) -> int:
    """Role: the controller, with the recipe's tasks and the forecast of its scores."""
    start_logging("controller")
    import uvloop

    from megarl.checks.inputs import check_unchanged
    from megarl.core.base.contracts import Tasks
    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.core.controller.controller import Controller
    from megarl.predict.scaling.extrapolate import forecast
    from megarl.predict.scaling.overoptimisation import watch
    from megarl.tasks.agents.registry import TaskAgents
    from megarl.tasks.data.prompts import load_tasks
    from megarl.tasks.environments.registry import TaskEnvironments
    from megarl.tasks.graders.grader import TaskGraders
    from megarl.tasks.suites.suites import questions_of
    from megarl.tools.monitoring.prometheus import serve_controller

    loaded = _load(recipe, overrides)
    tokenizer = load_tokenizer(loaded.model.path)
    prompts = load_tasks(loaded, tokenizer)
    check_unchanged(loaded, prompts)
    graders = partial(TaskGraders, loaded, tokenizer.decode)
    environments = partial(TaskEnvironments, loaded, tokenizer)
    agents = partial(TaskAgents, loaded, tokenizer)
    tasks = Tasks(prompts, graders, environments, agents)
    questions = questions_of(loaded, prompts, tokenizer)

    async def run() -> int:
        return await Controller(
            loaded, tokenizer, tasks, questions, forecast, watch, serve_controller
        ).run()

    return uvloop.run(run())


@app.command()
def learn(recipe: p.RecipeName, overrides: p.Overrides) -> int:
    """Role: the learner. With several ranks it becomes torchrun, which starts them."""
    from megarl.core.base.rundir import RunDir
    from megarl.core.base.torchrun import become_torchrun, is_rank

    loaded = _load(recipe, overrides)
    if loaded.resources.learner_ranks > 1 and not is_rank():
        endpoints = RunDir(loaded.run.path).endpoints()
        become_torchrun(
            loaded.resources.learner_ranks,
            endpoints.rendezvous_port,
            endpoints.rendezvous_host,
            endpoints.learner_nodes,
        )
    with importing():
        from megarl.core.learner.main import main
        from megarl.tools.monitoring.metrics import MetricsWriter

    return main(loaded, MetricsWriter)


@recipes.callback(invoke_without_command=True)
def _recipes(context: typer.Context) -> int:
    """Show the recipes that come with megarl. Without a command: their list."""
    if context.invoked_subcommand is not None:
        return 0
    from rich.table import Column, Table

    from megarl.core.recipe import load, shipped
    from megarl.run.devices import needed

    name = Column("name", style="bold", no_wrap=True)
    count = Column("GPUs", justify="right", no_wrap=True)
    table = Table(name, count, Column("what", ratio=1), box=None, padding=(0, 1), pad_edge=False)
    for recipe_name, file in shipped().items():
        recipe = load(recipe_name)
        gpus = str(needed(recipe))
        if recipe.model.dtype == "fp32":
            gpus += " or 0"
        table.add_row(recipe_name, gpus, file.read_text().partition("\n")[0].strip("# ."))
    terminal.console().print(table)
    return 0


@recipes.command("show")
def show_recipe(recipe: p.RecipeName, overrides: p.Overrides) -> int:
    """Print a recipe, resolved, with what each key means."""
    from megarl.core.recipe import describe

    print(describe(_load(recipe, overrides)), end="")
    return 0


@recipes.command("new")
def new_recipe(
    model: Annotated[Path, Option(help="Hugging Face directory")],
    data: Annotated[
        str, Option(metavar="SOURCE", help="prompts with answers: a file, a folder or hub:…")
    ],
    column: p.Column,
    mapping: p.Mapping = "",
    heldout: Annotated[
        str, Option(metavar="SOURCE", help="prompts never trained on; else a fifth, at most 120")
    ] = "",
    grader: Annotated[
        str, Option(help="what says which answers are right; else by the answers")
    ] = "",
    system: Annotated[str, Option(help="system message before each prompt")] = "",
    gpus: Annotated[
        int | None, Option(min=1, help="GPUs of 80 GB of another machine; else this machine's")
    ] = None,
    output: Annotated[
        Path | None, Option("--out", metavar="FILE", help="write it there; else print it")
    ] = None,
) -> int:
    """Write a recipe for your model and your questions on this machine."""
    from megarl.tools.new_recipe import NewRecipeOptions, new

    return new(
        model, NewRecipeOptions(data, heldout, grader, system, mapping, column), gpus, output
    )


@study.command()
def loo(
    recipe: p.RecipeName,
    overrides: p.Overrides,
    with_recipes: p.Beside = "",
    seeds: p.Seeds = "0,1,2",
    directory: p.StudyDirectory = "",
    task: p.TaskIndex = None,
    dry_run: p.DryRun = False,
) -> int:
    """Leave one out: run variants of a recipe that revert one ScaleRL part each."""
    return run_study("loo", recipe, overrides, with_recipes, seeds, directory, task, dry_run)


@study.command("run")
def run_study(
    file: Annotated[
        str, Argument(metavar="study", help="name of a shipped study, or a file of variants")
    ],
    recipe: p.RecipeName,
    overrides: p.Overrides,
    with_recipes: p.Beside = "",
    seeds: p.Seeds = "0,1,2",
    directory: p.StudyDirectory = "",
    task: p.TaskIndex = None,
    dry_run: p.DryRun = False,
) -> int:
    """Run the variants of a recipe that a study names: axes, curriculum, forward, kl,
    loo, value-precision, or yours.
    """
    from megarl.predict.study.main import run_variants
    from megarl.predict.study.running import StudyOptions

    others = [name for name in with_recipes.split(",") if name]
    return run_variants(
        file, recipe, others, StudyOptions(seeds, directory, task, dry_run, overrides)
    )


@study.command("compare")
def compare_recipes(
    words: Annotated[
        list[str], Argument(metavar="recipe", help=p.RECIPES, autocompletion=p.recipe_names)
    ],
    seeds: p.Seeds = "0,1,2",
    directory: p.StudyDirectory = "",
    task: p.TaskIndex = None,
    dry_run: p.DryRun = False,
) -> int:
    """Run and compare several recipes."""
    from megarl.predict.study.main import compare
    from megarl.predict.study.running import StudyOptions

    # As many recipes as the user likes come first, so one argument takes both.
    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    return compare(recipes, StudyOptions(seeds, directory, task, dry_run, overrides))


@study.command("search")
def search_recipes(
    words: Annotated[
        list[str], Argument(metavar="recipe", help=p.RECIPES, autocompletion=p.recipe_names)
    ],
    vary: Annotated[list[str], p.repeated("KEY=A,B", "arms with each of these values")],
    seeds: p.Seeds = "0",
    directory: p.StudyDirectory = "",
    task: p.TaskIndex = None,
    dry_run: p.DryRun = False,
    rungs: Annotated[
        str, Option(help="steps at which half of the arms are dropped; else run.steps / 2, / 4 …")
    ] = "",
    branch: Annotated[
        int,
        Option(min=0, help="all arms continue from step N of the first; 0: each starts by itself"),
    ] = 0,
) -> int:
    """Find the best of several recipes: the better half goes on, judged by the
    asymptotes predicted from scores.
    """
    from megarl.predict.study.running import StudyOptions
    from megarl.predict.study.search import SearchOptions, search

    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    options = StudyOptions(seeds, directory, task, dry_run, overrides)
    return search(recipes, options, SearchOptions(vary, rungs, branch))


@study.command("results")
def study_results(directory: Path) -> int:
    """Write table, plots and CSVs of a study, also of an unfinished one."""
    from megarl.predict.study.search import table_and_plots

    return table_and_plots(directory)


@rollouts.command("show")
def show_rollouts(
    run: p.RunDirectory,
    ticket: Annotated[
        int | None, Option(min=0, help="all rollouts of this ticket, token by token")
    ] = None,
    step: Annotated[int | None, Option(min=0, help="the groups that this step trains")] = None,
    limit: Annotated[int, Option(min=1, help="how many groups, or rollouts of a ticket")] = 20,
    as_json: p.Json = False,
) -> int:
    """Show what the policy wrote, also while the run lives."""
    from megarl.core.base.rundir import RunDir
    from megarl.core.base.tokenizer import load_tokenizer
    from megarl.tools.inspection.rollouts import show

    tokenizer = load_tokenizer(_load(str(RunDir.opened(run).recipe), ()).model.path)
    show(run, ticket, step, limit, tokenizer, as_json)
    return 0


@answers.command()
def curve(
    outputs: Annotated[
        list[Path],
        Argument(metavar="out...", help="output of megarl eval, RUN/evaluations/step-N, or RUN"),
    ],
    suite: p.SuiteName = None,
    picture: Annotated[
        Path | None, Option(help="a PNG; else curve-SUITE.png in the first `out`")
    ] = None,
) -> int:
    """Draw score against tokens generated: best of n by majority, reward, oracle."""
    from megarl.tools.eval.curve import main

    return main(outputs, suite, picture)


@answers.command("compare")
def compare_answers(
    out_a: Annotated[Path, Argument(help="output of megarl eval, or RUN/evaluations/step-N")],
    out_b: Annotated[Path, Argument(help="the same for the other model")],
    suite: p.SuiteName = None,
    page: Annotated[
        Path | None, Option("-o", "--page", help="HTML; else compare-SUITE.html in `out_b`")
    ] = None,
) -> int:
    """Compare two models on the same prompts: a table, and a page to read their answers
    side by side.
    """
    from megarl.tools.eval.compare import main

    return main(out_a, out_b, suite, page)
