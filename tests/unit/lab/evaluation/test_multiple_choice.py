"""Questions of ARC and HellaSwag from rows in their published schemas, their tokens,
and what is chosen.
"""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from megarl.core.base.errors import MegarlError
from megarl.core.base.messages import ServerAddress
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import float32, int32
from megarl.core.evaluation.answers import Answer
from megarl.core.evaluation.score import Asker, score
from megarl.core.recipe import Suite, from_tree
from megarl.core.recipe.rules import MULTIPLE_CHOICE
from megarl.core.sampling.places import Places
from megarl.core.server.client import Prefill, ServerLost, ServerRefused
from megarl.core.server.membership import Membership
from megarl.lab.evaluation import multiple_choice, suites
from megarl.lab.evaluation.multiple_choice import (
    SETS,
    Choices,
    Continuation,
    Question,
    answered,
    arc,
    hellaswag,
    joined,
    load_questions,
)
from megarl.tasks.data.rows import UnfitError
from tests.server_pool import Pool

ARC = {
    "id": "Mercury_7175875",
    "question": (
        "An astronomer observes that a planet rotates faster. Which is the most likely effect?"
    ),
    "choices": {
        "text": ["Density decreases.", "Years are longer.", "Days are shorter."],
        "label": ["A", "B", "C"],
    },
    "answerKey": "C",
}
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "endings": [
        "is using wrap.",
        "is ripping level tiles off.",
        "is holding a cube.",
        "starts pulling up roofing.",
    ],
    "source_id": "activitynet~v_-JhWjGDPHMY",
    "split": "val",
    "split_type": "indomain",
    "label": "3",
}
TREE = {
    "activity_label": "Home and Garden",
    "ctx_a": "[header] How to plant a tree [title] Dig a hole. [step] Take  a spade.",
    "ctx_b": "",
    "endings": ["[substeps] Dig deep.", "Sing. [title] Then dance.", "Wait.", "Go [now] home."],
    "label": 1,
}


def test_the_recipe_knows_every_set() -> None:
    assert (
        set(SETS) == set(MULTIPLE_CHOICE) < set(get_args(Suite.model_fields["mapping"].annotation))
    )


