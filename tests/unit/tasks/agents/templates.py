"""Chat templates that behave as those of the families they are named for, and a
tokenizer that some texts have several ways in.

Written for these tests: what matters is where a template trims, what it drops of
earlier turns, and how it writes calls.
"""

import json
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.tasks.agents.rendering import Rendering
from megarl.tasks.data.chat import load_chat

SPECIAL = ("<|im_end|>", "<|im_start|>", "<|bos|>")
CALLS = """{%- macro calls(m) %}{%- for c in m.tool_calls or [] %}{%- set f = c.function %}
{{- '\\n<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{%- endmacro %}"""
TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"""
TOOL = """{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""

QWEN = f"""{CALLS}{TOOLS}{{%- for m in messages %}}
{{%- if m.role == 'tool' %}}{TOOL}
{{%- elif m.role == 'assistant' and m.tool_calls %}}
{{{{- '<|im_start|>assistant' }}}}
{{%- if m.content %}}{{{{- '\\n' + m.content }}}}{{%- endif %}}{{{{- calls(m) + '<|im_end|>\\n' }}}}
{{%- else %}}{{{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}
{{%- endif %}}{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""
"""Calls behind the text, results of parallel calls in one message of the user's."""

THINKING = f"""{CALLS}{TOOLS}{{%- set ns = namespace(last=-1) %}}
{{%- for m in messages %}}{{%- if m.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}{{%- endfor %}}
{{%- for m in messages %}}{{%- if m.role == 'tool' %}}{TOOL}
{{%- elif m.role == 'assistant' %}}{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}}
{{{{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') }}}}
{{%- else %}}{{{{- m.content }}}}{{%- endif %}}{{{{- calls(m) + '<|im_end|>\\n' }}}}
{{%- else %}}{{{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}}}
{{%- endif %}}{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""
"""Thinking before the last words of the user is dropped, so a whole conversation is
written anew with each of them.
"""

LLAMA = """{{- '<|bos|>' }}{%- for m in messages %}
{%- if m.tool_calls %}{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}{{- '<|im_start|>assistant\\n\\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson }}{{- '}<|im_end|>' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>ipython\\n\\n' + (m.content | tojson) + '<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n\\n' + m.content | trim + '<|im_end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}"""
"""Text beside a call is dropped, and only one call is written; texts are trimmed."""

INSTRUCT = """{{- '<|bos|>' }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'system' %}{{- '[SYS]' + m.content + '[/SYS]' }}
{%- elif m.role == 'tool' %}{{- '[RESULT] ' }}{{ {'content': m.content, 'id': m.tool_call_id} | tojson(ensure_ascii=True) }}
{{- '[/RESULT]' }}
{%- else %}{{- m.content }}{%- for c in m.tool_calls or [] %}
{{- '[CALL]{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}[/CALL]' }}
{%- endfor %}{{- '<|im_end|>' }}{%- endif %}
{%- endfor %}"""
"""Nothing begins the assistant's turn; results have the ids of their calls, in ASCII.
"""

TAGS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}{{- '<k>' + k + '</k><v>' + v | string + '</v>' }}{%- endfor %}{{- '</call>' }}
{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Arguments are written key by key."""

LLAMA_3 = """{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, respond with JSON.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f.name }}
{{- '", "parameters": ' }}{{- f.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role in ('tool', 'ipython') %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}
{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

LLAMA_4 = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|header_start|>ipython<|header_end|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot|>' }}
{%- else %}{{- '<|header_start|>' + m.role + '<|header_end|>\\n\\n' }}
{%- if m.tool_calls and m.content %}{{- '<|python_start|>' + m.content | trim + '<|python_end|>' }}
{%- else %}{{- m.content | trim }}{%- endif %}
{%- for c in m.tool_calls or [] %}{{- '{"name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson }}{{- '}' }}{%- endfor %}{{- '<|eot|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""

DEEPSEEK = """{{- bos_token }}{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- set ns = namespace(outputs=false) %}{%- for m in messages %}
{%- if m.role != 'tool' and ns.outputs %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{- '\\n' if ns.outputs else '<｜tool▁outputs▁begin｜>' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- elif m.role == 'assistant' %}{%- if not ns.outputs %}{{- '<｜Assistant｜>' }}{%- endif %}
{{- m.content.split('</think>')[-1] }}{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}
{{- '' if loop.first else '\\n' }}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- set ns.outputs = m.role == 'tool' %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜tool▁outputs▁end｜>' if ns.outputs else '<｜Assistant｜>' }}{%- endif %}"""
"""Arguments have to be a text; a section is around all calls."""

KIMI = """{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' }}{{- tools | tojson }}{{- '<|im_end|>' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content + '<|im_end|>' }}
{%- else %}{{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
"""Calls have their ids in place of their names."""

GLM = """{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n# Tools\\n' }}
{%- for t in tools %}{{- t | tojson(ensure_ascii=False) + '\\n' }}{%- endfor %}{%- endif %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'assistant' %}{{- '<|assistant|>\\n<think></think>' }}
{%- if m.content %}{{- '\\n' + m.content.strip() }}{%- endif %}
{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' + c.function.name }}{%- for k, v in c.function.arguments.items() %}
{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) + '</arg_value>' }}{%- endfor %}
{{- '\\n</tool_call>' }}{%- endfor %}{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{%- set ns = namespace(called='') %}
{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{- '<|end|>' }}
{%- elif m.tool_calls %}{%- set f = m.tool_calls[0].function %}{%- set ns.called = f.name %}
{%- if m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}
{%- else %}
{{- '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

PUBLISHED = {
    "Llama 3": (LLAMA_3, "<|eot_id|>"),
    "Llama 4": (LLAMA_4, "<|eot|>"),
    "Qwen2.5": (QWEN, "<|im_end|>"),
    "Qwen3": (THINKING, "<|im_end|>"),
    "DeepSeek-V3": (DEEPSEEK, "<｜end▁of▁sentence｜>"),
    "Kimi K2": (KIMI, "<|im_end|>"),
    "GLM-4.5": (GLM, "<|endoftext|>", "<|user|>", "<|observation|>"),
    "gpt-oss": (GPT_OSS, "<|return|>", "<|call|>"),
}
"""By family of reference/models.md: a template written, shorter, after the one that
its models are published with, their eos_token, and the others at which their
generation_config.json stops; where a text stands is theirs, instructions to the model
are cut.
"""
MARKS = {
    "GLM-4.5": ("<|assistant|>",),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
}
"""Further special tokens of theirs."""

FAMILIES = {"qwen": QWEN, "thinking": THINKING, "llama": LLAMA, "instruct": INSTRUCT, "tags": TAGS}
MERGES = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("x", "y"), ("n", "a"), ("c", "a")]
"""So `abc` is one token, and may be sampled as three."""


def tokenizer_of(
    folder: Path, template: str, end: str = "<|im_end|>", *others: str, marks: tuple[str, ...] = ()
) -> Tokenizer:
    """Saved in `folder` with the template and what else ends a completion, and loaded
    from there.
    """
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE({word: n for n, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = dict.fromkeys((*SPECIAL, end, *others, *marks))
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token=end,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    ends = [backend.token_to_id(text) for text in (end, *others)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_tokenizer(folder)


def published(folder: Path, family: str) -> tuple[Tokenizer, Rendering]:
    tokenizer = tokenizer_of(folder, *PUBLISHED[family], marks=MARKS.get(family, ()))
    return tokenizer, Rendering(load_chat(folder), tokenizer, "sampled")


def rendering_of(
    folder: Path, family: str, history: Literal["sampled", "template"] = "sampled"
) -> tuple[Tokenizer, Rendering]:
    tokenizer = tokenizer_of(folder, FAMILIES[family])
    return tokenizer, Rendering(load_chat(folder), tokenizer, history)
