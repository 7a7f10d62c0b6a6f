"""`megarl rollouts show RUN`: what the policy wrote, from the journal, also while the run is live.

no option     a table of the latest groups: step, ticket, pass rate, weight versions, tokens
--step S      the same table for one batch
--ticket N    all rollouts of one prompt, each weight version in its colour, untrained text dim
--json        either as JSON, one group per line
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megarl.core.base.errors import MegarlError
from megarl.core.base.rundir import RunDir
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Group, Rollout
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import State

VERSION_STYLES = ("cyan", "yellow", "magenta", "blue")
"""Styles by version modulo their number, so a version looks the same everywhere. Red and green are verdicts."""


def show(
    run_path: Path,
    ticket: int | None = None,
    step: int | None = None,
    limit: int = 20,
    tokenizer: Tokenizer | None = None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print groups of the run in `run_path`. `limit`: groups in the table, or rollouts of a ticket.

    tokenizer: the policy's; without one, token ids are shown instead of text.
    MegarlError if there is no such journal, ticket or batch.
    """
    console = console or Console()
    reader = JournalReader(RunDir(run_path).rollouts)
    state = reader.fold()
    groups = reader.groups(_chosen(reader, state, ticket, step, limit))
    if as_json:
        for group in groups:
            line = json.dumps(_as_json(group, _due(state, group.ticket), tokenizer), ensure_ascii=False)
            console.out(line, highlight=False)
    elif ticket is not None:
        for group in groups:
            console.print(_one(group, _due(state, group.ticket), limit, tokenizer, _named(group, state)))
    else:
        console.print(_table(groups, state))


def _chosen(reader: JournalReader, state: State, ticket: int | None, step: int | None, limit: int) -> list[int]:
    if ticket is not None:
        return [ticket]
    if step is None:
        return reader.finished()[-limit:]
    size, oldest = state.admission.prompts_per_batch, state.admission.forgotten // state.admission.prompts_per_batch
    tickets = state.admission.batch(step) if step >= oldest else None
    if tickets is None:
        complete = oldest
        while state.admission.batch(complete) is not None:
            complete += 1
        raise MegarlError(
            f"{reader.path}: no batch of step {step} ({size} tickets) here; "
            + (f"complete are {oldest} to {complete - 1}" if complete > oldest else "none is complete yet")
        )
    return list(tickets)[:limit]


def _due(state: State, ticket: int) -> int | None:
    """Return the step that trains a finished ticket, None if that is long past and forgotten."""
    first = state.admission.first_ticket(0)
    return state.admission.due(ticket) if ticket >= first else None


def _table(groups: tuple[Group, ...], state: State) -> Table:
    table = Table(
        title=f"{len(groups)} groups of {state.finished} finished", title_justify="left", box=None, pad_edge=False
    )
    for heading in ("step", "ticket", "prompt", "pass rate", "reward", "weights", "lag", "tokens", "notes"):
        table.add_column(heading, justify="left" if heading in ("prompt", "notes") else "right")
    for group in groups:
        due, versions = _due(state, group.ticket), _versions(group.rollouts)
        table.add_row(
            _number(due),
            str(group.ticket),
            _named(group, state),
            "" if group.void else f"{group.pass_rate:.2f}",
            "" if group.void else f"{group.rewards.mean():+.2f}",
            _span(versions),
            "" if due is None or not len(versions) else str(due - versions.min()),
            f"{sum(len(r.tokens) for r in group.rollouts):,}",
            Text(_notes(group), style="red" if group.void else "dim"),
        )
    return table


def _named(group: Group, state: State) -> str:
    """Return the prompt's id, with its task if there are several."""
    return f"{group.prompt.task}/{group.prompt.id}" if len(state.tasks) > 1 else group.prompt.id


def _notes(group: Group) -> str:
    if group.void:
        return f"void: {group.void}"
    rollouts = group.rollouts
    counts = {
        "truncated": sum(r.finish == "length" for r in rollouts),
        "interrupted": sum(r.interrupted for r in rollouts),
        "format wrong": sum(not r.format_ok for r in rollouts),
        "out of turns": sum(r.episode is not None and r.episode.limited for r in rollouts),
        "retried": sum(r.retries > 0 for r in rollouts),
    }
    notes = [f"{count} {what}" for what, count in counts.items() if count]
    return ", ".join(notes if group.has_variance else ["no variance", *notes])


