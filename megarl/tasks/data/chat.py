"""A model's chat template: turns messages into the text that the model was trained to
see.

It is the Jinja template of Hugging Face directories (`chat_template.jinja`, or
`chat_template` in tokenizer_config.json), run as transformers runs it, in a sandbox,
but without transformers (see tokenizer.py), and always on the same day.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.hf_files import read_json
from megarl.tasks.data.rows import Message, abbreviated

OURS = ("messages", "tools", "documents", "add_generation_prompt")
"""What `ChatTemplate.render` sets."""
SAMPLE_REPLY = "said-by-the-assistant"
SAMPLE_RESULT = 'told-by-the-"tool"'
"""Texts of messages that are easily located in what a template makes of them. The
second shows whether it is written as JSON.
"""


class AroundReply(NamedTuple):
    """The text before and after a tool's reply, between two turns of the assistant.
    in_json: the template writes the reply as a JSON string, as Llama 3's does.
    """

    before_reply: str
    after_reply: str
    in_json: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template. path: its directory, for error messages. variables: those
    that are the same for all conversations: `bos_token` and the like, and the recipe's
    `template_options`.
    """

    template: Any
    variables: Mapping[str, Any]
    path: Path

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        reply: bool = True,
    ) -> str:
        """Return the text of messages. tools: those that the model may call; reply:
        whether to add the start of its message.
        """
        from megarl.tasks.data.template_environment import MOST_STEPS

        self.template.environment.steps = MOST_STEPS
        try:
            return self.template.render(
                **self.variables,
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=reply,
            )
        except Exception as error:  # a template is a program: it may raise any exception
            roles = ", ".join(message["role"] for message in messages)
            raise MegarlError(
                f"{self.path}: the chat template refuses messages of {roles}: {error}"
            ) from None

    def render_all(self, messages: Sequence[Message]) -> str:
        """Return the text of messages; MegarlError as of `check_all`."""
        text = self.render(messages)
        self.check_all(messages, text)
        return text

    def check_all(
        self, messages: Sequence[Message], text: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Raise MegarlError if a message is not in the text that it was rendered to, as
        of a role that the template does not know.
        """
        for n, message in enumerate(messages):
            if message["content"].strip() in text:
                continue
            # It is not in the text word for word: perhaps only its thoughts are left
            # out. If another content makes no difference, all of it is.
            changed = {**message, "content": f"{message['content']}?"}
            changed_messages = [*messages[:n], changed, *messages[n + 1 :]]
            if self.render(changed_messages, tools) == text:
                raise MegarlError(
                    f"{self.path}: the chat template leaves out what {message['role']!r} says"
                    f" ({abbreviated(message['content'])}); roles that all templates know are"
                    " system, user, assistant and tool"
                )

    def around_replies(self, ends: tuple[str, ...]) -> dict[str, AroundReply]:
        """Return the text around a tool's reply, by the token with which the policy
        ended its turn: under "" if it is the same after each. The text before it begins
        with the token that ends a turn, of which gpt-oss has another one at the end of
        a conversation, or in whose place the policy wrote another. GLM-4.5's template
        ends no turn; the policy does with the beginning of the next message, so there
        are as many as kinds of messages, the tool's first.

        ends: texts that end a completion. The reply is a message with the role `tool`,
        or `user` if the template does not support tools. MegarlError if neither works.
        """
        turns: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": SAMPLE_REPLY},
        ]
        problem = "it leaves a tool's text out"
        by_end: dict[str, AroundReply] = {}
        for role in ("tool", "user"):
            try:
                text = self.render([*turns, {"role": role, "content": SAMPLE_RESULT}])
                closing = self.render(turns, reply=False).rpartition(SAMPLE_REPLY)[2]
            except MegarlError as error:
                problem = str(error)
                continue
            around = _around_result(text)
            if around is None:
                continue
            if closing.startswith(ends):
                return {"": around}
            beginnings = [end for end in ends if around.before_reply.startswith(end)]
            if closing or not beginnings:
                raise MegarlError(
                    f"{self.path}: the chat template does not end a turn with"
                    f" {' or '.join(map(repr, ends))}, at which a completion ends; make the token"
                    " that ends one the eos_token of tokenizer_config.json, or use template: raw"
                )
            by_end.setdefault(beginnings[0], around)
        if not by_end:
            raise MegarlError(
                f"{self.path}: the chat template cannot hold a tool's reply: {problem}; use"
                " template: raw"
            )
        return by_end


def _around_result(text: str) -> AroundReply | None:
    """Return what is around SAMPLE_RESULT in a rendered conversation; None unless it
    and SAMPLE_REPLY are in it once.
    """
    json_result = json.dumps(SAMPLE_RESULT)[1:-1]  # without the quotes around it
    in_json = json_result in text
    written_result = json_result if in_json else SAMPLE_RESULT
    if text.count(written_result) != 1 or text.count(SAMPLE_REPLY) != 1:
        return None
    _, _, after_turn = text.partition(SAMPLE_REPLY)
    before_reply, after_reply = after_turn.split(written_result)
    return AroundReply(before_reply, after_reply, in_json)


def template_source(folder: Path) -> str:
    """Return the text of a directory's chat template; empty if there is none.
    MegarlError if it, or tokenizer_config.json, cannot be read.
    """
    try:
        source = _template_entry(folder)
    except (MegarlError, OSError, ValueError) as error:
        raise MegarlError(f"{folder}: no chat template can be loaded: {error}") from None
    if isinstance(source, list):
        source = _default_template(source)
    return source if isinstance(source, str) else ""


def _template_entry(folder: Path) -> Any:
    """Return the template's text, or what tokenizer_config.json has in its place: a
    text, a list of named templates, or None.
    """
    config = read_json(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    if file.is_file():
        return contents(file).decode()
    return config.get("chat_template")


def _default_template(templates: list[Any]) -> Any:
    """Return the text of the default one of several templates, each {"name",
    "template"}; None if none has this name.
    """
    for template in templates:
        if isinstance(template, dict) and template.get("name") == "default":
            return template.get("template")
    return None


def load_chat(
    hf_dir: Path | str, options: Mapping[str, Any] = MappingProxyType({})
) -> ChatTemplate:
    """Load a directory's chat template; MegarlError if there is none. options:
    variables to set, which it must read.
    """
    from jinja2 import TemplateError, meta

    from megarl.tasks.data.template_environment import TemplateEnvironment

    folder = Path(hf_dir)
    source = template_source(folder)
    config = read_json(folder / "tokenizer_config.json")
    if not source:
        raise MegarlError(
            f"{folder}: the model has no chat template (chat_template.jinja, or chat_template in"
            " tokenizer_config.json); `template: chat` and agents need one"
        )
    tokens = _special_tokens(config)
    environment = TemplateEnvironment()
    try:
        template = environment.from_string(source)
        parsed = environment.parse(source)
    except (TemplateError, RecursionError) as error:
        raise MegarlError(f"{folder}: the chat template cannot be read: {error}") from None
    free = meta.find_undeclared_variables(parsed) - {*OURS, *environment.globals, *tokens}
    unread = options.keys() - free
    if unread:
        options_read = "and this one reads none"
        if free:
            options_read = f"of which this one reads {', '.join(sorted(free))}"
        raise MegarlError(
            f"{folder}: template_options {', '.join(sorted(unread))}: no option of the chat"
            f" template, {options_read}"
        )
    return ChatTemplate(template, {**tokens, **options}, folder)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of tokens such as `bos_token` in a tokenizer_config.json, which
    has each as a text or as an object with its `content`.
    """
    tokens = {}
    for key, value in config.items():
        if not key.endswith("_token") or not value:
            continue
        if isinstance(value, dict):
            tokens[key] = value["content"]
        elif isinstance(value, str):
            tokens[key] = value
    return tokens
