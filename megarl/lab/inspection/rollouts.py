"""`megarl rollouts show RUN`: shows what the policy wrote, from the journal, also while
the run is live.

no option     a table of the latest groups: step, ticket, pass rate, weight versions, tokens
--step S      the same table for one batch
--ticket N    all rollouts of one prompt, each weight version in its own colour, untrained text dim
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
from megarl.core.base.types import Group, Rollout
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
    """Print groups of the run in `run_path`. MegarlError if there is no such journal,
    ticket or batch. limit: most groups in the table, or rollouts of a ticket.
    tokenizer: the policy's; without one, token ids are shown.
    """
    console = console or terminal.console()
    reader = JournalReader(RunDir(run_path).rollouts)
    state = reader.fold()
    groups = reader.groups(_chosen(reader, state, ticket, step, limit))
    if not as_json and ticket is None:
        console.print(_table(groups, state))
        return
    for group in groups:
        due = _due(state, group.ticket)
        if as_json:
            console.out(json.dumps(_as_json(group, due, tokenizer)), highlight=False)
        else:
            console.print(_one(group, due, limit, tokenizer, _named(group, state)))


def _chosen(
    reader: JournalReader, state: State, ticket: int | None, step: int | None, limit: int
) -> list[int]:
    if ticket is not None:
        return [ticket]
    if step is None:
        return reader.finished(limit)
    size = state.admission.prompts_per_batch
    batch = state.admission.batch
    oldest = state.admission.forgotten // size
    if step >= oldest and (tickets := batch(step)) is not None:
        return list(tickets)[:limit]
    end = next(number for number in count(oldest) if batch(number) is None)
    complete = (
        f"complete batches are {oldest} to {end - 1}" if end > oldest else "none is complete yet"
    )
    raise MegarlError(f"{reader.path}: no batch of step {step} ({size} tickets) here; {complete}")


def _due(state: State, ticket: int) -> int | None:
    """Return the step that trains on a finished ticket; None if that was so long ago
    that it is forgotten.
    """
    return state.admission.step_of(ticket) if ticket >= state.admission.first_ticket(0) else None


def _table(groups: tuple[Group, ...], state: State) -> Table:
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
        due = _due(state, group.ticket)
        versions = _versions(group.rollouts)
        scores = (
            ("", "") if group.void else (f"{group.pass_rate:.2f}", f"{group.rewards.mean():+.2f}")
        )
        table.add_row(
            "?" if due is None else str(due),
            str(group.ticket),
            Text(_named(group, state)),
            *scores,
            _span(versions),
            "" if due is None or not len(versions) else str(due - versions.min()),
            f"{sum(len(r.tokens) for r in group.rollouts):,}",
            Text(_notes(group), style="red" if group.void else "dim"),
        )
    return table


def _named(group: Group, state: State) -> str:
    """Return the prompt's id, with its task if there are several."""
    return printable(
        f"{group.prompt.task}/{group.prompt.id}" if len(state.tasks) > 1 else group.prompt.id
    )


def _notes(group: Group) -> str:
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
    notes = [f"{number} {what}" for what, number in counts.items() if number]
    return ", ".join(notes if group.has_variance else ["no variance", *notes])


def _one(
    group: Group, due: int | None, limit: int, tokenizer: Tokenizer | None, name: str
) -> Lines:
    head = Text.assemble(
        (f"ticket {group.ticket}", "bold"),
        f" · step {'?' if due is None else due} · prompt {name} · epoch {group.epoch} · answer"
        f" {printable(' or '.join(group.prompt.answers))} · pass rate {group.pass_rate:.2f}",
    )
    parts: list[RenderableType] = [
        head,
        Padding(Text(printable(_text(group.prompt.tokens, tokenizer))), (0, 0, 1, 2)),
    ]
    if group.void:
        parts.append(Text(_notes(group), style="red"))
    for rollout in group.rollouts[:limit]:
        parts += [_about(rollout, due), Padding(_coloured(rollout, tokenizer), (0, 0, 1, 2))]
    if len(group.rollouts) > limit:
        parts.append(
            Text(f"… and {len(group.rollouts) - limit} more rollouts (--limit)", style="dim")
        )
    return Lines(*parts)


