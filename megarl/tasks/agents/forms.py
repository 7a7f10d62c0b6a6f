"""Forms that a request may demand of its answer: JSON, JSON of a schema, a call of one
tool.

    response_format, text.format, output_format, a named tool
      ─► AnswerForm ─► `agent.forms: refuse`: 400
              ─► `agent.forms: ask`:    a sentence in the system message

A provider holds the model to a form while it samples. Here that is not done: what is
sampled under a grammar has log-probs that are not the policy's. So the policy is asked,
may answer otherwise, and learns from the session's reward.
"""

import json
from dataclasses import replace
from typing import Any

from megarl.tasks.agents.errors import refused_field
from megarl.tasks.agents.messages import AgentRequest, AnswerForm, CanonicalMessage

REFUSED = (
    "constrains what is sampled, whose log-probs are then not the policy's; leave it out, or set"
    " agent.forms=ask in the recipe, by which the policy is asked for it in words"
)
_NAMED = ("function", "tool")
_CHOICES = (None, "auto", "any", "required", "none")


def form_of_text(field: str, format: Any) -> list[AnswerForm]:
    """Return the form that a field of a request demands of the text, if any. WireError
    if it is unknown.
    """
    if format is None:
        return []
    kind = format.get("type") if isinstance(format, dict) else format
    if kind == "text":
        return []
    if kind == "json_object":
        return [AnswerForm(field, "Answer with a JSON object and nothing else.")]
    if kind != "json_schema":
        raise refused_field(field, f"{kind!r} is not one of text, json_object, json_schema")
    described = format.get("json_schema", format)  # chat completions nest it
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise refused_field(field, "it has no schema")
    return [
        AnswerForm(
            field, f"Answer with JSON that has this schema and nothing else:\n{_text(schema)}"
        )
    ]


def form_of_choice(choice: Any) -> list[AnswerForm]:
    """Return the form that a tool choice demands, if it names a tool. choice: a word or
    an object with a type. WireError if it is unknown.
    """
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in _CHOICES:
        return []
    name = None
    if kind in _NAMED:
        function = choice.get("function", choice)  # chat completions nest it
        name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise refused_field("tool_choice", f"{kind!r} is not a choice, or names no tool")
    return [AnswerForm("tool_choice", f"Call the tool {name}.")]


def in_words(request: AgentRequest) -> AgentRequest:
    """Return the request with its forms as the end of the system message, which is made
    if there is none.
    """
    if not request.forms:
        return request
    words = "\n\n".join(form.words for form in request.forms)
    first, *others = request.messages
    if first.role == "system":
        first = replace(first, text=f"{first.text}\n\n{words}")
        return replace(request, messages=(first, *others))
    return replace(request, messages=(CanonicalMessage("system", words), *request.messages))


def refuse_forms(request: AgentRequest) -> None:
    """Raise WireError if the request demands a form."""
    for form in request.forms:
        raise refused_field(form.field, REFUSED)


def _text(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False)
