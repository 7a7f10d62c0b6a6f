"""The real controller with a real server, and a learner played by the test: real
messages, weights that really change.

The learner trains nothing; it "publishes" by loading one of two models from disk while
requests are in flight.
"""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import (
    Experts,
    Next,
    Publish,
    Published,
    RecordedExperts,
    Refused,
    Reply,
    Request,
    Score,
    Scored,
    ServerResult,
    Stop,
    Stopped,
    Train,
    Wait,
)
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import RunDir, read_jsonl
from megarl.core.base.types import Group, decode, encode
from megarl.core.journal.journal import JournalReader
from megarl.core.journal.records import Admitted
from megarl.core.recipe import Recipe, dump
from megarl.run.process import free_ports
from tests import make
from tests.stack.conftest import ROOT, Stack, stack_recipe
from tests.tiny_scores import scores

pytestmark = pytest.mark.stack

B = 4
K = 2
GENERATIONS = 4
STEPS = 6
LIMIT_S = 120.0


@dataclass
class Run:
    """A run directory, and the controller process that works in it."""

    recipe: Recipe
    stack: Stack
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.recipe.run.path)

    def start(self) -> subprocess.Popen[bytes]:
        with (self.rundir.logs / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "megarl",
                    "rollout",
                    str(self.rundir.recipe),
                ],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        self.processes.append(process)
        return process

    def learner(self, step: int = 0) -> "Learner":
        return Learner(self, step)

    def batches(self) -> list[tuple[int, ...]]:
        """Tickets of each complete batch, from the journal."""
        admission = JournalReader(self.rundir.rollouts).fold().admission
        return [admission.batch(step) or () for step in range(STEPS)]

    def log(self) -> str:
        return (self.rundir.logs / "controller.log").read_text()


class Learner:
    """Plays rank 0: asks, publishes, scores, takes batches. `trained`: their bytes by
    step; `scored`: how many rollouts; `saved`: steps before which it was to write a
    checkpoint; `error`: what is added to its scores.
    """

    count = 0

    def __init__(self, run: Run, step: int) -> None:
        Learner.count += 1
        self.incarnation = f"learner-{Learner.count}"
        self.step = step
        self.run = run
        endpoints = run.rundir.endpoints()
        self.link = ControllerLink(
            endpoints.controller, endpoints.link, lambda: "", resend_s=5.0, limit_s=LIMIT_S
        )
        self.trained: dict[int, bytes] = {}
        self.replayed: set[int] = set()
        self.published: list[int] = []
        self.saved: list[int] = []
        self.error = np.float32(0)
        self.scored = 0

    def go(self, until: int = STEPS + 1) -> Reply:
        """Do as told until `until` steps are trained or the controller says stop, for
        as long as the link waits for a reply.
        """
        end = time.monotonic() + self.link.limit_s
        while time.monotonic() < end:
            reply = self.ask(Next(incarnation=self.incarnation, step=self.step, version=self.step))
            match reply:
                case Train():
                    assert reply.batch.step == self.step
                    self.trained[self.step] = encode(reply.batch)
                    self.saved += [self.step] if reply.save else []
                    self.replayed |= {self.step} if reply.replay else set()
                    self.step += 1
                    if self.step == until:
                        return reply
                case Publish():
                    self.publish(reply)
                case Score():
                    self.score(reply)
                case Stop():
                    self.link.tell(Stopped(incarnation=self.incarnation, step=self.step))
                    return reply
                case Wait():
                    continue
                case _:
                    return reply
        raise AssertionError(
            f"not done within {LIMIT_S} s; the controller says:\n{self.run.log()[-3000:]}"
        )

    def ask(self, request: Request) -> Reply:
        reply: Reply = decode(self.link.ask(request), Reply)
        return reply

    def publish(self, command: Publish) -> None:
        results = []
        for server in command.servers:
            try:
                self.load(server.url, command.version)
            except OSError as error:  # the server was killed
                results.append(ServerResult(id=server.id, error=str(error) or type(error).__name__))
            else:
                results.append(ServerResult(id=server.id, checksum="same"))
        self.published.append(command.version)
        self.ask(
            Published(
                incarnation=self.incarnation,
                version=command.version,
                results=tuple(results),
                bytes_sent=1,
                pause_seconds=0.1,
                transfer_seconds=0.1,
                resume_seconds=0.1,
            )
        )

    def score(self, command: Score) -> None:
        """As transformers scores them, but for what `self.error` adds."""
        tokens = [np.asarray(r.tokens) for r in command.rollouts]
        model = self.run.stack.models["ab"[command.version % 2]]
        found = [
            s[r.first - 1 :] for s, r in zip(scores(model, tokens), command.rollouts, strict=True)
        ]
        self.scored += len(found)
        self.ask(
            Scored(
                incarnation=self.incarnation,
                version=command.version,
                logprobs=tuple(s + self.error for s in found),
                against=tuple(np.zeros_like(s) for s in found),
            )
        )

    def load(self, url: str, version: int) -> None:
        """Even versions are model a, odd ones model b. Requests go on over their old
        KV.
        """
        model = self.run.stack.directory / "ab"[version % 2]
        admin(self.run, url, "/pause_generation", {"mode": "in_place"})
        admin(
            self.run,
            url,
            "/update_weights_from_disk",
            {"model_path": str(model), "weight_version": str(version), "flush_cache": False},
        )
        admin(self.run, url, "/continue_generation", {})


