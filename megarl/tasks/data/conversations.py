"""Reads conversations as data sets have them: messages as of OpenAI, TRL, verl and
ShareGPT.

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]
    [{"role": "user", "content": [{"type": "text", "text": "1+1=?"}]}]
    [{"from": "human", "value": "1+1=?"}]

`messages_of` reads them for prompts and traces alike; `prompt_of` says which are
prompts.
"""

import json
from collections.abc import Mapping
from typing import Any

from megarl.tasks.data.rows import Message, UnfitError, abbreviated

ROLES = {"human": "user", "gpt": "assistant", "developer": "system"}
"""Our names for ShareGPT's roles, and for OpenAI's newer one."""
PROMPT_ROLES = ("system", "user", "assistant")
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a content's parts that are text, of chat completions and of responses."""
CALLS = ("tool_calls", "function_call")
PYTHON_MESSAGES = ("[{'role", "[{'content", "[{'from", "[{'value")
"""How messages begin that were written by Python's repr."""


def prompt_of(value: Any) -> tuple[str, tuple[Message, ...]]:
    """Return what the user says in a prompt, and its messages if there is more than
    that.

    value: a text, messages, or the JSON text of messages. UnfitError if it is none of
    these, or a conversation that does not end with the user's message.
    """
    if isinstance(value, str):
        value = _from_json(value)
    if isinstance(value, str):
        return value, ()
    if not isinstance(value, list) or not value:
        raise UnfitError(f"the prompt is neither text nor a list of messages: {abbreviated(value)}")
    messages = messages_of(value)
    _check_prompt(value, messages)
    if len(messages) == 1:
        return messages[0]["content"], ()
    return user_text(messages), tuple(messages)


def messages_of(value: Any) -> list[Message]:
    """Return messages as {"role", "content"}, both texts. UnfitError if one has
    neither.
    """
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise UnfitError("the messages are not a list of role and content")
    return [_message(message) for message in value]


def user_text(messages: list[Message]) -> str:
    """Return what the user says in all turns: the text that is compared with evaluation
    sets.
    """
    return "\n".join(message["content"] for message in messages if message["role"] == "user")


def _from_json(text: str) -> Any:
    """Return the messages whose JSON text this is; any other text itself. UnfitError
    for messages in Python's notation.
    """
    beginning = text[:64].lstrip()
    if not beginning.startswith("[") or "{" not in beginning:
        return text
    if beginning.startswith(PYTHON_MESSAGES):
        raise UnfitError("the prompt is messages in Python's notation; write them as JSON")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if value and _is_message(value[0]):
        return value
    return text


def _is_message(value: Any) -> bool:
    """Return whether a value is a message of one of the schemas."""
    if not isinstance(value, Mapping):
        return False
    return {"role", "content"} <= set(value) or {"from", "value"} <= set(value)


def _message(raw: Mapping[str, Any]) -> Message:
    """Convert a message of any of the schemas. UnfitError without a role, or without a
    content that is text or parts of text.
    """
    role = raw.get("role") or raw.get("from")
    content = raw.get("content")
    if content is None:
        content = raw.get("value")
    if not isinstance(role, str):
        raise UnfitError(f"a message has no role: {abbreviated(dict(raw))}")
    if isinstance(content, list):
        content = "".join(_text_of_part(part) for part in content)
    if not isinstance(content, str):
        raise UnfitError(f"a message of {role!r} has no content")
    return {"role": ROLES.get(role, role), "content": content}


def _text_of_part(part: Any) -> str:
    """Return the text of a part of a message's content. UnfitError if it is another
    part, such as an image.
    """
    if isinstance(part, str):
        return part
    kind = type(part).__name__
    text = None
    if isinstance(part, Mapping):
        kind = part.get("type", "text")
        text = part.get("text")
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise UnfitError(f"a message has a part of type {kind!r}; only texts can be trained on")
    return text


def _check_prompt(value: list[Mapping[str, Any]], messages: list[Message]) -> None:
    """Raise UnfitError unless these messages are a prompt, which the assistant is to
    answer. value: the same messages, as the row has them.
    """
    roles = [message["role"] for message in messages]
    has_calls = any(raw.get(field) for raw in value for field in CALLS)
    if has_calls or "tool" in roles or "function" in roles:
        raise UnfitError("a message calls a tool or is a tool's; a prompt has texts of people only")
    for role in roles:
        if role not in PROMPT_ROLES:
            raise UnfitError(f"a message has the role {role!r}, not system, user or assistant")
    if roles[-1] != "user":
        raise UnfitError(f"the last message is the {roles[-1]}'s; a prompt ends with the user's")
    if "system" in roles[1:]:
        raise UnfitError("a system message is not the first message")
