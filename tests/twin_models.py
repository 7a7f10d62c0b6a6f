"""What the twins of tests/recipe_twins.py train: tiny models of several families, and
prompts for each grader and environment.

    "k3?" (math)         the digit    <think>.........</think>\\boxed{3}
    "k3=" (exact)        the digit    <think>.........</think>3
    "k3!" (code)         a program    <think>.........</think>```python … print(3) … ```
    "k3+" (calculator)   the digit    <think>[3+0]3</think>3

The program prints the digit. The 3 after `]` is the calculator's.

A random policy is never right, and a group of equal rewards has no gradient. So each
model first learns these completions from a teacher that is right half of the time. Its
thoughts are of any length, so some are interrupted. A text that is always written as a
whole (a program, the phrase of an interruption) is one token, which makes both learning
and runs quick. Models of the kind `base` learn the same without the thoughts, so they
never write `</think>`; those of the kind `chat` learn it in a chat template.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from megarl.core import recipe as recipes
from megarl.core.base.rundir import write_jsonl
from megarl.tasks.data.chat import load_chat
from tests.tiny import (
    tiny_glm4_moe_lite,
    tiny_llama,
    tiny_llama4,
    tiny_llama4_multimodal,
    tiny_qwen2,
    tiny_qwen3,
    tiny_qwen3_5_moe,
    tiny_qwen3_moe,
)

DIGITS = "1234"
LETTERS = "abcdefghijklmnopqrst"
HELDOUT_LETTERS = "uvwxyz"
SIGNS = {"math": "?", "exact": "=", "code": "!", "calculator": "+"}
"""How a prompt ends, by the grader or the environment that it is for."""

PAD = "<pad>"
END = "<eos>"
SPECIAL = (PAD, END, "<think>", "</think>", "<|im_start|>", "<|im_end|>")
PROGRAMS = {digit: f"\n```python\nprint({digit})\n```\n" for digit in DIGITS}
BOXES = {digit: f"\\boxed{{{digit}}}" for digit in DIGITS}
CALLS = {digit: f"[{digit}+0" for digit in DIGITS}
PHRASES = sorted({recipes.load(name).length.interruption for name in ("quickstart", "scalerl-8b")})
(CHAT_TASK,) = recipes.load("scalerl-1gpu").data.tasks.values()
WHOLE = (
    *PROGRAMS.values(),
    *BOXES.values(),
    *CALLS.values(),
    CHAT_TASK.system,
    *(phrase.removesuffix("</think>") for phrase in PHRASES),
)
"""Texts of a token each."""
CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3's, without tools."""

SIZES: dict[str, Any] = {
    "vocab_size": 128,  # more than the tokenizer has
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": 0,
}
SCOUT: dict[str, Any] = {
    "moe_layers": [0, 1, 2, 3],
    "interleave_moe_layer_step": 1,
}  # experts in every layer
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "qwen2": partial(tiny_qwen2, head_dim=8),  # SGLang's has hidden_size / num_attention_heads
    "qwen3": partial(tiny_qwen3, tie_word_embeddings=True),  # as the 1.7B
    "qwen3-moe": tiny_qwen3_moe,
    "qwen3.5-moe": tiny_qwen3_5_moe,
    "glm4-moe-lite": tiny_glm4_moe_lite,
    "qwen3-base": tiny_qwen3,
    "llama4": partial(tiny_llama4, **SCOUT),
    "llama4-multimodal": partial(tiny_llama4_multimodal, **SCOUT),
}
CHAT = ("qwen3", "qwen3-moe", "qwen3.5-moe", "glm4-moe-lite")
BASE = ("qwen3-base",)
WARM_STEPS = 60
WARM_BATCH = 16
WARM_RATE = 3e-3


def write_workplace(folder: Path, families: Iterable[str]) -> Path:
    """Models of these families, and the data of all twins, in `folder`, if they are not
    there yet.
    """
    for kind in SIGNS:
        for letters, name in ((LETTERS, kind), (HELDOUT_LETTERS, f"{kind}-heldout")):
            path = folder / "data" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, prompt_rows(kind, letters))
    for family in families:
        if not (folder / "models" / family / "ready").exists():
            write_model(folder / "models" / family, family)
    return folder


