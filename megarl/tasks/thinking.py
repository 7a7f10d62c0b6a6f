"""Where the thinking at the beginning of a turn ends.

<think> hm </think> 7   opened, by the turn or its prompt: it ends at the first mark
hm </think> 7           perhaps open: at the first mark outside of calls and blocks of
                        code
grep("</think>")        a policy that did not think writes of the mark: nothing ends
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

OPENING = re.compile(r"```[^\n`]*\n|~~~[^\n]*\n|<tool_call>")
CLOSING = {"```": "```", "~~~": "~~~", "<tool_call>": "</tool_call>"}


@dataclass(frozen=True)
class MarkedBlock:
    """A block of a text: text[start:end] with its marks, of which
    text[content_start:content_end] stands between them.
    """

    start: int
    content_start: int
    content_end: int
    end: int


def blocks(
    text: str, opening: re.Pattern[str], closing: Mapping[str, str]
) -> Iterator[MarkedBlock]:
    """Yield the closed blocks of a text, in time linear in its length.

    closing: the closing mark, by the beginning of an opening mark.
    """
    position = 0
    unclosed = set[str]()
    while match := opening.search(text, position):
        position = match.end()
        kind = next(mark for mark in closing if match[0].startswith(mark))
        # If no closing mark follows an opening one, none follows a later one.
        if kind in unclosed:
            continue
        content_end = text.find(closing[kind], position)
        if content_end < 0:
            unclosed.add(kind)
            continue
        end = content_end + len(closing[kind])
        yield MarkedBlock(match.start(), position, content_end, end)
        position = end


def opening_of(end_of_thinking: str) -> str:
    """Return the mark that opens thinking: `<think>` for `</think>`; "" if there is
    none.
    """
    mark = end_of_thinking.strip()
    opening = mark.replace("/", "", 1)
    return "" if opening == mark else opening


def is_opened(text: str, end_of_thinking: str, prompt: str = "") -> bool:
    """Return whether a turn certainly begins with thinking: whether the mark that opens
    it stands at the turn's beginning or the prompt's end. prompt: the text before the
    turn.
    """
    opening = opening_of(end_of_thinking)
    if not opening:
        return False
    return text.lstrip().startswith(opening) or prompt.rstrip().endswith(opening)


def without_thinking(
    text: str, end_of_thinking: str, prompt: str = "", calls: Iterable[tuple[int, int]] = ()
) -> tuple[str, str] | None:
    """Return the thinking at the beginning of a turn, and the rest, both without the
    mark between them; None if no thinking ends there.

    prompt: the text before the turn. calls: the places of calls, as (start, end). An
    empty end_of_thinking means: no thinking.
    """
    if not end_of_thinking:
        return None
    mark = text.find(end_of_thinking)
    if mark >= 0 and not is_opened(text, end_of_thinking, prompt):
        thinking_is_over = prompt.rstrip().endswith(end_of_thinking.strip())
        if thinking_is_over or _is_json(text):
            return None
        # A mark within a call or a block of code ends nothing.
        places = list(calls)
        places += [(block.start, block.end) for block in blocks(text, OPENING, CLOSING)]
        for start, end in sorted(places):
            if start <= mark < end:
                mark = text.find(end_of_thinking, end)
    if mark < 0:
        return None
    return text[:mark], text[mark + len(end_of_thinking) :]


def _is_json(text: str) -> bool:
    """Return whether a text is one JSON object or list, as structured output is."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
