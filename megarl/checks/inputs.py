"""Reads all inputs of `megarl train` and `megarl sft` before anything starts; a
MegarlError says how to correct a fault. checks/table.py has the order.

    model.path ──► config.json, tokenizer, weights ─────────────────────┐
    data.tasks ──► prompts as the model sees them, with answers ────────┼─► fingerprints
    evaluation.suites ──► questions, which a resumed run may change    (checks/start.py)

Files of up to WHOLE bytes are hashed completely. Of larger ones (shards of weights)
only the size and BLOCKS blocks are hashed, spread evenly from the first byte to the
last, so that a fingerprint of a terabyte of weights takes only seconds.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from megarl.checks import making, start
from megarl.checks.making import Facts
from megarl.checks.table import Command, Need
from megarl.core.base import architecture
from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError
from megarl.core.base.hf_files import gguf_advice
from megarl.core.base.model_directory import open_model, open_served_model
from megarl.core.base.rundir import RunDir
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Prompt, encode
from megarl.core.base.weight_files import INDEX, weight_files
from megarl.core.controller.draw import difficulties
from megarl.core.evaluation.score import Sampled
from megarl.core.recipe import Recipe
from megarl.core.recipe.algorithm import LOSSES
from megarl.run import devices
from megarl.run.launcher import LocalLauncher
from megarl.run.prepare import Fingerprints
from megarl.tasks.data import sources
from megarl.tasks.data.chat import load_chat
from megarl.tasks.data.golds import unreadable_in
from megarl.tasks.data.prompts import load_tasks
from megarl.tasks.data.reasoning_gym import is_gym
from megarl.tasks.data.rows import Message
from megarl.tasks.suites import suites

log = logging.getLogger(__name__)
WHOLE = 64 << 20
BLOCKS = 16
BLOCK = 1 << 20
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def facts_of(recipe: Recipe) -> Facts:
    """Return what is known before the first check."""
    return {"recipe": recipe, "rundir": RunDir(recipe.run.path), "ports": 0}


def check_inputs(recipe: Recipe) -> Facts:
    """Check that all inputs that the recipe names exist and can be read; return what
    was found out, such as their fingerprints.
    """
    facts = facts_of(recipe)
    making.make(Command.TRAIN, [Need.FILES], facts)
    return facts


def check_start(facts: Facts) -> None:
    """Make the checks of this machine and of the run's nodes."""
    making.make(Command.TRAIN, [Need.MACHINE, Need.CLUSTER], facts)


def findings(command: Command, facts: Facts) -> Iterator[making.Finding]:
    """Make all checks of a command, except those on other nodes of a job. MegarlError
    of the first that fails.
    """
    yield from making.findings(command, [Need.RECIPE, Need.FILES], facts)
    yield from making.findings(command, [Need.MACHINE], facts)
    if isinstance(facts.get("launcher"), LocalLauncher):  # in a job its nodes are checked then
        yield from making.findings(command, [Need.CLUSTER], facts)


def check_all(recipe: Recipe) -> str:
    """Run all checks of `megarl train`, except those on other nodes of a Slurm job;
    return a text on what it would start.
    """
    facts = facts_of(recipe)
    for _ in findings(Command.DRY_RUN, facts):
        pass
    return start.starts(facts)


def check_sft(recipe: Recipe) -> str:
    """Check that the inputs of `megarl sft` exist and that its ranks fit; return a text
    on what it would start.
    """
    for _ in findings(Command.SFT, facts_of(recipe)):
        pass
    return sft_starts(recipe)


def sft_starts(recipe: Recipe) -> str:
    """Return a text of what `megarl sft` would start."""
    ranks = recipe.resources.learner_ranks
    gpus = min(len(devices.gpus()), ranks)
    return f"{start.counted(ranks, 'rank')}, {start.counted(gpus, 'GPU')}"


def check_model(recipe: Recipe) -> None:
    """Check the policy's model; see `_check_model`."""
    path = recipe.model.path
    advice = (
        f"download one (`hf download ORG/NAME --local-dir {path or 'DIR'}`) or give the path of one"
        " you have"
    )
    if path and recipe.sft.init:
        advice += (
            "; if the warm start writes it, run `megarl sft` with this recipe first (`make"
            " quickstart` does)"
        )
    _check_model("model.path", path, advice)


def check_tasks(recipe: Recipe) -> None:
    """Check that there is a task."""
    if not recipe.data.tasks:
        raise MegarlError(
            "data.tasks: there is none; give one, such as data.tasks.math={train: FILE, heldout:"
            " FILE}"
        )


def check_interruption(recipe: Recipe) -> None:
    """Check that the tokenizer has tokens for the text of an interruption."""
    if recipe.length.control == "interruption":
        load_tokenizer(recipe.model.path).ids(recipe.length.interruption)


def check_environments(recipe: Recipe) -> None:
    """Make the user's environments, which are checked as they are made."""
    from megarl.tasks.environments.registry import TaskEnvironments  # imports aiohttp

    TaskEnvironments(recipe, load_tokenizer(recipe.model.path))