def admin(run: Run, url: str, path: str, body: dict[str, Any]) -> None:
    key = run.rundir.endpoints().admin_key
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def write_tokenizer(folder: Path) -> None:
    """One token for each id of the tiny models: the end of text, `</think>`, and
    characters.
    """
    vocabulary = {"<eos>": 0, "</think>": 1} | {chr(0x100 + n): n for n in range(2, 128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>", "</think>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def write_prompts(path: Path, start: int, count: int) -> None:
    rows = [
        {
            "id": f"p{n}",
            "prompt": (
                "".join(chr(0x102 + (n * 7 + i * i) % 126) for i in range(6)) + chr(0x102 + n)
            ),
            "answer": "x",
        }
        for n in range(start, start + count)
    ]
    make.write_rows(path, rows)


def controller_recipe(
    directory: Path, place: Path, thinking: list[int], evaluation: dict[str, int]
) -> Recipe:
    """The recipe of a controller whose prompts are in `place`, for servers of the
    models in `directory`.
    """
    write_tokenizer(directory / "a")
    write_prompts(place / "train.jsonl", 0, 40)
    write_prompts(place / "heldout.jsonl", 40, 12)
    return stack_recipe(
        directory,
        run={"name": "run", "dir": str(place), "steps": STEPS, "seed": 5},
        data={
            "tasks": {
                "letters": {
                    "train": str(place / "train.jsonl"),
                    "heldout": str(place / "heldout.jsonl"),
                    "grader": "exact",
                }
            }
        },
        length={
            "prompt_tokens": 16,
            "thinking_tokens": thinking,
            "answer_tokens": 20,
            "interruption": "\u0110\u0111</think>",
        },
        sampling={"generations": GENERATIONS},
        pipeline={"k": K},
        batch={"prompts": B, "zero_variance": "keep"},
        evaluation={"every": 3} | evaluation,
        checkpoint={"keep_best": True},
        serving={"max_running_requests": 24, "kv_tokens": 16384},
    )


@contextmanager
def run_of(recipe: Recipe, stack: Stack) -> Iterator[Run]:
    """A run directory whose servers are the stack's; its controllers have ended
    afterwards.
    """
    rundir = RunDir(recipe.run.path)
    rundir.create()
    rundir.recipe.write_text(dump(recipe))
    controller = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    rundir.write_endpoints(
        msgspec.structs.replace(
            stack.endpoints, session=str(recipe.run.path), controller=controller
        )
    )
    made = Run(recipe, stack)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill()
            process.wait()
        print(made.log()[-6000:])  # shown if the test failed


@pytest.fixture
def run(stack: Stack, tmp_path: Path) -> Iterator[Run]:
    recipe = controller_recipe(stack.directory, tmp_path, [40, 160], {"prompts": 4, "samples": 2})
    with run_of(recipe, stack) as made:
        yield made


def assert_law(run: Run, learner: Learner) -> list[Group]:
    """Each ticket in one step, in order; every sampled token at most k behind. The
    groups, in order.
    """
    batches = run.batches()
    assert [t for batch in batches for t in batch] == list(range(STEPS * B))
    groups = [g for batch in batches for g in JournalReader(run.rundir.rollouts).groups(batch)]
    for step, batch in enumerate(batches):
        if step in learner.trained:
            of_journal = JournalReader(run.rundir.rollouts).groups(batch)
            assert msgspec.msgpack.decode(learner.trained[step])[
                "groups"
            ] == msgspec.msgpack.decode(encode(of_journal))
    for n, group in enumerate(groups):
        assert not group.void
        assert [r.sample for r in group.rollouts] == list(range(GENERATIONS))
        for segment in (s for r in group.rollouts for s in r.segments if s.trained):
            assert n // B - K <= segment.weight_version <= STEPS
            assert np.isfinite(segment.logprobs).all()
    return groups


def test_batches_in_order_within_the_lag_and_scores_of_due_versions(run: Run) -> None:
    process = run.start()
    learner = run.learner()
    reply = learner.go()
    assert isinstance(reply, Stop)
    assert not reply.error
    assert process.wait(30) == 0
    groups = assert_law(run, learner)
    rollouts = [r for g in groups for r in g.rollouts]
    assert any(len(set(r.versions.tolist())) > 1 for r in rollouts), (
        "weights changed inside completions"
    )
    interrupted = [r for r in rollouts if r.interrupted]
    assert interrupted
    assert all(
        not s.trained
        for r in interrupted
        for s in r.segments
        if s.tokens.tolist()[-1:] == [1] and len(s.tokens) == 3
    )
    assert {r.retries for r in rollouts} == {0}
    rows = list(read_jsonl(run.rundir.eval))
    assert [row["step"] for row in rows] == [0, 3, STEPS]
    assert all(row["weight_version"] == row["step"] and row["n_prompts"] == 4 for row in rows)
    assert [row["compute_hours"] for row in rows] == sorted(row["compute_hours"] for row in rows)
    assert learner.published == sorted(set(learner.published))
    assert learner.saved == [
        0,
        3,
    ], "each evaluated version, for checkpoint.keep_best; the last is written at the end"


def test_killed_and_restarted_it_gives_the_same_batches_bit_for_bit(run: Run) -> None:
    first = run.start()
    before = run.learner()
    before.go(until=3)
    end = time.monotonic() + LIMIT_S
    while (
        not run.rundir.eval.exists()
    ):  # else its first scores may be lost, and no server has those weights any more
        assert time.monotonic() < end, run.log()[-3000:]
        time.sleep(0.05)
    first.kill()
    first.wait()
    admitted = {
        r.ticket: r.prompt_id
        for r in JournalReader(run.rundir.rollouts).replay()
        if isinstance(r, Admitted)
    }
    second = run.start()
    before.go(until=4)  # the same learner goes on; then another one begins again from the start
    after = run.learner()
    assert isinstance(after.go(), Stop)
    assert second.wait(30) == 0
    assert {step: after.trained[step] for step in before.trained} == before.trained
    assert after.replayed == set(range(max(before.published)))
    assert min(after.published) >= max(before.published), "nothing is published during replay"
    groups = assert_law(run, after)
    assert all(g.prompt.id == admitted[g.ticket] for g in groups if g.ticket in admitted)
    assert {row["step"] for row in read_jsonl(run.rundir.eval)} == {0, 3, STEPS}


class Disturber(Learner):
    """Its first three publications are each followed by an abort of what the server
    runs.
    """

    def publish(self, command: Publish) -> None:
        super().publish(command)
        if len(self.published) <= 3:
            time.sleep(0.15)  # requests are sent at once after a publication, and take longer
            admin(self.run, command.servers[0].url, "/abort_request", {"abort_all": True})


def test_requests_that_are_lost_go_on_from_what_had_arrived(run: Run) -> None:
    process = run.start()
    learner = Disturber(run, 0)
    assert isinstance(learner.go(), Stop)
    assert process.wait(30) == 0
    groups = assert_law(run, learner)
    retried = [r for g in groups for r in g.rollouts if r.retries]
    assert retried
    assert all(sum(len(s.tokens) for s in r.segments if s.trained) <= 160 + 20 for r in retried)


def wait_for(what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_nonsense_is_dropped_an_old_learner_refused_and_stop_obeyed(run: Run) -> None:
    process = run.start()
    old = run.learner()
    old.go(until=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        endpoints = run.rundir.endpoints()
        stranger.curve_serverkey = endpoints.link.controller.encode()
        stranger.curve_publickey = endpoints.link.learner.encode()
        stranger.curve_secretkey = endpoints.link.learner_secret.encode()
        stranger.linger = 0
        stranger.connect(endpoints.controller)
        for frames in ([b"hello"], [b"", b"megarl 99", b"\x80"], [b"", b"megarl 2", b"nonsense"]):
            stranger.send_multipart(frames)
        wait_for(lambda: json.loads(run.rundir.status.read_text())["malformed_requests"] == 3)
    new = run.learner(step=1)
    new.go(until=2)
    assert isinstance(old.ask(Next(incarnation=old.incarnation, step=1, version=1)), Refused)
    ticket = run.batches()[1][0]
    for learner, step, expected in (
        (old, 1, Refused),
        (new, 0, Refused),
        (new, 1000, Refused),
        (new, 1, RecordedExperts),
    ):
        request = Experts(
            incarnation=learner.incarnation, step=step, ticket=ticket, rollouts=(0, 1)
        )
        assert isinstance(learner.ask(request), expected)
    run.rundir.stop_file.touch()
    reply = new.go()
    assert isinstance(reply, Stop)
    assert not reply.error
    assert process.wait(30) == 0


def test_a_learner_that_disagrees_with_the_server_ends_the_run(run: Run) -> None:
    process = run.start()
    learner = run.learner()
    learner.error = np.float32(0.5)
    reply = learner.go()
    assert isinstance(reply, Stop)
    assert reply.error
    assert learner.scored > 0
    assert "the servers and the learner differ by 0.5 in log-prob" in reply.reason
    assert "Likely cause" in reply.reason
    assert process.wait(30) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_it(run: Run, number: signal.Signals) -> None:
    process = run.start()
    learner = run.learner()
    learner.go(until=1)
    process.send_signal(number)
    assert isinstance(learner.go(), Stop)
    assert process.wait(30) == 0
