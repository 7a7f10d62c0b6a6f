"""Loading prompts and traces: what is read, what is left out, what is refused and with
which words.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from megarl.core.base.errors import MegarlError
from megarl.core.base.tokenizer import Tokenizer, load_tokenizer
from megarl.core.base.types import int32
from megarl.core.recipe import from_tree
from megarl.tasks.data import arithmetic_models
from megarl.tasks.data.mappings import read_own
from megarl.tasks.data.prompts import check_disjoint, in_parts, load_set, load_tasks
from megarl.tasks.data.rows import PromptRow, fingerprint
from megarl.tasks.data.survey import survey_of
from megarl.tasks.data.traces import load_traces
from tests.prompts import load_prompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = arithmetic_models.character_tokenizer()
    return Tokenizer(made.backend_tokenizer, made.eos_token_id, Path())


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def row(name: str = "a", prompt: str = "1+1=", answer: Any = "2", **more: Any) -> dict[str, Any]:
    return {"id": name, "prompt": prompt, "answer": answer, **more}


def test_rows_become_prompts_in_file_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(
        tmp_path / "p.jsonl", row("b", "2+2=", "4", difficulty=1, source="x"), "", row("a")
    )
    first, second = load_prompts(file, tokenizer, 16, "sums")
    assert (first.id, first.answer, first.task, first.difficulty) == ("b", "4", "sums", 1)
    assert (second.id, second.task, second.difficulty) == ("a", "sums", 0)
    assert first.tokens.dtype == np.int32
    assert tokenizer.decode(first.tokens) == "2+2="  # nothing added
    nameless = write(
        tmp_path / "n.jsonl", {"prompt": "2+2=", "answer": "4"}, {"prompt": "1+1=", "answer": "2"}
    )
    names = [prompt.id for prompt in load_prompts(nameless, tokenizer, 16, "sums")]
    assert names == [f"{fingerprint(text):016x}" for text in ("2+2=", "1+1=")]


def test_prompts_that_are_too_long_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "p.jsonl", row("a"), row("b", "1111+1111="))
    with caplog.at_level(logging.INFO):
        assert [p.id for p in load_prompts(file, tokenizer, 4, "sums")] == ["a"]
    assert "1 prompts, 1 left out (longer than 4 tokens)" in caplog.text
    with pytest.raises(
        MegarlError, match=r"all 2 prompts are longer than 3 tokens \(the longest: 10 or more\)"
    ):
        load_prompts(file, tokenizer, 3, "sums")


class Measured(Tokenizer):
    """A tokenizer that notes the lengths of the texts that it encodes."""

    lengths: list[int]

    def encode_all(self, texts: list[str], framed: bool = False) -> Any:
        self.__dict__.setdefault("lengths", []).extend(map(len, texts))
        return super().encode_all(texts, framed)


def test_what_must_be_too_long_is_not_encoded(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Encoding takes hundreds of bytes per token. The longest token here, </think>, has
    eight characters.
    """
    measured = Measured(tokenizer.backend, tokenizer.end, tokenizer.path)
    long = "1" * (4 * 8 + 1)
    assert measured.longest_token == 8
    with caplog.at_level(logging.INFO):
        file = write(
            tmp_path / "p.jsonl",
            row("a"),
            row("b", long),
            row("c", "</think>" * 4),
            row("d", long[:-1]),
        )
        assert [p.id for p in load_prompts(file, measured, 4, "sums")] == ["a", "c"]
        assert "2 prompts, 2 left out (longer than 4 tokens)" in caplog.text
        pairs = [{"prompt": "1+1=", "completion": text} for text in ("2", "1" * 45, "1" * 44)]
        assert len(load_traces(write(tmp_path / "s.jsonl", *pairs), measured, longest=6)) == 1
        assert "1 traces, 2 left out (longer than 6 tokens)" in caplog.text
    assert max(measured.lengths) == 44
    with pytest.raises(MegarlError, match="all 1 prompts are longer than 4 tokens"):
        load_prompts(write(tmp_path / "q.jsonl", row("a", long)), measured, 4, "sums")