def prompt_rows(kind: str, letters: str) -> list[dict[str, Any]]:
    """Every letter with every digit."""
    pairs = [(letter, digit) for letter in letters for digit in DIGITS]
    return [
        {
            "id": letter + digit,
            "prompt": letter + digit + SIGNS[kind],
            "answer": expected(kind, digit),
            "difficulty": int(digit),
        }
        for letter, digit in pairs
    ]


def expected(kind: str, digit: str) -> str:
    """The right answer as the data set has it."""
    return (
        json.dumps({"tests": [{"input": "", "output": f"{digit}\n"}]}) if kind == "code" else digit
    )


def write_model(directory: Path, family: str) -> None:
    """A model of the family with its tokenizer, warmed up, in bf16 as released models
    are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    torch.set_num_threads(
        1
    )  # tensors this small gain nothing from more, and wait for them on a busy machine
    model = FAMILIES[family](directory, **SIZES, eos_token_id=end_token(tokenizer, family))
    tokenizer.eos_token = end_token_text(family)
    tokenizer.save_pretrained(directory)
    warm_up(model, tokenizer, directory, family)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(directory)
    (directory / "ready").touch()


def end_token_text(family: str) -> str:
    return "<|im_end|>" if family in CHAT else END


def end_token(tokenizer: Any, family: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(end_token_text(family)))


def character_tokenizer() -> Any:
    """A token for each printable character of ASCII, the end of a line, each special
    text and each whole one.
    """
    vocabulary = {text: number for number, text in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WHOLE])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


# Warm start

type Trace = list[tuple[str, bool]]
"""Parts of a text, and whether the model is to learn them."""


def warm_up(model: Any, tokenizer: Any, directory: Path, family: str) -> None:
    """Cross-entropy on the teacher's traces, fp32."""
    rng = random.Random(0)
    end = tokenizer.eos_token
    asked = _in_chat(directory) if family in CHAT else lambda prompt: prompt
    texts = traces(rng, end, asked, thinks=family not in BASE)
    optimizer = torch.optim.AdamW(model.parameters(), WARM_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, WARM_STEPS)
    model.train()
    for _ in range(WARM_STEPS):
        tokens, labels = batch(tokenizer, [next(texts) for _ in range(WARM_BATCH)])
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()


def batch(tokenizer: Any, texts: list[Trace]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [texts, longest], padded at the end; -100 where there is
    nothing to learn.
    """
    rows = []
    for trace in texts:
        parts = [
            (tokenizer.encode(part, add_special_tokens=False), learned) for part, learned in trace
        ]
        rows.append(
            [(token, token if learned else -100) for tokens, learned in parts for token in tokens]
        )
    longest = max(map(len, rows))
    padded = torch.tensor([row + [(0, -100)] * (longest - len(row)) for row in rows])
    return padded[..., 0], padded[..., 1]


def traces(
    rng: random.Random, end: str, asked: Callable[[str], str], thinks: bool
) -> Iterator[Trace]:
    """Completions of all kinds in turn, without end. asked: what the model sees of a
    prompt. thinks: whether a thought stands before the answer.
    """
    while True:
        for kind, sign in SIGNS.items():
            digit = rng.choice(DIGITS)
            prompt = asked(rng.choice(LETTERS) + digit + sign)
            answer = digit if rng.random() < 0.5 else rng.choice(DIGITS)
            thoughts = thought(rng, kind, digit) if thinks else [("." * rng.randint(4, 32), True)]
            yield [(prompt, False), *thoughts, (written(kind, answer) + end, True)]


def thought(rng: random.Random, kind: str, digit: str) -> Trace:
    """A thinking trace: closed by the model, or by a phrase that it does not learn; or
    a call of the calculator.
    """
    if kind == "calculator" and rng.random() < 0.7:
        return [(f"<think>{CALLS[digit]}]", True), (digit, False), ("</think>", True)]
    if rng.random() < 0.6:
        return [(f"<think>{'.' * rng.randint(4, 32)}</think>", True)]
    return [(f"<think>{'.' * rng.randint(11, 19)}", True), (rng.choice(PHRASES), False)]


def written(kind: str, answer: str) -> str:
    """How the answer of a kind stands behind the thought."""
    return {"math": BOXES[answer], "code": PROGRAMS[answer]}.get(kind, answer)


def _in_chat(directory: Path) -> Callable[[str], str]:
    """The chat template with the system message of the one recipe that has both."""
    template = load_chat(directory)
    return lambda prompt: template.render(
        [{"role": "system", "content": CHAT_TASK.system}, {"role": "user", "content": prompt}]
    )
