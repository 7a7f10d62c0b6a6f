"""The same numbers as lm-evaluation-harness: its transformers back end, our server, one
tiny model, the same rows.

The harness runs its own task files on local rows, in float32 (harness.py); ours is the
real server with the same weights.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.metrics import Outcome
from megarl.tasks.suites.harness import AskedModel, answered, load_documents, means
from tests import make
from tests.stack.conftest import POSITIONS, Stack
from tests.stack.harness import GENERATED

pytestmark = [pytest.mark.stack, pytest.mark.anyio, pytest.mark.usefixtures("serves_a")]

ROOT = Path(__file__).parents[2]
ARC = [
    (
        "Mercury_1",
        "Which gas do plants take in?",
        ["oxygen", "carbon dioxide", "helium"],
        "ABC",
        "B",
    ),
    (
        "NYSEDREGENTS_2",
        "What is frozen water called?",
        ["ice", "steam", "a cloud", "rain from the sky"],
        "1234",
        "1",
    ),
    (
        "Mercury_3",
        "Où est né Molière?",
        ["à Paris", "éé ééé éé", "in Rome", "in Lyon"],
        "ABCD",
        "A",
    ),
    (
        "Mercury_4",
        " Which is a mammal? ",
        ["a shark", "a whale", "an ant", "a very big and slow tortoise"],
        "ABCD",
        "B",
    ),
    (
        "Mercury_5",
        "What falls?",
        ["all", "everything that is not held by something", "a", "no", "2"],
        "ABCDE",
        "C",
    ),
]
HELLASWAG = [
    (
        "Roofs",
        "A man is sitting on a roof.",
        "he",
        ["starts to pull at it.", "is  there.", "a", "sings"],
    ),
    (
        "Home and Garden",
        "[header] How to plant a tree [title] Dig a hole. [step] Take a spade.",
        "",
        [
            "[substeps] Dig deep.",
            "Sing. [title] Then dance.",
            "Wait [for] a year.",
            "Go home, and never come back.",
        ],
    ),
    (
        "Playing",
        "Two children are seen  in a garden. ",
        "the older one",
        ["jumps.", "reads.", "is a stone.", "rests [x]"],
    ),
]
SUMS = [
    "What is 2 and 3?",
    "What is 4 and 4?",
    "Ten and two, what is it?",
    "And 70 less 20?",
    "A man has 2 trees. He sings to one. How often?",
    "How many are there in a garden?",
    "A roof costs 100 $. It is 50 $ less now. What is it?",
    "Go home with 7 whales, and lose 1. How big is it?",
]
BEGIN = "<s>"
END = "</s>"


@pytest.fixture(scope="module")
def folder(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows, the served model with a tokenizer, and what the harness says of them
    (harness.json).
    """
    folder = tmp_path_factory.mktemp("harness")
    model = folder / "model"
    model.mkdir()
    for file in (stack.directory / "a").iterdir():
        (model / file.name).symlink_to(file)
    texts = [*(f"Question: {q}\nAnswer: {' '.join(c)}" for _, q, c, _, _ in ARC), "0123456789 #,$"]
    texts += [
        f"{label}: {a} {b.capitalize()} {' '.join(endings)}" for label, a, b, endings in HELLASWAG
    ]
    save_tokenizer(model, [*texts, *SUMS])
    make.write_rows(folder / "arc.jsonl", arc_rows())
    make.write_rows(folder / "hellaswag.jsonl", hellaswag_rows())
    for name in ("mc1", "mc2"):
        make.write_rows(folder / f"{name}.jsonl", truthful_rows())
    make.write_rows(folder / "nq.jsonl", [{"question": q, "answer": ["a", "in"]} for q in SUMS])
    make.write_rows(folder / "gsm8k.jsonl", gsm8k_rows(stack.models["a"], model))
    environment = os.environ | {
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.stack.harness", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def harness(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "harness.json").read_text())
    return told


def save_tokenizer(directory: Path, texts: list[str]) -> None:
    """Byte pairs of at most 128 tokens, as many as the tiny model has; it puts <s> in
    front of a text, as Llama 3's does.
    """
    backend = Tokenizer(models.BPE(unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    backend.decoder = decoders.Fuse()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=120, special_tokens=[BEGIN, END, "?"])
    )
    backend.post_processor = processors.TemplateProcessing(
        f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
    )
    assert 100 < backend.get_vocab_size() <= 128
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config | {"clean_up_tokenization_spaces": False})
    )


