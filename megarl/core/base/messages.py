"""The learner's conversation with the controller: one request, one reply, over ZeroMQ
REQ/ROUTER in msgpack.

The learner executes and the controller decides. Rank 0 asks `Next`; the answer is the
next collective command:

    learner (rank 0)                     controller
    Next(step=7, version=7)          ──► Publish(version=7, servers=[a, b])
                                         these servers have older weights
    Published(version=7, results)    ──► Ack
    Next(step=7, version=7)          ──► Score(version=7, rollouts)
                                         compares learner and servers
    Scored(version=7, logprobs)      ──► Ack
    Next(step=7, version=7)          ──► Train(batch 7)
                                         the B oldest tickets are done
    Experts(step=7, ticket=30, …)    ──► RecordedExperts, and their choices
                                         for each group, with routing replay
      … trains: version 8 …
    Next(step=8, version=8)          ──► Wait(reason)
                                         nothing within a second; ask again
    Next(step=8, version=8)          ──► Stop(reason)
                                         after the last step's evaluation

`Next` and `Experts` are idempotent: the same step gets the same batch, from the journal
if need be, so a restarted learner replays the steps it lost. Each start of the learner
is an incarnation; after a new one, no server's weights are trusted until it has
published.

A server that joins a run (`megarl serve --join`) speaks to the controller over the same
socket, with the same keys:

    Join(url), every few seconds     ──► Joined(server=5) | Stop(the run ends) | Refused
    Leave, until it may go           ──► Wait(requests and weights are under way) | Ack
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from megarl.core.base.types import SCHEMA_VERSION, Batch, Record, Routing, decode, encode

LARGEST_REQUEST = 16 << 20
"""Bytes of a frame from the learner; the results of 10,000 servers fit. A peer that
sends more is disconnected.
"""
LARGEST_REPLY = 1 << 40
"""Bytes of a frame from the controller: a batch of 768 rollouts of 128k tokens has 0.8
GB. Experts come in frames of a rollout each.
"""

KEPT_FROM_INPUT = 7
"""SGLang keeps this many positions of its context, and of its KV memory, free of input;
it refuses a longer input.
"""

Count = Annotated[int, msgspec.Meta(ge=0)]
Incarnation = Annotated[str, msgspec.Meta(max_length=64)]


class ServerAddress(Record, frozen=True):
    """A server that receives weights. tensor_parallel: number of ranks with which it
    joins a process group.
    """

    id: int
    url: str
    tensor_parallel: int = 1


class Next(Record, frozen=True, tag="next"):
    """Asks what the learner should do now; it is about to train `step` with weights of
    `version` (= step).
    """

    incarnation: Incarnation
    step: Count
    version: Count


class ServerResult(Record, frozen=True):
    """The result of publication on one server. `error` is empty if its checksum equals
    the others'.
    """

    id: Count
    error: str = ""
    checksum: str = ""


class Published(Record, frozen=True, tag="published"):
    """Publication of `version` has ended. Seconds are the wall time of the slowest
    server. staged: the transfer took place before the pause. resume_seconds includes
    the swap, if there is one.
    """

    incarnation: Incarnation
    version: Count
    results: tuple[ServerResult, ...]
    pause_seconds: float
    transfer_seconds: float
    resume_seconds: float
    bytes_sent: Count
    staged: bool = False


class Scored(Record, frozen=True, tag="scored"):
    """The learner's answer to `Score`, per rollout, [n - first] float32 at temperature
    1.
    """

    incarnation: Incarnation
    version: Count
    logprobs: tuple[np.ndarray, ...]  # of the tokens from `first` on
    against: tuple[np.ndarray, ...]  # of the single token `Score.against` at the same positions
    choices: Count = 0  # number of (token, layer) choices of experts compared with the servers'
    differing: Count = 0  # number of them with another set of experts


class Experts(Record, frozen=True, tag="experts"):
    """Asks for the recorded experts of some rollouts of a group that `step` trains, by
    their positions in it. The learner asks for a few megabytes at a time.
    """

    incarnation: Incarnation
    step: Count
    ticket: Count
    rollouts: tuple[Count, ...]


class Stopped(Record, frozen=True, tag="stopped"):
    """The learner has saved a checkpoint and exits."""

    incarnation: Incarnation
    step: Count


class Join(Record, frozen=True, tag="join"):
    """A server that the run did not start announces itself, again and again as a sign
    of life.
    """

    life: Incarnation  # names the server's process
    url: Annotated[str, msgspec.Meta(max_length=256, pattern=r"^http://[^/@]+:[0-9]{1,5}$")]
    # Its id from an earlier answer; -1 before the first.
    server: Annotated[int, msgspec.Meta(ge=-1, le=1 << 30)] = -1


class Leave(Record, frozen=True, tag="leave"):
    """A joined server wants to leave. From now on it gets no requests, and its running
    ones continue on other servers.
    """

    life: Incarnation


FromServer = Join | Leave
Request = Next | Experts | Published | Scored | Stopped | FromServer


class Train(Record, frozen=True, tag="train"):
    """Train this batch. Its routing is outlines: `Experts` asks for the rest."""

    batch: Batch
    # The run's total so far; the learner adds its own time, times compute_devices.
    compute_hours: float
    compute_devices: int
    # The controller's metrics of the step, merged into its row of metrics.jsonl.
    stats: dict[str, float]
    replay: bool = False
    # First write a checkpoint: these weights are evaluated, and checkpoint.keep_best
    # asks for it.
    save: bool = False


class Publish(Record, frozen=True, tag="publish"):
    """Send the learner's current weights, `version`, to these servers. From now on
    their state is `publishing`.
    """

    version: int
    servers: tuple[ServerAddress, ...]


class ScoredRollout(Record, frozen=True):
    """A rollout to score."""

    tokens: np.ndarray  # [n] int32 of prompt and completion
    first: int  # where scoring begins, at least 1
    # Choices of a server with the same weights, to be compared with the learner's.
    experts: Routing | None = None


PARITY_ROLLOUTS = 4
"""Rollouts per batch that both servers and learner score after a publication: some
thousand tokens, in under a second.
"""


class Score(Record, frozen=True, tag="score"):
    """Score these rollouts with the weights of `version`, the learner's current ones.
    against: a token that is scored at each of their positions as well.
    """

    version: int
    rollouts: tuple[ScoredRollout, ...]
    against: int


class Wait(Record, frozen=True, tag="wait"):
    """Nothing to do yet; ask again."""

    reason: str


class Stop(Record, frozen=True, tag="stop"):
    """Save a checkpoint and exit. error: the run must end as failed."""

    reason: str
    error: bool = False


class RecordedExperts(Record, frozen=True, tag="recorded"):
    """The answer to `Experts`. `Routing.packed` of each rollout follows, in a frame of
    its own.
    """


class Ack(Record, frozen=True, tag="ack"):
    """Acknowledges a report."""


class Refused(Record, frozen=True, tag="refused"):
    """The request is invalid for this controller (schema, step out of range); the
    learner ends with this text.
    """

    error: str


class Joined(Record, frozen=True, tag="joined"):
    """The server belongs to the run now, under this id."""

    server: int


Reply = Train | RecordedExperts | Publish | Score | Wait | Stop | Ack | Refused | Joined


_SCHEMA = f"megarl {SCHEMA_VERSION}".encode()


def to_frames(message: Request | Reply) -> list[bytes]:
    """Encode a message as ZeroMQ frames: schema version, msgpack body."""
    return [_SCHEMA, encode(message)]


def body_of(frames: Sequence[bytes]) -> bytes:
    """Return the msgpack body; msgspec.DecodeError if the frames do not have this
    schema.
    """
    if len(frames) != 2 or frames[0] != _SCHEMA:
        starts = [frame[:20] for frame in frames]
        raise msgspec.DecodeError(f"not a frame of schema {_SCHEMA.decode()!r}: {starts}")
    return frames[1]


def from_frames(frames: Sequence[bytes], kind: Any) -> Any:
    """Decode a message of union `kind` (Request or Reply); msgspec.DecodeError if the
    frames do not have this schema.
    """
    return decode(body_of(frames), kind)
