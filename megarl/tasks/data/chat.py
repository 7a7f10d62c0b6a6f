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
from typing import Any

from megarl.core.base.errors import MegarlError
from megarl.core.base.files import contents
from megarl.core.base.hf_files import read_json
from megarl.tasks.data.rows import Message, shown

OURS = ("messages", "tools", "documents", "add_generation_prompt")
"""What `ChatTemplate.render` sets."""


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

        given = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        self.template.environment.steps = MOST_STEPS
        try:
            return self.template.render(**self.variables, **given, add_generation_prompt=reply)
        except Exception as error:  # a template is a program: it may raise any exception
            roles = ", ".join(message["role"] for message in messages)
            raise MegarlError(
                f"{self.path}: the chat template refuses messages of {roles}: {error}"
            ) from None

    def render_all(self, messages: Sequence[Message]) -> str:
        """Return the text of messages; MegarlError if one is not in it, as of a role
        that the template does not know.
        """
        text = self.render(messages)
        for n, message in enumerate(messages):
            if message["content"].strip() in text:
                continue
            other = {**message, "content": f"{message['content']}?"}
            if (
                self.render([*messages[:n], other, *messages[n + 1 :]]) == text
            ):  # thoughts may be left out
                what = f"the chat template leaves out what {message['role']!r} says"
                advice = "roles that all templates know are system, user, assistant and tool"
                raise MegarlError(f"{self.path}: {what} ({shown(message['content'])}); {advice}")
        return text

    def around_reply(self, ends: tuple[str, ...]) -> tuple[str, str, bool]:
        """Return the text before and after a tool's reply, between two turns of the
        assistant, and whether the template writes the reply as a JSON string, as Llama
        3's does. The text before begins with the token that ends a turn, of which
        gpt-oss has another one at the end of a conversation. ends: texts that end a
        completion. The reply is a message with the role `tool`, or `user` if the
        template does not support tools. MegarlError if neither works.
        """
        said = "said-by-the-assistant"
        told = 'told-by-the-"tool"'
        in_json = json.dumps(told)[1:-1]
        before: list[Message] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": said},
        ]
        problem = "it leaves a tool's text out"
        for role in ("tool", "user"):
            try:
                text = self.render([*before, {"role": role, "content": told}])
                closing = self.render(before, reply=False).rpartition(said)[2]
            except MegarlError as error:
                problem = str(error)
                continue
            written = in_json if in_json in text else told
            if text.count(written) == text.count(said) == 1:
                if not closing.startswith(ends):
                    what = (
                        f"the chat template does not end a turn with {' or '.join(map(repr, ends))}"
                    )
                    advice = (
                        "make the token that ends one the eos_token of tokenizer_config.json, or"
                        " use template: raw"
                    )
                    raise MegarlError(f"{self.path}: {what}, at which a completion ends; {advice}")
                between, after = text.partition(said)[2].split(written)
                return between, after, written == in_json
        raise MegarlError(
            f"{self.path}: the chat template cannot hold a tool's reply: {problem}; use"
            " template: raw"
        )


def template_source(folder: Path) -> str:
    """Return the text of a directory's chat template; empty if there is none.
    MegarlError if it, or tokenizer_config.json, cannot be read."""
    try:
        config = read_json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = contents(file).decode() if file.is_file() else config.get("chat_template")
    except (MegarlError, OSError, ValueError) as error:
        raise MegarlError(f"{folder}: no chat template can be loaded: {error}") from None
    if isinstance(source, list):  # several templates, by name
        named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
        source = named[0].get("template") if named else None
    return source if isinstance(source, str) else ""


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
        none = "no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
        raise MegarlError(f"{folder}: the model has {none}; `template: chat` and agents need one")
    given = {key: value for key, value in config.items() if key.endswith("_token") and value}
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in given.items()
        if isinstance(value, str | dict)
    }
    environment = TemplateEnvironment()
    try:
        template = environment.from_string(source)
        parsed = environment.parse(source)
    except (TemplateError, RecursionError) as error:
        raise MegarlError(f"{folder}: the chat template cannot be read: {error}") from None
    free = meta.find_undeclared_variables(parsed) - {*OURS, *environment.globals, *tokens}
    if unread := options.keys() - free:
        known = (
            f"of which this one reads {', '.join(sorted(free))}"
            if free
            else "and this one reads none"
        )
        what = f"template_options {', '.join(sorted(unread))}: no option of the chat template"
        raise MegarlError(f"{folder}: {what}, {known}")
    return ChatTemplate(template, {**tokens, **options}, folder)
