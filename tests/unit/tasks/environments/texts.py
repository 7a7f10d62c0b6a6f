"""A tokenizer that takes any text, byte by byte, with the special tokens and templates
of chat models.
"""

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from megarl.core.base.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ("<|end|>", "<|start|>", "<think>", "</think>")

CHATML = """{%- for m in messages %}
    {%- if m.role == "tool" %}
        {{- "<|start|>user\\n<tool_response>\\n" + m.content + "\\n</tool_response><|end|>\\n" }}
    {%- else %}
        {{- "<|start|>" + m.role + "\\n" + m.content + "<|end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant\\n" }}{%- endif %}"""
"""As Qwen's is: a tool's message is a user's with markers."""
NO_TOOLS = CHATML.replace(
    '{%- if m.role == "tool" %}',
    '{%- if m.role == "tool" %}{{- raise_exception("no tools") }}{%- endif %}{%- if false %}',
)
QUOTED = CHATML.replace('m.content + "\\n</tool', '(m.content | tojson) + "\\n</tool')
"""As Llama 3's is: a tool's message is a JSON string."""
DEAF = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- m.content + '<|end|>' }}{%- endif"
    " %}{%- endfor %}"
)


def byte_tokenizer(folder: Path, template: str = CHATML) -> Tokenizer:
    """Saved in `folder`, and loaded from there."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return load_tokenizer(folder)
