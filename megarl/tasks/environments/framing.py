"""The arguments of an environment (`Setting`), and how a reply's text is framed between
two turns (`Framing`).

    … 6*7 ```<|im_end|>  \\n<|im_start|>tool\\n  42
    <|im_end|>\\n<|im_start|>assistant\\n  The answer …
    └ sampled ─────────┘ └ before ──────────┘ text └ after ───────────────────────────┘ └ sampled

Only the reply is tokenized here; the policy's tokens stay as they were sampled. A
tool's output is plain text, whatever it looks like: `<|im_end|>` in it does not become
that token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import int32
from megarl.tasks.data.chat import load_chat
from megarl.tasks.graders.sandbox import Sandbox
from megarl.tasks.thinking import without_thinking

RAW = ("\n```output\n", "\n```\n")
CUT = "\n…\n"


class Framing:
    """Frames a task's replies. limit: the most tokens in a framed reply; options: the
    task's `template_options`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        limit: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limit = limit
        self._options = options
        self._parts: tuple[np.ndarray, np.ndarray, np.ndarray, Tokenizer] | None = None
        self._in_json = False

    def tokens(self, text: str) -> np.ndarray:
        """Return the framed text as [m] int32, with m at most the limit; the middle of
        a longer text is cut out.

        A text may be long enough for its tokens to take all memory: of one that must be
        cut, only the two ends are tokenised.
        """
        before, after, cut, literal = self.check()
        room = self._limit - len(before) - len(after)
        if literal.least_tokens(len(text)) > room:
            characters = room * literal.longest_token
            beginning = literal.ids(self._written(text[:characters]))
            end = literal.ids(self._written(text[-characters:]))
        else:
            beginning = end = literal.ids(self._written(text))
            if len(beginning) <= room:
                return np.concatenate([before, beginning, after])
        kept = room - len(cut)
        first = (kept + 1) // 2
        last = kept - first
        return np.concatenate([before, beginning[:first], cut, end[len(end) - last :], after])

    def check(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tokenizer]:
        """Return the tokens before a text, after it and in place of a cut, and the
        tokenizer for plain text; cached. MegarlError if replies cannot be framed with
        this model, or the limit leaves no room for text.
        """
        if self._parts is None:
            (before, after) = RAW
            sampled = 0
            if self._template == "chat":
                ends = tuple(self._tokenizer.decode(int32([end])) for end in self._tokenizer.ends)
                sampled = 1
                before, after, self._in_json = load_chat(
                    self._tokenizer.path, self._options
                ).around_reply(ends)
            literal = self._tokenizer.literal()
            begin = self._tokenizer.ids(before)[
                sampled:
            ]  # the policy has written the token that ends its turn
            parts = (begin, self._tokenizer.ids(after), literal.ids(self._written(CUT)), literal)
            needed = sum(len(part) for part in parts[:3])
            if needed + 2 > self._limit:
                what = (
                    f"leaves no room for a reply in the model's markers, which take {needed};"
                    " raise it"
                )
                raise MegarlError(f"reply_tokens={self._limit} {what}")
            self._parts = parts
        return self._parts

    def _written(self, text: str) -> str:
        """Return the text as the template writes it."""
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._in_json else text


@dataclass(frozen=True)
class Setting:
    """The arguments of an environment. task: the task's name; reply_tokens: the most
    tokens in an observation. framing: turns a text into an observation's tokens, in the
    policy's chat template; sandbox: runs programs.
    """

    task: str
    tokenizer: Tokenizer
    framing: Framing
    sandbox: Sandbox
    end_of_thinking: str
    reply_tokens: int

    def said(self, tokens: np.ndarray) -> str:
        """Return a turn's text without its thinking, if that is closed. An empty
        end_of_thinking means: no thinking.
        """
        text = self.tokenizer.continued(tokens)
        parts = without_thinking(text, self.end_of_thinking)
        return text if parts is None else parts[1]