def arc_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": name,
            "question": question,
            "choices": {"text": texts, "label": list(labels)},
            "answerKey": key,
        }
        for name, question, texts, labels, key in ARC
    ]


def hellaswag_rows() -> list[dict[str, Any]]:
    return [
        {
            "ind": 24 + n,
            "activity_label": label,
            "ctx_a": a,
            "ctx_b": b,
            "ctx": f"{a} {b}",
            "endings": e,
            "label": str(n),
        }
        for n, (label, a, b, e) in enumerate(HELLASWAG)
    ]


def truthful_rows() -> list[dict[str, Any]]:
    """The same questions with one right choice (mc1), and with several (mc2)."""
    rows = []
    for _, question, texts, _, _ in ARC:
        one = {"choices": texts, "labels": [1] + [0] * (len(texts) - 1)}
        several = {"choices": texts, "labels": [1, 1] + [0] * (len(texts) - 2)}
        rows.append({"question": question, "mc1_targets": one, "mc2_targets": several})
    return rows


def gsm8k_rows(model: Any, directory: Path) -> list[dict[str, Any]]:
    """To every other question the right answer is what the model says in transformers,
    so that it is right now and then.
    """
    tokenizer = load_tokenizer(directory)
    rows = []
    for n, question in enumerate(SUMS):
        (tokens,) = tokenizer.encode_all([f"Question: {question}\nAnswer:"], framed=True)
        sequence = torch.from_numpy(tokens.astype(np.int64))[None]
        said = model.generate(
            sequence, max_new_tokens=GENERATED, do_sample=False, eos_token_id=tokenizer.end
        )
        text = tokenizer.decode(said[0, len(tokens) :].numpy()).removesuffix(END)
        rows.append({"question": question, "answer": "#### 5" if n % 2 else text})
    return rows


async def answers(stack: Stack, folder: Path, name: str, salt: str) -> list[Answer]:
    tokenizer = load_tokenizer(folder / "model")
    async with stack.client() as client:
        model = AskedModel(client, tokenizer, POSITIONS, salt)
        return [
            answered(document, name, await model.respond(document))
            for document in load_documents(f"lm-eval:{folder / f'local_{name}.yaml'}")
        ]


@pytest.mark.parametrize("name", ["arc", "hellaswag", "mc1", "mc2"])
async def test_the_same_log_likelihoods_and_accuracies(
    stack: Stack, folder: Path, harness: dict[str, Any], name: str
) -> None:
    """Twice with the same salt: what the first has left in the server's prefix cache
    does not count.
    """
    for _ in range(2):
        ours = await answers(stack, folder, name, "twice")
        for answer, sample in zip(ours, harness["samples"][name], strict=True):
            assert answer.prompt == sample["arguments"][0][0]
            assert answer.scores == pytest.approx(
                {metric: float(sample[metric]) for metric in sample["metrics"]}, abs=1e-4
            )
            if answer.loglikelihoods is not UNSET:
                theirs = [float(each[0][0]) for each in sample["resps"]]
                np.testing.assert_allclose(answer.loglikelihoods, theirs, rtol=0, atol=1e-4)
                assert answer.choices is not UNSET
                continuations = [" " + choice for choice in answer.choices]
                assert continuations == [arguments[1] for arguments in sample["arguments"]]
        for metric, mean in means([Outcome.of(answer) for answer in ours]).items():
            key = f"{metric.removeprefix('lm-eval:')},none"
            assert mean == pytest.approx(harness["results"][name][key], abs=1e-4)
    if name == "hellaswag":
        assert any(answer.chosen != answer.chosen_normalised for answer in ours), (
            "rows that tell the two apart"
        )


@pytest.mark.parametrize("name", ["gsm8k", "nq"])
async def test_the_same_greedy_texts_and_exact_matches(
    stack: Stack, folder: Path, harness: dict[str, Any], name: str
) -> None:
    ours = await answers(stack, folder, name, "greedy")
    for answer, sample in zip(ours, harness["samples"][name], strict=True):
        assert answer.prompt == sample["arguments"][0][0]
        assert [answer.completion] == sample["resps"][0]
        assert answer.correct == bool(sample["exact_match"])
    right = [answer.correct for answer in ours]
    (mean,) = (
        value for key, value in harness["results"][name].items() if key.startswith("exact_match,")
    )
    assert np.mean(right) == mean
    if name == "gsm8k":
        assert any(right)
        assert not all(right)