def check_agents(recipe: Recipe) -> None:
    """Make the user's agents, which are checked as they are made."""
    from megarl.tasks.agents.registry import TaskAgents  # imports aiohttp

    TaskAgents(recipe, load_tokenizer(recipe.model.path))


def check_sft_model(recipe: Recipe) -> None:
    """Check the model that a warm start begins with; SGLang need not load it."""
    command = f"`megarl data arithmetic {Path(recipe.sft.init).parent}` makes the quickstart's"
    _check_model(
        "sft.init", recipe.sft.init, f"give one to start from ({command})", for_servers=False
    )


def check_sft_data(recipe: Recipe) -> None:
    """Check that the sources of traces, and those that they must not contain, exist."""
    problem = sources.problem(recipe.sft.data)
    if problem:
        raise MegarlError(
            f"sft.data: {problem}; give rows of prompt and completion, or of messages"
        )
    for source in recipe.data.decontaminate:
        problem = sources.problem(source)
        if problem:
            raise MegarlError(f"data.decontaminate: {problem}")


def check_sft_output(recipe: Recipe) -> None:
    """Check that the recipe says where the trained model is to be written."""
    if not recipe.model.path:
        raise MegarlError("model.path: say where the trained model is to be written")


def check_sft_ranks(recipe: Recipe) -> None:
    """Check that a warm start's ranks fit this machine."""
    ranks = recipe.resources.learner_ranks
    gpus = len(devices.gpus())
    if 0 < gpus < ranks:
        reason = f"{ranks} ranks, and this machine, on which the warm start runs, has {gpus} GPUs"
        raise MegarlError(f"resources.learner_ranks: {reason}; set resources.learner_ranks={gpus}")
    if not gpus:
        cores = len(os.sched_getaffinity(0))
        start.check_cpu(recipe, recipe.sft.init, {"learner ranks": ranks}, cores)


def _check_model(key: str, path: str, advice: str = "", for_servers: bool = True) -> None:
    """Check that a model exists, is what its config.json says, and that its tokenizer
    can be loaded. for_servers: whether SGLang is to load it, too.
    """
    if not path or not os.path.isfile(Path(path) / "config.json"):
        text = f"{key}: {path!r} is not a Hugging Face model directory (no config.json in it)"
        advice = gguf_advice(Path(path)) or advice
        raise MegarlError(f"{text}; {advice}" if advice else text)
    try:
        if for_servers:
            open_served_model(Path(path))
        else:
            open_model(Path(path))
        load_tokenizer(path)
    except MegarlError as error:
        raise MegarlError(f"{key}: {error}") from None


