"""The table of checks: it names every check,
and commands make and show them from it.
"""

import inspect
import io
from pkgutil import resolve_name

import pytest
from rich.console import Console

from megarl.checks import inputs, making, start, table
from megarl.checks.making import Finding
from megarl.checks.table import TABLE, CheckEntry, Command, Need
from megarl.core.base.errors import MegarlError

FACTS = {
    Command.TRAIN: {"recipe", "rundir", "ports", "fingerprints", "host_bytes"},
    Command.DRY_RUN: {"recipe", "rundir", "ports", "host_bytes"},
    Command.SFT: {"recipe", "rundir", "ports"},
    Command.SUBMIT: {"recipe", "job"},
    Command.DOCTOR: {"models"},
}
"""What each command knows before its first check."""
OF_OTHERS = {"check_start", "check_cpu", "check_answers", "check_inputs", "check_sft", "check_all"}
"""Functions that checks of the table use, or that make several of them."""


@pytest.mark.parametrize("check", TABLE, ids=lambda check: check.function)
def test_every_function_exists(check: CheckEntry) -> None:
    assert callable(resolve_name(check.function))


@pytest.mark.parametrize("command", list(FACTS))
def test_what_a_check_asks_for_is_known_when_it_is_made(command: Command) -> None:
    facts = set(FACTS[command])
    for check in TABLE:
        if command not in check.commands or check.need is Need.RECIPE:
            continue
        for parameter in inspect.signature(resolve_name(check.function)).parameters.values():
            assert parameter.name in facts or parameter.default is not parameter.empty, check
        facts.add(check.gives)


@pytest.mark.parametrize("module", [inputs, start])
def test_no_check_is_left_out(module: object) -> None:
    functions = {
        name
        for name, value in vars(module).items()
        if name.startswith("check_")
        and inspect.isfunction(value)
        and value.__module__ == getattr(module, "__name__", "")
    }
    listed = {check.function.partition(":")[2] for check in TABLE}
    assert functions - listed <= OF_OTHERS


def test_no_check_is_made_twice_by_a_command() -> None:
    for command in Command:
        functions = [check.function for check in TABLE if command in check.commands]
        assert len(functions) == len(set(functions))


def text_of(command: Command) -> tuple[str, str]:
    """Return what is shown of the stand-in checks below, and the error."""
    console = Console(file=io.StringIO(), width=80, record=True)
    error = ""
    try:
        making.make_and_show(console, command, [Need.FILES], {"number": 3})
    except MegarlError as raised:
        error = str(raised)
    return console.export_text(), error


def passes(number: int) -> int:
    return number + 1


def sees_the_result(result: int) -> Finding:
    return Finding("result", "note", str(result), "that is all")


def fails() -> None:
    raise MegarlError("key: wrong")


def test_what_one_check_gives_another_may_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list ends with the check that fails; its message comes after it."""
    here = f"{passes.__module__}"
    sft = frozenset({Command.SFT})
    rows = (
        CheckEntry("first", Need.FILES, sft, f"{here}:passes", "result"),
        CheckEntry("second", Need.FILES, sft, f"{here}:sees_the_result"),
        CheckEntry("third", Need.FILES, sft, f"{here}:fails"),
        CheckEntry("fourth", Need.FILES, sft, f"{here}:fails"),
    )
    monkeypatch.setattr(making, "TABLE", rows)
    shown, error = text_of(Command.SFT)
    lines = [line.split() for line in shown.splitlines()]
    assert lines == [
        ["✓", "first"],
        ["•", "result", "4", "that", "is", "all"],
        ["✗", "third"],
    ]
    assert error == "key: wrong"
    assert text_of(Command.TRAIN) == ("\n", "") or not text_of(Command.TRAIN)[0].strip()


def test_a_reader_finds_each_command_in_the_table() -> None:
    for command in Command:
        assert any(command in check.commands for check in table.TABLE)