def _one(group: Group, due: int | None, limit: int, tokenizer: Tokenizer | None, name: str) -> Lines:
    """Show the prompt and its rollouts."""
    head = Text.assemble(
        (f"ticket {group.ticket}", "bold"),
        f" · step {_number(due)} · prompt {name} · epoch {group.epoch}"
        f" · answer {group.prompt.answer} · pass rate {group.pass_rate:.2f}",
    )
    parts: list[RenderableType] = [head, Padding(Text(_text(group.prompt.tokens, tokenizer)), (0, 0, 1, 2))]
    if group.void:
        parts.append(Text(f"void: {group.void}", style="red"))
    for rollout in group.rollouts[:limit]:
        parts += [_about(rollout, due), Padding(_coloured(rollout, tokenizer), (0, 0, 1, 2))]
    if len(group.rollouts) > limit:
        parts.append(Text(f"… and {len(group.rollouts) - limit} more rollouts (--limit)", style="dim"))
    return Lines(*parts)


def _about(rollout: Rollout, due: int | None) -> Text:
    versions = _versions((rollout,))
    facts = [f"reward {rollout.reward:+g}", rollout.finish, f"{len(rollout.tokens):,} tokens"]
    facts += [f"{name} {score:+g}" for name, score in rollout.rewards.items()]
    if len(versions):
        facts.append(f"weights {_span(versions)}")
        if due is not None:
            facts.append(f"lag {due - versions.min()}")
    if rollout.episode is not None:
        turns, calls, errors = rollout.episode.turns, rollout.episode.calls, rollout.episode.errors
        facts.append(f"{turns} turns" if turns > 1 else "1 turn")
        facts += [f"{errors} of {calls} calls failed"] if errors else []
    told = {
        "out of turns": rollout.episode is not None and rollout.episode.limited,
        "interrupted": rollout.interrupted,
        "format wrong": not rollout.format_ok,
        "grader ran out of time": rollout.grader_timeout,
        "grader failed at it": rollout.grader_error,
        f"{rollout.retries} retries": rollout.retries > 0,
    }
    facts += [what for what, holds in told.items() if holds]
    mark = ("right", "bold green") if rollout.correct else ("wrong", "bold red")
    return Text.assemble((f"rollout {rollout.sample} ", "bold"), mark, " · " + " · ".join(facts))


def _coloured(rollout: Rollout, tokenizer: Tokenizer | None) -> Text:
    """Colour the completion; a version's number precedes its first token, and untrained text is dim."""
    text, version = Text(), None
    for segment in rollout.segments:
        style = VERSION_STYLES[segment.weight_version % len(VERSION_STYLES)]
        if segment.trained and segment.weight_version != version:
            version = segment.weight_version
            text.append(f"[{version}]", style=f"reverse {style}")
        text.append(_text(segment.tokens, tokenizer), style=style if segment.trained else "dim italic")
    return text


def _as_json(group: Group, due: int | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "ticket": group.ticket,
        "step": due,
        "epoch": group.epoch,
        "void": group.void,
        "pass_rate": group.pass_rate,
        "prompt": {
            "id": group.prompt.id,
            "task": group.prompt.task,
            "difficulty": group.prompt.difficulty,
            "answer": group.prompt.answer,
            **_json_tokens(group.prompt.tokens, tokenizer),
        },
        "rollouts": [
            {
                "sample": r.sample,
                "reward": r.reward,
                "correct": r.correct,
                "finish": r.finish,
                "interrupted": r.interrupted,
                "format_ok": r.format_ok,
                "grader_timeout": r.grader_timeout,
                "grader_error": r.grader_error,
                "rewards": r.rewards,
                "retries": r.retries,
                "episode": None if r.episode is None else msgspec.structs.asdict(r.episode),
                "segments": [
                    {
                        "weight_version": s.weight_version,
                        "trained": s.trained,
                        **_json_tokens(s.tokens, tokenizer),
                        "logprobs": s.logprobs.tolist(),
                    }
                    for s in r.segments
                ],
            }
            for r in group.rollouts
        ],
    }


def _json_tokens(tokens: np.ndarray, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"tokens": tokens.tolist()} | ({"text": _text(tokens, tokenizer)} if tokenizer else {})


def _text(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """Decode exactly what the ids say: special tokens shown, no spaces tidied away."""
    if tokenizer is None:
        return " ".join(map(str, tokens.tolist())) + " "
    return tokenizer.decode(tokens)


def _versions(rollouts: tuple[Rollout, ...]) -> np.ndarray:
    """Return weight versions of the sampled segments."""
    return np.array([s.weight_version for r in rollouts for s in r.segments if s.trained and len(s.tokens)], dtype=int)


def _span(versions: np.ndarray) -> str:
    if not len(versions):
        return ""
    low, high = versions.min(), versions.max()
    return str(low) if low == high else f"{low}–{high}"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)
