"""Measures a whole controller with 16,384 requests in flight at 100,000 tokens/s, in
CPU seconds a second.

    python -m benchmarks.controller [--streams 16384] [--rate 100000] [--seconds 120]
    [--folder DIR]
    python -m benchmarks.controller --experts 2

The controller is real, in its own process: prompts, places, streams, grader, tickets,
journal, metrics. Servers and learner are stand-ins in this process. SERVERS addresses
stream made-up tokens in SGLang's format, at a steady rate; the learner takes each
batch, and publishes, without delay. Half the answers are right.

It prints one line of JSON: `cores` are the CPU seconds a second that the controller
used while all streams ran.

`--experts GB` measures instead what a batch with so many GB of recorded experts costs
the controller's event loop. Groups are packed and written, and a learner in a process
of its own takes the batch and asks for all experts. Journal, link and conversation are
real. `loop_cpu_seconds` are the CPU seconds of the loop's thread, `loop_held_seconds`
add up the times over HELD_S in which the loop could not run anything else, for lack of
a core, too.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import uvloop
from aiohttp import web

from benchmarks.scale import CHUNK, address, allow_files
from megarl.core import recipe as recipes
from megarl.core.base import architecture
from megarl.core.base.link import ControllerLink
from megarl.core.base.messages import (
    Experts,
    Next,
    Publish,
    Published,
    RecordedExperts,
    Reply,
    Score,
    Scored,
    ServerResult,
    Stop,
    Stopped,
    Train,
)
from megarl.core.base.process import die_with_parent
from megarl.core.base.rundir import Endpoints, LinkKeys, RunDir
from megarl.core.base.tokenizer import load_tokenizer
from megarl.core.base.types import Batch, Group, Prompt, Rollout, Segment, decode, int32
from megarl.core.controller.conversation import Conversation, ConversationOver, Link
from megarl.core.controller.decision import Decision, TrainStep
from megarl.core.journal.journal import Journal
from megarl.core.journal.records import Admitted, Finished
from megarl.core.journal.writer import JournalWriter
from megarl.core.recipe import Recipe
from megarl.run.process import free_ports
from megarl.tasks.data import arithmetic
from megarl.tasks.data.arithmetic_models import LLAMA, save_model

SERVERS = 64
GENERATIONS = 16
K = 8
CHUNKS = (4, 12)
"""The fewest and the most chunks of a completion: 256 to 768 tokens."""
START_LIMIT_S = 450.0
"""How long the first two steps may take."""
LOGPROB = -1.2345678
"""What servers and learner say of each token. If they differed, the controller would
stop the run.
"""


HELD_S = 0.05
TICK_S = 0.005
ROWS = 16_384
"""Tokens of a rollout with recorded experts, of Qwen3-30B-A3B."""


class StandInServers:
    """All servers: each request gets a chunk every `every_s` seconds; the last one has
    an answer that half the time is right.

    The first `streams` requests are shorter, as if they had been under way for a while.
    running: requests in flight.
    """

    def __init__(self, folder: Path, streams: int, every_s: float) -> None:
        self._tokenizer = load_tokenizer(folder)
        self._streams = streams
        self._every_s = every_s
        self.streams = streams
        self.version = 0
        self.running = 0
        self.chunks = 0
        logprobs = [[LOGPROB, i, None] for i in range(CHUNK)]
        self._about: dict[str, Any] = {
            "id": "x" * 32,
            "finish_reason": None,
            "output_token_logprobs": logprobs,
        }
        self._thought = _event(
            {"output_ids": self._tokenizer.ids("7" * CHUNK).tolist(), "meta_info": self._about}
        )

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/model_info", self._info)
        app.router.add_route("*", "/{any:.*}", self._other)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read())
        if not asked.get("stream"):
            asked_for = zip(asked["input_ids"], asked["logprob_start_len"], strict=True)
            return web.json_response([self._scored(ids[start:]) for ids, start in asked_for])
        left = random.randint(*CHUNKS)
        begun = self.version
        reply = web.StreamResponse()
        if self._streams > 0:
            self._streams -= 1
            left = random.randint(1, left)
        await reply.prepare(request)
        self.running += 1
        try:
            await asyncio.sleep(random.random() * self._every_s)
            for _ in range(left - 1):
                await reply.write(self._thought)
                self.chunks += 1
                await asyncio.sleep(self._every_s)
            await reply.write(self._answer(asked["input_ids"], begun, left))
            self.chunks += 1
        finally:
            self.running -= 1
        return reply

    def _answer(self, prompt: list[int], version: int, chunks: int) -> bytes:
        a, sign, b = re.split(r"([+-])", self._tokenizer.decode(int32(prompt)).partition("=")[0])
        sum_ = int(a) + int(sign + b) + random.randint(0, 1)
        end = [*self._tokenizer.ids(f"</think>{sum_}").tolist(), self._tokenizer.end]
        ids = [*self._tokenizer.ids("7" * (CHUNK - len(end))).tolist(), *end]
        versions = [{"version": str(version), "start": 0, "end": chunks * CHUNK}]
        finish = {"type": "stop", "matched": self._tokenizer.end}
        return _event(
            {
                "output_ids": ids,
                "meta_info": self._about | {"finish_reason": finish, "weight_versions": versions},
            }
        )

    def _scored(self, ids: list[int]) -> dict[str, Any]:
        scores = [[None, ids[0], None], *([LOGPROB, token, None] for token in ids[1:])]
        about = {
            "finish_reason": {"type": "length"},
            "input_token_logprobs": scores,
            "weight_version": str(self.version),
        }
        return {
            "meta_info": (
                about
                | {"input_token_ids_logprobs": [None, *([[LOGPROB, 0, None]] for _ in ids[1:])]}
            )
        }

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"timestamp": time.time(), "loads": [{"token_usage": 0.5, "num_waiting_reqs": 0}]}
        )

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})

    async def _other(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"success": True, "message": ""})


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def serve(servers: StandInServers, port: int) -> None:
    runner = web.AppRunner(servers.app())
    await runner.setup()
    for server in range(SERVERS):
        await web.TCPSite(runner, address(server), port, backlog=4096).start()
    await asyncio.Event().wait()


def learn(rundir: RunDir, servers: StandInServers) -> None:
    """Be the learner: take batches and publish, until the controller stops; its log
    says why.
    """
    endpoints = rundir.endpoints()
    step = 0
    name = "stand-in"
    link = ControllerLink(
        endpoints.controller, endpoints.link, lambda: "", resend_s=5.0, limit_s=600.0
    )
    while True:
        reply: Reply = decode(link.ask(Next(incarnation=name, step=step, version=step)), Reply)
        match reply:
            case Train():
                step += 1
            case Publish():
                servers.version = reply.version
                results = tuple(
                    ServerResult(id=server.id, checksum="same") for server in reply.servers
                )
                seconds = {f"{part}_seconds": 0.0 for part in ("pause", "transfer", "resume")}
                link.ask(
                    Published(
                        incarnation=name,
                        version=reply.version,
                        results=results,
                        bytes_sent=0,
                        **seconds,
                    )
                )
            case Score():
                scores = tuple(
                    np.full(len(r.tokens) - r.first, LOGPROB, np.float32) for r in reply.rollouts
                )
                link.ask(
                    Scored(incarnation=name, version=reply.version, logprobs=scores, against=scores)
                )
            case Stop():
                return


def recipe_in(folder: Path, streams: int) -> Recipe:
    arithmetic.write(folder / "data", 0)
    save_model(folder / "model", LLAMA | {"max_position_embeddings": 4096}, 0)
    return recipes.load(
        "quickstart",
        [
            f"run.dir={folder}",
            "run.name=run",
            "run.steps=100000",
            f"model.path={folder / 'model'}",
            f"data.tasks.arithmetic.train={folder / 'data' / 'train.jsonl'}",
            f"data.tasks.arithmetic.heldout={folder / 'data' / 'heldout.jsonl'}",
            f"sampling.generations={GENERATIONS}",
            f"pipeline.k={K}",
            f"batch.prompts={4 * streams // GENERATIONS // K}",
            f"length.thinking_tokens=[{CHUNKS[1] * CHUNK},{CHUNKS[1] * CHUNK}]",
            "length.answer_tokens=64",
            f"resources.servers={SERVERS}",
            f"serving.max_running_requests={streams // SERVERS}",
            "evaluation.every=100000",
            "evaluation.prompts=1",
            "evaluation.samples=1",
        ],
    )


def measure(folder: Path, streams: int, rate: float, seconds: float) -> dict[str, Any]:
    recipe = recipe_in(folder, streams)
    servers = StandInServers(folder / "model", streams, streams * CHUNK / rate)
    rundir = RunDir(recipe.run.path)
    rundir.create()
    rundir.recipe.write_text(recipes.dump(recipe))
    port, controller = free_ports(2)
    keys: dict[str, Any] = {
        "api_key": "user",
        "admin_key": "admin",
        "link": LinkKeys.new(),
        "rendezvous_port": 0,
    }
    urls = tuple(f"http://{address(server)}:{port}" for server in range(SERVERS))
    rundir.write_endpoints(
        Endpoints(session="one", controller=f"tcp://127.0.0.1:{controller}", servers=urls, **keys)
    )
    for target, arguments in (
        (lambda: uvloop.run(serve(servers, port)), ()),
        (learn, (rundir, servers)),
    ):
        threading.Thread(target=target, args=arguments, daemon=True).start()
    with (rundir.logs / "controller.log").open("wb") as log:
        command = [sys.executable, "-W", "ignore", "-m", "megarl", "rollout", str(rundir.recipe)]
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        return _measured(process, servers, rundir, seconds)
    finally:
        process.kill()
        process.wait()


def _measured(
    process: subprocess.Popen[bytes], servers: StandInServers, rundir: RunDir, seconds: float
) -> dict[str, Any]:
    watched = psutil.Process(process.pid)

    def used() -> float:
        times = watched.cpu_times()
        return times.user + times.system

    begin = time.monotonic()
    while servers.version < 2:
        ended = process.poll() is not None
        late = time.monotonic() - begin > START_LIMIT_S
        if ended or late:
            why = (
                "the controller ended"
                if ended
                else f"two steps took longer than {START_LIMIT_S:g} s"
            )
            raise SystemExit(f"{why}: {(rundir.logs / 'controller.log').read_text()[-2000:]}")
        print(f"version {servers.version}, {servers.running} requests in flight", file=sys.stderr)
        time.sleep(1)
    print(f"process {process.pid} is measured", file=sys.stderr)
    begin = time.monotonic()
    before = used()
    chunks = servers.chunks
    version = servers.version
    flights = []
    while time.monotonic() - begin < seconds:
        time.sleep(1)
        flights.append(servers.running)
    took = time.monotonic() - begin
    return {
        "requests_in_flight": round(sum(flights) / len(flights)),
        "tokens_a_second": round((servers.chunks - chunks) * CHUNK / took),
        "cores": round((used() - before) / took, 3),
        "resident_mib": watched.memory_info().rss >> 20,
        "steps": servers.version - version,
    }


class EventLoopCost:
    """What the event loop costs while this context lasts."""

    def __init__(self) -> None:
        self.held_s = 0.0
        self.cpu_s = 0.0
        self.longest_s = 0.0

    async def __aenter__(self) -> "EventLoopCost":
        self._ticks = asyncio.create_task(self._tick())
        await asyncio.sleep(10 * TICK_S)
        self.held_s = self.longest_s = 0.0
        self._begin = time.thread_time()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cpu_s = time.thread_time() - self._begin
        self._ticks.cancel()

    async def _tick(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(TICK_S)
            late = time.monotonic() - begin - TICK_S
            self.longest_s = max(self.longest_s, late)
            if late > HELD_S:
                self.held_s += late

    def figures(self) -> dict[str, float]:
        return {
            "loop_cpu_seconds": round(self.cpu_s, 3),
            "loop_held_seconds": round(self.held_s, 3),
            "loop_held_at_most": round(self.longest_s, 3),
        }


class BatchOfJournal:
    """Answers as the controller does: the batch without its experts, then these."""

    def __init__(self, records: JournalWriter, tickets: range) -> None:
        self._records = records
        self._tickets = tickets

    def new_learner(self) -> None:
        pass

    def evaluate_if_due(self, _version: int) -> None:
        pass

    def decide(self, _request: Next) -> TrainStep:
        return TrainStep(0)

    def learner_left(self, _step: int) -> None:
        pass

    async def carry_out(self, _decision: Decision, _request: Next) -> Train:
        batch = Batch(step=0, groups=await self._records.groups(self._tickets))
        return Train(batch=batch, compute_hours=0.0, compute_devices=1, stats={})

    async def experts(self, request: Experts) -> tuple[Reply, list[bytes]]:
        return RecordedExperts(), await self._records.choices(request.ticket, request.rollouts)


def take_experts(address: str, keys: LinkKeys) -> None:
    """Be the learner: take the batch, ask for its experts, a rollout at a time, and
    leave.
    """
    link = ControllerLink(address, keys, lambda: "")
    reply: Reply = decode(link.ask(Next(incarnation="a", step=0, version=0)), Reply)
    assert isinstance(reply, Train)
    for group in reply.batch.groups:
        for position, rollout in enumerate(group.rollouts):
            request = Experts(incarnation="a", step=0, ticket=group.ticket, rollouts=(position,))
            _, choices = link.ask_for_data(request)
            assert rollout.routing is not None
            assert len(choices) == rollout.routing.size
    link.tell(Stopped(incarnation="a", step=1))


def measured_experts(folder: Path, gigabytes: float) -> dict[str, Any]:
    model = architecture.read("qwen3-30b-a3b")
    rollout_bytes = ROWS * model.moe_layers * model.experts_per_token
    tickets = range(round(gigabytes * 1e9 / rollout_bytes / GENERATIONS))
    journal = Journal.open(folder / "rollouts", len(tickets), 8)
    for ticket in tickets:
        journal.append(Admitted(ticket=ticket, task="", prompt_id="", epoch=0, due_step=0))
    tables = np.random.default_rng(0).integers(
        0, model.experts, (ROWS, model.moe_layers, model.experts_per_token), np.uint8
    )
    segment = Segment(
        tokens=np.zeros(ROWS, np.int32), logprobs=np.zeros(ROWS, np.float32), weight_version=0
    )

    async def group(ticket: int) -> Finished:
        rollouts = []
        for sample in range(GENERATIONS):
            routing = await asyncio.to_thread(model.routing, [tables])
            rollouts.append(
                Rollout(
                    sample=sample,
                    segments=(segment,),
                    reward=0.0,
                    correct=False,
                    finish="stop",
                    routing=routing,
                )
            )
        prompt = Prompt(id="", tokens=int32(()), answer="")
        return Finished(
            group=Group(ticket=ticket, prompt=prompt, rollouts=tuple(rollouts)), time=0.0
        )

    async def run() -> dict[str, Any]:
        found: dict[str, Any] = {"gigabytes": len(tickets) * GENERATIONS * rollout_bytes / 1e9}
        records = JournalWriter(journal)
        writing = asyncio.create_task(records.run())
        begin = time.monotonic()
        async with EventLoopCost() as cost:
            for ticket in tickets:
                await records.settle(await group(ticket))
        found["written"] = cost.figures() | {"seconds": round(time.monotonic() - begin, 1)}
        address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
        keys = LinkKeys.new()
        link = Link(address, keys)
        answers: Any = BatchOfJournal(records, tickets)
        conversation = Conversation(link, answers)
        answering = asyncio.create_task(conversation.answer())
        learner = multiprocessing.get_context("spawn").Process(
            target=take_experts, args=(address, keys)
        )
        begin = time.monotonic()
        async with EventLoopCost() as cost:
            learner.start()
            with contextlib.suppress(ConversationOver):
                await conversation.listen()
        found["taken"] = cost.figures() | {"seconds": round(time.monotonic() - begin, 1)}
        learner.join()
        answering.cancel()
        writing.cancel()
        link.close()
        await records.close()
        return found

    return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=100_000.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--experts", type=float)
    options = parser.parse_args()
    # In the end the controller is killed, and its connections with it.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    allow_files(2 * options.streams)
    with tempfile.TemporaryDirectory() as folder:
        if options.experts:
            print(json.dumps(measured_experts(options.folder or Path(folder), options.experts)))
            return
        found = measure(
            (options.folder or Path(folder)).resolve(),
            options.streams,
            options.rate,
            options.seconds,
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
