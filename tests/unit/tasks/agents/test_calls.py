"""Tool calls in what the policy wrote, in each form that templates write: against the
templates, and SGLang's readers.
"""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.tasks.agents.calls import CallFormat, Marks, call_format, read_turn
from megarl.tasks.agents.messages import AgentRequest, CanonicalMessage, ToolCall
from megarl.tasks.agents.tree import SessionTree
from megarl.tasks.data.chat import load_chat
from tests import make
from tests.unit.tasks.agents.templates import (
    FAMILIES,
    PUBLISHED,
    published,
    rendering_of,
    tokenizer_of,
)

FORMATS = {
    "qwen": CallFormat(Marks(opening="<tool_call>", closing="</tool_call>"), "arguments"),
    "thinking": CallFormat(Marks(opening="<tool_call>", closing="</tool_call>"), "arguments"),
    "llama": CallFormat(Marks(), "parameters"),
    "instruct": CallFormat(Marks(opening="[CALL]", closing="[/CALL]"), "arguments"),
    "tags": CallFormat(
        Marks(opening="<call>", closing="</call>"),
        keys=Marks(opening="<k>", closing="</v>"),
        value="</k><v>",
    ),
}
SEE = {
    "name": "f",
    "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": function}
    for function in (SEE, {"name": "g", "parameters": {}})
]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_form_of_calls_is_told_from_the_template(family: str, tmp_path: Path) -> None:
    assert rendering_of(tmp_path, family)[1].calls == FORMATS[family]


ONE = {
    "DeepSeek-V3": (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    ),
    "Kimi K2": (
        "<|tool_call_begin|>functions.{}:{{n}}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    ),
    "gpt-oss": (
        "<|start|>assistant<|channel|>commentary"
        " to=functions.{}<|constrain|>json<|message|>{}<|call|>"
    ),
}
AROUND = {
    "DeepSeek-V3": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "Kimi K2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>Hm.<|end|>", "", ""),
    "GLM-4.5": ("", "\n", ""),
}
DETECTORS = {
    "DeepSeek-V3": "deepseekv3_detector.DeepSeekV3Detector",
    "Kimi K2": "kimik2_detector.KimiK2Detector",
    "GLM-4.5": "glm4_moe_detector.Glm4MoeDetector",
    "gpt-oss": "gpt_oss_detector.GptOssDetector",
}
ARGUMENTS = {"n": [1], "s": ["5", "two\nlines ", 'a "b" {c}', "é"]}