def test_arc() -> None:
    question = arc(ARC)
    assert question.id == "Mercury_7175875"
    assert question.context == f"Question: {ARC['question']}\nAnswer:"
    assert question.choices[question.gold] == "Days are shorter."
    numbered = ARC | {"choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    assert arc(numbered).gold == 1


def test_hellaswag() -> None:
    question = hellaswag(HELLASWAG)
    assert question.id == "24"
    assert question.context == "Roof shingle removal: A man is sitting on a roof. He"
    assert question.choices[question.gold] == "starts pulling up roofing."
    tree = hellaswag(TREE)
    assert tree.context == "Home and Garden: How to plant a tree. Dig a hole. Take a spade."
    assert tree.choices == (" Dig deep.", "Sing.. Then dance.", "Wait.", "Go home.")


@pytest.mark.parametrize(
    ("read", "row", "said"),
    [
        (arc, ARC | {"answerKey": "E"}, "not one of the labels A, B, C"),
        (arc, {"question": "x"}, "no column 'choices.label'"),
        (arc, ARC | {"choices": {"text": ["one"], "label": ["C"]}}, "fewer than two choices"),
        (hellaswag, HELLASWAG | {"label": ""}, "the test split has none"),
        (hellaswag, HELLASWAG | {"label": "4"}, "not an index of its 4 endings"),
        (hellaswag, HELLASWAG | {"endings": ["a", "[b]"], "label": 0}, "an empty one"),
    ],
)
def test_rows_that_are_not_of_the_schema(read: Any, row: dict[str, Any], said: str) -> None:
    with pytest.raises(UnfitError, match=said):
        read(row)


def test_rows_that_cannot_be_asked_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [ARC, ARC, ARC | {"id": "other"}, ARC | {"answerKey": "X"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no JSON\n")
    with caplog.at_level(logging.WARNING):
        questions, left_out = load_questions(str(path), "arc")
    assert [question.id for question in questions] == ["Mercury_7175875", "other"]
    assert left_out == {"not of the schema": 2, "the id of an earlier one": 1}
    for said in (
        "3 rows left out",
        ":2: the id 'Mercury_7175875' again",
        ":4: the answerKey 'X'",
        ":5: ",
    ):
        assert said in caplog.text
    with pytest.raises(MegarlError, match="no row fits the schema 'hellaswag'"):
        load_questions(str(path), "hellaswag")


def test_two_verdicts() -> None:
    """-4 is the largest sum, -6 / 6 the largest by character; by byte it would be the
    first, whose letters take two each.
    """
    question = Question("1", "What?", ("éé", "b", "longer"), 2)
    lengths = [Continuation(int32(range(9)), 9 - own, cut=False) for own in (2, 1, 3)]
    answer = answered(question, "arc-easy", [-5.0, -4.0, -6.0], lengths)
    assert (answer.chosen, answer.chosen_normalised, answer.correct) == (1, 2, False)
    assert (answer.answer, answer.expected, answer.tokens, answer.truncated) == (
        "b",
        "longer",
        1,
        False,
    )
    cut = [length._replace(cut=True) for length in lengths[:2]]
    by_character = answered(Question("1", "What?", ("éé", "bb"), 0), "arc-easy", [-3.0, -2.0], cut)
    assert (by_character.chosen_normalised, by_character.truncated) == (1, True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte a token, and 256 in front."""
    alphabet = {sign: n for n, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(alphabet | {"<s>": 256}, []))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    return Tokenizer(backend, 256, Path("tiny"))


def test_blanks_at_the_end_of_the_context_are_of_the_continuation(tokenizer: Tokenizer) -> None:
    (one,) = joined(tokenizer, "ab \n", [" c"], 100)
    assert one.tokens[0] == 256
    assert (one.first, one.scored, one.cut) == (3, 4, False)
    assert tokenizer.decode(one.tokens[one.first :]) == " \n c"


@given(context=st.text("abc é", min_size=1, max_size=30).filter(str.strip), room=st.integers(8, 40))
def test_the_begin_of_the_context_gives_way(tokenizer: Tokenizer, context: str, room: int) -> None:
    whole = joined(tokenizer, context, [" d", " efg"], 1000)
    short = joined(tokenizer, context, [" d", " efg"], room)
    for full, cut in zip(whole, short, strict=True):
        assert len(cut.tokens) == min(room, len(full.tokens))
        assert cut.scored == full.scored
        assert cut.cut == (len(full.tokens) > room)
        np.testing.assert_array_equal(cut.tokens, full.tokens[-len(cut.tokens) :])


def test_a_continuation_that_fills_all_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        MegarlError, match="7 tokens of its own, after at least one other, where 7 fit"
    ):
        joined(tokenizer, "ab", [" cdefgh"], 7)


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
        ([[-2.0, -1.0]], 1, "", 0),
        ([LOST, LOST, [-1.0, -2.0]], 0, "", 2),
        ([LOST, LOST, LOST], UNSET, "3 requests were lost, the last: gone", 3),
        ([ServerRefused("too long")], UNSET, "too long", 0),
        ([[np.nan, -1.0]], UNSET, "the model's log-likelihood of a choice is not finite", 0),
    ],
)
def test_lost_requests_are_asked_again_and_places_given_back(
    tokenizer: Tokenizer,
    ends: list[Any],
    chosen: Any,
    void: str,
    lost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiple_choice, "MAX_RETRIES", 2)

    async def run() -> tuple[Answer, int]:
        members = Membership([ServerAddress(id=0, url="http://stand-in", tensor_parallel=1)])
        members.seen(0)
        members.publish([0], -1, "")
        members.published(0, -1, "", "")
        places = pool.places = Places(members, 1)
        asker = Asker(
            recipe=from_tree({}),
            tokenizer=tokenizer,
            sampler=SimpleNamespace(servers=pool),  # type: ignore[arg-type]
            graders=SimpleNamespace(),  # type: ignore[arg-type]
            servers={0},
            salt="s",
            at_once=1,
        )
        asked = Choices(
            "arc-easy",
            [Question("q", "What?", ("a", "b"), 0)],
            1,
            rows=Suite(data="", mapping="arc"),
        )
        kept: list[Answer] = []
        await asyncio.wait_for(score([asked], asker, kept.append), 10)
        return kept[0], places.use[0].running

    server = StandInServer(*ends)
    pool = WatchedPool({0: server})
    answer, running = asyncio.run(run())
    assert (answer.chosen, answer.void, answer.correct, running) == (chosen, void, chosen == 0, 0)
    assert answer.format_ok, "nothing that the model wrote is malformed"
    assert pool.lost == [(0, 5)] * lost
    assert set(server.salts) == {"s/q"}


def test_shipped_suites() -> None:
    """Under their names, with the columns of their sets and the splits that have
    labels.
    """
    shipped = {"arc-easy": {}, "arc-challenge": {}, "hellaswag": {}}
    known = from_tree({"evaluation": {"suites": shipped}}).evaluation.suites
    assert {
        name: (suite.mapping, suite.data.rpartition(":")[2]) for name, suite in known.items()
    } == {
        "arc-easy": ("arc", "test"),
        "arc-challenge": ("arc", "test"),
        "hellaswag": ("hellaswag", "validation"),
    }


def test_a_suite_has_one_answer_a_question(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [ARC | {"id": f"q{n}"} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, ARC | {"answerKey": "X"}]))
    suite = Suite(data=str(path), mapping="arc", samples=16, prompts=3)
    found = suites.load("arc-easy", suite, tokenizer, 1000)
    assert (len(found.questions.prompts), found.questions.samples, found.rows) == (3, 1, 6)
    assert found.left_out == {"not of the schema": 1}
    path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    assert suites.load("arc-easy", suite, tokenizer, 1000).digest == found.digest
    path.write_text("".join(json.dumps(row | {"answerKey": "A"}) + "\n" for row in rows))
    assert suites.load("arc-easy", suite, tokenizer, 1000).digest != found.digest
