"""What `megarl rollouts show` prints, as text and as JSON, with the quickstart's
tokenizer.
"""

import json
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Episode, Group, Prompt, Rollout, Segment
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted, Finished
from megarl.tasks.data.arithmetic_models import character_tokenizer
from megarl.tools.inspection.rollouts import show
from tests import make

MADE = character_tokenizer()
TOKENIZER = Tokenizer(MADE.backend_tokenizer, MADE.eos_token_id, Path())


def segment(text: str, version: int, trained: bool = True) -> Segment:
    logprob = -0.25 if trained else 0.0
    return make.segment(TOKENIZER.ids(text), version, logprob=logprob, trained=trained)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Batches of two: six void ones, then a group over three versions, a void one, and
    one without variance.
    """
    right = Rollout(
        sample=0,
        segments=(
            segment("7+8=15;1+2=", 4),
            segment("3", 5),
            segment("</think>", 5, trained=False),
            segment("85", 6),
        ),
        reward=1.0,
        correct=True,
        finish="stop",
        interrupted=True,
    )
    wrong = Rollout(
        sample=1,
        segments=(segment("7+8=14", 4),),
        reward=-1.0,
        correct=False,
        finish="length",
        format_ok=False,
        retries=2,
    )
    groups = (
        *(
            Group(ticket=t, prompt=prompt("z", "0+0="), rollouts=(), void="no server")
            for t in range(12)
        ),
        Group(ticket=12, prompt=prompt("a", "27+58="), rollouts=(right, wrong)),
        Group(ticket=13, prompt=prompt("b", "1+1="), rollouts=(), void="server answered 400"),
        Group(ticket=14, prompt=prompt("c", "2+2="), rollouts=(wrong, wrong)),
    )
    journal = Journal.open(tmp_path / "rollouts", 2, 8)
    journal.append(
        *(
            Admitted(ticket=g.ticket, task="math", prompt_id=g.prompt.id, epoch=0, due_step=0)
            for g in groups
        )
    )
    journal.append(*(Finished(group=g, time=0.0) for g in groups))
    journal.close()
    return tmp_path


def prompt(name: str, text: str) -> Prompt:
    return Prompt(id=name, tokens=TOKENIZER.ids(text), answer="85")


def shown(run: Path, width: int = 120, **choice: Any) -> str:
    out = StringIO()
    show(run, tokenizer=TOKENIZER, console=Console(file=out, width=width), **choice)
    return out.getvalue()


def test_table_of_groups(run: Path) -> None:
    title, head, *rows = [line.split() for line in shown(run, limit=3).splitlines()]
    assert title == ["3", "groups", "of", "15", "finished"]
    assert head == [
        "step",
        "ticket",
        "prompt",
        "pass",
        "rate",
        "reward",
        "weights",
        "lag",
        "tokens",
        "notes",
    ]
    notes = "1 truncated, 1 interrupted, 1 format wrong, 1 retried"
    assert rows[0] == f"6 12 a 0.50 +0.00 4–6 2 21 {notes}".split()
    assert rows[1] == ["6", "13", "b", "0", "void:", "server", "answered", "400"]
    notes = "no variance, 2 truncated, 2 format wrong, 2 retried"
    assert rows[2] == f"7 14 c 0.00 -1.00 4 3 12 {notes}".split()


def test_the_task_is_named_where_there_are_several(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "rollouts", 1, 8)
    for ticket, task in enumerate(("math", "code")):
        group = Group(
            ticket=ticket,
            prompt=msgspec.structs.replace(prompt("a", "1+1="), task=task),
            rollouts=(),
            void="x",
        )
        journal.append(
            Admitted(ticket=ticket, task=task, prompt_id="a", epoch=0, due_step=0),
            Finished(group=group, time=0.0),
        )
    journal.close()
    assert [row.split()[2] for row in shown(tmp_path).splitlines()[2:]] == ["math/a", "code/a"]
    assert "prompt code/a" in shown(tmp_path, ticket=1)


def test_limit_takes_the_latest(run: Path) -> None:
    assert [row.split()[1] for row in shown(run, limit=2).splitlines()[2:]] == ["13", "14"]


def test_a_batch(run: Path) -> None:
    assert [row.split()[1] for row in shown(run, step=6).splitlines()[2:]] == ["12", "13"]
    with pytest.raises(MegarlError, match=r"no batch of step 7 .* complete batches are 0 to 6"):
        shown(run, step=7)


def test_a_ticket(run: Path) -> None:
    text = shown(run, ticket=12)
    assert "ticket 12 · step 6 · prompt a · epoch 0 · answer 85 · pass rate 0.50" in text
    assert "27+58=" in text
    assert (
        "rollout 0 right · reward +1 · stop · 15 tokens · weights 4–6 · lag 2 · interrupted" in text
    )
    assert "[4]7+8=15;1+2=[5]3</think>[6]85" in text  # no version before what was put in
    assert (
        "rollout 1 wrong · reward -1 · length · 6 tokens · weights 4 · lag 2 · format wrong · 2"
        " retries" in text
    )
    assert "1 more rollouts (--limit)" in shown(run, ticket=12, limit=1)
    assert "void: server answered 400" in shown(run, ticket=13)
    with pytest.raises(MegarlError, match="ticket 99 has no group here"):
        shown(run, ticket=99)


def test_turns(tmp_path: Path) -> None:
    """What a tool replied is dim; turns and calls are told."""
    parts = (
        segment("[12*34]", 4),
        segment("408", 4, trained=False),
        segment("[1+]", 5),
        segment("?", 5, trained=False),
    )
    told = Episode(turns=3, calls=2, errors=1, seconds=0.5, limited=True)
    rollout = Rollout(
        sample=0, segments=parts, reward=-1.0, correct=False, finish="length", episode=told
    )
    journal = Journal.open(tmp_path / "rollouts", 1, 8)
    journal.append(Admitted(ticket=0, task="math", prompt_id="a", epoch=0, due_step=0))
    journal.append(
        Finished(group=Group(ticket=0, prompt=prompt("a", "12*34="), rollouts=(rollout,)), time=0.0)
    )
    journal.close()
    assert "1 truncated, 1 out of turns" in shown(tmp_path, width=150)
    assert "3 turns · 1 of 2 calls failed · out of turns" in shown(tmp_path, ticket=0)
    out = StringIO()
    show(
        tmp_path,
        ticket=0,
        tokenizer=TOKENIZER,
        console=Console(file=out, width=120, force_terminal=True),
    )
    assert "\x1b[2;3m408\x1b[0m" in out.getvalue()
    (line,) = shown(tmp_path, as_json=True).splitlines()
    assert json.loads(line)["rollouts"][0]["episode"]["turns"] == 3


def test_what_is_not_trained_is_dim(run: Path) -> None:
    out = StringIO()
    show(
        run,
        ticket=12,
        tokenizer=TOKENIZER,
        console=Console(file=out, width=120, force_terminal=True),
    )
    assert "\x1b[2;3m</think>\x1b[0m" in out.getvalue()


def test_json(run: Path) -> None:
    lines = shown(
        run, width=20, limit=3, as_json=True
    ).splitlines()  # a line is never broken, however narrow
    first, second, _ = [json.loads(line) for line in lines]
    assert (first["ticket"], first["step"], first["prompt"]["text"]) == (12, 6, "27+58=")
    parts = first["rollouts"][0]["segments"]
    assert [(p["weight_version"], p["trained"], p["text"]) for p in parts] == [
        (4, True, "7+8=15;1+2="),
        (5, True, "3"),
        (5, False, "</think>"),
        (6, True, "85"),
    ]
    assert parts[0]["logprobs"] == [-0.25] * 11
    assert second["void"] == "server answered 400"


def test_without_a_tokenizer_ids_are_shown(run: Path) -> None:
    out = StringIO()
    show(run, ticket=12, console=Console(file=out, width=120))
    assert " ".join(map(str, TOKENIZER.ids("27+58=").tolist())) in out.getvalue()


def test_a_terminal_does_not_obey_what_is_shown(tmp_path: Path) -> None:
    """Nor is it taken for rich's markup."""
    evil = "[/b]\x1b]0;title\x07\x9b2J\n"
    one = msgspec.structs.replace(prompt(evil, "1+1="), answer=evil)
    rollout = make.rollout(segment("2", 0), reward=1.0)
    journal = Journal.open(tmp_path / "rollouts", 1, 8)
    for ticket, group in enumerate(
        (
            Group(ticket=0, prompt=one, rollouts=(rollout,)),
            Group(ticket=1, prompt=one, rollouts=(), void=evil),
        )
    ):
        journal.append(
            Admitted(ticket=ticket, task="math", prompt_id="a", epoch=0, due_step=0),
            Finished(group=group, time=0.0),
        )
    journal.close()
    out = StringIO()
    writes = cast(Tokenizer, SimpleNamespace(continued=lambda _: evil))
    for shown, times in ((None, 2), (0, 4), (1, 4)):
        show(tmp_path, shown, tokenizer=writes, console=Console(file=out, width=200))
        text = out.getvalue()
        assert not set(text) & {"\x1b", "\x07", "\x9b"}
        assert text.count("[/b]\\x1b]0;title\\x07\\x9b2J") >= times
        out.truncate(0)
    show(tmp_path, tokenizer=writes, as_json=True, console=Console(file=out))
    assert not set(out.getvalue()) & {"\x1b", "\x07", "\x9b"}
    first, _ = map(json.loads, out.getvalue().lstrip("\0").splitlines())
    assert first["prompt"]["text"] == first["prompt"]["id"] == evil