def _sources(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the keys that name a source of prompts, and their sources."""
    tasks = recipe.data.tasks.items()
    for name, task in tasks:
        yield f"data.tasks.{name}.train", task.train
    for name, task in tasks:
        if isinstance(task.heldout, str):
            yield f"data.tasks.{name}.heldout", task.heldout
    for name, suite in recipe.evaluation.sampled.items():
        yield f"evaluation.suites.{name}.data", suite.data
    for source in recipe.data.decontaminate:
        yield "data.decontaminate", source


def check_sources(recipe: Recipe) -> None:
    """Check that the sources of prompts exist."""
    for key, source in _sources(recipe):
        problem = sources.problem(source)
        if problem and is_gym(source):
            raise MegarlError(f"{key}: {problem}")
        if problem:
            raise MegarlError(
                f"{key}: {problem}; give prompts as JSONL, JSON, CSV, Parquet or"
                f" Arrow{_or_else(key, source)}"
            )


def check_templates(recipe: Recipe) -> None:
    """Check that the model has a chat template if a task needs one, and that its
    prompts do not already end with length.end_of_thinking.
    """
    end = recipe.length.end_of_thinking.strip()
    question: list[Message] = [{"role": "user", "content": "?"}]
    for name, rows in recipe.sampled.items():
        if rows.template != "chat":
            continue
        chat = load_chat(recipe.model.path, rows.template_options)  # MegarlError without one
        if end and not rows.agent and chat.render(question).rstrip().endswith(end):
            section = "data.tasks" if name in recipe.data.tasks else "evaluation.suites"
            raise MegarlError(
                f"{section}.{name}.template_options: the prompts end with {end} already, so that"
                " all completions would count as having no answer; set length.end_of_thinking=''"
                " and length.control=none"
            )


def _or_else(key: str, source: str) -> str:
    """Return what else may cure a source of prompts that is not there."""
    if "quickstart" in source:
        return f" (`megarl data arithmetic {Path(source).parent}` makes the quickstart's)"
    if not key.startswith("data.tasks."):
        return ""
    task = key.split(".")[2]
    return f"; a task that comes from a base recipe is left out by data.tasks.{task}=null"


def check_teacher(recipe: Recipe) -> None:
    """Check that the teacher's endpoint answers and has the policy's vocabulary."""
    from megarl.core.controller.teacher import check_endpoint  # imports aiohttp

    if recipe.teacher.weight:
        check_endpoint(recipe)


def check_own_loss(recipe: Recipe) -> None:
    """Check that a user's loss is usable, in another process, since this needs torch,
    and importing may do anything.
    """
    if recipe.loss.kind in LOSSES:
        return
    from megarl.tasks.graders.functions import import_problem  # imports aiohttp

    code = (
        "import sys; from megarl.core.recipe import Loss; from megarl.core.algorithm.losses.own"
        " import load_loss; load_loss(Loss.model_validate_json(sys.argv[1], strict=False))"
    )
    problem = import_problem(code, recipe.loss.model_dump_json())
    if problem:
        message = problem.partition("MegarlError: ")[2]
        raise MegarlError(message or f"loss.kind: {recipe.loss.kind}: {problem}")


def read_inputs(recipe: Recipe) -> Fingerprints:
    """Return fingerprints of all inputs that determine the run's steps. MegarlError if
    one cannot be read: some are read only for that.
    """
    architecture.read(recipe.model.path)
    tokenizer = load_tokenizer(recipe.model.path)
    path = Path(recipe.model.path)
    fingerprints = {"model.path: tokenizer": _hash_files(path / name for name in TOKENIZER)}
    fingerprints["model.path: config.json"] = _hash_files([path / "config.json"])
    fingerprints["model.path: weights"] = _hash_files([*weight_files(path), path / INDEX])
    tasks = load_tasks(recipe, tokenizer)
    for name, prompts in tasks.items():
        difficulties(recipe, name, prompts)
    fingerprints |= of_prompts(tasks)
    questions = {}  # of suites that are sampled and graded
    for name, suite in recipe.evaluation.suites.items():
        suite_data = suites.load(
            name, suite, tokenizer, recipe.length.prompt_tokens, recipe.data.decontaminate
        )
        if isinstance(suite_data.questions, Sampled):
            questions[name] = suite_data.questions
    check_answers(recipe, tasks, questions)
    return fingerprints


def check_answers(
    recipe: Recipe, tasks: Mapping[str, TaskPrompts], questions: Mapping[str, Sampled]
) -> None:
    """Log how many answers the grader `math` cannot read. MegarlError if
    `data.unreadable` refuses them.

    Held-out prompts and suites are only counted: without them a score would be another
    score.
    """
    policy = recipe.data.unreadable
    for name, prompts in tasks.items():
        if recipe.data.tasks[name].grader == "math":
            if policy != "drop":  # else they are left out already
                _check_set(f"data.tasks.{name}.train", prompts.train, policy)
            _check_set(f"data.tasks.{name}.heldout", prompts.heldout, policy)
    for name, suite in questions.items():
        if suite.rows.grader == "math":
            _check_set(f"evaluation.suites.{name}", suite.prompts, "text")


def _check_set(name: str, prompts: Sequence[Prompt], policy: str) -> None:
    """Log how many answers of these prompts the grader `math` cannot read. MegarlError
    instead if policy, of `data.unreadable`, is `refuse`.
    """
    unread = unreadable_in(prompts)
    if not unread.places:
        return
    if policy == "refuse":
        raise MegarlError(f"{name}: {unread}; correct them, or set data.unreadable=text or =drop")
    log.warning("%s: %s; only the same text is right", name, unread)


def check_unchanged(recipe: Recipe, tasks: Mapping[str, TaskPrompts]) -> None:
    """Raise MegarlError if prompts have changed since the run was started; a controller
    that starts again reads them again.
    """
    rundir = RunDir(recipe.run.path)
    if rundir.fingerprints.exists():
        start.check_inputs(rundir, of_prompts(tasks), "start a run of another name")


def of_prompts(tasks: Mapping[str, TaskPrompts]) -> dict[str, str]:
    """Return the fingerprints of each task's prompts."""
    return {
        f"data.tasks.{name}.{kind}: prompts": suites.digest_of(map(encode, prompts))
        for name, of_task in tasks.items()
        for kind, prompts in (("train", of_task.train), ("heldout", of_task.heldout))
    }


def _hash_files(paths: Iterable[Path]) -> str:
    """Hash the name, size and contents of those files that exist; of a large file, a
    sample of its contents.
    """
    return suites.digest_of(part for path in paths for part in _sample(path))


def _sample(path: Path) -> Iterator[bytes]:
    """Yield the bytes that stand for a file in its hash: name and size, then all of it
    or, above WHOLE bytes, BLOCKS blocks. Nothing if there is no such file; MegarlError
    if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield f"{path.name}\0{size}\0".encode()
            if size <= WHOLE:
                yield file.read()
                return
            for n in range(BLOCKS):
                file.seek(n * (size - BLOCK) // (BLOCKS - 1))
                yield file.read(BLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise MegarlError(f"{path}: cannot be read: {error.strerror}") from None
