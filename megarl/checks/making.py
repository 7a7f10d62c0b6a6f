"""Makes the checks of a command, in the table's order, and shows them as one list.

✓ disk                              a check that passed
• memory   3 GiB available   …      doctor: a disadvantage, and what to do
✗ model                             the one that failed; its message follows
"""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megarl.checks.table import TABLE, CheckEntry, Command, Need
from megarl.core.base.errors import MegarlError

Facts = dict[str, Any]
"""What is known, by the names of the parameters of checks, such as `recipe`. A check
may add what it finds out (`CheckEntry.gives`).
"""


@dataclass(frozen=True)
class Finding:
    """The answer to one question. advice: what to do, empty if all is well."""

    name: str
    grade: Literal["good", "note", "bad"]
    text: str = ""
    advice: str = ""


MARKS = {"good": Text("✓", "green"), "note": Text("•", "yellow"), "bad": Text("✗", "red")}


def checks_of(command: Command, needs: Collection[Need]) -> list[CheckEntry]:
    """Return the checks that a command makes of what it has so far."""
    return [check for check in TABLE if command in check.commands and check.need in needs]


def findings(command: Command, needs: Collection[Need], facts: Facts) -> Iterator[Finding]:
    """Make these checks one after the other and yield what each finds: one or several
    findings of its own, else a good one. What a check gives is added to `facts`. The
    first that fails ends this, with a bad finding and then its MegarlError.
    """
    for check in checks_of(command, needs):
        result = None
        try:
            if check.need is not Need.RECIPE:  # made when it was loaded
                result = call(check.function, facts)
        except MegarlError:
            yield Finding(check.name, "bad")
            raise
        if check.gives:
            facts[check.gives] = result
            yield Finding(check.name, "good")
        elif isinstance(result, Finding):
            yield result
        elif isinstance(result, Iterable) and not isinstance(result, str | Mapping):
            yield from result
        else:
            yield Finding(check.name, "good")


def make(command: Command, needs: Collection[Need], facts: Facts) -> None:
    """Make these checks. MegarlError of the first that fails."""
    for _ in findings(command, needs, facts):
        pass


def call(function: str, facts: Facts) -> Any:
    """Call `module:function` with those of the facts that are its parameters, which may
    have defaults.
    """
    resolved = resolve_name(function)
    names = inspect.signature(resolved).parameters
    return resolved(**{name: facts[name] for name in names if name in facts})


def make_and_show(
    console: Console, command: Command, needs: Collection[Need], facts: Facts
) -> list[Finding]:
    """Make checks and print what they find. If one fails, it is the last that is
    printed, and its MegarlError is raised.
    """
    return show_all(console, findings(command, needs, facts))


def show_all(console: Console, results: Iterable[Finding]) -> list[Finding]:
    """Print findings, also those before an error; return them."""
    finished: list[Finding] = []
    try:
        for finding in results:
            finished.append(finding)
    finally:
        show(console, finished)
    return finished


def show(console: Console, results: Iterable[Finding]) -> None:
    """Print findings: a mark, what was asked, what was found, what to do."""
    columns = [*(Column(no_wrap=True) for _ in range(3)), Column(ratio=1)]
    table = Table(*columns, box=None, padding=(0, 2), pad_edge=False, show_header=False)
    for finding in results:
        table.add_row(MARKS[finding.grade], finding.name, finding.text, Text(finding.advice))
    console.print(table)