def _about(rollout: Rollout, due: int | None) -> Text:
    facts = [f"reward {rollout.reward:+g}", rollout.finish, f"{len(rollout.tokens):,} tokens"]
    facts += [f"{name} {score:+g}" for name, score in rollout.rewards.items()]
    if len(versions := _versions((rollout,))):
        facts.append(f"weights {_span(versions)}")
        facts += [f"lag {due - versions.min()}"] if due is not None else []
    if (episode := rollout.episode) is not None:
        facts.append(f"{episode.turns} turns" if episode.turns > 1 else "1 turn")
        facts += [f"{len(rollout.paths)} paths"] if len(rollout.paths) > 1 else []
        facts += [f"{episode.untrained:,} tokens not trained"] if episode.untrained else []
        facts += [f"{episode.errors} of {episode.calls} calls failed"] if episode.errors else []
    told = {
        "out of turns": episode is not None and episode.limited,
        "interrupted": rollout.interrupted,
        "format wrong": not rollout.format_ok,
        "grader ran out of time": rollout.grader_timeout,
        "grader failed": rollout.grader_error,
        f"{rollout.retries} retries": rollout.retries > 0,
    }
    facts += [what for what, holds in told.items() if holds]
    mark = ("right", "bold green") if rollout.correct else ("wrong", "bold red")
    return Text.assemble((f"rollout {rollout.sample} ", "bold"), mark, " · " + " · ".join(facts))


def _coloured(rollout: Rollout, tokenizer: Tokenizer | None) -> Text:
    """Return the completion in colour. A version's number precedes its first token;
    untrained text is dim.
    """
    text = Text()
    version = None
    begins = {sum(p.segments for p in rollout.paths[:n]): n for n in range(len(rollout.paths))}
    for number, segment in enumerate(rollout.segments):
        if number in begins and len(begins) > 1:
            path = rollout.paths[begins[number]]
            after = f", after {path.shared:,} tokens of path {path.parent}" if path.shared else ""
            text.append(
                f"{chr(10) if number else ''}(path {begins[number]}{after})\n", style="bold"
            )
        style = VERSION_STYLES[segment.weight_version % len(VERSION_STYLES)]
        if segment.trained and segment.weight_version != version:
            version = segment.weight_version
            text.append(f"[{version}]", style=f"reverse {style}")
        text.append(
            printable(_text(segment.tokens, tokenizer)),
            style=style if segment.trained else "dim italic",
        )
    return text


def _as_json(group: Group, due: int | None, tokenizer: Tokenizer | None) -> dict[str, object]:
    def shown(ids: np.ndarray) -> dict[str, object]:
        return {"tokens": ids.tolist()} | ({"text": _text(ids, tokenizer)} if tokenizer else {})

    rollouts = []
    for rollout in group.rollouts:
        segments = [
            {
                "weight_version": s.weight_version,
                "trained": s.trained,
                "logprobs": s.logprobs.tolist(),
            }
            | ({"turn": s.turn, "credit": s.credit} if s.turn >= 0 else {})
            | shown(s.tokens)
            for s in rollout.segments
        ]
        values = {key: getattr(rollout, key) for key in ROLLOUT_KEYS}
        more = {
            "episode": msgspec.to_builtins(rollout.episode),
            "paths": msgspec.to_builtins(rollout.paths),
        }
        rollouts.append(values | more | {"segments": segments})
    prompt = {key: getattr(group.prompt, key) for key in PROMPT_KEYS} | shown(group.prompt.tokens)
    record = {key: getattr(group, key) for key in ("ticket", "epoch", "void", "pass_rate")}
    return record | {"step": due, "prompt": prompt, "rollouts": rollouts}


def _text(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """Return the text of the ids, with special tokens and all spaces; without a
    tokenizer, the ids themselves.
    """
    return tokenizer.continued(tokens) if tokenizer else " ".join(map(str, tokens.tolist())) + " "


def _versions(rollouts: tuple[Rollout, ...]) -> np.ndarray:
    return np.array(
        [s.weight_version for r in rollouts for s in r.segments if s.trained and len(s.tokens)],
        dtype=int,
    )


def _span(versions: np.ndarray) -> str:
    return "–".join(map(str, sorted({versions.min(), versions.max()}))) if len(versions) else ""
