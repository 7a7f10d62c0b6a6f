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


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Exercise(NamedTuple):
    """The problem `first sign second`; first ≥ second in a subtraction, so that no
    answer is negative.
    """

    first: int
    sign: str
    second: int

    @property
    def prompt(self) -> str:
        """What the model sees."""
        return f"{self.first}{self.sign}{self.second}="

    @property
    def answer(self) -> int:
        """The right answer."""
        return OPERATIONS[self.sign](self.first, self.second)

    @property
    def digits(self) -> int:
        """Digits of the longer operand."""
        return len(str(max(self.first, self.second)))

    @property
    def difficulty(self) -> int:
        """For a product: the digits of both factors, minus 3; else those of the longer
        operand.
        """
        if self.sign == "*":
            return len(str(self.first)) + len(str(self.second)) - 3
        return self.digits


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
    held-out problem. draw: draws a problem; kinds: the share of each kind of trace;
    trace: makes a trace of a kind.
    """
    distinct: dict[Exercise, None] = {}  # a dict, because a set has no order
    while len(distinct) < HELDOUT_PROMPTS + TRAIN_PROMPTS:
        distinct[draw(rng)] = None
    heldout = list(distinct)[:HELDOUT_PROMPTS]
    train = list(distinct)[HELDOUT_PROMPTS:]
    written = {"heldout": _rows(heldout, "heldout"), "train": _rows(train, "train")}
    for name, rows in written.items():
        write_jsonl(directory / f"{prefix}{name}.jsonl", rows)
    avoid = set(heldout)

    def traces() -> Iterator[JsonObject]:
        """Yield traces, each of a problem drawn for it."""
        for kind in rng.choices(list(kinds), list(kinds.values()), k=SFT_TRACES):
            exercise = draw(rng)
            while exercise in avoid:
                exercise = draw(rng)
            yield {"prompt": exercise.prompt, "completion": trace(exercise, kind, rng)}

    write_jsonl(directory / f"{prefix}sft.jsonl", traces())
    return written


def _rows(exercises: list[Exercise], name: str) -> list[JsonObject]:
    """Return exercises as rows of a prompt set, with ids `name-0`, `name-1`, …"""
    return [
        {
            "id": f"{name}-{number}",
            "prompt": exercise.prompt,
            "answer": str(exercise.answer),
            "difficulty": exercise.difficulty,
        }
        for number, exercise in enumerate(exercises)
    ]


def completion(work: str, answer: int | str, kind: str, rng: random.Random) -> str:
    """Return a trace with this work and answer, without the end token. kind:
    `interrupted`, `unclosed`, or else complete.
    """
    match kind:
        case "interrupted":
            cut = rng.randint(0, len(work))
            return f"{THINK}{work[:cut]}{INTERRUPTION}{answer}"
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
    model_config = AutoConfig.for_model(
        **config,
        vocab_size=len(tokenizer),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    directory.mkdir(exist_ok=True)
    with (
        torch.random.fork_rng(devices=[]),  # the caller's random numbers stay as they are
        tempfile.TemporaryDirectory(dir=directory.parent) as folder,
    ):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(model_config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in sorted(Path(folder).iterdir()):
            write_atomically(directory / file.name, file.read_bytes())
