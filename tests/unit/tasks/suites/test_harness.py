"""Tasks of lm-eval on local rows: what is asked, with which tokens, and what counts as
right. The real harness on a real server: tests/stack/test_lm_eval.py.
"""

import asyncio
import builtins
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import float32, int32
from megarl.core.client.client import Generation, Prefill, ServerLost, ServerRefused
from megarl.core.client.membership import Membership
from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.metrics import Outcome
from megarl.core.evaluation.score import Asker, score
from megarl.core.recipe import Suite, from_tree, shipped_suites
from megarl.core.sampling.places import Places
from megarl.tasks.suites import harness, suites
from megarl.tasks.suites.harness import (
    AskedModel,
    Documents,
    Response,
    answered,
    load_documents,
    means,
)
from megarl.tools.eval.subject import _suite
from tests import make
from tests.server_pool import Pool

ROWS = [
    {"question": "What is frozen water?", "choices": ["ice", "steam", "rain"], "gold": 0},
    {"question": "What falls?", "choices": ["éé", "b", "longer"], "gold": 2},
]
CHOICE = {
    "task": "local_choice",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "gold",
    "doc_to_choice": "choices",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
OPEN = {
    "task": "local_open",
    "output_type": "generate_until",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_target": "{{choices[gold]}}",
    "generation_kwargs": {"until": ["\n", "."], "do_sample": False, "max_gen_toks": 100},
    "filter_list": [
        {
            "name": "trimmed",
            "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
        }
    ],
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}


def write_task(folder: Path, task: dict[str, Any], rows: list[dict[str, Any]] = ROWS) -> str:
    """Write a task in lm-eval's own format with its rows beside it;
    return its source.
    """
    data = folder / f"{task['task']}.jsonl"
    make.write_rows(data, rows)
    local = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    file = folder / f"{task['task']}.yaml"
    file.write_text(yaml.safe_dump(task | local))
    return f"lm-eval:{file}"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Rows are cached in a folder of the tests."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte a token, and 256 in front."""
    alphabet = {sign: n for n, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(alphabet | {"<s>": 256}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend, 256, Path("tiny"))


def model_of(tokenizer: Tokenizer, longest: int, client: Any = None) -> AskedModel:
    return AskedModel(client, tokenizer, longest, "salt")


def test_what_is_asked(tmp_path: Path) -> None:
    first, second = load_documents(write_task(tmp_path, CHOICE))
    assert first.id == "local_choice/0"
    assert [request.args for request in first.requests] == [
        ("Question: What is frozen water?\nAnswer:", f" {choice}")
        for choice in ("ice", "steam", "rain")
    ]
    assert (first.expected, second.expected) == ("ice", "longer")
    (opened, _) = load_documents(write_task(tmp_path, OPEN))
    assert opened.requests[0].args[0] == "Q: What is frozen water?\nA:"
    assert opened.expected == "ice"


def test_what_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rolling: dict[str, Any] = {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
    }
    rolling |= {"doc_to_target": "{{question}}", "metric_list": [{"metric": "word_perplexity"}]}
    with pytest.raises(MegarlError, match="asks for the perplexity of texts"):
        load_documents(write_task(tmp_path, rolling))
    with pytest.raises(MegarlError, match="runs the model's programs without a sandbox"):
        load_documents(write_task(tmp_path, OPEN | {"task": "unsafe", "unsafe_code": True}))
    with pytest.raises(MegarlError, match="neither a task, group or tag of lm-eval"):
        load_documents(f"lm-eval:{tmp_path / 'none.yaml'}")
    lost = write_task(tmp_path, CHOICE | {"task": "lost"})
    (tmp_path / "lost.jsonl").unlink()
    with pytest.raises(MegarlError, match="could not be loaded: "):
        load_documents(lost)
    real_import = builtins.__import__

    def without_harness(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("lm_eval"):
            raise ImportError(name)
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_harness)
    with pytest.raises(MegarlError, match="lm-eval is missing: pip install lm-eval"):
        load_documents("lm-eval:arc_easy")


def test_two_verdicts(tmp_path: Path) -> None:
    """-4 is the largest sum, -6 / 6 the largest by character; by byte it would be the
    first, whose letters take two each.
    """
    _, document = load_documents(write_task(tmp_path, CHOICE))
    lengths = [(-5.0, 2), (-4.0, 1), (-6.0, 3)]
    responses = [[Response((value, False), own, cut=False)] for value, own in lengths]
    answer = answered(document, "suite", responses)
    assert (answer.chosen, answer.chosen_normalised, answer.correct) == (1, 2, False)
    assert (answer.answer, answer.expected, answer.tokens) == ("b", "longer", 1)
    assert (answer.completion, answer.truncated) == (" b", False)
    assert answer.scores == {"acc": 0.0, "acc_norm": 1.0}
    assert means([Outcome.of(answer)]) == {"lm-eval:acc": 0.0, "lm-eval:acc_norm": 1.0}
    cut = [[responses[0][0]._replace(cut=True)], *responses[1:]]
    assert answered(document, "suite", cut).truncated


def test_a_share_of_several_right_choices(tmp_path: Path) -> None:
    """As in TruthfulQA's mc2, whose metric is the probability of all true choices."""
    (tmp_path / "shares.py").write_text(
        "import numpy as np\n\n\ndef share(doc, results):\n"
        "    p = np.exp([value for value, _ in results])\n"
        "    return {'acc': p[:2].sum() / p.sum()}\n"
    )
    source = write_task(tmp_path, CHOICE | {"task": "several"})
    file = Path(source.removeprefix("lm-eval:"))
    file.write_text(file.read_text() + "process_results: !function shares.share\n")
    document, _ = load_documents(source)
    responses = [
        [Response((float(np.log(value)), False), 1, cut=False)] for value in (0.2, 0.1, 0.1)
    ]
    answer = answered(document, "suite", responses)
    assert answer.scores == {"acc": pytest.approx(0.75)}
    assert answer.correct
    assert answer.choices is UNSET, "no choice is the right one"


def test_blanks_at_the_end_of_the_context_are_of_the_continuation(tokenizer: Tokenizer) -> None:
    encoded = model_of(tokenizer, 100)._encode("ab \n", " c")
    assert encoded.tokens[0] == 256
    assert (encoded.first, len(encoded.tokens), encoded.is_cut) == (3, 7, False)
    assert tokenizer.decode(encoded.tokens[encoded.first :]) == " \n c"


@given(context=st.text("abc é", min_size=1, max_size=30).filter(str.strip), room=st.integers(8, 40))
def test_the_begin_of_the_context_gives_way(tokenizer: Tokenizer, context: str, room: int) -> None:
    for continuation in (" d", " efg"):
        full = model_of(tokenizer, 1000)._encode(context, continuation)
        cut = model_of(tokenizer, room)._encode(context, continuation)
        assert len(cut.tokens) == min(room, len(full.tokens))
        assert len(cut.tokens) - cut.first == len(full.tokens) - full.first
        assert cut.is_cut == (len(full.tokens) > room)
        np.testing.assert_array_equal(cut.tokens, full.tokens[-len(cut.tokens) :])


def test_a_continuation_that_fills_all_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        MegarlError, match="7 tokens of its own, after at least one other, where 7 fit"
    ):
        model_of(tokenizer, 7)._encode("ab", " cdefgh")
    with pytest.raises(MegarlError, match="longer than the 7 tokens that fit"):
        model_of(tokenizer, 7)._encode("ab", " c" * 2000)


class Writer:
    """A client that writes a text, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokens = [*tokenizer.ids(text).tolist(), tokenizer.end]
        self.inputs: list[int] = []

    async def generate(self, input_ids: np.ndarray, max_new_tokens: int, **_: Any) -> Generation:
        self.inputs.append(len(input_ids))
        piece = self.tokens[:max_new_tokens]
        self.tokens = self.tokens[max_new_tokens:]
        finish = "length" if self.tokens else "stop"
        return Generation(int32(piece), float32([0.0] * len(piece)), (), finish)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "written", "pieces", "right"),
    [
        (" Ice", " Ice", 1, True),
        (" ice. It is cold.", " ice", 1, True),
        (" steam\nQ: " + "x" * 200, " steam", 1, False),
        ("x" * 70 + ". And", "x" * 70, 2, False),
        ("x" * 200, "x" * 100, 2, False),
    ],
)
def test_a_text_ends_where_the_task_says(
    tmp_path: Path, tokenizer: Tokenizer, text: str, written: str, pieces: int, right: bool
) -> None:
    document, _ = load_documents(write_task(tmp_path, OPEN))
    client = Writer(tokenizer, text)
    responses = asyncio.run(model_of(tokenizer, 500, client).respond(document))
    answer = answered(document, "suite", responses)
    assert (answer.completion, answer.correct) == (written, right)
    assert answer.scores == {"exact_match,trimmed": float(right)}
    assert len(client.inputs) == pieces


def test_greedy_continuations(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As in LAMBADA, where a word is right if the model itself would say it."""
    task: dict[str, Any] = {
        "task": "words",
        "output_type": "loglikelihood",
        "doc_to_text": "{{question}}",
    }
    task |= {"doc_to_target": " {{choices[gold]}}", "metric_list": [{"metric": "acc"}]}
    document, _ = load_documents(write_task(tmp_path, task))

    class Scorer(Writer):
        async def score(self, sequences: Any, firsts: Any, salt: str) -> list[Prefill]:
            return [Prefill(float32([-1.0]), float32([np.nan]), 0)]

    for text, right in ((" ice", True), (" icy", False)):
        client = Scorer(tokenizer, text)
        responses = asyncio.run(model_of(tokenizer, 500, client).respond(document))
        assert answered(document, "suite", responses).correct == right


class StandInServer:
    """A client whose requests end as said, one after the other: log-likelihoods, or an
    error.
    """

    def __init__(self, *ends: list[float] | Exception) -> None:
        self.ends = list(ends)
        self.salts: list[str] = []

    async def score(self, sequences: Any, firsts: Any, salt: str) -> list[Prefill]:
        self.salts.append(salt)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return [Prefill(float32([value]), float32([np.nan]), 0) for value in end]


class WatchedPool(Pool):
    def __init__(self, clients: dict[int, Any]) -> None:
        super().__init__(clients, None)
        self.lost: list[tuple[int, int]] = []

    def life(self, server: int) -> int:
        return 5

    def server_lost(self, server: int, life: int, reason: str) -> None:
        self.lost.append((server, life))


LOST = ServerLost("gone", int32(()), np.zeros(0, np.float32))


@pytest.mark.parametrize(
    ("ends", "chosen", "void", "lost"),
    [
        ([[-2.0, -1.0, -3.0]], 1, "", 0),
        ([LOST, LOST, [-1.0, -2.0, -3.0]], 0, "", 2),
        ([LOST, LOST, LOST], UNSET, "3 requests were lost, the last: gone", 3),
        ([ServerRefused("too long")], UNSET, "too long", 0),
        ([[np.nan, -1.0, -1.0]], UNSET, "the model's log-likelihood of a choice is not finite", 0),
    ],
)
def test_lost_requests_are_asked_again_and_places_given_back(
    tokenizer: Tokenizer,
    tmp_path: Path,
    ends: list[Any],
    chosen: Any,
    void: str,
    lost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "MAX_RETRIES", 2)
    source = write_task(tmp_path, CHOICE, ROWS[:1])

    async def run() -> tuple[Answer, int]:
        members = Membership([ServerAddress(id=0, url="http://stand-in", tensor_parallel=1)])
        members.answered(0)
        members.publish([0], -1, "")
        members.published(0, -1, "", "")
        places = pool.places = Places(members, 1)
        asker = Asker(
            recipe=from_tree({}),
            tokenizer=tokenizer,
            sampler=SimpleNamespace(servers=pool),  # type: ignore[arg-type]
            graders=SimpleNamespace(),
            servers={0},
            salt="s",
            at_once=1,
        )
        questions = Documents("arc", load_documents(source), 1, rows=Suite(data=source))
        kept: list[Answer] = []
        await asyncio.wait_for(score([questions], asker, kept.append), 30)
        return kept[0], places.use[0].running

    server = StandInServer(*ends)
    pool = WatchedPool({0: server})
    answer, running = asyncio.run(run())
    assert (answer.chosen, answer.void, answer.correct, running) == (chosen, void, chosen == 0, 0)
    assert answer.format_ok, "nothing that the model wrote is malformed"
    assert pool.lost == [(0, 5)] * lost
    assert set(server.salts) == {"s/local_choice/0"}


def test_suites_by_name(tmp_path: Path) -> None:
    known = from_tree({"evaluation": {"suites": {"arc-easy": {}, "hellaswag": {}}}})
    assert {name: suite.data for name, suite in known.evaluation.suites.items()} == {
        "arc-easy": "lm-eval:arc_easy",
        "hellaswag": "lm-eval:hellaswag",
    }
    assert known.evaluation.sampled == {}, "nothing is graded here"
    assert "arc-challenge" in shipped_suites()
    name, keys, _ = _suite("lm-eval:nq_open", from_tree({}))
    assert (name, keys) == ("nq_open", {"data": "lm-eval:nq_open"})
    assert _suite("lm-eval:my/own.task.yaml", from_tree({}))[0] == "own-task"


def test_a_suite_has_one_answer_a_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write_task(tmp_path, CHOICE, ROWS * 3)
    suite = Suite(data=source, samples=16, prompts=3)
    found = suites.load("arc", suite, tokenizer, 1000)
    assert (len(found.questions.prompts), found.questions.samples, found.rows) == (3, 1, 6)
    assert suites.load("arc", suite, tokenizer, 1000).digest == found.digest
    write_task(tmp_path, CHOICE, [row | {"gold": 1} for row in ROWS * 3])
    assert suites.load("arc", suite, tokenizer, 1000).digest != found.digest
