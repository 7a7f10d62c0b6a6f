"""Chat templates and traces of messages, against transformers' own rendering of the
same directory.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.recipe import Task, from_tree
from megarl.tasks.data import arithmetic_models, template_environment
from megarl.tasks.data.chat import load_chat
from megarl.tasks.data.prompts import endless, load_tasks, renderer
from megarl.tasks.data.rows import PromptRow
from megarl.tasks.data.traces import load_traces
from tests.unit.tasks.environments.texts import CHATML, byte_tokenizer

TEMPLATES = {
    "roles": (
        """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {%- if message.role == "system" and not loop.first %}{% continue %}{% endif %}
    {{- "<|" + message.role + "|>" + message.content | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
    ),
    "lines": (
        """{% for m in messages %}
  {% if m['role'] == 'user' %}
Q {{ m | tojson }}
  {% else %}
S {{ m['content'] }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}A {% endif %}"""
    ),
    "tools": (
        """{%- if tools is not none %}{{ 'Tools: ' ~ tools | length }}{% endif %}
{%- if documents is not none %}Documents{% endif %}
{%- for m in messages %}{{ m.content }}{% endfor %}"""
    ),
    "loop variables": (
        """{%- for m in messages -%}
    {{ loop.index }}/{{ loop.length }} {{ loop.revindex0 }}{{ loop.last }} {{ loop.nextitem is defined }}{{ m.content * 2 }}
{%- endfor %}"""
    ),
    "generation": (
        """{%- for m in messages %}
    {%- if m.role == "assistant" %}
        {%- generation -%}{% set text = m.content %}{{ loop.index ~ text }}{%- endgeneration -%}
    {%- else %}{{ m.content ~ text }}{% endif %}
{%- endfor %}"""
    ),
}
CONVERSATIONS = [
    [{"role": "user", "content": "1+1="}],
    [{"role": "system", "content": "Be  brief. "}, {"role": "user", "content": "é \"1\" < 2\n'x'"}],
    [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ],
]


def save(folder: Path, template: str) -> Any:
    """A model's directory, as transformers saves it."""
    made = arithmetic_models.character_tokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        eos_token=made.eos_token,
        bos_token="<bos>",
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_as_transformers_does(tmp_path: Path, name: str) -> None:
    theirs = save(tmp_path, TEMPLATES[name])
    ours = load_chat(tmp_path)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages) == expected


def test_todays_date_is_the_same_on_every_day(tmp_path: Path) -> None:
    """A run that is resumed on the next day would else be refused, because its prompts
    have changed.
    """
    save(tmp_path, "{{ 'Today Date: ' ~ strftime_now('%d %b %Y') ~ messages[0].content }}")
    assert load_chat(tmp_path).render(CONVERSATIONS[0]) == "Today Date: 26 Jul 20241+1="


def test_a_template_within_the_tokenizers_configuration(tmp_path: Path) -> None:
    for template in (
        "{{ bos_token }}x",
        [
            {"name": "tool_use", "template": "y"},
            {"name": "default", "template": "{{ bos_token }}x"},
        ],
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": template, "bos_token": {"content": "<b>"}})
        )
        assert load_chat(tmp_path).render([]) == "<b>x"


def test_none_a_broken_one_and_one_that_refuses(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    with pytest.raises(
        MegarlError, match=r"no chat template can be loaded: .*tokenizer_config\.json"
    ):
        load_chat(tmp_path)
    config.write_text("{}")
    with pytest.raises(MegarlError, match="the model has no chat template"):
        load_chat(tmp_path)
    config.write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(MegarlError, match="the chat template cannot be read"):
        load_chat(tmp_path)
    config.write_text(json.dumps({"chat_template": TEMPLATES["roles"]}))
    with pytest.raises(MegarlError, match="refuses messages of tool: unknown role tool"):
        load_chat(tmp_path).render([{"role": "tool", "content": ""}])


HYBRID = """{%- for m in messages %}{{ m.content }}{% endfor %}
{%- if not date_string is defined %}{% set date_string = strftime_now("%Y") %}{% endif %}
{%- if add_generation_prompt %}=
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endif %}"""
"""Reads an option as Qwen3's template does, and another as Llama 3's."""


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
            "more than 50,000 steps",
        ),
        (
            (
                "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{"
                " f(40) }}"
            ),
            "steps",
        ),
        (
            "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
            "steps",
        ),
        ("{% set n = 9 %}{{ n ** 999999999 }}", "larger than"),
        ("{% set n = 'a' %}{{ 999999999 * n }}", "larger than"),
        ("{{ lipsum(n=999999999) }}", "undefined"),
    ],
)
@pytest.mark.timeout(60)
def test_a_template_that_would_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, words: str
) -> None:
    monkeypatch.setattr(template_environment, "MOST_STEPS", 50_000)
    save(tmp_path, template)
    with pytest.raises(MegarlError, match=words):
        load_chat(tmp_path).render(CONVERSATIONS[0])


