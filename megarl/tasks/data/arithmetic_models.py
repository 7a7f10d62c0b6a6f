"""Shared by the quickstart's two tasks: their files' format, a tokenizer of 32
characters, an untrained Llama and Llama 4.
"""

import operator
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.base.rundir import write_atomically, write_jsonl
from megarl.core.base.types import JsonObject

TRAIN_PROMPTS = 4096
HELDOUT_PROMPTS = 512
SFT_TRACES = 40_000

CHARACTERS = "0123456789+-=;.,:?!*/%()[]<>"
PAD = "<pad>"
END = "<eos>"
THINK = "<think>"
END_OF_THINKING = "</think>"
SPECIAL = (PAD, END, THINK, END_OF_THINKING)
INTERRUPTION = "..." + END_OF_THINKING

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # For a short warm start: weights of a size that suits a width of 128, and positions
    # distinguishable within 100 tokens.
    "initializer_range": 0.06,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "tie_word_embeddings": False,
}
LLAMA4 = LLAMA | {
    "model_type": "llama4_text",
    "head_dim": 32,
    # of each expert, also the shared one: as many active parameters as the dense
    # model
    "intermediate_size": 192,
    "intermediate_size_mlp": 384,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    # shorter than the longest sequence, so that chunking matters here too
    "attention_chunk_size": 64,
}
MODELS = {"init": LLAMA, "init-moe": LLAMA4}
"""Configurations by directory name: 0.8 million parameters; 1.6 million, of which 0.8
are active per token.
"""


class Exercise(NamedTuple):
    """The problem `left sign right`; left ≥ right in a subtraction, so that no answer
    is negative.
    """

    left: int
    sign: str
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.sign}{self.right}="

    @property
    def answer(self) -> int:
        return {"+": operator.add, "-": operator.sub, "*": operator.mul}[self.sign](
            self.left, self.right
        )

    @property
    def digits(self) -> int:
        """Digits of the longer operand."""
        return len(str(max(self.left, self.right)))

    @property
    def difficulty(self) -> int:
        return len(str(self.left)) + len(str(self.right)) - 3 if self.sign == "*" else self.digits


def write_task(
    directory: Path,
    prefix: str,
    rng: random.Random,
    draw: Callable[[random.Random], Exercise],
    kinds: Mapping[str, float],
    trace: Callable[[Exercise, str, random.Random], str | list[str]],
) -> dict[str, list[JsonObject]]:
    """Write heldout.jsonl, train.jsonl and sft.jsonl, each complete or not at all;
    return the rows of the first two. All prompts are distinct, and no trace is of a
    held-out problem. kinds: the share of each kind of trace.
    """
    drawn: dict[Exercise, None] = {}
    while len(drawn) < HELDOUT_PROMPTS + TRAIN_PROMPTS:
        drawn[draw(rng)] = None
    heldout = list(drawn)[:HELDOUT_PROMPTS]
    train = list(drawn)[HELDOUT_PROMPTS:]
    written = {}
    for name, chosen in (("heldout", heldout), ("train", train)):
        written[name] = [
            {
                "id": f"{name}-{n}",
                "prompt": e.prompt,
                "answer": str(e.answer),
                "difficulty": e.difficulty,
            }
            for n, e in enumerate(chosen)
        ]
        write_jsonl(directory / f"{prefix}{name}.jsonl", written[name])
    avoid = set(heldout)

    def traces() -> Iterator[JsonObject]:
        for kind in rng.choices(list(kinds), list(kinds.values()), k=SFT_TRACES):
            while (exercise := draw(rng)) in avoid:
                pass
            yield {"prompt": exercise.prompt, "completion": trace(exercise, kind, rng)}

    write_jsonl(directory / f"{prefix}sft.jsonl", traces())
    return written


def completion(work: str, answer: int | str, kind: str, rng: random.Random) -> str:
    """Return a trace with this work and answer, without the end token. kind:
    `interrupted`, `unclosed`, or else complete.
    """
    match kind:
        case "interrupted":
            return f"{THINK}{work[: rng.randint(0, len(work))]}{INTERRUPTION}{answer}"
        case "unclosed":
            return f"{THINK}{work}"
        case _:
            return f"{THINK}{work}{END_OF_THINKING}{answer}"


CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif"
    " %}{% endfor %}"
)
"""The chat template for agents: the messages' texts in a row, each of the policy's
followed by the end token.
"""


def character_tokenizer() -> Any:
    """Build a tokenizer of 32 tokens: one per character and special text. Encoding any
    other character is an error.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT,
        additional_special_tokens=[THINK, END_OF_THINKING],
        clean_up_tokenization_spaces=False,
    )


def save_model(directory: Path, config: JsonObject, seed: int) -> None:
    """Save a random fp32 model with the tokenizer, in Hugging Face format."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # the files are only a few megabytes
    tokenizer = character_tokenizer()
    whole = AutoConfig.for_model(
        **config,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    directory.mkdir(exist_ok=True)
    with (
        torch.random.fork_rng(devices=[]),
        tempfile.TemporaryDirectory(dir=directory.parent) as folder,
    ):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(whole).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            write_atomically(directory / file.name, file.read_bytes())
