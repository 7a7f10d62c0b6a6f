"""The Jinja environment of chat templates, as transformers sets it up, with a limit on
its work.

A template comes with a model, so it is a stranger's program. The sandbox keeps it from
everything but its messages, but not from loops without end: each step of a loop and
each call is counted.
"""

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Never

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

TODAY = datetime(2024, 7, 26)
"""The date for templates that write today's: with the real one, prompts would change
overnight, and a run could not be resumed. It is the one that Llama 3.2's template
writes without a clock.
"""

MOST_STEPS = 5_000_000
"""Steps of loops, and calls, in one rendering. A template that goes through all
messages for each message takes a million for a thousand messages.
"""
LONGEST = 10_000_000
"""Items of a sequence, or bits of a number, that a product may have."""
COUNTED = "counted_by_megarl"


class GenerationTag(Extension):
    """Write what `{% generation %}` encloses; with this tag transformers marks what a
    supervised trainer learns.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """Return the enclosed statements as a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """steps: how many are left of the present rendering; whoever renders sets it to
    MOST_STEPS.
    """

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        extensions = [GenerationTag, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.steps = MOST_STEPS
        self.filters["tojson"] = _to_json
        self.filters[COUNTED] = self._counted
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = TODAY.strftime
        del self.globals["lipsum"]  # writes as many words as it is told to

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template, as Jinja calls it; what a loop goes through also passes
        through the filter that counts its steps.
        """
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, COUNTED, [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return tree

    def _counted(self, items: Iterable[object]) -> Iterator[object]:
        """Yield the items of a loop, each counted as a step."""
        for item in items:
            self._count()
            yield item

    def _count(self) -> None:
        """Count a step. TemplateRuntimeError if none is left."""
        self.steps -= 1
        if self.steps < 0:
            raise TemplateRuntimeError(f"it takes more than {MOST_STEPS:,} steps, if it ever ends")

    def call(self, context: Context, function: Any, /, *args: Any, **named: Any) -> Any:
        """Count a call, and make it."""
        self._count()
        return super().call(context, function, *args, **named)

    def call_binop(self, context: Context, operator: str, first: Any, second: Any) -> Any:
        """Multiply or exponentiate; TemplateRuntimeError if the result is too large."""
        if _product_size(operator, first, second) > LONGEST:
            raise TemplateRuntimeError(f"{operator} makes something larger than {LONGEST:,}")
        return super().call_binop(context, operator, first, second)


def _product_size(operator: str, first: Any, second: Any) -> float:
    """Return the number of items, or bits, that first * second or first ** second has
    at most; 0 for operands of other types, which Jinja multiplies or refuses itself.
    """
    if isinstance(first, int) and isinstance(second, int):
        if operator == "**":
            return first.bit_length() * second
        return first.bit_length() + second.bit_length()
    for items, count in ((first, second), (second, first)):
        if hasattr(items, "__len__") and isinstance(count, int):
            return len(items) * count
    return 0


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Write JSON as transformers' filter of this name does: templates can set
    `ensure_ascii`, separators, and the like.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> Never:
    """Raise an error for messages that a template rejects; templates call this."""
    raise TemplateError(message)