def test_a_long_conversation_ends(tmp_path: Path) -> None:
    """A template that goes through all messages for each message."""
    save(
        tmp_path,
        "{% for m in messages %}{% for n in messages %}{{ n.content }}{% endfor %}{% endfor %}",
    )
    assert load_chat(tmp_path).render([{"role": "user", "content": "1"}] * 300) == "1" * 300**2


def test_options_of_the_template_are_set_as_transformers_sets_them(tmp_path: Path) -> None:
    theirs = save(tmp_path, HYBRID)
    for options in ({}, {"enable_thinking": False}, {"enable_thinking": True, "date_string": "1"}):
        expected = theirs.apply_chat_template(
            CONVERSATIONS[0], tokenize=False, add_generation_prompt=True, **options
        )
        assert load_chat(tmp_path, options).render(CONVERSATIONS[0]) == expected
    task = task_with_chat().model_copy(update={"template_options": {"enable_thinking": False}})
    assert (
        renderer(task, load_tokenizer(tmp_path))(PromptRow("a", "1+1", "2"))
        == "1+1=<think></think>"
    )
    for wrong in ("enable_thinkng", "messages", "strftime_now", "bos_token"):
        with pytest.raises(
            MegarlError, match=f"{wrong}: no option of .* reads date_string, enable_thinking$"
        ):
            load_chat(tmp_path, {wrong: False})
    save(tmp_path, PLAIN)
    with pytest.raises(MegarlError, match="and this one reads none"):
        load_chat(tmp_path, {"enable_thinking": False})


PLAIN = (
    "{% for m in messages %}<{{ m.content }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def test_a_task_puts_its_system_message_and_the_template_around_the_prompt(tmp_path: Path) -> None:
    save(tmp_path, PLAIN)
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"q": f"{n}+1", "a": n + 1}) + "\n" for n in range(8)))
    task = {
        "train": str(file),
        "heldout": 3,
        "columns": {"prompt": "q", "answer": "a"},
        "template": "chat",
        "system": "1/2",
    }
    tokenizer = load_tokenizer(tmp_path)
    found = load_tasks(from_tree({"data": {"tasks": {"sums": task}}}), tokenizer)["sums"]
    assert (len(found.train), len(found.heldout)) == (5, 3)
    texts = {tokenizer.decode(p.tokens) for p in (*found.train, *found.heldout)}
    assert texts == {f"<1/2><{n}+1>=" for n in range(8)}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            (
                "{% for m in messages %}{% if m.role == 'human' %}{{ m.content }}{% endif %}{%"
                " endfor %}1+"
            ),
            "the user's message out",
        ),
        (
            (
                "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{"
                " part.text }}{% endif %}{% endfor %}{% endfor %}1+"
            ),
            "the user's message out",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "the system message out",
        ),
    ],
)
def test_a_template_that_leaves_a_message_out_is_refused(
    tmp_path: Path, template: str, words: str
) -> None:
    save(tmp_path, template)
    task = task_with_chat()
    with pytest.raises(MegarlError, match=f"the chat template leaves {words}"):
        renderer(task.model_copy(update={"system": "3"}), load_tokenizer(tmp_path))


