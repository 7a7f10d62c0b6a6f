"""Prompt sets of a recipe's tasks: turns source rows into Prompt records, and checks
them before the run starts.

    source (sources.py) ─► mapping (mappings.py) ─► survey (survey.py)
        ─► template (chat.py) ─► token ids, up to a limit ─► on disk (`Stored`)

`template: raw`: the prompt is exactly what the model sees, including any chat-template
markers. `chat`: it is the user's message, and the model's own template is applied to
it. A prompt that is too long is left out and counted, never cut. A prompt is identified
by its task and id.

A fault in rows of the project's own format is an error, since `megarl data prepare`
writes none; faulty rows of other schemas are left out, counted and reported, since no
published set is free of them.

Memory holds only each prompt's position, 8 bytes (`Stored`); the prompts are in an
unnamed file in $TMPDIR, which vanishes with the process. The tokens of a million
prompts would take gigabytes, and answers that are unit tests reach a megabyte each.
"""

import logging
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np

from megarl.core.base.contracts import TaskPrompts
from megarl.core.base.errors import MegarlError, listed
from megarl.core.base.tokenizer import Tokenizer
from megarl.core.base.types import Prompt, decode, encode, int32
from megarl.core.recipe import Recipe, Rows, Task
from megarl.tasks.data.chat import SAMPLE_REPLY, ChatTemplate, load_chat
from megarl.tasks.data.contamination import Overlap, overlap_with
from megarl.tasks.data.golds import unreadable_in
from megarl.tasks.data.mappings import mapping_of, read_own
from megarl.tasks.data.reasoning_gym import of_problems
from megarl.tasks.data.rows import Message, PromptRow, UnfitError, fingerprint
from megarl.tasks.data.survey import FAULTS, Reader, Survey, chosen, survey_of
from megarl.tasks.graders.code import read_tests

log = logging.getLogger(__name__)

BATCH = 1024
"""Prompts encoded at once; limited because the tokenizer's return value is many times
larger than the ids.
"""
BATCH_CHARACTERS = 1 << 20
"""Most characters in texts encoded at once, unless one alone has more."""

type Render = Callable[[PromptRow], str]
"""Turns a row's prompt into the text that the model sees."""


@contextmanager
def _room() -> Iterator[None]:
    """Turn OSError into a MegarlError that names the temporary directory."""
    try:
        yield
    except OSError as error:
        raise MegarlError(
            f"{tempfile.gettempdir()}: prompts cannot be kept there: {error.strerror}; set TMPDIR"
            " to a larger disk"
        ) from None


