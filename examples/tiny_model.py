"""A random model of a million parameters for bytes, whose tokenizer has some phrases of
terminal_tasks.py as one token each:

    python examples/tiny_model.py terminal/init
"""

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PHRASES = [
    *("Copy the file that contains ", "Write the number of lines with ", "Correct the misspelled "),
    *(" to ", " in ", "```sh\n", "\n```", "(no output)", "done", " > ", "echo", " *"),
    *("grep -l ", "grep -c ", "cp ", "echo ", "cat ", "sed -i s/", "/echo/ "),
]
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}\n"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""No system message: a model that has learnt three tasks needs no instructions."""


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def main(folder: Path) -> None:
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
