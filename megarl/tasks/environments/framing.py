"""The arguments of an environment (`Setting`), and how a reply's text is framed between
two turns (`Framing`).

    … 6*7 ```<|im_end|>                     sampled
    \\n<|im_start|>tool\\n                   head
    42                                      text
    <|im_end|>\\n<|im_start|>assistant\\n    tail
    The answer …                            sampled

Only the reply is tokenized here; the policy's tokens stay as they were sampled. A
tool's output is plain text, whatever it looks like: `<|im_end|>` in it does not become
that token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import int32
from megarl.tasks.data.chat import load_chat
from megarl.tasks.graders.sandbox import Sandbox
from megarl.tasks.thinking import without_thinking

RAW = ("\n```output\n", "\n```\n")
CUT = "\n…\n"


class Frame(NamedTuple):
    """Tokens [n] int32 before a text, after it, and in place of what is cut out;
    literal: the tokenizer for plain text.
    """

    head: np.ndarray
    tail: np.ndarray
    cut: np.ndarray
    literal: Tokenizer


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
        self._frame: Frame | None = None
        self._in_json = False

    def tokens(self, text: str) -> np.ndarray:
        """Return the framed text as [m] int32, with m at most the limit; the middle of
        a longer text is cut out.

        A text may be long enough for its tokens to take all memory: of one that must be
        cut, only the two ends are tokenised.
        """
        frame = self.check()
        literal = frame.literal
        room = self._limit - len(frame.head) - len(frame.tail)
        if literal.least_tokens(len(text)) > room:
            characters = room * literal.longest_token  # enough for `room` tokens
            start = literal.ids(self._written(text[:characters]))
            end = literal.ids(self._written(text[-characters:]))
        else:
            start = literal.ids(self._written(text))
            end = start
            if len(start) <= room:
                return np.concatenate([frame.head, start, frame.tail])
        text_room = room - len(frame.cut)
        start_length = (text_room + 1) // 2
        end_length = text_room - start_length
        ends = [start[:start_length], frame.cut, end[len(end) - end_length :]]
        return np.concatenate([frame.head, *ends, frame.tail])

    def check(self) -> Frame:
        """Return what is around a text; cached. MegarlError if replies cannot be framed
        with this model, or the limit leaves no room for text.
        """
        if self._frame is None:
            self._frame = self._made_frame()
        return self._frame

    def _made_frame(self) -> Frame:
        """Return the template's frame, or RAW's. MegarlError as in `check`."""
        head_text, tail_text = RAW
        sampled_tokens = 0
        if self._template == "chat":
            tokenizer = self._tokenizer
            ends = tuple(tokenizer.decode(int32([end])) for end in tokenizer.ends)
            sampled_tokens = 1  # the policy has written the token that ends its turn
            chat = load_chat(self._tokenizer.path, self._options)
            head_text, tail_text, self._in_json = chat.around_reply(ends)
        literal = self._tokenizer.literal()
        head = self._tokenizer.ids(head_text)[sampled_tokens:]
        tail = self._tokenizer.ids(tail_text)
        cut = literal.ids(self._written(CUT))
        needed = len(head) + len(tail) + len(cut)
        if needed + 2 > self._limit:  # a token on each side of the cut
            raise MegarlError(
                f"reply_tokens={self._limit} leaves no room for a reply in the model's markers,"
                f" which take {needed}; raise it"
            )
        return Frame(head, tail, cut, literal)

    def _written(self, text: str) -> str:
        """Return the text as the template writes it: if that is as JSON, escaped, but
        without the quotes, which are part of the frame.
        """
        if not self._in_json:
            return text
        return json.dumps(text, ensure_ascii=False)[1:-1]


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

    def answer_text(self, tokens: np.ndarray) -> str:
        """Return a turn's text without its thinking, if that is closed. An empty
        end_of_thinking means: no thinking.
        """
        text = self.tokenizer.continued(tokens)
        parts = without_thinking(text, self.end_of_thinking)
        if parts is None:
            return text
        return parts[1]