class Stored(Sequence[Prompt]):
    """Prompts on disk, in the order in which they were appended."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as this object)
        self._ends = array("Q", [0])

    def append(self, prompt: Prompt) -> None:
        """Append a prompt. MegarlError if the disk is full."""
        data = encode(prompt)
        with _room():
            self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, n: int) -> Prompt: ...
    @overload
    def __getitem__(self, n: slice) -> list[Prompt]: ...
    def __getitem__(self, n: int | slice) -> Prompt | list[Prompt]:
        """Read a prompt, or those of a slice, from the disk. IndexError if there is no
        such prompt; MegarlError if the disk is full.
        """
        if isinstance(n, slice):
            return [self[i] for i in range(*n.indices(len(self)))]
        if not -len(self) <= n < len(self):
            raise IndexError(n)
        place = n % len(self)
        start = self._ends[place]
        end = self._ends[place + 1]
        with _room():
            self._file.flush()
        return decode(os.pread(self._file.fileno(), end - start, start), Prompt)


class PromptSet(NamedTuple):
    """Prompts of one source. name: its key in the recipe. fingerprints [prompts]
    uint64: of the texts before any template.
    """

    name: str
    prompts: Stored
    fingerprints: "array[int]"


def load_tasks(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, TaskPrompts]:
    """Load the prompts of all tasks by name; MegarlError if any task trains on a prompt
    that one of them holds out.
    """
    evaluation = overlap_with(recipe.data.decontaminate)
    sets = {
        name: _load_task(name, task, tokenizer, recipe.length.prompt_tokens, evaluation)
        for name, task in recipe.data.tasks.items()
    }
    for train, _ in sets.values():
        for _, heldout in sets.values():
            check_disjoint(train, heldout)
    tasks = {}
    for name, (train, heldout) in sets.items():
        prompts = train.prompts
        if recipe.data.unreadable == "drop" and recipe.data.tasks[name].grader == "math":
            prompts = _readable(prompts, train.name)
        tasks[name] = TaskPrompts(prompts, heldout.prompts)
    return tasks


def _readable(prompts: Stored, name: str) -> Stored:
    """Return the prompts whose answers the grader `math` can read. MegarlError if there
    are none.
    """
    unread = unreadable_in(prompts)
    if not unread.places:
        return prompts
    if len(unread.places) == len(prompts):
        raise MegarlError(
            f"{name}: {unread}; no prompt is left; set data.unreadable=text, or another grader"
        )
    log.warning("%s: %s; left out (data.unreadable: drop)", name, unread)
    readable = Stored()
    for place, prompt in enumerate(prompts):
        if place not in unread.places:
            readable.append(prompt)
    return readable


def renderer(task: Rows, tokenizer: Tokenizer) -> Render:
    """Return the function that applies a task's template to a row's prompt.

    A system message of the row's own takes the place of the task's.
    """
    if task.template == "raw":
        return _as_it_is
    chat = load_chat(tokenizer.path, task.template_options)
    problem = endless(chat, tokenizer)
    if problem:
        log.warning("%s", problem)
    render = _ChatRenderer(chat, task.system)
    render.check()
    return render


class _ChatRenderer:
    """Renders rows by a chat template, with a task's system message."""

    def __init__(self, chat: ChatTemplate, system: str) -> None:
        self._chat = chat
        self._system = system
        self._has_warned = False

    def __call__(self, row: PromptRow) -> str:
        """Return the text of a row's prompt or conversation. The task's system message
        comes first, unless the conversation has one.
        """
        if not row.messages:
            return self._render_text(row.prompt, self._system)
        messages = row.messages
        if self._system and messages[0]["role"] == "system":
            self._warn()
        elif self._system:
            messages = ({"role": "system", "content": self._system}, *messages)
        return self._chat.render_all(messages)

    def _render_text(self, prompt: str, system: str) -> str:
        """Return the text of one message of the user's, behind a system message if
        there is one ("" for none).
        """
        messages: list[Message] = [{"role": "user", "content": prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return self._chat.render(messages)

    def _warn(self) -> None:
        """Log, once, that system messages of rows replace the task's."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "rows have system messages of their own, which take the place of the task's"
                " `system`"
            )

    def check(self) -> None:
        """Raise MegarlError if the template leaves out the user's or the system
        message: it may look for other roles, or for a list of parts.
        """
        # Where a message counts, two different ones give two texts.
        if self._render_text("1", self._system) == self._render_text("2", self._system):
            raise MegarlError(f"{self._chat.path}: the chat template leaves the user's message out")
        if self._system and self._render_text("1", "1") == self._render_text("1", "2"):
            raise MegarlError(
                f"{self._chat.path}: the chat template leaves the system message out; put it into"
                " the prompts"
            )


def _as_it_is(row: PromptRow) -> str:
    """Return a prompt for `template: raw`. MegarlError if it is a conversation."""
    if row.messages:
        roles = ", ".join(message["role"] for message in row.messages)
        raise MegarlError(
            f"it is a conversation ({roles}), which `template: raw` cannot show; use template: chat"
        )
    return row.prompt


def endless(chat: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return what is wrong if no completion ends where the template ends a turn, as
    with Qwen2.5's base models; else an empty text. A template that writes nothing after
    a turn, such as GLM-4.5's, cannot be judged.
    """
    question = {"role": "user", "content": "?"}
    reply = {"role": "assistant", "content": SAMPLE_REPLY}
    try:
        text = chat.render([question, reply], reply=False)
        end_of_turn = text.partition(SAMPLE_REPLY)[2].strip()
        if not end_of_turn or set(tokenizer.ids(end_of_turn).tolist()) & set(tokenizer.ends):
            return ""
    except MegarlError:  # a template or a closed vocabulary that does not take these texts
        return ""
    ends = ", ".join(repr(tokenizer.backend.id_to_token(end)) for end in tokenizer.ends)
    return (
        f"{chat.path}: the chat template ends a turn with {end_of_turn!r}, but a completion ends"
        f" only at {ends} and goes on after its turn; make the token that ends a turn the"
        " eos_token of tokenizer_config.json"
    )


def load_set(
    source: Survey, render: Render, tokenizer: Tokenizer, max_tokens: int, task: str, name: str
) -> tuple[PromptSet, PromptSet]:
    """Load a source's training and held-out prompts. task, name: of the prompts and of
    the sets. MegarlError if no prompt is left: those longer than `max_tokens` are left
    out.
    """
    train = PromptSet(name, Stored(), array("Q"))
    heldout = PromptSet(name, Stored(), array("Q"))
    rows = 0
    longest = 0
    for encoded in rows_with_tokens(source, render, tokenizer, max_tokens):
        rows += 1
        longest = max(longest, encoded.length)
        if rows == 1 and len(encoded.tokens):
            tokenizer.warn_of_beginning(source.source, render(encoded.row))
        if encoded.length <= max_tokens:
            target = heldout if encoded.is_held_out else train
            target.prompts.append(_prompt(encoded, task))
            target.fingerprints.append(fingerprint(encoded.row.identity))
    prompts = len(train.prompts) + len(heldout.prompts)
    if not prompts:
        raise MegarlError(
            f"{source.source}: all {rows} prompts are longer than {max_tokens} tokens (the"
            f" longest: {longest} or more); raise length.prompt_tokens"
        )
    log.info(
        "%s: %d prompts, %d left out (longer than %d tokens)",
        source.source,
        prompts,
        rows - prompts,
        max_tokens,
    )
    return train, heldout


class EncodedRow(NamedTuple):
    """A row and the tokens [length] int32 of what the model sees.

    A text that must be too long is not encoded: it has no tokens, and `length` is their
    least number.
    """

    row: PromptRow
    is_held_out: bool
    tokens: np.ndarray
    length: int


def rows_with_tokens(
    source: Survey, render: Render, tokenizer: Tokenizer, max_tokens: int
) -> Iterator[EncodedRow]:
    """Yield the kept rows of a source with the tokens of what the model sees.

    MegarlError names the first row that cannot be shown or encoded.
    """
    texts = _model_texts(source, render, tokenizer, max_tokens)
    for part in in_parts(texts, _text_length):
        short = [row for row in part if tokenizer.least_tokens(len(row.text)) <= max_tokens]
        encoded = iter(_tokens_of(source.source, short, tokenizer))
        for row, is_held_out, text in part:
            least = tokenizer.least_tokens(len(text))
            if least > max_tokens:
                yield EncodedRow(row, is_held_out, int32(()), least)
            else:
                tokens = next(encoded)
                yield EncodedRow(row, is_held_out, tokens, len(tokens))


class _RowText(NamedTuple):
    """A row and the text that the model sees."""

    row: PromptRow
    is_held_out: bool
    text: str


def _text_length(row: _RowText) -> int:
    return len(row.text)


def _model_texts(
    source: Survey, render: Render, tokenizer: Tokenizer, max_tokens: int
) -> Iterator[_RowText]:
    """Yield the kept rows with the text that the model sees. A prompt that must be too
    long is not rendered, which could take long, and its own text stands for that.
    """
    for row, is_held_out in chosen(source):
        try:
            text = row.identity
            if tokenizer.least_tokens(len(text)) <= max_tokens:
                text = render(row)
        except MegarlError as error:
            raise MegarlError(f"{source.source}: prompt {row.id!r}: {error}") from None
        yield _RowText(row, is_held_out, text)


def in_parts[T](items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    """Divide items into parts whose texts are encoded at once: up to BATCH items and
    BATCH_CHARACTERS. characters: returns the number of them in an item's texts.
    """
    part: list[T] = []
    total = 0
    for item in items:
        length = characters(item)
        if part and (len(part) == BATCH or total + length > BATCH_CHARACTERS):
            yield part
            part = []
            total = 0
        part.append(item)
        total += length
    if part:
        yield part


def _tokens_of(source: str, rows: Sequence[_RowText], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Return the token ids of these rows. MegarlError names the first row that cannot
    be encoded.
    """
    try:
        return tokenizer.encode_all([row.text for row in rows])
    except MegarlError:  # it does not say which row; encode them one by one
        for row in rows:
            try:
                tokenizer.ids(row.text)
            except MegarlError as error:
                raise MegarlError(f"{source}: prompt {row.row.id!r}: {error}") from None
        raise


def _prompt(encoded: EncodedRow, task: str) -> Prompt:
    """Return a row with the tokens of what the model sees as a prompt of this task."""
    row = encoded.row
    return Prompt(
        id=row.id,
        tokens=encoded.tokens,
        answer=row.answer,
        task=task,
        difficulty=row.difficulty,
        alternatives=row.alternatives or msgspec.UNSET,
    )


def check_disjoint(train: PromptSet, heldout: PromptSet) -> None:
    """Raise MegarlError if a held-out prompt is also trained on. Texts are compared
    before templates, up to whitespace.
    """
    shared = np.intersect1d(train.fingerprints, heldout.fingerprints)
    if not len(shared):
        return
    training_ids = _ids(train, shared)
    pairs = [
        f"held-out {heldout_id!r} is training prompt {training_ids[mark]!r}"
        for mark, heldout_id in _ids(heldout, shared).items()  # mark: a fingerprint
    ]
    raise MegarlError(
        listed(f"{heldout.name} and {train.name} share prompts ({len(pairs)}):", pairs)
    )


def _load_task(
    name: str, task: Task, tokenizer: Tokenizer, max_tokens: int, evaluation: Overlap | None
) -> tuple[PromptSet, PromptSet]:
    """Load a task's training and held-out prompts. `heldout` of the task is a source of
    its own, or how many rows of the training source are held out. evaluation: what no
    training prompt may overlap with, if anything.
    """
    read = mapping_of(task.mapping, task.columns)
    render = renderer(task, tokenizer)
    refuse = FAULTS if read is read_own else frozenset()
    heldout_rows = task.heldout if isinstance(task.heldout, int) else 0
    if "code" in task.graders:
        read = of_programs(read)
    if "reasoning-gym" in task.graders:
        read = of_problems(read)
    key = f"data.tasks.{name}"
    surveyed = survey_of(task.train, read, heldout_rows, evaluation, refuse)
    train, heldout = load_set(surveyed, render, tokenizer, max_tokens, name, f"{key}.train")
    if isinstance(task.heldout, str):
        surveyed = survey_of(task.heldout, read, refuse=refuse)
        heldout, _ = load_set(surveyed, render, tokenizer, max_tokens, name, f"{key}.heldout")
    elif not heldout.prompts or not train.prompts:
        raise MegarlError(
            f"{key}.heldout: all rows held out of {task.train}, or all others, are too long; raise"
            " length.prompt_tokens"
        )
    return train, heldout._replace(name=f"{key}.heldout")


def of_programs(read: Reader) -> Reader:
    """Wrap a reader of rows whose answers are tests of programs, so that it also checks
    that the tests can be parsed.
    """

    def row(raw: Any) -> PromptRow:
        """Return a row. UnfitError if it has several answers, or no such tests."""
        result = read(raw)
        if result.alternatives:
            raise UnfitError(f"the answer of {result.id!r} is a list of tests; it must be one text")
        try:
            read_tests(result.answer)
        except ValueError as error:
            raise UnfitError(f"the answer of {result.id!r} {error}") from None
        return result

    return row


def _ids(rows: PromptSet, marks: np.ndarray) -> dict[int, str]:
    """Return fingerprint ─► id for the prompts whose fingerprints are in `marks`
    [marks] uint64, in the set's order.
    """
    ids = {}
    for n in np.flatnonzero(np.isin(rows.fingerprints, marks)).tolist():
        ids[int(rows.fingerprints[n])] = rows.prompts[n].id
    return ids
