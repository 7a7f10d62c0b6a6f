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


ANY = -1
"""In place of the id of the token that ended a turn: any token."""


class Frame(NamedTuple):
    """Tokens [n] int32 before a text and after it. in_json: the template writes the
    text as JSON: escaped, but the quotes are part of the frame.
    """

    head: np.ndarray
    tail: np.ndarray
    in_json: bool

    def written(self, text: str) -> str:
        """Return the text as the template writes it."""
        if not self.in_json:
            return text
        return json.dumps(text, ensure_ascii=False)[1:-1]


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
        self._literal = tokenizer  # for plain text
        self._template = template
        self._limit = limit
        self._options = options
        self._frames: dict[int, Frame] = {}

    def tokens(self, text: str, turn: np.ndarray | None = None) -> np.ndarray:
        """Return the framed text as [m] int32, with m at most the limit; the middle of
        a longer text is cut out. turn: the tokens [n] of the policy's turn that it
        answers. MegarlError if they are missing and matter, as with GLM-4.5: there the
        turn ends with the beginning of the message that is to come.

        A text may be long enough for its tokens to take all memory: of one that must be
        cut, only the two ends are tokenised.
        """
        frame = self._frame_after(turn)
        literal = self._literal
        room = self._limit - len(frame.head) - len(frame.tail)
        if literal.least_tokens(len(text)) > room:
            characters = room * literal.longest_token  # enough for `room` tokens
            start = literal.ids(frame.written(text[:characters]))
            end = literal.ids(frame.written(text[-characters:]))
        else:
            start = literal.ids(frame.written(text))
            end = start
            if len(start) <= room:
                return np.concatenate([frame.head, start, frame.tail])
        cut = literal.ids(frame.written(CUT))
        text_room = room - len(cut)
        start_length = (text_room + 1) // 2
        end_length = text_room - start_length
        ends = [start[:start_length], cut, end[len(end) - end_length :]]
        return np.concatenate([frame.head, *ends, frame.tail])

    def check(self) -> None:
        """Raise MegarlError if replies cannot be framed with this model, or the limit
        leaves no room for text.
        """
        if not self._frames:
            self._literal = self._tokenizer.literal()
            frames = self._made_frames()
            for frame in frames.values():
                self._check_room(frame)
            self._frames = frames

    def _frame_after(self, turn: np.ndarray | None) -> Frame:
        """Return what is around a text that answers this turn."""
        self.check()
        if ANY in self._frames:
            return self._frames[ANY]
        if turn is None:
            raise MegarlError(
                "the model's chat template ends no turn, so a reply depends on the token that the"
                " turn ends with: give the turn, framing.tokens(text, turn)"
            )
        end = int(turn[-1]) if len(turn) else ANY
        if end in self._frames:
            return self._frames[end]
        # As after <|endoftext|>: the whole message.
        beginning, frame = next(iter(self._frames.items()))
        return frame._replace(head=np.append(int32([beginning]), frame.head))

    def _made_frames(self) -> dict[int, Frame]:
        """Return the frames of the template, or RAW's, by the id of the token that ends
        a turn. MegarlError as in `check`.
        """
        tokenizer = self._tokenizer
        if self._template != "chat":
            head_text, tail_text = RAW
            return {ANY: Frame(tokenizer.ids(head_text), tokenizer.ids(tail_text), False)}
        ends = {tokenizer.decode(int32([end])): end for end in tokenizer.ends}
        chat = load_chat(tokenizer.path, self._options)
        frames = {}
        for end, around in chat.around_replies(tuple(ends)).items():
            # The policy has written the first token, or another in its place.
            head = tokenizer.ids(around.before_reply)[1:]
            tail = tokenizer.ids(around.after_reply)
            frames[ends.get(end, ANY)] = Frame(head, tail, around.in_json)
        return frames

    def _check_room(self, frame: Frame) -> None:
        cut = self._literal.ids(frame.written(CUT))
        needed = len(frame.head) + len(frame.tail) + len(cut)
        if needed + 2 > self._limit:  # a token on each side of the cut
            raise MegarlError(
                f"reply_tokens={self._limit} leaves no room for a reply in the model's markers,"
                f" which take {needed}; raise it"
            )


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