def written(family: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return what a policy of this family writes, after the published descriptions of
    its form.
    """
    made = []
    for n, (name, arguments) in enumerate(calls):
        if family == "GLM-4.5":
            pairs = "".join(
                f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v)}</arg_value>\n"
                for k, v in arguments.items()
            )
            made.append(f"<tool_call>{name}\n{pairs}</tool_call>")
        else:
            made.append(ONE[family].format(name, json.dumps(arguments)).replace("{n}", str(n)))
    begin, between, end = AROUND[family]
    return begin + between.join(made) + end


@pytest.mark.parametrize("family", DETECTORS)
def test_sglang_reads_the_same_calls(family: str, tmp_path: Path) -> None:
    module, _, name = DETECTORS[family].partition(".")
    detector = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), name)
    tool = importlib.import_module("sglang.srt.entrypoints.openai.protocol").Tool
    form = published(tmp_path, family)[1].calls
    assert form is not None
    texts: Any = ARGUMENTS["s"]
    calls: Any
    for calls in (
        *([("f", {"n": 1, "s": text})] for text in texts),
        (
            [("f", {"n": -2})]
            if family == "gpt-oss"
            else [("f", {"n": -2}), ("g", {}), ("f", {"s": "{}"})]
        ),
    ):
        text = ("" if family == "gpt-oss" else "See.\n") + written(family, calls)
        theirs = detector().detect_and_parse(text, [tool(**one) for one in TOOLS])
        rest, ours = form.read(text.removesuffix("<|call|>"), TOOLS)  # which ends the turn
        assert (
            [(c.name, c.arguments) for c in ours]
            == [(c.name, json.loads(c.parameters)) for c in theirs.calls]
            == calls
        )
        if family != "gpt-oss":  # of which SGLang drops the thinking, that we keep beside the call
            assert rest.strip() == theirs.normal_text.strip() == "See."


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
a_call = st.tuples(
    st.from_regex(r"[a-zA-Z_][\w.-]{0,12}", fullmatch=True, alphabet=st.characters(codec="ascii")),
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), json_values, max_size=3),
)


@pytest.mark.parametrize("family", [name for name in PUBLISHED if name != "Llama 4"])
def test_calls_that_a_template_writes_are_read(family: str, tmp_path: Path) -> None:
    """No more than one call of Llama 4 is read, for nothing tells where one begins in a
    text.
    """
    form = published(tmp_path, family)[1].calls
    chat = load_chat(tmp_path)
    assert form is not None
    asked = {"role": "user", "content": "?"}
    most = 1 if family in ("Llama 3", "gpt-oss") else 3

    @given(st.lists(a_call, min_size=1, max_size=most))
    @settings(max_examples=25)
    def test(calls: list[tuple[str, dict[str, Any]]]) -> None:
        if family == "GLM-4.5":  # it writes a text as it is
            calls = [
                (n, {k: v.replace("<", "") if isinstance(v, str) else v for k, v in a.items()})
                for n, a in calls
            ]
        tools = [
            {
                "function": {
                    "name": name,
                    "parameters": {
                        "properties": {
                            k: {"type": "string"} for k, v in a.items() if isinstance(v, str)
                        }
                    },
                }
            }
            for name, a in dict(calls).items()
        ]
        wanted = [(name, dict(calls)[name]) for name, _ in calls]
        wire = [
            {
                "id": form.template_id(ToolCall("call00000", name, a), n),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(a) if form.as_text else a},
            }
            for n, (name, a) in enumerate(wanted)
        ]
        text = chat.render(
            [asked, {"role": "assistant", "content": "", "tool_calls": wire}], reply=False
        )
        text = (
            text.removeprefix(chat.render([asked]))
            .removesuffix("\n")
            .removesuffix(PUBLISHED[family][-1])
        )
        assert [(c.name, c.arguments) for c in form.read(text, tools)[1]] == wanted

    test()


DEEPSEEK = written("DeepSeek-V3", [("f", {"n": 1})])
KIMI = written("Kimi K2", [("f", {"n": 1})])
GLM = written("GLM-4.5", [("f", {"n": 1})])
GPT_OSS = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("DeepSeek-V3", DEEPSEEK.removesuffix("<｜tool▁calls▁end｜>")),
        ("DeepSeek-V3", DEEPSEEK.replace("```json", "```")),
        ("DeepSeek-V3", DEEPSEEK.replace("1", "NaN")),
        ("DeepSeek-V3", DEEPSEEK.replace("function<", "f<")),
        ("Kimi K2", KIMI.replace(":0", "")),
        ("Kimi K2", KIMI.replace("functions.", "")),
        ("Kimi K2", KIMI.replace('{"n": 1}', "[1]")),
        ("Kimi K2", KIMI.replace("<|tool_call_end|>", "")),
        ("GLM-4.5", GLM.replace("</arg_value>", "")),
        ("GLM-4.5", GLM.replace("</tool_call>", "?</tool_call>")),
        ("GLM-4.5", GLM.replace("f\n", "two words\n")),
        ("gpt-oss", GPT_OSS.replace("<|channel|>commentary", "<|channel|>final")),
        ("gpt-oss", GPT_OSS.replace("<|message|>", "")),
        ("gpt-oss", GPT_OSS.replace("{}", "{")),
    ],
)
def test_what_is_no_call_in_its_form_stays_in_the_content(
    family: str, text: str, tmp_path: Path
) -> None:
    form = published(tmp_path, family)[1].calls
    said = read_turn(f"See.{text}", form, "", 0, TOOLS)
    assert (said.text, said.calls) == (f"See.{text}", ())


def test_the_rest_of_a_text_with_a_call_is_its_content(tmp_path: Path) -> None:
    """Thinking before a call is what gpt-oss's template writes in the place of a text
    beside it.
    """
    form = published(tmp_path, "gpt-oss")[1].calls
    thinking = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for call in (GPT_OSS, " to=functions.f<|channel|>commentary json<|message|>{}"):
        said = read_turn(thinking + call, form, "<|channel|>final<|message|>", 0)
        assert (said.text, [c.name for c in said.calls]) == ("Hm.", ["f"])
    preamble = "<|channel|>commentary<|message|>First f.<|end|><|start|>assistant"
    assert read_turn(preamble + GPT_OSS, form, "", 0).text == preamble, (
        "no text that the template writes"
    )


def test_a_key_has_an_end_to_its_length(tmp_path: Path) -> None:
    form = published(tmp_path, "GLM-4.5")[1].calls
    assert form is not None
    for key in ("k" * 256, "two words"):
        _, [call] = form.read(GLM.replace("<arg_key>n<", f"<arg_key>{key}<"))
        assert call.arguments == {key: 1}
    assert form.read(GLM.replace("<arg_key>n<", f"<arg_key>{'k' * 257}<"))[1] == []


def test_texts_are_told_from_json_by_the_tools_schema(tmp_path: Path) -> None:
    form = published(tmp_path, "GLM-4.5")[1].calls
    assert form is not None
    schemas = {
        "text": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "number": {"type": ["integer", "null"]},
        "either": {"type": ["string", "integer"]},
        "wrong": {"type": 5, "anyOf": 5},
    }
    tools = [{"function": {"name": "f", "parameters": {"properties": schemas}}}]
    values = {
        "text": "null",
        "maybe": "1",
        "number": "1",
        "either": "1",
        "wrong": "[1]",
        "unknown": "word",
        "nan": "NaN",
    }
    _, [call] = form.read(written("GLM-4.5", [("f", values)]), tools)
    assert call.arguments == values | {"number": 1, "either": 1, "wrong": [1]}
    _, [call] = form.read(written("GLM-4.5", [("f", {"maybe": "null"})]), tools)
    assert call.arguments == {"maybe": None}


def test_kimis_results_name_the_call_that_the_policy_wrote(tmp_path: Path) -> None:
    """Its template writes ids, which it was trained to number through the
    conversation.
    """
    tokenizer, rendering = published(tmp_path, "Kimi K2")
    tree = SessionTree()
    tools = tuple(TOOLS)
    request = AgentRequest((CanonicalMessage("user", "x"),), tools)
    node = tree.add(
        None, rendering.full_prompt(request), request, tree.find(request)[1], tree.moment()
    )
    text = written("Kimi K2", [("f", {}), ("g", {})]).replace("g:1", "g:7")
    tokens = tokenizer.ids(text)
    said = read_turn(text, rendering.calls, "", 0, tools)
    tree.answer(node, (make.segment(tokens, logprob=0.0),), said)
    back = (
        *request.messages,
        CanonicalMessage("assistant", calls=tuple(c._replace(written="") for c in said.calls)),
    )
    results = tuple(CanonicalMessage("tool", "r", answers=call.id) for call in said.calls)
    again = AgentRequest((*back, *results), tools)
    put = rendering.tail(tree.find(again)[0], again)  # type: ignore[arg-type]
    assert put is not None
    assert [line for line in tokenizer.decode(put).splitlines() if "Return" in line] == [
        "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.f:0",
        "r<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.g:7",
    ]
    named = {call.id: f"mine_{call.id}" for call in said.calls}
    other = tuple(replace(m, answers=named[m.answers]) for m in results)
    theirs = replace(back[-1], calls=tuple(c._replace(id=named[c.id]) for c in back[-1].calls))
    renamed = AgentRequest((*request.messages, theirs, *other), tools)
    again_put = rendering.tail(node, renamed)
    assert again_put is not None
    assert again_put.tolist() == put.tolist(), "whatever ids the agent gives them"
    whole = tokenizer.decode(rendering.full_prompt(again))
    assert whole.count("functions.f:0") == whole.count("functions.g:1") == 2, (
        "the agent's own history is numbered"
    )


OPEN = "<tool_call>"
CLOSE = "</tool_call>"
F = '{"name": "f", "arguments": {}}'
G = '{"name": "g", "arguments": {}}'
TEXT = '{"name": "f", "arguments": "no"}'
NAN = '{"name": "f", "arguments": {"x": NaN}}'
LARGE = NAN.replace("NaN", "1e999")
HALF = NAN.replace("NaN", r'["\ud83d"]')
HARD = '{"name": "f", "arguments": {"x": "</tool_call>"}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"a{OPEN}\n{HARD}\n{CLOSE}b", "ab", ["f"]),
        (f"{OPEN}{F}{CLOSE}\n{OPEN}{G}{CLOSE}", "", ["f", "g"]),
        (f"{OPEN}{F}", f"{OPEN}{F}", []),
        (f"{OPEN}{TEXT}{CLOSE}", f"{OPEN}{TEXT}{CLOSE}", []),
        *((f"{OPEN}{bad}{CLOSE}", f"{OPEN}{bad}{CLOSE}", []) for bad in (NAN, LARGE, HALF)),
        (f"{OPEN}{NAN.replace('NaN', r'"\ud83d\ude00"')}{CLOSE}", "", ["f"]),
        (f"{OPEN}?{OPEN}{F}{CLOSE}", f"{OPEN}?", ["f"]),
        ("[1, 2]", "[1, 2]", []),
    ],
)
def test_what_is_no_call_stays_in_the_content(text: str, content: str, calls: list[str]) -> None:
    said = read_turn("<think>hm</think>" + text, FORMATS["qwen"], "</think>", 3)
    assert (said.text, [call.name for call in said.calls], said.reasoning) == (content, calls, "hm")
    assert len({call.id for call in said.calls}) == len(calls)


def test_a_call_without_marks_is_a_whole_message() -> None:
    one = '{"name": "f", "parameters": {"x": 1}}'
    assert [c.name for c in read_turn(one, FORMATS["llama"], "", 0).calls] == ["f"]
    assert read_turn("See " + one, FORMATS["llama"], "", 0).text == "See " + one
    assert read_turn(one + " and", FORMATS["llama"], "", 0).calls == ()


CALL_AS_CODE = """{%- for m in messages %}{{- m.content }}{%- for c in m.tool_calls or [] %}{{- '[' + c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}{{- k + "='" + v + "'" }}{%- endfor %}{{- ')]' }}{%- endfor %}
{{- '<|im_end|>' }}{%- endfor %}"""


@pytest.mark.parametrize(
    "template", [CALL_AS_CODE, "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"]
)
def test_other_forms_are_not_read(template: str, tmp_path: Path) -> None:
    """Where nothing tells an argument from what stands around it, or no calls are
    written.
    """
    tokenizer_of(tmp_path, template)
    assert call_format(load_chat(tmp_path), ["<|im_end|>"]) is None
