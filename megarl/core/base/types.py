"""What passes between the roles: prompts, rollouts, groups, batches.

A rollout is a list of segments, each from one weight version, sampled by the policy or
inserted by us:

    prompt  "27+58="
    segment [<think> 7 + 8 = 1]   version 4, trained
    segment [5 ; 1 + 2]           version 5, trained: weights were replaced in between
    segment [</think>]            version 5, masked: the interruption phrase
    segment [8 5 <eos>]           version 5, trained

A rollout of an agent may be several conversations (`Branch`); a later one may share the
beginning of an earlier one:

    path 0: segment [<task>] masked, [call a] trained, [result] masked, [call b] trained
    path 1: path 0 up to [call a], [result] masked, [call c] trained

Token ids and log-probs are numpy arrays in memory and raw little-endian bytes in
msgpack (`encode`, `decode`), so nothing on the hot path loops over tokens in Python.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike

SCHEMA_VERSION = 5
"""Version of every frame between roles and every journal file; readers refuse any
other.
"""

SHOWN_ANSWER = 200
"""Characters of a prompt's answer that a group keeps. The grader has the whole answer
from the data.
"""

type JsonObject = dict[str, Any]
"""A parsed JSON object whose contents are not checked yet."""

FinishReason = Literal["stop", "length", "void"]
"""`stop`: the end token was sampled. `length`: the answer budget ran out first (a
truncated rollout). `void`: it was never judged, and is not trained.
"""


class Record(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Base of everything that is sent or written. Not comparable: compare `encode(a) ==
    encode(b)`.
    """


class Prompt(Record, frozen=True):
    """One problem. `task` and `id` identify it within a run."""

    id: str
    tokens: np.ndarray  # [prompt_len] int32
    answer: str  # what the task's grader compares completions with
    task: str = "math"
    difficulty: int = 0  # smaller is easier
    # Answers that are as right as `answer`. Unset is not encoded, so a set without any
    # has the fingerprint that it had when a run began.
    alternatives: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def brief(self) -> "Prompt":
        """The prompt as kept in a group, for readers of the journal.

        Long answers are cut: unit tests can take a megabyte.
        """
        answer, *alternatives = map(_cut, self.answers)
        return msgspec.structs.replace(
            self, answer=answer, alternatives=tuple(alternatives) or msgspec.UNSET
        )

    @property
    def answers(self) -> tuple[str, ...]:
        """All answers that are right."""
        return (self.answer, *(self.alternatives or ()))


def _cut(answer: str) -> str:
    """Return an answer, at most SHOWN_ANSWER characters of it."""
    excess = len(answer) - SHOWN_ANSWER
    if excess <= 0:
        return answer
    return f"{answer[:SHOWN_ANSWER]} … ({excess:,} characters more)"


class Segment(Record, frozen=True, omit_defaults=True):
    """Consecutive completion tokens of one origin. turn and credit: with `agent.credit:
    turn`.
    """

    tokens: np.ndarray  # [n] int32
    logprobs: np.ndarray  # [n] float32, recorded at sampling; 0 where not trained
    # The weights that sampled them; for tokens salvaged from a lost server, those at
    # the request's start.
    weight_version: int
    trained: bool = True
    # Number of the turn in its session, in the order in which turns were served.
    turn: int = -1
    # Sum of the agent's rewards after the turn, without the rollout's own reward.
    credit: float = 0.0