def test_a_template_whose_turns_end_with_another_token_than_completions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Qwen2.5's base models, whose end token ends a document. One that ends
    nothing, as GLM-4.5's, is left alone.
    """
    wrong = CHATML.replace("<|end|>", "</think>")
    for n, (template, warnings) in enumerate(
        [(CHATML, 0), (wrong, 1), (CHATML.replace("<|end|>\\n", ""), 0)]
    ):
        caplog.clear()
        render = renderer(task_with_chat(), byte_tokenizer(tmp_path / str(n), template))
        assert render(PromptRow("a", "5?", "5")).endswith("<|start|>assistant\n")
        assert len(caplog.messages) == warnings, template
    assert "a turn with '</think>', but a completion ends only at '<|end|>'" in endless(
        load_chat(tmp_path / "1"), load_tokenizer(tmp_path / "1")
    )
    caplog.clear()
    (tmp_path / "s.jsonl").write_text(
        json.dumps({"messages": [CONVERSATIONS[0][0], {"role": "assistant", "content": "2"}]})
    )
    load_traces(tmp_path / "s.jsonl", load_tokenizer(tmp_path / "1"))
    assert sum("the chat template ends a turn with" in message for message in caplog.messages) == 1


def task_with_chat() -> Task:
    return from_tree(
        {"data": {"tasks": {"t": {"train": "t.jsonl", "heldout": 1, "template": "chat"}}}}
    ).data.tasks["t"]


def test_of_messages_the_assistants_are_learnt_behind_the_same_prompt(tmp_path: Path) -> None:
    save(tmp_path, PLAIN)
    tokenizer = load_tokenizer(tmp_path)
    file = tmp_path / "s.jsonl"
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "<think>4</think>5")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]},
        {
            "system": "9",
            "conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}],
        },
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    found = [
        (tokenizer.decode(t.tokens), tokenizer.decode(t.tokens[: t.prompt_tokens]))
        for t in load_traces(file, tokenizer)
    ]
    assert found == [
        ("<1>=2<eos>", "<1>="),
        ("<1><2><3>=<think>4</think>5<eos>", "<1><2><3>="),
        ("<9><1>=2<eos>", "<9><1>="),
    ]


@pytest.mark.parametrize(("said", "lacks"), [("5", True), ("[*]5", False)])
def test_what_the_template_writes_before_an_answer_and_a_trace_lacks_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, lacks: bool
) -> None:
    """As gpt-oss's channel: without it the policy would learn to answer in a form that
    the model never had.
    """
    refuses = "{% if '[*]' in m.content %}{{ raise_exception('it has a channel') }}{% endif %}"
    message = refuses + "={% if m.role == 'assistant' %}[*]{% endif %}{{ m.content }}"
    save(
        tmp_path,
        f"{{% for m in messages %}}{message}{{% endfor %}}{{% if add_generation_prompt %}}={{%"
        " endif %}",
    )
    tokenizer = load_tokenizer(tmp_path)
    file = tmp_path / "s.jsonl"
    row = {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": said}]}
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row)}")
    assert [tokenizer.decode(trace.tokens) for trace in load_traces(file, tokenizer)] == [
        f"=1={said}<eos>"
    ] * 2
    assert (
        sum("its template writes '[*]' before an answer" in message for message in caplog.messages)
        == lacks
    )


@pytest.mark.parametrize("said", ["<think>4</think>5", "\n<think>4</think>5", "4</think>5"])
def test_a_tag_that_the_template_has_written_is_not_learnt_again(tmp_path: Path, said: str) -> None:
    """Templates of models that always think open the trace."""
    save(tmp_path, PLAIN.replace("}={%", "}=<think>{%"))
    tokenizer = load_tokenizer(tmp_path)
    file = tmp_path / "s.jsonl"
    file.write_text(
        json.dumps(
            {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": said}]}
        )
    )
    (trace,) = load_traces(file, tokenizer)
    assert tokenizer.decode(trace.tokens) == "<1>=<think>4</think>5<eos>"
    assert tokenizer.decode(trace.tokens[trace.learnt]) == "4</think>5<eos>"


@pytest.mark.parametrize(("said", "lacks"), [("5", True), ("4</think>5", False)])
def test_thinking_that_the_template_opens_and_a_trace_does_not_close_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, said: str, lacks: bool
) -> None:
    """As of DeepSeek's distilled models with plain answers: all that the policy learns
    to write would count as thinking.
    """
    save(tmp_path, PLAIN.replace("}={%", "}=<think>{%"))
    file = tmp_path / "s.jsonl"
    file.write_text(
        json.dumps(
            {"conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": said}]}
        )
    )
    load_traces(file, load_tokenizer(tmp_path))
    assert (
        sum("an answer like the first has no '</think>'" in message for message in caplog.messages)
        == lacks
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [{"role": "user", "content": "1"}]},
            "the last message is not the assistant's",
        ),
        ({"messages": "x"}, "not a list of role and content"),
        ({"messages": [{"role": "user"}]}, "a message of 'user' has no content"),
        ({"messages": [{"content": "1"}]}, "a message has no role"),
        ({"text": "x"}, "not a row of prompt and completion, of messages, or of conversations"),
    ],
)
def test_bad_messages_are_named_with_their_line(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    save(tmp_path, PLAIN)
    (tmp_path / "s.jsonl").write_text("\n" + json.dumps(row))
    with pytest.raises(MegarlError, match=rf"s\.jsonl:2: .*{words}"):
        load_traces(tmp_path / "s.jsonl", load_tokenizer(tmp_path))


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    """Qwen's templates leave out roles that they do not know; what earlier turns
    thought may be left out.
    """
    known = (
        "{% if m.role in ['user', 'assistant'] %}<{{ m.content.split('</think>')[-1] }}>{% endif %}"
    )
    save(
        tmp_path,
        f"{{% for m in messages %}}{known}{{% endfor %}}{{% if add_generation_prompt %}}={{%"
        " endif %}",
    )
    tokenizer = load_tokenizer(tmp_path)
    file = tmp_path / "s.jsonl"
    turns = [("human", "1"), ("gpt", "<think>2</think>3"), ("human", "4"), ("gpt", "5")]
    file.write_text(
        json.dumps({"conversations": [{"from": who, "value": text} for who, text in turns]})
    )
    found = [tokenizer.decode(trace.tokens) for trace in load_traces(file, tokenizer)]
    assert found == ["<1>=<think>2</think>3<eos>", "<1><3><4>=5<eos>"]
    turns[1:1] = [("function_call", "6*7"), ("observation", "42")]
    file.write_text(
        json.dumps({"conversations": [{"from": who, "value": text} for who, text in turns]})
    )
    with pytest.raises(
        MegarlError, match=r"s\.jsonl: .*leaves out what 'function_call' says \('6\*7'\)"
    ):
        load_traces(file, tokenizer)
