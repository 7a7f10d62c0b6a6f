"""Chat templates that behave as those of the families they are named for, and a tokenizer that some texts have several ways in.

Written for these tests: what matters is where a template trims, what it drops of earlier turns, and how it writes calls.
"""

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
"""Thinking before the last words of the user is dropped, so a whole conversation is written anew with each of them."""

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
"""Nothing begins the assistant's turn; results have the ids of their calls, in ASCII."""

TAGS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{- '<call>' + c.function.name }}
{%- for k, v in c.function.arguments.items() %}{{- '<k>' + k + '</k><v>' + v | string + '</v>' }}{%- endfor %}{{- '</call>' }}
{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Calls are no JSON."""

FAMILIES = {"qwen": QWEN, "thinking": THINKING, "llama": LLAMA, "instruct": INSTRUCT, "tags": TAGS}
MERGES = [("a", "b"), ("ab", "c"), ("t", "h"), ("th", "e"), ("x", "y"), ("n", "a"), ("c", "a")]
"""So `abc` is one token, and may be sampled as three."""


def tokenizer_of(folder: Path, template: str) -> Tokenizer:
    """Saved in `folder` with the template, and loaded from there."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    backend = Backend(models.BPE({word: n for n, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    return load_tokenizer(folder)


def rendering_of(
    folder: Path, family: str, history: Literal["sampled", "template"] = "sampled"
) -> tuple[Tokenizer, Rendering]:
    tokenizer = tokenizer_of(folder, FAMILIES[family])
    return tokenizer, Rendering(load_chat(folder), tokenizer, history)
