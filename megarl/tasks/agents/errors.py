"""The errors that an agent reads. Each protocol writes them in its provider's form
(wire.py).
"""


class WireError(Exception):
    """A request that is refused. status: the HTTP status; code: as in OpenAI's
    errors.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class ContextFull(WireError):
    """A prompt that leaves no room for an answer. Agents know each provider's wording
    for it.

    tokens: its length; limit: the longest prompt. at_least: it was not tokenised to its
    end, and may have more than `tokens`.
    """

    def __init__(self, tokens: int, limit: int, at_least: bool = False) -> None:
        or_more = " or more" if at_least else ""
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your messages"
            f" resulted in {tokens} tokens{or_more}. Please reduce the length of the messages.",
            "context_length_exceeded",
        )
        self.tokens = tokens
        self.limit = limit


def refused_field(field: str, reason: str) -> WireError:
    """Return the error for a field of a request that is not supported. reason: why not;
    field: its name or place.
    """
    return WireError(400, f"{field}: {reason}", "unsupported_parameter")


def session_over(reason: str) -> WireError:
    """Return the error for a request to a session that has ended. Clients do not repeat
    a 400.
    """
    return WireError(400, f"the session is over: {reason}", "session_over")