class Routing(Record, frozen=True):
    """The experts that the server chose for the tokens of prompt and completion, in the
    layers that have experts: a table [rows, layers, chosen]. Row t belongs to token t.
    The last token has no row, because nothing was computed from it. Nor have the last
    tokens of a rollout whose server was lost before it could report. Of an agent's
    rollout there are the rows of each path's own tokens, one path after the other
    (`Branch.routed`).

    `packed` has gigabytes in a batch of long rollouts. So the journal has it beside its
    records, and the learner's ranks get parts of it (learner/shares.py). What is read
    and sent otherwise is the `outline`.
    """

    rows: int
    layers: int
    chosen: int
    bits: int  # of a choice: 1, 2, 4, 8 or 16
    # The choices end to end, the first in the lowest bits [bytes] uint8; [0] in an
    # outline.
    packed: np.ndarray

    @staticmethod
    def of(table: np.ndarray, experts: int) -> "Routing":
        """Pack a table [rows, layers, chosen] of choices among so many experts."""
        rows, layers, chosen = table.shape
        bits = _bits(experts)
        return Routing(
            rows=rows, layers=layers, chosen=chosen, bits=bits, packed=_packed(table, bits)
        )

    @property
    def table(self) -> np.ndarray:
        """The choices as [rows, layers with experts, experts per token] uint8, or int16
        with more than 256 experts.
        """
        count = self.rows * self.layers * self.chosen
        return _unpacked(self.packed, self.bits, count).reshape(-1, self.layers, self.chosen)

    @property
    def size(self) -> int:
        """The bytes of `packed`, even if it is left out."""
        return -(-self.rows * self.layers * self.chosen * self.bits // 8)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the table."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.int16)

    @property
    def outline(self) -> "Routing":
        """All but the choices."""
        return msgspec.structs.replace(self, packed=np.zeros(0, np.uint8))

    def with_choices(self, packed: bytes) -> "Routing":
        """Return the routing of which this is the outline."""
        return msgspec.structs.replace(self, packed=np.frombuffer(packed, np.uint8))

    @property
    def is_outline(self) -> bool:
        """Whether the choices are elsewhere."""
        return self.rows > 0 and not len(self.packed)


def _bits(experts: int) -> int:
    """Return the bits of a choice among so many experts, a power of two: others would
    save little, and take much longer to pack.
    """
    return next(bits for bits in (1, 2, 4, 8, 16) if experts <= 1 << bits)


def _packed(table: np.ndarray, bits: int) -> np.ndarray:
    if bits == 16:
        return np.ascontiguousarray(table, "<i2").reshape(-1).view(np.uint8)
    choices = np.ascontiguousarray(table, np.uint8).reshape(-1)
    if bits == 8:
        return choices
    per_byte = 8 // bits
    packed = np.zeros(-(-len(choices) // per_byte), np.uint8)
    for place in range(per_byte):
        part = choices[place::per_byte]
        packed[: len(part)] |= part << np.uint8(place * bits)
    return packed


def _unpacked(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return `count` choices, [count]."""
    if bits == 16:
        return packed.view("<i2")
    if bits == 8:
        return packed
    per_byte = 8 // bits
    choices = np.empty((len(packed), per_byte), np.uint8)
    for place in range(per_byte):
        choices[:, place] = (packed >> np.uint8(place * bits)) & np.uint8((1 << bits) - 1)
    return choices.reshape(-1)[:count]


class Episode(Record, frozen=True):
    """The exchange between the policy and its environment
    (data.tasks.NAME.environment), or an agent's session.
    """

    turns: int  # of the policy
    calls: int  # turns that were answered; for an agent: requests that were served
    errors: int  # calls that failed
    seconds: float  # spent on all calls; for a session, time without a running request
    limited: bool  # a limit ended it, not the policy or the agent
    # Tokens of a session that are in no path, of repeated or abandoned requests.
    untrained: int = 0


class Branch(Record, frozen=True):
    """One path of an agent's rollout: a conversation as the policy saw it. It begins
    with the first `shared` tokens of the earlier path `parent`; they are trained there
    and masked here. Then come the rollout's next `segments` segments. A path that
    shares nothing has parent -1 and shared 0.
    """

    segments: int
    parent: int = -1
    shared: int = 0
    routed: int = 0  # first own tokens whose experts are in `Rollout.routing`


class PathTokens(NamedTuple):
    """A sequence for the learner."""

    tokens: np.ndarray  # [n] int32, including the prompt's
    logprobs: np.ndarray  # [n] float32, 0 where masked
    trained: np.ndarray  # [n] bool
    own_start: int  # index of the first token that is not in an earlier path of the rollout
    turns: np.ndarray  # [n] int32, as in `Segment`, -1 where masked


class Rollout(Record, frozen=True):
    """One graded completion of a ticket's prompt. Every sampled token is in exactly one
    segment. paths: only for an agent's rollout; they partition its segments and do not
    begin with the group's prompt.
    """

    sample: int  # 0 … generations-1 within the group
    segments: tuple[Segment, ...]
    reward: float
    correct: bool
    finish: FinishReason
    # The graders' reward before the overlong penalty; None: the same as `reward`.
    graded: float | None = None
    interrupted: bool = False  # the interruption phrase was inserted
    format_ok: bool = True  # the thinking trace was closed and an answer follows it
    grader_timeout: bool = False
    grader_error: bool = False
    # The scores that make up `reward`, by name, if the task has several.
    rewards: dict[str, float] = {}
    retries: int = 0  # requests that were lost and continued elsewhere
    routing: Routing | None = None  # recorded with model.moe.routing_replay
    episode: Episode | None = None  # if the task has an environment or an agent
    paths: tuple[Branch, ...] = ()
    teacher_logprobs: np.ndarray | None = None  # [completion_len] float32, 0 where not trained

    @property
    def tokens(self) -> np.ndarray:
        """All completion tokens, masked ones included; of an agent's rollout, all
        paths' own. [completion_len] int32
        """
        return _concatenated([s.tokens for s in self.segments], np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """Behaviour log-probs, 0 where masked. [completion_len] float32"""
        return _concatenated([s.logprobs for s in self.segments], np.float32)

    @property
    def trained(self) -> np.ndarray:
        """Whether the loss may use each token. [completion_len] bool"""
        parts = [np.full(len(s.tokens), s.trained) for s in self.segments]
        return _concatenated(parts, np.bool_)

    @property
    def versions(self) -> np.ndarray:
        """Weight version of each token. [completion_len] int32"""
        return _concatenated(
            [np.full(len(s.tokens), s.weight_version) for s in self.segments], np.int32
        )

    @property
    def trained_tokens(self) -> int:
        """|y|: number of tokens that count in an aggregation, over all paths."""
        return sum(len(s.tokens) for s in self.segments if s.trained)

    @property
    def path_rows(self) -> list[int]:
        """How many first tokens of each of the rollout's sequences (`paths_of`) have
        recorded experts.
        """
        if self.routing is None:
            return [0] * max(len(self.paths), 1)
        if not self.paths:
            return [self.routing.rows]
        counts: list[int] = []
        for path in self.paths:
            count = path.routed
            if path.parent >= 0:
                count += min(counts[path.parent], path.shared)
            counts.append(count)
        return counts

    @property
    def path_experts(self) -> list[np.ndarray | None]:
        """The recorded experts of each of the rollout's sequences (`paths_of`): of its
        first tokens, perhaps not of all [rows, layers with experts, chosen]; None if
        nothing is recorded, or the routing is an outline.
        """
        if self.routing is None or self.routing.is_outline:
            return [None] * max(len(self.paths), 1)
        table = self.routing.table
        if not self.paths:
            return [table]
        tables: list[np.ndarray] = []
        start = 0
        for path in self.paths:
            rows = table[start : start + path.routed]
            start += path.routed
            if path.parent >= 0:
                rows = np.concatenate([tables[path.parent][: path.shared], rows])
            tables.append(rows)
        return list[np.ndarray | None](tables)

    @property
    def credits(self) -> dict[int, float]:
        """The credit of each turn, in addition to `reward`, by the turn's number; {-1:
        0.0} if turns have no own credit.
        """
        credits = {s.turn: s.credit for s in self.segments if s.trained}
        return credits or {-1: 0.0}


def paths_of(
    segments: Sequence[Segment], paths: Sequence[Branch], prompt: np.ndarray
) -> list[PathTokens]:
    """Return a rollout's sequences: one per path of an agent's rollout, else one of
    prompt [prompt_len] and completion.
    """
    if not paths:
        return [_path(prompt, segments)]
    sequences: list[PathTokens] = []
    remaining = iter(segments)
    for path in paths:
        shared = int32(())
        if path.parent >= 0:
            shared = sequences[path.parent].tokens[: path.shared]
        sequences.append(_path(shared, list(islice(remaining, path.segments))))
    return sequences


def _path(shared: np.ndarray, segments: Sequence[Segment]) -> PathTokens:
    """Make a sequence of masked tokens `shared` [n] and segments of its own."""
    n = len(shared)
    tokens = [shared]
    logprobs = [np.zeros(n, np.float32)]
    trained = [np.zeros(n, np.bool_)]
    turns = [np.full(n, -1)]
    for segment in segments:
        length = len(segment.tokens)
        tokens.append(segment.tokens)
        logprobs.append(segment.logprobs)
        trained.append(np.full(length, segment.trained))
        turns.append(np.full(length, segment.turn))
    return PathTokens(
        tokens=_concatenated(tokens, np.int32),
        logprobs=_concatenated(logprobs, np.float32),
        trained=_concatenated(trained, np.bool_),
        own_start=n,
        turns=_concatenated(turns, np.int32),
    )


class Group(Record, frozen=True):
    """All rollouts of one ticket. A `void` group (nothing could be generated or graded)
    has none, but keeps its slot.
    """

    ticket: int
    prompt: Prompt  # as in `Prompt.brief`
    rollouts: tuple[Rollout, ...]
    void: str = ""  # the reason, if void
    epoch: int = 0

    @property
    def has_routing(self) -> bool:
        """Whether experts were recorded."""
        return any(rollout.routing is not None for rollout in self.rollouts)

    @property
    def outline(self) -> "Group":
        """The group with outlines of its rollouts' routing."""
        rollouts = []
        for rollout in self.rollouts:
            if rollout.routing is not None:
                rollout = msgspec.structs.replace(rollout, routing=rollout.routing.outline)
            rollouts.append(rollout)
        return msgspec.structs.replace(self, rollouts=tuple(rollouts))

    @property
    def rewards(self) -> np.ndarray:
        """[generations] float64"""
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)

    @property
    def pass_rate(self) -> float:
        """Share of correct answers; 0 for a void group."""
        if not self.rollouts:
            return 0.0
        return float(np.mean([r.correct for r in self.rollouts]))

    @property
    def has_variance(self) -> bool:
        """Whether the rollouts' grades or, if they are all equal, the credits of a turn
        differ. The overlong penalty does not count: a group of only right answers would
        teach nothing but length.
        """
        grades = {_grade(rollout) for rollout in self.rollouts}
        if len(grades) > 1:
            return True
        credits_of_turn: dict[int, list[float]] = {}
        for rollout in self.rollouts:
            for turn, credit in rollout.credits.items():
                credits_of_turn.setdefault(turn, []).append(credit)
        return any(map(_differ, credits_of_turn.values()))


def _grade(rollout: Rollout) -> float:
    """Return a rollout's reward before the overlong penalty."""
    return rollout.reward if rollout.graded is None else rollout.graded


def _differ(credits: list[float]) -> bool:
    """Return whether the credits of one turn differ; a single one differs from 0."""
    if len(credits) == 1:
        return credits != [0.0]
    return len(set(credits)) > 1


class Batch(Record, frozen=True):
    """The groups that step `step` trains: those of the oldest B tickets, in ticket
    order.
    """

    step: int
    groups: tuple[Group, ...]


_ARRAY_DTYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("<i4"),
    2: np.dtype("<f4"),
    3: np.dtype("u1"),
}
_ARRAY_CODES = {dtype: code for code, dtype in _ARRAY_DTYPES.items()}


def _concatenated(parts: list[np.ndarray], dtype: DTypeLike) -> np.ndarray:
    """Return the parts end to end, as this type; without any part an empty array."""
    if not parts:
        return np.zeros(0, dtype)
    return np.concatenate(parts).astype(dtype, copy=False)


def _enc_hook(value: object) -> msgspec.msgpack.Ext:
    """Encode an array, for msgspec: its type as the code of an extension, its bytes."""
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).view(np.uint8).data
        return msgspec.msgpack.Ext(_ARRAY_CODES[value.dtype], data)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _ext_hook(code: int, data: memoryview) -> np.ndarray:
    """Decode what `_enc_hook` has encoded: the array of an extension's bytes."""
    if code not in _ARRAY_DTYPES:
        raise msgspec.ValidationError(f"unknown extension code {code}")
    return np.frombuffer(bytes(data), dtype=_ARRAY_DTYPES[code])


def _dec_hook(kind: type, value: object) -> np.ndarray:
    """Return a field's decoded value if it is an array where one belongs."""
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return value
    raise msgspec.ValidationError(f"expected an array, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
_decoders: dict[object, msgspec.msgpack.Decoder] = {}


def encode(record: object) -> bytes:
    """Encode a record in msgpack."""
    return _encoder.encode(record)


def decode[T](data: bytes | memoryview, kind: type[T] | Any) -> T:
    """Decode a record of type (or tagged union) `kind`; msgspec.ValidationError or
    DecodeError if `data` is not one.
    """
    if kind not in _decoders:
        _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_dec_hook, ext_hook=_ext_hook)
    return _decoders[kind].decode(data)


def int32(values: Iterable[int]) -> np.ndarray:
    """Return the values as an array [n] int32."""
    return np.fromiter(values, dtype=np.int32)


def float32(values: Iterable[float]) -> np.ndarray:
    """Return the values as an array [n] float32."""
    return np.fromiter(values, dtype=np.float32)