def test_texts_encoded_at_once_are_bounded_together() -> None:
    lengths = [
        list(map(len, part))
        for part in in_parts(["x" * (1 << 19)] * 3 + ["y" * (1 << 21)] + ["z"] * 1025, len)
    ]
    assert lengths == [[1 << 19] * 2, [1 << 19], [1 << 21], [1] * 1024, [1]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a"), row("a", "2+2=")], r"p.jsonl:2: its id was on line 1"),
        ([row("a"), row("b")], r"p.jsonl:2: its prompt was on line 1"),
        ([row("a", answer=" ")], r"p.jsonl:1: the answer of 'a' is empty"),
        ([row("a", prompt="")], r"p.jsonl:1: the prompt of 'a' is empty"),
        ([row("a"), "{"], r"p.jsonl:2: not a row"),
        (
            [row("a"), {"id": "b", "prompt": "2+2="}],
            r"p.jsonl:2: no column answer; the row has id, prompt: ",
        ),
        ([row("a", answer=True)], r"p.jsonl:1: the answer is neither text nor a number"),
        ([], r"p.jsonl: no rows"),
        ([row("a", "1+x=")], r"cannot encode '1\+x='"),
    ],
)
def test_bad_rows_are_named_with_their_line(
    tmp_path: Path, tokenizer: Tokenizer, rows: list[Any], words: str
) -> None:
    with pytest.raises(MegarlError, match=words):
        load_prompts(write(tmp_path / "p.jsonl", *rows), tokenizer, 16, "sums")


