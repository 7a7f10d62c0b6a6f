"""What grows with the number of servers, tokens and groups on one process: CPU seconds, for scaling-out.md.

    python -m benchmarks.scale [--json FILE]

    routing     Places: one request finds its place among so many servers
    streaming   ServerClient: one chunk of a completion, from a stand-in server in another process
    control     Fleet: one call of a publication to one server, likewise
    journal     one finished group written, and a batch of them read and encoded for the learner

CPU seconds of this process, so that a busy machine matters little; the best of several repeats.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from megarl.core.base.admission import Admission
from megarl.core.base.messages import ServerAddress
from megarl.core.base.types import Batch, Group, Prompt, Rollout, Segment, encode
from megarl.core.journal.journal import Admitted, Finished, Journal
from megarl.core.sampling.places import Places
from megarl.core.server.client import Fleet, ServerClient
from megarl.core.server.membership import Membership

REPEATS = 3
CHUNK = 64
TOKENS = 8192
GENERATIONS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "routing_seconds_a_request": {servers: best(lambda s=servers: routing(s)) for servers in (64, 800, 12800)}
    }
    port: Any = multiprocessing.get_context("spawn").Queue()
    stand_in = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    stand_in.start()
    url = f"http://127.0.0.1:{port.get(timeout=60)}"
    found["streaming_seconds_a_chunk"] = best(lambda: streaming(url))
    found["control_seconds_a_call"] = {n: best(lambda n=n: control(url, n)) for n in (1, 16, 64)}
    stand_in.kill()
    found |= {f"journal_{name}": value for name, value in journal().items()}
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def best(measure: Callable[[], float]) -> float:
    return min(measure() for _ in range(REPEATS))


def routing(servers: int) -> float:
    """All servers half full; groups of 16 requests come to the emptiest and stay there, as tickets do."""

    async def work() -> float:
        membership = Membership([ServerAddress(i, "") for i in range(servers)])
        for i in range(servers):
            membership.seen(i)
        membership.publish(range(servers), 0, "learner")
        for i in range(servers):
            membership.published(i, 0, "learner", "")
        places, admission = Places(membership, 256), Admission(1000, 8)
        for use in places.use.values():
            use.running = 128
        groups = 4 if servers > 1000 else 32
        begin = time.process_time()
        for _ in range(groups):
            ticket = admission.admit()
            home = places.emptiest(lambda version, ticket=ticket: admission.eligible(ticket, version))

            def may_use(server: int, version: int, ticket: int = ticket, home: int | None = home) -> bool:
                held = membership.clean_version(home)
                if server != home and held is not None and admission.eligible(ticket, held):
                    return False
                return admission.eligible(ticket, version)

            for sample in range(GENERATIONS):
                server, _ = await places.take((1, ticket, sample), may_use)
                if sample % 2:
                    places.give_back(server)
        return (time.process_time() - begin) / (groups * GENERATIONS)

    return asyncio.run(work())


def serve(port: Any) -> None:
    """A stand-in: streams TOKENS tokens in chunks, as SGLang writes them, and answers any other call at once."""
    ids = list(range(100_000, 100_000 + CHUNK))
    logprobs = [[-0.123456 - i / 1000, 100_000 + i, None] for i in range(CHUNK)]
    meta: dict[str, Any] = {"id": "x" * 32, "finish_reason": None, "output_token_logprobs": logprobs}
    version = [{"version": "0", "start": 0, "end": TOKENS}]
    end = meta | {"finish_reason": {"type": "length"}, "weight_versions": version}
    events = [{"output_ids": ids, "meta_info": about} for about in (meta, end)]
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        reply = web.StreamResponse()
        await reply.prepare(request)
        for i in range(TOKENS // CHUNK):
            await reply.write(lines[i == TOKENS // CHUNK - 1])
        await reply.write_eof()
        return reply

    async def other(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"success": True, "message": ""})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        app.router.add_route("*", "/{any:.*}", other)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def streaming(url: str) -> float:
    """32 completions of TOKENS tokens at once."""

    async def work() -> float:
        async with ServerClient(ServerAddress(id=0, url=url), "", "", 600) as client:
            prompt = np.arange(256, dtype=np.int32)
            begin = time.process_time()
            await asyncio.gather(*(client.generate(prompt, TOKENS) for _ in range(32)))
            return (time.process_time() - begin) / (32 * TOKENS / CHUNK)

    return asyncio.run(work())


def control(url: str, servers: int) -> float:
    """A bucket's call, whose body names 20 tensors."""
    fleet = Fleet([ServerClient(ServerAddress(i, url), "", "", 60.0) for i in range(servers)], 0)
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(20)]
    call = 20 if servers > 1 else 200
    begin = time.process_time()
    for _ in range(call):
        fleet.each(
            fleet.servers,
            lambda s: s.receive(names, ["bfloat16"] * 20, [[4096, 4096]] * 20, "group", None, False),
        )
    seconds = (time.process_time() - begin) / (call * servers)
    fleet.close()
    return seconds


def journal() -> dict[str, float]:
    """Groups of GENERATIONS rollouts of TOKENS tokens: CPU seconds and bytes of each, written, read, encoded."""
    random = np.random.default_rng(0)

    def group(ticket: int) -> Group:
        def rollout(sample: int) -> Rollout:
            tokens = random.integers(0, 128_000, TOKENS, dtype=np.int32)
            logprobs = random.random(TOKENS, dtype=np.float32)
            segment = Segment(tokens=tokens, logprobs=logprobs, weight_version=0, trained=True)
            return Rollout(sample=sample, segments=(segment,), reward=1.0, correct=True, finish="stop")

        prompt = Prompt(id=str(ticket), tokens=np.arange(256, dtype=np.int32), answer="1")
        return Group(ticket=ticket, prompt=prompt, rollouts=tuple(rollout(i) for i in range(GENERATIONS)))

    groups = [group(i) for i in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        opened = Journal.open(Path(folder) / "rollouts", 16, 8, 1)
        opened.append(*(Admitted(ticket=g.ticket, prompt_id=g.prompt.id, epoch=0) for g in groups))
        begin = time.process_time()
        for g in groups:
            opened.append(Finished(group=g, time=0.0))
        written = time.process_time() - begin
        begin = time.process_time()
        read = opened.groups(range(16))
        encoded = encode(Batch(step=0, groups=read))
        offered = time.process_time() - begin
        opened.close()
    return {
        "write_seconds_a_group": written / 16,
        "offer_seconds_a_group": offered / 16,
        "bytes_a_group": len(encoded) / 16,
    }


if __name__ == "__main__":
    main()
