"""Finds the program in an answer: a fenced code block, read by CommonMark's rules.

    answer ─► markdown-it's block parser ─► CodeBlock, CodeBlock, …
        ─► the last one marked as Python, else the last one

So a block may stand in a list item or a quotation, with three or more backticks or
tildes, and may have another fence within a longer one. Only HTML is not CommonMark's: a
fence directly below `<answer>` counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt

PYTHON = re.compile(r"[\s{.]*(?:python|py)(?![a-z])", re.IGNORECASE)
"""What an info string begins with if the block is Python: `python`, `py`, `Python 3`,
`{.python}`; not `pycon`.
"""
NOT_NEEDED = ["html_block", "reference", "heading", "lheading"]
"""Block rules that decide nothing about fences, but for HTML, in which CommonMark would
not see them.
"""


@dataclass(frozen=True)
class CodeBlock:
    """A fenced code block. info: what follows the opening fence; closed: it has a
    closing fence.
    """

    info: str
    content: str
    closed: bool

    @property
    def is_python(self) -> bool:
        """Whether its info string names Python."""
        return PYTHON.match(self.info) is not None


def program_of(answer: str, truncated: bool = False) -> str | None:
    """Return the last block that is marked as Python, else the last block, else None.

    Blank blocks do not count. CommonMark ends a block without a closing fence at the
    end of the text; in a truncated answer such a block does not count either, since
    more of it was to come.
    """
    blocks = [block for block in code_blocks(answer) if block.content.strip()]
    if truncated:
        blocks = [block for block in blocks if block.closed]
    blocks = [block for block in blocks if block.is_python] or blocks
    if not blocks:
        return None
    return blocks[-1].content


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the fenced code blocks of a text in Markdown. Time is linear in its length:
    1 to 10 µs per character.
    """
    for token in _parser().parse(text):
        if token.type != "fence" or token.map is None:
            continue
        # The block's lines are the opening fence, the content and, if it is closed,
        # the closing fence; the parser does not say whether that is there.
        first_line, end = token.map
        content_lines = token.content.count("\n")
        if token.content and not token.content.endswith("\n"):
            content_lines += 1
        closing_lines = end - first_line - 1 - content_lines
        yield CodeBlock(token.info, token.content, closed=closing_lines > 0)


@cache
def _parser() -> MarkdownIt:
    """Return a parser of blocks alone: what stands within lines takes time and holds no
    fence.
    """
    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])
    parser.block.ruler.disable(NOT_NEEDED)
    return parser