def test_one_error_names_all_faults_and_counts_what_it_does_not_show(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write(
        tmp_path / "p.jsonl",
        row("a"),
        *[row(f"b{i}", f"{i}+9=", "") for i in range(15)],
        row("a", "77+9="),
    )
    with pytest.raises(MegarlError) as error:
        load_prompts(file, tokenizer, 16, "sums")
    lines = str(error.value).splitlines()
    assert "16 faults" in lines[0]
    assert lines[1].startswith(f"{file}:2:")
    assert lines[-1] == "… and 6 more"


def test_missing_files_and_models_are_said(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(MegarlError, match="is not a file"):
        load_prompts(tmp_path / "none.jsonl", tokenizer, 16, "sums")
    with pytest.raises(MegarlError, match="no such directory"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(MegarlError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_a_shared_prompt_is_found_whatever_its_id(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def read(task: str, key: str, *rows: Any) -> Any:
        source = str(write(tmp_path / "p.jsonl", *rows))
        return load_set(
            survey_of(source, read_own),
            lambda row: row.prompt,
            tokenizer,
            16,
            task,
            f"data.tasks.{task}.{key}",
        )[0]

    train = read("sums", "train", row("t1"), row("t2", "2+2="))
    check_disjoint(train, read("more", "heldout", row("o1", "3+3=")))
    shared = read("more", "heldout", row("o1", "3+3="), row("h", "2+2="))
    with pytest.raises(
        MegarlError,
        match=(
            r"more\.heldout and .*sums\.train share prompts \(1\):\nheld-out 'h' is training prompt"
            r" 't2'"
        ),
    ):
        check_disjoint(train, shared)


def test_no_task_holds_out_what_any_trains_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = {"math": ("1+1=", "1+2="), "code": ("2+1=", "2+2="), "law": ("3+1=", "3+2=")}
    tasks = {
        name: {
            "train": str(write(tmp_path / f"{name}.jsonl", row("same", train))),
            "heldout": str(write(tmp_path / f"{name}-heldout.jsonl", row("same", heldout))),
        }
        for name, (train, heldout) in texts.items()
    }
    found = load_tasks(from_tree({"data": {"tasks": tasks}}), tokenizer)
    assert {(p.task, p.id) for of in found.values() for p in of.train} == {
        (name, "same") for name in texts
    }
    assert {name: tokenizer.decode(of.heldout[0].tokens) for name, of in found.items()} == {
        name: heldout for name, (_, heldout) in texts.items()
    }
    write(tmp_path / "law-heldout.jsonl", row("other", "1+1="))
    with pytest.raises(
        MegarlError, match=r"data\.tasks\.law\.heldout and data\.tasks\.math\.train share prompts"
    ):
        load_tasks(from_tree({"data": {"tasks": tasks}}), tokenizer)


def test_traces_end_with_the_end_token_and_know_their_prompt(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write(
        tmp_path / "s.jsonl",
        {"prompt": "1+1=", "completion": "<think>1+1=2</think>2"},
        {"prompt": "1", "completion": "2"},
    )
    long, short = load_traces(file, tokenizer)
    assert tokenizer.decode(long.tokens) == "1+1=<think>1+1=2</think>2<eos>"
    assert tokenizer.decode(long.tokens[: long.prompt_tokens]) == "1+1="
    with pytest.raises(MegarlError, match=r"t.jsonl:1: the prompt or the completion is empty"):
        load_traces(write(tmp_path / "t.jsonl", {"prompt": "1+1=", "completion": ""}), tokenizer)
    assert [len(t.tokens) for t in load_traces(file, tokenizer, longest=len(short.tokens))] == [3]
    with pytest.raises(MegarlError, match="all 2 traces are longer than 2 tokens"):
        load_traces(file, tokenizer, longest=2)


def test_many_texts_at_once_are_the_texts_one_by_one(tokenizer: Tokenizer) -> None:
    texts = ["1+1=", "22-7=", "<think></think>"]
    assert [t.tolist() for t in tokenizer.encode_all(texts)] == [
        tokenizer.ids(text).tolist() for text in texts
    ]


def test_faults_of_a_published_set_are_left_out_and_named_and_its_split_is_disjoint(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"problem": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    faults = [
        {"problem": "7+1=", "answer": "9"},
        {"problem": "9+9=", "answer": None},
        {"problem": "1111+1111=", "answer": "2"},
    ]
    source = tmp_path / "set.jsonl"
    test = tmp_path / "test.jsonl"
    write(source, *rows, *faults)
    write(test, {"question": "3+1="})
    task = {"train": str(source), "heldout": 4, "mapping": "deepscaler"}
    tree = {
        "data": {"tasks": {"m": task}, "decontaminate": [str(test)]},
        "length": {"prompt_tokens": 8},
    }
    with caplog.at_level(logging.INFO):
        found = load_tasks(from_tree(tree), tokenizer)["m"]
    assert len(found.heldout) in (3, 4)  # the long one may have been chosen
    assert len(found.train) + len(found.heldout) == 9
    texts = {tokenizer.decode(p.tokens) for p in (*found.train, *found.heldout)}
    assert texts == {row["problem"] for row in rows} - {"3+1="}
    for words in (
        "1 rows left out (repeated prompt with another answer)",
        "set.jsonl:11: its prompt was on line 8",
        "1 rows left out (empty answer)",
        "set.jsonl:12: the answer of",
        "1 rows left out (of an evaluation set)",
        "9 prompts, 1 left out (longer than 8 tokens)",
    ):
        assert words in caplog.text


def test_templates_do_not_hide_a_shared_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The texts are compared, not the tokens, so blanks hide it as little."""
    first = write(tmp_path / "a.jsonl", row("a"))
    second = write(tmp_path / "b.jsonl", row("b", "1+1=\n"), row("c", "2+2="))

    def load(file: Path, suffix: str, name: str) -> Any:
        def render(row: PromptRow) -> str:
            return row.prompt.strip() + suffix

        return load_set(survey_of(str(file), read_own), render, tokenizer, 16, "sums", name)[0]

    sets = [load(first, "", "train"), load(second, "=", "heldout")]
    with pytest.raises(
        MegarlError,
        match=r"heldout and train share prompts \(1\):\nheld-out 'b' is training prompt 'a'",
    ):
        check_disjoint(*sets)


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    """A server would end at it."""
    made = arithmetic_models.character_tokenizer()
    made.save_pretrained(tmp_path)
    highest = max(made("1+1=")["input_ids"])
    write(tmp_path / "config.json", json.dumps({"vocab_size": highest + 1}))
    assert max(load_tokenizer(tmp_path).ids("1+1=")) == highest
    write(tmp_path / "config.json", json.dumps({"text_config": {"vocab_size": highest}}))
    with pytest.raises(
        MegarlError,
        match=rf"token {highest} of '1\+1=' is beyond the model's vocabulary of {highest} ",
    ):
        load_tokenizer(tmp_path).ids("1+1=")


def test_all_ids_at_which_a_server_stops_end_a_completion(tmp_path: Path) -> None:
    made = arithmetic_models.character_tokenizer()
    made.save_pretrained(tmp_path)
    end = made.eos_token_id
    write(tmp_path / "config.json", json.dumps({"eos_token_id": end + 1}))
    write(tmp_path / "generation_config.json", json.dumps({"eos_token_id": [end + 2, end, 10**6]}))
    assert load_tokenizer(tmp_path).ends == (end, end + 1, end + 2)
    write(tmp_path / "config.json", json.dumps({"text_config": {"eos_token_id": [end, end + 3]}}))
    assert load_tokenizer(tmp_path).ends == (end, end + 3, end + 2)
    write(tmp_path / "generation_config.json", json.dumps({"eos_token_id": ["</s>"]}))
    with pytest.raises(
        MegarlError, match=r"generation_config\.json: eos_token_id must be .*, not \['</s>'\]"
    ):
        load_tokenizer(tmp_path)


def test_ends_that_the_model_cannot_write(tmp_path: Path) -> None:
    """Added to the tokenizer and not to the embedding. A server refuses requests that
    would stop at them.
    """
    made = arithmetic_models.character_tokenizer()
    made.save_pretrained(tmp_path)
    end = made.eos_token_id
    write(
        tmp_path / "config.json",
        json.dumps({"vocab_size": end + 2, "eos_token_id": [end, end + 1, end + 2]}),
    )
    assert load_tokenizer(tmp_path).ends == (end, end + 1)
    write(tmp_path / "config.json", json.dumps({"vocab_size": end}))
    with pytest.raises(
        MegarlError,
        match=(
            rf"tokenizer_config\.json: eos_token is token {end}, beyond the model's vocabulary of"
        ),
    ):
        load_tokenizer(tmp_path)


def test_a_begin_token_that_only_tokenizer_config_asks_for(tmp_path: Path) -> None:
    """As in DeepSeek's models. It is framing: prompts do not get it."""
    made = arithmetic_models.character_tokenizer()
    made.save_pretrained(tmp_path)
    plain = made("1+1=", add_special_tokens=False)["input_ids"]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_bos_token": True}
    begin = made.convert_ids_to_tokens(plain[:1])[0]
    for named in (begin, {"content": begin}):
        write(tmp_path / "tokenizer_config.json", json.dumps(config | {"bos_token": named}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.encode_all(["1+1="], framed=True)[0].tolist() == [plain[0], *plain]
        assert tokenizer.ids("1+1=").tolist() == plain
    write(
        tmp_path / "tokenizer_config.json",
        json.dumps(config | {"bos_token": begin, "add_bos_token": False}),
    )
    assert load_tokenizer(tmp_path).encode_all(["1+1="], framed=True)[0].tolist() == plain


def test_prompts_without_the_begin_token_are_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in raw prompts for a Llama 3."""
    made = arithmetic_models.character_tokenizer()
    made.save_pretrained(tmp_path)
    plain = load_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    write(
        tmp_path / "tokenizer_config.json",
        json.dumps(config | {"add_bos_token": True, "bos_token": "<think>"}),
    )
    begins = load_tokenizer(tmp_path)
    for tokenizer, text, warned in (
        (plain, "1+1=", 0),
        (begins, "<think>1+1=", 0),
        (begins, "1+1=", 1),
    ):
        tokenizer.warn_of_beginning("a.jsonl", text)
        assert len(caplog.messages) == warned
    assert caplog.messages[0].startswith(
        "a.jsonl: its texts do not begin with <think>, which the tokenizer puts before"
    )


@pytest.mark.parametrize("kind", ["prepended", "metaspace", "bytes"])
def test_a_text_that_follows_another_keeps_its_first_space(tmp_path: Path, kind: str) -> None:
    """Llama 2's tokenizer.json, as converted at first and as now; Llama 3's has no such
    rule.
    """
    words = ["</s>", "▁", "▁a", "b", "Ġ", "Ġa"]
    backend = Backend(models.BPE({word: n for n, word in enumerate(words)}, []))
    if kind == "prepended":
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        backend.decoder = decoders.Metaspace() if kind == "metaspace" else decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(tmp_path)
    space, word = [("▁", "▁a"), ("Ġ", "Ġa")][kind == "bytes"]
    found = [tokenizer.backend.token_to_id(each) for each in (space, word, "b", "</s>", word)]
    ids = int32([number for number in found if number is not None])
    assert len(ids) == 5
    assert tokenizer.continued(ids) == "  ab</s> a"
    assert "".join(tokenizer.continued(ids[n : n + 1]) for n in range(len(ids))) == "  ab</s> a"
    assert tokenizer.continued(ids[:0]) == ""
    assert tokenizer.decode(ids[1:3]) == (" ab" if kind == "bytes" else "ab"), (
        "at the beginning of a text"
    )
