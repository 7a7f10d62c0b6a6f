"""A run directory from a stranger: nothing in it reaches a browser or a terminal as
more than text, has a command wait, or has one write outside it.
"""

import ast
import gzip
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import megarl
from megarl.cli import main
from megarl.core.base import terminal
from megarl.core.base.rundir import RunDir, append_jsonl
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Group, Prompt
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted, Finished
from megarl.core.recipe import Recipe, load
from megarl.core.telemetry.spans import Spans
from megarl.predict.scaling.plot import plot_fits
from megarl.run.summary import summarise
from megarl.tools.report import charts
from tests import make
from tests.unit.predict.scaling.curves import exact

HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;title\x07\x9b31m\r\u202e[bold][/none]:smile:$\\frac{"
HALF = "\ud800"  # of a character: JSON may have it, and no encoding
RAW = [
    *(chr(code) for code in range(32) if chr(code) not in "\t\n"),
    "\x7f",
    "\x9b",
    "\u202e",
    "\ud800",
]
LIMIT_S = 60


@pytest.fixture(autouse=True)
def ended_in_time() -> Iterator[None]:
    """A command that waits for a pipe ends its test, instead of all of them."""
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


@pytest.fixture
def run(write_tasks_run: Callable[[int], tuple[Recipe, RunDir]]) -> RunDir:
    """A run of two tasks whose files have HOSTILE wherever a text may stand."""
    recipe, rundir = write_tasks_run(30)
    tokens = load_tokenizer(recipe.model.path).ids("1+1=")
    part = make.segment(tokens, 1, logprob=0.0)
    rollout = make.rollout(part, reward=1.0, rewards={HOSTILE: 1.0})
    prompt = Prompt(id=HOSTILE, tokens=tokens, answer=HOSTILE, task=HOSTILE)
    journal = Journal.open(rundir.rollouts, recipe.batch.prompts, recipe.pipeline.k)
    for ticket, void in enumerate(("", HOSTILE)):
        group = Group(ticket=ticket, prompt=prompt, rollouts=() if void else (rollout,), void=void)
        journal.append(
            Admitted(ticket=ticket, task=HOSTILE, prompt_id=HOSTILE, epoch=0, due_step=0)
        )
        journal.append(Finished(group=group, time=0.0))
    journal.close()
    for event in ("started", HOSTILE):
        row = {
            "time": 1.0,
            "session": "s",
            "event": event,
            "role": "learner-0",
            "nodes": [HOSTILE, "b"],
        }
        append_jsonl(rundir.supervisor, row | {HOSTILE: HOSTILE})
    status = json.loads(rundir.status.read_text()) | {
        "phase": HOSTILE,
        "parity": HOSTILE,
        "compute_unit": HOSTILE,
    }
    status["servers"][0]["state"] = HOSTILE
    rundir.status.write_text(json.dumps(status))
    log = rundir.log("learner", HOSTILE.replace("/", ""), 0)
    log.parent.mkdir(parents=True)
    log.write_bytes(
        f"2026-03-01 14:05:06,789 learner ERROR megarl.x: {HOSTILE}\n".encode(errors="replace")
    )
    return rundir


def texts(value: Any) -> Any:
    """The same tree with HOSTILE for each text."""
    if isinstance(value, dict):
        return {key: texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [texts(each) for each in value]
    return HOSTILE + HALF if isinstance(value, str) else value


COMMANDS = {
    "status": ("status",),
    "health": ("health",),
    "logs": ("logs", "--role", "learner"),
    "supervisor": ("logs", "--role", "supervisor"),
    "rollouts": ("rollouts", "show"),
    "ticket": ("rollouts", "show", "--ticket", "0"),
    "void": ("rollouts", "show", "--ticket", "1"),
    "slices": ("scaling", "slices"),
    "fit": ("scaling", "fit"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_no_control_character_reaches_a_terminal(
    run: RunDir, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, str(run.path)])
    shown = capsys.readouterr()
    assert [raw for raw in RAW if raw in shown.out + shown.err] == []
    assert "Traceback" not in shown.err


def test_a_summary_of_hostile_texts(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    ended = {"outcome": "failed", "reason": "x", "predicted": "y", "warnings": ["z"]}
    values = summarise(load(str(run.recipe)), run) | ended
    run.summary.write_text(json.dumps(texts(values)))
    assert main(["status", str(run.path)]) == 0
    shown = capsys.readouterr().out
    assert "<img src=x onerror=alert(1)>\\x1b]0;title" in shown
    assert [raw for raw in RAW if raw in shown] == []


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        assert not [name for name, _ in attributes if name.startswith("on")]


def tags(page: str) -> set[str]:
    parser = Tags()
    parser.feed(page)
    return parser.names


def test_a_report_has_only_its_own_tags_and_replaces_links(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "pictures", lambda *_: [])
    mine = tmp_path / "mine"
    mine.write_text("my own file")
    for place in (run.report, run.picture):
        place.symlink_to(mine)
    assert main(["report", str(run.path)]) == 0
    page = run.report.read_text()
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert not tags(page) & {"img", "script", "iframe", "object"}
    assert mine.read_text() == "my own file"
    assert not run.report.is_symlink()
    assert not run.picture.is_symlink()


def test_pages_and_charts_take_names_for_text(tmp_path: Path) -> None:
    curve = replace(exact(0.6, 1.5, 2500), unit=HOSTILE + HALF)
    png, svg, page = plot_fits({HOSTILE: ([curve], None)}, tmp_path / "a")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert "img" not in tags(svg.read_text(errors="replace"))
    assert "img" not in tags(page.read_text(errors="replace"))
    assert "+ data.unit +" not in page.read_text(errors="replace").partition("innerHTML")[2]


LINES = ("metrics.jsonl", "eval.jsonl", "logs/supervisor.jsonl")
ENDLESS = [
    *(
        ("fifo", name)
        for name in (
            "status.json",
            "summary.json",
            "recipe.yaml",
            *LINES,
            "rollouts/000000.journal",
        )
    ),
    *(("zeros", name) for name in ("status.json", "metrics.jsonl")),
    *(
        ("sparse", name)
        for name in ("status.json", "metrics.jsonl", "eval.jsonl", "rollouts/000000.journal")
    ),
]


@pytest.mark.parametrize(("kind", "name"), ENDLESS)
def test_files_that_never_end(
    run: RunDir, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run.path / name
    place.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "zeros":
        place.symlink_to("/dev/zero")
    else:
        with place.open("wb") as sparse:
            sparse.truncate(40 << 30)
    words = ["rollouts", "show", str(run.path)] if "journal" in name else ["status", str(run.path)]
    status = main(words)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    if kind != "sparse" or status:
        assert (status, len(shown.err.splitlines())) == (2, 1)
        assert name.rpartition("/")[2] in shown.err


def test_a_trace_replaces_a_link_and_goes_where_it_is_asked_to(run: RunDir, tmp_path: Path) -> None:
    spans = Spans()
    spans.write_to(run.trace / "learner.jsonl")
    for name in ("train", HOSTILE):
        spans.span("learner/rank 0", name, 1.0, 2.0, step=0)
    spans.flush()
    mine = tmp_path / "mine"
    mine.write_text("my own file")
    (run.path / "trace.json.gz").symlink_to(mine)
    assert main(["trace", str(run.path)]) == 0
    assert mine.read_text() == "my own file"
    assert gzip.decompress((run.path / "trace.json.gz").read_bytes()).startswith(b"{")
    assert main(["trace", str(run.path), "--output", str(mine)]) == 0
    assert json.loads(mine.read_bytes())["traceEvents"]


def test_a_terminal_obeys_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE + HALF)
    terminal.console(width=200).print(Panel(table, title=Text(HOSTILE)), HOSTILE)
    terminal.say(HOSTILE + HALF, "é\tü")
    shown = capsys.readouterr().out
    assert [raw for raw in RAW if raw in shown] == []
    assert shown.count("[bold][/none]:smile:") >= 4
    assert "é\tü" in shown
    assert terminal.uncoloured("\x1b[1;32mINFO\x1b[0m \x1b]0;x") == "INFO \x1b]0;x"


PLAIN = {
    "print(dump(recipe), end='', flush=True)",
    "print(describe(_load(recipe, overrides)), end='')",
}
"""What other programs read: YAML, which has no control characters."""


def test_all_output_goes_through_terminal() -> None:
    root = Path(megarl.__file__).parent
    wrong = []
    for file in (
        path
        for part in ("run", "checks", "predict", "tools", "cli")
        for path in (root / part).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("print", "Console")
            ):
                call = ast.unparse(node)
                if call not in PLAIN and not call.startswith(("print(text(model", "print(csv_of(")):
                    wrong.append(f"{file.relative_to(root)}: {call}")
    assert wrong == [], "use megarl/core/base/terminal.py"
