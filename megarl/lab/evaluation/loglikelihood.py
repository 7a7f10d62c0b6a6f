"""How likely a model finds a continuation of a text: log p(continuation | context), computed by a server.

    context "Question: … Answer:", continuation " Paris" ──► [joined] token ids, first of the continuation
                                                         ──► ServerClient.score ──► sum of its log-probs

Texts become tokens as in lm-evaluation-harness 0.4.13 (`TemplateLM._encode_pair`), so that its numbers are ours: both are
encoded as one text, framed as the tokenizer frames any (a Llama 3 has <|begin_of_text|> in front), blanks at the end of the
context count to the continuation, and what comes behind as many tokens as the context has alone is the continuation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.server.client import ServerClient


class Continuation(NamedTuple):
    """tokens [n] int32, of which those from `first` on are scored; cut: the begin of the context was left out."""

    tokens: np.ndarray
    first: int
    cut: bool

    @property
    def scored(self) -> int:
        """How many tokens are."""
        return len(self.tokens) - self.first


def joined(tokenizer: Tokenizer, context: str, continuations: Sequence[str], longest: int) -> list[Continuation]:
    """Each continuation behind the context, in at most `longest` tokens: of a longer text the last ones, as the harness does.

    MegarlError if a continuation has no tokens of its own, or is too long by itself.
    """
    kept = context.rstrip()
    blanks = context[len(kept) :]
    alone, *wholes = tokenizer.encode_all([kept, *(kept + blanks + text for text in continuations)], framed=True)
    found = []
    for text, whole in zip(continuations, wholes, strict=True):
        over = max(0, len(whole) - longest)
        first = len(alone) - over
        if not 1 <= first < len(whole) - over:
            raise MegarlError(
                f"{text!r} cannot be scored behind {context[-60:]!r}: {len(whole) - len(alone)} tokens of its own, "
                f"behind at least one other, where {longest} fit"
            )
        found.append(Continuation(whole[over:], first, over > 0))
    return found


async def loglikelihoods(client: ServerClient, continuations: Sequence[Continuation], salt: str) -> list[float]:
    """Of each, in nats. `salt`: as of ServerClient.generate; a fresh one for each version of the weights.

    Raises ServerLost or ServerRefused.
    """
    scores = await client.score([c.tokens for c in continuations], [c.first for c in continuations], salt)
    return [float(np.sum(each.logprobs, dtype=np.float64)) for each in scores]
