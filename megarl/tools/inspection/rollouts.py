"""`megarl rollouts show RUN`: shows what the policy wrote, from the journal, also while
the run is live.

no option     a table of the latest groups: step, ticket, pass rate, weight versions,
              tokens
--step S      the same table for one batch
--ticket N    all rollouts of one prompt, each weight version in its own colour,
              untrained text dim
--json        any of these as JSON in ASCII, one group per line
"""

import json
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megarl.core.base import terminal
from megarl.core.base.errors import MegarlError, printable
from megarl.core.base.rundir import RunDir
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Group, Rollout, Segment
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import State

VERSION_STYLES = ("cyan", "yellow", "magenta", "blue")
"""Version v has style v modulo 4, so a version looks the same everywhere. Red and green
are left to verdicts.
"""
PROMPT_KEYS = ("id", "task", "difficulty", "answer")
ROLLOUT_KEYS = (
    "sample",
    "reward",
    "correct",
    "finish",
    "interrupted",
    "format_ok",
    "grader_timeout",
    "grader_error",
    "rewards",
    "retries",
)


def show(
    run_path: Path,
    ticket: int | None = None,
    step: int | None = None,
    limit: int = 20,
    tokenizer: Tokenizer | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print groups of the run in `run_path`: a ticket's group, those of a step's batch
    or, without either, the latest. MegarlError if there is no such journal, ticket or
    batch. limit: most groups in the table, or rollouts of a ticket. tokenizer: the
    policy's; without one, token ids are shown.
    """
    console = console or terminal.console()
    reader = JournalReader(RunDir(run_path).rollouts)
    state = reader.fold()
    groups = reader.groups(_chosen(reader, state, ticket, step, limit))
    if not as_json and ticket is None:
        console.print(_table(groups, state))
        return
    for group in groups:
        step = _step(state, group.ticket)
        if as_json:
            console.out(json.dumps(_as_json(group, step, tokenizer)), highlight=False)
        else:
            console.print(_details(group, step, limit, tokenizer, _named(group, state)))


def _chosen(
    reader: JournalReader, state: State, ticket: int | None, step: int | None, limit: int
) -> list[int]:
    """Return the tickets to show: this one, at most `limit` of this step's batch, or
    those finished last. MegarlError if the step's batch is incomplete or forgotten.
    """
    if ticket is not None:
        return [ticket]
    if step is None:
        return reader.finished(limit)
    size = state.admission.prompts_per_batch
    batch = state.admission.batch  # a step's tickets, None while incomplete
    oldest = state.admission.forgotten // size  # the first step whose batch is remembered
    if step >= oldest:
        tickets = batch(step)
        if tickets is not None:
            return list(tickets)[:limit]
    end = next(number for number in count(oldest) if batch(number) is None)
    complete = "none is complete yet"
    if end > oldest:
        complete = f"complete batches are {oldest} to {end - 1}"
    raise MegarlError(f"{reader.path}: no batch of step {step} ({size} tickets) here; {complete}")


def _step(state: State, ticket: int) -> int | None:
    """Return the step that trains on a finished ticket; None if that was so long ago
    that it is forgotten.
    """
    if ticket < state.admission.first_ticket(0):
        return None
    return state.admission.step_of(ticket)


def _table(groups: tuple[Group, ...], state: State) -> Table:
    """Return a table with a row for each group."""
    title = f"{len(groups)} groups of {state.finished} finished"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heading in (
        "step",
        "ticket",
        "prompt",
        "pass rate",
        "reward",
        "weights",
        "lag",
        "tokens",
        "notes",
    ):
        table.add_column(
            heading,
            justify="left" if heading in ("prompt", "notes") else "right",
            no_wrap=heading != "notes",  # what narrows on a narrow terminal
        )
    for group in groups:
        step = _step(state, group.ticket)
        versions = _versions(group.rollouts)
        pass_rate = ""
        reward = ""
        if not group.void:
            pass_rate = f"{group.pass_rate:.2f}"
            reward = f"{group.rewards.mean():+.2f}"
        step_text = "?"
        lag = ""
        if step is not None:
            step_text = str(step)
            if len(versions):
                lag = str(step - versions.min())
        table.add_row(
            step_text,
            str(group.ticket),
            Text(_named(group, state)),
            pass_rate,
            reward,
            _span(versions),
            lag,
            f"{sum(len(rollout.tokens) for rollout in group.rollouts):,}",
            Text(_notes(group), style="red" if group.void else "dim"),
        )
    return table


def _named(group: Group, state: State) -> str:
    """Return the prompt's id, with its task if there are several."""
    name = group.prompt.id
    if len(state.tasks) > 1:
        name = f"{group.prompt.task}/{name}"
    return printable(name)


def _notes(group: Group) -> str:
    """Return what is unusual about a group: why it is void, or how many of its rollouts
    were truncated, interrupted and so on, and whether their grades are equal.
    """
    if group.void:
        return printable(f"void: {group.void}")
    rollouts = group.rollouts
    counts = {
        "truncated": sum(r.finish == "length" for r in rollouts),
        "interrupted": sum(r.interrupted for r in rollouts),
        "format wrong": sum(not r.format_ok for r in rollouts),
        "out of turns": sum(r.episode is not None and r.episode.limited for r in rollouts),
        "retried": sum(r.retries > 0 for r in rollouts),
    }
    notes = [f"{number} {name}" for name, number in counts.items() if number]
    return ", ".join(notes if group.has_variance else ["no variance", *notes])


def _details(
    group: Group, step: int | None, limit: int, tokenizer: Tokenizer | None, name: str
) -> Lines:
    """Return a group's prompt and its rollouts, at most `limit`, to print. step: that
    trains on it, None: forgotten; name: the prompt's.
    """
    step_text = "?" if step is None else step
    head = Text.assemble(
        (f"ticket {group.ticket}", "bold"),
        f" · step {step_text} · prompt {name} · epoch {group.epoch} · answer"
        f" {printable(' or '.join(group.prompt.answers))} · pass rate {group.pass_rate:.2f}",
    )
    prompt = Text(printable(_text(group.prompt.tokens, tokenizer)))
    parts: list[RenderableType] = [head, Padding(prompt, (0, 0, 1, 2))]
    if group.void:
        parts.append(Text(_notes(group), style="red"))
    for rollout in group.rollouts[:limit]:
        parts.append(_about(rollout, step))
        parts.append(Padding(_coloured(rollout, tokenizer), (0, 0, 1, 2)))
    if len(group.rollouts) > limit:
        hidden = len(group.rollouts) - limit
        parts.append(Text(f"… and {hidden} more rollouts (--limit)", style="dim"))
    return Lines(*parts)


def _about(rollout: Rollout, step: int | None) -> Text:
    """Return a line on a rollout. step: that trains on it, None: forgotten."""
    facts = [f"reward {rollout.reward:+g}", rollout.finish, f"{len(rollout.tokens):,} tokens"]
    facts += [f"{name} {score:+g}" for name, score in rollout.rewards.items()]
    versions = _versions((rollout,))
    if len(versions):
        facts.append(f"weights {_span(versions)}")
        if step is not None:
            facts.append(f"lag {step - versions.min()}")
    facts += _episode_facts(rollout)
    problems = {
        "out of turns": rollout.episode is not None and rollout.episode.limited,
        "interrupted": rollout.interrupted,
        "format wrong": not rollout.format_ok,
        "grader ran out of time": rollout.grader_timeout,
        "grader failed": rollout.grader_error,
        f"{rollout.retries} retries": rollout.retries > 0,
    }
    facts += [name for name, holds in problems.items() if holds]
    mark = ("right", "bold green") if rollout.correct else ("wrong", "bold red")
    return Text.assemble((f"rollout {rollout.sample} ", "bold"), mark, " · " + " · ".join(facts))


def _episode_facts(rollout: Rollout) -> list[str]:
    """Return an episode's number of turns and, if there are any, those of further
    paths, untrained tokens and failed calls; empty if the rollout is of no episode.
    """
    episode = rollout.episode
    if episode is None:
        return []
    facts = [f"{episode.turns} turns" if episode.turns > 1 else "1 turn"]
    if len(rollout.paths) > 1:
        facts.append(f"{len(rollout.paths)} paths")
    if episode.untrained:
        facts.append(f"{episode.untrained:,} tokens not trained")
    if episode.errors:
        facts.append(f"{episode.errors} of {episode.calls} calls failed")
    return facts


def _coloured(rollout: Rollout, tokenizer: Tokenizer | None) -> Text:
    """Return the completion in colour. A version's number precedes its first trained
    token; untrained text is dim. If there are several paths, a line precedes each.
    """
    text = Text()
    version = None  # of the trained text so far
    path_of_start = _path_of_start(rollout)
    for number, segment in enumerate(rollout.segments):
        if number in path_of_start and len(path_of_start) > 1:
            path_number = path_of_start[number]
            path = rollout.paths[path_number]
            line_break = "\n" if number else ""
            origin = ""
            if path.shared:
                origin = f", after {path.shared:,} tokens of path {path.parent}"
            text.append(f"{line_break}(path {path_number}{origin})\n", style="bold")
        style = VERSION_STYLES[segment.weight_version % len(VERSION_STYLES)]
        if segment.trained and segment.weight_version != version:
            version = segment.weight_version
            text.append(f"[{version}]", style=f"reverse {style}")
        content = printable(_text(segment.tokens, tokenizer))
        text.append(content, style=style if segment.trained else "dim italic")
    return text


def _path_of_start(rollout: Rollout) -> dict[int, int]:
    """Return {number of a path's first segment: number of the path}. The segments of
    all paths follow one another.
    """
    path_of_start = {}
    first_segment = 0
    for number, path in enumerate(rollout.paths):
        path_of_start[first_segment] = number
        first_segment += path.segments
    return path_of_start


def _as_json(group: Group, step: int | None, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return a group as JSON. step: that trains on it, None: forgotten."""
    rollouts = []
    for rollout in group.rollouts:
        record = {key: getattr(rollout, key) for key in ROLLOUT_KEYS}
        record["episode"] = msgspec.to_builtins(rollout.episode)
        record["paths"] = msgspec.to_builtins(rollout.paths)
        record["segments"] = [_segment_as_json(segment, tokenizer) for segment in rollout.segments]
        rollouts.append(record)
    prompt = {key: getattr(group.prompt, key) for key in PROMPT_KEYS}
    prompt |= _tokens_as_json(group.prompt.tokens, tokenizer)
    record = {key: getattr(group, key) for key in ("ticket", "epoch", "void", "pass_rate")}
    return record | {"step": step, "prompt": prompt, "rollouts": rollouts}


def _segment_as_json(segment: Segment, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return a segment as JSON; turn and credit only if it belongs to a turn."""
    record: dict[str, object] = {
        "weight_version": segment.weight_version,
        "trained": segment.trained,
        "logprobs": segment.logprobs.tolist(),
    }
    if segment.turn >= 0:
        record["turn"] = segment.turn
        record["credit"] = segment.credit
    return record | _tokens_as_json(segment.tokens, tokenizer)


def _tokens_as_json(tokens: np.ndarray, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return token ids and, if there is a tokenizer, their text."""
    record: dict[str, object] = {"tokens": tokens.tolist()}
    if tokenizer:
        record["text"] = _text(tokens, tokenizer)
    return record


def _text(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """Return the text of the ids, with special tokens and all spaces; without a
    tokenizer, the ids themselves.
    """
    if tokenizer:
        return tokenizer.continued(tokens)
    return " ".join(map(str, tokens.tolist())) + " "


def _versions(rollouts: tuple[Rollout, ...]) -> np.ndarray:
    """Return the weight versions of all trained segments that have tokens."""
    versions = []
    for rollout in rollouts:
        for segment in rollout.segments:
            if segment.trained and len(segment.tokens):
                versions.append(segment.weight_version)
    return np.array(versions, dtype=int)


def _span(versions: np.ndarray) -> str:
    """Return the first and the last of these versions, such as 3–5, or the only one; ""
    if there is none.
    """
    if not len(versions):
        return ""
    return "–".join(map(str, sorted({versions.min(), versions.max()})))
